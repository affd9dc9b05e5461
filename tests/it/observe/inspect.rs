//! Looking at locks from outside, and taking one away.

use std::time::Duration;

use distlock::{Config, LockError, LockInfo, LockLost, RedisMgr, Released};

use crate::{
    helpers::{
        SECOND, UnwrapReleased, config_long_timeouts, config_short_timeout, expect_loss,
        foreign_take, manager, queue_key, server_behind_proxy, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, Fault, Nodes, RedisServer, command, eventually},
};

fn names(locks: &[LockInfo]) -> Vec<&str> {
    locks.iter().map(LockInfo::name).collect()
}

#[test]
fn a_lock_is_told_with_its_holder_and_its_line_in_order() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| spawn_queued_waiter(&server, &mgr, "x")).collect();
    let lock = mgr.lock_info("x").unwrap().unwrap();
    assert_eq!(
        mgr.locks("*").unwrap().iter().map(LockInfo::waiters).collect::<Vec<_>>(),
        [lock.waiters()]
    );
    assert_eq!((lock.name(), lock.holder().id()), ("x", guard.id().as_str()));
    assert_eq!(lock.fencing_token(), Some(guard.fencing_token()));
    assert_eq!((lock.waiting(), lock.waiters().len(), lock.is_certain()), (3, 3, true));
    let left = lock.holder().ttl_left().unwrap();
    assert!(left > 20 * SECOND && left <= 30 * SECOND, "{left:?}");
    assert!(lock.holder().held_for().unwrap() < CEILING);
    assert_eq!(lock.waiters()[0].lock_id().unwrap().pid(), std::process::id());
    let text = lock.to_string();
    assert!(text.starts_with("lock \"x\" is held by ") && text.ends_with("; 3 wait"), "{text}");
    // They get the lock in the order in which they were told.
    let order: Vec<_> = lock.waiters().iter().map(|waiter| waiter.id().to_owned()).collect();
    guard.release().unwrap().unwrap_released();
    for (waiting, id) in waiting.into_iter().zip(order) {
        let guard = waiting.join().unwrap().unwrap();
        assert_eq!(guard.id().as_str(), id);
    }
    assert_eq!((mgr.lock_info("x").unwrap(), mgr.locks("*").unwrap()), (None, vec![]));
}

#[test]
fn thousands_of_locks_are_told_each_once_and_the_server_serves_others_in_between() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> = (0..2_000).map(|n| mgr.try_lock(&format!("n{n:04}")).unwrap()).collect();
    let waiting =
        [spawn_queued_waiter(&server, &mgr, "n0042"), spawn_queued_waiter(&server, &mgr, "n0042")];
    let commands = server.monitor();
    let locks = mgr.locks("*").unwrap();
    assert_eq!(names(&locks), guards.iter().map(|guard| guard.name()).collect::<Vec<_>>());
    for (lock, guard) in locks.iter().zip(&guards) {
        assert_eq!(
            (lock.holder().id(), lock.fencing_token()),
            (guard.id().as_str(), Some(guard.fencing_token()))
        );
        assert_eq!(lock.waiting(), if lock.name() == "n0042" { 2 } else { 0 });
    }
    assert_eq!(locks[42].waiters().len(), 2);
    server.cli(&["ECHO", "that is all"]);
    commands.wait_for("that is all");
    let lines = commands.lines();
    let asked = |word: &str| {
        lines.iter().filter(|line| line.contains(word) && !line.contains("lua]")).count()
    };
    assert!(
        asked("\"SCAN\"") >= 4 && asked("\"EVALSHA\"") + asked("\"EVAL\"") >= 20,
        "in too large steps"
    );
    assert_eq!(asked("\"KEYS\""), 0);
    drop(guards);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap().unwrap()));
}

#[test]
fn patterns_are_about_names_and_the_prefix_stands_for_itself() {
    let server = RedisServer::start();
    let with =
        |prefix: &str| RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap();
    let (odd, plain) = (with("l*[a]\\?:"), with("lock:"));
    let _guards = ["a1", "a2", "b1"].map(|name| odd.try_lock(name).unwrap());
    let _other = plain.try_lock("a3").unwrap();
    let _lookalike = with("lxa?:").try_lock("a4").unwrap();
    assert_eq!(names(&odd.locks("*").unwrap()), ["a1", "a2", "b1"]);
    assert_eq!(names(&odd.locks("a*").unwrap()), ["a1", "a2"]);
    assert_eq!(names(&odd.locks("?1").unwrap()), ["a1", "b1"]);
    assert_eq!(names(&odd.locks("[b]1").unwrap()), ["b1"]);
    assert_eq!(names(&odd.locks("a1").unwrap()), ["a1"]);
    assert_eq!(names(&odd.locks("").unwrap()), [""; 0]);
    assert_eq!(names(&plain.locks("*").unwrap()), ["a3"]);
    assert!(matches!(plain.locks(&"x".repeat(5_000)), Err(LockError::InvalidName { .. })));
}

#[test]
fn names_of_every_kind_come_back_as_they_were() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let mut hostile = vec![
        "*",
        "a\\*b",
        "[x]",
        "a b",
        " ",
        "line\r\nbreak",
        "\0",
        "\u{1b}[31mred",
        "{tag}x",
        "a}b",
        "{}",
        "é",
        "🦀",
        "distlock:queue:{lock:x}",
        "lock:",
        "'\"--",
        "%s%n",
    ];
    let long = "n".repeat(1_000);
    hostile.push(&long);
    let guards: Vec<_> = hostile.iter().map(|name| mgr.try_lock(name).unwrap()).collect();
    hostile.sort_unstable();
    let locks = mgr.locks("*").unwrap();
    assert_eq!(names(&locks), hostile);
    for guard in &guards {
        let lock = mgr.lock_info(guard.name()).unwrap().unwrap();
        assert_eq!(lock.holder().id(), guard.id().as_str());
        assert!(!lock.to_string().chars().any(char::is_control), "{lock}");
    }
    assert_eq!(names(&mgr.locks("\\*").unwrap()), ["*"]);
}

#[test]
fn what_others_put_there_is_told_or_left_out_and_never_in_the_way() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.try_lock("ours").unwrap();
    assert!(foreign_take(&server, "lock:foreign", "a stranger\n", 600_000));
    server.cli(&["SET", "lock:", "no name"]);
    server.cli(&["RPUSH", "lock:list", "precious"]);
    server.cli(&["EVAL", "return redis.call('SET', 'lock:' .. string.char(255, 0), 'x')", "0"]);
    // Queues and tokens that are none.
    server.cli(&["RPUSH", &queue_key("foreign"), "nonsense", "", "1000 channel id with spaces"]);
    server.cli(&["SET", &queue_key("ours"), "not a list"]);
    let locks = mgr.locks("*").unwrap();
    assert_eq!(names(&locks), ["foreign", "ours"]);
    assert_eq!((locks[0].holder().id(), locks[0].fencing_token()), ("a stranger\n", None));
    let waiters: Vec<_> = locks[0].waiters().iter().map(|waiter| waiter.id()).collect();
    assert_eq!(waiters, ["nonsense", "", "id with spaces"]);
    assert_eq!((locks[1].holder().id(), locks[1].waiting()), (guard.id().as_str(), 0));
    assert!(matches!(mgr.lock_info("list"), Err(LockError::WrongType { .. })));
    server.cli(&["DEL", &queue_key("ours")]);
}

#[test]
fn without_a_prefix_only_locks_of_ours_are_locks() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    server.cli(&["SET", "session:17", "somebody's data"]);
    let _guard = mgr.try_lock("x").unwrap();
    assert_eq!(names(&mgr.locks("*").unwrap()), ["x"]);
}

#[test]
fn a_long_line_is_counted_in_full_and_told_in_part() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let _guards = ["x", "y"].map(|name| mgr.try_lock(name).unwrap());
    let entry = |n| format!("1000 distlock:client:none waiter-{n:04}-{}", "w".repeat(2_000));
    let entries: Vec<String> = (0..3_000).map(entry).collect();
    for name in ["x", "y"] {
        let queue = queue_key(name);
        for part in entries.chunks(500) {
            let words: Vec<&str> =
                ["RPUSH", &queue].into_iter().chain(part.iter().map(String::as_str)).collect();
            server.cli(&words);
        }
    }
    for (lock, told) in
        [(mgr.lock_info("x").unwrap().unwrap(), 1_000), (mgr.locks("x").unwrap().remove(0), 100)]
    {
        assert_eq!((lock.waiting(), lock.waiters().len()), (3_000, told));
        assert!(lock.waiters()[told - 1].id().starts_with(&format!("waiter-{:04}-", told - 1)));
    }
    server.cli(&["DEL", &queue_key("x"), &queue_key("y")]);
}

#[test]
fn a_connection_that_breaks_on_the_way_is_replaced_and_a_server_that_is_away_is_an_error() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_short_timeout(url).operation_timeout(SECOND));
    let direct = manager(&server);
    let _guards: Vec<_> = (0..300).map(|n| direct.try_lock(&format!("n{n}")).unwrap()).collect();
    for fault in [Fault::ResetAfterRequest, Fault::CloseAfterRequest, Fault::ResetBeforeRequest] {
        let broken = proxy.on_request(command("SCAN"), fault);
        assert_eq!(mgr.locks("*").unwrap().len(), 300);
        assert_eq!(broken.fired(), 1);
    }
    proxy.refuse();
    assert!(mgr.locks("*").unwrap_err().is_unavailable());
    assert!(mgr.lock_info("n1").unwrap_err().is_unavailable());
    proxy.heal();
    assert_eq!(mgr.lock_info("n1").unwrap().unwrap().name(), "n1");
}

/// Goal: a place in one server's keys is none in another's, so that a failover in the middle of a
/// list costs none of its locks. Method: two servers with the same locks, one of which takes the
/// place of the other between two steps.
#[test]
fn a_list_that_is_continued_on_another_server_is_complete() {
    const LOCKS: usize = 2_000;
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let successor = RedisServer::start();
    let keys: Vec<_> = (0..LOCKS).map(|number| format!("lock:{number}")).collect();
    for server in [&server, &successor] {
        let pairs = keys.iter().flat_map(|key| [key.as_str(), "somebody"]);
        server.query::<()>(&std::iter::once("MSET").chain(pairs).collect::<Vec<_>>());
    }
    proxy.lead_to(successor.addr());
    let broken = proxy.on_request(command("SCAN"), Fault::ResetBeforeRequest).after(3);
    let listed = mgr.locks("*").unwrap();
    assert_eq!((broken.fired(), listed.len()), (1, LOCKS));
}

#[test]
fn only_the_holder_with_this_identifier_loses_the_lock() {
    let server = RedisServer::start();
    let (mgr, operator) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let former = guard.id().to_string();
    let waiting = spawn_queued_waiter(&server, &operator, "x");
    assert!(
        matches!(operator.force_release_if("x", "another"), Ok(Released::OwnedByOther(by)) if by.id() == former)
    );
    assert!(guard.is_held());
    operator.force_release_if("x", &former).unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    assert!(
        matches!(expect_loss(&guard), LockLost::Taken { by, .. } if by.id() == next.id().as_str())
    );
    // The identifier of a former holder takes nothing away.
    assert!(matches!(operator.force_release_if("x", &former), Ok(Released::OwnedByOther(_))));
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
    assert_eq!(operator.force_release_if("x", &former).unwrap(), Released::Gone);
}

#[test]
fn who_is_forced_out_while_nobody_waits_learns_that_the_lock_is_gone() {
    let server = RedisServer::start();
    let (mgr, operator) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    operator.force_release_if("x", guard.id().as_str()).unwrap().unwrap_released();
    assert_eq!(expect_loss(&guard), LockLost::Gone);
}

fn several(nodes: &Nodes) -> Config {
    config_short_timeout(nodes.urls()).operation_timeout(2 * SECOND).quarantine(Duration::ZERO)
}

#[test]
fn of_several_nodes_each_lock_is_told_once_and_by_a_quorum_where_there_is_one() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(several(&nodes)).unwrap();
    let guards: Vec<_> = (0..150).map(|n| mgr.lock(&format!("n{n:03}")).unwrap()).collect();
    eventually("all nodes keep them", CEILING, || {
        guards.iter().all(|guard| {
            nodes.keeping(&format!("lock:{}", guard.name()), guard.id().as_str()).len() == 3
        })
    });
    // On one node only: left over, or being taken just now.
    assert!(foreign_take(nodes.server(2), "lock:partly", "a stranger", 600_000));
    let check = || {
        let locks = mgr.locks("n*").unwrap();
        assert_eq!(names(&locks), guards.iter().map(|guard| guard.name()).collect::<Vec<_>>());
        for (lock, guard) in locks.iter().zip(&guards) {
            assert!(lock.is_certain() && lock.holder().id() == guard.id().as_str(), "{lock:?}");
            assert_eq!(lock.holder().nodes().len(), 3);
        }
    };
    check();
    let partly = mgr.lock_info("partly").unwrap().unwrap();
    assert_eq!((partly.holder().id(), partly.is_certain()), ("a stranger", false));
    assert_eq!(names(&mgr.locks("p*").unwrap()), ["partly"]);
    nodes.kill(0);
    check();
    nodes.kill(1);
    assert!(mgr.locks("*").unwrap_err().is_unavailable());
    assert!(mgr.lock_info("n001").unwrap_err().is_unavailable());
}
