//! Which part of a URL is malformed. Pure.

/// Names the first malformed part of a URL that was refused, without quoting it, because a
/// misplaced password may be in it.
pub(super) fn malformed_part(url: &str) -> &'static str {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let is_number = |db: &str| db.is_empty() || db.parse::<i64>().is_ok();
    if scheme.contains("unix") {
        if !rest.starts_with('/') {
            return "the path of the socket does not begin with /";
        }
        let mut dbs = query.split('&').filter_map(|pair| pair.strip_prefix("db="));
        let has_numbers = dbs.all(|db| db.parse::<i64>().is_ok());
        return if has_numbers { UNKNOWN } else { "the database is not a number" };
    }
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if path.contains('@') {
        return "there is a / before the @, which is %2F in names and passwords";
    }
    let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    let (host, port) = match place.split_once(']') {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
    };
    match host {
        "" => "the host is missing",
        "0.0.0.0" | "[::" => "0.0.0.0 and [::] are not addresses of a server",
        _ if port.is_some_and(|port| {
            !port.is_empty() && !port.parse().is_ok_and(|port: u16| port > 0)
        }) =>
        {
            "the port is not a number from 1 to 65535"
        }
        _ if !is_number(path.trim_matches('/')) => "the database is not a number",
        _ => UNKNOWN,
    }
}

const UNKNOWN: &str = "some part is malformed";

#[cfg(test)]
mod tests {
    use crate::backend::redis::Endpoint;

    #[test]
    fn malformed_part_is_named_but_not_quoted() {
        for (url, part) in [
            ("redis://localhost:99999", "the port is not a number"),
            ("redis://localhost:0", "the port is not a number"),
            ("redis://u:secret@localhost:secret/1", "the port is not a number"),
            ("redis://u:secret", "the port is not a number"),
            ("redis://[::1]:x", "the port is not a number"),
            ("redis://u:sec/ret@h", "%2F in names and passwords"),
            ("redis://localhost/secret", "the database is not a number"),
            ("unix:///s?pass=secret&db=secret", "the database is not a number"),
            ("unix://relative", "does not begin with /"),
            ("redis://", "the host is missing"),
            ("redis://:secret@/1", "the host is missing"),
            ("redis://0.0.0.0", "are not addresses"),
            ("redis://10.0.0.1,10.0.0.2", "needs a URL of its own"),
            ("redis://:secret@h1:1,h2:2/1", "needs a URL of its own"),
            ("redis://h1,", "a URL in the list is empty"),
            ("redis://h1:7,", "a URL in the list is empty"),
            ("redis://:%ff@h", "some part is malformed"),
            ("redis+cluster://h:99999", "the port is not a number"),
            ("redis+sentinel://h/main/secret", "the database is not a number"),
        ] {
            let error = Endpoint::parse(url).unwrap_err().to_string();
            assert!(error.contains(part), "{url}: {error}");
            assert!(!error.contains("ret"), "{url}: {error}");
        }
    }
}
