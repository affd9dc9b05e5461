//! Configuration, lock options and lock names: what is accepted and what is rejected; and the
//! process-wide manager.

use std::{env, time::Duration};

use distlock::{Config, LockError, LockOptions, RedisMgr};

use crate::{
    helpers::{
        FENCE, SECOND, UnwrapReleased, config_long_timeouts, config_medium_timeout,
        config_short_timeout, in_own_process, label, manager, spawn_call, spawn_queued_waiter,
        with_ttl,
    },
    quorum,
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

/// Fault: F62
#[test]
fn unsupported_url_is_rejected_at_construction() {
    for (url, reason) in [
        ("", "not a server URL"),
        ("127.0.0.1:6379", "not a server URL"),
        ("http://127.0.0.1", "unknown scheme"),
        ("mysql://root@127.0.0.1/shop", "use MySqlMgr"),
        ("redis://a:1,redis://b:2,", "a URL in the list is empty"),
        #[cfg(not(feature = "tls"))]
        ("rediss://127.0.0.1", "TLS"),
        ("redis://a:1,redis://b:2,redis://a:1", "a:1 is listed twice"),
        ("REDIS://127.0.0.1:99999", "the redis:// URL is invalid: the port is not a number"),
        ("redis://127.0.0.1/db", "URL is invalid: the database is not a number"),
        ("redis://", "URL is invalid"),
        ("redis-sentinel://127.0.0.1", "unknown scheme"),
    ] {
        let error = RedisMgr::new(Config::new(url)).expect_err(url);
        assert!(
            matches!(error, LockError::InvalidConfig { .. }) && error.is_invalid(),
            "{url}: {error:?}"
        );
        assert!(error.to_string().contains(reason), "{url}: {error}");
        assert!(error.to_string().starts_with("invalid configuration: "), "{error}");
    }
}

#[test]
fn password_setting_applies_unless_the_url_has_one() {
    let server = RedisServer::builder().password("right").start();
    let ping = |url: String, password: &str| {
        let config = config_medium_timeout(url).password(password);
        assert!(!format!("{config:?}").contains(password), "{config:?}");
        RedisMgr::new(config).unwrap().ping()
    };
    let bare = format!("redis://{}", server.addr());
    ping(bare.clone(), "right").unwrap();
    ping(format!("redis://:right@{}", server.addr()), "wrong").unwrap();
    let refused = ping(bare, "not-this").unwrap_err();
    assert!(
        refused.is_refused() && !format!("{refused} {refused:?}").contains("not-this"),
        "{refused:?}"
    );
}

#[test]
fn config_out_of_range_is_rejected_with_its_number() {
    let years = Duration::from_secs(1000 * 365 * 24 * 60 * 60);
    let url = || Config::new("redis://127.0.0.1:1");
    for (config, reason) in [
        (url().pool_size(0), "pool_size is 0"),
        (url().operation_timeout(Duration::ZERO), "operation_timeout is 0"),
        (url().operation_timeout(Duration::MAX), "operation_timeout"),
        (url().claim_window(Duration::ZERO), "claim_window is 0"),
        (url().claim_window(Duration::MAX), "claim_window"),
        (url().ttl(Duration::ZERO), "ttl is 0"),
        (url().ttl(years), "ttl is 365000d"),
        (url().ttl(Duration::MAX), "ttl is"),
        (url().max_hold(Duration::ZERO), "max_hold is zero"),
    ] {
        let error = RedisMgr::new(config.clone()).expect_err(reason);
        assert!(
            error.is_invalid() && error.to_string().contains(reason),
            "{reason:?} is missing in: {error}"
        );
    }
}

#[test]
fn options_out_of_range_are_rejected_without_connecting() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let years = Duration::from_secs(1000 * 365 * 24 * 60 * 60);
    for ttl in
        [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(9), years, Duration::MAX]
    {
        let error = mgr.lock_with("x", &with_ttl(ttl)).unwrap_err();
        assert!(matches!(error, LockError::InvalidOptions { .. }), "{ttl:?}: {error:?}");
        assert!(
            matches!(mgr.acquire_lock("x", ttl, SECOND), Err(LockError::InvalidOptions { .. })),
            "{ttl:?}"
        );
    }
    let error = mgr.lock_with("x", &LockOptions::new().max_hold(Duration::ZERO)).unwrap_err();
    assert!(matches!(error, LockError::InvalidOptions { .. }), "{error:?}");
    server.await_clients(0..=0);
    for ttl in [Duration::from_millis(10), Duration::from_secs(24 * 60 * 60)] {
        drop(mgr.lock_with("x", &with_ttl(ttl)).unwrap());
    }
}

/// Fault: F90
#[test]
fn new_manager_does_not_connect() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.await_clients(0..=0);
    assert_eq!(mgr.server(), &*label(&server));
    assert!(mgr.ping().unwrap() < 20 * SECOND);
    server.await_clients(1..=1);
}

fn strange_names() -> Vec<String> {
    let short = [
        " ",
        "a b",
        "x ",
        " x",
        "x",
        "X",
        "\0",
        "a\0b",
        "\r\n",
        "a\nb",
        "a\r\n$1\r\nb",
        "\t",
        "{",
        "}",
        "{}",
        "{x}",
        "a}b",
        "{a}{b}",
        "*",
        "?",
        "[x]",
        "\\",
        "\"",
        "'",
        "%d",
        "x:fence",
        "x:queue",
        "lock:x",
        "distlock:queue:{lock:x}",
        "😀",
        "\u{e9}",
        "e\u{301}",
        "\u{202e}x",
        "|pid1|",
        "return redis.call('FLUSHALL')",
        "-",
        "0",
        "nil",
    ];
    let long = ["n".repeat(1019), "é".repeat(509)];
    short.into_iter().map(str::to_owned).chain(long).collect()
}

/// Fault: F68
#[test]
fn names_are_distinct_byte_for_byte() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let names = strange_names();
    let guards: Vec<_> = names
        .iter()
        .map(|name| mgr.try_lock(name).unwrap_or_else(|e| panic!("{name:?}: {e}")))
        .collect();
    for guard in &guards {
        let name = guard.name();
        let value: Option<String> = server.query(&["GET", &format!("lock:{name}")]);
        assert_eq!(value.as_deref(), Some(guard.id().as_str()), "{name:?}");
        let error = mgr.try_lock(name).unwrap_err();
        assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
        assert!(!error.to_string().chars().any(char::is_control), "{error:?}");
    }
    let locks: Vec<String> = server.query(&["KEYS", "lock:*"]);
    assert_eq!(locks.len(), names.len());
    for guard in guards {
        guard.release().unwrap().unwrap_released();
    }
    assert!(server.query::<Vec<String>>(&["KEYS", "lock:*"]).is_empty());
}

#[test]
fn lock_with_any_name_is_handed_over() {
    let server = RedisServer::start();
    // With an empty prefix, each name is its key.
    for prefix in ["lock:", "", "my {app}: "] {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap();
        for name in ["a b", "\0", "\r\n", "{}", "{x}y", "a}b", "😀"] {
            let guard = mgr.lock(name).unwrap();
            let waiting = spawn_call(&mgr, name, |mgr, name| mgr.lock(name).unwrap());
            eventually("the thread waits", TEST_TIMEOUT, || {
                mgr.holder(name).unwrap().unwrap().waiters() == Some(1)
            });
            guard.release().unwrap().unwrap_released();
            let next = waiting.join().unwrap();
            assert_eq!(mgr.holder(name).unwrap().unwrap().id(), next.id().as_str());
        }
    }
}

/// Fault: F68
#[test]
fn empty_or_too_long_name_is_rejected() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for (name, reason) in [
        (String::new(), "the name is empty"),
        ("n".repeat(1020), "1020 bytes"),
        ("é".repeat(510), "1020 bytes"),
        ("n".repeat(1 << 20), "1048576 bytes"),
    ] {
        let errors = [
            mgr.lock(&name).map(drop),
            mgr.lock_reentrant(&name).map(drop),
            mgr.acquire_lock(&name, SECOND, SECOND).map(drop),
            mgr.release_lock(&name, "id").map(drop),
            mgr.holder(&name).map(drop),
            mgr.force_release(&name).map(drop),
        ];
        for error in errors.map(Result::unwrap_err) {
            assert!(
                matches!(error, LockError::InvalidName { .. }) && error.is_invalid(),
                "{error:?}"
            );
            assert!(error.to_string().contains(reason) && error.to_string().len() < 300, "{error}");
        }
    }
    server.await_clients(0..=0);
}

/// Fault: N20
#[test]
fn locks_differ_by_prefix_and_by_database() {
    let server = RedisServer::start();
    let one = RedisMgr::new(config_long_timeouts(server.url()).prefix("one:")).unwrap();
    let two = RedisMgr::new(config_long_timeouts(server.url()).prefix("two:")).unwrap();
    let other_database =
        RedisMgr::new(config_long_timeouts(format!("{}/3", server.url())).prefix("one:")).unwrap();
    let guards = [
        one.try_lock("x").unwrap(),
        two.try_lock("x").unwrap(),
        other_database.try_lock("x").unwrap(),
    ];
    // Two locks, their tokens and the fence.
    assert_eq!(server.query::<i64>(&["DBSIZE"]), 5);
    assert!(guards.iter().all(|guard| guard.is_held()));
    let waiting = spawn_call(&other_database, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("the thread waits", TEST_TIMEOUT, || {
        other_database.holder("x").unwrap().unwrap().waiters() == Some(1)
    });
    drop(guards);
    assert!(waiting.join().unwrap().is_held());
}

/// Fault: F90
#[test]
fn process_wide_manager_is_created_once() {
    if !in_own_process("config::process_wide_manager_is_created_once", &[]) {
        return;
    }
    let (server, other) = (RedisServer::start(), RedisServer::start());
    // A failed call creates no manager, so the next one may succeed.
    assert!(RedisMgr::init(Config::new("http://x")).unwrap_err().is_invalid());
    let mgr = RedisMgr::init(config_long_timeouts(server.url())).unwrap();
    let error = RedisMgr::init(config_long_timeouts(other.url())).unwrap_err();
    assert!(matches!(error, LockError::AlreadyInitialized), "{error:?}");
    assert!(error.to_string().contains("was not changed"), "{error}");
    let same = RedisMgr::instance().unwrap();
    assert!(std::ptr::eq(mgr, same));
    assert_eq!(same.server(), &*label(&server));
    let guard = same.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, mgr, "x");
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
    assert_eq!(server.keys(), [FENCE]);
    mgr.shutdown();
    assert!(matches!(RedisMgr::instance().unwrap().lock("x"), Err(LockError::Shutdown)));
}

#[test]
fn process_wide_manager_is_configured_by_environment() {
    let server = RedisServer::start();
    let env = [("DISTLOCK_URL", server.url()), ("REDIS_URL", "redis://127.0.0.1:1".into())];
    let env = env.each_ref().map(|(name, url)| (*name, url.as_str()));
    if !in_own_process("config::process_wide_manager_is_configured_by_environment", &env) {
        assert_eq!(server.keys(), [FENCE]);
        return;
    }
    let mgr = std::thread::scope(|threads| {
        let all = [(); 8].map(|()| threads.spawn(|| RedisMgr::instance().unwrap()));
        let all = all.map(|thread| thread.join().unwrap());
        assert!(
            all.iter().all(|mgr| std::ptr::eq(*mgr, all[0])),
            "more than one manager was created"
        );
        all[0]
    });
    assert!(env::var("DISTLOCK_URL").unwrap().ends_with(mgr.server()));
    drop(mgr.lock("from the environment").unwrap());
    assert!(matches!(
        RedisMgr::init(config_short_timeout("redis://127.0.0.1:1")),
        Err(LockError::AlreadyInitialized)
    ));
}

#[test]
fn error_names_the_variable_of_its_url() {
    let env = [("DISTLOCK_URL", ""), ("REDIS_URL", "localhost")];
    if in_own_process("config::error_names_the_variable_of_its_url", &env) {
        let error = RedisMgr::instance().unwrap_err().to_string();
        assert!(error.contains("in REDIS_URL, this is not a server URL"), "{error}");
    }
}

/// Fault: F68
#[test]
fn names_of_internal_keys_are_refused() {
    let server = RedisServer::start();
    type Call = fn(&RedisMgr, &str) -> Result<(), LockError>;
    let calls: [Call; 7] = [
        |mgr, name| mgr.lock(name).map(drop),
        |mgr, name| mgr.try_lock(name).map(drop),
        |mgr, name| mgr.lock_reentrant(name).map(drop),
        |mgr, name| mgr.acquire_lock(name, SECOND, SECOND).map(drop),
        |mgr, name| mgr.holder(name).map(drop),
        |mgr, name| mgr.release_lock(name, "id").map(drop),
        |mgr, name| mgr.force_release(name).map(drop),
    ];
    for (prefix, name) in [
        ("", "distlock:x"),
        ("", "distlock:"),
        ("", "distlock:token:{a}"),
        ("", "distlock:queue:{a}"),
        ("distlock:", "x"),
        ("distlock:", "fence:{a}"),
        ("dist", "lock:fence:{a}"),
    ] {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap();
        for call in calls {
            let error = call(&mgr, name).unwrap_err();
            assert!(
                matches!(error, LockError::InvalidName { .. }),
                "{prefix:?} {name:?}: {error:?}"
            );
            assert!(error.is_invalid());
        }
    }
    assert!(server.keys().is_empty(), "{:?}", server.keys());
    for (prefix, name) in
        [("", "distlock"), ("", "xdistlock:x"), ("", "Distlock:x"), ("lock:", "distlock:fence:{a}")]
    {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap();
        mgr.try_lock(name).unwrap().release().unwrap().unwrap_released();
    }
}

/// Nodes in a list with commas, each with a password and a database.
#[test]
fn node_urls_may_have_passwords_and_databases() {
    let nodes = Nodes::built(3, |_, builder| builder.password("correct horse, battery"));
    let urls: Vec<_> = (0..3).map(|node| format!("{}/2", nodes.url(node))).collect();
    let config = config_long_timeouts(urls.join(",")).quarantine(Duration::ZERO);
    let shown = format!("{:?}", config.clone());
    assert!(!shown.contains("horse") && shown.ends_with(", .. }"), "{shown}");
    let (mgr, elsewhere) = (RedisMgr::new(config).unwrap(), quorum::manager(&nodes));
    let guard = mgr.lock("x").unwrap();
    assert_eq!(quorum::nodes_holding(&nodes, &guard), [0; 0], "it must be in database 2");
    assert_eq!(mgr.holder("x").unwrap().unwrap().id(), guard.id().as_str());
    drop(elsewhere.try_lock("x").unwrap());
    assert!(guard.is_held());
}
