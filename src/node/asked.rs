//! Requests, read back as a server reads them. Only in tests.

use super::script::{By, Call};

/// The words of the request that asks this, with 1000 for its nonce and 7 for when it is too late.
pub(super) fn words(call: &impl Call, by: By) -> Vec<String> {
    let mut out = Vec::new();
    call.encode(by, 1_000, 7, &mut out);
    let request = redis::parse_redis_value(&out).unwrap();
    redis::from_redis_value(request).unwrap()
}

/// Checks how a request begins, up to its nonce; returns what follows, behind its keys.
pub(super) fn asked<C: Call>(call: &C, keys: &[String]) -> Vec<String> {
    let script = call.script().unwrap();
    let mut words = words(call, By::Hash);
    assert_eq!(words[..3], ["EVALSHA", script.hash(), &keys.len().to_string()]);
    assert_eq!(words[3..3 + keys.len()], *keys);
    assert_eq!(words[3 + keys.len()], "1000");
    let taught = self::words(call, By::Text);
    assert_eq!((taught[0].as_str(), redis::Script::new(&taught[1]).get_hash()), ("EVAL", script.hash()));
    assert_eq!(taught[2..], words[2..]);
    words.split_off(4 + keys.len())
}
