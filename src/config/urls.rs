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

/// Turns the URL of a cluster into that of one of its nodes.
pub(super) fn of_cluster_node(url: &str, address: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("redis", url));
    let scheme = scheme.strip_suffix("+cluster").unwrap_or(scheme);
    let login = rest.rsplit_once('@').map_or(String::new(), |(login, _)| format!("{login}@"));
    format!("{scheme}://{login}{address}")
}

#[cfg(test)]
mod tests {
    use super::of_cluster_node;
    use crate::Config;

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

    #[test]
    fn node_of_a_cluster_has_the_same_login() {
        for (url, node) in [
            ("redis+cluster://h1,h2:7", "redis://n:1"),
            ("rediss+cluster://u:p@h1,h2", "rediss://u:p@n:1"),
        ] {
            assert_eq!(of_cluster_node(url, "n:1"), node);
        }
    }
}
