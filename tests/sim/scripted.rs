//! Runs that follow a script instead of chance, for faults whose exact moment matters.

use std::{cell::Cell, cell::RefCell, rc::Rc, sync::Arc};

use distlock::{LockLost, LockOptions, RedisMgr, Released, Result, testing::servers::Keys};

use super::{
    client::{EventLog, duration, new_manager},
    invariants::Invariants,
    net::{Link, RestartData},
    run::{Run, set_up},
    scenario::Scenario,
    world::{Clock, MS, ProcessState, SEC, Sim, Stalls, Time, current_sim, enter_sim},
};

const HOUR: Time = 3_600 * SEC;
const TOKEN_KEY: &[u8] = b"distlock:token:{lock:x}";
const FUTURE_TOKEN: &[u8] = b"5000000000000000";

/// Runs `act` in one process, on nodes and a network without faults.
pub(super) fn scripted(nodes: usize, act: impl FnOnce(&Sim, &RedisMgr) -> Result<()> + 'static) {
    scripted_with_ttl(nodes, 10 * SEC, act);
}

fn scripted_with_ttl(
    nodes: usize,
    ttl: Time,
    act: impl FnOnce(&Sim, &RedisMgr) -> Result<()> + 'static,
) {
    scripted_after(nodes, ttl, |_| (), act);
}

/// Calls `prepare` before the manager is created.
fn scripted_after(
    nodes: usize,
    ttl: Time,
    prepare: impl FnOnce(&Sim) + 'static,
    act: impl FnOnce(&Sim, &RedisMgr) -> Result<()> + 'static,
) {
    let sim = Sim::new(7, false);
    let mut scenario = Scenario::new(&mut sim.rng.borrow_mut());
    (scenario.nodes, scenario.durable) = (nodes, false);
    (scenario.ttl, scenario.operation_timeout, scenario.claim_window) = (ttl, SEC, SEC);
    (scenario.link, scenario.stalls, scenario.breaks_per_million, scenario.pool_size) =
        (Link::default(), Stalls::default(), 0, 10);
    enter_sim(Some(sim.clone()));
    let run = Rc::new(Run {
        sim: sim.clone(),
        invariants: Invariants::default(),
        scenario,
        fault_free: Cell::new(true),
        clients: RefCell::default(),
        event_logs: RefCell::default(),
        pending_restarts: Cell::new(0),
    });
    set_up(&run);
    let process = sim.add_process(Clock { base: SEC, drift_ppm: 0 });
    sim.net.borrow_mut().links.push(vec![Link::default(); nodes]);
    let thread = sim.start_thread(process, move || {
        let sim = current_sim();
        prepare(&sim);
        let mgr = new_manager(&run, process, &Arc::new(EventLog::default())).expect("a manager");
        if let Err(error) = act(&sim, &mgr) {
            sim.violation(format!("unexpected error: {error}"));
        }
    });
    sim.run_until(|| sim.is_done(thread));
    sim.shut_down();
    enter_sim(None);
    assert!(sim.violations().is_empty(), "{:#?}", sim.violations());
}

fn timed<T>(sim: &Sim, call: impl FnOnce() -> T) -> (T, Time) {
    let began = sim.now.get();
    let outcome = call();
    (outcome, sim.now.get() - began)
}

/// Fault: N254
/// Promise: P9
#[test]
fn node_that_hangs_delays_a_start_by_a_quarter_timeout() {
    let began = Rc::new(Cell::new(0));
    let at = began.clone();
    let prepare = move |sim: &Sim| {
        sim.stop_node(2);
        at.set(sim.now.get());
    };
    scripted_after(3, 10 * SEC, prepare, move |sim, mgr| {
        let took = sim.now.get() - began.get();
        assert!((SEC / 4..SEC / 4 + 10 * MS).contains(&took), "{} µs", took / 1_000);
        mgr.try_lock("x").map(drop)
    });
}

#[test]
fn lock_and_release_cost_two_requests() {
    scripted(1, |sim, mgr| {
        drop(mgr.try_lock("x")?);
        let served = || sim.net.borrow().servers[0].requests_served;
        let before = served();
        let (outcome, took) = timed(sim, || mgr.try_lock("x")?.release());
        assert_eq!(outcome?, Released::Released);
        assert_eq!(served() - before, 2);
        assert!(took < 2 * MS, "{took} ns");
        Ok(())
    });
}

#[test]
fn try_lock_returns_in_time_if_most_nodes_are_silent() {
    scripted(5, |sim, mgr| {
        (1..4).for_each(|node| sim.stop_node(node));
        let (outcome, took) = timed(sim, || mgr.try_lock("x"));
        assert!(outcome.is_err());
        assert!(took <= SEC + 10 * MS, "{} ms", took / MS);
        Ok(())
    });
}

#[test]
fn holder_takes_one_timeout_if_nodes_disagree() {
    scripted(3, |sim, mgr| {
        sim.stop_node(1);
        sim.stop_node(2);
        drop(mgr.try_lock_for("x", duration(50 * MS)));
        sim.sleep(2 * SEC);
        sim.continue_node(1);
        let guard = mgr.lock("x")?;
        {
            let now = sim.now.get();
            let node = &mut sim.net.borrow_mut().servers[0];
            let now_us = node.now_us(now);
            node.fake
                .keys
                .open(now_us, false)
                .set(b"lock:x", b"somebody else", Some(60_000))
                .expect("there is room");
        }
        let (outcome, took) = timed(sim, || mgr.holder("x"));
        assert!(outcome.is_err(), "the nodes disagree: {outcome:?}");
        assert!(took <= SEC + 10 * MS, "{} ms", took / MS);
        drop(guard);
        Ok(())
    });
}

#[test]
fn guard_is_not_held_after_pause_beyond_lease() {
    scripted(1, |sim, mgr| {
        let guard = mgr.lock("x")?;
        let process = sim.process();
        sim.after(MS, move |sim| sim.pause(process, ProcessState::Paused));
        sim.after(11 * SEC, move |sim| sim.unpause(process));
        sim.sleep(2 * MS);
        assert!(!guard.is_held());
        Ok(())
    });
}

/// Fault: F13
#[test]
fn panic_in_one_renewal_costs_no_other_lock() {
    for nodes in [1, 3] {
        scripted(nodes, |sim, mgr| {
            let guards = ["a", "bad", "c"].map(|name| mgr.lock(name));
            let [a, bad, c] = guards;
            let (a, bad, c) = (a?, bad?, c?);
            // All three are renewed in one call.
            *sim.panic_on_write_of.borrow_mut() = Some("lock:bad");
            sim.sleep(9 * SEC);
            assert!(sim.panic_count.get() > 0 && bad.is_held(), "{} panics", sim.panic_count.get());
            sim.sleep(21 * SEC);
            assert!(a.is_held() && c.is_held());
            assert!(!bad.is_held());
            assert_eq!(bad.lost().try_recv(), Ok(LockLost::Expired));
            *sim.panic_on_write_of.borrow_mut() = None;
            drop(bad);
            let again = mgr.lock("bad")?;
            sim.sleep(30 * SEC);
            assert!(a.is_held() && again.is_held() && c.is_held());
            Ok(())
        });
    }
}

/// Fault: F13
#[test]
fn panic_that_ends_within_lease_costs_no_lock() {
    scripted(1, |sim, mgr| {
        let guard = mgr.lock("bad")?;
        *sim.panic_on_write_of.borrow_mut() = Some("lock:bad");
        sim.sleep(9 * SEC);
        let panics = sim.panic_count.get();
        assert!(panics > 0);
        *sim.panic_on_write_of.borrow_mut() = None;
        sim.sleep(30 * SEC);
        assert!(guard.is_held() && guard.lost().is_empty() && sim.panic_count.get() == panics);
        Ok(())
    });
}

/// Fault: F13
#[test]
fn panic_in_clean_up_does_not_stop_renewals() {
    scripted(3, |sim, mgr| {
        let guard = mgr.lock("a")?;
        sim.stop_node(2);
        drop(mgr.lock("gone")?);
        // The stopped node has not replied, so it must be cleaned up there.
        *sim.panic_on_write_of.borrow_mut() = Some("lock:gone");
        sim.sleep(5 * SEC);
        sim.continue_node(2);
        sim.sleep(30 * SEC);
        assert!(guard.is_held() && sim.panic_count.get() > 0);
        Ok(())
    });
}

/// Fault: F13
#[test]
fn panic_in_clean_up_does_not_stop_clean_up() {
    for nodes in [1, 3] {
        scripted(nodes, move |sim, mgr| {
            let [a, bad, c] = ["a", "bad", "c"].map(|name| mgr.lock(name));
            (0..nodes).for_each(|node| sim.stop_node(node));
            [a?, bad?, c?].into_iter().for_each(|guard| assert!(guard.release().is_err()));
            *sim.panic_on_write_of.borrow_mut() = Some("lock:bad");
            (0..nodes).for_each(|node| sim.continue_node(node));
            sim.sleep(3 * SEC);
            assert!(sim.panic_count.get() > 0);
            assert!(!exists_on_any_node(sim, "a") && !exists_on_any_node(sim, "c"));

            let later = mgr.lock("later")?;
            (0..nodes).for_each(|node| sim.stop_node(node));
            assert!(later.release().is_err());
            (0..nodes).for_each(|node| sim.continue_node(node));
            sim.sleep(3 * SEC);
            assert!(!exists_on_any_node(sim, "later"));
            Ok(())
        });
    }
}

/// If no thread can be started for the clean-up, the next residue tries again, and a shutdown
/// cleans up without one.
///
/// Fault: F11
#[test]
fn failed_start_of_the_clean_up_is_made_up_for() {
    for nodes in [1, 3] {
        scripted(nodes, move |sim, mgr| {
            let (first, second, last) = (mgr.lock("a")?, mgr.lock("b")?, mgr.lock("c")?);
            (0..nodes).for_each(|node| sim.stop_node(node));
            sim.refused_thread.set(Some("distlock-cleanup"));
            assert!(first.release().is_err());
            sim.refused_thread.set(None);
            assert!(second.release().is_err());
            (0..nodes).for_each(|node| sim.continue_node(node));
            sim.sleep(4 * SEC);
            assert!(!exists_on_any_node(sim, "a") && !exists_on_any_node(sim, "b"));
            sim.refused_thread.set(Some("distlock-cleanup"));
            mgr.shutdown();
            assert!(!exists_on_any_node(sim, "c"));
            drop(last);
            Ok(())
        });
    }
}

#[test]
fn clean_up_does_not_wait_for_silent_node() {
    scripted(5, |sim, mgr| {
        drop(mgr.lock("warm")?);
        sim.sleep(100 * MS);
        sim.stop_node(3);
        sim.stop_node(4);
        for name in ["a", "b", "c"] {
            drop(mgr.lock(name)?);
        }
        let guard = mgr.lock("x")?;
        let id = guard.id().to_string();
        drop(guard);
        sim.continue_node(4);
        sim.sleep(100 * MS);
        let keys = |act: &dyn Fn(&mut Keys, u64)| {
            let now = sim.now.get();
            let node = &mut sim.net.borrow_mut().servers[4];
            let now_us = node.now_us(now);
            act(&mut node.fake.keys, now_us);
        };
        // As if the acquire arrived after everything that was sent to undo it.
        keys(&|keys, now_us| {
            keys.open(now_us, false)
                .set(b"lock:x", id.as_bytes(), Some(60_000))
                .expect("there is room")
        });
        sim.sleep(3 * SEC / 2);
        keys(&|keys, now_us| {
            assert!(keys.peek(b"lock:x", now_us).is_none(), "the key is still there")
        });
        Ok(())
    });
}

#[test]
fn release_during_shutdown_takes_one_timeout() {
    for nodes in [1, 3] {
        scripted(nodes, move |sim, mgr| {
            let (guard, other) = (mgr.lock("x")?, mgr.lock("y")?);
            // Without free connections, releases take turns.
            let connections = (0..10).map(|_| mgr.connection()).collect::<Result<Vec<_>>>()?;
            (0..nodes).for_each(|node| sim.stop_node(node));
            // The first one gets the only turn.
            let first = Rc::new(Cell::new(None));
            let first_took = first.clone();
            current_sim().start_thread(sim.process(), move || {
                first_took.set(Some(timed(&current_sim(), || drop(other)).1));
            });
            let mgr_to_shut_down = mgr.clone();
            current_sim().start_thread(sim.process(), move || {
                current_sim().sleep(SEC / 2);
                mgr_to_shut_down.shutdown();
            });
            sim.sleep(100 * MS);
            // The process is paused when the release must end, so its outcome is not known in time.
            let process = sim.process();
            sim.after(SEC - MS, move |sim| sim.pause(process, ProcessState::Paused));
            sim.after(SEC + MS, move |sim| sim.unpause(process));
            let (outcome, took) = timed(sim, || guard.release());
            assert!(
                outcome.is_err() && took <= SEC + 10 * MS,
                "{outcome:?} after {} ms",
                took / MS
            );
            sim.sleep(2 * SEC);
            assert!(first.get().is_some_and(|took| took <= SEC + 10 * MS), "{first:?}");
            drop(connections);
            Ok(())
        });
    }
}

/// Fault: N88
#[test]
fn lock_held_for_days_keeps_its_token() {
    for (nodes, ttl) in [(1, HOUR), (1, 17 * HOUR), (1, 24 * HOUR), (3, HOUR)] {
        scripted_with_ttl(nodes, ttl, move |sim, mgr| {
            // As if a clock had been years ahead, so that no clock can make up for a token that is
            // lost.
            for node in &mut sim.net.borrow_mut().servers {
                let now_us = node.now_us(sim.now.get());
                node.fake
                    .keys
                    .open(now_us, false)
                    .set(TOKEN_KEY, FUTURE_TOKEN, Some(60_000))
                    .expect("there is room");
            }
            let guard = mgr.lock("x")?;
            sim.sleep(72 * HOUR);
            let holder = mgr.holder("x")?.expect("it is held");
            assert_eq!(holder.id(), guard.id().as_str());
            assert!(holder.held_for().is_some(), "the time of the grant is unknown: {holder}");
            let token = guard.fencing_token();
            assert_eq!(guard.release()?, Released::Released);
            assert!(mgr.lock("x")?.fencing_token() > token);
            Ok(())
        });
    }
}

fn exists_on_any_node(sim: &Sim, name: &str) -> bool {
    let (now, key) = (sim.now.get(), format!("lock:{name}"));
    sim.net.borrow_mut().servers.iter_mut().any(|node| {
        let now_us = node.now_us(now);
        node.fake.keys.peek(key.as_bytes(), now_us).is_some()
    })
}

/// Locks that are held for a moment leave work for the clean-up on a node that replies long after
/// the others. It is done as fast as it arises. One of three nodes replies after 150 ms; threads
/// acquire locks and release them at once.
/// Fault: N112
#[test]
fn clean_up_on_slow_node_does_not_pile_up() {
    for (threads, locks) in [(1, 300), (8, 150)] {
        scripted(3, move |sim, mgr| {
            drop(mgr.lock("warm")?);
            sim.sleep(2 * SEC);
            let process = sim.process();
            sim.net.borrow_mut().links[process][2] =
                Link { min_delay: 75 * MS, max_delay: 75 * MS, ..Link::default() };
            let name = |thread, lock| format!("x{thread}-{lock}");
            let mut workers = Vec::new();
            for thread in 0..threads {
                let mgr = mgr.clone();
                workers.push(current_sim().start_thread(process, move || {
                    for lock in 0..locks {
                        if let Err(error) =
                            mgr.lock(&name(thread, lock)).and_then(|guard| guard.release())
                        {
                            current_sim().violation(format!("unexpected error: {error}"));
                        }
                    }
                }));
            }
            while !workers.iter().all(|worker| sim.is_done(*worker)) {
                sim.sleep(MS);
            }
            // The last request expires after one second, and is then cleaned up.
            sim.sleep(3 * SEC);
            let left =
                (0..threads).flat_map(|thread| (0..locks).map(move |lock| name(thread, lock)));
            assert_eq!(
                left.filter(|name| exists_on_any_node(sim, name)).count(),
                0,
                "some keys are left"
            );
            let served = || sim.net.borrow().servers[2].requests_served;
            let before = served();
            sim.sleep(60 * SEC);
            // A manager without locks probes its nodes every third of the ttl.
            let probes = 60 * 3 / 10;
            assert!(served() - before <= probes, "clean-up requests were still pending");
            Ok(())
        });
    }
}

/// A slow node had not replied when the lock was acquired. Once that request has expired, a release
/// does not wait for the node.
/// Fault: N112
#[test]
fn late_release_does_not_wait_for_slow_node() {
    scripted(3, |sim, mgr| {
        drop(mgr.lock("warm")?);
        sim.sleep(2 * SEC);
        let process = sim.process();
        sim.net.borrow_mut().links[process][2] =
            Link { min_delay: 75 * MS, max_delay: 75 * MS, ..Link::default() };
        let guard = mgr.lock("x")?;
        sim.sleep(2 * SEC);
        let (outcome, took) = timed(sim, || guard.release());
        assert_eq!(outcome?, Released::Released);
        assert!(took < 10 * MS, "{} ms", took / MS);
        sim.sleep(SEC);
        assert!(!exists_on_any_node(sim, "x"));
        Ok(())
    });
}

/// Restarts all nodes without their data, and delays them by 150 ms each way. They do not vote for
/// ten seconds. Returns the earliest end of that quarantine.
fn restart_all_empty(sim: &Sim) -> Time {
    for node in 0..3 {
        sim.crash_node(node, false);
        sim.start_node(node, RestartData::Empty);
    }
    let slow = Link { min_delay: 150 * MS, max_delay: 150 * MS, ..Link::default() };
    sim.net.borrow_mut().links[sim.process()].fill(slow);
    sim.now.get() + 10 * SEC
}

/// A quarantine is not an outage. A client without a wait limit gets its lock when the quarantine
/// ends, even though its lease is shorter than the quarantine. Neither requests in flight at that
/// moment nor a short outage change that.
/// Fault: N127
#[test]
fn waiter_gets_lock_when_quarantine_ends() {
    for delay in 0..10 {
        for outage in [false, true] {
            scripted(3, move |sim, mgr| {
                let end = restart_all_empty(sim);
                sim.sleep(delay * 50 * MS);
                if outage {
                    sim.after(end - SEC - sim.now.get(), |sim| {
                        (0..3).for_each(|node| sim.stop_node(node))
                    });
                    sim.after(end + 2 * SEC - sim.now.get(), |sim| {
                        (0..3).for_each(|node| sim.continue_node(node))
                    });
                }
                drop(mgr.lock_with("x", &LockOptions::new().ttl(duration(5 * SEC)))?);
                assert!(sim.now.get() > end, "there was no quarantine");
                Ok(())
            });
        }
    }
}

/// A vote that did not count because of the quarantine says so, even if it would count by now.
/// Fault: N127
#[test]
fn quarantined_vote_is_never_reported_as_granted() {
    for delay in 0..10 {
        scripted(3, move |sim, mgr| {
            restart_all_empty(sim);
            sim.sleep(delay * 30 * MS);
            let mut refused = 0;
            while let Err(error) = mgr.try_lock("x") {
                refused += 1;
                for node in error.nodes() {
                    assert_ne!(node.message, "granted", "{error}");
                }
            }
            assert!(refused > 3, "there was no quarantine");
            Ok(())
        });
    }
}
