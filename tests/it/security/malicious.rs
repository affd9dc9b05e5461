//! Malicious servers and clients: replies, keys, queue entries and messages that no program sends.

use std::time::Duration;

use distlock::{LockLost, RedisMgr};

use crate::faults::{LOCK, expect_renewals};
use crate::{
    faults::network::unresponsive::expect_calls_to_return,
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_check_of_fence, await_gone,
        completes_within, config_long_timeouts, config_short_timeout, expect_loss, get,
        in_own_process, is_renewal, manager, queue_key, queue_length, server_behind_proxy,
        spawn_call, spawn_queued_waiter, token_key, with_ttl,
    },
    security::limits::peak_memory,
    support::{
        Fault, RedisServer, TEST_TIMEOUT, contains, endless_server, eventually, garbage_server,
        rewrite,
    },
};

/// Fault: F72
#[test]
fn calls_return_on_unexpected_replies() {
    let long = "x".repeat(1 << 20);
    let answers: [Vec<u8>; 10] = [
        b">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n".to_vec(),
        b"|1\r\n+a\r\n+b\r\n+OK\r\n".to_vec(),
        b"%1\r\n+held\r\n+yes\r\n".to_vec(),
        b"(3492890328409238509324850943850943825024385\r\n".to_vec(),
        b"=15\r\ntxt:Some string\r\n".to_vec(),
        b"$-2\r\n".to_vec(),
        b"*-2\r\n".to_vec(),
        b":99999999999999999999999\r\n".to_vec(),
        format!("-ERR {long}\r\n").into_bytes(),
        format!("${}\r\n{long}\r\n", long.len()).into_bytes(),
    ];
    for answer in answers {
        expect_calls_to_return("unexpected reply", &garbage_server(answer).url());
    }
}

/// Every connection receives endless bytes: as one string, as one line, and as a series of replies.
///
/// Fault: F72
#[test]
fn calls_return_on_endless_replies() {
    if !in_own_process("security::malicious::calls_return_on_endless_replies", &[]) {
        return;
    }
    // Several streams are read at once, and a number takes ten times as much memory as on the wire.
    let streams = [
        ("$9223372036854775807\r\n", "x", 128),
        ("+", "x", 128),
        ("*1000000000\r\n", ":1\r\n", 400),
        ("", ":1\r\n", 400),
    ];
    for (head, body, max_mib) in streams {
        expect_calls_to_return("endless", &endless_server(head, body).url());
        let used = peak_memory() >> 20;
        println!("{used} MiB after {head:?}");
        assert!(used < max_mib, "{used} MiB after {head:?}");
    }
}

/// Fault: F72
#[test]
fn long_error_of_the_server_is_cut_and_escaped() {
    let (_server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let red = format!("-ERR \x1b[31m{}\r\n", "é".repeat(100_000));
    proxy.on_request(contains(LOCK), Fault::ReplaceReply(red.into_bytes()));
    let error = mgr.try_lock("x").unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.len() < 3_000 && !text.contains('\x1b'), "{} bytes", text.len());
}

/// Fault: F72
#[test]
fn invalid_reply_is_reported_in_one_line() {
    for garbage in
        ["HTTP/1.1 400 Bad Request\r\n\r\n", ":x\r\n", "$x\r\n", "+\u{fffd}\r\n", "\x16\x03\x01"]
    {
        let server = garbage_server(garbage);
        let text = RedisMgr::new(config_short_timeout(server.url()))
            .unwrap()
            .try_lock("x")
            .unwrap_err()
            .to_string();
        let says = match garbage.as_bytes()[0] {
            0x16 => "begins like TLS",
            b'H' => {
                "not a Redis server (its reply begins with \"HTTP/1.1 400 Bad Request\\r\\n\\r\\"
            }
            _ => "does not reply as expected",
        };
        assert!(text.contains(says), "{text:?}");
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

/// The reply carries the right nonce, but an impossible token.
///
/// Fault: F73
#[test]
fn invalid_token_in_a_reply_is_no_grant() {
    let invalid = [
        "0",
        "-1",
        "9007199254740992",
        "9223372036854775807",
        "9223372036854775808",
        "99999999999999999999999",
        "",
        "x",
    ];
    for number in invalid {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        // nonce held now token
        let rewritten = proxy.on_request(
            contains(LOCK),
            rewrite(move |line| format!("{} {number}", line.rsplit_once(' ').unwrap().0)),
        );
        let rewritten = rewritten.forever();
        let error = completes_within(CALL_LIMIT, number, || mgr.try_lock("x").expect_err(number));
        assert!(error.is_unavailable() && rewritten.fired() > 0, "{number}: {error:?}");
        rewritten.disarm();
        await_gone(&server, LOCK);
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    }
}

/// The reply has an impossible time of the server, or an impossible remaining ttl.
///
/// Fault: F73
#[test]
fn invalid_time_in_a_reply_causes_no_panic() {
    for now in ["0", "1", "9007199254740991", "9007199254740992", "18446744073709551615", "-5", "x"]
    {
        for field in [2, 3] {
            let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
            let held = manager(&server).lock("x").unwrap();
            // nonce busy now pttl token waiters holder, and nonce queued now pttl position joined
            // holder
            proxy
                .on_request(
                    contains(LOCK),
                    rewrite(move |line| {
                        let mut words: Vec<_> = line.split(' ').collect();
                        if words.len() > field + 1 {
                            words[field] = now;
                        }
                        words.join(" ")
                    }),
                )
                .forever();
            for wait in [Duration::ZERO, Duration::from_millis(300)] {
                let refused =
                    completes_within(CALL_LIMIT, now, || mgr.try_lock_for("x", wait).map(drop))
                        .unwrap_err();
                assert!(refused.is_contended() || refused.is_unavailable(), "{now}: {refused:?}");
                assert!(!format!("{refused} {refused:?}").is_empty());
            }
            drop(completes_within(CALL_LIMIT, now, || {
                mgr.holder("x").map(|holder| format!("{holder:?}"))
            }));
            held.ensure_held().unwrap();
            eventually("the queue is empty", TEST_TIMEOUT, || queue_length(&server, "x") == 0);
        }
    }
}

/// Tokens keep increasing, whatever the token key and the fence contain.
///
/// Fault: N8
#[test]
fn garbage_in_place_of_a_token_stops_no_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let mut last = 0;
    for garbage in [
        "",
        " ",
        "x",
        "-1",
        "1.5",
        "nan",
        "-nan",
        "inf",
        "1e300",
        "0x7fffffffffffffff",
        "9007199254740991",
        "9007199254740992",
        "9999999999999999",
        "99999999999999999999999999",
        "\0\u{1}",
        &"9".repeat(1 << 20),
    ] {
        let shown = garbage.get(..30).unwrap_or(garbage);
        for key in [&token_key("x"), FENCE] {
            server.cli(&["SET", key, garbage]);
            let guard = mgr.try_lock("x").unwrap_or_else(|error| panic!("{shown:?}: {error}"));
            assert!(guard.fencing_token().as_u64() > last, "{shown:?}");
            last = guard.fencing_token().as_u64();
            assert_eq!(get(&server, &token_key("x")), Some(last.to_string()), "{shown:?}");
            server.cli(&["SET", key, garbage]);
            let refused = mgr.try_lock("x").unwrap_err();
            assert!(refused.is_contended(), "{shown:?}: {refused}");
            guard.release().unwrap().unwrap_released();
            server.cli(&["SET", key, &last.to_string()]);
        }
    }
}

/// The reply to the acquire is lost, and the repeated request finds the lock with its own id.
///
/// Fault: N8
#[test]
fn garbage_in_place_of_a_token_is_not_returned() {
    for garbage in ["99999999999999999999", "9007199254740992", "nan", "x"] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(4 * SECOND));
        let late = proxy.on_request(contains(LOCK), Fault::HoldReply);
        let acquiring = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
        late.wait_fired();
        server.cli(&["SET", &token_key("x"), garbage]);
        let guard = completes_within(CALL_LIMIT, garbage, || {
            acquiring.join().unwrap().unwrap_or_else(|e| panic!("{garbage}: {e}"))
        });
        late.release();
        assert_eq!(get(&server, &token_key("x")), Some(guard.fencing_token().to_string()));
    }
}

/// The channel of these entries has a subscriber, so that each entry could get the lock.
///
/// Fault: N91
#[test]
fn queue_entries_with_an_invalid_window_are_skipped() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let next = spawn_queued_waiter(&server, &mgr, "x");
    let entry: String = server.query(&["LINDEX", &queue_key("x"), "0"]);
    let channel = entry.split(' ').nth(1).unwrap();
    for window in ["0", "00", "9223372036854775807", "99999999999999999999"] {
        server.cli(&["LPUSH", &queue_key("x"), &format!("{window} {channel} unknown")]);
    }
    guard.release().unwrap().unwrap_released();
    // The release itself has handed the lock over.
    assert_ne!(get(&server, LOCK), None);
    let guard = completes_within(CALL_LIMIT, "the hand-over", || next.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK), Some(guard.id().to_string()));
    guard.release().unwrap().unwrap_released();
}

/// The token key or the fence is replaced while the lock is held, so that there is no token for a
/// hand-over.
///
/// Fault: N72
#[test]
fn token_or_fence_of_another_type_keeps_the_queue() {
    for key in [&token_key("x"), FENCE] {
        let server = RedisServer::start();
        let mgr = manager(&server);
        let guard = mgr.lock("x").unwrap();
        let mut waiters = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        let mut subscription = waiters.as_pubsub();
        subscription.subscribe("distlock:client:other").unwrap();
        let queue = ["60000 distlock:client:other first", "60000 distlock:client:other second"];
        queue.iter().for_each(|entry| drop(server.cli(&["RPUSH", &queue_key("x"), entry])));
        server.cli(&["DEL", key]);
        server.cli(&["HSET", key, "field", "precious"]);
        await_check_of_fence(&server, &guard);
        guard.release().unwrap().unwrap_released();
        assert_eq!(get(&server, LOCK), None);
        assert_eq!(
            server.query::<Vec<String>>(&["LRANGE", &queue_key("x"), "0", "-1"]),
            queue,
            "{key}"
        );
        assert_eq!(server.query::<String>(&["HGET", key, "field"]), "precious");
        // A token that could not raise the fence is kept.
        assert!(server.query::<bool>(&["EXISTS", &token_key("x")]));
        // A release under any id hands over a free lock if it can.
        assert!(!mgr.release_lock("x", "other id").unwrap());
        assert_eq!(queue_length(&server, "x"), 2);
    }
}

/// The holder may have been queued itself.
///
/// Fault: N72
#[test]
fn queue_key_of_another_type_does_not_block_a_release() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let first = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    first.release().unwrap().unwrap_released();
    for guard in [waiting.join().unwrap().unwrap(), mgr.lock("y").unwrap()] {
        let queue = queue_key(guard.name());
        server.cli(&["HSET", &queue, "field", "precious"]);
        guard.release().unwrap().unwrap_released();
        assert_eq!(server.query::<String>(&["HGET", &queue, "field"]), "precious");
    }
    assert_eq!([get(&server, LOCK), get(&server, "lock:y")], [None, None]);
}

/// Fault: N82
#[test]
fn auxiliary_key_of_another_type_hides_no_holder() {
    for key in [token_key("x"), queue_key("x"), FENCE.to_owned()] {
        let server = RedisServer::start();
        let (mgr, other) = (manager(&server), manager(&server));
        let guard = mgr.lock("x").unwrap();
        server.cli(&["DEL", &key]);
        server.cli(&["HSET", &key, "field", "precious"]);
        assert_eq!(other.holder("x").unwrap().unwrap().id(), guard.id().as_str());
        let refused = other.try_lock("x").unwrap_err();
        assert_eq!(
            refused.holder().map(|holder| holder.id()),
            Some(guard.id().as_str()),
            "{refused}"
        );
        assert!(!other.release_lock("x", "other id").unwrap());
        assert_eq!(server.query::<String>(&["HGET", &key, "field"]), "precious");
        guard.release().unwrap().unwrap_released();
    }
}

/// A request skips at most a thousand unknown queue entries, so that it blocks the server only
/// briefly.
///
/// Fault: N9
#[test]
fn a_million_unknown_queue_entries_delay_no_call() {
    let server = RedisServer::start();
    server.config_set("lua-time-limit", "0");
    let (mgr, other) = (manager(&server), manager(&server));
    let fill = "for i = 1, 1000000 do
           local entry = 'unknown' .. i
           if i % 2 == 1 then entry = '1000 distlock:client:none ' .. entry end
           redis.call('RPUSH', KEYS[1], entry)
         end";
    server.cli(&["EVAL", fill, "1", &queue_key("x")]);
    let guard = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap());
    let left = queue_length(&server, "x");
    assert!((900_000..1_000_000).contains(&left), "{left} are left");
    let waiting = spawn_queued_waiter(&server, &other, "x");
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    // At such a queue position, a waiter polls every ten seconds.
    let next = completes_within(TEST_TIMEOUT, "the wait", || waiting.join().unwrap().unwrap());
    next.release().unwrap().unwrap_released();
    let left = queue_length(&server, "x");
    assert!((900_000..1_000_000).contains(&left), "{left} are left");
}

/// Fault: N10
#[test]
fn long_id_of_a_holder_is_cut() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    server.cli(&["SET", LOCK, &"é\x1b[31m".repeat(1 << 18), "PX", "600000"]);
    let refused = mgr.try_lock("x").unwrap_err();
    assert!(
        refused.holder().unwrap().id().len() <= 2_048,
        "{}",
        refused.holder().unwrap().id().len()
    );
    let text = format!("{refused} {:?} {:?}", mgr.holder("x").unwrap(), mgr.locks("*").unwrap());
    assert!(text.len() < 20_000 && !refused.to_string().contains('\x1b'), "{} bytes", text.len());
    assert!(mgr.try_lock_for("x", Duration::from_millis(200)).unwrap_err().is_timeout());
    let why = expect_loss(&guard);
    assert!(why.to_string().len() < 3_000, "{why}");
    drop(guard);
    assert!(
        get(&server, LOCK).is_some_and(|holder| holder.len() > 1 << 20),
        "another's lock was released"
    );
}

/// Names and ids are data: the server gets no script but the fixed ones.
///
/// Fault: F70
#[test]
fn names_that_look_like_code_are_only_names() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.cli(&["SET", "precious", "data"]);
    let names = [
        "'] redis.call('FLUSHALL') --",
        "\"); redis.call('FLUSHALL'); (\"",
        "]] redis.call('FLUSHALL') --[[",
        "x\r\nFLUSHALL\r\n",
        "*1\r\n$8\r\nFLUSHALL\r\n",
        "{x}:fence",
        "${x} %s %n $(reboot) `reboot`",
    ];
    for name in names {
        let guard = mgr.lock_with(name, &with_ttl(3 * SECOND)).unwrap();
        let waiting = spawn_call(&mgr, name, |mgr, name| mgr.lock(name));
        eventually("it waits", TEST_TIMEOUT, || {
            mgr.holder(name).unwrap().unwrap().waiters() == Some(1)
        });
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
        mgr.release_lock(name, name).unwrap();
    }
    let last = mgr.lock_with(names[0], &with_ttl(3 * SECOND)).unwrap();
    await_renewals_of_any_name(&server, &last);
    assert_eq!(get(&server, "precious").as_deref(), Some("data"));
    let memory: String = server.query(&["INFO", "memory"]);
    let cached =
        memory.lines().find_map(|line| line.strip_prefix("number_of_cached_scripts:")).unwrap();
    assert!(cached.parse::<u32>().unwrap() <= 5, "{cached} scripts");
}

fn await_renewals_of_any_name(server: &RedisServer, guard: &distlock::LockGuard) {
    let before = server.calls("pexpire");
    eventually("it is renewed", TEST_TIMEOUT, || {
        assert!(guard.is_held());
        server.calls("pexpire") > before + 1
    });
}

/// Ids are not secret, so a client with write access can release any lock. The holder notices the
/// loss.
///
/// Fault: F71
#[test]
fn release_with_a_known_id_is_noticed_by_the_holder() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    // The ttl is long enough for the next holder to come before the first renewal.
    let guard = mgr.lock_with("x", &with_ttl(12 * SECOND)).unwrap();
    assert!(manager(&server).release_lock("x", guard.id().as_str()).unwrap());
    let next = manager(&server).lock("x").unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    assert!(matches!(expect_loss(&guard), LockLost::Taken { .. }));
    expect_renewals(&server, &manager(&server).lock_with("y", &with_ttl(3 * SECOND)).unwrap(), 1);
}

/// A client that may publish to a manager's channel can send a waiter a false grant. The lease then
/// lasts for at most one claim window, whatever the message says, and ends when the server replies
/// to the next request.
///
/// Fault: F71
/// Promise: P2
#[test]
fn forged_grant_message_counts_for_one_claim_window() {
    let window = 10 * SECOND;
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).claim_window(window));
    let holder = manager(&server).lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let entry: String = server.query(&["LINDEX", &queue_key("x"), "0"]);
    let words: Vec<_> = entry.splitn(3, ' ').collect();
    let [_, channel, id] = words[..] else { panic!("{entry}") };
    let renewal = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    let forge = "local t = redis.call('TIME')
         local now = t[1] .. string.sub('00000' .. t[2], -6)
         return redis.call('PUBLISH', ARGV[1], '7 ' .. now .. ' 600000 ' .. ARGV[2])";
    eventually("the waiter accepts the message", TEST_TIMEOUT, || {
        server.cli(&["EVAL", forge, "0", channel, id]);
        waiting.is_finished()
    });
    let guard = waiting.join().unwrap().unwrap();
    let left = guard.remaining();
    assert!(left <= window, "{left:?} of {window:?}");
    renewal.wait_fired();
    renewal.release();
    match expect_loss(&guard) {
        LockLost::Taken { by, .. } => assert_eq!(by.id(), holder.id().as_str()),
        why => panic!("{why:?}"),
    }
    assert!(holder.is_held());
}
