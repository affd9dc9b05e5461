//! Several URLs in one text. Pure.

/// Splits only at commas that are followed by another URL, because a password may contain commas.
pub(super) fn split_urls(urls: &str) -> Vec<String> {
    let mut list: Vec<String> = Vec::new();
    for piece in urls.split(',') {
        let piece_is_url = piece.trim_start().split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty()
                && scheme.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'+')
        });
        match list.last_mut() {
            Some(last) if !piece_is_url => {
                last.push(',');
                last.push_str(piece);
            }
            _ => list.push(piece.trim().to_owned()),
        }
    }
    list
}

/// Schemes are the same in upper and lower case.
pub(super) fn with_lower_case_scheme(mut url: String) -> String {
    if let Some(end) = url.find("://") {
        url[..end].make_ascii_lowercase();
    }
    url
}

/// The URL of a single server behind the sentinels or in the cluster of `url`, with the same login,
/// database and security.
pub(super) fn at_server(url: &str, server: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("redis", url));
    let base = scheme.split_once('+').map_or(scheme, |(base, _)| base);
    let rest = rest.split_once('?').map_or(rest, |(rest, _)| rest);
    let (login, rest) = rest.rsplit_once('@').map_or(("", rest), |(login, rest)| (login, rest));
    let at = if login.is_empty() { "" } else { "@" };
    let db = rest.splitn(3, '/').nth(2).unwrap_or_default();
    format!("{base}://{login}{at}{server}/{db}")
}

#[cfg(test)]
mod tests {
    use super::at_server;
    use crate::Config;

    #[test]
    fn single_server_has_the_same_login_and_database() {
        for (url, server) in [
            ("redis+sentinel://h/m", "redis://r:1/"),
            ("rediss+sentinel://u:p%40@h,i/m/3?sentinel_user=a", "rediss://u:p%40@r:1/3"),
            ("redis+cluster://h1,h2:7", "redis://r:1/"),
            ("rediss+cluster://u:p@h1,h2", "rediss://u:p@r:1/"),
        ] {
            assert_eq!(at_server(url, "r:1"), server);
        }
    }

    #[test]
    fn scheme_may_be_in_upper_case() {
        let config = Config::new("REDIS://:SeCret@H1,Valkey+Cluster://:x@h2");
        assert_eq!(config.urls, ["redis://:SeCret@H1", "valkey+cluster://:x@h2"]);
    }

    #[test]
    fn comma_in_a_password_does_not_split_urls() {
        let config = Config::new(
            "redis://:a,b@h1:1, redis://u:c%2Cd@h2:2,unix:///s?pass=e,f,valkey://:,,g@h3:3",
        );
        let endpoints = config.validate().unwrap().endpoints;
        let read: Vec<_> = endpoints
            .iter()
            .map(|endpoint| (&*endpoint.label, endpoint.password.as_deref().unwrap()))
            .collect();
        assert_eq!(read, [("h1:1", "a,b"), ("h2:2", "c,d"), ("/s", "e,f"), ("h3:3", ",,g")]);
    }
}
