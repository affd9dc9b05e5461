//! Locks in MySQL and MariaDB. Each test has a private MariaDB.

mod doctor;
mod run;

use std::process::Command;

use distlock::{LockLost, MySqlConfig, MySqlMgr};
use serde_json::{Value, json};

use super::{
    command::{distlock, distlock_at_url, run_for_json, run_to_end, start},
    json::Schema,
};
use crate::{
    helpers::{SECOND, UnwrapReleased},
    support::{MySqlServer, TEST_TIMEOUT, eventually},
};

const SECRET: &str = "correct-horse";

/// A server with the table that `mysql-schema` describes.
fn server_with_table() -> MySqlServer {
    let server = MySqlServer::start();
    server.execute(&run_to_end(distlock(&["mysql-schema"])).expect_code(0).out);
    server
}

fn at(server: &MySqlServer, args: &[&str]) -> Command {
    distlock_at_url(&server.url(), args)
}

fn manager(server: &MySqlServer) -> MySqlMgr {
    MySqlMgr::new(MySqlConfig::new(server.url()).ttl(30 * SECOND).operation_timeout(20 * SECOND))
        .expect("a manager")
}

#[track_caller]
fn await_waiter(mgr: &MySqlMgr, name: &str) {
    eventually("a waiter is queued", TEST_TIMEOUT, || {
        mgr.lock_info(name).unwrap().is_some_and(|lock| lock.waiting() == 1)
    });
}

#[test]
fn printed_schema_creates_the_table_that_is_used() {
    let server = MySqlServer::start();
    let schema = |args: &[&str]| run_to_end(distlock(&[&["mysql-schema"], args].concat()));
    let missing = run_to_end(at(&server, &["run", "x", "--", "true"])).expect_code(69);
    let missing = missing.expect_error("create it by `distlock mysql-schema | mysql DATABASE`");
    assert!(missing.err.contains("CREATE TABLE IF NOT EXISTS `distlock` ("), "{missing:?}");
    server.execute(&schema(&[]).expect_code(0).out);
    run_to_end(at(&server, &["run", "x", "--", "true"])).expect_code(0);

    let own = ["--table", "distlock_test.locks"];
    let held = || at(&server, &[&["run", "x"], &own[..], &["--", "true"]].concat());
    run_to_end(held()).expect_code(69).expect_error("`distlock_test`.`locks`");
    server.execute(&schema(&own).expect_code(0).out);
    run_to_end(held()).expect_code(0);
    assert_eq!(server.execute("SELECT COUNT(*) FROM locks"), [["1"]]);
    let mut by_variable = at(&server, &["run", "y", "--", "true"]);
    run_to_end({
        by_variable.env("DISTLOCK_TABLE", "locks");
        by_variable
    })
    .expect_code(0);
    assert_eq!(server.execute("SELECT COUNT(*) FROM locks"), [["2"]]);
    schema(&["--table", "a b"]).expect_code(64).expect_error("the table must be");
}

#[test]
fn mysql_locks_are_listed_and_shown_without_time_left() {
    let server = server_with_table();
    let schema = Schema::read();
    let none = run_to_end(at(&server, &["ls"])).expect_code(0);
    assert!(none.err.contains("no locks are held"), "{none:?}");
    let mgr = manager(&server);
    let guard = mgr.lock("orders:1").unwrap();
    let waiting = start(at(&server, &["run", "orders:1", "--", "true"]));
    await_waiter(&mgr, "orders:1");

    let (list, ended) = run_for_json(at(&server, &["ls", "--json", "orders:*"]));
    schema.check("ls", &list);
    ended.expect_code(0);
    let (shown, _) = run_for_json(at(&server, &["show", "--json", "orders:1"]));
    schema.check("show", &shown);
    for lock in [&list["locks"][0], &shown["lock"]] {
        assert_eq!(lock["name"], "orders:1");
        assert_eq!(lock["holder"]["id"], json!(guard.id().as_str()));
        assert_eq!(lock["token"], json!(guard.fencing_token().as_u64()));
        assert_eq!((&lock["remaining_ms"], &lock["waiting"]), (&Value::Null, &json!(1)));
        assert_eq!(lock["waiters"].as_array().map(Vec::len), Some(1));
    }
    let table = run_to_end(at(&server, &["ls"])).expect_code(0).out;
    assert!(table.lines().nth(1).unwrap().contains(" - "), "{table}");
    let page = run_to_end(at(&server, &["show", "orders:1"])).expect_code(0).out;
    assert!(page.contains("WAITER") && !page.contains("expiry"), "{page}");
    assert!(!page.contains("left"), "{page}");
    guard.release().unwrap().unwrap_released();
    waiting.wait().expect_code(0);
    run_to_end(at(&server, &["show", "orders:1"])).expect_code(1);
}

#[test]
fn prefix_is_put_before_mysql_names() {
    let server = server_with_table();
    let guard = manager(&server).lock("mine:x").unwrap();
    let names = |args: &[&str]| {
        let (list, _) = run_for_json(at(&server, &[&["ls", "--json"], args].concat()));
        list["locks"][0]["name"].clone()
    };
    assert_eq!((names(&[]), names(&["--prefix", "mine:"])), (json!("mine:x"), json!("x")));
    assert!(guard.is_held());
}

#[test]
fn released_mysql_lock_goes_to_next_waiter() {
    let server = server_with_table();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let release = |args: &[&str]| at(&server, &[&["release", "x"], args].concat());
    run_to_end(release(&["--if-id", "another"]))
        .expect_code(1)
        .expect_error("nothing was released: the holder has another id");
    assert!(guard.is_held());
    let waiting = start(at(&server, &["run", "x", "--", "true"]));
    await_waiter(&mgr, "x");
    let (report, ended) = run_for_json(release(&["--force", "--json"]));
    Schema::read().check("release", &report);
    ended.expect_code(0);
    assert_eq!(report["former_holder"]["id"], json!(guard.id().as_str()));
    let loss = guard.lost().recv_timeout(TEST_TIMEOUT).expect("the lock is lost");
    assert!(matches!(loss, LockLost::ConnectionLost | LockLost::Taken { .. }), "{loss}");
    waiting.wait().expect_code(0);
    run_to_end(release(&["--force"])).expect_code(1).expect_error("lock \"x\" is not held");
}

/// Fault: N41
#[test]
fn release_without_the_privilege_says_which_is_needed() {
    let server = server_with_table();
    let guard = manager(&server).lock("x").unwrap();
    let url = server.create_user("app", SECRET);
    run_to_end(distlock_at_url(&url, &["release", "x", "--force"]))
        .expect_code(69)
        .expect_error("CONNECTION ADMIN");
    assert!(guard.is_held());
}

#[test]
fn prune_deletes_only_old_rows_that_nobody_holds() {
    let server = server_with_table();
    let mgr = manager(&server);
    let guard = mgr.lock("held").unwrap();
    mgr.lock("free").unwrap().release().unwrap().unwrap_released();
    let prune =
        |args: &[&str]| run_to_end(at(&server, &[&["prune"], args].concat())).expect_code(0).out;
    let none = "deleted 0 rows of locks that nobody had acquired for 30d\n";
    assert_eq!(prune(&[]), none);
    assert_eq!(prune(&["--older-than", "1h"]), none.replace("30d", "1h"));
    assert_eq!(prune(&["--older-than", "0"]), none.replace("30d", "0s").replace("0 rows", "1 row"));
    assert!(guard.release().is_ok());
    assert_eq!(server.execute("SELECT name FROM distlock"), [["held"]]);
}

/// Fault: F74
#[test]
fn mysql_password_is_never_printed() {
    let server = server_with_table();
    let url = server.create_user("app", "another").replace("another", SECRET);
    for args in [
        &["ls"][..],
        &["show", "x"],
        &["release", "x", "--force"],
        &["run", "x", "--", "true"],
        &["doctor"],
        &["doctor", "--json"],
        &["prune"],
        &["top"],
        &["bench"],
    ] {
        let mut command = distlock_at_url(&url, args);
        command.env("DISTLOCK_LOG", "trace");
        let ended = run_to_end(command);
        assert!(!matches!(ended.code, None | Some(0)), "{ended:?}");
        assert!(!format!("{ended:?}").contains(SECRET), "{args:?}: {ended:?}");
    }
    run_to_end(distlock_at_url(&url, &["ls"]))
        .expect_code(69)
        .expect_error("check the user in the URL, the password in DISTLOCK_URL");
}

#[test]
fn mysql_password_comes_from_file() {
    let server = server_with_table();
    let url = server.create_user("app", SECRET).replace(&format!(":{SECRET}"), "");
    let folder = tempfile::TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let option = ["--password-file", file.to_str().unwrap()];
    for args in [&["ls"][..], &["doctor"], &["run", "x", "--", "true"]] {
        run_to_end(distlock_at_url(&url, &[&option[..], args].concat())).expect_code(0);
    }
    run_to_end(distlock_at_url(&url, &["ls"])).expect_code(69).expect_error("1045");
}

/// No server is needed for these.
#[test]
fn what_mysql_cannot_do_is_refused_in_words() {
    let mysql = "mysql://app@127.0.0.1:1/shop";
    for (args, url, says) in [
        (&["top"][..], mysql, "for MySQL, run: watch -n 1 distlock ls"),
        (&["bench"], mysql, "for MySQL, distlock doctor measures"),
        (&["init"], mysql, "a MySQL server needs no declaration"),
        (&["prune"], "redis://h", "distlock prune works with mysql:// URLs only"),
        (&["ls", "--table", "x"], "redis://h", "--table and DISTLOCK_TABLE are for mysql:// URLs"),
        (&["ls", "--cacert", "/x"], mysql, "/x cannot be read"),
        (&["ls"], "mysql://h/a,mysql://i/b", "a mysql:// URL must be the only one"),
        (&["ls"], "redis://h,mysql://i/b", "a mysql:// URL must be the only one"),
        (&["ls"], "mysql://h", "names no database after the host"),
        (&["ls"], "mysqls://h/shop", "unix:///path and mysql://[user[:password]@]host[:port]/"),
        (&["ls"], "rediss://h/#insecure", "remove #insecure, and set --cacert to the authority"),
    ] {
        run_to_end(distlock_at_url(url, args)).expect_code(64).expect_error(says);
    }
    run_to_end(distlock_at_url(mysql, &["ls"])).expect_code(69).expect_error("Connection refused");
    run_to_end(distlock(&["ls", "--url", "mysql://u:pw@h/shop"]))
        .expect_code(64)
        .expect_error("seems to contain a password");
}
