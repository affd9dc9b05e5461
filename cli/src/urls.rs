//! Splits lists of server URLs, and finds passwords in them.

use std::net::Ipv6Addr;

/// Whether any of the URLs seems to contain a password, which in a malformed URL may stand
/// anywhere.
pub(crate) fn has_password(urls: &str) -> bool {
    split_urls(urls).any(|url| {
        let has_login = match url.rsplit_once('@') {
            // The colon of the scheme does not separate a password.
            Some((user, _)) => user.replacen("://", "", 1).contains(':'),
            None => {
                let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
                let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
                let separator = if names_several_hosts(scheme) { "," } else { "://" };
                !authority.split(separator).all(is_host_and_port)
            }
        };
        let query = url.split_once('?').map_or("", |(_, query)| query);
        let is_password =
            |pair: &str| ["pass", "sentinel_pass"].iter().any(|name| pair.starts_with(name));
        has_login || query.split('&').any(is_password)
    })
}

/// Whether the URL is that of a MySQL or MariaDB server.
pub(crate) fn is_mysql(url: &str) -> bool {
    let scheme = url.trim_start().split_once("://").map(|(scheme, _)| scheme);
    let is = |known: &str| scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(known));
    is("mysql") || is("mariadb")
}

/// Splits a comma-separated list as the library does: at a comma that a scheme follows. A password
/// may contain such a comma too. Then the first part ends in a port that is not a number, by which
/// [`has_password`] still notices it, unless that piece of the password is a number.
pub(crate) fn split_urls(urls: &str) -> impl Iterator<Item = &str> {
    let is_end = |at: &usize| {
        let next = urls[at + 1..].split(',').next().unwrap_or_default();
        next.trim_start().split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty()
                && scheme.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'+')
        })
    };
    let ends: Vec<usize> =
        urls.match_indices(',').map(|(at, _)| at).filter(is_end).chain([urls.len()]).collect();
    let begins = [0].into_iter().chain(ends.clone().into_iter().map(|end| end + 1));
    begins.zip(ends).map(|(begin, end)| &urls[begin..end])
}

/// Returns the URL of a single server with the same login, for a URL that names several hosts.
pub(crate) fn with_one_host(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) if names_several_hosts(scheme) => {
            let (login, hosts) = rest.rsplit_once('@').unwrap_or(("", rest));
            let host = hosts.split([',', '/', '?']).next().unwrap_or_default();
            let at = if login.is_empty() { "" } else { "@" };
            format!("redis://{login}{at}{host}")
        }
        _ => url.to_owned(),
    }
}

/// Whether URLs with this scheme, in upper or lower case, name sentinels or nodes.
fn names_several_hosts(scheme: &str) -> bool {
    let scheme = scheme.to_ascii_lowercase();
    scheme.ends_with("+cluster") || scheme.ends_with("+sentinel")
}

/// Whether this is a host, with at most a numeric port after a colon.
fn is_host_and_port(authority: &str) -> bool {
    let bracketed = authority.strip_prefix('[').and_then(|inner| inner.split_once(']'));
    let host_and_port = match bracketed {
        Some((host, port)) if host.parse::<Ipv6Addr>().is_ok() => port,
        _ => authority,
    };
    let port = host_and_port.split_once(':').map(|(_, port)| port);
    port.is_none_or(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: F74
    #[test]
    fn password_in_url_is_detected() {
        for url in [
            "redis://:x@h",
            "redis://u:x@h:1/2",
            "u:x@h",
            "redis://a:b@c@d",
            "unix:///s?db=1&pass=x",
            // In one of several URLs.
            "redis://h:1,redis://u:x@h",
            "redis://u:x,y@h,redis://h",
            "unix:///s?pass=x,redis://h",
            // The password contains a separator of URLs or of the parts of a URL.
            "redis://u:x://u@h:6379/1,redis://i",
            "redis://u:x,s3://y@h",
            "redis://u:x,unix://y@h",
            "redis://u:1/x@h",
            "redis://u:1?x@h",
            "redis://u:1#x@h",
            // Malformed.
            "redis:u:x@://h",
            "redis:u:x@h,redis://i",
            "redis://u:x",
            "redis://u:x:6379",
            "redis://u:/x",
            "redis://[u:x]:6379",
            "--url=redis://u:x,redis://h",
            "redis+sentinel://h:1,i:2/main?sentinel_pass=x",
            "redis+cluster://u:x@h:1,i:2",
            "redis+cluster://h:1,i:x",
            "redis+sentinel://u:x@h:1,i:2/main",
            "redis+sentinel://h:1,i:x/main",
            "mysql://u:x@h/shop",
            "mysql://u:x@localhost/shop?socket=/s",
        ] {
            assert!(has_password(url), "{url}");
        }
    }

    #[test]
    fn schemes_are_the_same_in_upper_case() {
        assert!(is_mysql("MySQL://h/shop") && is_mysql("mariadb://h/shop"));
        assert!(!is_mysql("redis://h") && !is_mysql("mysql"));
        assert_eq!(with_one_host("Redis+Cluster://u@h:1,i:2"), "redis://u@h:1");
    }

    #[test]
    fn host_port_and_user_are_not_passwords() {
        for url in [
            "",
            "h",
            "redis://h:6379",
            "--url=redis://u@h:6379/0",
            "redis://[::1]:7",
            "redis://[::1]",
            "redis://h:1?db=2#x",
            "unix:///s?db=1",
            "redis://h:1,redis://u@h",
            "redis+cluster://u@h:1,i:2,[::1]:3",
            "redis+sentinel://h:1,i:2,[::1]:3/main/0",
            "redis+sentinel://u@h:1,i/main?sentinel_user=w",
            "redis://u@h:1/2, valkey+unix://v@h,unix:///s",
            "mysql://app@h:3306/shop",
            "REDIS+Cluster://h:1,i:2",
            "mysql://app@localhost/shop?socket=/run/mysqld/mysqld.sock",
        ] {
            assert!(!has_password(url), "{url}");
        }
    }
}
