//! Replies to an acquisition that are lost, duplicated, false, or mixed up with others.

use distlock::{LockGuard, RedisMgr};

use crate::{
    helpers::{
        FENCE, SECOND, UnwrapReleased, await_gone, config_long_timeouts, config_medium_timeout,
        config_short_timeout, get, server_behind_proxy, spawn_call, spawn_queued_waiter, token_key,
        with_ttl,
    },
    support::{
        Fault, FaultProxy, RedisServer, TEST_TIMEOUT, any_request, command, contains, eventually,
    },
};

const LOCK: &str = "lock:x";

/// Fault: F19
/// Promise: P10
#[test]
fn acquire_with_a_lost_reply_finds_its_lock_again() {
    type Call = fn(&RedisMgr) -> distlock::Result<LockGuard>;
    let (lock, try_lock): (Call, Call) = (|mgr| mgr.lock("x"), |mgr| mgr.try_lock("x"));
    // try_lock has no time left for a second request once it has waited for a lost reply.
    for (fault, call) in [
        (Fault::DropReply, lock),
        (Fault::ResetAfterRequest, lock),
        (Fault::CloseAfterRequest, lock),
        (Fault::ResetAfterRequest, try_lock),
        (Fault::CloseAfterRequest, try_lock),
    ] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let lost = proxy.on_request(contains(LOCK), fault.clone());
        let guard = call(&mgr).unwrap();
        assert_eq!(lost.fired(), 1, "{fault:?}");
        assert!(guard.is_held());
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "{fault:?}");
        assert_eq!(
            get(&server, &token_key("x")),
            Some(guard.fencing_token().to_string()),
            "{fault:?}"
        );
        assert_eq!(server.keys(), [FENCE, &token_key("x"), LOCK]);
        drop(guard);
    }
}

/// The operation timeout is longer than the lease. The second request is sent early enough for the
/// lease that the first one began.
///
/// Fault: F19
#[test]
fn lost_reply_is_retried_before_a_short_lease_ends() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let lost = proxy.on_request(contains(LOCK), Fault::DropReply);
    let locking = spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(12 * SECOND)));
    lost.wait_fired();
    let first = get(&server, &token_key("x"));
    let guard = locking.join().unwrap().unwrap();
    assert_eq!(Some(guard.fencing_token().to_string()), first, "the first lease had ended");
}

/// Fault: F27
/// Promise: P10
#[test]
fn duplicate_reply_is_not_taken_for_the_next_one() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).ttl(10 * TEST_TIMEOUT));
    let doubled = proxy.on_request(contains(LOCK), Fault::DuplicateReply).forever();
    for _ in 0..20 {
        let guard = mgr.lock("x").unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
        assert!(mgr.try_lock("x").unwrap_err().is_contended());
        guard.release().unwrap().unwrap_released();
        // A second reply that arrives late can make a call repeat its request. The first request
        // may then reach the server after the release and take the lock; the clean-up deletes it
        // long before it expires.
        eventually("it is free", TEST_TIMEOUT, || get(&server, LOCK).is_none());
    }
    assert!(doubled.fired() >= 60);
}

/// Fault: F72
#[test]
fn false_reply_is_never_a_success() {
    let false_replies: [&[u8]; 12] = [
        b"+OK\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"$4\r\nheld\r\n",
        // Well-formed replies to other requests.
        b"$40\r\n1 held 1763712345678000 1763712345678000\r\n",
        b"$41\r\n1 held 1763712345678000 1763712345678000\r\n",
        b"*4\r\n$1\r\n1\r\n$4\r\nheld\r\n:1763712345678000\r\n:1763712345678000\r\n",
        b"$9223372036854775807\r\nx",
        b"*1000000000\r\n",
        b"\x00\xff\xfe garbage\r\n",
        b"%1\r\n+held\r\n+yes\r\n",
    ];
    for bytes in false_replies {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        let text = String::from_utf8_lossy(bytes);
        let replaced =
            proxy.on_request(contains(LOCK), Fault::ReplaceReply(bytes.to_vec())).forever();
        let error = mgr.try_lock("x").expect_err(&text);
        assert!(error.is_unavailable(), "{text:?}: {error}");
        replaced.disarm();
        await_gone(&server, LOCK);
        let guard = mgr.lock("x").unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "{text:?}");
    }
}

/// Promise: P10
#[test]
fn stray_reply_is_not_taken_for_the_one_after_it() {
    for stray in
        [&b"+OK\r\n"[..], b"$40\r\n1 held 1763712345678000 1763712345678000\r\n", b"-ERR no\r\n"]
    {
        let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
        let armed = proxy.on_request(contains(LOCK), Fault::PrependBytes(stray.to_vec()));
        let requests = || server.calls("evalsha");
        let before = requests();
        let outcome = mgr.lock("x");
        armed.wait_fired();
        match outcome {
            Ok(guard) => {
                assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
                // The second request used another connection; on the first one it would have
                // received the reply to the first request.
                assert_eq!(requests() - before, 2);
            }
            Err(error) => assert!(error.is_refused(), "{error}"),
        }
        // No connection that is used again has a stray reply left to read.
        for _ in 0..3 {
            let guard = mgr.lock("y").unwrap();
            assert_eq!(get(&server, "lock:y").as_deref(), Some(guard.id().as_str()));
        }
    }
}

/// Fault: F56
#[test]
fn reply_in_single_bytes_is_as_good_as_a_whole_one() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let sliced = proxy.on_request(any_request, Fault::SliceReply).forever();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    assert!(sliced.fired() > 3);
}

/// Errors carry no nonce. If the server reports an unknown script twice, the second error is not
/// taken for the reply to the next request.
#[test]
fn duplicate_noscript_error_does_not_fail_the_retry() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let twice = proxy.on_request(command("evalsha"), Fault::DuplicateReply);
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let guard = mgr.try_lock("x").unwrap();
    twice.wait_fired();
    guard.release().unwrap().unwrap_released();
}
