//! What nobody in his right mind sends or stores, and others do.

use std::time::Duration;

use distlock::{LockLost, RedisMgr};

use crate::faults::{LOCK, is_renewed};
use crate::{
    bounds::nothing_hangs,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_short_timeout, expect_loss, fence_key, get, in_own_process, in_thread, is_renewal,
        manager, queue_key, queued, server_behind_proxy, spawn_queued_waiter, with_ttl,
    },
    security::limits::most_used,
    support::{
        CEILING, Fault, RedisServer, contains, endless_server, eventually, garbage_server, rewrite,
    },
};

#[test]
fn nothing_hangs_on_answers_of_every_kind() {
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
        nothing_hangs("strange", &garbage_server(answer).url());
    }
}

/// Every connection is given bytes without an end: as one text, as one line, and as ever new
/// answers.
#[test]
fn nothing_hangs_or_grows_on_a_stream_without_an_end() {
    if !in_own_process("faults::hostile::nothing_hangs_or_grows_on_a_stream_without_an_end", &[]) {
        return;
    }
    // Several are read at once; a number takes ten times as much in memory as on its way.
    let streams = [
        ("$9223372036854775807\r\n", "x", 128),
        ("+", "x", 128),
        ("*1000000000\r\n", ":1\r\n", 400),
        ("", ":1\r\n", 400),
    ];
    for (head, body, most_mib) in streams {
        nothing_hangs("endless", &endless_server(head, body).url());
        let used = most_used() >> 20;
        println!("{used} MiB after {head:?}");
        assert!(used < most_mib, "{used} MiB after {head:?}");
    }
}

#[test]
fn an_error_of_any_length_is_cut_and_escaped() {
    let (_server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let red = format!("-ERR \x1b[31m{}\r\n", "é".repeat(100_000));
    proxy.on_request(contains(LOCK), Fault::ReplaceReply(red.into_bytes()));
    let error = mgr.try_lock("x").unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.len() < 3_000 && !text.contains('\x1b'), "{} bytes", text.len());
}

#[test]
fn what_is_no_reply_is_told_in_one_line() {
    for garbage in
        ["HTTP/1.1 400 Bad Request\r\n\r\n", ":x\r\n", "$x\r\n", "+\u{fffd}\r\n", "\x16\x03\x01"]
    {
        let server = garbage_server(garbage);
        let said = RedisMgr::new(config_short_timeout(server.url()))
            .unwrap()
            .try_lock("x")
            .unwrap_err()
            .to_string();
        assert!(said.contains("does not answer like a Redis server"), "{said:?}");
        assert!(!said.chars().any(char::is_control), "{said:?}");
    }
}

/// Numbers of the right form, and of no sense. The reply is to the right request: it carries the
/// right nonce.
#[test]
fn numbers_without_sense_are_no_lock_and_no_panic() {
    let senseless = [
        "0",
        "-1",
        "9007199254740992",
        "9223372036854775807",
        "9223372036854775808",
        "99999999999999999999999",
        "",
        "x",
    ];
    for number in senseless {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        // nonce held now token
        let told = proxy.on_request(
            contains(LOCK),
            rewrite(move |line| format!("{} {number}", line.rsplit_once(' ').unwrap().0)),
        );
        let told = told.forever();
        let error = completes_within(CALL_LIMIT, number, || mgr.try_lock("x").expect_err(number));
        assert!(error.is_unavailable() && told.fired() > 0, "{number}: {error:?}");
        told.disarm();
        await_gone(&server, LOCK);
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    }
}

#[test]
fn times_without_sense_are_no_panic() {
    for now in ["0", "1", "9007199254740991", "9007199254740992", "18446744073709551615", "-5", "x"]
    {
        for place in [2, 3] {
            let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
            let held = manager(&server).lock("x").unwrap();
            // nonce busy now pttl token waiters holder, and nonce queued now pttl position joined
            // holder
            proxy
                .on_request(
                    contains(LOCK),
                    rewrite(move |line| {
                        let mut words: Vec<_> = line.split(' ').collect();
                        if words.len() > place + 1 {
                            words[place] = now;
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
            eventually("nobody is in line", CEILING, || queued(&server, "x") == 0);
        }
    }
}

/// Whatever somebody has put where the last token belongs, tokens go on, and rise.
#[test]
fn garbage_in_place_of_the_last_token_stops_nothing() {
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
        let what = garbage.get(..30).unwrap_or(garbage);
        server.cli(&["SET", &fence_key("x"), garbage]);
        for _ in 0..2 {
            let guard = mgr.try_lock("x").unwrap_or_else(|error| panic!("{what:?}: {error}"));
            assert!(guard.fencing_token().as_u64() > last, "{what:?}");
            last = guard.fencing_token().as_u64();
            assert_eq!(get(&server, &fence_key("x")), Some(last.to_string()), "{what:?}");
            server.cli(&["SET", &fence_key("x"), garbage]);
            let refused = mgr.try_lock("x").unwrap_err();
            assert!(refused.is_contended(), "{what:?}: {refused}");
            guard.release().unwrap().unwrap_released();
            server.cli(&["SET", &fence_key("x"), &last.to_string()]);
        }
    }
}

/// The same for somebody whose answer is lost, and who is found again by its identifier.
#[test]
fn garbage_in_place_of_the_last_token_is_not_handed_out() {
    for garbage in ["99999999999999999999", "9007199254740992", "nan", "x"] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(4 * SECOND));
        let late = proxy.on_request(contains(LOCK), Fault::HoldReply);
        let taking = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
        late.wait_fired();
        server.cli(&["SET", &fence_key("x"), garbage]);
        let guard = completes_within(CALL_LIMIT, garbage, || {
            taking.join().unwrap().unwrap_or_else(|e| panic!("{garbage}: {e}"))
        });
        late.let_go();
        assert_eq!(get(&server, &fence_key("x")), Some(guard.fencing_token().to_string()));
    }
}

/// On a channel on which somebody listens, so that the lock would be given to each.
#[test]
fn places_in_line_for_a_time_that_cannot_be_are_passed_over() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let next = spawn_queued_waiter(&server, &mgr, "x");
    let place: String = server.query(&["LINDEX", &queue_key("x"), "0"]);
    let channel = place.split(' ').nth(1).unwrap();
    for time in ["0", "00", "9223372036854775807", "99999999999999999999"] {
        server.cli(&["LPUSH", &queue_key("x"), &format!("{time} {channel} nobody")]);
    }
    guard.release().unwrap().unwrap_released();
    let guard = completes_within(CALL_LIMIT, "the next in line", || next.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK), Some(guard.id().to_string()));
    guard.release().unwrap().unwrap_released();
}

/// It comes while the lock is held, and there is no token to give the next in line.
#[test]
fn another_type_where_the_token_belongs_keeps_no_lock_and_costs_nobody_a_place() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let line = ["60000 distlock:client:nobody first", "60000 distlock:client:nobody second"];
    line.iter().for_each(|entry| drop(server.cli(&["RPUSH", &queue_key("x"), entry])));
    server.cli(&["DEL", &fence_key("x")]);
    server.cli(&["HSET", &fence_key("x"), "field", "precious"]);
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
    assert_eq!(server.query::<Vec<String>>(&["LRANGE", &queue_key("x"), "0", "-1"]), line);
    assert_eq!(server.query::<String>(&["HGET", &fence_key("x"), "field"]), "precious");
    // Whoever asks that it be free hands it on.
    assert!(!mgr.release_lock("x", "somebody").unwrap());
    assert_eq!(queued(&server, "x"), 2);
}

/// Also of somebody who has stood there.
#[test]
fn another_type_where_the_line_belongs_keeps_no_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let first = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    first.release().unwrap().unwrap_released();
    for guard in [waiting.join().unwrap().unwrap(), mgr.lock("y").unwrap()] {
        let line = queue_key(guard.name());
        server.cli(&["HSET", &line, "field", "precious"]);
        guard.release().unwrap().unwrap_released();
        assert_eq!(server.query::<String>(&["HGET", &line, "field"]), "precious");
    }
    assert_eq!([get(&server, LOCK), get(&server, "lock:y")], [None, None]);
}

/// What is beside a lock that somebody has does not hide who that is.
#[test]
fn another_type_where_the_token_or_the_line_belongs_hides_no_holder() {
    for beside in [fence_key("x"), queue_key("x")] {
        let server = RedisServer::start();
        let (mgr, other) = (manager(&server), manager(&server));
        let guard = mgr.lock("x").unwrap();
        server.cli(&["DEL", &beside]);
        server.cli(&["HSET", &beside, "field", "precious"]);
        assert_eq!(other.holder("x").unwrap().unwrap().id(), guard.id().as_str());
        let refused = other.try_lock("x").unwrap_err();
        assert_eq!(
            refused.holder().map(|holder| holder.id()),
            Some(guard.id().as_str()),
            "{refused}"
        );
        assert!(!other.release_lock("x", "somebody").unwrap());
        assert_eq!(server.query::<String>(&["HGET", &beside, "field"]), "precious");
        guard.release().unwrap().unwrap_released();
    }
}

/// A line of strangers holds the server up for a moment at a time: a thousand are passed over in
/// one go.
#[test]
fn a_line_of_a_million_strangers_holds_nobody_up() {
    let server = RedisServer::start();
    server.config_set("lua-time-limit", "0");
    let (mgr, other) = (manager(&server), manager(&server));
    let fill = "for i = 1, 1000000 do
           redis.call('RPUSH', KEYS[1], i % 2 == 0 and 'stranger' .. i or '1000 distlock:client:nobody stranger' .. i)
         end";
    server.cli(&["EVAL", fill, "1", &queue_key("x")]);
    let guard = completes_within(CALL_LIMIT, "locking", || mgr.lock("x").unwrap());
    let left = queued(&server, "x");
    assert!((900_000..1_000_000).contains(&left), "{left} are left");
    let waiting = spawn_queued_waiter(&server, &other, "x");
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    // Who stands that far behind looks every ten seconds.
    let next = completes_within(CEILING, "the wait", || waiting.join().unwrap().unwrap());
    next.release().unwrap().unwrap_released();
    let left = queued(&server, "x");
    assert!((900_000..1_000_000).contains(&left), "{left} are left");
}

#[test]
fn a_holder_of_any_length_is_cut() {
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
    assert!(get(&server, LOCK).is_some_and(|holder| holder.len() > 1 << 20), "it is not ours");
}

/// Names and identifiers are data. The server is never told a script that it has not been told
/// before.
#[test]
fn names_with_code_in_them_are_names() {
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
        let waiting = in_thread(&mgr, name, |mgr, name| mgr.lock(name));
        eventually("it waits", CEILING, || mgr.holder(name).unwrap().unwrap().waiters() == Some(1));
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
        mgr.release_lock(name, name).unwrap();
    }
    let last = mgr.lock_with(names[0], &with_ttl(3 * SECOND)).unwrap();
    is_renewed_by_name(&server, &last);
    assert_eq!(get(&server, "precious").as_deref(), Some("data"));
    let memory: String = server.query(&["INFO", "memory"]);
    let cached =
        memory.lines().find_map(|line| line.strip_prefix("number_of_cached_scripts:")).unwrap();
    assert!(cached.parse::<u32>().unwrap() <= 5, "{cached} scripts");
}

fn is_renewed_by_name(server: &RedisServer, guard: &distlock::LockGuard) {
    let before = server.calls("pexpire");
    eventually("it is renewed", CEILING, || {
        assert!(guard.is_held());
        server.calls("pexpire") > before + 1
    });
}

/// Somebody with write access can make himself out to be the holder, for identifiers are not
/// secret: the lock is as safe as its keys. What he has taken away is noticed all the same.
#[test]
fn who_forges_an_identifier_can_release_and_is_noticed() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    // The next one has it before the first renewal asks.
    let guard = mgr.lock_with("x", &with_ttl(12 * SECOND)).unwrap();
    assert!(manager(&server).release_lock("x", guard.id().as_str()).unwrap());
    let next = manager(&server).lock("x").unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    assert!(matches!(expect_loss(&guard), LockLost::Taken { .. }));
    is_renewed(&server, &manager(&server).lock_with("y", &with_ttl(3 * SECOND)).unwrap(), 1);
}

/// Whoever may publish on the channel of a manager can make its waiters believe in a lock that
/// another has: for a claim window, whatever the message says, and no longer than until the server
/// is asked.
#[test]
fn a_forged_grant_is_believed_for_a_claim_window_at_most() {
    let window = 10 * SECOND;
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).claim_window(window));
    let holder = manager(&server).lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let entry: String = server.query(&["LINDEX", &queue_key("x"), "0"]);
    let words: Vec<_> = entry.splitn(3, ' ').collect();
    let [_, channel, id] = words[..] else { panic!("{entry}") };
    let asking = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    let forge = "local t = redis.call('TIME')
         local now = t[1] .. string.sub('00000' .. t[2], -6)
         return redis.call('PUBLISH', ARGV[1], '7 ' .. now .. ' 600000 ' .. ARGV[2])";
    eventually("it believes", CEILING, || {
        server.cli(&["EVAL", forge, "0", channel, id]);
        waiting.is_finished()
    });
    let guard = waiting.join().unwrap().unwrap();
    let left = guard.remaining();
    assert!(left <= window, "{left:?} of {window:?}");
    asking.wait_fired();
    asking.let_go();
    match expect_loss(&guard) {
        LockLost::Taken { by, .. } => assert_eq!(by.id(), holder.id().as_str()),
        why => panic!("{why:?}"),
    }
    assert!(holder.is_held());
}
