//! `Endpoint`: where a server is, and the credentials for it, parsed from a URL. Its password never
//! appears in any output.

mod cluster_url;
mod malformed_part;
mod sentinel_url;

use std::{fmt, sync::Arc};

use self::malformed_part::malformed_part;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};

use super::sentinel::Sentinels;
use crate::{
    backend::{
        address::Address,
        discovery::{Discovery, ServerName, host_label, of_host},
        transport::Security,
    },
    error::{LockError, Result},
    sys::display::quote_reply,
};

/// Address and credentials of one server.
pub(crate) struct Endpoint {
    pub(crate) discovery: Box<dyn Discovery>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) db: i64,
    /// The URL asks for TLS.
    pub(crate) wants_tls: bool,
    /// How to speak TLS, if the URL asks for it.
    pub(crate) security: Option<Security>,
    /// Name of the server in messages: host and port, or the path of its socket.
    pub(crate) label: Arc<str>,
    /// Some nodes of a Redis Cluster; empty for a single server.
    pub(crate) cluster: Vec<ServerName>,
    /// The sentinels that name the server.
    pub(crate) sentinels: Option<Sentinels>,
}

/// What runs at a URL.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Topology {
    Server,
    Sentinel,
    Cluster,
}

/// Builds what secures the connections to a host; to one whose name is not known yet if there is
/// none.
pub(crate) type Secure<'a> = dyn Fn(Option<&str>) -> std::result::Result<Security, String> + 'a;

impl Endpoint {
    /// Parses a URL, for output: without what secures connections.
    pub(crate) fn parse(url: &str) -> Result<Endpoint> {
        Endpoint::parse_with(url, None)
    }

    /// Parses a URL. `secure` is called if it asks for TLS.
    pub(crate) fn parse_with(url: &str, secure: Option<&Secure<'_>>) -> Result<Endpoint> {
        let invalid = |reason: String| LockError::InvalidConfig { reason };
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        let (base, topology) = match scheme.rsplit_once('+') {
            Some((base, "sentinel")) if base != "unix" => (base, Topology::Sentinel),
            Some((base, "cluster")) if base != "unix" => (base, Topology::Cluster),
            _ => (scheme, Topology::Server),
        };
        match base {
            "redis" | "valkey" | "unix" | "redis+unix" | "valkey+unix" => {}
            #[cfg(feature = "tls")]
            "rediss" | "valkeys" => {}
            #[cfg(not(feature = "tls"))]
            "rediss" | "valkeys" => {
                return Err(invalid(format!(
                    "the URL asks for TLS ({scheme}://), which is not built in; enable the \
                     feature `tls`, or use redis:// to a local TLS proxy"
                )));
            }
            "mysql" | "mariadb" => return Err(invalid(MYSQL_ADVICE.to_owned())),
            "" => {
                return Err(invalid(format!(
                    "this is not a server URL; write redis:// before the host, or {USABLE_URLS}"
                )));
            }
            // The URL is not repeated, because a misplaced password may be part of the scheme.
            _ => return Err(invalid(format!("the URL has an unknown scheme; {USABLE_URLS}"))),
        }
        if matches!(scheme, "rediss" | "valkeys") && url.ends_with("#insecure") {
            return Err(invalid(format!(
                "the {scheme}:// URL ends in #insecure, but distlock accepts no certificate \
                 without verifying it; remove #insecure, and set Tls::ca_file to the authority \
                 that signed the server's certificate"
            )));
        }
        if has_unsupported_part(url, scheme.contains("unix"), topology) {
            let names = if topology == Topology::Sentinel {
                " (those after ? are sentinel_user and sentinel_pass)"
            } else {
                ""
            };
            return Err(invalid(format!(
                "the {scheme}:// URL has an unsupported part after ? or #{names}; write the \
                 database after a slash (redis://host/1) or as unix:///path?db=1&user=…&pass=…, \
                 and in passwords write ? as %3F and # as %23"
            )));
        }
        if topology == Topology::Server && !scheme.contains("unix") && url.ends_with(',') {
            return Err(invalid(
                "a URL in the list is empty; remove the comma before it".to_owned(),
            ));
        }
        let place = url.rsplit_once('@').map_or(url, |(_, place)| place);
        let is_separator = |c: char| c == ',' || c.is_whitespace();
        if topology == Topology::Server && !scheme.contains("unix") && place.contains(is_separator)
        {
            return Err(invalid(format!(
                "each server of several needs a URL of its own, after a comma: \
                 redis://a,redis://b; {USABLE_URLS}"
            )));
        }
        let is_secure = matches!(base, "rediss" | "valkeys");
        let secure = secure.filter(|_| is_secure);
        let security =
            |host: Option<&str>| secure.map(|secure| secure(host)).transpose().map_err(invalid);
        match topology {
            Topology::Sentinel => {
                return sentinel_url::parse(url, scheme, is_secure, &security);
            }
            Topology::Cluster => return cluster_url::parse(url, scheme, is_secure, &security),
            Topology::Server => {}
        }
        // The parser refuses schemes with which the redis crate itself cannot connect.
        let plain = if is_secure { url.replacen("s://", "://", 1) } else { url.to_owned() };
        let info = parse_plain(&plain, scheme)?;
        let (discovery, label, host): (Box<dyn Discovery>, String, Option<&str>) = match info.addr()
        {
            ConnectionAddr::Tcp(host, port) => {
                (of_host(host, *port), host_label(host, *port), Some(host))
            }
            ConnectionAddr::Unix(path) => {
                (Box::new(Address::Unix(path.clone())), path.display().to_string(), None)
            }
            _ => {
                return Err(invalid(format!(
                    "this kind of address is not supported; {USABLE_URLS}"
                )));
            }
        };
        let security = security(host)?;
        Ok(Endpoint::new(discovery, &label, &info, is_secure, security))
    }

    fn new(
        discovery: Box<dyn Discovery>,
        label: &str,
        info: &ConnectionInfo,
        wants_tls: bool,
        security: Option<Security>,
    ) -> Endpoint {
        let settings = info.redis_settings();
        Endpoint {
            discovery,
            user: non_empty(settings.username()),
            password: non_empty(settings.password()),
            db: settings.db(),
            wants_tls,
            security,
            label: label.escape_debug().to_string().into(),
            cluster: Vec::new(),
            sentinels: None,
        }
    }

    /// Returns the endpoint of a node of this cluster.
    pub(crate) fn of_node(&self, node: &ServerName) -> Endpoint {
        let ServerName { host, port } = node;
        Endpoint {
            discovery: of_host(host, *port),
            user: self.user.clone(),
            password: self.password.clone(),
            db: 0,
            wants_tls: self.wants_tls,
            security: self.security.as_ref().map(|security| security.for_host(host)),
            label: host_label(host, *port).escape_debug().to_string().into(),
            cluster: Vec::new(),
            sentinels: None,
        }
    }

    /// Prepares a text from the server for messages.
    pub(crate) fn quote(&self, text: &str) -> String {
        quote_reply(text, self.password.as_deref())
    }
}

#[cfg(feature = "tls")]
const USABLE_URLS: &str = "supported are redis://[user[:password]@]host[:port][/db], rediss://… \
    with TLS, valkey://…, valkeys://…, redis+sentinel://host,host/master[/db], \
    redis+cluster://host,host and unix:///path";
#[cfg(not(feature = "tls"))]
const USABLE_URLS: &str = "supported are redis://[user[:password]@]host[:port][/db], valkey://…, \
    redis+sentinel://host,host/master[/db], \
    redis+cluster://host,host and unix:///path";

#[cfg(feature = "mysql")]
const MYSQL_ADVICE: &str =
    "the URL is that of a MySQL or MariaDB server; use MySqlMgr and MySqlConfig for it";
#[cfg(not(feature = "mysql"))]
const MYSQL_ADVICE: &str = "the URL is that of a MySQL or MariaDB server; enable the feature \
    `mysql`, and use MySqlMgr and MySqlConfig for it";

fn non_empty(text: Option<&str>) -> Option<String> {
    text.filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Parses a URL without TLS. Messages name its scheme as `scheme`.
fn parse_plain(plain: &str, scheme: &str) -> Result<ConnectionInfo> {
    // The parser's own message does not name the part, or quotes it.
    let parsed = escape_query_plus(plain, scheme.contains("unix")).into_connection_info().ok();
    parsed.filter(|info| !matches!(info.addr(), ConnectionAddr::Tcp(_, 0))).ok_or_else(|| {
        let part = malformed_part(plain);
        let reason = format!("the {scheme}:// URL is invalid: {part}; {USABLE_URLS}");
        LockError::InvalidConfig { reason }
    })
}

/// Whether the URL has a part that the parser would ignore. Ignoring it could select another
/// database or leave out a password.
fn has_unsupported_part(url: &str, is_unix: bool, topology: Topology) -> bool {
    let known: &[&str] = match (is_unix, topology) {
        (true, _) => &["db", "user", "pass", "protocol"],
        (false, Topology::Sentinel) => &["sentinel_user", "sentinel_pass"],
        (false, Topology::Server | Topology::Cluster) => &["protocol"],
    };
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let mut names =
        query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(name, _)| name));
    url.contains('#') || names.any(|name| !name.is_empty() && !known.contains(&name))
}

/// Escapes plus signs in a query, where the parser would read them as spaces.
fn escape_query_plus(url: &str, is_unix: bool) -> String {
    match url.split_once('?') {
        Some((path, query)) if is_unix => format!("{path}?{}", query.replace('+', "%2B")),
        _ => url.to_owned(),
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("server", &self.label)
            .field("db", &self.db)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::Moment;
    use proptest::prelude::*;

    fn reason(url: &str) -> String {
        match Endpoint::parse(url) {
            Err(LockError::InvalidConfig { reason }) => reason,
            other => panic!("expected {url:?} to be rejected, got {other:?}"),
        }
    }

    /// Fault: N122
    #[test]
    fn url_of_every_kind_is_parsed() {
        let endpoint = Endpoint::parse("redis://us%20er:p%40ss@[::1]:7000/3").unwrap();
        let addresses = |endpoint: &Endpoint| endpoint.discovery.resolve(Moment::NEVER).unwrap();
        assert_eq!(addresses(&endpoint), [Address::Tcp("[::1]:7000".parse().unwrap())]);
        assert_eq!(
            (endpoint.user.as_deref(), endpoint.password.as_deref(), endpoint.db),
            (Some("us er"), Some("p@ss"), 3)
        );
        assert_eq!(&*endpoint.label, "[::1]:7000");
        let endpoint = Endpoint::parse("valkey://example.org").unwrap();
        assert_eq!(&*endpoint.label, "example.org:6379");
        let endpoint = Endpoint::parse("unix:///run/redis.sock?db=2&pass=x").unwrap();
        assert_eq!(addresses(&endpoint), [Address::Unix("/run/redis.sock".into())]);
        assert_eq!((endpoint.password.as_deref(), endpoint.db), (Some("x"), 2));
        for url in ["unix:///run/a+b?pass=a+b%2Fc%20d", "redis://:a+b%2Fc%20d@h"] {
            assert_eq!(Endpoint::parse(url).unwrap().password.as_deref(), Some("a+b/c d"), "{url}");
        }
    }

    #[test]
    fn unsupported_url_error_lists_usable_urls() {
        #[cfg(not(feature = "tls"))]
        assert!(reason("rediss://h").contains("feature `tls`"));
        #[cfg(feature = "tls")]
        assert!(Endpoint::parse("rediss://h").unwrap().wants_tls);
        assert!(reason("http://h").contains("unknown scheme"));
        for url in [
            "",
            "localhost",
            "redis://",
            "redis://h:port",
            "redis://h:99999",
            "redis://h/notadb",
            ":pw@x://",
        ] {
            assert!(reason(url).contains("supported are"), "{url}");
        }
    }

    #[test]
    fn unsupported_url_part_is_rejected() {
        for url in [
            "redis://h/?db=1",
            "redis://h?password=x",
            "redis://h#insecure",
            "redis://:pa?ss@h",
            "redis://:pa#ss@h",
            "unix:///s?database=1",
            "unix:///s?db=1&password=x",
            "unix:///s?db=1#2",
        ] {
            let reason = reason(url);
            assert!(
                reason.contains("an unsupported part") && !reason.contains("ss@"),
                "{url}: {reason}"
            );
        }
        #[cfg(feature = "tls")]
        for url in ["rediss://h/#insecure", "valkeys://:pass@h#insecure"] {
            let reason = reason(url);
            assert!(reason.contains("without verifying it; remove #insecure"), "{reason}");
            assert!(!reason.contains(":pass"), "{reason}");
        }
        for url in
            ["redis://h/1?protocol=resp3", "redis://h?", "unix:///s?db=1&user=a&pass=b&protocol=2"]
        {
            assert!(Endpoint::parse(url).is_ok(), "{url}");
        }
    }

    /// Fault: F74
    #[test]
    fn password_at_the_cut_is_fully_redacted() {
        let password = "0123456789abcdefghijklmnopqrstuvwxyz";
        let endpoint = Endpoint::parse(&format!("redis://:{password}@h")).unwrap();
        for before in 256 - password.len()..256 {
            let quoted = endpoint.quote(&format!("{}{password} {password}", " ".repeat(before)));
            assert!(!quoted.contains('0') && quoted.chars().count() <= 256, "{quoted:?}");
        }
    }

    proptest! {
        /// Fault: F74
        #[test]
        fn output_never_contains_the_password(
            password in "[A-Za-z0-9]{12,24}",
            rest in "[a-z:/,0-9]{0,12}",
        ) {
            for url in [
                format!("redis://:{password}@h{rest}"),
                format!("redis://{password}"),
                format!("{password}://h{rest}"),
                format!("unix:///s?pass={password}&db={rest}"),
                format!("rediss://:{password}@h{rest}"),
            ] {
                let shown = match Endpoint::parse(&url) {
                    // A host name is not secret, even if it looks like a password.
                    Ok(endpoint) if endpoint.password.is_none() => continue,
                    Ok(endpoint) => format!(
                        "{endpoint:?} {}",
                        endpoint.quote(&format!("no {password} here"))
                    ),
                    Err(error) => format!("{error} {error:?}"),
                };
                prop_assert!(!shown.contains(&password), "{shown}");
            }
        }
    }
}
