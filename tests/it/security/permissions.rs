//! The ACL permissions that the library needs, and how a missing one is reported.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_queue_length, completes_within,
        config_long_timeouts, config_short_timeout, expect_loss, is_renewal, manager, queue_length,
        spawn_call, spawn_queued_waiter, tries, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, contains, eventually},
};

/// The list that `distlock doctor` checks and the README shows. `PING` is for `ping`, and for
/// waiters whose server does not reply.
#[path = "../../../cli/src/doctor/permissions.rs"]
pub(crate) mod list;

use list::LOCK_PERMISSIONS;

/// The library works without these. Waiters poll if they cannot subscribe, or if no grant message
/// may be published. A release needs `LPUSH` only to put back the entry of a waiter that it could
/// not notify. Without `PUBSUB NUMSUB`, the count that `PUBLISH` returns must do.
const OPTIONAL: &[&str] =
    &["&distlock:client:*", "+lpush", "+publish", "+pubsub|numsub", "+subscribe"];

fn user(server: &RedisServer, permissions: impl Iterator<Item = &'static str>) -> RedisMgr {
    let words =
        ["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetkeys", "resetchannels", "-@all"];
    let words: Vec<_> = words.into_iter().chain(permissions).collect();
    server.cli(&words);
    RedisMgr::new(
        config_short_timeout(format!("redis://app:pw@{}", server.addr()))
            .operation_timeout(2 * SECOND),
    )
    .unwrap()
}

#[test]
fn user_without_a_password_is_signed_in_as_itself() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", "nopass", "~*", "&*", "+@all"]);
    server.cli(&["ACL", "SETUSER", "strict", "on", ">pw", "~*", "&*", "+@all"]);
    let at = |user: &str| {
        RedisMgr::new(config_short_timeout(format!("redis://{user}@{}", server.addr()))).unwrap()
    };
    for user in ["app", "app:"] {
        let mgr = at(user);
        let guard = mgr.lock("x").unwrap();
        let name: String =
            redis::cmd("ACL").arg("WHOAMI").query(&mut mgr.connection().unwrap()).unwrap();
        assert_eq!(name, "app");
        guard.release().unwrap().unwrap_released();
    }
    // No user is signed in as another one.
    for user in ["strict", "unknown"] {
        let error = at(user).ping().unwrap_err();
        assert_eq!(error.code(), Some("WRONGPASS"), "{error}");
    }
    // A connection is signed in as this user from the start.
    assert!(at("default").ping().is_ok());
    let password = config_short_timeout(format!("redis://strict@{}", server.addr())).password("pw");
    assert!(RedisMgr::new(password).unwrap().ping().is_ok());

    let app = at("app");
    server.cli(&["ACL", "SETUSER", "default", "off"]);
    app.ping().unwrap();
    drop(at("app").try_lock("x").unwrap());
    assert!(at("default").ping().unwrap_err().is_refused());
}

/// Grants or takes the permissions to publish.
pub(crate) fn permit_publishing(server: &RedisServer, is_permitted: bool) {
    let sign = if is_permitted { "+" } else { "-" };
    let commands = if RedisServer::has_sharded_channels() {
        &["publish", "spublish"][..]
    } else {
        &["publish"]
    };
    for command in commands {
        server.cli(&["ACL", "SETUSER", "default", &format!("{sign}{command}")]);
    }
}

/// Does everything that the library does with a server; on failure, returns the name of the step.
pub(crate) fn run_all(
    server: &RedisServer,
    mgr: &RedisMgr,
) -> Result<(), (&'static str, Box<LockError>)> {
    let step = |name| move |error| (name, Box::new(error));
    mgr.ping().map_err(step("ping"))?;
    let guard = mgr.try_lock("x").map_err(step("acquire"))?;
    let refused = mgr.try_lock("x").map(drop).unwrap_err();
    if !refused.is_contended() {
        return Err(("refuse", refused.into()));
    }
    mgr.holder("x").map_err(step("inspect"))?;
    let timed_out = mgr.try_lock_for("x", Duration::from_millis(300)).map(drop).unwrap_err();
    if !timed_out.is_timeout() {
        return Err(("wait", timed_out.into()));
    }
    let commands = server.monitor();
    let waiting = spawn_call(mgr, "x", |mgr, name| mgr.try_lock_for(name, TEST_TIMEOUT));
    eventually("it polls, queued or not, or fails", TEST_TIMEOUT, || {
        waiting.is_finished() || commands.count("\"look\"") >= 1 || tries(&commands) >= 3
    });
    guard.release().map_err(step("release"))?.unwrap_released();
    let next = waiting.join().unwrap().map_err(step("handover"))?;
    next.release().map_err(step("release"))?.unwrap_released();

    let ttl = 4 * SECOND;
    let guard = mgr.lock_with("y", &with_ttl(ttl)).map_err(step("acquire"))?;
    eventually("a fifth of the ttl has passed", TEST_TIMEOUT, || guard.remaining() < ttl * 8 / 10);
    eventually("it is renewed or lost", TEST_TIMEOUT, || {
        guard.remaining() > ttl * 8 / 10 || !guard.is_held()
    });
    guard.ensure_held().map_err(step("renew"))?;
    mgr.force_release("y").map_err(step("force release"))?;
    Ok(())
}

#[test]
fn readme_lists_the_permissions() {
    let readme = include_str!("../../../README.md");
    let (before, line) =
        readme.split_once("ACL SETUSER app on >secret resetkeys resetchannels").unwrap();
    let (_, before) = before.rsplit_once("## Permissions").unwrap();
    let before = before.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(before.contains("if you set another prefix, put it there"), "{before}");
    let (line, after) = line.split_once("```").unwrap();
    let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "-@all").collect();
    assert_eq!(words, LOCK_PERMISSIONS);
    let more = after.split("\n\n").skip(1).take(2).flat_map(|paragraph| paragraph.split('`'));
    let words: Vec<&str> = more.filter(|word| word.starts_with('+')).collect();
    let further =
        [&list::HAND_OVER_PERMISSIONS[..], &list::INSPECT_PERMISSIONS, &list::NODE_PERMISSIONS];
    assert_eq!(words, further.concat());
}

/// Fault: F76
#[test]
fn listed_permissions_are_sufficient() {
    let server = RedisServer::start();
    let hand_over =
        list::HAND_OVER_PERMISSIONS.into_iter().filter(|_| RedisServer::has_sharded_channels());
    let listed = LOCK_PERMISSIONS.into_iter().chain(list::NODE_PERMISSIONS).chain(hand_over);
    let mgr = user(&server, listed);
    run_all(&server, &mgr).unwrap_or_else(|(step, error)| panic!("{step}: {error}"));
    let denied: Vec<redis::Value> = server.query(&["ACL", "LOG"]);
    assert!(denied.is_empty(), "{denied:?}");
}

/// The first operation that fails names the missing permission. Without an optional one nothing
/// fails.
///
/// Fault: F76
#[test]
fn each_missing_permission_is_named_in_the_error() {
    for missing in LOCK_PERMISSIONS {
        let server = RedisServer::start();
        let mgr = user(&server, LOCK_PERMISSIONS.into_iter().filter(|other| *other != missing));
        match (run_all(&server, &mgr), OPTIONAL.contains(&missing)) {
            (Ok(()), true) => {}
            (Err((step, error)), false) => {
                assert!(error.is_refused(), "{missing}, {step}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains("grant the permissions listed in the README"),
                    "{missing}, {step}: {text}"
                );
                assert!(!text.contains('\\'), "{missing}, {step}: {text}");
                assert!(!text.contains("@user_script"), "{missing}, {step}: {text}");
                assert!(names(&text, missing), "{missing}, {step}: {text}");
            }
            (outcome, _) => panic!("{missing}: {outcome:?}"),
        }
    }
}

/// Reports whether the text names the missing command and no other, in the words of the server or
/// of the library. For keys, it must name their kind.
fn names(text: &str, missing: &str) -> bool {
    let Some(command) = missing.strip_prefix('+') else {
        return text.contains("access to the keys of the prefix and to distlock:*");
    };
    let named: Vec<_> = text.split_once("the user needs ").map_or(Vec::new(), |(_, rest)| {
        rest.split([';', '(']).next().unwrap_or_default().trim().split(" or ").collect()
    });
    text.contains(&format!("'{command}'")) || named == [missing]
}

/// This holder's own waiters would receive grant messages, but it may not publish them.
#[test]
fn waiters_poll_if_grant_messages_may_not_be_published() {
    let server = RedisServer::start();
    let permissions = LOCK_PERMISSIONS
        .into_iter()
        .filter(|permission| !["&distlock:client:*", "+publish"].contains(permission));
    let mgr = user(&server, permissions);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    guard.release().unwrap().unwrap_released();
    assert!(
        completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap().unwrap())
            .is_held()
    );
}

/// All locks are renewed by one command, which the server refuses because of one key.
///
/// Fault: F76
/// Promise: P8
#[test]
fn permission_missing_for_one_key_costs_no_other_lock() {
    let server = RedisServer::start();
    let mgr = user(&server, LOCK_PERMISSIONS.into_iter());
    let mut guards: Vec<_> =
        (0..10).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(9 * SECOND)).unwrap()).collect();
    server.cli(&["ACL", "SETUSER", "app", "resetkeys", "~distlock:*", "~lock:n[0-8]"]);
    let forbidden = guards.pop().unwrap();
    assert_eq!(expect_loss(&forbidden), LockLost::Expired);
    let kept = guards.iter().filter(|guard| guard.is_held()).map(LockGuard::name);
    assert_eq!(kept.count(), guards.len());
}

/// The renewer must find the key that the server refuses in a few requests. One request for each
/// lock would take as long as the leases last, if the server is far away.
///
/// Fault: N102
#[test]
fn one_forbidden_key_is_found_in_few_requests() {
    const MANY: usize = 100;
    let ttl = 15 * SECOND;
    let server = RedisServer::start();
    drop(user(&server, LOCK_PERMISSIONS.into_iter()));
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", proxy.addr()))).unwrap();
    let lock = |name: &str| mgr.lock_with(name, &with_ttl(ttl)).unwrap();
    let first = lock("first");
    eventually("the others fall due later", TEST_TIMEOUT, || first.remaining() < ttl * 19 / 20);
    let guards: Vec<_> = (0..MANY).map(|n| lock(&format!("n{n}"))).collect();
    // All others become due while this renewal is in flight, and are renewed together.
    let held = proxy.on_request(is_renewal("lock:first"), Fault::HoldReply);
    held.wait_fired();
    server.cli(&[
        "ACL",
        "SETUSER",
        "app",
        "resetkeys",
        "~distlock:*",
        "~lock:first",
        "~lock:n[0-9]",
        "~lock:n[1-9][0-8]",
    ]);
    server.cli(&["ACL", "SETUSER", "app", "~lock:n[1-8]9"]);
    let requests =
        proxy.on_request(contains("lock:n"), Fault::DelayReply(Duration::ZERO)).forever();
    eventually("all are due", TEST_TIMEOUT, || guards[MANY - 1].remaining() < ttl * 6 / 10);
    held.release();
    let (forbidden, kept) = guards.split_last().unwrap();
    eventually("the others are renewed", TEST_TIMEOUT, || {
        kept.iter().all(|guard| guard.remaining() > ttl * 7 / 10)
    });
    assert!(requests.fired() < MANY / 2, "{} requests", requests.fired());
    assert!(requests.fired() > 1 && forbidden.remaining() < ttl * 6 / 10 && first.is_held());
}

/// To list locks, two more permissions are needed; an error names the missing one.
#[test]
fn listing_locks_needs_two_more_permissions() {
    use list::INSPECT_PERMISSIONS;

    let server = RedisServer::start();
    let admin = manager(&server);
    let guard = admin.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &admin, "x");
    let permissions = || LOCK_PERMISSIONS.iter().chain(&INSPECT_PERMISSIONS).copied();
    let mgr = user(&server, permissions());
    assert_eq!(mgr.locks("*").unwrap()[0].waiters().len(), 1);
    assert!(mgr.lock_info("x").unwrap().is_some());
    for missing in INSPECT_PERMISSIONS {
        let mgr = user(&server, permissions().filter(|permission| *permission != missing));
        let error = mgr.locks("*").unwrap_err();
        assert!(
            error.is_refused() && error.to_string().contains("grant the permissions"),
            "{missing}: {error}"
        );
        assert!(names(&error.to_string(), missing), "{missing}: {error}");
    }
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
}

/// Without permission to publish, waiters get the lock by polling. They must not be granted the
/// lock again from an entry left in the queue.
#[test]
fn publish_permission_missing_for_a_while_leaves_no_entry() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for restored_after in [2, 5] {
        let guard = mgr.lock("x").unwrap();
        let (served, serving) = crossbeam_channel::unbounded();
        let waiting: Vec<_> = (0..5)
            .map(|number| {
                let served = served.clone();
                let waiting = spawn_call(&mgr, "x", move |mgr, name| {
                    let guard = mgr.lock(name).unwrap();
                    served.send(()).unwrap();
                    guard.release().unwrap().unwrap_released();
                });
                await_queue_length(&server, "x", number + 1);
                waiting
            })
            .collect();
        permit_publishing(&server, false);
        guard.release().unwrap().unwrap_released();
        for _ in 0..restored_after {
            serving.recv_timeout(TEST_TIMEOUT).expect("waiters get it by polling");
        }
        if restored_after == 5 {
            waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
            assert_eq!(queue_length(&server, "x"), 0, "before the permission is restored");
            permit_publishing(&server, true);
        } else {
            permit_publishing(&server, true);
            waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
        }
        assert_eq!(
            queue_length(&server, "x"),
            0,
            "the permission was restored after {restored_after}"
        );
        // A grant to a waiter that has left would block the lock for the claim window of 20 s.
        let next = completes_within(CALL_LIMIT, "the next", || mgr.lock("x").unwrap());
        next.release().unwrap().unwrap_released();
        assert_eq!(server.keys(), [FENCE]);
    }
}
