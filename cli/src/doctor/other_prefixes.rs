//! Looks for locks of programs whose prefix may begin ours. With `a:` and `a:b:`, two names can be
//! one lock.

use redis::{RedisError, Value};

use super::{
    facts::{NodeFacts, Requirements},
    finding::Finding,
};
use crate::format;

/// Only the beginning of a large database is scanned: 100 calls of 1,000 keys each.
const SCAN_CALLS_MAX: usize = 100;

/// Lists the keys of locks that do not begin with `prefix`, as their token keys show them. Returns
/// what was found before an error.
pub(super) fn find_locks_elsewhere(
    prefix: &str,
    mut query: impl FnMut(&[&str]) -> Result<Value, RedisError>,
) -> Vec<String> {
    let mut found = Vec::new();
    let mut cursor = String::from("0");
    for _ in 0..SCAN_CALLS_MAX {
        let words = ["SCAN", &cursor, "MATCH", "distlock:token:*", "COUNT", "1000"];
        let Ok(reply) = query(&words) else { break };
        let Ok((next, keys)) = redis::from_redis_value::<(String, Vec<String>)>(reply) else {
            break;
        };
        let locks = keys.iter().filter_map(|key| lock_of_token(key));
        found.extend(locks.filter(|key| !key.starts_with(prefix)).map(str::to_owned));
        cursor = next;
        if cursor == "0" {
            break;
        }
    }
    found.sort_unstable();
    found
}

/// The lock whose token this key stores.
fn lock_of_token(key: &str) -> Option<&str> {
    let rest = key.strip_prefix("distlock:token:")?;
    rest.strip_prefix(':').or_else(|| rest.strip_prefix('{')?.strip_suffix('}'))
}

/// A key does not show where its prefix ends, so this can only warn of what looks like a prefix.
pub(super) fn check_prefix(node: &NodeFacts, requirements: &Requirements) -> Option<Finding> {
    let ours = requirements.prefix.as_str();
    let (key, theirs) =
        node.locks_elsewhere.iter().find_map(|key| Some((key, begins_both(ours, key)?)))?;
    let theirs = if theirs.is_empty() { "an empty prefix" } else { &format::quote(theirs) };
    Some(
        Finding::warning(
            "prefix",
            format!(
                "lock key {} seems to have {theirs} as its prefix, with which {} begins; then \
                 two different names can be one lock",
                format::quote(key),
                format::quote(ours)
            ),
        )
        .advice("use prefixes of which none begins another one"),
    )
}

/// The prefix that this key seems to have, if ours begins with it: what both have in common up to a
/// separator, if the rest of the key looks like a plain name.
fn begins_both<'a>(ours: &str, key: &'a str) -> Option<&'a str> {
    let is_separator = |c: char| !c.is_alphanumeric() && c != '-' && c != '_';
    let common: usize =
        ours.chars().zip(key.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let end = key[..common]
        .rfind(is_separator)
        .map_or(0, |at| at + key[at..].chars().next().map_or(0, char::len_utf8));
    (!key[end..].contains(is_separator)).then_some(&key[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_that_begins_ours_is_found() {
        for (ours, key, theirs) in [
            ("a:b:", "a:job", Some("a:")),
            ("a:b:", "a:job-1_x", Some("a:")),
            ("a:b:", "job", Some("")),
            ("lock:", "lok", Some("")),
            ("é/b/", "é/ü", Some("é/")),
            ("a:b:", "a:c:job", None),
            ("a:b:", "orders:42", None),
            ("", "orders:42", None),
        ] {
            assert_eq!(begins_both(ours, key), theirs, "{ours} {key}");
        }
    }

    #[test]
    fn locks_are_read_from_token_keys() {
        assert_eq!(lock_of_token("distlock:token:{lock:a}"), Some("lock:a"));
        assert_eq!(lock_of_token("distlock:token::lock:{user}"), Some("lock:{user}"));
        for other in ["distlock:token:", "distlock:queue:{lock:a}", "lock:a"] {
            assert_eq!(lock_of_token(other), None, "{other}");
        }
    }
}
