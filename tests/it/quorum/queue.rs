//! Waiting in line: the order, the hand-over, and what happens to the line when its node goes away.

use std::{
    thread::{self, JoinHandle},
    time::Duration,
};

use distlock::{Config, LockGuard, RedisMgr};
use parking_lot::Mutex;

use super::{
    await_renewals, config_medium_timeout, config_short_timeout, expect_locked, expect_quorum, key,
    manager, next_locked, nodes_holding, release, spawn_worker, wait_until_free_everywhere,
    warm_up,
};
use crate::{
    helpers::{
        SECOND, SHORT_TIMEOUT, UnwrapReleased, await_queued, completes_within,
        expect_deadline_before_key_expiry, in_thread, pttl, queue_key, queued, spawn_queued_waiter,
        timed, with_ttl,
    },
    support::{
        CEILING, Fault, Nodes, RedisServer, Worker, command, contains, eventually, eventually_some,
    },
};

/// Threads of several managers, lined up one after the other on the first node.
#[test]
fn who_stands_in_line_is_served_in_order() {
    let nodes = Nodes::start(5);
    let managers = [manager(&nodes), manager(&nodes), manager(&nodes)];
    let guard = managers[0].lock("x").unwrap();
    let served = Mutex::new(Vec::new());
    thread::scope(|threads| {
        for (number, mgr) in managers.iter().cycle().take(12).enumerate() {
            let (served, nodes) = (&served, &nodes);
            threads.spawn(move || {
                let guard = mgr.lock("x").unwrap();
                expect_quorum(nodes, &guard);
                served.lock().push(number);
                guard.release().unwrap().unwrap_released();
            });
            await_queued(nodes.server(0), "x", number + 1);
        }
        guard.release().unwrap().unwrap_released();
    });
    assert_eq!(*served.lock(), Vec::from_iter(0..12));
    wait_until_free_everywhere(&nodes, "x");
}

/// On the first node it is somebody's turn, who has yet to ask the others. The others say so late.
#[test]
fn a_newcomer_does_not_take_it_against_the_word_of_the_node_with_the_line() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    nodes.server(0).query::<()>(&["SET", &key("x"), "whose turn it is", "PX", "600000"]);
    for node in [1, 2] {
        let late = Fault::DelayReply(Duration::from_millis(500));
        nodes.proxy(node).on_request(contains(key("x").as_str()), late).forever();
    }
    let error = mgr.try_lock("x").unwrap_err();
    assert_eq!(error.holder().map(|holder| holder.id()), Some("whose turn it is"), "{error:?}");
    assert_eq!(nodes.keeping(&key("x"), "whose turn it is"), [0]);
}

/// Puts a process into the line of this node.
fn line_up(server: &RedisServer, worker: &mut Worker, name: &str, before: usize) {
    worker.send(&format!("lock {name}"));
    await_queued(server, name, before + 1);
}

#[test]
fn processes_are_served_in_order_too() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = mgr.lock("x").unwrap();
    let mut hands: Vec<_> = (0..3).map(|_| spawn_worker(&nodes, &[])).collect();
    for (number, worker) in hands.iter_mut().enumerate() {
        line_up(nodes.server(0), worker, "x", number);
    }
    let mut last = guard.fencing_token().as_u64();
    guard.release().unwrap().unwrap_released();
    for worker in &mut hands {
        let (token, id) = expect_locked(worker, "x");
        assert_eq!(mgr.holder("x").unwrap().unwrap().id(), id);
        assert!(token > last);
        last = token;
        release(worker, "x");
    }
}

/// Goal: a waiter is woken; it does not poll. Method: the time of three renewals of the holder
/// passes. What the nodes are asked meanwhile is the renewals, and now and then a look, mostly on
/// the node with the line.
#[track_caller]
fn expect_patience(nodes: &Nodes, guard: &LockGuard) {
    let asked = || -> Vec<u64> {
        let asked = |node| {
            let calls = nodes.server(node).commandstats();
            ["evalsha", "eval"].iter().filter_map(|command| calls.get(*command)).sum()
        };
        (0..nodes.len()).map(asked).collect()
    };
    let before = asked();
    let ((), span) = timed(|| await_renewals(guard, 3));
    let asked: Vec<_> = asked().iter().zip(before).map(|(after, before)| after - before).collect();
    let seconds = span.as_secs_f64();
    let few = |asked: &u64| *asked as f64 <= 10.0 + 10.0 * seconds;
    assert!(asked.iter().all(few), "{asked:?} in {span:?}");
}

#[test]
fn waiting_costs_next_to_nothing() {
    let nodes = Nodes::start(5);
    let (holder, one, other) = (manager(&nodes), manager(&nodes), manager(&nodes));
    let guard = holder.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let waiting: Vec<_> = (0..20)
        .map(|number| spawn_queued_waiter(nodes.server(0), [&one, &other][number % 2], "x"))
        .collect();
    expect_patience(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap().unwrap()));
}

/// The head of the line has the lock on the first node, which has forgotten the holder's, and
/// cannot get it elsewhere.
#[test]
fn waiting_costs_no_more_when_the_first_node_forgot_the_lock() {
    let nodes = Nodes::start(5);
    let (holder, other) = (manager(&nodes), manager(&nodes));
    let guard = holder.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    nodes.restart_empty(0);
    let waiting: Vec<_> =
        (0..3).map(|_| in_thread(&other, "x", |mgr, name| mgr.lock(name).map(drop))).collect();
    await_waiting(&nodes, 0, 3, guard.id().as_str());
    expect_patience(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| waiter.join().unwrap().unwrap());
}

/// The same head of the line in a process that dies: what it has on the first node it has for one
/// claim window.
#[test]
fn a_head_of_the_line_that_dies_costs_a_claim_window_and_no_lease() {
    let nodes = Nodes::start(5);
    let (holder, other) = (manager(&nodes), manager(&nodes));
    let mut head = spawn_worker(&nodes, &[("window_ms", "1000")]);
    let guard = holder.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    nodes.restart_empty(0);
    head.send("lock x");
    let kept_for = || nodes.server(0).query::<i64>(&["PTTL", &key("x")]);
    eventually("the head has the first node for a moment", CEILING, || {
        (1..=1000).contains(&kept_for())
    });
    let waiting = spawn_queued_waiter(nodes.server(0), &other, "x");
    head.kill();
    assert!(kept_for() <= 1000, "it is kept from others for {} ms", kept_for());
    guard.release().unwrap().unwrap_released();
    eventually("the next one has it", CEILING, || waiting.is_finished());
    let next = waiting.join().unwrap().unwrap();
    eventually("the first node keeps it for the whole lease too", CEILING, || kept_for() > 2_000);
    expect_quorum(&nodes, &next);
}

/// One node is away, so that the lock needs the first one, which keeps it for the claim window.
#[test]
fn a_head_of_the_line_believes_in_its_lock_for_no_longer_than_its_node() {
    let nodes = Nodes::start(3);
    let (holder, other) = (manager(&nodes), manager(&nodes));
    nodes.kill(2);
    let guard = holder.lock("x").unwrap();
    let waiting = spawn_queued_waiter(nodes.server(0), &other, "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CEILING, "the hand-over", || waiting.join().unwrap().unwrap());
    let ((left, kept_ms), span) =
        timed(|| (next.remaining(), nodes.server(0).query::<u64>(&["PTTL", &key("x")])));
    let kept = Duration::from_millis(kept_ms + 1).saturating_add(span);
    assert!(left <= kept, "believed in for {left:?}, and kept for {kept:?}");
    eventually("the whole lease is confirmed", CEILING, || next.remaining() > 2 * SECOND);
}

/// The lock needs the first node, which its head has for the claim window; and each answer takes so
/// much of it that it could be over before the renewer has confirmed the lock.
#[test]
fn a_lock_that_is_won_over_a_slow_way_is_confirmed_at_once() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    // The claim window and all timeouts are what they are by default. A machine that is too slow
    // for them is tried on for long.
    let manager =
        |urls: [String; 3]| Config::nodes(urls).ttl(10 * CEILING).quarantine(Duration::ZERO);
    let near = RedisMgr::new(manager([0, 1, 2].map(|node| nodes.server(node).url()))).unwrap();
    let first = near.lock("x").unwrap();
    for node in 0..3 {
        nodes
            .proxy(node)
            .on_request(contains(key("x").as_str()), Fault::DelayReply(SECOND / 6))
            .forever();
    }
    let far = RedisMgr::new(manager([0, 1, 2].map(|node| nodes.proxy(node).url()))).unwrap();
    let waiting = spawn_queued_waiter(nodes.server(0), &far, "x");
    nodes.kill(2);
    first.release().unwrap().unwrap_released();
    let next = completes_within(CEILING, "the hand-over", || waiting.join().unwrap().unwrap());
    let kept_for: u64 = nodes.server(0).query(&["PTTL", &key("x")]);
    assert!(kept_for > 2_000, "the first node keeps it for {kept_for} ms");
    expect_quorum(&nodes, &next);
}

#[test]
fn a_release_wakes_the_next_waiter_long_before_it_would_look() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let mut spans = Vec::new();
    for _ in 0..21 {
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_queued_waiter(nodes.server(0), &other, "x");
        let (next, span) = timed(|| {
            guard.release().unwrap().unwrap_released();
            waiting.join().unwrap().unwrap()
        });
        next.release().unwrap().unwrap_released();
        spans.push(span);
    }
    spans.sort();
    // A look is due half a second after the last, so that none comes sooner by looks alone.
    assert!(spans[10] < SECOND / 4, "{spans:?}");
}

/// Who waits asks the node with the line for its claim window only.
#[test]
fn who_waits_and_puts_an_expiry_back_does_not_cut_a_lease_short() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.lock_with("x", &with_ttl(300 * SECOND).renew(false)).unwrap();
    let waiting = in_thread(&other, "x", |mgr, name| mgr.lock_with(name, &with_ttl(600 * SECOND)));
    await_queued(nodes.server(0), "x", 1);
    assert!(nodes.server(0).query::<bool>(&["PERSIST", &key("x")]));
    eventually("the waiter has looked", CEILING, || pttl(nodes.server(0), &key("x")) > 0);
    expect_deadline_before_key_expiry(nodes.server(0), &guard);
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

#[test]
fn who_gives_up_leaves_nothing_on_any_node() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.lock("x").unwrap();
    let error = other.try_lock_for("x", Duration::from_millis(200)).unwrap_err();
    assert!(error.is_timeout() && error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    eventually("it is in no line", CEILING, || {
        (0..5).all(|node| queued(nodes.server(node), "x") == 0)
    });
    expect_quorum(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
    for node in 0..5 {
        assert!(!nodes.server(node).query::<bool>(&["EXISTS", &queue_key("x")]));
    }
}

/// How many wait on this node: in line, or at its head with the lock of this node alone, which the
/// holder does not have.
fn waiting_on(nodes: &Nodes, node: usize, holder: &str) -> usize {
    let server = nodes.server(node);
    let head: Option<String> = server.query(&["GET", &key("x")]);
    queued(server, "x") + usize::from(head.is_some_and(|id| id != holder))
}

/// Waits until so many wait on this node; says where they wait if they do not come.
#[track_caller]
fn await_waiting(nodes: &Nodes, node: usize, waiters: usize, holder: &str) {
    let mut last = Vec::new();
    eventually("they wait on this node", CEILING, || {
        let waiting = nodes
            .running()
            .into_iter()
            .map(|node| (node, waiting_on(nodes, node, holder)))
            .collect();
        if last != waiting {
            eprintln!("how many wait on which node: {waiting:?}");
            last = waiting;
        }
        last.contains(&(node, waiters))
    });
}

/// Goal: a first node that is well and far away has the line, however many nodes there are. Method:
/// its word that it listens takes more than a fifth of an operation timeout, and less than half of
/// one.
#[test]
fn the_line_is_on_the_first_node_though_it_is_far_away() {
    let nodes = Nodes::start(5).behind_proxies(&[0]);
    let mgr = manager(&nodes);
    let guard = manager(&nodes).lock("x").unwrap();
    let far =
        nodes.proxy(0).on_request(command("SUBSCRIBE"), Fault::DelayReply(5 * SECOND)).forever();
    let waiting = in_thread(&mgr, "x", RedisMgr::lock);
    let lines_up = || (0..nodes.len()).find(|node| queued(nodes.server(*node), "x") > 0);
    assert_eq!(eventually_some("it waits in a line", CEILING, lines_up), 0);
    assert_eq!(far.fired(), 1);
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

/// How the node with the line goes away, and comes back.
type Way = (fn(&Nodes), fn(&Nodes));

const STOPPED: Way = (|nodes| nodes.stop(0), |nodes| nodes.cont(0));
const KILLED: Way = (|nodes| nodes.kill(0), |nodes| nodes.restart_empty(0));

/// Threads of three managers go on waiting in the line of another node, are served, and return to
/// the first node when it is back.
fn threads_move_with_the_line((leave, come_back): Way) {
    let nodes = Nodes::start(5);
    let managers: Vec<_> =
        (0..3).map(|_| RedisMgr::new(config_medium_timeout(&nodes)).unwrap()).collect();
    let guard = managers[0].lock("x").unwrap();
    let mut waiting: Vec<_> = managers
        .iter()
        .cycle()
        .take(6)
        .map(|mgr| spawn_queued_waiter(nodes.server(0), mgr, "x"))
        .collect();
    leave(&nodes);
    await_waiting(&nodes, 1, 6, guard.id().as_str());
    expect_quorum(&nodes, &guard);
    let mut last = guard.fencing_token();
    completes_within(20 * SHORT_TIMEOUT, "a release without the first node", || {
        guard.release().unwrap()
    })
    .unwrap_released();
    while !waiting.is_empty() {
        // The line on the other node was formed in an order of its own.
        let served = eventually_some("somebody is served", CEILING, || {
            waiting.iter().position(JoinHandle::is_finished)
        });
        let guard = waiting.remove(served).join().unwrap().unwrap();
        assert!(guard.is_held() && guard.fencing_token() > last);
        last = guard.fencing_token();
        guard.release().unwrap().unwrap_released();
    }
    come_back(&nodes);
    let guard = managers[0].lock("x").unwrap();
    let waiting: Vec<_> = managers
        .iter()
        .map(|mgr| in_thread(mgr, "x", |mgr, name| mgr.lock(name).map(drop)))
        .collect();
    await_waiting(&nodes, 0, 3, guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| waiter.join().unwrap().unwrap());
    wait_until_free_everywhere(&nodes, "x");
}

#[test]
fn the_line_moves_on_when_its_node_is_stopped() {
    threads_move_with_the_line(STOPPED);
}

#[test]
fn the_line_moves_on_when_its_node_is_killed() {
    threads_move_with_the_line(KILLED);
}

fn processes_move_with_the_line((leave, come_back): Way) {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    let guard = mgr.lock("x").unwrap();
    let mut hands: Vec<_> =
        (0..3).map(|_| spawn_worker(&nodes, &[("timeout_ms", "4000")])).collect();
    for (number, worker) in hands.iter_mut().enumerate() {
        line_up(nodes.server(0), worker, "x", number);
    }
    leave(&nodes);
    await_waiting(&nodes, 1, 3, guard.id().as_str());
    let mut last = guard.fencing_token().as_u64();
    guard.release().unwrap().unwrap_released();
    let mut left: Vec<_> = hands.iter_mut().collect();
    while !left.is_empty() {
        // The line on the other node was formed in an order of its own.
        let (served, token, _) = next_locked(left.iter().map(|worker| &**worker), "x");
        let worker = left.remove(served);
        assert!(token > last);
        last = token;
        release(worker, "x");
    }
    come_back(&nodes);
    let guard = mgr.lock("x").unwrap();
    hands.iter_mut().for_each(|worker| worker.send("lock x"));
    await_waiting(&nodes, 0, 3, guard.id().as_str());
    drop(guard);
}

#[test]
fn the_line_of_processes_moves_on_when_its_node_is_stopped() {
    processes_move_with_the_line(STOPPED);
}

#[test]
fn the_line_of_processes_moves_on_when_its_node_is_killed() {
    processes_move_with_the_line(KILLED);
}

/// Somebody has the lock, and a waiter stands in the line of the first node, which cannot be
/// reached any more; then it waits on the second one.
fn moved_to_the_second(nodes: &Nodes) -> (LockGuard, JoinHandle<distlock::Result<LockGuard>>) {
    let near = RedisMgr::new(
        Config::nodes([0, 1, 2].map(|node| nodes.server(node).url())).quarantine(Duration::ZERO),
    );
    let holder = near.unwrap().lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    eventually("all nodes keep it", CEILING, || nodes_holding(nodes, &holder).len() == 3);
    let waiting = spawn_queued_waiter(
        nodes.server(0),
        &RedisMgr::new(config_short_timeout(nodes)).unwrap(),
        "x",
    );
    let commands = nodes.server(1).monitor();
    nodes.proxy(0).refuse();
    await_queued(nodes.server(1), "x", 1);
    // By then nothing is on its way to the first one any more, and no place is given up for that.
    let looks = || commands.lines().iter().filter(|line| line.contains("lua] \"LPOS\"")).count();
    eventually("it has looked a few times", CEILING, || looks() >= 4);
    assert_eq!(queued(nodes.server(0), "x"), 1);
    (holder, waiting)
}

/// Long before the line expires.
fn await_no_line(server: &RedisServer) {
    eventually("nobody stands in line", 40 * SECOND, || queued(server, "x") == 0);
}

/// Otherwise the second place is left behind when the first one is served.
#[test]
fn who_returns_to_a_line_takes_the_place_that_it_had() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let (holder, waiting) = moved_to_the_second(&nodes);
    let commands = nodes.server(0).monitor();
    // The first one is heard in time, so that nothing has to be given back there.
    for node in [1, 2] {
        nodes.proxy(node).on_request(contains("lock:x"), Fault::DelayReply(SECOND / 5)).forever();
    }
    nodes.proxy(0).heal();
    commands.wait_for("lua] \"PEXPIRE\" \"distlock:queue:{lock:x}\"");
    holder.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    await_no_line(nodes.server(0));
    drop(next);
}

#[test]
fn a_place_on_a_node_that_went_away_is_given_up_with_the_lock() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (holder, waiting) = moved_to_the_second(&nodes);
    for node in [1, 2] {
        nodes.server(node).query::<()>(&["DEL", &key("x")]);
    }
    let guard = waiting.join().unwrap().unwrap();
    assert_eq!((nodes_holding(&nodes, &guard), queued(nodes.server(0), "x")), (vec![1, 2], 1));
    nodes.proxy(0).heal();
    guard.release().unwrap().unwrap_released();
    await_no_line(nodes.server(0));
    drop(holder);
}
