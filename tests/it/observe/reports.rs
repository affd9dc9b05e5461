//! What is logged about losses, and what is not.

use std::time::Duration;

use distlock::{HandleEvent, LockGuard, LockLost, LockOptions, LostEvent, RedisMgr};
use parking_lot::{Condvar, Mutex};

use crate::{
    helpers::{
        self, CALL_LIMIT, SECOND, capture_log, completes_within, config_long_timeouts, expect_loss,
        in_own_process, manager, with_ttl,
    },
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

const LOSSES: usize = 20;

fn count(logged: &Mutex<Vec<String>>, text: &str) -> usize {
    logged.lock().iter().filter(|line| line.contains(text)).count()
}

/// The holder asks all the time, so it notices before the renewer does.
///
/// Fault: N132
#[test]
fn each_loss_is_logged_once_also_if_the_holder_notices_it() {
    let name = "observe::reports::each_loss_is_logged_once_also_if_the_holder_notices_it";
    if !in_own_process(name, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let mgr = manager(&server);
    let options = LockOptions::new().ttl(Duration::from_millis(100)).renew(false);
    for n in 0..LOSSES {
        match mgr.lock_with(&format!("n{n}"), &options) {
            Ok(guard) => while guard.is_held() {},
            // On a slow machine, the lease ends before the call does.
            Err(error) => assert!(error.is_lost(), "{error}"),
        }
    }
    eventually("all losses are logged", TEST_TIMEOUT, || count(logged, "is lost: ") >= LOSSES);
    mgr.shutdown();
    for n in 0..LOSSES {
        assert_eq!(count(logged, &format!("lock \"n{n}\" at")), 1, "{:?}", logged.lock());
    }
}

/// Fault: N133
#[test]
fn drop_of_a_lost_guard_is_logged_with_its_reason() {
    let name = "observe::reports::drop_of_a_lost_guard_is_logged_with_its_reason";
    if !in_own_process(name, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let mgr = manager(&server);
    let dropped = |name: &str| count(logged, &format!("the guard of lock {name:?} was dropped"));
    let lose = |name: &str| {
        let before = mgr.metrics().lost();
        server.cli(&["DEL", &format!("lock:{name}")]);
        eventually("the loss is reported", TEST_TIMEOUT, || mgr.metrics().lost() > before);
    };
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    lose("x");
    assert_eq!(dropped("x"), 0);
    drop(guard);
    assert_eq!(dropped("x"), 1, "{:?}", logged.lock());
    let line = logged.lock().iter().find(|line| line.contains("was dropped")).unwrap().clone();
    assert!(line.contains(&LockLost::Gone.to_string()) && line.contains("after"), "{line}");
    // `release` returns it, and a lock that is held is no news. Nor is a shutdown by this program,
    // or a loss that the holder has noticed.
    let released = mgr.lock_with("released", &with_ttl(3 * SECOND)).unwrap();
    lose("released");
    let _ = released.release();
    drop(mgr.lock("held").unwrap());
    let notice: [fn(&LockGuard); 3] = [
        |guard| drop(expect_loss(guard)),
        |guard| assert!(guard.ensure_held().is_err()),
        |guard| assert!(!guard.is_held()),
    ];
    for notice in notice {
        let noticed = mgr.lock_with("noticed", &with_ttl(3 * SECOND)).unwrap();
        lose("noticed");
        notice(&noticed);
    }
    // Of several locks, only that which was lost is named.
    for in_background in [false, true] {
        let names = if in_background { ["a", "b"] } else { ["c", "d"] };
        let options = with_ttl(3 * SECOND).release_in_background(in_background);
        let several = mgr.lock_all_with(names, &options).unwrap();
        lose(names[1]);
        drop(several);
        assert_eq!(names.map(dropped), [0, 1], "{:?}", logged.lock());
    }
    let until_shutdown = mgr.lock("until shutdown").unwrap();
    let all_until_shutdown = mgr.lock_all(["several", "until shutdown too"]).unwrap();
    mgr.shutdown();
    drop((until_shutdown, all_until_shutdown));
    assert_eq!(count(logged, "was dropped"), 3, "{:?}", logged.lock());
}

/// What a minority of the nodes keeps is not reported, unless it includes the queue node.
///
/// Fault: N134
/// Fault: N220
/// Promise: P11
#[test]
fn shutdown_reports_only_locks_that_stay_held() {
    let name = "observe::reports::shutdown_reports_only_locks_that_stay_held";
    if !in_own_process(name, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    for (dead, is_reported) in [(&[2][..], false), (&[0], true), (&[0, 1], true)] {
        logged.lock().clear();
        let nodes = Nodes::start(3);
        let config = helpers::config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO);
        let mgr = RedisMgr::new(config).unwrap();
        let guards = ["a", "b"].map(|name| mgr.lock(name).unwrap());
        for guard in &guards {
            let key = format!("lock:{}", guard.name());
            eventually("all nodes have it", TEST_TIMEOUT, || {
                nodes.keeping(&key, guard.id().as_str()).len() == 3
            });
        }
        dead.iter().for_each(|node| nodes.kill(*node));
        completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
        let lines = logged.lock().join("\n");
        let reported = lines.contains("could not release 2 locks at shutdown (\"a\", \"b\")");
        assert_eq!(
            (reported, lines.contains("could not release")),
            (is_reported, is_reported),
            "{dead:?}: {lines}"
        );
    }
}

/// Blocks in `acquired` until the lock is lost.
#[derive(Debug, Default)]
struct AwaitsLoss {
    lost: Mutex<bool>,
    changed: Condvar,
}

impl HandleEvent for AwaitsLoss {
    fn acquired(&self, _: &distlock::AcquiredEvent<'_>) {
        let mut lost = self.lost.lock();
        self.changed.wait_while_for(&mut lost, |lost| !*lost, TEST_TIMEOUT);
        assert!(*lost);
    }

    fn lost(&self, _: &LostEvent<'_>) {
        *self.lost.lock() = true;
        self.changed.notify_all();
    }
}

/// A pause before the return, here by an event handler, outlasts the lease.
///
/// Fault: N135
#[test]
fn lock_that_ended_before_the_return_is_an_error() {
    let server = RedisServer::start();
    let handler = std::sync::Arc::new(AwaitsLoss::default());
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler)).unwrap();
    let options = LockOptions::new().ttl(SECOND).renew(false);
    let error = mgr.lock_with("x", &options).expect_err("the lease has ended");
    assert!(error.is_lost(), "{error}");
    let metrics = mgr.metrics();
    assert_eq!((metrics.acquired(), metrics.lost(), metrics.held()), (1, 1, 0));
    let id = mgr.acquire_lock("y", SECOND, SECOND).unwrap().unwrap();
    assert!(mgr.release_lock("y", &id).is_ok());
}

/// Fault: N133
#[test]
fn with_lock_returns_the_result_or_the_loss() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).ttl(3 * SECOND)).unwrap();
    let token = mgr.with_lock("x", |guard| guard.fencing_token()).unwrap();
    assert!(mgr.lock("x").unwrap().fencing_token() > token);
    let held = mgr.lock("held").unwrap();
    let no_wait = LockOptions::new().wait(Duration::ZERO);
    assert!(mgr.with_lock_with("held", &no_wait, |_| ()).unwrap_err().is_contended());
    drop(held);
    mgr.with_lock_with("held", &no_wait, |_| ()).unwrap();
    let lost = |work: &dyn Fn(&distlock::LockGuard)| match mgr.with_lock("x", |guard| work(guard)) {
        Err(distlock::LockError::Lost { name, why, .. }) => {
            assert_eq!(name, "x");
            why
        }
        other => panic!("{other:?}"),
    };
    let noticed = lost(&|guard| {
        server.cli(&["DEL", "lock:x"]);
        expect_loss(guard);
    });
    assert_eq!(noticed, LockLost::Gone);
    // Only the release finds out.
    let unnoticed = lost(&|_| drop(server.cli(&["SET", "lock:x", "other", "PX", "60000"])));
    assert!(matches!(unnoticed, LockLost::Taken { .. }), "{unnoticed}");
}
