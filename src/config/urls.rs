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

#[cfg(test)]
mod tests {
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
}
