//! Encoding of requests about groups, and decoding of replies.

use redis::Value;

use crate::{
    backend::redis::{
        requests::{
            acquire::{Acquire, AcquireMode},
            release::{Release, ReleaseReply},
        },
        script::Request as _,
        test_util::script_arguments,
    },
    core::{key::LockKey, kind::LockKind},
};

fn text(line: &str) -> Value {
    Value::BulkString(line.as_bytes().to_vec())
}

fn keys() -> [String; 5] {
    [
        "lock:a",
        "distlock:queue:{lock:a}",
        "distlock:token:{lock:a}",
        "distlock:fence",
        "distlock:members:{lock:a}",
    ]
    .map(str::to_owned)
}

#[test]
fn requests_name_the_group_and_its_limit() {
    let key = LockKey::new("lock:", "a").unwrap();
    let acquire = |kind| {
        let request = Acquire {
            kind,
            key: &key,
            id: "me",
            ttl_ms: 10,
            mode: AcquireMode::Try,
            queue_entry: "w",
            repair_ttl_ms: 60,
            token_min: Some(9),
            is_token_decided: kind == LockKind::Read,
        };
        script_arguments(&request, &keys())
    };
    let head = ["me", "10", "0000000000000007", "60", "try", "w"];
    let (min, read) = ("0000000000000009", "distlock:read");
    assert_eq!(acquire(LockKind::Read), [&head[..], &[read, "0", "1", min, "1"]].concat());
    assert_eq!(acquire(LockKind::Write), [&head[..], &["", "0", "1", min, "0"]].concat());
    let permits = LockKind::Permits { limit: 7, count: 3 };
    assert_eq!(acquire(permits), [&head[..], &["distlock:permits", "7", "3", min, "0"]].concat());

    let release = |kind| {
        let request = Release { queue_entry: "w", ..Release::new(kind, &key, b"me") };
        script_arguments(&request, &keys())
    };
    assert_eq!(release(LockKind::Read), ["me", "w", "", "1"]);
    assert_eq!(release(LockKind::Write), ["me", "w", "", "-1"]);
    assert_eq!(release(permits), ["me", "w", "", "3"]);
}

#[test]
fn replies_are_decoded_or_rejected() {
    let key = LockKey::new("lock:", "a").unwrap();
    let release = Release::new(LockKind::Read, &key, b"me");
    let decode = |line: &str| Some(release.decode(7, text(line))?.0);
    assert_eq!(decode("7 released"), Some(ReleaseReply::Released { has_more: false }));
    assert_eq!(decode("7 released more"), Some(ReleaseReply::Released { has_more: true }));
    assert_eq!(decode("7 gone more"), Some(ReleaseReply::Gone { has_more: true }));
    assert!(!decode("7 other 50 9 0 1 no more").unwrap().has_more(), "the end of an id");
    assert_eq!(decode("8 released more"), None);
}
