//! How `ls`, `show` and `--json` report locks that several clients share, and kept locks.

use distlock::LockOptions;
use serde_json::{Value, json};

use super::{
    command::{distlock_at, run_for_json, run_to_end},
    json::Schema,
};
use crate::{
    helpers::{SECOND, UnwrapReleased as _, await_queue_length, manager},
    support::RedisServer,
};

fn page(server: &RedisServer, args: &[&str]) -> String {
    run_to_end(distlock_at(server, args)).expect_code(0).out
}

/// What `show --json` prints about the lock `x`.
fn shown(server: &RedisServer) -> Value {
    let (value, ended) = run_for_json(distlock_at(server, &["show", "x", "--json"]));
    ended.expect_code(0);
    Schema::read().check("show", &value);
    value["lock"].clone()
}

fn line<'a>(page: &'a str, begin: &str) -> &'a str {
    page.lines()
        .find(|line| line.starts_with(begin))
        .unwrap_or_else(|| panic!("no {begin} in {page}"))
}

#[test]
fn show_lists_members_of_a_semaphore_with_permits() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let jobs = mgr.semaphore("x", 5).unwrap();
    let one = jobs.acquire().unwrap();
    let two = jobs.acquire_many(2).unwrap();
    let out = page(&server, &["show", "x"]);
    assert!(line(&out, "kind").ends_with("semaphore, 3 permits in use"), "{out}");
    assert!(line(&out, "left").ends_with(" unless renewed"), "{out}");
    for (permit, count) in [(&one, "1"), (&two, "2")] {
        let id = permit.id().as_str();
        let row: Vec<&str> =
            out.lines().find(|line| line.ends_with(id)).unwrap().split_whitespace().collect();
        let holder = format!("{}/{}", permit.id().host(), permit.id().pid());
        assert_eq!((row[0], row[1]), (&*holder, count), "{out}");
        assert!(row[2].ends_with('s'), "{out}");
    }
    let table = page(&server, &["ls"]);
    let row = line(&table, "x");
    let holder = format!("{}/{} +1", one.id().host(), one.id().pid());
    assert!(row.contains(" 3 permits ") && row.contains(&holder), "{table}");

    assert_eq!(shown(&server)["limit"], Value::Null);
    let waiter = jobs.clone();
    let waiting = std::thread::spawn(move || waiter.acquire_many(3));
    await_queue_length(&server, "x", 1);
    let out = page(&server, &["show", "x"]);
    assert!(line(&out, "kind").ends_with("semaphore, 3 of 5 permits in use"), "{out}");
    let lock = shown(&server);
    assert_eq!((&lock["kind"], &lock["count"]), (&json!("permits"), &json!(3)));
    assert_eq!(lock["limit"], json!(5));
    assert_eq!(lock["kept"], json!(false));
    let members = lock["members"].as_array().unwrap();
    let mut found: Vec<_> =
        members.iter().map(|one| (one["permits"].as_u64(), one["id"].as_str())).collect();
    found.sort();
    let [id1, id2] = [&one, &two].map(|permit| Some(permit.id().as_str()));
    assert_eq!(found, [(Some(1), id1), (Some(2), id2)]);
    for member in members {
        assert_eq!((&member["kept"], &member["pid"]), (&json!(false), &json!(one.id().pid())));
        assert!(member["remaining_ms"].as_u64().is_some_and(|left| left <= 30_000), "{member}");
    }
    drop((one, two));
    drop(waiting.join().unwrap().unwrap());
}

#[test]
fn show_lists_readers_without_permits() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("x").unwrap();
    let readers = [lock.read().unwrap(), lock.read().unwrap()];
    let out = page(&server, &["show", "x"]);
    assert!(line(&out, "kind").ends_with("read-write lock, held by 2 readers"), "{out}");
    assert!(readers.iter().all(|reader| out.contains(reader.id().as_str())), "{out}");
    assert!(page(&server, &["ls"]).contains(" 2 readers "));
    let json = shown(&server);
    assert_eq!((&json["kind"], &json["count"]), (&json!("readers"), &json!(2)));
    assert_eq!(json["members"][0]["permits"], Value::Null);

    drop(readers);
    let writer = lock.write().unwrap();
    let out = page(&server, &["show", "x"]);
    assert!(line(&out, "kind").contains("mutex or write lock"), "{out}");
    let json = shown(&server);
    assert_eq!((&json["kind"], &json["count"]), (&json!("alone"), &json!(1)));
    assert_eq!((&json["members"], &json["kept"]), (&json!([]), &json!(false)));
    drop(writer);
}

#[test]
fn kept_lock_says_until_when_it_is_taken() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let for_5_minutes = LockOptions::new().hold_at_least(300 * SECOND);
    let guard = mgr.lock_with("x", &for_5_minutes).unwrap();
    let out = page(&server, &["show", "x"]);
    assert!(line(&out, "left").ends_with(" unless renewed"), "{out}");
    guard.release().unwrap().unwrap_released();
    let out = page(&server, &["show", "x"]);
    let kept = line(&out, "kept");
    assert!(kept.contains("until 20") && kept.contains("Z, for another "), "{out}");
    assert!(kept.ends_with("; its holder has released it") && !out.contains("renewed"), "{out}");
    assert!(line(&page(&server, &["ls"]), "x").contains(" kept "));
    assert_eq!(shown(&server)["kept"], json!(true));

    // A group is kept if nobody is left who uses it.
    server.cli(&["DEL", "lock:x"]);
    let jobs = mgr.semaphore("x", 5).unwrap();
    let kept = jobs.acquire_with(1, &for_5_minutes).unwrap();
    let held = jobs.acquire().unwrap();
    kept.release().unwrap().unwrap_released();
    let lock = shown(&server);
    assert_eq!(lock["kept"], json!(false));
    let kept_of = |one: &Value| one["kept"].as_bool();
    let mut kept: Vec<_> = lock["members"].as_array().unwrap().iter().map(kept_of).collect();
    kept.sort();
    assert_eq!(kept, [Some(false), Some(true)]);
    held.release().unwrap().unwrap_released();
    assert_eq!(shown(&server)["kept"], json!(true));
    let out = page(&server, &["show", "x"]);
    assert!(line(&out, "kept").ends_with("; all have released it"), "{out}");
}
