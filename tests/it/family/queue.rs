//! The queue of readers and writers: first in, first out, with batches of readers.

use std::{
    sync::{Arc, mpsc},
    thread,
};

use distlock::{LockOptions, ReadGuard, RedisMgr, RwLock};

use super::{LONG, Subject, await_waiters, spawn_waiter};
use crate::{
    helpers::{SECOND, UnwrapReleased, manager, queue_key, queue_length},
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

/// Starts a reader that queues as number `waiters`, and reports its guard.
fn spawn_reader(
    mgr: &RedisMgr,
    lock: &RwLock,
    waiters: u64,
) -> thread::JoinHandle<distlock::Result<ReadGuard>> {
    let here = lock.clone();
    spawn_waiter(mgr, lock.name(), waiters, move || here.try_read_for(LONG))
}

/// An operator does not know the kind of the lock. The readers acquire it when they poll.
///
/// Fault: N195
/// Promise: P12
#[test]
fn forced_release_of_a_writer_passes_no_reader() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let first = lock.write_with(&LockOptions::new().renew(false)).unwrap();
        let readers = [spawn_reader(&mgr, &lock, 1), spawn_reader(&mgr, &lock, 2)];
        let here = lock.clone();
        let writer = spawn_waiter(&mgr, "r", 3, move || here.try_write_for(LONG));
        assert!(mgr.release_lock("r", first.id().as_str()).unwrap());
        let readers = readers.map(|reader| reader.join().unwrap().unwrap());
        assert!(!writer.is_finished());
        drop(readers);
        assert!(writer.join().unwrap().unwrap().is_held());
    }
}

/// A program has used a name for readers, and uses it for a lock held alone after an update.
///
/// Fault: N278
#[test]
fn mutex_is_handed_over_past_a_reader_that_has_died() {
    let server = RedisServer::start();
    let (holder, other) = (manager(&server), manager(&server));
    let first = holder.lock("x").unwrap();
    server.cli(&["RPUSH", &queue_key("x"), "distlock:read/0/1,1000 ended a|1|1|1|1"]);
    let here = other.clone();
    let waiter = spawn_waiter(&other, "x", 2, move || here.try_lock_for("x", LONG));
    first.release().unwrap().unwrap_released();
    assert!(holder.try_lock("x").unwrap_err().is_contended(), "it was left free");
    waiter.join().unwrap().unwrap().release().unwrap().unwrap_released();
    assert_eq!(queue_length(&server, "x"), 0);
}

/// Promise: P12
#[test]
fn writer_hands_over_to_all_readers_up_to_the_next_writer() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let first = lock.write().unwrap();
        let readers = [spawn_reader(&mgr, &lock, 1), spawn_reader(&mgr, &lock, 2)];
        let here = lock.clone();
        let writer = spawn_waiter(&mgr, "r", 3, move || here.try_write_for(LONG));
        let last = spawn_reader(&mgr, &lock, 4);
        let mut token = first.fencing_token();

        first.release().unwrap().unwrap_released();
        let mut guards = readers.map(|reader| reader.join().unwrap().unwrap());
        guards.sort_by_key(|guard| guard.fencing_token());
        assert!(guards[0].fencing_token() > token, "tokens rise");
        let is_larger = guards[1].fencing_token() > guards[0].fencing_token();
        // Over several nodes, readers that begin together may have the same token.
        assert!(is_larger || matches!(subject, Subject::Nodes(_)), "tokens rise");
        token = guards[1].fencing_token();
        await_waiters(&mgr, "r", 2);
        assert!(!writer.is_finished() && !last.is_finished());
        assert!(lock.try_read().unwrap_err().is_contended(), "a reader passed a waiting writer");
        for guard in guards {
            assert!(!writer.is_finished());
            guard.release().unwrap().unwrap_released();
        }
        let writer = writer.join().unwrap().unwrap();
        assert!(writer.fencing_token() > token && !last.is_finished());
        drop(writer);
        assert!(last.join().unwrap().unwrap().is_held());
    }
}

/// The readers that hold the lock would not exclude it.
#[test]
fn reader_behind_a_writer_learns_that_waiters_come_first() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let reader = lock.read().unwrap();
        let here = lock.clone();
        let writer = spawn_waiter(&mgr, "r", 1, move || here.try_write_for(LONG));
        for error in [lock.try_read().unwrap_err(), lock.try_read_for(SECOND / 10).unwrap_err()] {
            let text = error.to_string();
            assert!(
                text.contains("is held by readers, and other clients, such as a writer"),
                "{text}"
            );
            assert!(error.holder().is_some_and(|holder| holder.host().is_some()), "{error:?}");
        }
        let text = lock.try_write().unwrap_err().to_string();
        assert!(text.contains("is held by a reader: "), "{text}");
        drop(reader);
        assert!(writer.join().unwrap().is_ok());
    }
}

/// Fault: N154
/// Promise: P12
#[test]
fn readers_enter_when_the_waiting_writer_leaves() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let reader = lock.read().unwrap();
        let here = lock.clone();
        let writer = spawn_waiter(&mgr, "r", 1, move || here.try_write_for(SECOND));
        let second = spawn_reader(&mgr, &lock, 2);
        assert!(writer.join().unwrap().unwrap_err().is_contended());
        let members = || mgr.lock_info("r").unwrap().unwrap().members().len();
        // It has left the queue with its last request, which admits the reader at once. Of several
        // nodes, the queue node alone does that; the reader asks the others.
        assert!(members() == 2 || matches!(subject, Subject::Nodes(_)));
        let second = second.join().unwrap().unwrap();
        assert_eq!(members(), 2);
        assert!(second.is_held() && reader.is_held());
    }
}

#[test]
fn hundreds_of_queued_readers_are_all_served() {
    for subject in Subject::with_nodes() {
        let mgr = Arc::new(subject.manager());
        let lock = mgr.rw_lock("r").unwrap();
        let writer = lock.write().unwrap();
        let (sender, guards) = mpsc::channel();
        for _ in 0..210 {
            let (lock, sender) = (lock.clone(), sender.clone());
            thread::spawn(move || sender.send(lock.try_read_for(LONG)).unwrap());
        }
        drop(sender);
        await_waiters(&mgr, "r", 210);
        writer.release().unwrap().unwrap_released();
        let guards: Vec<_> = guards.iter().map(Result::unwrap).collect();
        assert!(guards.len() == 210 && guards.iter().all(|guard| guard.is_held()));
        if matches!(subject, Subject::Nodes(_)) {
            // Readers that begin together may have the same token.
            continue;
        }
        let mut tokens: Vec<_> = guards.iter().map(|guard| guard.fencing_token()).collect();
        tokens.sort();
        tokens.dedup();
        assert_eq!(tokens.len(), 210, "no token is used twice");
    }
}

/// Fault: N154
#[test]
fn dead_waiters_at_the_head_are_removed() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let _reader = lock.read().unwrap();
    for dead in
        ["20000 distlock:client:gone a", "distlock:permits/2/1,20000 distlock:client:gone b"]
    {
        server.cli(&["RPUSH", &queue_key("r"), dead]);
    }
    server.cli(&["RPUSH", &queue_key("r"), "distlock:odd/1/1,20000 distlock:client:gone c"]);
    assert!(lock.try_read().unwrap().is_held(), "a dead writer kept a reader out");
    await_waiters(&mgr, "r", 0);
}

#[test]
fn release_without_publish_permission_serves_by_polls() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let writer = lock.write().unwrap();
    let readers = [spawn_reader(&mgr, &lock, 1), spawn_reader(&mgr, &lock, 2)];
    server.cli(&["ACL", "SETUSER", "default", "-publish"]);
    writer.release().unwrap().unwrap_released();
    let guards = readers.map(|reader| reader.join().unwrap().unwrap());
    eventually("both are held", TEST_TIMEOUT, || guards.iter().all(|guard| guard.is_held()));
}

#[test]
fn mutex_waits_behind_readers_and_is_handed_the_lock() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let reader = lock.read().unwrap();
        let here = mgr.clone();
        let mutex = spawn_waiter(&mgr, "r", 1, move || here.try_lock_for("r", LONG));
        assert!(lock.try_read().unwrap_err().is_contended(), "the mutex waits");
        let token = reader.fencing_token();
        reader.release().unwrap().unwrap_released();
        let mutex = mutex.join().unwrap().unwrap();
        assert!(mutex.fencing_token() > token);
        let next = spawn_reader(&mgr, &lock, 1);
        mutex.release().unwrap().unwrap_released();
        assert!(next.join().unwrap().unwrap().is_held(), "its poll finds the lock");
    }
}
