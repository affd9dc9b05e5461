//! One thread keeps all locks of a manager: what goes wrong with one of them must not cost another.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use distlock::LockGuard;

use crate::faults::is_renewed;
use crate::{
    helpers::{SECOND, config_long_timeouts, is_renewal, server_behind_proxy, with_ttl},
    support::{CEILING, Fault, command, contains, eventually},
};

/// What is taken back waits for an answer that never comes, far longer than the lease of a lock
/// that is taken meanwhile.
#[test]
fn a_lost_answer_to_taking_back_costs_no_other_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    // The renewer is connected, and has asked for what it asks here.
    is_renewed(&server, &mgr.lock_with("a", &with_ttl(3 * SECOND)).unwrap(), 1);
    let left = mgr.lock_with("a", &with_ttl(SECOND).renew(false)).unwrap();
    let dropped = proxy.on_request(contains("lock:a"), Fault::DropReply);
    assert!(left.lost().recv().is_ok());
    dropped.wait_fired();
    let other = mgr.lock_with("b", &with_ttl(6 * SECOND)).unwrap();
    is_renewed(&server, &other, 3);
}

/// The same with the answer to a renewal, whose lease has much time left.
#[test]
fn a_lost_answer_to_a_renewal_costs_no_shorter_lease() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let long = mgr.lock_with("a", &with_ttl(24 * SECOND)).unwrap();
    proxy.on_request(is_renewal("lock:a"), Fault::DropReply).wait_fired();
    let short = mgr.lock_with("b", &with_ttl(6 * SECOND)).unwrap();
    is_renewed(&server, &short, 3);
    is_renewed(&server, &long, 1);
}

/// Goal: a batch that fails costs nothing to the locks that were to come after it. Method: far more
/// fall due than go into one batch, since the answer to any smaller one is held until then; and the
/// first full one gets no answer.
#[test]
fn a_batch_that_fails_costs_no_lock_that_was_to_come_after_it() {
    const MANY: usize = 250;
    let ttl = 18 * SECOND;
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(2 * SECOND));
    let renewed = |words: &[Vec<u8>]| {
        let begins = |with: &[u8]| words.iter().filter(|word| word.starts_with(with)).count();
        if begins(b"distlock:") > 0 { 0 } else { begins(b"lock:n") }
    };
    let full = proxy.on_request(move |words| renewed(words) == 100, Fault::DropReply);
    let smaller = proxy.on_request(move |words| renewed(words) > 0, Fault::HoldReply);
    let guards: Vec<_> =
        (0..MANY).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(ttl)).unwrap()).collect();
    eventually("all are due", CEILING, || {
        guards.iter().all(|guard| guard.remaining() < ttl * 5 / 8)
    });
    let before: Vec<_> = guards.iter().map(LockGuard::remaining).collect();
    smaller.let_go();
    full.wait_fired();
    let mut waiting: Vec<_> = guards.iter().zip(before).collect();
    eventually("each is renewed", CEILING, || {
        // Time left only grows by a renewal.
        waiting.retain(|(guard, before)| {
            assert!(guard.is_held(), "{guard:?}");
            guard.remaining() <= *before
        });
        waiting.is_empty()
    });
}

/// Goal: leases that nobody renews do not keep the renewer from connecting anew. Method: they end
/// all the time, each sooner than the server signs anybody in.
#[test]
fn leases_that_end_do_not_keep_the_renewer_from_connecting() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let kept = mgr.lock_with("kept", &with_ttl(6 * SECOND)).unwrap();
    is_renewed(&server, &kept, 1);
    let (over, taken, mgr) = (AtomicBool::new(false), AtomicUsize::new(0), &mgr);
    thread::scope(|threads| {
        for thread in 0..8 {
            let (over, taken) = (&over, &taken);
            threads.spawn(move || {
                let brief = with_ttl(SECOND / 5).renew(false).wait(SECOND);
                while !over.load(Ordering::Acquire) {
                    // On a slow machine it may be over before it is there.
                    let Ok(guard) = mgr.lock_with(&format!("brief{thread}"), &brief) else {
                        continue;
                    };
                    taken.fetch_add(1, Ordering::AcqRel);
                    assert!(guard.lost().recv().is_ok());
                }
            });
        }
        let renewed = thread::Builder::new().spawn_scoped(threads, || {
            eventually("they are under way", CEILING, || taken.load(Ordering::Acquire) >= 40);
            proxy.on_request(command("TIME"), Fault::DelayReply(3 * SECOND / 10)).forever();
            proxy.on_request(is_renewal("lock:kept"), Fault::ResetAfterRequest).wait_fired();
            is_renewed(&server, &kept, 3);
        });
        let renewed = renewed.unwrap().join();
        over.store(true, Ordering::Release);
        renewed.unwrap();
    });
}
