//! Encoding of requests and decoding of replies.

use proptest::prelude::*;
use redis::Value;

use super::{
    InCluster, Ping,
    acquire::{Acquire, AcquireMode, AcquireReply},
    release::{Release, ReleaseReply},
    renew::{Renew, tests::renewal},
};
use crate::{
    backend::redis::{
        script::{Request, ScriptRef},
        test_util::{request_words, script_arguments},
    },
    core::{holder::Holder, key::LockKey, kind::LockKind},
};

fn acquire(key: &LockKey) -> Acquire<'_> {
    Acquire {
        kind: LockKind::Mutex,
        key,
        id: "me",
        ttl_ms: 10,
        mode: AcquireMode::Try,
        queue_entry: "",
        repair_ttl_ms: 60,
        token_min: None,
        is_token_decided: false,
    }
}

#[test]
fn request_is_one_well_formed_command() {
    let key = LockKey::new("lock:", "a b\r\n").unwrap();
    let keys = [
        "lock:a b\r\n",
        "distlock:queue:{lock:a b\r\n}",
        "distlock:token:{lock:a b\r\n}",
        "distlock:fence",
    ]
    .map(str::to_owned);
    let not_after = "0000000000000007";
    assert_eq!(script_arguments(&acquire(&key), &keys), ["me", "10", not_after, "60", "3600010"]);
    let head = ["me", "10", not_after, "60"];
    let request = Acquire { mode: AcquireMode::Enqueue, queue_entry: "w", ..acquire(&key) };
    let rest = ["join", "w", "0000000000000000", "3600010"];
    assert_eq!(script_arguments(&request, &keys), [&head[..], &rest].concat());
    let request = Acquire { token_min: Some(5), ..acquire(&key) };
    let rest = ["try", "", "0000000000000005", "3600010"];
    assert_eq!(script_arguments(&request, &keys), [&head[..], &rest].concat());
    let release = |expires| Release {
        queue_entry: "w",
        expires,
        ..Release::new(LockKind::Mutex, &key, b"me")
    };
    assert_eq!(script_arguments(&release(true), &keys), ["me", "w", not_after]);
    assert_eq!(script_arguments(&release(false), &keys), ["me", "w", ""]);
    let left_free = Release { left_free_ms: 7, ..release(false) };
    assert_eq!(script_arguments(&left_free, &keys), ["me", "w", "", "7"]);
    let usual = Release { queue_entry: "", token: 5, ..release(false) };
    assert_eq!(script_arguments(&usual, &keys), ["me", "0000000000000005"]);
    let short = Release { is_token_in_fence: true, ..usual };
    assert_eq!(script_arguments(&short, &keys), ["me", ""]);
    for unusual in [
        Release { queue_entry: "w", ..usual },
        Release { expires: true, ..usual },
        Release { left_free_ms: 7, ..usual },
        Release { token: 0, ..usual },
    ] {
        assert!(script_arguments(&unusual, &keys).len() > 2, "the script decides by their number");
    }
}

fn release_of(key: &LockKey) -> Release<'_> {
    Release::new(LockKind::Mutex, key, b"")
}

fn text(line: &str) -> Value {
    Value::BulkString(line.as_bytes().to_vec())
}

#[test]
fn reply_with_other_nonce_is_rejected() {
    let key = LockKey::new("", "x").unwrap();
    assert_eq!(
        acquire(&key).decode(9, text("9 held 5 6")),
        Some((AcquireReply::Held { token: 6, is_token_in_fence: false }, Some(5)))
    );
    let fenced = AcquireReply::Held { token: 5, is_token_in_fence: true };
    assert_eq!(acquire(&key).decode(9, text("9 fenced 5")), Some((fenced, Some(5))));
    let several_nodes = Acquire { token_min: Some(5), ..acquire(&key) };
    assert_eq!(several_nodes.decode(9, text("9 fenced 5")), None);
    assert_eq!(acquire(&key).decode(9, text("8 held 5 6")), None);
    assert_eq!(acquire(&key).decode(9, text("held 5 6")), None);
    assert_eq!(acquire(&key).decode(9, Value::Okay), None);
}

#[test]
fn acquire_reply_is_decoded_for_every_outcome() {
    let key = LockKey::new("", "x").unwrap();
    let read = |line| acquire(&key).decode(9, text(line)).unwrap();
    let seen =
        |reply: &AcquireReply| (reply.holder().map(Holder::id).map(str::to_owned), reply.token());
    let he = || Some("he".to_owned());
    for (line, who_and_token) in [
        ("9 held 5 6", (None, Some(6))),
        ("9 busy 5 700 6 2 he", (he(), None)),
        ("9 queued 5 700 3 0 he", (he(), None)),
        ("9 type 5", (None, None)),
        ("9 late 5", (None, None)),
    ] {
        let (reply, server_us) = read(line);
        assert_eq!((seen(&reply), server_us), (who_and_token, Some(5)), "{line}");
    }
    let replies = ["9 type 5", "9 late 5"].map(|line| read(line).0);
    assert_eq!(replies, [AcquireReply::WrongType, AcquireReply::Late]);
    let lines = [
        "9 queued 5 700 3 0 he",
        "9 queued 5 700 3 1 he",
        "9 queued 5 700 3 2 he",
        "9 queued 5 700 3 3 he",
    ];
    let states = lines.map(|line| match read(line).0 {
        AcquireReply::Queued { position: 3, newly_queued, no_subscriber, .. } => {
            (newly_queued, no_subscriber)
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(states, [(false, false), (true, false), (false, true), (true, true)]);
    assert_eq!(acquire(&key).decode(9, text("9 maybe 5 6")), None);
}

#[test]
fn release_and_inspect_replies_are_decoded() {
    let key = LockKey::new("", "x").unwrap();
    let release = |line| Release { expires: true, ..release_of(&key) }.decode(9, text(line));
    assert_eq!(release("9 released"), Some((ReleaseReply::Released { has_more: false }, None)));
    assert_eq!(release("9 gone"), Some((ReleaseReply::Gone { has_more: false }, None)));
    assert_eq!(release("9 type"), Some((ReleaseReply::WrongType, None)));
    assert_eq!(release("9 late 5"), Some((ReleaseReply::Late, Some(5))));
    assert_eq!(release("9 late"), None);
    let Some((ReleaseReply::HeldByOther(holder), None)) = release("9 other 50 700 6 2 he") else {
        panic!("the reply was rejected")
    };
    assert_eq!(holder.id(), "he");
    assert_eq!(release("9 maybe"), None);
}

#[test]
fn holder_id_may_be_any_text() {
    let key = LockKey::new("", "x").unwrap();
    let Some((AcquireReply::Busy { holder }, _)) =
        acquire(&key).decode(1, text("1 busy 50 -1 99999999999999999999 2 a b\n c"))
    else {
        panic!("the reply was rejected")
    };
    assert_eq!((holder.id(), holder.ttl_left(), holder.waiters()), ("a b\n c", None, Some(2)));
    let queued = acquire(&key).decode(1, text("1 queued 50 700 3 1 "));
    assert!(
        matches!(queued, Some((AcquireReply::Queued { position: 3, newly_queued: true, .. }, _))),
        "{queued:?}"
    );
}

/// Fault: F73
#[test]
fn token_out_of_range_is_rejected() {
    let key = LockKey::new("", "x").unwrap();
    for token in ["0", "-1", "9007199254740992", "99999999999999999999", "1e3", ""] {
        assert_eq!(
            acquire(&key).decode(9, text(&format!("9 held 5 {token}"))),
            None,
            "token {token}"
        );
    }
}

/// Tokens start at the server's clock. From such a value they could not keep rising.
///
/// Fault: N39
#[test]
fn clock_out_of_range_is_rejected() {
    let key = LockKey::new("", "x").unwrap();
    let renewals = [renewal(&key)];
    let release = release_of(&key);
    // The last value that leaves a year of room, the next one, and the largest integer that Lua can
    // count with.
    for (now, is_time) in
        [("8975663254740991", true), ("8975663254740992", false), ("9007199254740991", false)]
    {
        assert_eq!(
            acquire(&key).decode(9, text(&format!("9 held {now} 7"))).is_some(),
            is_time,
            "{now}"
        );
        assert_eq!(release.decode(9, text(&format!("9 late {now}"))).is_some(), is_time, "{now}");
        assert_eq!(
            release.decode(9, text(&format!("9 other {now} 7 7 7 me"))).is_some(),
            is_time,
            "{now}"
        );
        let renewed = Value::Array(vec![text(&format!("9 {now}")), Value::Int(1)]);
        assert_eq!(Renew(&renewals).decode(9, renewed).is_some(), is_time, "{now}");
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(Value::Int),
        proptest::collection::vec(any::<u8>(), 0..20).prop_map(Value::BulkString),
        "9 (held|busy|queued|other|late|released)( -?[0-9]{1,20}| [a-z]{0,3}){0,7}"
            .prop_map(|t| Value::BulkString(t.into())),
        Just(Value::Nil),
        Just(Value::Okay),
    ];
    leaf.prop_recursive(2, 12, 8, |inner| {
        proptest::collection::vec(inner, 0..8).prop_map(Value::Array)
    })
}

proptest! {
    #[test]
    fn no_reply_panics(value in any_value()) {
        let key = LockKey::new("", "x").unwrap();
        let renewals = [renewal(&key)];
        acquire(&key).decode(9, value.clone());
        release_of(&key).decode(9, value.clone());
        Renew(&renewals).decode(9, value);
    }
}

#[test]
fn request_in_cluster_may_ask_and_may_use_sharded_channels() {
    let key = LockKey::new("lock:", "a").unwrap().in_cluster().unwrap();
    let release = Release::new(LockKind::Mutex, &key, b"me");
    let text = |is_sharded, is_asking| {
        let mut out = Vec::new();
        let request = InCluster { request: &release, is_sharded, is_asking };
        request.encode(ScriptRef::SOURCE, 1, 2, &mut out);
        String::from_utf8(out).unwrap()
    };
    let plain = text(false, false);
    assert_eq!(text(false, true), ["*1\r\n$6\r\nASKING\r\n", &plain].concat());
    assert!(plain.contains("'PUBLISH'") && plain.contains("'NUMSUB'"));
    let sharded = text(true, false);
    assert!(sharded.contains("'SPUBLISH'") && sharded.contains("'SHARDNUMSUB'"));
    assert!(!sharded.contains("'PUBLISH'") && !sharded.contains("'NUMSUB'"));
}

#[test]
fn ping_is_a_command_without_a_script() {
    assert_eq!(request_words(&Ping, ScriptRef::HASH), ["PING"]);
    assert!(Ping.script().is_none());
    assert_eq!(Ping.decode(9, Value::SimpleString("PONG".into())), Some(((), None)));
    assert_eq!(Ping.decode(9, Value::Okay), None);
}
