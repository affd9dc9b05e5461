//! A node that may have lost its memory does not vote until what it may have forgotten has expired.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, RedisMgr, Vote};

use super::{
    await_renewals, config_long_timeouts, config_medium_timeout, expect_no_quorum, expect_quorum,
    key, manager, nodes_holding, quorum, wait_until_free_everywhere,
};
use crate::{
    helpers::{
        self, CALL_LIMIT, SECOND, UnwrapReleased, capture_log, completes_within, expect_loss, get,
        in_own_process, with_ttl,
    },
    support::{CEILING, Nodes, RedisServer, command, eventually, rewrite},
};

const TTL: Duration = Duration::from_secs(3);

/// With the default: a quarantine of one lease.
fn careful(nodes: &Nodes) -> RedisMgr {
    RedisMgr::new(helpers::config_long_timeouts(nodes.urls()).ttl(TTL)).unwrap()
}

/// How long a server says that it is up: a second too much at the most.
fn up_for(server: &RedisServer) -> Duration {
    let info: String = server.query(&["INFO", "server"]);
    let up = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:")).unwrap();
    Duration::from_secs(up.trim().parse().unwrap())
}

/// Makes a server a replica, and waits until it has its master's data.
fn follow(replica: &RedisServer, master: &RedisServer) {
    master.config_set("repl-diskless-sync-delay", "0");
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    eventually("it follows", CEILING, || {
        let info: String = replica.query(&["INFO", "replication"]);
        info.contains("master_link_status:up")
    });
}

/// Servers that have just started may have forgotten anything.
#[test]
fn new_nodes_do_not_vote_at_first() {
    for count in [3, 5] {
        let nodes = Nodes::start(count);
        let mgr = careful(&nodes);
        // No machine is so slow that this one's quarantine could be over.
        let strict = RedisMgr::new(config_medium_timeout(&nodes).quarantine(600 * SECOND)).unwrap();
        let error = strict.try_lock("x").unwrap_err();
        assert_eq!(expect_no_quorum(&nodes, &error), vec![Vote::Unknown; count]);
        let why = "it may have lost its data in a restart, and does not vote for another ";
        let told: Vec<_> =
            error.nodes().iter().filter_map(|answer| answer.message.strip_prefix(why)).collect();
        assert!(told.len() >= quorum(&nodes), "{error}");
        assert!(told.iter().all(|left| left.starts_with("9m 5")), "for how long: {error}");
        wait_until_free_everywhere(&nodes, "x");
        // Who waits gets it as soon as they vote.
        let guard = completes_within(CEILING, "locking", || mgr.lock("x").unwrap());
        expect_quorum(&nodes, &guard);
        let ups = (0..count).map(|node| up_for(nodes.server(node)));
        assert!(ups.max().unwrap() + SECOND >= TTL, "it was given too early");
        guard.release().unwrap().unwrap_released();
        // From now on there is nothing to wait for; a new manager may wait for a second more, in
        // which servers count.
        drop(mgr.try_lock("x").unwrap());
        drop(completes_within(CEILING, "locking", || careful(&nodes).lock("x").unwrap()));
    }
}

/// As where clocks are wrong until NTP has set them. The age that a server tells is below zero
/// then, perhaps for hours.
#[test]
fn nodes_whose_clocks_were_set_back_behind_their_start_count_as_young() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    for node in 0..nodes.len() {
        let set_back = |info: &str| {
            let line = |line: &str| match line.strip_prefix("uptime_in_seconds:") {
                Some(_) => "uptime_in_seconds:-7200".to_owned(),
                None => line.to_owned(),
            };
            info.lines().map(line).collect::<Vec<_>>().join("\r\n")
        };
        nodes.proxy(node).on_request(command("INFO"), rewrite(set_back)).forever();
    }
    let strict = RedisMgr::new(config_medium_timeout(&nodes).quarantine(600 * SECOND)).unwrap();
    let error = strict.try_lock("x").unwrap_err();
    let why = "it may have lost its data in a restart, and does not vote for another ";
    let told = error.nodes().iter().filter(|answer| answer.message.starts_with(why)).count();
    assert!(told >= quorum(&nodes), "{error}");
    // What is met once is known from then on.
    let guard = completes_within(CEILING, "locking", || careful(&nodes).lock("x").unwrap());
    guard.release().unwrap().unwrap_released();
}

#[test]
fn one_and_two_nodes_have_none_unless_it_is_asked_for() {
    for count in [1, 2] {
        let nodes = Nodes::start(count);
        drop(careful(&nodes).try_lock("x").unwrap());
    }
    let nodes = Nodes::start(2);
    let mgr = RedisMgr::new(
        helpers::config_long_timeouts(nodes.urls()).ttl(TTL).quarantine(helpers::SECOND * 600),
    )
    .unwrap();
    expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err());
}

/// A minority that restarts does not keep anybody waiting.
#[test]
fn a_quarantined_minority_delays_nobody() {
    let nodes = Nodes::start(5);
    let mgr = careful(&nodes);
    let guard = completes_within(CEILING, "locking", || mgr.lock("x").unwrap());
    nodes.restart_empty(0);
    nodes.restart_empty(4);
    await_renewals(&guard, 2);
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "locking", || careful(&nodes).lock("y").unwrap());
    expect_quorum(&nodes, &next);
}

/// Goal: the textbook case. A has its lock from {2, 3, 4}, since 0 and 1 are out of its reach; 2
/// restarts without its data. Now {0, 1, 2} have never heard of A. Whether A still believes in its
/// lock when B gets it is returned.
fn there_are_two_believers(nodes: Nodes, quarantine: Duration, ttl: Duration) -> bool {
    let nodes = nodes.behind_proxies(&[0, 1]);
    let mut urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
    let config = |urls: &[String]| {
        helpers::config_long_timeouts(urls.join(","))
            .ttl(ttl)
            .operation_timeout(SECOND)
            .quarantine(quarantine)
    };
    let mgr = RedisMgr::new(config(&urls)).unwrap();
    (0..2).for_each(|node| urls[node] = nodes.server(node).url());
    let other = RedisMgr::new(config(&urls)).unwrap();
    // Both know all nodes, and that they vote.
    for mgr in [&mgr, &other] {
        completes_within(CEILING, "locking", || mgr.lock("early").unwrap())
            .release()
            .unwrap()
            .unwrap_released();
    }
    (0..2).for_each(|node| nodes.proxy(node).blackhole());
    let guard = mgr.lock_with("x", &with_ttl(ttl).renew(false)).unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [2, 3, 4]);
    nodes.restart_empty(2);
    let next = completes_within(CEILING, "locking", || other.lock("x").unwrap());
    // Asked after B believes, and before it has ceased to.
    let both = guard.is_held() && next.is_held();
    assert!(next.fencing_token() > guard.fencing_token());
    expect_quorum(&nodes, &next);
    both
}

#[test]
fn a_node_that_forgot_a_lock_does_not_give_it_away() {
    let ttl = 5 * SECOND;
    assert!(!there_are_two_believers(Nodes::start(5), ttl, ttl), "two believe in the lock");
}

/// It would not have lost anything in a restart, but its disk is another one.
#[test]
fn a_node_that_lost_its_disk_does_not_give_away_what_was_on_it() {
    let ttl = 5 * SECOND;
    assert!(!there_are_two_believers(Nodes::durable(5), ttl, ttl), "two believe in the lock");
}

/// What the quarantine is for: the same without it.
#[test]
fn without_a_quarantine_a_node_that_forgot_a_lock_gives_it_away() {
    assert!(there_are_two_believers(Nodes::start(5), Duration::ZERO, 60 * SECOND));
}

/// A node that writes everything down before it answers, and has what it wrote, votes at once.
#[test]
fn nodes_that_forget_nothing_vote_at_once() {
    let nodes = Nodes::durable(3);
    // A quarantine that no test could wait for.
    let config = || {
        helpers::config_long_timeouts(nodes.urls())
            .operation_timeout(SECOND)
            .quarantine(600 * SECOND)
    };
    let [mgr, other] = [(), ()].map(|()| RedisMgr::new(config()).unwrap());
    let guard = mgr.try_lock_for("x", CALL_LIMIT).unwrap();
    eventually("all keep it", CEILING, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.restart(0);
    nodes.restart(2);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    let error = other.try_lock("x").unwrap_err();
    assert!(error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    let next = other.try_lock_for("x", CALL_LIMIT).unwrap();
    expect_quorum(&nodes, &next);
}

/// A lock that is held on three nodes, of which one has forgotten it and was given it again, and
/// another has died. With the word of the one that does not vote there would be a quorum.
fn held_on_two_with_a_word(nodes: &Nodes) -> LockGuard {
    let mgr = RedisMgr::new(helpers::config_medium_timeout(nodes.urls()).quarantine(600 * SECOND))
        .unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    eventually("all keep it", CEILING, || nodes_holding(nodes, &guard).len() == 3);
    nodes.restart_empty(2);
    eventually("it is taken anew", CEILING, || {
        guard.ensure_held().unwrap();
        nodes_holding(nodes, &guard).contains(&2)
    });
    nodes.kill(1);
    guard
}

#[test]
fn the_word_of_a_node_that_may_have_forgotten_carries_no_lease() {
    let nodes = Nodes::durable(3);
    let guard = held_on_two_with_a_word(&nodes);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// It is taken anew there again and again, each time for a whole lease.
#[test]
fn what_is_taken_anew_on_a_node_that_may_have_forgotten_carries_no_lease() {
    let nodes = Nodes::durable(3);
    let guard = held_on_two_with_a_word(&nodes);
    let forget = || nodes.server(2).cli(&["DEL", &key("x")]);
    forget();
    eventually("it is taken anew", CEILING, || {
        nodes_holding(&nodes, &guard).contains(&2) || !guard.is_held()
    });
    // By now all has been heard that the dead node said.
    let mut last = guard.remaining();
    eventually("it ends", CEILING, || {
        forget();
        let left = guard.remaining();
        assert!(left <= last, "{left:?} are left after {last:?}");
        last = left;
        left.is_zero()
    });
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

const MEMORY: &str = "distlock:memory";

/// New ones cannot be told from such as have lost their disk. One manager that stays connected all
/// the time sees to it that they can after the next restart.
#[test]
fn a_node_that_forgets_nothing_is_told_so_when_it_has_lasted() {
    let nodes = Nodes::built(3, |_, builder| builder.durable());
    let strict = RedisMgr::new(
        helpers::config_long_timeouts(nodes.urls())
            .operation_timeout(SECOND)
            .quarantine(600 * SECOND),
    )
    .unwrap();
    assert_eq!(expect_no_quorum(&nodes, &strict.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    let mgr = careful(&nodes);
    let told = || nodes.values(MEMORY).iter().all(|memory| memory.as_deref() == Some("3000"));
    eventually("they are told", CEILING, || {
        drop(mgr.try_lock_for("x", SECOND));
        told()
    });
    for node in 0..3 {
        let expiry: i64 = nodes.server(node).query(&["PTTL", MEMORY]);
        assert!((1_000_000_000..=30 * 86_400_000).contains(&expiry), "{expiry}");
        nodes.restart(node);
    }
    assert!(told(), "it is kept");
    drop(completes_within(CEILING, "locking", || careful(&nodes).lock("x").unwrap()));
    // Longer leases may have been there before.
    let strict = RedisMgr::new(
        helpers::config_long_timeouts(nodes.urls())
            .operation_timeout(SECOND)
            .quarantine(600 * SECOND),
    )
    .unwrap();
    assert_eq!(expect_no_quorum(&nodes, &strict.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
}

/// What it remembers would be believed when it is set to write everything down again.
#[test]
fn what_a_node_that_may_forget_remembers_of_itself_is_deleted() {
    let nodes = Nodes::durable(3);
    (0..3).for_each(|node| nodes.config_set(node, "appendfsync", "everysec"));
    let mgr = RedisMgr::new(
        helpers::config_long_timeouts(nodes.urls())
            .operation_timeout(SECOND)
            .quarantine(600 * SECOND),
    )
    .unwrap();
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    eventually("it is deleted", CEILING, || nodes.values(MEMORY).iter().all(Option::is_none));
}

/// Its data is what the other one had sent so far, whatever stands in it.
#[test]
fn a_replica_that_has_become_a_master_does_not_vote_at_first() {
    let nodes = Nodes::durable(4);
    let server = nodes.server(3);
    follow(server, nodes.server(0));
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    nodes.kill(1);
    let urls = [1, 2, 3].map(|node| nodes.url(node)).join(",");
    let mgr = RedisMgr::new(
        helpers::config_long_timeouts(urls).operation_timeout(SECOND).quarantine(600 * SECOND),
    )
    .unwrap();
    let error = mgr.try_lock("x").unwrap_err();
    assert!(error.to_string().contains("it may have lost its data in a restart"), "{error}");
    eventually("it does not remember", CEILING, || nodes.values(MEMORY)[3].is_none());
}

/// Goal: a replica that was never promoted, but started anew as a master, does not pass for one
/// that was told all it has on its disk. It shows no trace of having been one, so its master must
/// not keep a word that would be copied to it.
#[test]
fn a_replica_that_is_started_as_a_master_does_not_vote_at_first() {
    let nodes = Nodes::durable(4);
    follow(nodes.server(3), nodes.server(0));
    eventually("it writes down what it is sent", CEILING, || {
        let info: String = nodes.server(3).query(&["INFO", "persistence"]);
        info.contains("aof_rewrite_in_progress:0") && info.contains("aof_rewrite_scheduled:0")
    });
    assert!(nodes.values(MEMORY)[3].is_some(), "its master's word is copied to it");
    let manager = |of: [usize; 3]| {
        let urls = of.map(|node| nodes.url(node)).join(",");
        RedisMgr::new(
            helpers::config_long_timeouts(urls).operation_timeout(SECOND).quarantine(600 * SECOND),
        )
        .unwrap()
    };
    drop(manager([0, 1, 2]).try_lock_for("x", CALL_LIMIT).unwrap());
    eventually("its master is told that it can be replaced", CEILING, || {
        nodes.values(MEMORY).iter().map(Option::is_some).eq([false, true, true, false])
    });
    nodes.restart(3);
    let info: String = nodes.server(3).query(&["INFO", "replication"]);
    assert!(info.contains("role:master") && info.contains("master_replid2:0000"), "{info}");
    nodes.kill(1);
    let error = manager([1, 2, 3]).try_lock("x").unwrap_err();
    assert!(error.nodes()[2].message.contains("it may have lost its data in a restart"), "{error}");
}

/// Goal: a promoted replica does not give away what it has not heard of, also to those who meet it
/// for the first time. Method: A has its lock from {1, 2}, since 0 is out of its reach. The replica
/// that takes the place of 2 did not hear of that, and is older than any lease.
#[test]
fn a_promoted_replica_does_not_give_away_what_it_was_not_sent() {
    let ttl = 5 * SECOND;
    let (nodes, replica) = (Nodes::start(3), RedisServer::start());
    follow(&replica, nodes.server(2));
    let nodes = nodes.behind_proxies(&[0]);
    let config = |urls: &[String]| {
        helpers::config_long_timeouts(urls.join(",")).ttl(ttl).operation_timeout(SECOND)
    };
    let mgr = RedisMgr::new(config(&[0, 1, 2].map(|node| nodes.url(node)))).unwrap();
    completes_within(CEILING, "locking", || mgr.lock("early").unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    eventually("it is as old as those that vote", CEILING, || up_for(&replica) > ttl);
    // It follows still, and is sent nothing any more.
    replica.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    nodes.proxy(0).blackhole();
    let guard = mgr.lock_with("x", &with_ttl(ttl).renew(false)).unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [1, 2]);
    nodes.kill(2);
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
    let other =
        RedisMgr::new(config(&[nodes.server(0).url(), nodes.url(1), replica.url()])).unwrap();
    let next = completes_within(CEILING, "locking", || other.lock("x").unwrap());
    // Asked after B believes, and before it has ceased to.
    let both = guard.is_held() && next.is_held();
    assert!(!both, "two believe in the lock");
    assert!(next.fencing_token() > guard.fencing_token());
}

/// Otherwise every new manager would take it for just promoted, for as long as it has replicas.
#[test]
fn a_promoted_replica_is_told_so_when_it_has_lasted() {
    let (nodes, replica) = (Nodes::durable(3), RedisServer::start());
    follow(&replica, nodes.server(2));
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
    let info: String = replica.query(&["INFO", "replication"]);
    let promotion = info.lines().find_map(|line| line.strip_prefix("master_replid:")).unwrap();
    let urls = [nodes.url(0), nodes.url(1), replica.url()].join(",");
    let mgr = RedisMgr::new(helpers::config_long_timeouts(&urls).ttl(TTL)).unwrap();
    eventually("it is told", CEILING, || {
        drop(mgr.try_lock_for("x", SECOND));
        get(&replica, MEMORY) == Some(format!("3000 {promotion}"))
    });
    // What it was told decides for a new manager, which has no quorum without it.
    nodes.kill(1);
    let told = |told: String| {
        replica.cli(&["SET", MEMORY, &told]);
        RedisMgr::new(
            helpers::config_long_timeouts(&urls).operation_timeout(SECOND).quarantine(600 * SECOND),
        )
        .unwrap()
    };
    drop(told(format!("86400000 {promotion}")).try_lock_for("y", CALL_LIMIT).unwrap());
    let mgr = told("86400000 another".into());
    eventually("it does not vote", CEILING, || {
        let error = mgr.try_lock("y").expect_err("it votes at once");
        error.nodes()[2].message.contains("it may have lost its data in a restart")
    });
}

/// It runs on, and comes back with the data of a stranger.
#[test]
fn a_node_that_was_a_replica_meanwhile_does_not_vote_at_first() {
    let (nodes, stranger) = (Nodes::durable(3), RedisServer::start());
    let mgr = RedisMgr::new(
        helpers::config_long_timeouts(nodes.urls())
            .operation_timeout(SECOND)
            .quarantine(600 * SECOND),
    )
    .unwrap();
    drop(mgr.try_lock_for("x", CALL_LIMIT).unwrap());
    let run = nodes.server(2).run_id();
    follow(nodes.server(2), &stranger);
    nodes.kill(1);
    eventually("it is found out", CEILING, || {
        mgr.try_lock("x").unwrap_err().nodes()[2].message.contains("replica")
    });
    nodes.server(2).cli(&["REPLICAOF", "NO", "ONE"]);
    eventually("it is asked again", CEILING, || {
        let error = mgr.try_lock("x").expect_err("it votes at once");
        error.nodes()[2].message.contains("it may have lost its data in a restart")
    });
    assert_eq!(nodes.server(2).run_id(), run);
}

/// One that writes down what it did a second ago may forget a second.
#[test]
fn nodes_that_may_forget_a_second_do_not_vote_at_first() {
    let nodes = Nodes::built(3, |_, builder| {
        builder.append_only(true).arg("--appendfsync").arg("everysec")
    });
    let mgr = RedisMgr::new(
        helpers::config_long_timeouts(nodes.urls())
            .operation_timeout(SECOND)
            .quarantine(600 * SECOND),
    )
    .unwrap();
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
}

#[test]
fn a_lease_longer_than_the_quarantine_is_refused() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).ttl(TTL).quarantine(2 * TTL)).unwrap();
    let error = mgr.lock_with("x", &with_ttl(3 * TTL)).unwrap_err();
    let LockError::InvalidOptions { reason, .. } = &error else { panic!("{error:?}") };
    assert!(reason.contains("quarantine (6.0 s)") && reason.contains("ttl is 9.0 s"), "{reason}");
    let error = mgr.acquire_lock("x", 3 * TTL, SECOND).unwrap_err();
    assert!(matches!(error, LockError::InvalidOptions { .. }), "{error:?}");
    let error =
        RedisMgr::new(config_long_timeouts(&nodes).ttl(3 * TTL).quarantine(2 * TTL)).unwrap_err();
    assert!(error.is_invalid(), "{error:?}");
    assert!(nodes.server(0).keys().is_empty());
    // Without a quarantine any lease will do.
    drop(manager(&nodes).lock_with("x", &with_ttl(1000 * TTL)).unwrap());
    let longest = mgr.lock_with("x", &with_ttl(2 * TTL));
    drop(longest.unwrap());
    wait_until_free_everywhere(&nodes, "x");
}

#[test]
fn the_log_tells_of_a_quarantine() {
    if !in_own_process("redlock::quarantine::the_log_tells_of_a_quarantine", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let nodes = Nodes::start(3);
    let mgr =
        RedisMgr::new(config_long_timeouts(&nodes).quarantine(600 * SECOND).ttl(TTL)).unwrap();
    expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err());
    for node in 0..3 {
        let says = format!(
            "127.0.0.1:{} may have lost its data in a restart; it does not vote for",
            nodes.server(node).port()
        );
        let told = logged
            .lock()
            .iter()
            .filter(|line| line.starts_with("WARN ") && line.contains(&says))
            .count();
        assert_eq!(told, 1, "{:?}", logged.lock());
    }
}

/// While such a server rewrites its file, it answers before what it did is on disk.
#[test]
fn a_node_that_does_not_always_write_down_what_it_does_may_forget() {
    let nodes = Nodes::built(3, |_, builder| {
        builder.durable().arg("--no-appendfsync-on-rewrite").arg("yes")
    });
    (0..3).for_each(|node| drop(nodes.server(node).cli(&["SET", MEMORY, "86400000"])));
    let mgr = RedisMgr::new(config_medium_timeout(&nodes).quarantine(600 * SECOND)).unwrap();
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    assert_eq!(nodes.values(MEMORY), [None, None, None], "it counts for those who come later");
}
