//! What is sent: with any lock name, id and queue entry, a request is one command with exactly
//! these arguments.

use redis::Value;

use super::{corpus, fuzz};
use crate::{
    backend::redis::{
        Request, ScriptRef,
        requests::{Acquire, AcquireMode, Release},
    },
    core::{key::LockKey, kind::LockKind},
};

fn words(call: &impl Request, by: ScriptRef) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    call.encode(by, 7, 8, &mut out);
    let Ok(Value::Array(words)) = redis::parse_redis_value(&out) else { panic!("not one command") };
    let word = |word| match word {
        Value::BulkString(word) => word,
        other => panic!("not a bulk string: {other:?}"),
    };
    words.into_iter().map(word).collect()
}

#[test]
fn names_never_change_the_command() {
    fuzz(corpus("names"), |input: &Vec<u8>| {
        let text = String::from_utf8_lossy(input);
        let mut parts = text.splitn(3, '\0');
        let (prefix, name) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let id = parts.next().unwrap_or_default();
        let Ok(key) = LockKey::new(prefix, name) else { return 0 };
        let acquire = Acquire {
            kind: LockKind::Mutex,
            key: &key,
            id,
            ttl_ms: 5,
            mode: AcquireMode::Enqueue,
            queue_entry: name,
            repair_ttl_ms: 0,
            token_min: Some(9),
            is_token_decided: false,
        };
        for by in [ScriptRef::HASH, ScriptRef::SOURCE] {
            let said = words(&acquire, by);
            assert_eq!(said.len(), 17);
            assert_eq!(
                (&said[3][..], &said[8][..]),
                ([prefix, name].concat().as_bytes(), id.as_bytes())
            );
            assert_eq!(&said[13][..], name.as_bytes());
            let release = Release::new(LockKind::Mutex, &key, id.as_bytes());
            let release = words(&Release { queue_entry: name, expires: true, ..release }, by);
            assert_eq!((release.len(), &release[3..7]), (12, &said[3..7]));
        }
        1 + u64::from(prefix.is_empty()) + 2 * u64::from(id.is_empty())
    });
}
