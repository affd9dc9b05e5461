//! Too many nodes are away: nobody gets the lock, everybody is told why, and who holds it believes
//! for no longer than it has it.

use std::time::Duration;

use distlock::{LockGuard, LockLost, RedisMgr, Vote};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, config_short_timeout,
    expect_no_quorum, expect_quorum, key, manager, wait_until_free_everywhere,
};
use crate::{
    helpers::{
        CALL_LIMIT, SHORT_TIMEOUT, UnwrapReleased, completes_within, expect_loss, in_thread, timed,
        with_ttl,
    },
    support::{CEILING, Nodes, eventually},
    worker::work,
};

/// Refusing nodes are known to be away at once: no call lasts for as long as a timeout, and what
/// the others gave goes back.
#[test]
fn without_a_majority_nobody_gets_it_and_that_is_known_at_once() {
    let nodes = Nodes::start(5);
    let (early, mgr) = (manager(&nodes), manager(&nodes));
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    for node in [0, 2, 4] {
        nodes.kill(node);
    }
    // One that has met them, one that has not used its connections yet, and one that never met
    // them.
    for mgr in [&mgr, &early, &manager(&nodes)] {
        // The patience of these managers is much longer.
        let (error, took) = timed(|| mgr.try_lock("x").unwrap_err());
        assert!(took < CALL_LIMIT, "{took:?}: {error}");
        let votes = expect_no_quorum(&nodes, &error);
        assert_eq!(
            (votes[0], votes[2], votes[4]),
            (Vote::Unknown, Vote::Unknown, Vote::Unknown),
            "{error}"
        );
        assert!(error.to_string().contains("refused"), "{error}");
        wait_until_free_everywhere(&nodes, "x");
    }
    let error =
        completes_within(CALL_LIMIT, "asking for the holder", || mgr.holder("x").unwrap_err());
    expect_no_quorum(&nodes, &error);
    let error = completes_within(CALL_LIMIT, "a ping", || mgr.ping().unwrap_err());
    expect_no_quorum(&nodes, &error);
    let error =
        completes_within(CALL_LIMIT, "releasing by force", || mgr.force_release("x").unwrap_err());
    expect_no_quorum(&nodes, &error);
}

#[test]
fn without_a_majority_that_answers_nobody_waits_for_longer_than_one_timeout() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    for node in [0, 1, 2] {
        nodes.stop(node);
    }
    for _ in 0..3 {
        let error =
            completes_within(10 * SHORT_TIMEOUT, "trying", || mgr.try_lock("x").unwrap_err());
        let votes = expect_no_quorum(&nodes, &error);
        assert_eq!(votes[..3], [Vote::Unknown; 3], "{error}");
        wait_until_free_everywhere(&nodes, "x");
    }
    let wait = Duration::from_millis(700);
    let (error, took) = timed(|| mgr.try_lock_for("x", wait).unwrap_err());
    expect_no_quorum(&nodes, &error);
    assert!(took >= wait && took < wait + 10 * SHORT_TIMEOUT, "{took:?}");
    // Whoever waits without a limit goes on as soon as they are back.
    let waiting =
        in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(20 * TTL / 2)).unwrap());
    nodes.cont(1);
    let guard = completes_within(CEILING, "the lock", || waiting.join().unwrap());
    expect_quorum(&nodes, &guard);
    nodes.cont(0);
    nodes.cont(2);
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
}

#[test]
fn half_of_an_even_number_is_no_majority() {
    for count in [2, 4] {
        let nodes = Nodes::start(count);
        let mgr = manager(&nodes);
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        (0..count / 2).for_each(|node| nodes.kill(node));
        let (error, took) = timed(|| mgr.try_lock("x").unwrap_err());
        assert!(took < CALL_LIMIT, "{took:?}: {error}");
        expect_no_quorum(&nodes, &error);
        wait_until_free_everywhere(&nodes, "x");
        nodes.restart_empty(0);
        let guard = mgr.lock("x").unwrap();
        expect_quorum(&nodes, &guard);
    }
}

/// Half of the nodes given to one and half to another is a lock for nobody; and not a reason to
/// give up either.
#[test]
fn half_to_each_is_nobody_s() {
    let nodes = Nodes::start(4);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    for node in 0..4 {
        let id = ["one", "another"][node / 2];
        nodes.server(node).query::<()>(&["SET", &key("x"), id, "PX", "600000"]);
    }
    let error = completes_within(20 * SHORT_TIMEOUT, "trying", || mgr.try_lock("x").unwrap_err());
    assert!(error.is_contended(), "{error:?}");
    let error = completes_within(20 * SHORT_TIMEOUT, "waiting", || {
        mgr.try_lock_for("x", SHORT_TIMEOUT).unwrap_err()
    });
    assert!(error.is_contended(), "{error:?}");
    nodes.server(0).cli(&["DEL", &key("x")]);
    nodes.server(3).cli(&["DEL", &key("x")]);
    let error = completes_within(20 * SHORT_TIMEOUT, "trying", || mgr.try_lock("x").unwrap_err());
    assert!(error.is_contended(), "{error:?}");
    nodes.server(2).cli(&["DEL", &key("x")]);
    let guard = completes_within(CEILING, "locking", || mgr.lock("x").unwrap());
    expect_quorum(&nodes, &guard);
}

/// Goal: a lock whose majority goes away is believed in until its deadline, and not a moment
/// longer; then it is lost once. Method: the deadline is read once no renewal can be under way any
/// more: two have failed since.
fn is_believed_until_its_deadline(
    nodes: &Nodes,
    go_away: impl Fn(usize),
    come_back: impl Fn(usize),
) {
    const AWAY: [usize; 3] = [0, 1, 3];
    // Long enough for two renewals to fail on a slow machine.
    let ttl = 2 * TTL;
    let mgr = RedisMgr::new(config_short_timeout(nodes)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    await_renewals(&guard, 1);
    AWAY.into_iter().for_each(go_away);
    let renewed = || nodes.server(2).calls("pexpire");
    let before = renewed();
    eventually("two renewals more reach one of the others", CEILING, || renewed() >= before + 2);
    let left = guard.remaining();
    assert!(left > Duration::ZERO, "the machine is too slow for this test's lease");
    let ((), took) = timed(|| watch_until_lost(&guard, left));
    assert!(took >= left, "it was given up {:?} early", left - took);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    assert!(
        completes_within(20 * SHORT_TIMEOUT, "trying", || mgr.try_lock("x").unwrap_err())
            .is_unavailable()
    );
    AWAY.into_iter().for_each(come_back);
    let next = completes_within(CEILING, "locking", || mgr.lock("x").unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    expect_quorum(nodes, &next);
    // It does not come back with the nodes.
    assert!(!guard.is_held());
}

/// The deadline must not move: whatever is still left is less by at least the time that has passed.
#[track_caller]
fn watch_until_lost(guard: &LockGuard, left: Duration) {
    let mut passed = Duration::ZERO;
    while guard.is_held() {
        let ((), span) = timed(|| work(Duration::from_millis(5)));
        passed += span;
        let now = guard.remaining();
        assert!(
            now.is_zero() || passed + now <= left,
            "after {passed:?} of {left:?} there are {now:?} left"
        );
    }
}

#[test]
fn a_lock_whose_majority_died_is_believed_until_its_deadline() {
    let nodes = Nodes::start(5);
    is_believed_until_its_deadline(
        &nodes,
        |node| nodes.kill(node),
        |node| nodes.restart_empty(node),
    );
}

#[test]
fn a_lock_whose_majority_is_stopped_is_believed_until_its_deadline() {
    let nodes = Nodes::start(5);
    is_believed_until_its_deadline(&nodes, |node| nodes.stop(node), |node| nodes.cont(node));
}

/// The majority comes back before the deadline: nothing has happened.
#[test]
fn a_lock_whose_majority_comes_back_in_time_goes_on() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(2 * TTL)).unwrap();
    await_renewals(&guard, 1);
    [0, 1, 2].into_iter().for_each(|node| nodes.stop(node));
    // The one that has been seen may reach this node only now.
    let before = nodes.server(3).calls("pexpire");
    eventually("a renewal fails", CEILING, || nodes.server(3).calls("pexpire") >= before + 2);
    [0, 1, 2].into_iter().for_each(|node| nodes.cont(node));
    await_renewals(&guard, 2);
    assert!(guard.lost().is_empty());
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
}

/// A release that reaches only a minority cannot say that it is done; what the others keep is taken
/// back when they are back, long before it expires.
#[test]
fn a_release_without_a_majority_says_so_and_is_made_up_for() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).operation_timeout(SHORT_TIMEOUT)).unwrap();
    let guard = mgr.lock("x").unwrap();
    [0, 1, 2].into_iter().for_each(|node| nodes.stop(node));
    let error = completes_within(20 * SHORT_TIMEOUT, "releasing", || guard.release().unwrap_err());
    expect_no_quorum(&nodes, &error);
    [0, 1, 2].into_iter().for_each(|node| nodes.cont(node));
    let ((), took) = timed(|| wait_until_free_everywhere(&nodes, "x"));
    assert!(took < Duration::from_secs(20), "only its lease of 30 s has ended it: {took:?}");
}
