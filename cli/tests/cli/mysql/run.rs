//! `distlock run` with a lock in MySQL.

use rustix::process::Signal;
use tempfile::TempDir;

use super::{
    super::{
        command::{Running, distlock_at_url, run_to_end, start},
        run::fixture::{is_alive, signal},
    },
    at, await_waiter, manager, server_with_table,
};
use crate::{
    helpers::UnwrapReleased,
    support::{MySqlServer, TEST_TIMEOUT, eventually, eventually_some},
};

/// A command that runs under the lock `x`.
struct Job {
    running: Running,
    /// Pid of the command.
    command: u32,
    _folder: TempDir,
}

/// Runs a command that runs until it is killed, and returns once it has started.
fn start_job(server: &MySqlServer, options: &[&str]) -> Job {
    let folder = TempDir::with_prefix("distlock-").expect("no temporary folder");
    let script = "echo $$ >$DIR/pid; exec sleep 600";
    let mut command = at(server, &[&["run", "x"], options, &["--", "sh", "-c", script]].concat());
    command.env("DIR", folder.path());
    let running = start(command);
    let pid = || std::fs::read_to_string(folder.path().join("pid")).ok()?.trim().parse().ok();
    let command = eventually_some("the command has started", TEST_TIMEOUT, pid);
    Job { running, command, _folder: folder }
}

#[test]
fn options_about_sharing_are_refused_with_mysql() {
    let server = server_with_table();
    for options in [&["--shared"][..], &["--permits", "1"], &["--permits", "2"], &["--at-least=1s"]]
    {
        let args = [&["run", "x"], options, &["--", "true"]].concat();
        run_to_end(at(&server, &args)).expect_code(64);
    }
}

#[test]
fn mysql_lock_is_held_while_command_runs() {
    let server = server_with_table();
    let token = || {
        let script = "echo $DISTLOCK_TOKEN; exit 7";
        let ended = run_to_end(at(&server, &["run", "-v", "x", "--", "sh", "-c", script]));
        let ended = ended.expect_code(7);
        assert!(ended.err.contains("acquired lock \"x\" with token"), "{ended:?}");
        assert!(ended.err.contains("released lock \"x\""), "{ended:?}");
        ended.out.trim().parse::<u64>().unwrap()
    };
    let (one, two) = (token(), token());
    assert!(one < two, "{one} {two}");
    let job = start_job(&server, &[]);
    let holder = manager(&server).holder("x").unwrap().expect("it is held");
    assert_eq!(holder.pid(), Some(job.running.pid()));
    signal(job.running.pid(), Signal::TERM);
    job.running.wait().expect_code(143);
    assert_eq!(manager(&server).holder("x").unwrap(), None);
}

#[test]
fn run_waits_for_mysql_lock_as_long_as_allowed() {
    let server = server_with_table();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let run = |options: &[&str]| at(&server, &[&["run", "x"], options, &["--", "true"]].concat());
    for (options, code) in [
        (&["--no-wait"][..], 75),
        (&["--wait", "100ms"], 75),
        (&["--on-held", "skip"], 0),
        (&["--wait", "100ms", "-E", "9"], 9),
    ] {
        let ended = run_to_end(run(options)).expect_code(code);
        let pid = format!("(pid {}", std::process::id());
        assert!(ended.err.contains("held by") && ended.err.contains(&pid), "{ended:?}");
    }
    let waiting = start(run(&["-v"]));
    await_waiter(&mgr, "x");
    // It looks for the holder only after a moment.
    eventually("it has waited for a second", TEST_TIMEOUT, || {
        let waits = "SELECT 1 FROM information_schema.PROCESSLIST WHERE \
                     INFO LIKE CONCAT('%/* distlock ', 'wait %') AND TIME >= 1";
        !server.execute(waits).is_empty()
    });
    guard.release().unwrap().unwrap_released();
    let ended = waiting.wait().expect_code(0);
    assert!(ended.err.contains("waiting for lock \"x\", held by"), "{ended:?}");
    let guard = mgr.lock("x").unwrap();
    let waiting = start(run(&[]));
    await_waiter(&mgr, "x");
    // Not SIGINT, which a process may have inherited as ignored.
    signal(waiting.pid(), Signal::TERM);
    assert!(matches!(waiting.wait().code, None | Some(143)));
    eventually("the waiter has left the queue", TEST_TIMEOUT, || {
        mgr.lock_info("x").unwrap().is_some_and(|lock| lock.waiting() == 0)
    });
    assert!(guard.is_held());
}

/// Each of the locks has a connection.
///
/// Fault: N205
#[test]
fn command_runs_under_mysql_locks_of_several_names() {
    let server = server_with_table();
    let mgr = manager(&server);
    let names = ["a", "b", "c", "d"];
    let run = |options: &[&str], script: &str| {
        at(&server, &[&["run"], options, &names, &["--", "sh", "-c", script]].concat())
    };
    for options in [&["-v"][..], &["-v", "-n"]] {
        let ended = run_to_end(run(options, "echo $DISTLOCK_NAME")).expect_code(0);
        assert_eq!(ended.out, "a b c d\n");
        assert!(ended.err.ends_with("released locks \"a\", \"b\", \"c\", \"d\"\n"), "{ended:?}");
    }
    // The command holds three of them while it waits for the last one.
    let guard = mgr.lock("d").unwrap();
    run_to_end(run(&["-n"], "true")).expect_code(75).expect_error("lock \"d\" is held by");
    let waiting = start(run(&[], "exit 7"));
    await_waiter(&mgr, "d");
    assert!(mgr.is_locked("c").unwrap());
    guard.release().unwrap().unwrap_released();
    waiting.wait().expect_code(7);

    let holder = start(at(&server, &[&["lock"], &names[..]].concat()));
    eventually("all are held", TEST_TIMEOUT, || mgr.is_locked("d").unwrap());
    signal(holder.pid(), Signal::TERM);
    assert_eq!(holder.wait().expect_code(0).out.lines().count(), names.len());
    assert_eq!(mgr.locks("*").unwrap().len(), 0);
}

/// No server is needed to know it.
///
/// Fault: N211
#[test]
fn detached_lock_in_mysql_is_refused_before_the_wait() {
    let mysql = "mysql://app@127.0.0.1:1/shop";
    run_to_end(distlock_at_url(mysql, &["lock", "--detach", "x"]))
        .expect_code(64)
        .expect_error("--detach works with one Redis or Valkey server, or a cluster, only");
}

#[test]
fn command_ends_if_mysql_connection_is_killed() {
    let server = server_with_table();
    let job = start_job(&server, &["--ttl", "10m"]);
    let dirty = "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; ";
    let holder = server.execute(&format!("{dirty}SELECT conn FROM distlock WHERE conn<>0"));
    server.execute(&format!("KILL {}", holder[0][0]));
    let ended = job.running.wait().expect_code(76);
    assert!(ended.err.contains("was lost: the connection that held it was closed"), "{ended:?}");
    assert!(!is_alive(job.command));
    assert_eq!(manager(&server).holder("x").unwrap(), None);
}

/// The lock ends with its connection, so the guardian can only end the command.
///
/// Fault: N166
#[test]
fn killed_wrapper_command_ends_although_lock_is_free() {
    let server = server_with_table();
    let job = start_job(&server, &["--ttl", "10m", "--grace", "10m"]);
    signal(job.running.pid(), Signal::KILL);
    let next = manager(&server).try_lock_for("x", TEST_TIMEOUT).expect("it is free at once");
    eventually("the command has ended", TEST_TIMEOUT, || !is_alive(job.command));
    assert_eq!(job.running.wait().code, None);
    assert!(next.is_held(), "the guardian must not end the lock of another holder");
}

/// A stopped wrapper keeps its connection, and so its lock, until its ttl has passed.
///
/// Fault: N166
#[test]
fn stopped_wrapper_command_ends_before_lock_is_free() {
    let server = server_with_table();
    let mgr = manager(&server);
    let job = start_job(&server, &["--ttl", "4s", "--grace", "0"]);
    signal(job.running.pid(), Signal::STOP);
    let next = mgr.try_lock_for("x", TEST_TIMEOUT).expect("it is free after its ttl");
    assert!(!is_alive(job.command), "the command has outlived its lock");
    signal(job.running.pid(), Signal::CONT);
    let ended = job.running.wait().expect_code(76);
    assert!(next.is_held(), "{ended:?}");
}
