//! One or two of five nodes are away, or worse: locks are taken, held, handed over and released all
//! the same.

use std::time::Duration;

use distlock::{LockGuard, RedisMgr};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, expect_quorum, key,
    late_replies::releases_x, manager, nodes_holding, quorum, wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, in_thread, is_renewal, pttl, queued,
        timed, with_ttl,
    },
    support::{
        Armed, CEILING, Fault, FaultProxy, Nodes, any_request, contains, eventually,
        eventually_some, garbage_server,
    },
};

/// The first node, on which waiters line up; one in the middle; two of which the first is one; the
/// last two.
const ONE: [&[usize]; 2] = [&[0], &[2]];
const TWO: [&[usize]; 2] = [&[0, 3], &[3, 4]];

/// Goal: whatever is wrong with these nodes, the whole life of a lock goes well, every call in
/// bounded time. Method: it goes wrong before the lock is taken in the first round, and while it is
/// held in the second.
fn a_lock_lives_through(away: &[usize], nodes: Nodes, go_wrong: impl Fn(&Nodes, usize)) {
    let well: Vec<_> = (0..nodes.len()).filter(|node| !away.contains(node)).collect();
    let [mgr, other] = [(), ()].map(|()| RedisMgr::new(config_medium_timeout(&nodes)).unwrap());
    mgr.lock("early").unwrap().release().unwrap().unwrap_released();
    let early = mgr.lock_with("early", &with_ttl(TTL)).unwrap();
    away.iter().for_each(|node| go_wrong(&nodes, *node));
    let guard =
        completes_within(CALL_LIMIT, "locking", || mgr.lock_with("x", &with_ttl(TTL)).unwrap());
    lives_on(&nodes, &well, &guard, &other);
    lives_on(&nodes, &well, &early, &other);
    for guard in [guard, early] {
        let name = guard.name().to_owned();
        let waiting =
            in_thread(&other, &name, |mgr, name| mgr.lock_with(name, &with_ttl(TTL)).unwrap());
        eventually("it waits", CEILING, || somebody_waits(&nodes, &guard));
        let last = guard.fencing_token();
        completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
        let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
        assert!(next.is_held() && next.fencing_token() > last);
        completes_within(CALL_LIMIT, "releasing", || next.release().unwrap()).unwrap_released();
        eventually("it is gone where all is well", CEILING, || {
            well.iter().all(|node| {
                nodes.server(*node).query::<Option<String>>(&["GET", &key(&name)]).is_none()
            })
        });
    }
}

/// Somebody stands in line on some node, or, where that is possible, has taken the lock there as
/// the head of the line.
fn somebody_waits(nodes: &Nodes, guard: &LockGuard) -> bool {
    let taken = nodes.values(&key(guard.name()));
    let taken = taken.iter().flatten().any(|id| id != guard.id().as_str());
    taken || nodes.running().iter().any(|node| queued(nodes.server(*node), guard.name()) > 0)
}

/// Two renewals, of which the second shows that the first has led to something; meanwhile nobody
/// else gets it.
#[track_caller]
fn lives_on(nodes: &Nodes, well: &[usize], guard: &LockGuard, other: &RedisMgr) {
    await_renewals(guard, 2);
    let kept = nodes_holding(nodes, guard);
    assert!(well.iter().filter(|node| kept.contains(node)).count() >= 3, "kept on {kept:?}");
    let error =
        completes_within(CALL_LIMIT, "trying", || other.try_lock(guard.name()).unwrap_err());
    assert!(error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
}

/// One test for each fault: with one node away, and with two.
macro_rules! faults {
    ($($fault:ident: $nodes:expr, $go_wrong:expr;)+) => {$(
        mod $fault {
            use super::*;

            fn each(cases: &[&[usize]]) {
                for away in cases {
                    let nodes: fn(&[usize]) -> Nodes = $nodes;
                    a_lock_lives_through(away, nodes(away), $go_wrong);
                }
            }

            #[test]
            fn one_of_five() {
                each(&ONE);
            }

            #[test]
            fn two_of_five() {
                each(&TWO);
            }
        }
    )+};
}

faults! {
    killed: |_| Nodes::start(5), |nodes, node| nodes.kill(node);
    stopped: |_| Nodes::start(5), |nodes, node| nodes.stop(node);
    restarted_without_data: |_| Nodes::start(5), |nodes, node| nodes.restart_empty(node);
    out_of_memory: |_| Nodes::start(5), |nodes, node| nodes.config_set(node, "maxmemory", "1");
    read_only: |_| Nodes::start(5), |nodes, node| {
        nodes.server(node).cli(&["REPLICAOF", "127.0.0.1", "1"]);
    };
    without_replicas: |_| Nodes::start(5), |nodes, node| nodes.config_set(node, "min-replicas-to-write", "1");
    black_holed: |away| Nodes::start(5).behind_proxies(away), |nodes, node| nodes.proxy(node).blackhole();
    dumb: |away| Nodes::start(5).behind_proxies(away), |nodes, node| nodes.proxy(node).one_way();
    refusing: |away| Nodes::start(5).behind_proxies(away), |nodes, node| nodes.proxy(node).refuse();
    slow: |away| Nodes::start(5).behind_proxies(away), |nodes, node| slow_down(nodes.proxy(node));
    talking_garbage: |away| Nodes::start(5).behind_proxies(away), |nodes, node| garble(nodes.proxy(node));
}

fn slow_down(proxy: &FaultProxy) {
    proxy.on_request(any_request, Fault::DelayReply(SLOW)).forever();
}

fn garble(proxy: &FaultProxy) {
    proxy.on_request(any_request, Fault::ReplaceReply(b"what?\r\n".to_vec())).forever();
}

const SLOW: Duration = Duration::from_millis(300);

/// The life of a lock with nodes that have been away ever since the manager was made.
fn a_lock_lives_without(nodes: &Nodes, urls: &[String], well: &[usize]) {
    let config =
        || crate::helpers::config_medium_timeout(urls.join(",")).quarantine(Duration::ZERO);
    let [mgr, other] = [(), ()]
        .map(|()| completes_within(CALL_LIMIT, "beginning", || RedisMgr::new(config()).unwrap()));
    let guard =
        completes_within(CALL_LIMIT, "locking", || mgr.lock_with("x", &with_ttl(TTL)).unwrap());
    lives_on(nodes, well, &guard, &other);
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    let next = completes_within(CALL_LIMIT, "locking", || other.lock("x").unwrap());
    completes_within(CALL_LIMIT, "releasing", || next.release().unwrap()).unwrap_released();
}

#[test]
fn nodes_that_were_never_there() {
    for away in ONE.iter().chain(&TWO) {
        let nodes = Nodes::start(5);
        away.iter().for_each(|node| nodes.kill(*node));
        let urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
        a_lock_lives_without(&nodes, &urls, &nodes.running());
    }
}

#[test]
fn nodes_that_want_a_password() {
    for away in ONE.iter().chain(&TWO) {
        let nodes = Nodes::built(5, |node, builder| match away.contains(&node) {
            true => builder.password("nobody knows"),
            false => builder,
        })
        .behind_proxies(away);
        let urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
        let well: Vec<_> = (0..5).filter(|node| !away.contains(node)).collect();
        a_lock_lives_without(&nodes, &urls, &well);
    }
}

#[test]
fn nodes_that_are_no_redis_servers() {
    let nodes = Nodes::start(5);
    let strangers = [garbage_server("HTTP/1.1 400 Bad Request\r\n\r\n"), garbage_server("+OK\r\n")];
    let mut urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
    (urls[0], urls[3]) = (strangers[0].url(), strangers[1].url());
    a_lock_lives_without(&nodes, &urls, &[1, 2, 4]);
}

/// Nobody waits for slow nodes while three others answer: neither does the first round, nor any
/// later one.
#[test]
fn slow_nodes_cost_no_time() {
    const SLOWER: Duration = Duration::from_secs(3);
    for away in ONE.iter().chain(&TWO) {
        let nodes = Nodes::start(5).behind_proxies(away);
        let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
        away.iter().for_each(|node| {
            drop(nodes.proxy(*node).on_request(any_request, Fault::DelayReply(SLOWER)).forever())
        });
        let mut spans: Vec<_> = (0..11)
            .map(|_| timed(|| mgr.lock("x").unwrap().release().unwrap().unwrap_released()).1)
            .collect();
        spans.sort();
        assert!(spans[5] < SECOND, "{away:?}: {spans:?}");
    }
}

/// The same for nodes that say nothing at all.
#[test]
fn stopped_nodes_cost_no_time() {
    for away in ONE.iter().chain(&TWO) {
        let nodes = Nodes::start(5);
        let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        away.iter().for_each(|node| nodes.stop(*node));
        let mut spans: Vec<_> = (0..11)
            .map(|_| {
                let ((), span) = timed(|| {
                    let guard = mgr.lock("x").unwrap();
                    guard.ensure_held().unwrap();
                    guard.release().unwrap().unwrap_released();
                });
                span
            })
            .collect();
        spans.sort();
        assert!(spans[5] < SECOND, "{away:?}: {spans:?}");
        let guard = mgr.lock("x").unwrap();
        expect_quorum(&nodes, &guard);
    }
}

/// Each of these connects would have a thread and a socket until its deadline, and be waited for
/// for a moment.
#[test]
fn a_node_that_lets_nobody_in_is_not_connected_to_by_everybody() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    drop(mgr.lock("x").unwrap());
    nodes.proxy(2).mute_new();
    nodes.proxy(2).reset_all();
    eventually("somebody waits outside", CEILING, || {
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        nodes.proxy(2).connections() > 0
    });
    for _ in 0..100 {
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    }
    let outside = nodes.proxy(2).connections();
    assert!(outside <= 20, "{outside} wait outside");
    nodes.proxy(2).heal();
    eventually("it is asked again", CEILING, || {
        let guard = mgr.lock("x").unwrap();
        nodes_holding(&nodes, &guard).len() == 3
    });
}

/// Nodes of which the first has died since it gave a lock, the middle one is slow, and the way to
/// the last one breaks.
fn held_in_bad_times(go_wrong: impl FnOnce(&Nodes)) {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = manager(&nodes);
    let guard = eventually_some("all of them keep it", CEILING, || {
        let guard = mgr.lock("x").unwrap();
        (nodes_holding(&nodes, &guard) == [0, 1, 2]).then_some(guard)
    });
    nodes.kill(0);
    let reset = nodes.proxy(2).on_request(releases_x, Fault::ResetAfterRequest);
    go_wrong(&nodes);
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    assert_eq!(reset.fired(), 1);
}

const LATER: Duration = Duration::from_millis(300);

/// When two of three have failed there is no quorum, but one of them is asked again, and what the
/// third says counts then too.
#[test]
fn a_release_hears_those_who_are_well_before_it_asks_the_others_again() {
    held_in_bad_times(|nodes| {
        drop(nodes.proxy(1).on_request(releases_x, Fault::DelayReply(LATER)).forever())
    });
}

/// What the third has said counts, when it is about the others.
#[test]
fn a_release_hears_those_whom_it_asks_again() {
    held_in_bad_times(|nodes| {
        drop(nodes.proxy(2).on_request(releases_x, Fault::DelayReply(LATER)).forever())
    });
}

/// Three nodes and a manager that knows them all, and has connections to all.
fn known_to_each_other() -> (Nodes, RedisMgr) {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    (nodes, mgr)
}

const LOADING: &[u8] = b"-LOADING Redis is loading the dataset in memory\r\n";

/// Goal: a node that failed a moment ago, and is well again, is asked where the others turn out not
/// to suffice. Method: one fails so often that it is left alone for a while; then it is well, and
/// another says that it is not ready, which is no reason to ask twice.
fn who_rests_is_needed(ask: impl Fn(&RedisMgr)) {
    let (nodes, mgr) = known_to_each_other();
    let fails = nodes.proxy(2).on_request(any_request, Fault::ResetBeforeRequest).forever();
    eventually("it fails again and again", CEILING, || {
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        fails.fired() >= 6
    });
    fails.disarm();
    let starts =
        nodes.proxy(1).on_request(any_request, Fault::ReplaceReply(LOADING.to_vec())).forever();
    completes_within(CALL_LIMIT, "asking", || ask(&mgr));
    starts.disarm();
}

#[test]
fn a_vote_of_a_node_that_failed_a_moment_ago_is_asked_for_where_it_matters() {
    who_rests_is_needed(|mgr| mgr.try_lock("x").unwrap().release().unwrap().unwrap_released());
}

#[test]
fn a_node_that_failed_a_moment_ago_is_asked_for_the_holder_where_it_matters() {
    who_rests_is_needed(|mgr| assert!(mgr.holder("x").unwrap().is_none()));
}

#[test]
fn a_node_that_failed_a_moment_ago_counts_for_a_ping_where_it_matters() {
    who_rests_is_needed(|mgr| assert!(mgr.ping().unwrap() > Duration::ZERO));
}

/// Goal: a connection that broke is made anew, and nobody waits for a node that is silent instead.
/// Method: one has not answered since long enough not to be asked where the others suffice, and the
/// connection to another is cut.
#[test]
fn nobody_waits_for_who_is_silent_where_a_new_connection_will_do() {
    let (nodes, mgr) = known_to_each_other();
    let silent = nodes.proxy(2).on_request(any_request, Fault::DropReply).forever();
    eventually("it is not asked any more", CEILING, || {
        let before = silent.fired();
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        silent.fired() == before
    });
    let cut = nodes.proxy(1).on_request(any_request, Fault::ResetAfterRequest);
    let guard = completes_within(CALL_LIMIT, "locking", || {
        mgr.lock_with("x", &with_ttl(60 * SECOND).wait(Duration::ZERO)).unwrap()
    });
    assert_eq!(cut.fired(), 1);
    silent.disarm();
    guard.release().unwrap().unwrap_released();
}

/// Believes in it no longer than a quorum keeps it; read in the order in which a slow machine does
/// no harm.
#[track_caller]
fn believes_within_a_quorum(nodes: &Nodes, guard: &LockGuard) {
    let left = |node| pttl(nodes.server(node), &key(guard.name()));
    let mut keys: Vec<_> = (0..nodes.len()).map(left).collect();
    keys.sort();
    let (kept, believed) = (keys[nodes.len() - quorum(nodes)], guard.remaining());
    // A node tells whole milliseconds.
    assert!(
        believed <= Duration::from_millis(u64::try_from(kept + 1).unwrap_or(0)),
        "{believed:?} of {keys:?} ms"
    );
}

/// Goal: the time that the votes took is none of the lease. Method: two of three have given it, and
/// their answers come when a quarter of it is over.
#[test]
fn votes_that_take_long_leave_the_rest_of_the_lease() {
    let (nodes, mgr) = known_to_each_other();
    let late =
        [1, 2].map(|node| nodes.proxy(node).on_request(contains("lock:x"), Fault::HoldReply));
    // On a slow machine one is due before the keys are looked at.
    let renewals = [0, 1, 2].map(|node| {
        nodes.proxy(node).on_request(is_renewal("lock:x"), Fault::HoldRequest).forever()
    });
    let options = with_ttl(12 * SECOND).wait(Duration::ZERO);
    let taking = in_thread(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options));
    eventually("a vote is on its way", CEILING, || late.iter().any(|late| late.fired() > 0));
    let left = |node| pttl(nodes.server(node), &key("x"));
    eventually("a quarter of the lease is over", CEILING, || (0..3).all(|node| left(node) < 9_000));
    late.iter().for_each(Armed::let_go);
    match taking.join().unwrap() {
        Ok(guard) => believes_within_a_quorum(&nodes, &guard),
        Err(error) => assert!(error.is_unavailable(), "{error:?}"),
    }
    renewals.iter().for_each(Armed::let_go);
}

/// Goal: votes that take more than a third of the lease are not waited for; they are given back,
/// and asked for again. Method: the answers of two of three do not come at all until that is done.
#[test]
fn votes_that_take_most_of_a_lease_are_given_back() {
    let (nodes, mgr) = known_to_each_other();
    let late =
        [1, 2].map(|node| nodes.proxy(node).on_request(contains("lock:x"), Fault::HoldReply));
    let back = [1, 2]
        .map(|node| nodes.proxy(node).on_request(releases_x, Fault::DelayReply(Duration::ZERO)));
    let taking =
        in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(TTL).wait(Duration::ZERO)));
    match taking.join().unwrap() {
        Ok(guard) => {
            // Before a node is asked again; one of the two is needed.
            assert!(
                back.iter().any(|back| back.fired() > 0),
                "what was given late is not given back"
            );
            believes_within_a_quorum(&nodes, &guard);
        }
        // On a machine that stood still meanwhile.
        Err(error) => assert!(error.is_unavailable(), "{error:?}"),
    }
    late.iter().for_each(Armed::let_go);
    wait_until_free_everywhere(&nodes, "x");
}

/// Goal: a node that is too far away to confirm what is given back to it while that is waited for
/// is asked again all the same. Method: somebody else has the first of three, the last is away, and
/// the second says later that it has released anything.
#[test]
fn a_node_that_gives_back_slowly_is_asked_again() {
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).operation_timeout(2 * SECOND)).unwrap();
    warm_up(&nodes, &mgr);
    nodes.kill(2);
    nodes.server(0).query::<()>(&["SET", &key("x"), "a stranger", "PX", "600000"]);
    let back = nodes
        .proxy(1)
        .on_request(releases_x, Fault::DelayReply(Duration::from_millis(300)))
        .forever();
    let waiting = in_thread(&mgr, "x", |mgr, name| mgr.try_lock_for(name, 20 * SECOND));
    back.wait_fired();
    nodes.server(0).query::<()>(&["DEL", &key("x")]);
    let guard = waiting.join().unwrap().unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1]);
    back.disarm();
    back.let_go();
}
