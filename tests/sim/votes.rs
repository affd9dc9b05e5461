//! Votes of lost rounds, and the vote of a queue node that is far away.

use distlock::{LockError, LockOptions, RedisMgr, testing::servers::Data};

use super::{
    client::duration,
    late_replies::{KEY, delay, give_to_other_client, on_node},
    net::RestartData,
    scripted::scripted,
    world::{MS, SEC, Sim, Time, current_sim},
};

const QUEUE_KEY: &[u8] = b"distlock:queue:{lock:x}";

/// The nodes in the order in which clients prefer them. The first is the queue node.
fn nodes_in_order(sim: &Sim) -> [usize; 3] {
    let mut nodes = [0, 1, 2];
    nodes.sort_by_key(|node| sim.net.borrow().servers[*node].fake.run_id);
    nodes
}

/// Delays a node by 40 ms each way, and acquires a lock that needs its vote.
fn move_away(sim: &Sim, mgr: &RedisMgr, node: usize) -> distlock::Result<()> {
    let other = (node + 1) % 3;
    delay(sim, node, 40 * MS);
    sim.stop_node(other);
    drop(mgr.lock("warm")?);
    sim.continue_node(other);
    sim.sleep(3 * SEC);
    Ok(())
}

/// A waiter has been granted the lock on the queue node, and not on the others yet. Those grant it
/// to a newcomer long before the queue node replies.
///
/// Fault: N200
/// Promise: P4
#[test]
fn newcomer_waits_for_a_distant_queue_node() {
    scripted(3, |sim, mgr| {
        let [queue_node, ..] = nodes_in_order(sim);
        move_away(sim, mgr, queue_node)?;
        give_to_other_client(sim, queue_node);
        let error = mgr.try_lock("x").expect_err("a waiter has the queue node");
        assert_eq!(error.holder().map(|holder| holder.id()), Some("other client"), "{error:?}");
        Ok(())
    });
}

/// Fault: N200
#[test]
fn stopped_distant_queue_node_delays_few_locks() {
    scripted(3, |sim, mgr| {
        let [queue_node, ..] = nodes_in_order(sim);
        move_away(sim, mgr, queue_node)?;
        sim.stop_node(queue_node);
        let before = sim.now.get();
        for _ in 0..100 {
            drop(mgr.lock("x")?);
        }
        let took = sim.now.get() - before;
        assert!(took < SEC, "{} ms", took / MS);
        Ok(())
    });
}

/// The queue node grants the lock, and the others refuse it, one of them late. Then the queue node
/// stops, so that it confirms no release before the call ends. It ignores the release later.
///
/// Fault: N203
/// Promise: P5
#[test]
fn unconfirmed_vote_of_the_queue_node_is_cleaned_up() {
    scripted(3, |sim, mgr| {
        let [queue_node, near, distant] = nodes_in_order(sim);
        drop(mgr.lock("warm")?);
        sim.sleep(3 * SEC);
        [near, distant].into_iter().for_each(|node| give_to_other_client(sim, node));
        delay(sim, distant, 300 * MS);
        sim.after(100 * MS, move |sim| sim.stop_node(queue_node));
        let error = mgr.try_lock("x").expect_err("another client holds it");
        assert!(error.is_contended(), "{error:?}");
        let is_held = || on_node(sim, queue_node, |keys, now_us| keys.peek(KEY, now_us).is_some());
        assert!(is_held());
        sim.sleep(2 * SEC);
        sim.continue_node(queue_node);
        sim.sleep(3 * SEC);
        // Otherwise it expires after ten seconds.
        assert!(!is_held());
        Ok(())
    });
}

/// The second node has lost the lock, so the head of its queue has the lock there. Then the first
/// node replies again, before the others do, and refuses the lock. If the head asked again at once
/// each time, it would never wait, and its subscription would never move.
///
/// Fault: N204
/// Promise: P4
#[test]
fn former_head_moves_to_the_recovered_queue_node() {
    for tenths in 0..20 {
        scripted(3, move |sim, mgr| {
            let [first, second, third] = nodes_in_order(sim);
            [first, second, third].into_iter().for_each(|node| give_to_other_client(sim, node));
            sim.stop_node(first);
            let waiter = wait_for_lock(sim, mgr);
            sim.sleep(3 * SEC);
            assert!(is_queued_on(sim, second));
            [second, third].into_iter().for_each(|node| delay(sim, node, 5 * MS));
            on_node(sim, second, |keys, _| keys.put(KEY, None, None));
            sim.sleep(SEC + tenths * 100 * MS);
            sim.continue_node(first);
            sim.sleep(5 * SEC);
            assert!(is_queued_on(sim, first));
            for node in [second, third, first] {
                on_node(sim, node, |keys, _| keys.put(KEY, None, None));
            }
            await_thread(sim, waiter);
            Ok(())
        });
    }
}

fn is_queued_on(sim: &Sim, node: usize) -> bool {
    on_node(sim, node, |keys, now_us| keys.live_entries(now_us).any(|(key, ..)| key == QUEUE_KEY))
}

/// Number of requests that each node but the queue node has received.
fn requests_at_others(sim: &Sim) -> [u64; 2] {
    let [_, second, third] = nodes_in_order(sim);
    [second, third].map(|node| sim.net.borrow().servers[node].requests_served)
}

/// A process that has waited for a lock wants it again. Its claim asks all nodes only once the
/// queue node has granted the lock. Otherwise it would win votes that the head of the queue needs.
///
/// Fault: N212
/// Promise: P4
#[test]
fn contended_lock_is_asked_for_at_the_queue_node_first() {
    scripted(3, |sim, mgr| {
        drop(mgr.lock("x")?);
        (0..3).for_each(|node| give_to_other_client(sim, node));
        let wait = LockOptions::new().wait(duration(100 * MS));
        let ask = || {
            sim.sleep(2 * SEC);
            let before = requests_at_others(sim);
            let error = mgr.lock_with("x", &wait).expect_err("another client holds it");
            assert!(error.is_contended(), "{error:?}");
            requests_at_others(sim) != before
        };
        assert!(ask(), "nothing is known of the lock");
        assert!(!ask(), "the other nodes were asked while another client had the queue node");
        (0..3).for_each(|node| on_node(sim, node, |keys, _| keys.put(KEY, None, None)));
        let [queue_node, ..] = nodes_in_order(sim);
        let requests = || sim.net.borrow().servers[queue_node].requests_served;
        // The second claim finds the memory cleared by the first, and asks all nodes at once.
        for expected in [3, 2] {
            sim.sleep(2 * SEC);
            let before = requests();
            drop(mgr.lock("x")?);
            assert_eq!(requests() - before, expected);
        }
        Ok(())
    });
}

/// A waiter has polled the queue node often before that node grants it the lock. The others still
/// refuse it then.
///
/// Fault: N213
/// Promise: P4
#[test]
fn head_that_has_waited_long_asks_again_soon() {
    scripted(3, |sim, mgr| {
        let [queue_node, second, third] = nodes_in_order(sim);
        drop(mgr.lock("warm")?);
        (0..3).for_each(|node| give_to_other_client(sim, node));
        let waiter = wait_for_lock(sim, mgr);
        sim.sleep(5 * SEC);
        let before = requests_at_others(sim);
        on_node(sim, queue_node, |keys, _| keys.put(KEY, None, None));
        while requests_at_others(sim) == before {
            sim.sleep(MS);
        }
        let [first, _] = requests_at_others(sim);
        sim.sleep(20 * MS);
        let [last, _] = requests_at_others(sim);
        assert!(last - first >= 3, "{} requests", last - first);
        [second, third]
            .into_iter()
            .for_each(|node| on_node(sim, node, |keys, _| keys.put(KEY, None, None)));
        await_thread(sim, waiter);
        Ok(())
    });
}

/// A thread waits for the lock, and releases it at once.
fn wait_for_lock(sim: &Sim, mgr: &RedisMgr) -> usize {
    let waiter = mgr.clone();
    current_sim().start_thread(sim.process(), move || {
        if let Err(error) = waiter.lock("x") {
            current_sim().violation(format!("unexpected error: {error}"));
        }
    })
}

fn await_thread(sim: &Sim, thread: usize) {
    while !sim.is_done(thread) {
        sim.sleep(MS);
    }
}

/// A node granted the lock in a lost round, and stopped before it received the release. Then the
/// others grant the lock. The node does not count for this lease, and replies before a node that
/// does.
///
/// Fault: N214
/// Promise: P12
#[test]
fn downgrade_counts_no_excluded_node() {
    scripted(3, |sim, mgr| {
        let [queue_node, second, third] = nodes_in_order(sim);
        drop(mgr.lock("warm")?);
        [queue_node, second].into_iter().for_each(|node| {
            give_to_other_client(sim, node);
            delay(sim, node, 10 * MS);
        });
        delay(sim, third, 300 * MS);
        sim.after(310 * MS, move |sim| sim.stop_node(third));
        sim.after(400 * MS, move |sim| {
            for node in [queue_node, second] {
                on_node(sim, node, |keys, _| keys.put(KEY, None, None));
            }
        });
        let writer = mgr.rw_lock("x")?.write()?;
        sim.sleep(3 * SEC);
        delay(sim, third, MS / 10);
        sim.continue_node(third);
        sim.sleep(100 * MS);
        let is_held = || on_node(sim, third, |keys, now_us| keys.peek(KEY, now_us).is_some());
        assert!(is_held(), "it has not granted the lock");
        delay(sim, queue_node, MS / 10);
        delay(sim, second, 50 * MS);
        let reader = writer.downgrade()?;
        assert!(reader.is_held());
        sim.sleep(20 * SEC);
        assert!(reader.is_held());
        Ok(())
    });
}

/// All connections are in use until shortly before the request would expire. It has its whole time
/// from then on, so that no connection to a healthy node is closed.
///
/// Fault: N217
/// Promise: P9
#[test]
fn request_that_waited_for_connections_has_its_whole_time() {
    scripted(3, |sim, mgr| {
        (0..3).for_each(|node| delay(sim, node, 2 * MS));
        let [_, others @ ..] = nodes_in_order(sim);
        use_all_connections(sim, mgr, others, 0);
        use_all_connections(sim, mgr, others, 995 * MS);
        let began = sim.now.get();
        let guard = mgr.lock("x")?;
        let took = sim.now.get() - began;
        assert!((995 * MS..SEC + 2 * MS).contains(&took), "{} µs", took / 1_000);
        drop(guard);
        Ok(())
    });
}

/// Many threads wait for a connection to one server. Those that get one late have no time left for
/// a reply. If they sent their requests nonetheless, each would close a healthy connection, and the
/// next thread would spend its time on opening another.
///
/// Fault: N247
/// Promise: P9
#[test]
fn late_connection_is_left_to_a_call_with_more_time() {
    scripted(1, |sim, mgr| {
        delay(sim, 0, 2 * MS);
        use_all_connections(sim, mgr, [0], 0);
        use_all_connections(sim, mgr, [0], 995 * MS);
        let began = sim.now.get();
        let outcome = mgr.try_lock("x").map(drop);
        let took = sim.now.get() - began;
        assert!(matches!(outcome, Err(LockError::PoolExhausted { .. })), "{outcome:?}");
        assert!((SEC / 2..SEC / 2 + 2 * MS).contains(&took), "{} µs", took / 1_000);
        // The others get their replies.
        sim.sleep(SEC);
        Ok(())
    });
}

/// Ten threads use the ten connections of the pool to each node, until these nodes, which are
/// stopped, go on after this time.
fn use_all_connections<const N: usize>(sim: &Sim, mgr: &RedisMgr, stopped: [usize; N], time: Time) {
    stopped.into_iter().for_each(|node| sim.stop_node(node));
    sim.after(time, move |sim| stopped.into_iter().for_each(|node| sim.continue_node(node)));
    let pings: Vec<_> = (0..10)
        .map(|_| {
            let mgr = mgr.clone();
            current_sim().start_thread(sim.process(), move || {
                if let Err(error) = mgr.ping() {
                    current_sim().violation(format!("unexpected error: {error}"));
                }
            })
        })
        .collect();
    if time == 0 {
        pings.into_iter().for_each(|ping| await_thread(sim, ping));
    } else {
        sim.sleep(MS);
    }
}

/// The same for a call that may not take longer. Too little time for a reply says nothing about a
/// node.
///
/// Fault: N217
/// Promise: P9
#[test]
fn call_out_of_time_counts_as_no_failure_of_a_node() {
    scripted(3, |sim, mgr| {
        let [queue_node, second, third] = nodes_in_order(sim);
        delay(sim, queue_node, 10 * MS);
        use_all_connections(sim, mgr, [second, third], 0);
        use_all_connections(sim, mgr, [second, third], 995 * MS);
        (0..3).for_each(|node| give_to_other_client(sim, node));
        let guard = mgr.try_lock("y")?;
        let waiter = wait_for_lock(sim, mgr);
        let queued_on = || [queue_node, second].map(|node| is_queued_on(sim, node));
        while queued_on() == [false, false] {
            sim.sleep(MS);
        }
        assert_eq!(queued_on(), [true, false]);
        drop(guard);
        (0..3).for_each(|node| on_node(sim, node, |keys, _| keys.put(KEY, None, None)));
        await_thread(sim, waiter);
        Ok(())
    });
}

/// The queue node has failed often, and is in back-off when it can be reached again. The other
/// nodes are a quorum.
///
/// Fault: N218
/// Promise: P9
#[test]
fn forced_release_asks_nodes_in_back_off_too() {
    scripted(3, |sim, mgr| {
        let [queue_node, ..] = nodes_in_order(sim);
        sim.crash_node(queue_node, false);
        for _ in 0..10 {
            drop(mgr.lock("warm")?);
            sim.sleep(SEC);
        }
        drop(mgr.lock("warm")?);
        sim.start_node(queue_node, RestartData::Kept);
        (0..3).for_each(|node| give_to_other_client(sim, node));
        assert!(mgr.force_release("x")?);
        for node in 0..3 {
            let is_held = on_node(sim, node, |keys, now_us| keys.peek(KEY, now_us).is_some());
            assert!(!is_held, "node {node} still has the lock");
        }
        Ok(())
    });
}

/// A node that granted the lock crashes before the release, and comes back while the claim waits
/// far back in the queue, where it polls rarely.
///
/// Fault: N219
/// Promise: P5
#[test]
fn unsent_release_does_not_wait_for_the_next_poll() {
    scripted(3, |sim, mgr| {
        let [queue_node, second, third] = nodes_in_order(sim);
        drop(mgr.lock("warm")?);
        let id = "host|pid1|tid1|ts1|6f1c3c5e-5a0c-4c55-9a4e-0f3f6f3b7a11";
        for node in [queue_node, second] {
            on_node(sim, node, |keys, now_us| {
                let mut keys = keys.open(now_us, false);
                keys.set(KEY, id.as_bytes(), Some(600_000)).expect("there is room");
            });
            delay(sim, node, 10 * MS);
        }
        let waiters = (0..100).map(|waiter| format!("1000 other {id}{waiter}").into_bytes());
        let queue = Data::List(waiters.collect());
        on_node(sim, queue_node, |keys, _| keys.put(QUEUE_KEY, Some(queue), None));
        sim.after(10 * MS, move |sim| sim.crash_node(third, false));
        let waiter = wait_for_lock(sim, mgr);
        sim.sleep(3 * SEC);
        let is_held = || on_node(sim, third, |keys, now_us| keys.peek(KEY, now_us).is_some());
        assert!(is_held(), "it has not granted the lock");
        sim.start_node(third, RestartData::Kept);
        sim.sleep(2 * SEC);
        assert!(!is_held());
        [queue_node, second].into_iter().for_each(|node| {
            on_node(sim, node, |keys, _| keys.put(KEY, None, None));
        });
        await_thread(sim, waiter);
        Ok(())
    });
}
