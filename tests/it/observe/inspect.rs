//! `lock_info` and `locks`, which report locks with their holders and queues.

use std::time::Duration;

use distlock::{Config, LockError, LockInfo, RedisMgr};

use crate::{
    helpers::{
        SECOND, UnwrapReleased, config_long_timeouts, config_short_timeout, manager, queue_key,
        server_behind_proxy, set_foreign_lock, spawn_queued_waiter,
    },
    support::{Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, command, eventually},
};

fn names(locks: &[LockInfo]) -> Vec<&str> {
    locks.iter().map(LockInfo::name).collect()
}

/// The host name leads to the new master, but the connection in the pool to the former one, which
/// is a replica now and knows nothing of the new locks.
///
/// Fault: N142
#[test]
fn former_master_is_not_believed() {
    let (former, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(former.addr());
    type Look = fn(&RedisMgr) -> bool;
    let looks: [(&str, Look); 4] = [
        ("is_locked", |mgr| mgr.is_locked("x").unwrap()),
        ("holder", |mgr| mgr.holder("x").unwrap().is_some()),
        ("lock_info", |mgr| mgr.lock_info("x").unwrap().is_some()),
        ("locks", |mgr| mgr.locks("*").unwrap().len() == 1),
    ];
    let managers = looks.map(|_| RedisMgr::new(config_long_timeouts(proxy.url())).unwrap());
    for (mgr, (_, look)) in managers.iter().zip(looks) {
        assert!(!look(mgr));
    }
    proxy.lead_to(new.addr());
    former.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let _guard = manager(&new).lock("x").unwrap();
    for (mgr, (name, look)) in managers.iter().zip(looks) {
        assert!(look(mgr), "{name}");
    }
}

#[test]
fn lock_info_reports_holder_and_queue_in_order() {
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
    assert!(lock.holder().held_for().unwrap() < TEST_TIMEOUT);
    assert_eq!(lock.waiters()[0].lock_id().unwrap().pid(), std::process::id());
    let text = lock.to_string();
    assert!(text.starts_with("lock \"x\" is held by ") && text.ends_with("; 3 waiting"), "{text}");
    // The waiters get the lock in the reported order.
    let order: Vec<_> = lock.waiters().iter().map(|waiter| waiter.id().to_owned()).collect();
    guard.release().unwrap().unwrap_released();
    for (waiting, id) in waiting.into_iter().zip(order) {
        let guard = waiting.join().unwrap().unwrap();
        assert_eq!(guard.id().as_str(), id);
    }
    assert_eq!((mgr.lock_info("x").unwrap(), mgr.locks("*").unwrap()), (None, vec![]));
}

#[test]
fn many_locks_are_listed_once_each_in_small_steps() {
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
    server.cli(&["ECHO", "end of the list"]);
    commands.wait_for("end of the list");
    let lines = commands.lines();
    let count = |word: &str| {
        lines.iter().filter(|line| line.contains(word) && !line.contains("lua]")).count()
    };
    assert!(
        count("\"SCAN\"") >= 4 && count("\"EVALSHA\"") + count("\"EVAL\"") >= 20,
        "too few requests: other clients would wait too long"
    );
    assert_eq!(count("\"KEYS\""), 0);
    drop(guards);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap().unwrap()));
}

#[test]
fn pattern_matches_names_and_prefix_is_literal() {
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
    for (pattern, why) in [("", "it is empty"), ("a[b", "no closing ]"), ("[]", "empty set")] {
        let error = odd.locks(pattern).unwrap_err();
        assert!(matches!(error, LockError::InvalidName { .. }), "{pattern}: {error:?}");
        assert!(error.to_string().contains(why), "{pattern}: {error}");
    }
    assert_eq!(names(&plain.locks("*").unwrap()), ["a3"]);
    assert!(matches!(plain.locks(&"x".repeat(5_000)), Err(LockError::InvalidName { .. })));
}

#[test]
fn unusual_names_are_listed_unchanged() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let mut unusual = vec![
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
    unusual.push(&long);
    let guards: Vec<_> = unusual.iter().map(|name| mgr.try_lock(name).unwrap()).collect();
    unusual.sort_unstable();
    let locks = mgr.locks("*").unwrap();
    assert_eq!(names(&locks), unusual);
    for guard in &guards {
        let lock = mgr.lock_info(guard.name()).unwrap().unwrap();
        assert_eq!(lock.holder().id(), guard.id().as_str());
        assert!(!lock.to_string().chars().any(char::is_control), "{lock}");
    }
    assert_eq!(names(&mgr.locks("\\*").unwrap()), ["*"]);
}

#[test]
fn foreign_keys_are_listed_or_left_out() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.try_lock("ours").unwrap();
    assert!(set_foreign_lock(&server, "lock:foreign", "another client\n", 600_000));
    server.cli(&["SET", "lock:", "no name"]);
    server.cli(&["RPUSH", "lock:list", "precious"]);
    server.cli(&["EVAL", "return redis.call('SET', 'lock:' .. string.char(255, 0), 'x')", "0"]);
    // Queues with invalid entries, or of another type.
    server.cli(&["RPUSH", &queue_key("foreign"), "nonsense", "", "1000 channel id with spaces"]);
    server.cli(&["SET", &queue_key("ours"), "not a list"]);
    let locks = mgr.locks("*").unwrap();
    assert_eq!(names(&locks), ["foreign", "ours"]);
    assert_eq!((locks[0].holder().id(), locks[0].fencing_token()), ("another client\n", None));
    let waiters: Vec<_> = locks[0].waiters().iter().map(|waiter| waiter.id()).collect();
    assert_eq!(waiters, ["nonsense", "", "id with spaces"]);
    assert_eq!((locks[1].holder().id(), locks[1].waiting()), (guard.id().as_str(), 0));
    assert!(matches!(mgr.lock_info("list"), Err(LockError::WrongType { .. })));
    server.cli(&["DEL", &queue_key("ours")]);
}

#[test]
fn empty_prefix_lists_only_locks_of_the_library() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    server.cli(&["SET", "session:17", "other data"]);
    let _guard = mgr.try_lock("x").unwrap();
    assert_eq!(names(&mgr.locks("*").unwrap()), ["x"]);
}

#[test]
fn long_queue_is_counted_fully_but_listed_in_part() {
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
    for (lock, listed) in
        [(mgr.lock_info("x").unwrap().unwrap(), 1_000), (mgr.locks("x").unwrap().remove(0), 100)]
    {
        assert_eq!((lock.waiting(), lock.waiters().len()), (3_000, listed));
        assert!(lock.waiters()[listed - 1].id().starts_with(&format!("waiter-{:04}-", listed - 1)));
    }
    server.cli(&["DEL", &queue_key("x"), &queue_key("y")]);
}

#[test]
fn list_survives_broken_connection_but_not_dead_server() {
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

/// Goal: a failover during a scan loses no lock, although a scan cursor of one server means nothing
/// to another. Method: two servers have the same locks, and one replaces the other between two
/// steps of the scan.
///
/// Fault: N62
#[test]
fn list_continued_on_another_server_is_complete() {
    const LOCKS: usize = 2_000;
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let successor = RedisServer::start();
    let keys: Vec<_> = (0..LOCKS).map(|number| format!("lock:{number}")).collect();
    for server in [&server, &successor] {
        let pairs = keys.iter().flat_map(|key| [key.as_str(), "a holder"]);
        server.query::<()>(&std::iter::once("MSET").chain(pairs).collect::<Vec<_>>());
    }
    proxy.lead_to(successor.addr());
    let broken = proxy.on_request(command("SCAN"), Fault::ResetBeforeRequest).after(3);
    let listed = mgr.locks("*").unwrap();
    assert_eq!((broken.fired(), listed.len()), (1, LOCKS));
}

fn config(nodes: &Nodes) -> Config {
    config_short_timeout(nodes.urls()).operation_timeout(2 * SECOND).quarantine(Duration::ZERO)
}

#[test]
fn locks_on_several_nodes_are_listed_once_by_quorum() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config(&nodes)).unwrap();
    let guards: Vec<_> = (0..150).map(|n| mgr.lock(&format!("n{n:03}")).unwrap()).collect();
    eventually("all nodes have the locks", TEST_TIMEOUT, || {
        guards.iter().all(|guard| {
            nodes.keeping(&format!("lock:{}", guard.name()), guard.id().as_str()).len() == 3
        })
    });
    // On one node only, as if it were left over or just being acquired.
    assert!(set_foreign_lock(nodes.server(2), "lock:partly", "another client", 600_000));
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
    assert_eq!((partly.holder().id(), partly.is_certain()), ("another client", false));
    assert_eq!(names(&mgr.locks("p*").unwrap()), ["partly"]);
    nodes.kill(0);
    check();
    nodes.kill(1);
    assert!(mgr.locks("*").unwrap_err().is_unavailable());
    assert!(mgr.lock_info("n001").unwrap_err().is_unavailable());
}
