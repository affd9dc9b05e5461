//! URLs of masters that Sentinel names:
//! `redis+sentinel://[user[:password]@]host[:port],…/master[/db][?sentinel_user=…&sentinel_pass=…]`.
//! User, password and database are those of the master.

use redis::ConnectionAddr;

use super::{Endpoint, non_empty, parse_plain};
use crate::{
    backend::{
        discovery::{host_label, of_host},
        redis::node::sentinel::{Sentinel, Sentinels},
        transport::Security,
    },
    error::{LockError, Result},
};

const DEFAULT_PORT: u16 = 26379;

pub(super) fn parse(
    url: &str,
    scheme: &str,
    is_secure: bool,
    security: &dyn Fn(Option<&str>) -> Result<Option<Security>>,
) -> Result<Endpoint> {
    let invalid = |reason: &str| {
        let reason = format!(
            "the {scheme}:// URL is invalid: {reason}; write \
             {scheme}://[user[:password]@]host[:26379],host/master[/db]"
        );
        LockError::InvalidConfig { reason }
    };
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (login, rest) = rest.rsplit_once('@').map_or(("", rest), |(login, rest)| (login, rest));
    let Some((hosts, path)) = rest.split_once('/') else {
        return Err(invalid("the name of the master is missing"));
    };
    let (service, db) = path.split_once('/').unwrap_or((path, ""));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if service.is_empty() || !service.bytes().all(is_plain) {
        return Err(invalid(
            "the name of the master must consist of letters, digits, dots, dashes and underscores",
        ));
    }
    let sentinel_login = sentinel_login(query);
    let (mut sentinels, mut labels) = (Vec::new(), Vec::new());
    for host in hosts.split(',') {
        if host.trim().is_empty() {
            return Err(invalid("a sentinel has no host"));
        }
        let port = if has_port(host) { String::new() } else { format!(":{DEFAULT_PORT}") };
        let info = parse_plain(&format!("redis://{sentinel_login}{}{port}", host.trim()), scheme)?;
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(invalid("a sentinel has no host"));
        };
        let settings = info.redis_settings();
        labels.push(host_label(host, *port));
        sentinels.push(Sentinel {
            label: host_label(host, *port),
            discovery: of_host(host, *port),
            user: non_empty(settings.username()),
            password: non_empty(settings.password()),
            security: security(Some(host))?,
        });
    }
    let at = if login.is_empty() { "" } else { "@" };
    // Where the master is, the sentinels say. This host stands for it.
    let master = parse_plain(&format!("redis://{login}{at}master/{db}"), scheme)?;
    let label = format!("{service} (sentinels {})", labels.join(", "));
    let sentinels = Sentinels::new(service.to_owned(), sentinels);
    let discovery = Box::new(sentinels.clone());
    let endpoint = Endpoint::new(discovery, &label, &master, is_secure, security(None)?);
    Ok(Endpoint { sentinels: Some(sentinels), ..endpoint })
}

/// User and password for the sentinels, in the form that they have in a URL.
fn sentinel_login(query: &str) -> String {
    let value = |name: &str| {
        let found = query.split('&').filter_map(|pair| pair.split_once('='));
        let value = found.filter(|(key, _)| *key == name).map(|(_, value)| value).next();
        let value = value.unwrap_or_default();
        value.replace('/', "%2F").replace('@', "%40").replace(':', "%3A")
    };
    match (value("sentinel_user"), value("sentinel_pass")) {
        (user, password) if user.is_empty() && password.is_empty() => String::new(),
        (user, password) => format!("{user}:{password}@"),
    }
}

/// Whether a port follows the host, which may be an IPv6 address in brackets.
fn has_port(host: &str) -> bool {
    let after = host.rsplit_once(']').map_or(host, |(_, after)| after);
    after.contains(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_a_master_behind_sentinels_is_parsed() {
        let url = "redis+sentinel://app:p%40ss@s1,s2:7,[::1]/my-master.1/3\
                   ?sentinel_user=w&sentinel_pass=a/b%2Fc";
        let endpoint = Endpoint::parse(url).unwrap();
        assert_eq!(
            (endpoint.user.as_deref(), endpoint.password.as_deref(), endpoint.db),
            (Some("app"), Some("p@ss"), 3)
        );
        assert_eq!(&*endpoint.label, "my-master.1 (sentinels s1:26379, s2:7, [::1]:26379)");
        let shown = format!("{endpoint:?} {:?}", endpoint.discovery);
        assert!(!shown.contains("ss") && !shown.contains("a/b"), "{shown}");
        assert_eq!(sentinel_login("sentinel_user=w&sentinel_pass=a/b%2Fc"), "w:a%2Fb%2Fc@");
        assert_eq!(Endpoint::parse("valkey+sentinel://h/m").unwrap().db, 0);
    }

    #[test]
    fn incomplete_url_says_what_to_write() {
        for (url, says) in [
            ("redis+sentinel://h", "the name of the master is missing"),
            ("redis+sentinel://h/", "must consist of letters"),
            ("redis+sentinel://h/a b", "must consist of letters"),
            ("redis+sentinel://h,,i/m", "a sentinel has no host"),
            ("redis+sentinel:///m", "a sentinel has no host"),
            ("redis+sentinel://h:port/m", "invalid"),
            ("redis+sentinel://h/m/db", "invalid"),
            ("redis+sentinel://h/m?db=1", "sentinel_user and sentinel_pass"),
            ("unix+sentinel:///path/m", "unknown scheme"),
        ] {
            let text = Endpoint::parse(url).unwrap_err().to_string();
            assert!(text.contains(says), "{url}: {text}");
        }
    }
}
