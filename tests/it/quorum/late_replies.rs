//! A yes that comes when nobody waits for it any more is undone where it arrives.

use std::time::Duration;

use distlock::{LockLost, RedisMgr};

use super::{
    config_long_timeouts, config_medium_timeout, config_short_timeout, expect_no_quorum,
    expect_quorum, key, manager, nodes_holding, wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, completes_within, expect_loss,
        fence_key, in_thread, queued, timed, with_ttl,
    },
    support::{Armed, CEILING, Fault, Nodes, Worker, contains, eventually, eventually_some},
};

/// A stranger holds a majority, so that an acquisition is lost without the first node, which is
/// stopped.
fn lost_without_the_first() -> Nodes {
    let nodes = Nodes::start(5);
    take(&nodes);
    nodes
}

const TAKEN: [usize; 3] = [1, 2, 3];

fn take(nodes: &Nodes) {
    for node in TAKEN {
        nodes.server(node).query::<()>(&["SET", &key("x"), "a stranger", "PX", "600000"]);
    }
}

/// The first node goes on, executes what lies in its sockets, and must then keep nothing.
#[track_caller]
fn keeps_nothing(nodes: &Nodes, before: u64) {
    nodes.cont(0);
    eventually("it has executed what it was asked", CEILING, || scripts(nodes, 0) > before);
    let left = || [nodes.values(&key("x"))[0].clone(), nodes.values(&key("x"))[4].clone()];
    // A lease of 30 s would end it much later.
    completes_within(20 * SECOND, "undoing", || {
        eventually("nothing is left", CEILING, || left() == [None, None])
    });
    assert_eq!(nodes.keeping(&key("x"), "a stranger"), TAKEN);
}

fn scripts(nodes: &Nodes, node: usize) -> u64 {
    let calls = nodes.server(node).commandstats();
    ["eval", "evalsha"].iter().filter_map(|command| calls.get(*command)).sum()
}

#[test]
fn a_lost_vote_is_undone_on_a_node_that_says_yes_late() {
    let nodes = lost_without_the_first();
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    let before = scripts(&nodes, 0);
    nodes.stop(0);
    let error = completes_within(CALL_LIMIT, "trying", || mgr.try_lock("x").unwrap_err());
    assert!(error.is_contended(), "{error:?}");
    keeps_nothing(&nodes, before);
}

#[test]
fn it_is_undone_although_its_manager_has_gone() {
    let nodes = lost_without_the_first();
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    let before = scripts(&nodes, 0);
    nodes.stop(0);
    let error = completes_within(CALL_LIMIT, "trying", || mgr.try_lock("x").unwrap_err());
    assert!(error.is_contended(), "{error:?}");
    drop(mgr);
    keeps_nothing(&nodes, before);
}

/// The same with a process that is killed while it waits in another node's line.
#[test]
fn it_is_undone_although_its_process_was_killed() {
    let nodes = lost_without_the_first();
    let mut worker: Worker = super::spawn_worker(&nodes, &[]);
    worker.send("lock y");
    super::expect_locked(&worker, "y");
    let before = scripts(&nodes, 0);
    nodes.stop(0);
    worker.send("lock x");
    eventually("it waits", CEILING, || (1..5).any(|node| queued(nodes.server(node), "x") == 1));
    worker.kill();
    keeps_nothing(&nodes, before);
}

/// Three are stopped, so that there is no majority; what they say when they go on is too late, and
/// void.
#[test]
fn a_request_that_comes_after_its_time_leaves_nothing() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    warm_up(&nodes, &mgr);
    let before: Vec<_> = (0..5).map(|node| scripts(&nodes, node)).collect();
    [0, 1, 2].into_iter().for_each(|node| nodes.stop(node));
    let error = completes_within(20 * SHORT_TIMEOUT, "trying", || mgr.try_lock("x").unwrap_err());
    expect_no_quorum(&nodes, &error);
    drop(mgr);
    [0, 1, 2].into_iter().for_each(|node| nodes.cont(node));
    eventually("they have executed what they were asked", CEILING, || {
        [0, 1, 2].into_iter().all(|node| scripts(&nodes, node) > before[node])
    });
    let left = nodes.values(&key("x"));
    let ((), took) = timed(|| wait_until_free_everywhere(&nodes, "x"));
    assert!(took < 20 * SECOND, "only its lease of 30 s has ended it: {left:?}");
}

/// The request itself is late: it lies in front of a node while the acquisition is won, used and
/// released elsewhere, and arrives with nobody there.
#[test]
fn a_request_that_arrives_after_the_release_leaves_nothing() {
    let nodes = Nodes::start(5).behind_proxies(&[2]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
    warm_up(&nodes, &mgr);
    let held = nodes.proxy(2).on_request(contains("lock:x"), Fault::HoldRequest);
    let guard = completes_within(CALL_LIMIT, "locking", || mgr.lock("x").unwrap());
    held.wait_fired();
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    let before = scripts(&nodes, 2);
    held.let_go();
    eventually("it has arrived", CEILING, || scripts(&nodes, 2) > before);
    completes_within(20 * SECOND, "undoing", || wait_until_free_everywhere(&nodes, "x"));
    let next = mgr.lock("x").unwrap();
    expect_quorum(&nodes, &next);
}

/// Replies of two nodes are lost with their connections: whether they gave the lock is not known,
/// and in the end they have not.
#[test]
fn a_yes_that_was_lost_on_its_way_is_undone() {
    let nodes = Nodes::start(5).behind_proxies(&[0, 4]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    eventually("all are connected", CEILING, || {
        nodes_holding(&nodes, &mgr.lock("y").unwrap()).len() == nodes.len()
    });
    take(&nodes);
    let resets = [0, 4]
        .map(|node| nodes.proxy(node).on_request(contains("lock:x"), Fault::ResetAfterRequest));
    // A node that was slow the last time is left out.
    eventually("both replies were lost", CEILING, || {
        let error = completes_within(CALL_LIMIT, "trying", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_contended(), "{error:?}");
        resets.iter().all(|reset| reset.fired() > 0)
    });
    completes_within(20 * SECOND, "undoing", || {
        eventually("nothing is left", CEILING, || {
            let left = nodes.values(&key("x"));
            left[0].is_none() && left[4].is_none()
        });
    });
}

/// A manager that asks for a place in line at once, since it has waited before; and its request for
/// one, which is held up.
fn lining_up(nodes: &Nodes) -> (RedisMgr, Armed) {
    lining_up_with(nodes, 10)
}

fn lining_up_with(nodes: &Nodes, pool_size: u32) -> (RedisMgr, Armed) {
    let (mgr, other) =
        (RedisMgr::new(config_long_timeouts(nodes).pool_size(pool_size)).unwrap(), manager(nodes));
    let guard = other.lock("warm").unwrap();
    assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
    guard.release().unwrap().unwrap_released();
    let held = nodes.proxy(0).on_request(contains("lock:x"), Fault::HoldRequest);
    (mgr, held)
}

/// Somebody else has the lock, so that the request takes a place in line for a lock that has been
/// given up, or will be.
fn arrives_in_line(nodes: &Nodes, held: &Armed) {
    let commands = nodes.server(0).monitor();
    held.let_go();
    commands.wait_for("lua] \"RPUSH\"");
}

/// Long before the line expires.
fn await_nobody_in_line(nodes: &Nodes) {
    eventually("the place in line is given up", 40 * SECOND, || queued(nodes.server(0), "x") == 0);
}

#[test]
fn a_place_in_line_that_is_taken_after_the_release_is_given_up() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (mgr, held) = lining_up(&nodes);
    let guard = mgr.lock_with("x", &with_ttl(60 * SECOND)).unwrap();
    held.wait_fired();
    guard.release().unwrap().unwrap_released();
    let next = manager(&nodes).lock("x").unwrap();
    arrives_in_line(&nodes, &held);
    await_nobody_in_line(&nodes);
    expect_quorum(&nodes, &next);
}

/// The same for a lock that has ended by itself, when its guard goes.
#[test]
fn a_place_in_line_that_is_taken_after_the_end_is_given_up_with_the_guard() {
    for before_the_drop in [true, false] {
        let nodes = Nodes::start(3).behind_proxies(&[0]);
        let (mgr, held) = lining_up(&nodes);
        let guard = mgr.lock_with("x", &with_ttl(60 * SECOND).max_hold(SECOND)).unwrap();
        held.wait_fired();
        assert_eq!(expect_loss(&guard), LockLost::MaxHold);
        let next = manager(&nodes).lock("x").unwrap();
        if before_the_drop {
            arrives_in_line(&nodes, &held);
            drop(guard);
        } else {
            let left = || nodes.server(0).commandstats().get("lrem").copied().unwrap_or(0);
            let before = left();
            drop(guard);
            eventually("it has been told to take nothing any more", CEILING, || left() > before);
            arrives_in_line(&nodes, &held);
        }
        await_nobody_in_line(&nodes);
        expect_quorum(&nodes, &next);
    }
}

/// Goal: a node does not count for a lock as long as something is on its way there that would take
/// it away again. Method: what a lost vote has won on it is given back, which is held up; then the
/// lock is won with the two others, of which one dies.
#[test]
fn a_node_to_which_a_release_is_on_its_way_keeps_no_lock_alive() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    for node in [0, 1] {
        nodes.server(node).query::<()>(&["SET", &key("x"), "a stranger", "PX", "600000"]);
    }
    let held = nodes.proxy(2).on_request(releases_x, Fault::HoldRequest);
    let taking = in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(18 * SECOND)));
    held.wait_fired();
    [1, 0].into_iter().for_each(|node| drop(nodes.server(node).cli(&["DEL", &key("x")])));
    let guard = taking.join().unwrap().unwrap();
    assert_eq!(
        nodes_holding(&nodes, &guard),
        [0, 1, 2],
        "it has not been given back on the last one"
    );
    nodes.kill(0);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    // Of two that are there one does not count: that is no renewal.
    assert_ne!(mgr.metrics().renewals_failed(), 0);
    held.let_go();
}

/// The release overtakes the request, since it goes over another connection: another one of the
/// pool, or the renewer's.
#[test]
fn a_release_over_another_connection_gives_up_the_place_in_line_too() {
    for pool_size in [4, 1] {
        let nodes = Nodes::start(3).behind_proxies(&[0]);
        let (mgr, held) = lining_up_with(&nodes, pool_size);
        let guard = mgr.lock("x").unwrap();
        held.wait_fired();
        let borrowed = mgr.connection().unwrap();
        guard.release().unwrap().unwrap_released();
        drop(borrowed);
        let next = manager(&nodes).lock("x").unwrap();
        arrives_in_line(&nodes, &held);
        await_nobody_in_line(&nodes);
        expect_quorum(&nodes, &next);
    }
}

/// Goal: what one node owes an answer to is not forgotten when the others have to be asked again
/// and again. Method: on a way so long that a grant is confirmed at once, the nodes give different
/// tokens. The first request is carried out on the last node after the release, which has overtaken
/// it.
#[test]
fn a_request_from_before_the_nodes_agreed_on_a_token_leaves_nothing() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes).claim_window(SECOND)).unwrap();
    let holder = manager(&nodes).lock("x").unwrap();
    let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(60 * SECOND)));
    eventually("it waits", CEILING, || queued(nodes.server(0), "x") == 1);
    nodes.server(0).query::<()>(&["SET", &fence_key("x"), &(1_u64 << 52).to_string()]);
    let asks = |words: &[Vec<u8>]| {
        ["lock:x", "try"].iter().all(|word| words.iter().any(|other| other == word.as_bytes()))
    };
    let held = nodes.proxy(2).on_request(asks, Fault::HoldRequest);
    for node in [0, 1] {
        nodes
            .proxy(node)
            .on_request(contains("lock:x"), Fault::DelayReply(Duration::from_millis(200)))
            .forever();
    }
    holder.release().unwrap().unwrap_released();
    let guard = waiting.join().unwrap().unwrap();
    let before = scripts(&nodes, 2);
    guard.release().unwrap().unwrap_released();
    eventually("the release has overtaken it", CEILING, || scripts(&nodes, 2) > before);
    let before = scripts(&nodes, 2);
    held.let_go();
    eventually("the request has arrived", CEILING, || scripts(&nodes, 2) > before);
    completes_within(40 * SECOND, "undoing", || wait_until_free_everywhere(&nodes, "x"));
}

/// The release of this lock, over whichever connection.
pub(super) fn releases_x(words: &[Vec<u8>]) -> bool {
    let named = |name: &str| words.iter().any(|word| word == name.as_bytes());
    named("lock:x")
        && named("distlock:queue:{lock:x}")
        && !["try", "join", "look"].into_iter().any(named)
}

/// A lock that all three nodes keep, given up while its release is held up in front of the last
/// one, so that nobody waits for that answer. The last one's word was heard when it was taken, so
/// that nothing else is to be undone there.
fn released_without_the_last(nodes: &Nodes, mgr: &RedisMgr) -> Armed {
    warm_up(nodes, mgr);
    let guard = eventually_some("all of them keep it", CEILING, || {
        let unheard = nodes.proxy(1).on_request(contains("lock:x"), Fault::HoldReply);
        let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
        unheard.disarm();
        unheard.let_go();
        (nodes_holding(nodes, &guard) == [0, 1, 2]).then_some(guard)
    });
    let held = nodes.proxy(2).on_request(releases_x, Fault::HoldRequest);
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    held.wait_fired();
    held
}

/// The script was thrown away before the request came, which is refused for that. Whoever asks next
/// over that connection finds the refusal, or nobody does.
#[test]
fn a_release_that_is_refused_when_nobody_waits_for_it_is_made_up_for() {
    for found in [true, false] {
        let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
        let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
        let held = released_without_the_last(&nodes, &mgr);
        let before = scripts(&nodes, 2);
        nodes.server(2).query::<()>(&["SCRIPT", "FLUSH"]);
        held.let_go();
        if found {
            eventually("it has been refused", CEILING, || scripts(&nodes, 2) > before);
            drop(mgr.lock("y").unwrap());
        }
        wait_until_free_everywhere(&nodes, "x");
    }
}

/// The connection breaks, and the request with it.
#[test]
fn a_release_that_never_arrives_when_nobody_waits_for_it_is_made_up_for() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    let _held = released_without_the_last(&nodes, &mgr);
    nodes.proxy(2).reset_all();
    wait_until_free_everywhere(&nodes, "x");
}

/// Its answer is lost, so that it is asked for once more, when somebody else has the lock.
#[test]
fn a_release_that_is_made_up_for_in_vain_takes_nothing_from_the_next() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    let held = released_without_the_last(&nodes, &mgr);
    let again = nodes.proxy(2).on_request(releases_x, Fault::HoldRequest);
    held.let_go();
    wait_until_free_everywhere(&nodes, "x");
    let next = eventually_some("all of them keep it", CEILING, || {
        let guard = manager(&nodes).lock("x").unwrap();
        (nodes_holding(&nodes, &guard) == [0, 1, 2]).then_some(guard)
    });
    again.wait_fired();
    let before = scripts(&nodes, 2);
    again.let_go();
    eventually("it has been asked for again", CEILING, || scripts(&nodes, 2) > before);
    assert_eq!(nodes_holding(&nodes, &next), [0, 1, 2]);
}
