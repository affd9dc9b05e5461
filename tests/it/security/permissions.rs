//! The least rights that everything works with, and what each of them is for.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_long_timeouts,
        config_short_timeout, expect_loss, in_thread, is_renewal, manager, spawn_queued_waiter,
        with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, RedisServer, contains, eventually},
};

/// The list that the command goes by, and the README repeats. `PING` is for `ping`, and for waiters
/// behind a silent server.
#[path = "../../../cli/src/doctor/rights.rs"]
pub(crate) mod list;

use list::LOCKS as RIGHTS;

/// Without these the library gets along: who cannot subscribe, or be told, finds out by looking; a
/// waiter that could not be told is put back by `LPUSH`; and where nobody may ask who listens,
/// whoever hears is taken for the waiter.
const DISPENSABLE: &[&str] =
    &["&distlock:client:*", "+lpush", "+publish", "+pubsub|numsub", "+subscribe"];

fn user(server: &RedisServer, rights: impl Iterator<Item = &'static str>) -> RedisMgr {
    let words =
        ["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetkeys", "resetchannels", "-@all"];
    let words: Vec<_> = words.into_iter().chain(rights).collect();
    server.cli(&words);
    RedisMgr::new(
        config_short_timeout(format!("redis://app:pw@{}", server.addr()))
            .operation_timeout(2 * SECOND),
    )
    .unwrap()
}

#[test]
fn a_user_without_a_password_signs_in_as_itself() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", "nopass", "~*", "&*", "+@all"]);
    server.cli(&["ACL", "SETUSER", "strict", "on", ">pw", "~*", "&*", "+@all"]);
    let at = |user: &str| {
        RedisMgr::new(config_short_timeout(format!("redis://{user}@{}", server.addr()))).unwrap()
    };
    for user in ["app", "app:"] {
        let mgr = at(user);
        let guard = mgr.lock("x").unwrap();
        let names: String =
            redis::cmd("ACL").arg("WHOAMI").query(&mut mgr.connection().unwrap()).unwrap();
        assert_eq!(names, "app");
        guard.release().unwrap().unwrap_released();
    }
    // Nobody is let in as somebody else.
    for user in ["strict", "nobody"] {
        let error = at(user).ping().unwrap_err();
        assert_eq!(error.code(), Some("WRONGPASS"), "{error}");
    }
    // Every connection begins as this one.
    assert!(at("default").ping().is_ok());
    let apart = config_short_timeout(format!("redis://strict@{}", server.addr())).password("pw");
    assert!(RedisMgr::new(apart).unwrap().ping().is_ok());

    let app = at("app");
    server.cli(&["ACL", "SETUSER", "default", "off"]);
    app.ping().unwrap();
    drop(at("app").try_lock("x").unwrap());
    assert!(at("default").ping().unwrap_err().is_refused());
}

/// Everything that the library does with a server, each step by its name.
fn tour(server: &RedisServer, mgr: &RedisMgr) -> Result<(), (&'static str, LockError)> {
    let step = |name| move |error| (name, error);
    mgr.ping().map_err(step("ping"))?;
    let guard = mgr.try_lock("x").map_err(step("acquire"))?;
    let refused = mgr.try_lock("x").map(drop).unwrap_err();
    if !refused.is_contended() {
        return Err(("refuse", refused));
    }
    mgr.holder("x").map_err(step("inspect"))?;
    let gave_up = mgr.try_lock_for("x", Duration::from_millis(300)).map(drop).unwrap_err();
    if !gave_up.is_timeout() {
        return Err(("wait", gave_up));
    }
    let commands = server.monitor();
    let asked = |how: &str| commands.lines().iter().filter(|line| line.contains(how)).count();
    let waiting = in_thread(mgr, "x", |mgr, name| mgr.try_lock_for(name, CEILING));
    eventually("it looks out of the line or from outside, or cannot", CEILING, || {
        waiting.is_finished() || asked("\"look\"") >= 1 || asked("\"try\"") >= 3
    });
    guard.release().map_err(step("release"))?.unwrap_released();
    let next = waiting.join().unwrap().map_err(step("handover"))?;
    next.release().map_err(step("release"))?.unwrap_released();

    let ttl = 4 * SECOND;
    let kept = mgr.lock_with("y", &with_ttl(ttl)).map_err(step("acquire"))?;
    eventually("time passes", CEILING, || kept.remaining() < ttl * 8 / 10);
    eventually("it is renewed, or lost", CEILING, || {
        kept.remaining() > ttl * 8 / 10 || !kept.is_held()
    });
    kept.ensure_held().map_err(step("renew"))?;
    mgr.force_release("y").map_err(step("force release"))?;
    Ok(())
}

#[test]
fn the_readme_lists_them() {
    let readme = include_str!("../../../README.md");
    let (_, line) =
        readme.split_once("ACL SETUSER app on >secret resetkeys resetchannels").unwrap();
    let (line, after) = line.split_once("```").unwrap();
    let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "-@all").collect();
    assert_eq!(words, RIGHTS);
    let more = after.split_once("\n\n").unwrap().1.split("\n\n").next().unwrap();
    let words: Vec<&str> = more.split('`').filter(|word| word.starts_with('+')).collect();
    assert_eq!(words, [&list::LOOKING[..], &list::NODES].concat());
}

#[test]
fn the_least_rights_are_enough() {
    let server = RedisServer::start();
    let mgr = user(&server, RIGHTS.into_iter());
    tour(&server, &mgr).unwrap_or_else(|(step, error)| panic!("{step}: {error}"));
    let denied: Vec<redis::Value> = server.query(&["ACL", "LOG"]);
    assert!(denied.is_empty(), "{denied:?}");
}

/// Where a right is missing, the first thing that cannot work says so; what works all the same is
/// named here.
#[test]
fn each_missing_right_is_noticed_and_named() {
    for missing in RIGHTS {
        let server = RedisServer::start();
        let mgr = user(&server, RIGHTS.into_iter().filter(|right| *right != missing));
        match (tour(&server, &mgr), DISPENSABLE.contains(&missing)) {
            (Ok(()), true) => {}
            (Err((step, error)), false) => {
                assert!(error.is_refused(), "{missing}, {step}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains("grant the rights listed in the README"),
                    "{missing}, {step}: {text}"
                );
                assert!(!text.contains('\\'), "{missing}, {step}: {text}");
                assert!(names(&text, missing), "{missing}, {step}: {text}");
            }
            (outcome, _) => panic!("{missing}: {outcome:?}"),
        }
    }
}

/// A command is named as the right that is missing, by the server or by us, and nothing else is; of
/// keys the kind is.
fn names(text: &str, missing: &str) -> bool {
    let Some(command) = missing.strip_prefix('+') else {
        return text.contains("keys of its prefix, and to distlock:*");
    };
    let told: Vec<_> = text.split_once("it takes ").map_or(Vec::new(), |(_, rest)| {
        rest.split(" (").next().unwrap_or_default().split(" or ").collect()
    });
    text.contains(&format!("'{command}'")) || told == [missing]
}

/// The rights of a holder whose own waiters hear, and who may not tell those of others.
#[test]
fn waiters_that_may_not_be_told_find_out_by_looking() {
    let server = RedisServer::start();
    let rights =
        RIGHTS.into_iter().filter(|right| !["&distlock:client:*", "+publish"].contains(right));
    let mgr = user(&server, rights);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    guard.release().unwrap().unwrap_released();
    assert!(
        completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap()).is_held()
    );
}

/// They are renewed in one command, which the server refuses for the one key.
#[test]
fn the_right_to_one_key_that_is_taken_away_costs_no_other_lock() {
    let server = RedisServer::start();
    let mgr = user(&server, RIGHTS.into_iter());
    let mut guards: Vec<_> =
        (0..10).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(9 * SECOND)).unwrap()).collect();
    server.cli(&["ACL", "SETUSER", "app", "resetkeys", "~distlock:*", "~lock:n[0-8]"]);
    let forbidden = guards.pop().unwrap();
    assert_eq!(expect_loss(&forbidden), LockLost::Expired);
    let kept = guards.iter().filter(|guard| guard.is_held()).map(LockGuard::name);
    assert_eq!(kept.count(), guards.len());
}

/// To find the one that the server means takes a few requests, not one for each lock: over a long
/// way those would take as long as the others have left.
#[test]
fn the_one_key_without_rights_is_found_in_few_requests() {
    const MANY: usize = 100;
    let ttl = 15 * SECOND;
    let server = RedisServer::start();
    drop(user(&server, RIGHTS.into_iter()));
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", proxy.addr()))).unwrap();
    let take = |name: &str| mgr.lock_with(name, &with_ttl(ttl)).unwrap();
    let first = take("first");
    eventually("the others fall due later", CEILING, || first.remaining() < ttl * 19 / 20);
    let guards: Vec<_> = (0..MANY).map(|n| take(&format!("n{n}"))).collect();
    // All others fall due while this one's renewal is under way, and go together.
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
    let asked = proxy.on_request(contains("lock:n"), Fault::DelayReply(Duration::ZERO)).forever();
    eventually("all are due", CEILING, || guards[MANY - 1].remaining() < ttl * 6 / 10);
    held.let_go();
    let (forbidden, kept) = guards.split_last().unwrap();
    eventually("the others are renewed", CEILING, || {
        kept.iter().all(|guard| guard.remaining() > ttl * 7 / 10)
    });
    assert!(asked.fired() < MANY / 2, "they took {} requests", asked.fired());
    assert!(asked.fired() > 1 && forbidden.remaining() < ttl * 6 / 10 && first.is_held());
}

/// Looking at many locks needs two more, and each is missed.
#[test]
fn looking_at_many_locks_needs_two_rights_more() {
    use list::LOOKING as MORE;

    let server = RedisServer::start();
    let ours = manager(&server);
    let guard = ours.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &ours, "x");
    let mgr = user(&server, RIGHTS.iter().chain(&MORE).copied());
    assert_eq!(mgr.locks("*").unwrap()[0].waiters().len(), 1);
    assert!(mgr.lock_info("x").unwrap().is_some());
    for missing in MORE {
        let mgr =
            user(&server, RIGHTS.iter().chain(&MORE).copied().filter(|right| *right != missing));
        let error = mgr.locks("*").unwrap_err();
        assert!(
            error.is_refused() && error.to_string().contains("grant the rights"),
            "{missing}: {error}"
        );
        assert!(names(&error.to_string(), missing), "{missing}: {error}");
    }
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
}
