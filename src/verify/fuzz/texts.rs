//! What users and environments provide: names, patterns, ids, URLs and configurations.

use std::time::Duration;

use super::{corpus, fuzz};
use crate::{
    backend::redis::{Endpoint, requests::list::key_pattern},
    config::Config,
    core::{
        id::{LockId, Parts},
        key::{LockKey, MAX_NAME_BYTES},
    },
    sys::display::Quoted,
};

/// Password in the corpus.
const SECRET: &str = "hunter2-9d1f";

fn text(input: &[u8]) -> String {
    String::from_utf8_lossy(input).into_owned()
}

fn printable(text: &str) {
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

#[test]
fn identifiers() {
    fuzz(corpus("identifiers"), |input: &Vec<u8>| {
        let text = text(input);
        let parts = Parts::parse(&text);
        match text.parse::<LockId>() {
            Ok(id) => {
                assert_eq!((id.as_str(), id.to_string()), (text.as_str(), text.clone()));
                let parts = parts.unwrap();
                assert_eq!((id.host(), id.pid(), id.tid()), (parts.host, parts.pid, parts.tid));
                assert!(!id.host().is_empty() && text.len() <= 512);
                printable(&text);
                2
            }
            Err(error) => {
                assert!(parts.is_none_or(|parts| parts.uuid.is_none()));
                assert!(error.to_string().len() < 200);
                u64::from(parts.is_some())
            }
        }
    });
}

#[test]
fn names() {
    fuzz(corpus("names"), |input: &Vec<u8>| {
        let text = text(input);
        let mut parts = text.split('\0');
        let (prefix, a, b) =
            (parts.next().unwrap_or(""), parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        printable(&Quoted(a).to_string());
        let keys = |name| {
            let key = LockKey::new(prefix, name).ok()?;
            assert_eq!(key.name(), name);
            assert!(key.lock_key().len() <= MAX_NAME_BYTES);
            Some([key.lock_key().to_owned(), key.queue_key().concat(), key.token_key().concat()])
        };
        let (Some(left), Some(right)) = (keys(a), keys(b)) else { return 0 };
        let shared = left.iter().any(|key| right.contains(key));
        assert_eq!(shared, a == b, "{left:?} {right:?}");
        1 + u64::from(shared)
    });
}

/// Whether a key matches a pattern of Redis whose stars are escaped or at the end.
fn matches_key(pattern: &str, key: &str) -> bool {
    let (mut pattern, mut key) = (pattern.chars(), key.chars());
    loop {
        match pattern.next() {
            None => return key.next().is_none(),
            Some('*') if pattern.as_str().is_empty() => return true,
            Some('\\') => {
                if pattern.next() != key.next() {
                    return false;
                }
            }
            Some(letter) => {
                assert!(!"*?[]".contains(letter), "a character of the prefix is not escaped");
                if key.next() != Some(letter) {
                    return false;
                }
            }
        }
    }
}

#[test]
fn patterns() {
    fuzz(corpus("names"), |input: &Vec<u8>| {
        let text = text(input);
        let (prefix, name) = text.split_once('\0').unwrap_or((&text, ""));
        let pattern = key_pattern(prefix, "*");
        assert!(matches_key(&pattern, &[prefix, name].concat()), "{pattern:?}");
        let matches_name = matches_key(&pattern, name);
        assert_eq!(matches_name, name.starts_with(prefix), "{pattern:?}");
        u64::from(matches_name)
    });
}

#[test]
fn urls() {
    fuzz(corpus("urls"), |input: &Vec<u8>| {
        let text = text(input);
        match Endpoint::parse(&text) {
            Ok(endpoint) => {
                printable(&endpoint.label);
                assert!(!endpoint.password.as_ref().is_some_and(String::is_empty));
                let said = endpoint.quote(&format!(
                    "no {} here\u{1b}",
                    endpoint.password.as_deref().unwrap_or("")
                ));
                printable(&said);
                hides(
                    &endpoint.label,
                    endpoint.password.as_deref(),
                    &format!("{endpoint:?} {said}"),
                );
                1 + u64::from(endpoint.password.is_some()) + 2 * u64::from(endpoint.db != 0)
            }
            Err(error) => {
                let said = format!("{error} {error:?}");
                assert!(!said.contains(SECRET), "{said}");
                printable(&said);
                assert!(said.len() < 2048, "{} bytes", said.len());
                0
            }
        }
    });
}

/// Checks that no output contains a password, unless the server's label contains it too.
fn hides(label: &str, secret: Option<&str>, said: &str) {
    if let Some(secret) = secret
        && secret.contains(SECRET)
        && !label.contains(SECRET)
    {
        assert!(!said.contains(SECRET), "{said}");
    }
}

#[test]
fn configurations() {
    fuzz(corpus("configurations"), |input: &Vec<u8>| {
        let text = text(input);
        let mut lines = text.split('\n');
        let mut line = || lines.next().unwrap_or_default();
        let (urls, password, prefix) = (line(), line(), line());
        let mut millis = || Duration::from_millis(line().trim().parse().unwrap_or(u64::MAX));
        let config = Config::new(urls)
            .password(password)
            .prefix(prefix)
            .ttl(millis())
            .operation_timeout(millis());
        let config = config.claim_window(millis()).quarantine(millis()).max_hold(millis());
        let checked = config.validate();
        let shown = format!("{config:?} {checked:?}");
        // Where the text is also a host or a prefix of lock names, it is not secret.
        let shows = |text: &str| text.contains(SECRET);
        let named = config
            .validate()
            .is_ok_and(|settings| settings.endpoints.iter().any(|server| shows(&server.label)));
        if shown.contains(SECRET) && !named && !shows(prefix) {
            // It may be the host of a URL beside others that are invalid. A URL may contain commas.
            let pieces: Vec<_> = urls.split(',').collect();
            let urls = (0..pieces.len())
                .flat_map(|begin| (begin..pieces.len()).map(move |end| (begin, end)));
            let mut hosts = urls.filter_map(|(begin, end)| {
                Endpoint::parse(pieces[begin..=end].join(",").trim()).ok()
            });
            assert!(hosts.any(|server| shows(&server.label)), "{shown}");
        }
        match checked {
            Ok(config) => {
                assert!(
                    !config.endpoints.is_empty() && config.settings.prefix.len() < MAX_NAME_BYTES
                );
                1 + config.endpoints.len() as u64
            }
            Err(error) => {
                printable(&error.to_string());
                0
            }
        }
    });
}
