//! Decodes requests as a server would. For tests only.

use super::script::{Request, ScriptRef};

/// Encodes a request with the nonce 1000 and the `not_after` 7, and splits it into its arguments.
pub(super) fn request_words(request: &impl Request, by: ScriptRef) -> Vec<String> {
    let mut out = Vec::new();
    request.encode(by, 1_000, 7, &mut out);
    let request = redis::parse_redis_value(&out).unwrap();
    redis::from_redis_value(request).unwrap()
}

/// Checks a script request: its command, hash, keys, nonce and protocol version. Returns the other
/// arguments.
pub(super) fn script_arguments<C: Request>(request: &C, keys: &[String]) -> Vec<String> {
    let script = request.script().unwrap();
    let mut by_hash = request_words(request, ScriptRef::HASH);
    assert_eq!(by_hash[..3], ["EVALSHA", script.hash(), &keys.len().to_string()]);
    assert_eq!(by_hash[3..3 + keys.len()], *keys);
    assert_eq!(by_hash[3 + keys.len()], "1000");
    let by_source = self::request_words(request, ScriptRef::SOURCE);
    assert_eq!(
        (by_source[0].as_str(), redis::Script::new(&by_source[1]).get_hash()),
        ("EVAL", script.hash())
    );
    assert_eq!(by_source[2..], by_hash[2..]);
    assert_eq!(by_hash.pop().as_deref(), Some("1"));
    by_hash.split_off(4 + keys.len())
}
