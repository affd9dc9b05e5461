//! Splits lists of server URLs, and finds passwords in them.

use std::net::Ipv6Addr;

/// Whether any of the URLs seems to contain a password, which in a malformed URL may stand
/// anywhere.
pub(crate) fn has_password(urls: &str) -> bool {
    // The library reports the empty URL after a comma at the end.
    let is_blank = |c: char| c == ',' || c.is_whitespace();
    split_urls(urls).map(|url| url.trim_matches(is_blank)).any(|url| {
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

/// What a URL contains to sign in with.
pub(crate) struct Login {
    /// `None` for the default user.
    pub(crate) user: Option<String>,
    /// Passwords of the servers and of their sentinels.
    pub(crate) passwords: Vec<String>,
}

/// Finds the login in a URL of any kind that the library accepts. Does not fail, because a password
/// that is not found is not removed from messages.
pub(crate) fn login_of(url: &str) -> Login {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = place.split('/').next().unwrap_or_default();
    let login = authority.rsplit_once('@').map_or("", |(login, _)| login);
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let texts = |text, names: &[&str]| -> Vec<String> {
        let values = pairs.clone().filter(|(name, _)| names.contains(name)).map(|(_, value)| value);
        [text].into_iter().chain(values).map(decode).filter(|text| !text.is_empty()).collect()
    };
    Login {
        user: texts(user, &["user"]).pop(),
        passwords: texts(password, &["pass", "sentinel_pass"]),
    }
}

/// Replaces codes such as `%2F`, and removes what parsers of URLs skip.
fn decode(text: &str) -> String {
    let text = text.replace(['\t', '\n', '\r'], "");
    let mut pieces = text.split('%');
    let mut decoded = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let code = piece.get(..2).filter(|code| code.bytes().all(|byte| byte.is_ascii_hexdigit()));
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                decoded.extend(piece.bytes().skip(2));
            }
            None => decoded.extend([b'%'].into_iter().chain(piece.bytes())),
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
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
            "redis://u:x, ",
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
    }

    /// Fault: N207
    #[test]
    fn login_is_found_in_urls_of_every_kind() {
        for (url, user, passwords) in [
            ("redis://h", None, &[][..]),
            ("redis://app@h:1/2", Some("app"), &[]),
            ("redis://:p@h", None, &["p"]),
            ("redis://u%20r:p%40s%2Fs@[::1]:7000/3", Some("u r"), &["p@s/s"]),
            ("redis://u:p:q@r@h", Some("u"), &["p:q@r"]),
            ("redis://u:100%zz+%+f@h", Some("u"), &["100%zz+%+f"]),
            ("redis://u:p\tq%c3%a9\n@h", Some("u"), &["pqé"]),
            (" rediss://app:p@h", Some("app"), &["p"]),
            ("REDISS://app:p@h", Some("app"), &["p"]),
            ("valkey://app:p@h", Some("app"), &["p"]),
            ("valkeys://app:p@h/1?protocol=resp3", Some("app"), &["p"]),
            ("unix:///s?db=1&user=app&pass=a+b%2Fc", Some("app"), &["a+b/c"]),
            ("redis+unix:///s?pass=p", None, &["p"]),
            ("valkey+unix:///a:b@c?user=app&pass=p", Some("app"), &["p"]),
            ("redis+cluster://app:p@h:1,i:2", Some("app"), &["p"]),
            ("valkeys+cluster://app:p@h:1,i:2/0", Some("app"), &["p"]),
            ("redis+sentinel://app:p@h:1,i/main/1", Some("app"), &["p"]),
            (
                "rediss+sentinel://app:p@h,i/main?sentinel_user=w&sentinel_pass=a/b:%40",
                Some("app"),
                &["p", "a/b:@"],
            ),
            ("mysql://app:s%40cret@h:3306/shop", Some("app"), &["s@cret"]),
            ("mariadb://app:p@localhost/shop?socket=/s", Some("app"), &["p"]),
        ] {
            let login = login_of(url);
            assert_eq!(login.user.as_deref(), user, "{url:?}");
            assert_eq!(login.passwords, passwords, "{url:?}");
        }
    }

    #[test]
    fn host_port_and_user_are_not_passwords() {
        for url in [
            "",
            "h",
            "redis://h:6379",
            "redis://h:1,",
            " redis://h:1 , , redis://h:2 ",
            "redis+cluster://h:1,i:2, ",
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
