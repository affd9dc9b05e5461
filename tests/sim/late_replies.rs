//! Renewals and repairs at a slow node.

use std::time::Duration;

use distlock::{LockGuard, LockOptions, testing::servers::Keys};

use super::{
    client::duration,
    net::Link,
    scripted::scripted,
    world::{MS, ProcessState, SEC, Sim, Time},
};

pub(super) const KEY: &[u8] = b"lock:x";

/// Delays what this process and a node send each other.
pub(super) fn delay(sim: &Sim, node: usize, one_way: Time) {
    sim.net.borrow_mut().links[sim.process()][node] =
        Link { min_delay: one_way, max_delay: one_way, ..Link::default() };
}

/// Changes the keys of a node; `act` also receives the time there.
pub(super) fn on_node<T>(sim: &Sim, node: usize, act: impl FnOnce(&mut Keys, u64) -> T) -> T {
    let (now, servers) = (sim.now.get(), &mut sim.net.borrow_mut().servers);
    let now_us = servers[node].now_us(now);
    act(&mut servers[node].fake.keys, now_us)
}

/// Another client gets this lock on a node.
pub(super) fn give_to_other_client(sim: &Sim, node: usize) {
    on_node(sim, node, |keys, now_us| {
        keys.open(now_us, false).set(KEY, b"other client", Some(600_000)).expect("there is room")
    });
}

/// One node has lost the lock to another client, so every renewal needs the slow node, whose
/// replies come after the wait for them. They extend the lease when they are read.
/// Fault: N101
#[test]
fn late_confirmations_keep_a_lease() {
    scripted(3, |sim, mgr| {
        let guard = mgr.lock("x")?;
        // The renewer has connected.
        sim.sleep(5 * SEC);
        give_to_other_client(sim, 1);
        delay(sim, 2, 300 * MS);
        sim.sleep(60 * SEC);
        assert!(guard.is_held());
        Ok(())
    });
}

/// A slow node that has lost the lock sets it again within a lease, although no renewal waits for
/// its reply.
/// Fault: N110
#[test]
fn late_loss_is_repaired_within_a_lease() {
    scripted(3, |sim, mgr| {
        let guard = mgr.lock("x")?;
        // The renewer has connected.
        sim.sleep(5 * SEC);
        delay(sim, 2, 75 * MS);
        sim.sleep(10 * SEC);
        on_node(sim, 2, |keys, _| keys.put(KEY, None, None));
        sim.sleep(10 * SEC);
        let is_back = on_node(sim, 2, |keys, now_us| keys.peek(KEY, now_us).is_some());
        assert!(is_back && guard.is_held());
        Ok(())
    });
}

/// A node has lost many locks, and setting them again there takes longer than a lease.
/// Fault: N26
#[test]
fn repair_of_many_locks_delays_no_renewal() {
    const MANY: usize = 300;
    scripted(3, |sim, mgr| {
        let held: distlock::Result<Vec<_>> =
            (0..MANY).map(|n| mgr.lock(&format!("n{n}"))).collect();
        let held = held?;
        // The renewer has connected.
        sim.sleep(5 * SEC);
        delay(sim, 1, 25 * MS);
        on_node(sim, 1, |keys, _| {
            (0..MANY).for_each(|n| keys.put(format!("lock:n{n}").as_bytes(), None, None));
        });
        for _ in 0..300 {
            sim.sleep(100 * MS);
            let least = held.iter().map(|guard| guard.remaining()).min();
            assert!(least > Some(duration(6 * SEC)), "{least:?} of 10 s are left");
        }
        let is_back = |n: &usize| {
            let key = format!("lock:n{n}");
            on_node(sim, 1, |keys, now_us| keys.peek(key.as_bytes(), now_us).is_some())
        };
        assert!((0..MANY).filter(is_back).count() > MANY / 2, "renewals prevent all repairs");
        Ok(())
    });
}

/// One node has lost a lock to another client, so its renewal needs the slow node. The renewal of
/// another lock, in the same request, does not.
/// Fault: N233
#[test]
fn confirmed_renewal_counts_while_another_lock_is_awaited() {
    scripted(3, |sim, mgr| {
        let (confirmed, awaited) = (mgr.lock("y")?, mgr.lock("x")?);
        // The renewer has connected.
        sim.sleep(5 * SEC);
        // Both are due when the process continues.
        let process = sim.process();
        sim.after(MS, move |sim| sim.pause(process, ProcessState::Paused));
        sim.after(4 * SEC, move |sim| sim.unpause(process));
        sim.sleep(5 * SEC);
        give_to_other_client(sim, 1);
        delay(sim, 2, 300 * MS);
        let mut left = confirmed.remaining();
        while confirmed.remaining() <= left {
            left = confirmed.remaining();
            sim.sleep(MS);
        }
        // The time counts from when the request was sent.
        let left = confirmed.remaining();
        assert!(left > duration(9_800 * MS), "{left:?} of 10 s are left");
        assert!(awaited.remaining() < duration(7 * SEC), "the other lock was renewed too");
        Ok(())
    });
}

/// One node keeps losing a lock, and then hangs, so both a repair and a probe wait for it. A wait
/// ends when a renewal that is due has no more time left than the wait has taken. The longest one
/// alone, from when two thirds of the lease are left, leaves a third. Two in a row leave a quarter.
/// Fault: N233
#[test]
fn repair_and_probe_do_not_delay_renewals_together() {
    scripted(3, |sim, mgr| {
        let ttl = 480 * MS;
        let guard = mgr.lock_with("x", &LockOptions::new().ttl(duration(ttl)))?;
        // So the node can be stopped between its reply and the repair.
        delay(sim, 2, 5 * MS);
        let served = || sim.net.borrow().servers[2].requests_served;
        let mut least = guard.remaining();
        for _ in 0..20 {
            // The renewer connects.
            least = least.min(least_remaining(sim, &guard, 2 * SEC));
            on_node(sim, 2, |keys, _| keys.put(KEY, None, None));
            let before = served();
            while served() == before && guard.is_held() {
                least = least.min(least_remaining(sim, &guard, MS));
            }
            sim.stop_node(2);
            least = least.min(least_remaining(sim, &guard, SEC));
            sim.continue_node(2);
        }
        assert!(least > duration(ttl * 7 / 24), "{least:?} of 480 ms are left");
        Ok(())
    });
}

/// The least time that was left of a lease, within this time.
fn least_remaining(sim: &Sim, guard: &LockGuard, within: Time) -> Duration {
    let until = sim.now.get() + within;
    let mut least = guard.remaining();
    while sim.now.get() < until {
        sim.sleep(2 * MS);
        least = least.min(guard.remaining());
    }
    least
}
