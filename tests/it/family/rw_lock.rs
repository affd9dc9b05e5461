//! Read-write locks: who may hold them together, downgrades, and what is refused.

use std::thread;

#[cfg(feature = "testing")]
use distlock::testing::MemoryServer;
use distlock::{HeldBy, LockError, LockKind, LockLost, RedisMgr, Released};

use super::{LONG, Subject, await_waiters, members_key, spawn_waiter};
use crate::{
    helpers::{
        SECOND, UnwrapReleased, await_gone, config_long_timeouts, expect_loss, get, manager, pttl,
        server_behind_proxy, spawn_call, with_ttl,
    },
    support::{Fault, Nodes, RedisServer, TEST_TIMEOUT, contains, eventually},
};

/// Promise: P12
#[test]
fn readers_share_the_lock_and_a_writer_has_it_alone() {
    for subject in Subject::with_nodes() {
        let (one, two) = (subject.manager(), subject.manager());
        let (here, there) = (one.rw_lock("r").unwrap(), two.rw_lock("r").unwrap());
        let (first, second) = (here.read().unwrap(), there.read().unwrap());
        assert_eq!((first.kind(), first.name(), here.name()), (LockKind::Read, "r", "r"));
        assert!(first.is_held() && second.is_held());
        assert!(second.fencing_token() > first.fencing_token());
        let error = there.try_write().unwrap_err();
        assert!(error.is_contended(), "{error}");
        assert!(error.to_string().contains("2 readers, one of them "), "{error}");
        let error = two.try_lock("r").unwrap_err().to_string();
        assert!(error.contains("is held by readers, expires in "), "{error}");
        first.release().unwrap().unwrap_released();
        assert!(there.try_write().unwrap_err().is_contended(), "a reader is left");
        let last_reader = second.fencing_token();
        drop(second);

        let writer = here.try_write().unwrap();
        assert_eq!(writer.kind(), LockKind::Write);
        assert!(writer.fencing_token() > last_reader);
        assert!(there.try_read().unwrap_err().is_contended());
        assert!(there.try_write().unwrap_err().is_contended());
        assert!(two.try_lock("r").unwrap_err().is_contended(), "nor a mutex");
        let token = writer.fencing_token();
        writer.release().unwrap().unwrap_released();
        assert!(there.try_read().unwrap().fencing_token() > token);
        eventually("nobody has it", TEST_TIMEOUT, || !one.is_locked("r").unwrap());
        let mutex = two.try_lock("r").unwrap();
        assert!(mutex.kind() == LockKind::Mutex && here.try_read().is_err());
    }
}

#[test]
fn reports_name_the_readers() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let (one, two) = (lock.read().unwrap(), lock.read().unwrap());
        let holder = mgr.holder("r").unwrap().unwrap();
        assert_eq!(format!("{:?}", holder.held_by()), "Readers { count: Some(2) }");
        assert_eq!(holder.pid(), Some(std::process::id()));
        for found in [mgr.lock_info("r").unwrap().unwrap(), mgr.locks("*").unwrap().remove(0)] {
            let mut ids: Vec<_> = found.members().iter().map(|one| one.id().to_owned()).collect();
            ids.sort();
            let mut expected = [one.id().to_string(), two.id().to_string()];
            expected.sort();
            assert_eq!((ids.as_slice(), found.fencing_token()), (&expected[..], None));
            assert!(found.to_string().contains("is held by 2 readers"), "{found}");
        }
        drop((one, two));
        let _writer = lock.write().unwrap();
        let found = mgr.lock_info("r").unwrap().unwrap();
        assert!(found.holder().held_by() == HeldBy::One && found.members().is_empty());
    }
}

/// Promise: P12
#[test]
fn downgrade_keeps_the_token_and_lets_no_writer_between() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let writer = lock.write_with(&crate::helpers::with_ttl(SECOND)).unwrap();
        let (token, id) = (writer.fencing_token(), writer.id().clone());
        let (here, there) = (lock.clone(), lock.clone());
        let second = spawn_waiter(&mgr, "r", 1, move || here.read());
        let next_writer = spawn_waiter(&mgr, "r", 2, move || there.write());

        let reader = writer.downgrade().unwrap();
        assert_eq!((reader.fencing_token(), reader.id()), (token, &id));
        assert_eq!(reader.kind(), LockKind::Read);
        let second = second.join().unwrap().unwrap();
        assert!(reader.is_held() && second.is_held() && !next_writer.is_finished());
        let renewals = mgr.metrics().renewals();
        eventually("the reader is renewed", TEST_TIMEOUT, || {
            mgr.metrics().renewals() >= renewals + 4
        });
        assert!(reader.is_held() && !next_writer.is_finished());
        reader.release().unwrap().unwrap_released();
        second.release().unwrap().unwrap_released();
        let next_writer = next_writer.join().unwrap().unwrap();
        assert!(next_writer.fencing_token() > token);
    }
}

/// Promise: P12
#[test]
fn downgraded_writer_reads_before_the_writer_that_waits() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let (writer, there) = (lock.write().unwrap(), lock.clone());
        let next_writer = spawn_waiter(&mgr, "r", 1, move || there.write());
        let reader = writer.downgrade().unwrap();
        let waiting = mgr.lock_info("r").unwrap().map(|lock| lock.waiting());
        assert_eq!(waiting, Some(1), "the writer has not been served");
        assert!(reader.is_held());
        reader.release().unwrap().unwrap_released();
        next_writer.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
}

#[test]
fn downgrade_of_a_lost_lock_reports_the_loss() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let writer = lock.write().unwrap();
        assert!(mgr.force_release("r").unwrap());
        match writer.downgrade() {
            Err(LockError::Lost { why: LockLost::Gone, .. }) => {}
            other => panic!("{other:?}"),
        }
        let writer = lock.write().unwrap();
        assert!(mgr.force_release("r").unwrap());
        let other = lock.write().unwrap();
        match writer.downgrade() {
            Err(LockError::Lost { why: LockLost::Taken { by, .. }, .. }) => {
                assert_eq!(by.id(), other.id().as_str());
            }
            other => panic!("{other:?}"),
        }
        assert!(other.is_held());
    }
}

/// The proxy holds back the first request of the writer and cuts its connection, and the second one
/// acquires the lock. The first one reaches the server after the downgrade has reported the loss.
///
/// Fault: N193
#[test]
fn late_request_after_a_lost_downgrade_leaves_no_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let late = proxy.on_request(contains("lock:x"), Fault::HoldRequest);
    let writing = spawn_call(&mgr, "x", |mgr, name| {
        mgr.rw_lock(name).unwrap().write_with(&with_ttl(600 * SECOND)).unwrap()
    });
    late.wait_fired();
    proxy.reset_all();
    let writer = writing.join().unwrap();
    let id = writer.id().clone();
    server.cli(&["DEL", "lock:x"]);
    assert!(writer.downgrade().unwrap_err().is_lost());
    let commands = server.monitor();
    late.release();
    commands.wait_for(id.as_str());
    server.cli(&["ECHO", "all was recorded"]);
    commands.wait_for("all was recorded");
    await_gone(&server, "lock:x");
}

/// The request reaches the server when the writer has expired. Nobody else has removed the writer.
///
/// Fault: N234
#[test]
fn downgrade_that_arrives_after_the_lease_reports_its_expiry() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let options = with_ttl(3 * SECOND).renew(false);
    let writer = mgr.rw_lock("x").unwrap().write_with(&options).unwrap();
    let late = proxy.on_request(contains("lock:x"), Fault::HoldRequest);
    let downgrading = thread::spawn(move || writer.downgrade());
    late.wait_fired();
    await_gone(&server, "lock:x");
    late.release();
    match downgrading.join().unwrap() {
        Err(LockError::Lost { why: LockLost::Expired, .. }) => {}
        other => panic!("{other:?}"),
    }
}

/// Promise: P12
/// Fault: N179
#[cfg(feature = "testing")]
#[test]
fn downgrade_without_a_server_ends_the_hold() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let writer = mgr.rw_lock("r").unwrap().write().unwrap();
    server.stop();
    assert!(writer.downgrade().unwrap_err().is_unavailable());
    let metrics = mgr.metrics();
    assert_eq!((metrics.held(), metrics.released(), metrics.lost()), (0, 1, 0));
    server.resume();
    server.advance(11 * SECOND);
    assert!(!mgr.is_locked("r").unwrap());
}

#[test]
fn forced_release_takes_the_lock_from_all_readers() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let short = crate::helpers::with_ttl(SECOND);
        let (one, two) = (lock.read_with(&short).unwrap(), lock.read_with(&short).unwrap());
        let released = mgr.force_release_if("r", one.id().as_str()).unwrap();
        assert_eq!(released, Released::Released);
        assert_eq!(expect_loss(&one), LockLost::Gone);
        assert!(two.is_held(), "the other reader keeps it");
        assert!(mgr.force_release("r").unwrap());
        assert_eq!(expect_loss(&two), LockLost::Gone);
        assert!(!mgr.is_locked("r").unwrap());
    }
}

#[test]
fn unsupported_kinds_are_refused_with_the_reason() {
    let nodes = Nodes::start(3);
    let config = config_long_timeouts(nodes.urls()).quarantine(std::time::Duration::ZERO);
    let mgr = RedisMgr::new(config).unwrap();
    let refused = |error: LockError, reason: &str| {
        assert!(matches!(error, LockError::InvalidOptions { .. }));
        assert!(error.to_string().contains(reason), "{error}");
    };
    refused(mgr.semaphore("s", 2).unwrap_err(), "could grant more than the limit");
    mgr.lock_with("m", &Default::default()).unwrap().release().unwrap().unwrap_released();
    assert!(mgr.rw_lock("").unwrap_err().to_string().contains("the name is empty"));
}

/// Promise: P12
#[test]
fn client_of_another_library_competes_with_readers() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let set = |id: &str| crate::helpers::set_foreign_lock(&server, "lock:r", id, 30_000);
    let long = lock.read().unwrap();
    let ttl = pttl(&server, "lock:r");
    let short = lock.read_with(&crate::helpers::with_ttl(SECOND)).unwrap();
    assert!(pttl(&server, "lock:r") > ttl / 2, "the key must not expire with the shorter lease");
    assert!(!set("foreign"), "readers have it");
    drop((long, short));
    assert_eq!(server.query::<i64>(&["EXISTS", "lock:r", &members_key("r")]), 0);
    assert!(set("foreign"));
    let error = lock.try_read().unwrap_err();
    assert_eq!(error.holder().map(|holder| holder.id().to_owned()).as_deref(), Some("foreign"));
    let here = lock.clone();
    let reader = spawn_waiter(&mgr, "r", 1, move || here.try_read_for(LONG));
    assert_eq!(get(&server, "lock:r").as_deref(), Some("foreign"));
    server.cli(&["DEL", "lock:r"]);
    assert!(reader.join().unwrap().unwrap().is_held());
    await_waiters(&mgr, "r", 0);
}
