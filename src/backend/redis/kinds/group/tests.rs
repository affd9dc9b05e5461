//! Encoding of requests about groups, and decoding of replies.

use super::*;
use crate::{
    backend::redis::{
        kinds::{
            acquire::{Acquire, AcquireMode},
            release::{Release, ReleaseReply},
        },
        test_util::script_arguments,
    },
    core::kind::LockKind,
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
            token_min: 9,
            is_token_decided: kind == LockKind::Read,
        };
        script_arguments(&request, &keys())
    };
    let head = ["me", "10", "try", "w", "0000000000000007", "60"];
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

    let list = [&key];
    assert_eq!(
        script_arguments(&ListMembers(&list), &[0, 4].map(|at| keys()[at].clone())),
        ["1000", "10000"]
    );
}

#[test]
fn replies_are_decoded_or_rejected() {
    let key = LockKey::new("lock:", "a").unwrap();
    let release = Release::new(LockKind::Read, &key, b"me");
    let decode = |line: &str| release.decode(7, text(line));
    assert_eq!(decode("7 released"), Some(ReleaseReply::Released { has_more: false }));
    assert_eq!(decode("7 released more"), Some(ReleaseReply::Released { has_more: true }));
    assert_eq!(decode("7 gone more"), Some(ReleaseReply::Gone { has_more: true }));
    assert!(!decode("7 other 50 9 0 1 no more").unwrap().has_more(), "the end of an id");
    assert_eq!(decode("8 released more"), None);
}

#[test]
fn members_of_a_claim_are_counted_together() {
    let keys = ["a", "b"].map(|name| LockKey::new("lock:", name).unwrap());
    let listed: Vec<_> = keys.iter().collect();
    let list = ListMembers(&listed);
    let permits = |lines: &[&str]| Value::Array(lines.iter().map(|line| text(line)).collect());
    let reply = |group| Value::Array(vec![text("7 50"), Value::Int(0), group]);
    let group = permits(&["distlock:permits 4", "5 me", "5 me#2", "5 you", "6 me#3"]);
    let found = list.decode(7, reply(group)).unwrap();
    let group = found[1].as_ref().unwrap();
    assert_eq!((&found[0], group.held_by), (&None, HeldBy::Permits { count: Some(4) }));
    let count = |at: usize| match group.members[at].held_by() {
        HeldBy::Permits { count } => count,
        _ => None,
    };
    let ids: Vec<_> = group.members.iter().map(Holder::id).collect();
    assert_eq!((ids.as_slice(), count(0), count(1)), (&["me", "you"][..], Some(3), Some(1)));
    for wrong in [permits(&[]), permits(&["me 4"]), permits(&["distlock:read 1", "x me"])] {
        assert_eq!(list.decode(7, reply(wrong)), None);
    }
    assert_eq!(list.decode(7, Value::Array(vec![text("7 50"), Value::Int(0)])), None);
}
