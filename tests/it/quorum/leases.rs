//! Holding a lock of which some nodes do not know any more.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use distlock::{
    HandleEvent, LockError, LockGuard, LockInfo, LockLost, LostEvent, RedisMgr, ReleasedEvent,
};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, config_short_timeout,
    expect_quorum, key, manager, nodes_holding, wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{self, CALL_LIMIT, SECOND, UnwrapReleased, completes_within, expect_loss, with_ttl},
    support::{Armed, CEILING, Fault, Nodes, any_request, contains, eventually, eventually_some},
};

/// A lease of which so much is left when its lock ends that what has gone soon after that was
/// released, and did not expire.
const LONG: Duration = Duration::from_secs(24);

/// A held lock that all nodes keep.
fn held(nodes: &Nodes, mgr: &RedisMgr, ttl: Duration) -> LockGuard {
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    eventually("all keep it", CEILING, || nodes_holding(nodes, &guard).len() == nodes.len());
    guard
}

fn take_away(nodes: &Nodes, node: usize) {
    nodes.server(node).query::<()>(&["SET", &key("x"), "a stranger", "PX", "600000"]);
}

#[test]
fn a_minority_that_forgets_the_lock_does_not_end_it() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = held(&nodes, &mgr, TTL);
    nodes.server(0).cli(&["DEL", &key("x")]);
    nodes.restart_empty(3);
    await_renewals(&guard, 3);
    expect_quorum(&nodes, &guard);
    let error = other.try_lock("x").unwrap_err();
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    drop(completes_within(CALL_LIMIT, "the next", || other.lock("x").unwrap()));
    wait_until_free_everywhere(&nodes, "x");
}

/// Three nodes of which the last is far away: the others have decided long before it answers about
/// the lock.
fn with_a_distant_node(nodes: Nodes) -> Nodes {
    let nodes = nodes.behind_proxies(&[2]);
    nodes
        .proxy(2)
        .on_request(contains("lock:x"), Fault::DelayReply(Duration::from_millis(150)))
        .forever();
    nodes
}

#[test]
fn what_one_node_forgets_a_distant_one_makes_up_for() {
    let nodes = with_a_distant_node(Nodes::start(3));
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, 10 * SECOND);
    nodes.server(1).cli(&["DEL", &key("x")]);
    await_renewals(&guard, 2);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    guard.release().unwrap().unwrap_released();
}

/// Otherwise the lock would be lost with what the next node forgets.
#[test]
fn what_a_distant_node_forgets_is_taken_anew() {
    let nodes = with_a_distant_node(Nodes::start(3));
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, 3 * SECOND);
    for node in [2, 0, 2, 1] {
        nodes.server(node).cli(&["DEL", &key("x")]);
        eventually("all keep it again", CEILING, || {
            guard.ensure_held().unwrap();
            nodes_holding(&nodes, &guard).len() == 3
        });
    }
    guard.release().unwrap().unwrap_released();
}

/// The first renewal goes over connections of its own, and that to the distant one takes longer
/// than the others' answers.
#[test]
fn what_one_node_forgets_one_that_is_being_connected_to_makes_up_for() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    let guard = mgr.lock_with("x", &with_ttl(10 * SECOND)).unwrap();
    eventually("all keep it", CEILING, || nodes_holding(&nodes, &guard).len() == 3);
    let slow = nodes
        .proxy(2)
        .on_request(any_request, Fault::DelayReply(Duration::from_millis(100)))
        .forever();
    nodes.server(1).cli(&["DEL", &key("x")]);
    await_renewals(&guard, 1);
    assert!(slow.fired() > 1 && nodes_holding(&nodes, &guard).len() > 1);
    guard.release().unwrap().unwrap_released();
}

/// Each renewal has to hear the distant one, for as long as the other has no vote.
#[test]
fn while_one_node_does_not_vote_a_distant_one_makes_up_for_it() {
    let nodes = with_a_distant_node(Nodes::durable(3));
    let mgr = RedisMgr::new(helpers::config_medium_timeout(nodes.urls()).quarantine(600 * SECOND))
        .unwrap();
    let guard = held(&nodes, &mgr, 10 * SECOND);
    // Without it, it cannot be told from one that has lost its disk.
    nodes.server(1).cli(&["DEL", "distlock:memory"]);
    nodes.restart(1);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    await_renewals(&guard, 2);
    guard.release().unwrap().unwrap_released();
    nodes.kill(0);
    let error = mgr.try_lock("y").unwrap_err();
    assert!(error.nodes()[1].message.contains("does not vote"), "{error}");
}

#[test]
fn a_minority_that_gives_it_to_another_does_not_end_it() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, TTL);
    [1, 4].into_iter().for_each(|node| take_away(&nodes, node));
    await_renewals(&guard, 3);
    expect_quorum(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    eventually("it is gone where it was ours", CEILING, || {
        let left = nodes.values(&key("x"));
        [0, 2, 3].into_iter().all(|node| left[node].is_none())
    });
    assert_eq!(nodes.keeping(&key("x"), "a stranger"), [1, 4], "another's lock was released");
}

#[test]
fn a_majority_that_forgets_the_lock_ends_it() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, LONG);
    for node in [0, 2, 4] {
        nodes.server(node).cli(&["DEL", &key("x")]);
    }
    assert_eq!(expect_loss(&guard), LockLost::Gone);
    eventually("the two that know it still are told", CALL_LIMIT, || {
        nodes.values(&key("x")).iter().all(Option::is_none)
    });
}

#[test]
fn a_majority_that_gives_it_to_another_ends_it() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, LONG);
    [0, 2, 4].into_iter().for_each(|node| take_away(&nodes, node));
    match expect_loss(&guard) {
        LockLost::Taken { by, .. } => assert_eq!(by.id(), "a stranger"),
        why => panic!("{why:?}"),
    }
    eventually("the others are told", CALL_LIMIT, || {
        let left = nodes.values(&key("x"));
        [1, 3].into_iter().all(|node| left[node].is_none())
    });
    assert_eq!(nodes.keeping(&key("x"), "a stranger"), [0, 2, 4]);
}

/// Two have given it away and one more cannot be asked: no quorum can say that the lock is kept,
/// nor that it is gone. It lasts until its deadline.
#[test]
fn what_is_not_known_ends_nothing_before_the_deadline() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    let guard = held(&nodes, &mgr, TTL);
    await_renewals(&guard, 1);
    nodes.stop(1);
    [0, 2].into_iter().for_each(|node| take_away(&nodes, node));
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// Goal: a node that is stopped between acquisition and release delays nothing, and keeps nothing
/// once it goes on.
#[test]
fn a_node_that_missed_the_release_makes_up_for_it() {
    let nodes = Nodes::start(3);
    for node in 0..3 {
        let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
        let guard = mgr.lock("x").unwrap();
        eventually("all keep it", CEILING, || nodes_holding(&nodes, &guard).len() == 3);
        nodes.stop(node);
        completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
        let next = completes_within(CALL_LIMIT, "the next", || mgr.lock("x").unwrap());
        expect_quorum(&nodes, &next);
        completes_within(CALL_LIMIT, "releasing", || next.release().unwrap()).unwrap_released();
        nodes.cont(node);
        // Its lease of 30 s would end it much later.
        completes_within(20 * SECOND, "the release", || wait_until_free_everywhere(&nodes, "x"));
    }
}

/// The same when nobody is left to repeat it: the release was delivered.
#[test]
fn a_release_reaches_a_stopped_node_although_its_manager_has_gone() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    let guard = mgr.lock("x").unwrap();
    eventually("all keep it", CEILING, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.stop(1);
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    drop(mgr);
    nodes.cont(1);
    completes_within(20 * SECOND, "the release", || wait_until_free_everywhere(&nodes, "x"));
}

#[test]
fn nodes_that_are_restarted_one_after_the_other_keep_it_again() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = held(&nodes, &mgr, TTL);
    for node in [0, 1, 2] {
        nodes.restart_empty(node);
        eventually("the node keeps it again", CEILING, || {
            guard.ensure_held().unwrap();
            nodes_holding(&nodes, &guard).contains(&node)
        });
    }
    await_renewals(&guard, 2);
    assert!(guard.lost().is_empty());
    let token = guard.fencing_token();
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
    assert!(
        completes_within(CALL_LIMIT, "the next", || other.lock("x").unwrap()).fencing_token()
            > token
    );
}

/// A node gives a token of its own for what is taken anew there, later than the holder's.
#[test]
fn a_lock_that_is_taken_anew_on_the_first_node_is_listed_with_the_token_of_its_holder() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, TTL);
    let asked = |node: usize| nodes.server(node).query::<u64>(&["GET", "distlock:fence:{lock:x}"]);
    nodes.server(0).cli(&["DEL", &key("x")]);
    eventually("the first keeps it again", CEILING, || nodes_holding(&nodes, &guard).contains(&0));
    assert!(asked(0) > asked(1));
    let ways: [fn(&RedisMgr) -> LockInfo; 2] =
        [|mgr| mgr.locks("*").unwrap().remove(0), |mgr| mgr.lock_info("x").unwrap().unwrap()];
    for way in ways {
        // One that is late is not heard.
        let told = eventually_some("its own token is told", CEILING, || {
            Some(way(&mgr)).filter(|told| told.fencing_token() == Some(guard.fencing_token()))
        });
        // It was taken anew when a third of the lease had passed, at the earliest.
        assert!(told.holder().held_for() > Some(TTL / 4), "{told:?}");
    }
    guard.release().unwrap().unwrap_released();
}

/// The node was away when the lock was taken. It is told of the end all the same, long before the
/// lease that it gave expires.
#[test]
fn a_node_on_which_it_was_taken_anew_is_told_when_it_ends() {
    let nodes = Nodes::start(3);
    nodes.kill(2);
    let mgr = manager(&nodes);
    // Renewed three times meanwhile, each a chance to take it anew.
    let guard = mgr.lock_with("x", &with_ttl(16 * SECOND).max_hold(18 * SECOND)).unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1]);
    nodes.restart(2);
    eventually("the node keeps it too", CEILING, || {
        guard.ensure_held().unwrap();
        nodes_holding(&nodes, &guard).contains(&2)
    });
    assert_eq!(expect_loss(&guard), LockLost::MaxHold);
    eventually("all are told", 8 * SECOND, || nodes.values(&key("x")).iter().all(Option::is_none));
}

/// A manager that takes something back on a node which does not answer, for as long as that is
/// held.
fn taking_back(pool_size: u32) -> (Nodes, RedisMgr, Armed) {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).pool_size(pool_size)).unwrap();
    warm_up(&nodes, &mgr);
    let held = nodes.proxy(2).on_request(contains("lock:x"), Fault::HoldRequest).forever();
    completes_within(CALL_LIMIT, "releasing", || mgr.lock("x").unwrap().release().unwrap())
        .unwrap_released();
    // First the lock, behind which its release waits; and then the release once more, by the
    // renewer.
    held.wait_fired_times(2);
    (nodes, mgr, held)
}

/// Taking something back on a node that does not answer takes very long; a lock that is taken
/// meanwhile is renewed all the same.
#[test]
fn taking_back_at_a_node_that_hangs_holds_up_no_renewal() {
    let (nodes, mgr, held) = taking_back(10);
    let guard = mgr.lock_with("z", &with_ttl(2 * TTL)).unwrap();
    await_renewals(&guard, 3);
    held.let_go();
    completes_within(20 * SECOND, "taking it back", || wait_until_free_everywhere(&nodes, "x"));
}

/// The same for a release that has to go the renewer's way, since the pool has no connection for
/// it.
#[test]
fn taking_back_at_a_node_that_hangs_holds_up_no_release() {
    let (_nodes, mgr, held) = taking_back(1);
    let guard = mgr.lock_with("z", &with_ttl(30 * TTL)).unwrap();
    let _borrowed = mgr.connection().unwrap();
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    held.let_go();
}

/// Goal: taking many locks anew on a node that has forgotten them holds up the renewal of none.
/// Method: it answers so late that all of them, one after the other, take much longer than a lease.
#[test]
fn many_locks_that_are_taken_anew_cost_none() {
    const MANY: usize = 400;
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let (mgr, watch) = (manager(&nodes), manager(&nodes));
    let guards: Vec<_> =
        (0..MANY).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(2 * TTL)).unwrap()).collect();
    // A node that is slow for a moment is left out, and given by the first renewal what it has
    // missed.
    let kept_by = |node| nodes.server(node).query::<Vec<String>>(&["KEYS", "lock:n*"]).len();
    eventually("all nodes keep them all", CEILING, || (0..3).all(|node| kept_by(node) == MANY));
    nodes
        .proxy(1)
        .on_request(contains("lock:n"), Fault::DelayReply(Duration::from_millis(40)))
        .forever();
    nodes.server(1).cli(&["FLUSHALL"]);
    let span = watch.lock_with("span", &with_ttl(4 * TTL).renew(false)).unwrap();
    assert!(span.lost().recv().is_ok());
    let lost: Vec<_> = guards.iter().filter_map(|guard| guard.lost().try_recv().ok()).collect();
    assert!(lost.is_empty() && guards.iter().all(LockGuard::is_held), "{lost:?}");
    eventually("some are there again", CEILING, || {
        nodes.server(1).query::<usize>(&["DBSIZE"]) >= MANY / 20
    });
}

#[test]
fn a_release_that_one_node_does_not_answer_and_another_has_for_somebody_else_is_no_loss() {
    let nodes = Nodes::start(3);
    let heard = Arc::new(Heard::default());
    let mgr = RedisMgr::new(config_short_timeout(&nodes).event_handler(heard.clone())).unwrap();
    let guard = held(&nodes, &mgr, Duration::from_secs(300));
    take_away(&nodes, 0);
    nodes.stop(2);
    let outcome = completes_within(CALL_LIMIT, "releasing", || guard.release());
    assert!(matches!(outcome, Err(LockError::NoQuorum { .. })), "{outcome:?}");
    eventually("its end is told", CEILING, || heard.all() > 0);
    assert_eq!(heard.losses(), 0, "two of three may have kept it until then");
    nodes.cont(2);
    eventually("it is gone where it was ours", CEILING, || {
        nodes.values(&key("x"))[1..].iter().all(Option::is_none)
    });
}

/// How holds ended.
#[derive(Debug, Default)]
struct Heard {
    lost: AtomicUsize,
    released: AtomicUsize,
}

impl HandleEvent for Heard {
    fn lost(&self, _: &LostEvent<'_>) {
        self.lost.fetch_add(1, Ordering::SeqCst);
    }

    fn released(&self, _: &ReleasedEvent<'_>) {
        self.released.fetch_add(1, Ordering::SeqCst);
    }
}

impl Heard {
    fn losses(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }

    fn all(&self) -> usize {
        self.losses() + self.released.load(Ordering::SeqCst)
    }
}

/// There is no time left for it then, and that is no fault of the node.
#[test]
fn a_lock_that_is_released_before_it_is_taken_anew_costs_no_connection() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).ttl(6 * SECOND)).unwrap();
    let [a, b] = ["aa", "bb"].map(|name| mgr.lock(name).unwrap());
    eventually("all keep them", CEILING, || {
        [&a, &b].iter().all(|guard| nodes_holding(&nodes, guard).len() == 3)
    });
    let takes_anew =
        |words: &[Vec<u8>]| contains("lock:aa")(words) && contains("distlock:queue")(words);
    let held = nodes.proxy(0).on_request(takes_anew, Fault::HoldRequest);
    await_renewals(&a, 1);
    let before = mgr.metrics().reconnected();
    nodes.server(0).cli(&["DEL", &key("aa"), &key("bb")]);
    held.wait_fired();
    b.release().unwrap().unwrap_released();
    held.let_go();
    await_renewals(&a, 2);
    assert_eq!(mgr.metrics().reconnected(), before);
}
