//! Forked processes: a child cannot use the locks and managers of its parent.

use crate::{
    contention::{FOREVER_MS, owner},
    support::{RedisServer, TEST_TIMEOUT, Worker, eventually, silent_server},
};

/// Fault: F10
#[test]
fn forked_child_cannot_use_or_release_its_parents_lock() {
    let server = RedisServer::start();
    let mut worker = Worker::spawn("forker", &[("url", &server.url()), ("ttl_ms", FOREVER_MS)]);
    worker.expect("child ended Some(0)");
    for line in [
        "child held false",
        "child ensure true",
        "child lost true",
        "child lock true",
        "child ping true",
        "child dropped all",
    ] {
        worker.expect(line);
    }
    worker.expect("parent held true");
    assert!(owner(&server, "forked").is_some());
    worker.send("go on");
    worker.expect("parent released Ok(Released)");
    assert_eq!(owner(&server, "forked"), None);
}

/// The thread that creates the process-wide manager does not exist in the child and never finishes
/// there. The child cannot create another manager either, because it has a copy of parking_lot's
/// table of parked threads, which lists threads that do not exist in the child.
///
/// Fault: F10
#[test]
fn child_forked_during_manager_creation_gets_no_manager() {
    let (server, silent, silent_too) = (RedisServer::start(), silent_server(), silent_server());
    let args =
        [("url", &*server.url()), ("silent", &*silent.url()), ("silent_too", &*silent_too.url())];
    let mut worker = Worker::spawn("forker_during_init", &args);
    eventually("the manager is being created", TEST_TIMEOUT, || {
        silent.accepted() + silent_too.accepted() > 0
    });
    worker.send("fork");
    for line in ["init true", "instance true", "new true", "id true", "ended Some(0)"] {
        worker.expect(&format!("child {line}"));
    }
    worker.expect("parent released Ok(Released)");
}

/// Fault: F10
#[test]
fn child_forked_before_the_first_manager_has_its_own() {
    let server = RedisServer::start();
    let worker = Worker::spawn("early_forker", &[("url", &server.url())]);
    for line in
        ["parent held true, Ok(Released)", "child held true, Ok(Released)", "child ended Some(0)"]
    {
        worker.expect(line);
    }
}
