//! Taking a lock: what is written, who may have it, and what a lost or false reply does.

mod errors;
mod reentrant;

use std::{sync::Arc, thread, time::Duration};

use distlock::{LockError, LockGuard, LockOptions, RedisMgr, Released};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_medium_timeout, config_short_timeout, fence_key, foreign_release, foreign_take, get,
        in_thread, label, manager, pttl, queue_key, server_behind_proxy, spawn_queued_waiter,
        with_ttl,
    },
    support::{
        CEILING, Fault, FaultProxy, RedisServer, any_request, command, contains, eventually,
    },
};

const LOCK: &str = "lock:x";

#[test]
fn every_way_of_asking_takes_a_free_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ways: [fn(&RedisMgr) -> distlock::Result<distlock::LockGuard>; 4] = [
        |mgr| mgr.lock("x"),
        |mgr| mgr.try_lock("x"),
        |mgr| mgr.try_lock_for("x", SECOND),
        |mgr| mgr.lock_with("x", &LockOptions::new().ttl(3 * SECOND).wait(SECOND)),
    ];
    for way in ways {
        let guard = way(&mgr).unwrap();
        assert!(guard.is_held());
        assert_eq!((guard.name(), get(&server, LOCK)), ("x", Some(guard.id().to_string())));
        guard.release().unwrap().unwrap_released();
        assert_eq!(server.keys(), [fence_key("x")]);
    }
}

#[test]
fn a_held_lock_is_refused_with_its_holder() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let (guard, tid) = in_thread(&mgr, "x", |mgr, name| {
        (
            mgr.lock(name).unwrap(),
            u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()),
        )
    })
    .join()
    .unwrap();
    let LockError::Held { name, holder, server: said, .. } = other.try_lock("x").unwrap_err()
    else {
        panic!("not refused as held");
    };
    assert_eq!((name.as_str(), &said), ("x", &label(&server)));
    assert_eq!(holder.id(), guard.id().as_str());
    assert_eq!(holder.lock_id().as_ref(), Some(guard.id()));
    assert_eq!(holder.host(), gethostname::gethostname().to_str());
    assert_eq!((holder.pid(), holder.tid()), (Some(std::process::id()), Some(tid)));
    let left = holder.ttl_left().unwrap();
    assert!(left <= 30 * SECOND && left > SECOND, "{left:?}");
    assert!(holder.held_for().unwrap() < 30 * SECOND);
    assert_eq!(holder.waiters(), Some(0));
    assert_eq!(other.holder("x").unwrap().unwrap().id(), guard.id().as_str());
    assert!(other.is_locked("x").unwrap() && !other.is_locked("y").unwrap());
}

#[test]
fn the_key_is_the_identifier_and_expires() {
    let server = RedisServer::start();
    let guard = manager(&server).lock_with("x", &with_ttl(20 * SECOND)).unwrap();
    assert_eq!(server.query::<String>(&["TYPE", LOCK]), "string");
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    let left = pttl(&server, LOCK);
    assert!(left > 10_000 && left <= 20_000, "{left}");
    // Belief ends before the key.
    assert!(guard.remaining() < Duration::from_millis(u64::try_from(left).unwrap()));
    assert_eq!(server.keys(), [fence_key("x"), LOCK.to_owned()]);
    let fence = pttl(&server, &fence_key("x"));
    let hour = 60 * 60 * 1000;
    assert!(fence > 23 * hour && fence <= 24 * hour, "{fence}");
}

#[test]
fn an_empty_prefix_gives_the_bare_name() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    let guard = mgr.lock("x").unwrap();
    assert_eq!(get(&server, "x").as_deref(), Some(guard.id().as_str()));
    assert_eq!(guard.name(), "x");
}

#[test]
fn tokens_rise_even_when_the_server_forgets_them() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let mut last = 0;
    for round in 0..12 {
        let guard = mgr.lock("x").unwrap();
        let token = guard.fencing_token().as_u64();
        assert!(token > last && token < 1 << 53, "{token} after {last} in round {round}");
        assert_eq!(get(&server, &fence_key("x")), Some(token.to_string()));
        last = token;
        guard.release().unwrap().unwrap_released();
        match round % 4 {
            0 => server.restart_empty(),
            1 => drop(server.cli(&["FLUSHALL"])),
            2 => drop(server.cli(&["DEL", &fence_key("x")])),
            _ => drop(server.cli(&["SET", &fence_key("x"), "not a number"])),
        }
    }
}

#[test]
fn tokens_rise_above_one_that_is_ahead_of_the_clock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ahead = mgr.lock("x").unwrap().fencing_token().as_u64() + 3_600_000_000;
    server.cli(&["SET", &fence_key("x"), &ahead.to_string()]);
    for step in 1..4 {
        assert_eq!(mgr.lock("x").unwrap().fencing_token().as_u64(), ahead + step);
    }
}

#[test]
fn an_acquire_whose_reply_is_lost_is_found_again() {
    type Asked = fn(&RedisMgr) -> distlock::Result<LockGuard>;
    let (lock, try_lock): (Asked, Asked) = (|mgr| mgr.lock("x"), |mgr| mgr.try_lock("x"));
    // Who only tries has no time left when it has waited for a reply that does not come.
    for (fault, way) in [
        (Fault::DropReply, lock),
        (Fault::ResetAfterRequest, lock),
        (Fault::CloseAfterRequest, lock),
        (Fault::ResetAfterRequest, try_lock),
        (Fault::CloseAfterRequest, try_lock),
    ] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let lost = proxy.on_request(contains(LOCK), fault.clone());
        let guard = way(&mgr).unwrap();
        assert_eq!(lost.fired(), 1, "{fault:?}");
        assert!(guard.is_held());
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "{fault:?}");
        assert_eq!(
            get(&server, &fence_key("x")),
            Some(guard.fencing_token().to_string()),
            "{fault:?}"
        );
        assert_eq!(server.keys(), [fence_key("x"), LOCK.to_owned()]);
        drop(guard);
    }
}

/// What can be waited for an answer is longer than the lease; a second try comes within it all the
/// same.
#[test]
fn an_acquire_whose_reply_is_lost_is_found_again_before_a_short_lease_ends() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let lost = proxy.on_request(contains(LOCK), Fault::DropReply);
    let asking = in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(12 * SECOND)));
    lost.wait_fired();
    let first = get(&server, &fence_key("x"));
    let guard = asking.join().unwrap().unwrap();
    assert_eq!(Some(guard.fencing_token().to_string()), first, "it had ended meanwhile");
}

#[test]
fn an_acquire_that_is_given_up_leaves_nothing() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let lost = proxy.on_request(contains(LOCK), Fault::DropReply);
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    lost.wait_fired();
    assert!(error.is_unavailable() && !error.is_contended(), "{error}");
    // Long before it expires: the lease is 30 s.
    let left = pttl(&server, LOCK);
    assert!(left == -2 || left > 10_000, "{left}");
    eventually("it is taken back", 15 * SECOND, || get(&server, LOCK).is_none());
}

/// Goal: a request that reaches the server after its caller has given up takes no lock. Method: it
/// is held back in front of the server; what the background may have taken back was taken back
/// before.
#[test]
fn an_acquire_that_arrives_late_takes_nothing() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    assert!(mgr.try_lock("x").unwrap_err().is_unavailable());
    let commands = server.monitor();
    late.let_go();
    assert!(commands.wait_for("\"try\"").contains(LOCK));
    server.cli(&["ECHO", "end of the story"]);
    commands.wait_for("end of the story");
    let taken = commands
        .lines()
        .into_iter()
        .find(|line| line.to_uppercase().contains("\"SET\" \"LOCK:X\""));
    assert_eq!(taken, None);
    assert_eq!(get(&server, LOCK), None);
}

/// A waiter's request for the claim window may reach the server by a connection that was given up,
/// after the one for the whole lease, which came over another.
#[test]
fn an_old_request_for_less_takes_nothing_from_a_lease() {
    let script = [
        include_str!("../../src/node/lua/shared.lua"),
        include_str!("../../src/node/lua/acquire.lua"),
    ]
    .concat();
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    let (queue, fence, far) = (queue_key("x"), fence_key("x"), "9999999999999999");
    let keys = [LOCK, &queue, &fence];
    let args =
        ["7", guard.id().as_str(), "1000", "look", "1000 nowhere x", far, "1", "0000000000000000"];
    let held: String = server.query(&[&["EVAL", &script, "3"][..], &keys, &args].concat());
    assert!(held.starts_with("7 held "), "{held}");
    assert!(pttl(&server, LOCK) > 60_000, "{} ms are left", pttl(&server, LOCK));
}

#[test]
fn a_doubled_reply_is_not_taken_for_the_next_answer() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).ttl(10 * CEILING));
    let doubled = proxy.on_request(contains(LOCK), Fault::DuplicateReply).forever();
    for _ in 0..20 {
        let guard = mgr.lock("x").unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
        assert!(mgr.try_lock("x").unwrap_err().is_contended());
        guard.release().unwrap().unwrap_released();
        // Where the second reply to something else came late, a call had to ask twice, and its
        // first request may have had to wait for so long that it found the lock free. Then
        // it is taken back, long before it expires.
        eventually("it is free", CEILING, || get(&server, LOCK).is_none());
    }
    assert!(doubled.fired() >= 60);
}

#[test]
fn a_false_reply_is_never_a_success() {
    let falsehoods: [&[u8]; 12] = [
        b"+OK\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"$4\r\nheld\r\n",
        // Well formed, and an answer to somebody else.
        b"$40\r\n1 held 1763712345678000 1763712345678000\r\n",
        b"$41\r\n1 held 1763712345678000 1763712345678000\r\n",
        b"*4\r\n$1\r\n1\r\n$4\r\nheld\r\n:1763712345678000\r\n:1763712345678000\r\n",
        b"$9223372036854775807\r\nx",
        b"*1000000000\r\n",
        b"\x00\xff\xfe garbage\r\n",
        b"%1\r\n+held\r\n+yes\r\n",
    ];
    for falsehood in falsehoods {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        let told = String::from_utf8_lossy(falsehood);
        let false_replies =
            proxy.on_request(contains(LOCK), Fault::ReplaceReply(falsehood.to_vec())).forever();
        let error = mgr.try_lock("x").expect_err(&told);
        assert!(error.is_unavailable(), "{told:?}: {error}");
        false_replies.disarm();
        await_gone(&server, LOCK);
        let guard = mgr.lock("x").unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "{told:?}");
    }
}

#[test]
fn a_reply_in_front_of_the_right_one_is_not_taken_for_it() {
    for stranger in
        [&b"+OK\r\n"[..], b"$40\r\n1 held 1763712345678000 1763712345678000\r\n", b"-ERR no\r\n"]
    {
        let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
        let armed = proxy.on_request(contains(LOCK), Fault::PrependBytes(stranger.to_vec()));
        let asked = || server.calls("evalsha");
        let before = asked();
        let outcome = mgr.lock("x");
        armed.wait_fired();
        match outcome {
            Ok(guard) => {
                assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
                // Over another connection: the one in doubt would answer the second question with
                // the first answer.
                assert_eq!(asked() - before, 2);
            }
            Err(error) => assert!(error.is_refused(), "{error}"),
        }
        // Nothing of it is left in a connection that is used again.
        for _ in 0..3 {
            let guard = mgr.lock("y").unwrap();
            assert_eq!(get(&server, "lock:y").as_deref(), Some(guard.id().as_str()));
        }
    }
}

#[test]
fn a_reply_in_single_bytes_is_as_good_as_a_whole_one() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let sliced = proxy.on_request(any_request, Fault::SliceReply).forever();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    assert!(sliced.fired() > 3);
}

#[test]
fn a_foreign_holder_is_seen_and_named() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert!(foreign_take(&server, LOCK, "lock_1804289383", 30_000));
    let error = mgr.try_lock("x").unwrap_err();
    let holder = error.holder().unwrap();
    assert_eq!((holder.id(), holder.host(), holder.held_for()), ("lock_1804289383", None, None));
    assert!(
        error.to_string().contains("a client that calls itself \"lock_1804289383\""),
        "{error}"
    );
    assert_eq!(get(&server, LOCK).as_deref(), Some("lock_1804289383"));
}

#[test]
fn a_foreign_release_lets_a_waiter_in() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert!(foreign_take(&server, LOCK, "lock_1", 1_000_000));
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(foreign_release(&server, LOCK, "lock_1"));
    let guard = completes_within(60 * SECOND, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
}

#[test]
fn a_foreign_client_is_kept_out_and_can_follow() {
    let server = RedisServer::start();
    let guard = manager(&server).lock("x").unwrap();
    assert!(!foreign_take(&server, LOCK, "lock_1", 30_000));
    assert!(!foreign_release(&server, LOCK, "lock_1"));
    assert_eq!(guard.release().unwrap(), Released::Released);
    assert!(foreign_take(&server, LOCK, "lock_1", 30_000));
}

#[test]
fn a_foreign_holder_without_an_expiry_is_given_one() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.cli(&["SET", LOCK, "lock_1"]);
    assert!(mgr.try_lock("x").unwrap_err().is_contended());
    let left = pttl(&server, LOCK);
    assert!(left > 0 && left <= 60_000, "{left}");
    assert_eq!(get(&server, LOCK).as_deref(), Some("lock_1"));
    server.cli(&["PERSIST", LOCK]);
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    eventually("who waits gives it one", CEILING, || pttl(&server, LOCK) > 0);
    server.cli(&["PEXPIRE", LOCK, "1"]);
    let guard = waiting.join().unwrap().unwrap();
    assert!(guard.is_held());
}

#[test]
fn data_under_a_bare_name_is_never_given_an_expiry() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    server.cli(&["SET", "x", "somebody's data"]);
    assert!(mgr.try_lock("x").unwrap_err().is_contended());
    assert!(mgr.try_lock_for("x", Duration::from_millis(200)).unwrap_err().is_timeout());
    assert_eq!((pttl(&server, "x"), get(&server, "x").as_deref()), (-1, Some("somebody's data")));
}

#[test]
fn a_server_that_forgets_scripts_is_taught_again() {
    let server = RedisServer::start();
    let mgr = Arc::new(manager(&server));
    thread::scope(|threads| {
        let worker = threads.spawn(|| {
            for _ in 0..100 {
                mgr.lock("x").unwrap().release().unwrap().unwrap_released();
            }
        });
        while !worker.is_finished() {
            server.cli(&["SCRIPT", "FLUSH"]);
        }
    });
}

#[test]
fn one_server_over_its_socket_file() {
    let server = RedisServer::builder().unix_socket().start();
    let mgr = RedisMgr::new(config_long_timeouts(server.unix_url())).unwrap();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

/// Errors carry no nonce. One that comes twice is not taken for the answer to the next request.
#[test]
fn a_server_that_says_twice_that_it_does_not_know_a_script_is_asked_anew() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let twice = proxy.on_request(command("evalsha"), Fault::DuplicateReply);
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let guard = mgr.try_lock("x").unwrap();
    twice.wait_fired();
    guard.release().unwrap().unwrap_released();
}
