//! Runs that are told by hand, where the moment of a fault matters more than its chance.

use std::{cell::Cell, cell::RefCell, rc::Rc, sync::Arc};

use distlock::{LockLost, LockOptions, RedisMgr, Released, Result};

use super::{
    judge::Judge,
    net::{Link, Memory},
    plan::Plan,
    store::Keys,
    story::set_up,
    user::{Ear, Stage, begin, span},
    world::{Clock, Life, MS, SEC, Sim, Stalls, Time, here, live_in},
};

const HOUR: Time = 3_600 * SEC;
const FENCE: &[u8] = b"distlock:fence:{lock:x}";
const AHEAD: &[u8] = b"5000000000000000";

/// A network and nodes without faults, and one process on it.
fn scene(nodes: usize, act: impl FnOnce(&Sim, &RedisMgr) -> Result<()> + 'static) {
    scene_with(nodes, 10 * SEC, act);
}

fn scene_with(nodes: usize, ttl: Time, act: impl FnOnce(&Sim, &RedisMgr) -> Result<()> + 'static) {
    let sim = Sim::new(7, false);
    let mut plan = Plan::new(&mut sim.rng.borrow_mut());
    plan.nodes = nodes;
    (plan.ttl, plan.operation_timeout, plan.claim_window) = (ttl, SEC, SEC);
    (plan.link, plan.stalls, plan.breaks, plan.pool_size) = (Link::default(), Stalls::default(), 0, 10);
    live_in(Some(sim.clone()));
    let (users, ears) = (RefCell::default(), RefCell::default());
    let stage = Rc::new(Stage {
        sim: sim.clone(),
        judge: Judge::default(),
        plan,
        calm: Cell::new(true),
        users,
        ears,
        coming: Cell::new(0),
    });
    set_up(&stage);
    let process = sim.add_process(Clock { base: SEC, ppm: 0 });
    sim.net.borrow_mut().links.push(vec![Link::default(); nodes]);
    let actor = sim.start(process, move || {
        let sim = here();
        let mgr = begin(&stage, process, &Arc::new(Ear::default())).expect("a manager");
        if let Err(error) = act(&sim, &mgr) {
            sim.wrong(format!("did not work: {error}"));
        }
    });
    sim.run(|| sim.is_done(actor));
    sim.end();
    live_in(None);
    assert!(sim.faults_found().is_empty(), "{:#?}", sim.faults_found());
}

fn timed<T>(sim: &Sim, call: impl FnOnce() -> T) -> (T, Time) {
    let began = sim.now.get();
    let outcome = call();
    (outcome, sim.now.get() - began)
}

#[test]
fn a_lock_costs_two_trips() {
    scene(1, |sim, mgr| {
        drop(mgr.try_lock("x")?);
        let served = || sim.net.borrow().servers[0].served;
        let before = served();
        let (outcome, took) = timed(sim, || mgr.try_lock("x")?.release());
        assert_eq!(outcome?, Released::Released);
        assert_eq!(served() - before, 2);
        assert!(took < 2 * MS, "{took} ns");
        Ok(())
    });
}

#[test]
fn who_does_not_wait_is_back_in_time_though_most_nodes_are_silent() {
    scene(5, |sim, mgr| {
        (1..4).for_each(|node| sim.stop_node(node));
        let (outcome, took) = timed(sim, || mgr.try_lock("x"));
        assert!(outcome.is_err());
        assert!(took <= SEC + 10 * MS, "{} ms", took / MS);
        Ok(())
    });
}

#[test]
fn looking_at_a_lock_takes_one_operation_timeout_though_nodes_disagree() {
    scene(3, |sim, mgr| {
        sim.stop_node(1);
        sim.stop_node(2);
        drop(mgr.try_lock_for("x", span(50 * MS)));
        sim.sleep(2 * SEC);
        sim.continue_node(1);
        let guard = mgr.lock("x")?;
        {
            let now = sim.now.get();
            let node = &mut sim.net.borrow_mut().servers[0];
            let now_us = node.now_us(now);
            node.fake.keys.open(now_us, false).set(b"lock:x", b"somebody else", 60_000).expect("there is room");
        }
        let (outcome, took) = timed(sim, || mgr.holder("x"));
        assert!(outcome.is_err(), "one says this, and one that: {outcome:?}");
        assert!(took <= SEC + 10 * MS, "{} ms", took / MS);
        drop(guard);
        Ok(())
    });
}

#[test]
fn belief_does_not_survive_a_long_pause() {
    scene(1, |sim, mgr| {
        let guard = mgr.lock("x")?;
        let process = sim.process();
        sim.after(MS, move |sim| sim.pause(process, Life::Paused));
        sim.after(11 * SEC, move |sim| sim.unpause(process));
        sim.sleep(2 * MS);
        assert!(!guard.is_held());
        Ok(())
    });
}

#[test]
fn a_defect_in_one_lock_s_renewal_is_no_other_lock_s_trouble() {
    for nodes in [1, 3] {
        scene(nodes, |sim, mgr| {
            let guards = ["a", "bad", "c"].map(|name| mgr.lock(name));
            let [a, bad, c] = guards;
            let (a, bad, c) = (a?, bad?, c?);
            // They are renewed in one call.
            *sim.defect.borrow_mut() = Some("lock:bad");
            sim.sleep(9 * SEC);
            assert!(sim.panics.get() > 0 && bad.is_held(), "{} panics", sim.panics.get());
            sim.sleep(21 * SEC);
            assert!(a.is_held() && c.is_held());
            assert!(!bad.is_held());
            assert_eq!(bad.lost().try_recv(), Ok(LockLost::Expired));
            *sim.defect.borrow_mut() = None;
            drop(bad);
            let again = mgr.lock("bad")?;
            sim.sleep(30 * SEC);
            assert!(a.is_held() && again.is_held() && c.is_held());
            Ok(())
        });
    }
}

#[test]
fn a_defect_that_passes_within_the_lease_costs_no_lock() {
    scene(1, |sim, mgr| {
        let guard = mgr.lock("bad")?;
        *sim.defect.borrow_mut() = Some("lock:bad");
        sim.sleep(9 * SEC);
        let panics = sim.panics.get();
        assert!(panics > 0);
        *sim.defect.borrow_mut() = None;
        sim.sleep(30 * SEC);
        assert!(guard.is_held() && guard.lost().is_empty() && sim.panics.get() == panics);
        Ok(())
    });
}

#[test]
fn a_defect_in_what_is_taken_back_ends_no_renewal() {
    scene(3, |sim, mgr| {
        let guard = mgr.lock("a")?;
        sim.stop_node(2);
        drop(mgr.lock("gone")?);
        // What the silent node has not answered is the renewer's to take back.
        *sim.defect.borrow_mut() = Some("lock:gone");
        sim.sleep(5 * SEC);
        sim.continue_node(2);
        sim.sleep(30 * SEC);
        assert!(guard.is_held() && sim.panics.get() > 0);
        Ok(())
    });
}

#[test]
fn what_is_taken_back_waits_for_no_node_that_is_silent() {
    scene(5, |sim, mgr| {
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
        // As by a request that comes after all that was sent to undo it.
        keys(&|keys, now_us| keys.open(now_us, false).set(b"lock:x", id.as_bytes(), 60_000).expect("there is room"));
        sim.sleep(3 * SEC / 2);
        keys(&|keys, now_us| assert!(keys.peek(b"lock:x", now_us).is_none(), "it is there still"));
        Ok(())
    });
}

#[test]
fn a_release_that_a_shutdown_falls_into_takes_one_operation_timeout() {
    for nodes in [1, 3] {
        scene(nodes, move |sim, mgr| {
            let (guard, other) = (mgr.lock("x")?, mgr.lock("y")?);
            // Then releases are the renewer's, one after the other, until it ends.
            let taken = (0..10).map(|_| mgr.connection()).collect::<Result<Vec<_>>>()?;
            (0..nodes).for_each(|node| sim.stop_node(node));
            here().start(sim.process(), move || drop(other));
            let ends = mgr.clone();
            here().start(sim.process(), move || {
                here().sleep(SEC / 2);
                ends.shutdown();
            });
            sim.sleep(100 * MS);
            // At its end it is not known in time how the release went.
            let process = sim.process();
            sim.after(SEC - MS, move |sim| sim.pause(process, Life::Paused));
            sim.after(SEC + MS, move |sim| sim.unpause(process));
            let (outcome, took) = timed(sim, || guard.release());
            assert!(outcome.is_err() && took <= SEC + 10 * MS, "{outcome:?} after {} ms", took / MS);
            drop(taken);
            Ok(())
        });
    }
}

#[test]
fn a_lock_that_is_held_for_days_has_a_token_still() {
    for (nodes, ttl) in [(1, HOUR), (1, 17 * HOUR), (1, 24 * HOUR), (3, HOUR)] {
        scene_with(nodes, ttl, move |sim, mgr| {
            // As if a clock had been years ahead, so that no clock makes up for a token that is forgotten.
            for node in &mut sim.net.borrow_mut().servers {
                let now_us = node.now_us(sim.now.get());
                node.fake.keys.open(now_us, false).set(FENCE, AHEAD, 60_000).expect("there is room");
            }
            let guard = mgr.lock("x")?;
            sim.sleep(72 * HOUR);
            let holder = mgr.holder("x")?.expect("it is held");
            assert_eq!(holder.id(), guard.id().as_str());
            assert!(holder.held_for().is_some(), "nobody knows since when: {holder}");
            let token = guard.fencing_token();
            assert_eq!(guard.release()?, Released::Released);
            assert!(mgr.lock("x")?.fencing_token() > token);
            Ok(())
        });
    }
}

fn is_anywhere(sim: &Sim, name: &str) -> bool {
    let (now, key) = (sim.now.get(), format!("lock:{name}"));
    sim.net.borrow_mut().servers.iter_mut().any(|node| {
        let now_us = node.now_us(now);
        node.fake.keys.peek(key.as_bytes(), now_us).is_some()
    })
}

/// Goal: what short locks leave to be taken back on a node that answers long after the others is taken back as fast as it
/// comes. Method: one of three answers after 150 ms; some threads take locks, and give them up at once.
#[test]
fn what_short_locks_leave_on_a_distant_node_does_not_pile_up() {
    for (threads, locks) in [(1, 300), (8, 150)] {
        scene(3, move |sim, mgr| {
            drop(mgr.lock("warm")?);
            sim.sleep(2 * SEC);
            let process = sim.process();
            sim.net.borrow_mut().links[process][2] = Link { least: 75 * MS, most: 75 * MS, ..Link::default() };
            let name = |thread, lock| format!("x{thread}-{lock}");
            let mut users = Vec::new();
            for thread in 0..threads {
                let mgr = mgr.clone();
                users.push(here().start(process, move || {
                    for lock in 0..locks {
                        if let Err(error) = mgr.lock(&name(thread, lock)).and_then(|guard| guard.release()) {
                            here().wrong(format!("did not work: {error}"));
                        }
                    }
                }));
            }
            while !users.iter().all(|user| sim.is_done(*user)) {
                sim.sleep(MS);
            }
            // The last request is void after one second, and what may be left of it is taken back then.
            sim.sleep(3 * SEC);
            let left = (0..threads).flat_map(|thread| (0..locks).map(move |lock| name(thread, lock)));
            assert_eq!(left.filter(|name| is_anywhere(sim, name)).count(), 0, "they are there still");
            let served = || sim.net.borrow().servers[2].served;
            let before = served();
            sim.sleep(60 * SEC);
            assert_eq!(served() - before, 0, "so much was waiting to be taken back");
            Ok(())
        });
    }
}

/// Goal: what a distant node had not answered when the lock was taken is nothing to wait for once it is void.
#[test]
fn giving_up_a_lock_that_was_held_for_a_while_waits_for_no_distant_node() {
    scene(3, |sim, mgr| {
        drop(mgr.lock("warm")?);
        sim.sleep(2 * SEC);
        let process = sim.process();
        sim.net.borrow_mut().links[process][2] = Link { least: 75 * MS, most: 75 * MS, ..Link::default() };
        let guard = mgr.lock("x")?;
        sim.sleep(2 * SEC);
        let (outcome, took) = timed(sim, || guard.release());
        assert_eq!(outcome?, Released::Released);
        assert!(took < 10 * MS, "{} ms", took / MS);
        sim.sleep(SEC);
        assert!(!is_anywhere(sim, "x"));
        Ok(())
    });
}

/// All servers start anew without their data, and do not vote for a lease of ten seconds; returns when that is over at the
/// earliest. They are 150 ms away from now on.
fn forget_all(sim: &Sim) -> Time {
    for node in 0..3 {
        sim.kill_node(node, false);
        sim.start_node(node, Memory::Empty);
    }
    let far = Link { least: 150 * MS, most: 150 * MS, ..Link::default() };
    sim.net.borrow_mut().links[sim.process()].fill(far);
    sim.now.get() + 10 * SEC
}

/// Goal: a quarantine is no absence of the servers. Whoever waits without a limit, and for a lease that is shorter than it,
/// gets the lock when it ends, whatever was under way at that moment, and though the nodes are away for a while then.
#[test]
fn who_has_waited_for_the_end_of_a_quarantine_has_a_lease_of_patience_left() {
    for late in 0..10 {
        for are_away in [false, true] {
            scene(3, move |sim, mgr| {
                let end = forget_all(sim);
                sim.sleep(late * 50 * MS);
                if are_away {
                    sim.after(end - SEC - sim.now.get(), |sim| (0..3).for_each(|node| sim.stop_node(node)));
                    sim.after(end + 2 * SEC - sim.now.get(), |sim| (0..3).for_each(|node| sim.continue_node(node)));
                }
                drop(mgr.lock_with("x", &LockOptions::new().ttl(span(5 * SEC)))?);
                assert!(sim.now.get() > end, "there was no quarantine");
                Ok(())
            });
        }
    }
}

/// Goal: an answer that does not count says why, also if it would count by now. Method: it is asked until all count.
#[test]
fn who_is_refused_at_the_end_of_a_quarantine_is_told_of_it() {
    for late in 0..10 {
        scene(3, move |sim, mgr| {
            forget_all(sim);
            sim.sleep(late * 30 * MS);
            let mut refused = 0;
            while let Err(error) = mgr.try_lock("x") {
                refused += 1;
                for node in error.nodes() {
                    assert_ne!(node.message, "gives it", "{error}");
                }
            }
            assert!(refused > 3, "there was no quarantine");
            Ok(())
        });
    }
}
