//! One thread renews all locks of a manager, so a fault of one lock must not affect the others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{LockGuard, RedisMgr, testing::servers::Script};

use crate::faults::expect_renewals;
use crate::{
    helpers::{
        SECOND, config_long_timeouts, config_medium_timeout, is_renewal, server_behind_proxy,
        with_ttl,
    },
    support::{Fault, FaultProxy, Nodes, TEST_TIMEOUT, command, contains, eventually, larger_than},
};

/// The renewer cleans up an expired lock, and the reply never comes. The operation timeout is far
/// longer than the lease of another lock, which must be renewed all the same.
///
/// Fault: N25
#[test]
fn lost_clean_up_reply_does_not_stop_other_renewals() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    // Connect the renewer and let it send its first requests before the fault.
    expect_renewals(&server, &mgr.lock_with("a", &with_ttl(3 * SECOND)).unwrap(), 1);
    let expiring = mgr.lock_with("a", &with_ttl(SECOND).renew(false)).unwrap();
    let dropped = proxy.on_request(contains("lock:a"), Fault::DropReply);
    assert!(expiring.lost().recv().is_ok());
    dropped.wait_fired();
    let other = mgr.lock_with("b", &with_ttl(6 * SECOND)).unwrap();
    expect_renewals(&server, &other, 3);
}

/// The same if the lost reply is that of a renewal, whose lease has much time left.
///
/// Fault: N25
#[test]
fn lost_renewal_reply_does_not_stop_renewal_of_shorter_ttl() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let long = mgr.lock_with("a", &with_ttl(24 * SECOND)).unwrap();
    proxy.on_request(is_renewal("lock:a"), Fault::DropReply).wait_fired();
    let short = mgr.lock_with("b", &with_ttl(6 * SECOND)).unwrap();
    expect_renewals(&server, &short, 3);
    expect_renewals(&server, &long, 1);
}

/// Goal: a failed batch of renewals does not affect the locks in the following batches. Method:
/// replies to small batches are held back until more locks are due than fit into one exchange. The
/// connection is then reset during the first full batch.
///
/// Fault: F24
#[test]
fn failed_renewal_batch_does_not_affect_the_next_ones() {
    // One exchange renews a thousand.
    const LOCKS: usize = 1_250;
    let ttl = 30 * SECOND;
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let renewed = |words: &[Vec<u8>]| {
        let count = |prefix: &[u8]| words.iter().filter(|word| word.starts_with(prefix)).count();
        if count(b"distlock:") > 0 { 0 } else { count(b"lock:n") }
    };
    let full = proxy.on_request(move |words| renewed(words) == 100, Fault::ResetAfterRequest);
    let smaller = proxy.on_request(move |words| renewed(words) > 0, Fault::HoldReply);
    let guards: Vec<_> =
        (0..LOCKS).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(ttl)).unwrap()).collect();
    eventually("all renewals are due", TEST_TIMEOUT, || {
        guards.iter().all(|guard| guard.remaining() < ttl * 5 / 8)
    });
    let before: Vec<_> = guards.iter().map(LockGuard::remaining).collect();
    smaller.release();
    full.wait_fired();
    let mut waiting: Vec<_> = guards.iter().zip(before).collect();
    eventually("each lock is renewed", TEST_TIMEOUT, || {
        // Only a renewal increases the remaining time.
        waiting.retain(|(guard, before)| {
            assert!(guard.is_held(), "{guard:?}");
            guard.remaining() <= *before
        });
        waiting.is_empty()
    });
}

/// Goal: many members of one group are renewed in one exchange. Method: replies to renewals are
/// held back, first until all members are due, and then until there is a request for each of them.
///
/// Fault: F66
#[test]
fn thousand_permits_are_renewed_in_one_exchange() {
    const PERMITS: usize = 1_000;
    let ttl = 30 * SECOND;
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let permits = mgr.semaphore("s", PERMITS as u32).unwrap();
    let guards = (0..PERMITS).map(|_| permits.acquire_with(1, &with_ttl(ttl)).unwrap());
    let guards: Vec<_> = guards.map(LockGuard::from).collect();
    // The first renewal sends the script.
    guards[0].renew().unwrap();
    // The requests of the exchange that is held back, and those after it.
    let renewed = Arc::new([const { AtomicUsize::new(0) }; 2]);
    let (counts, part) = (renewed.clone(), Arc::new(AtomicUsize::new(0)));
    let current = part.clone();
    let counted = move |words: &[Vec<u8>]| {
        let members = words.iter().filter(|word| **word == b"lock:s").count();
        counts[current.load(Ordering::Acquire)].fetch_add(members, Ordering::AcqRel);
        false
    };
    proxy.on_request(counted, Fault::DropReply);
    let held_back = proxy.on_request(contains("lock:s"), Fault::HoldReply);
    held_back.wait_fired();
    eventually("all others are due", TEST_TIMEOUT, || {
        guards.iter().all(|guard| guard.remaining() < ttl * 5 / 8)
    });
    let before: Vec<_> = guards.iter().map(LockGuard::remaining).collect();
    part.store(1, Ordering::Release);
    let next = proxy.on_request(contains("lock:s"), Fault::HoldReply);
    held_back.release();
    next.wait_fired();
    eventually("one exchange has all others", TEST_TIMEOUT, || {
        renewed.iter().map(|count| count.load(Ordering::Acquire)).sum::<usize>() == PERMITS
    });
    assert!(renewed[1].load(Ordering::Acquire) > PERMITS / 2, "{renewed:?}");
    next.release();
    eventually("each is renewed", TEST_TIMEOUT, || {
        guards.iter().zip(&before).all(|(guard, before)| guard.remaining() > *before)
    });
}

/// Goal: leases without renewal do not keep the renewer from reconnecting. Method: they expire all
/// the time, each sooner than a handshake with the server takes.
///
/// Fault: N27
#[test]
fn expiring_leases_do_not_keep_the_renewer_from_reconnecting() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let kept = mgr.lock_with("kept", &with_ttl(6 * SECOND)).unwrap();
    expect_renewals(&server, &kept, 1);
    let (done, acquired, mgr) = (AtomicBool::new(false), AtomicUsize::new(0), &mgr);
    thread::scope(|threads| {
        for thread in 0..8 {
            let (done, acquired) = (&done, &acquired);
            threads.spawn(move || {
                let brief = with_ttl(SECOND / 5).renew(false).wait(SECOND);
                while !done.load(Ordering::Acquire) {
                    // On a slow machine the lease may expire before the grant is received.
                    let Ok(guard) = mgr.lock_with(&format!("brief{thread}"), &brief) else {
                        continue;
                    };
                    acquired.fetch_add(1, Ordering::AcqRel);
                    assert!(guard.lost().recv().is_ok());
                }
            });
        }
        let renewed = thread::Builder::new().spawn_scoped(threads, || {
            eventually("leases expire", TEST_TIMEOUT, || acquired.load(Ordering::Acquire) >= 40);
            proxy.on_request(command("TIME"), Fault::DelayReply(3 * SECOND / 10)).forever();
            proxy.on_request(is_renewal("lock:kept"), Fault::ResetAfterRequest).wait_fired();
            expect_renewals(&server, &kept, 3);
        });
        let renewed = renewed.unwrap().join();
        done.store(true, Ordering::Release);
        renewed.unwrap();
    });
}

/// Locks whose renewals do not fit into one request of [`PATH_MTU`] bytes.
const LOCKS: usize = 30;
const PATH_MTU: usize = 1400;

/// Holds locks for three leases while the proxies lose large requests. The servers know the script
/// that renews, but not the one that releases, which therefore does not get through.
#[track_caller]
fn expect_held_while_large_requests_vanish(mgr: &RedisMgr, proxies: &[&FaultProxy]) {
    let ttl = with_ttl(6 * SECOND);
    let released = mgr.lock_with("released", &ttl).unwrap();
    let guards = (0..LOCKS).map(|n| mgr.lock_with(&format!("n{n}"), &ttl).unwrap());
    let mut guards: Vec<_> = guards.map(|guard| (guard.remaining(), 0, guard)).collect();
    let vanish = |proxy: &&FaultProxy| {
        proxy.on_request(larger_than(PATH_MTU), Fault::SwallowRequest).forever()
    };
    let faults: Vec<_> = proxies.iter().map(vanish).collect();
    released.release().unwrap_err();
    eventually("all are renewed for three leases", TEST_TIMEOUT, || {
        for (last, renewals, guard) in &mut guards {
            guard.ensure_held().unwrap();
            let left = guard.remaining();
            // Only a renewal increases the time left.
            *renewals += usize::from(left > *last);
            *last = left;
        }
        // A lease is renewed when a third of it has passed.
        guards.iter().all(|(_, renewals, _)| *renewals >= 9)
    });
    for fault in faults {
        assert!(fault.fired() > 1, "{}", fault.fired());
        // The releases must get through.
        fault.disarm();
    }
}

/// Fault: N143
/// Promise: P8
#[test]
fn locks_survive_on_a_path_that_loses_large_requests() {
    let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
    server.cli(&["SCRIPT", "FLUSH"]);
    server.cli(&["SCRIPT", "LOAD", Script::Renew.text()]);
    expect_held_while_large_requests_vanish(&mgr, &[&proxy]);
}

/// Fault: N143
/// Promise: P8
#[test]
fn locks_on_nodes_survive_paths_that_lose_large_requests() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO));
    let mgr = mgr.unwrap();
    // The nodes learn the script.
    let warm = mgr.lock_with("warm", &with_ttl(3 * SECOND)).unwrap();
    expect_renewals(nodes.server(0), &warm, 1);
    expect_held_while_large_requests_vanish(&mgr, &[0, 1, 2].map(|node| nodes.proxy(node)));
}
