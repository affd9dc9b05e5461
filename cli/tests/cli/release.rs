//! `distlock release`.

use distlock::{LockLost, LockOptions};
use serde_json::json;

use super::{
    command::{distlock_at, distlock_at_url, run_for_json, run_to_end, start},
    json::Schema,
};
use crate::{
    helpers::{
        SECOND, UnwrapReleased, expect_loss, get, manager, set_foreign_lock, spawn_queued_waiter,
        with_ttl,
    },
    support::{Fault, FaultProxy, Nodes, RedisServer, contains},
};

#[test]
fn force_release_names_former_holder() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let ended = run_to_end(distlock_at(&server, &["release", "x", "--force"])).expect_code(0);
    let who = format!(
        "released lock \"x\", which was held by {} (pid {}",
        guard.id().host(),
        guard.id().pid()
    );
    assert!(
        ended.out.starts_with(&who) && ended.out.lines().count() == 1 && ended.err.is_empty(),
        "{ended:?}"
    );
    assert_eq!(get(&server, "lock:x"), None);
    assert_eq!(expect_loss(&guard), LockLost::Gone);
}

#[test]
fn released_lock_goes_to_next_waiter_who_keeps_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let former = guard.id().to_string();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let (value, ended) =
        run_for_json(distlock_at(&server, &["release", "x", "--if-id", &former, "--json"]));
    ended.expect_code(0);
    assert_eq!(
        (&value["name"], &value["released"], &value["holder"]),
        (&json!("x"), &json!(true), &json!(null))
    );
    let was = &value["former_holder"];
    assert_eq!((&was["id"], &was["pid"]), (&json!(former), &json!(guard.id().pid())));
    let next = waiting.join().unwrap().unwrap();
    assert!(
        matches!(expect_loss(&guard), LockLost::Taken { by, .. } if by.id() == next.id().as_str())
    );
    // The lock has another holder now, so the id of the former holder releases nothing.
    let late = run_to_end(distlock_at(&server, &["release", "x", "--if-id", &former]))
        .expect_code(1)
        .expect_error("nothing was released");
    assert!(late.err.contains(&format!("is held by {}", next.id().host())), "{late:?}");
    let (value, ended) =
        run_for_json(distlock_at(&server, &["release", "x", "--if-id", &former, "--json"]));
    ended.expect_code(1);
    assert_eq!((&value["released"], &value["former_holder"]), (&json!(false), &json!(null)));
    assert_eq!(value["holder"]["id"], json!(next.id().as_str()));
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
}

#[test]
fn release_of_free_lock_exits_with_1() {
    let server = RedisServer::start();
    for how in [&["--force"][..], &["--if-id", "another"]] {
        let args = [&["release", "x"], how].concat();
        run_to_end(distlock_at(&server, &args))
            .expect_code(1)
            .expect_error("nothing was released: lock \"x\" is not held");
        let (value, ended) = run_for_json(distlock_at(&server, &[&args[..], &["--json"]].concat()));
        ended.expect_code(1);
        assert_eq!(
            value,
            json!({
                "version": 1,
                "name": "x",
                "released": false,
                "former_holder": null,
                "former_holders": [],
                "remaining": null,
                "holder": null
            })
        );
    }
}

/// The holder changes between the query and the release. The new holder keeps the lock.
#[test]
fn lock_that_changes_hands_meanwhile_is_kept() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    assert!(set_foreign_lock(&server, "lock:x", "holder-1", 600_000));
    // Only the release contains the id of the holder.
    let held_back = proxy.on_request(contains("holder-1"), Fault::HoldRequest);
    let running = start(distlock_at_url(&proxy.url(), &["release", "x", "--force"]));
    held_back.wait_fired();
    server.cli(&["SET", "lock:x", "holder-2", "PX", "600000"]);
    held_back.release();
    let ended =
        running.wait().expect_code(1).expect_error("the lock changed hands in the meantime");
    assert!(ended.err.contains("\"holder-2\""), "{ended:?}");
    assert_eq!(get(&server, "lock:x").as_deref(), Some("holder-2"));
}

/// Fault: N41
#[test]
fn locks_with_foreign_ids_can_be_released() {
    let server = RedisServer::start();
    assert!(set_foreign_lock(&server, "lock:x", "a stranger\n", 600_000));
    let ended = run_to_end(distlock_at(&server, &["release", "x", "--if-id", "a stranger\n"]))
        .expect_code(0);
    assert!(ended.out.contains("a client that calls itself \"a stranger\\n\""), "{ended:?}");
    let long = "i".repeat(600);
    assert!(set_foreign_lock(&server, "lock:x", &long, 600_000));
    run_to_end(distlock_at(&server, &["release", "x", "--force"])).expect_code(0);
    assert_eq!(get(&server, "lock:x"), None);
    let binary =
        "return redis.call('SET', 'lock:x', string.char(255, 1, 254, 0, 10), 'PX', 600000)";
    server.cli(&["EVAL", binary, "0"]);
    let ended = run_to_end(distlock_at(&server, &["release", "x", "--force"])).expect_code(0);
    assert!(ended.out.contains("a client that calls itself \"\u{fffd}\\u{1}"), "{ended:?}");
    assert!(!server.query::<bool>(&["EXISTS", "lock:x"]));
}

#[test]
fn release_without_target_exits_with_64() {
    let server = RedisServer::start();
    assert!(set_foreign_lock(&server, "lock:x", "a", 600_000));
    for args in [
        &["release", "x"][..],
        &["release", "--force"],
        &["release", "x", "--force", "--if-id", "a"],
    ] {
        let ended = run_to_end(distlock_at(&server, args)).expect_code(64);
        assert!(ended.err.contains("Usage"), "{ended:?}");
    }
    assert_eq!(get(&server, "lock:x").as_deref(), Some("a"));
}

#[test]
fn release_deletes_lock_on_all_nodes() {
    let nodes = Nodes::start(3);
    for node in 0..3 {
        assert!(set_foreign_lock(nodes.server(node), "lock:x", "me", 600_000));
    }
    run_to_end(distlock_at_url(&nodes.urls(), &["release", "x", "--force"])).expect_code(0);
    assert_eq!(nodes.values("lock:x"), [None, None, None]);
    assert!(set_foreign_lock(nodes.server(1), "lock:x", "left over", 600_000));
    run_to_end(distlock_at_url(&nodes.urls(), &["release", "x", "--force"])).expect_code(0);
    assert_eq!(nodes.values("lock:x"), [None, None, None]);
}

#[test]
fn force_release_takes_the_lock_from_all_readers() {
    let server = RedisServer::start();
    let schema = Schema::read();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("x").unwrap();
    let short = with_ttl(3 * SECOND);
    let readers = [lock.read_with(&short).unwrap(), lock.read_with(&short).unwrap()];
    let ended = run_to_end(distlock_at(&server, &["release", "x", "--force"])).expect_code(0);
    let lines: Vec<&str> = ended.out.lines().collect();
    assert!(lines.len() == 2 && ended.err.is_empty(), "{ended:?}");
    for line in lines {
        assert!(line.starts_with("released lock \"x\", which was held by "), "{line}");
    }
    assert_eq!(get(&server, "lock:x"), None);
    assert!(readers.iter().all(|reader| expect_loss(reader) == LockLost::Gone));

    // A waiter gets the permits at once, which is no failure.
    let jobs = mgr.semaphore("x", 2).unwrap();
    let permits = [jobs.acquire_with(1, &short).unwrap(), jobs.acquire_with(1, &short).unwrap()];
    let mut ids = permits.each_ref().map(|permit| permit.id().to_string());
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let (value, ended) = run_for_json(distlock_at(&server, &["release", "x", "--force", "--json"]));
    schema.check("release", &value);
    ended.expect_code(0);
    assert_eq!((&value["released"], &value["remaining"]), (&json!(true), &json!(0)));
    let former = value["former_holders"].as_array().unwrap();
    let mut found: Vec<&str> = former.iter().map(|one| one["id"].as_str().unwrap()).collect();
    ids.sort();
    found.sort();
    assert_eq!(found, ids);
    assert!(waiting.join().unwrap().unwrap().is_held());
}

#[test]
fn force_release_ends_the_periods_of_kept_permits() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let jobs = mgr.semaphore("x", 5).unwrap();
    let kept = jobs.acquire_with(3, &LockOptions::new().hold_at_least(300 * SECOND)).unwrap();
    let held = jobs.acquire_with(1, &with_ttl(3 * SECOND)).unwrap();
    kept.release().unwrap().unwrap_released();
    let ended = run_to_end(distlock_at(&server, &["release", "x", "--force"])).expect_code(0);
    assert!(ended.out.lines().count() == 2 && ended.err.is_empty(), "{ended:?}");
    assert_eq!(get(&server, "lock:x"), None);
    assert_eq!(expect_loss(&held), LockLost::Gone);
}

#[test]
fn release_by_id_leaves_the_other_members() {
    let server = RedisServer::start();
    let schema = Schema::read();
    let mgr = manager(&server);
    let jobs = mgr.semaphore("x", 4).unwrap();
    let permits: Vec<_> = (0..3).map(|_| jobs.acquire().unwrap()).collect();
    let by_id = |at: usize| ["release", "x", "--if-id", permits[at].id().as_str()];
    let ended = run_to_end(distlock_at(&server, &by_id(0))).expect_code(0);
    assert!(ended.out.ends_with("); 2 permits are in use now\n"), "{ended:?}");
    let again = run_to_end(distlock_at(&server, &by_id(0))).expect_code(1);
    again.expect_error("nothing was released: the holder has another id; lock \"x\" is held by ");
    let (value, ended) = run_for_json(distlock_at(&server, &[&by_id(0)[..], &["--json"]].concat()));
    schema.check("release", &value);
    ended.expect_code(1);
    assert!(!value["holder"].is_null(), "{value}");
    let (value, ended) = run_for_json(distlock_at(&server, &[&by_id(1)[..], &["--json"]].concat()));
    schema.check("release", &value);
    ended.expect_code(0);
    assert_eq!((&value["released"], &value["remaining"]), (&json!(true), &json!(1)));
    assert_eq!(value["former_holders"], json!([value["former_holder"]]));
    assert!(permits[2].is_held());
    let ended = run_to_end(distlock_at(&server, &by_id(2))).expect_code(0);
    assert!(ended.out.ends_with(")\n"), "{ended:?}");
    assert_eq!(get(&server, "lock:x"), None);

    server.cli(&["LPUSH", "lock:y", "a"]);
    let args = ["release", "y", "--if-id", "a"];
    let ended = run_to_end(distlock_at(&server, &args)).expect_code(69);
    ended.expect_error("holds something that is not a lock");
}

#[test]
fn forced_release_that_fails_halfway_says_what_remains() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = manager(&server);
    let jobs = mgr.semaphore("x", 4).unwrap();
    // The permits that expire first are released first.
    let first = jobs.acquire_with(1, &with_ttl(60 * SECOND)).unwrap();
    let second = jobs.acquire_with(2, &with_ttl(600 * SECOND)).unwrap();
    let held_back = proxy.on_request(contains(second.id().as_str()), Fault::HoldRequest);
    let running = start(distlock_at_url(&proxy.url(), &["release", "x", "--force"]));
    held_back.wait_fired();
    server.kill();
    held_back.release();
    let ended = running.wait().expect_code(1);
    assert!(ended.out.contains("which was held by ") && ended.out.lines().count() == 1);
    let says = "distlock: released 1 of 3 permits, and lock \"x\" is still held: ";
    assert!(ended.err.starts_with(says), "{ended:?}");
    drop((first, second));
}
