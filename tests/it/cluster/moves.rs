//! Slots that move to other nodes.

use std::time::Instant;

use super::*;

/// Fault: N174
#[test]
fn waiters_follow_a_slot_that_moves() {
    let cluster = Cluster::start(3);
    let (holder, waiter) = (manager(&cluster), manager(&cluster));
    let first = holder.lock("x").unwrap();
    // Each releases the lock itself. Where channels are not sharded, a grant that was sent during
    // the move can be missed, and its waiter then queues again behind the others.
    let spawn = |index: u64| {
        let waiting = spawn_call(&waiter, "x", |mgr, name| {
            let next = mgr.lock(name).unwrap();
            let token = next.fencing_token();
            next.release().unwrap().unwrap_released();
            token
        });
        await_waiting(&holder, "x", index + 1);
        waiting
    };
    let waiting: Vec<_> = (0..3).map(spawn).collect();
    let slot = slot(&cluster, "x");
    cluster.move_slot(slot);
    // All are queued and subscribed at the new node.
    await_waiting(&holder, "x", 3);
    first.release().unwrap().unwrap_released();
    let join = |waiting: JoinHandle<_>| {
        completes_within(CALL_LIMIT, "a hand-over", || waiting.join().unwrap())
    };
    let tokens: Vec<_> = waiting.into_iter().map(join).collect();
    assert!(tokens.is_sorted() || !RedisServer::has_sharded_channels(), "{tokens:?}");
}

/// Nobody asks meanwhile, so no request is redirected.
///
/// Fault: N174
#[test]
fn idle_waiter_is_notified_by_the_new_node() {
    let cluster = Cluster::start(2);
    let (holder, waiter) = (manager(&cluster), manager(&cluster));
    let slot = slot(&cluster, "x");
    for _ in 0..3 {
        let held = holder.lock("x").unwrap();
        let waiting = spawn_waiter(&waiter, "x", 0);
        cluster.move_slot(slot);
        let owner = cluster.owner(slot);
        let subscribers = || subscribers(owner);
        eventually("it is subscribed at the new node", TEST_TIMEOUT, || subscribers() > 0);
        held.release().unwrap().unwrap_released();
        completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap())
            .release()
            .unwrap()
            .unwrap_released();
    }
}

/// Each of two nodes replies that the other one serves the slot.
///
/// Fault: N236
#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures with a clock of its own")]
fn nodes_that_redirect_to_each_other_are_asked_seldom() {
    if !RedisServer::has_sharded_channels() {
        // Such servers redirect no subscription.
        return;
    }
    let cluster = Cluster::start(2);
    let (holder, waiter) = (manager(&cluster), manager(&cluster));
    let held = holder.lock("x").unwrap();
    let waiting = spawn_waiter(&waiter, "x", 0);
    let slot = slot(&cluster, "x");
    let (from, to) = cluster.begin_move(slot);
    cluster.move_keys(slot, from, to, &[]);
    from.cli(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &to.node_id()]);
    let redirects = || redirected_subscriptions(from) + redirected_subscriptions(to);
    eventually("the waiter is redirected", TEST_TIMEOUT, || redirects() > 0);
    let (begun, before) = (Instant::now(), redirects());
    eventually("it is redirected again", TEST_TIMEOUT, || redirects() >= before + 8);
    assert!(begun.elapsed() > SECOND, "8 redirects within {:?}", begun.elapsed());
    cluster.end_move(slot, from, to);
    held.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
    next.release().unwrap().unwrap_released();
}

/// Each of two nodes replies that the other one serves the slot.
///
/// Fault: N240
#[test]
fn nodes_that_redirect_to_each_other_are_asked_for_the_map() {
    let cluster = Cluster::start(2);
    let mgr = manager(&cluster);
    let slot = slot(&cluster, "x");
    let (from, to) = cluster.begin_move(slot);
    from.cli(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &to.node_id()]);
    mgr.ping().unwrap();
    let command = if RedisServer::has_sharded_channels() { "cluster|slots" } else { "cluster" };
    let asked = || from.calls(command) + to.calls(command);
    let before = asked();
    // A call that leaves nothing to clean up, because the clean-up asks for the map too.
    let holder = mgr.holder("x");
    assert!(asked() > before, "no node was asked for the map: {holder:?}");
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    cluster.end_move(slot, from, to);
    let guard = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
    guard.release().unwrap().unwrap_released();
}

fn redirected_subscriptions(node: &RedisServer) -> u64 {
    let stats: String = node.query(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with("cmdstat_ssubscribe:"));
    let rejected = line.and_then(|line| line.split_once("rejected_calls=")?.1.split(',').next());
    rejected.map_or(0, |count| count.parse().expect("a number"))
}

fn subscribers(node: &RedisServer) -> usize {
    let channels = if RedisServer::has_sharded_channels() { "SHARDCHANNELS" } else { "CHANNELS" };
    node.query::<Vec<String>>(&["PUBSUB", channels, "distlock:client:*"]).len()
}

/// Fault: N174
#[test]
fn lock_is_kept_and_released_while_its_keys_are_on_two_nodes() {
    let cluster = Cluster::start(2);
    let mgr = manager(&cluster);
    let guard = mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
    let same_slot = mgr.lock_with("{lock:x}", &with_ttl(2 * SECOND)).unwrap();
    let slot = slot(&cluster, "x");
    let (from, to) = cluster.begin_move(slot);
    cluster.move_keys(slot, from, to, &["lock:x", "lock:{lock:x}"]);
    let renewed = mgr.metrics().renewals();
    eventually("they are renewed at the new node", TEST_TIMEOUT, || {
        mgr.metrics().renewals() >= renewed + 12
    });
    assert!(guard.is_held() && same_slot.is_held());
    // The script needs keys of both nodes, so it waits for the end of the move.
    let releasing = std::thread::spawn(move || guard.release());
    let refused = || from.refusals("TRYAGAIN") + to.refusals("TRYAGAIN");
    eventually("it must try again", TEST_TIMEOUT, || {
        !RedisServer::has_sharded_channels() || refused() > 0
    });
    cluster.move_keys(slot, from, to, &[]);
    cluster.end_move(slot, from, to);
    releasing.join().unwrap().unwrap().unwrap_released();
    assert_eq!(mgr.holder("x").unwrap(), None);
}

/// Fault: N174
#[test]
fn free_lock_is_acquired_while_its_slot_moves() {
    let cluster = Cluster::start(2);
    let mgr = manager(&cluster);
    let slot = slot(&cluster, "x");
    drop(mgr.lock("x").unwrap());
    let (from, to) = cluster.begin_move(slot);
    // Only the fence exists, so the script has keys at both nodes until the end.
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("it must try again", TEST_TIMEOUT, || {
        !RedisServer::has_sharded_channels() || from.refusals("TRYAGAIN") > 0
    });
    cluster.move_keys(slot, from, to, &[]);
    cluster.end_move(slot, from, to);
    let guard = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
    assert_eq!(mgr.holder("x").unwrap().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
}

/// Several slots of one node are moved while nothing is sent to it. On a fast machine, the first
/// question about the map was asked just before. The next one then comes with the fourth try at the
/// latest, and each try before corrects the slot of its first redirect.
///
/// Fault: N258
#[test]
fn releases_of_moved_slots_are_not_redirected_one_by_one() {
    const LOCKS: usize = 6;
    let cluster = Cluster::start(2);
    let mgr = manager(&cluster);
    let (from, to) = (&cluster.nodes[0], &cluster.nodes[1]);
    let names = (0..).map(|number| format!("n{number}"));
    let on_first = |name: &String| cluster.owner(slot(&cluster, name)).port() == from.port();
    let names: Vec<_> = names.filter(on_first).take(LOCKS).collect();
    let held: Vec<_> = names.iter().map(|name| mgr.lock(name).unwrap()).collect();
    for name in &names {
        let slot = slot(&cluster, name);
        cluster.begin_move_between(slot, from, to);
        cluster.move_keys(slot, from, to, &[]);
        cluster.end_move(slot, from, to);
    }
    let before = from.refusals("MOVED");
    held.into_iter().for_each(LockGuard::release_later);
    let other = manager(&cluster);
    for name in &names {
        drop(lock_eventually(&other, name));
    }
    let redirected = from.refusals("MOVED") - before;
    // One by one, there are 21.
    assert!(redirected as usize <= LOCKS + (LOCKS - 1) + (LOCKS - 2), "{redirected} redirects");
}
