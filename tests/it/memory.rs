//! A server in memory: what its tests let others do, and how it fails.

mod fakes;
mod slow;

use std::{thread, time::Duration};

use distlock::{LockError, LockLost, LockOptions, RedisMgr, Released, testing::MemoryServer};

use crate::{
    helpers::{SECOND, UnwrapReleased, expect_loss, spawn_call, with_ttl},
    support::{TEST_TIMEOUT, eventually},
};

const OTHER: &str = "otherhost|pid7|tid7|ts1";
/// For a lease that the test lets expire.
const SHORT_TTL: Duration = Duration::from_millis(300);
/// Long enough for a slow machine, so that a renewal finds out.
const RENEWED_TTL: Duration = Duration::from_secs(3);

fn server_and_manager() -> (MemoryServer, RedisMgr) {
    let server = MemoryServer::with_real_time();
    let mgr = server.manager();
    (server, mgr)
}

fn await_waiter(mgr: &RedisMgr, name: &str) {
    eventually("it waits", TEST_TIMEOUT, || {
        mgr.holder(name).unwrap().is_some_and(|holder| holder.waiters() == Some(1))
    });
}

/// Runs a test on a thread of its own, and fails if it hangs.
fn ends(test: impl FnOnce() + Send + 'static) {
    let whole = thread::spawn(test);
    eventually("it has ended", TEST_TIMEOUT, || whole.is_finished());
    whole.join().unwrap();
}

#[test]
fn lock_held_by_somebody_else_names_them() {
    let (server, mgr) = server_and_manager();
    server.hold("orders:42", OTHER, 600 * SECOND);
    let refused = mgr.try_lock("orders:42").unwrap_err();
    let LockError::Held { holder, .. } = &refused else { panic!("{refused:?}") };
    assert_eq!((holder.id(), holder.host(), holder.pid()), (OTHER, Some("otherhost"), Some(7)));
    assert!(holder.ttl_left().unwrap() > 60 * SECOND);
    let late = mgr.try_lock_for("orders:42", SECOND / 20).unwrap_err();
    assert!(late.is_timeout() && late.is_contended(), "{late:?}");
    assert!(mgr.try_lock("orders:43").is_ok());
}

#[test]
fn lock_held_by_somebody_else_expires() {
    let (server, mgr) = server_and_manager();
    server.hold("x", OTHER, SECOND / 20);
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

#[test]
fn guard_learns_who_took_its_lock() {
    let (server, mgr) = server_and_manager();
    let guard = mgr.lock_with("x", &with_ttl(RENEWED_TTL)).unwrap();
    server.hold("x", OTHER, 60 * SECOND);
    match expect_loss(&guard) {
        LockLost::Taken { by, .. } => assert_eq!(by.id(), OTHER),
        other => panic!("{other:?}"),
    }
    assert!(matches!(guard.release().unwrap(), Released::OwnedByOther(_)));
}

#[test]
fn lock_taken_away_goes_to_the_waiter() {
    let (server, mgr) = server_and_manager();
    assert!(!server.take_away("x"), "nobody has it");
    let guard = mgr.lock_with("x", &with_ttl(RENEWED_TTL)).unwrap();
    let waiting = spawn_call(&server.manager(), "x", |mgr, name| mgr.lock(name).unwrap());
    await_waiter(&mgr, "x");
    assert!(server.take_away("x"));
    let next = waiting.join().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    let why = expect_loss(&guard);
    assert!(matches!(why, LockLost::Taken { .. }), "{why:?}");
    drop(next);
    assert!(!server.take_away("x"), "the next holder has released it");
}

#[test]
fn lock_taken_away_is_gone() {
    let (server, mgr) = server_and_manager();
    let guard = mgr.lock_with("x", &with_ttl(RENEWED_TTL)).unwrap();
    assert!(server.take_away("x"));
    assert_eq!(expect_loss(&guard), LockLost::Gone);
}

#[test]
fn stopped_server_is_unavailable_until_it_is_back() {
    let (server, mgr) = server_and_manager();
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    server.stop();
    for refused in [
        mgr.try_lock("y").map(drop).unwrap_err(),
        mgr.ping().map(drop).unwrap_err(),
        mgr.holder("x").map(drop).unwrap_err(),
        mgr.locks("*").map(drop).unwrap_err(),
    ] {
        assert!(refused.is_unavailable(), "{refused:?}");
    }
    assert!(guard.is_held());
    server.resume();
    guard.release().unwrap().unwrap_released();
    drop(mgr.try_lock("x").unwrap());
}

/// The renewals fail, so the lease ends on this side although the server still has the lock.
#[test]
fn lease_expires_while_the_server_is_stopped() {
    let (server, mgr) = server_and_manager();
    let guard = mgr.lock_with("x", &with_ttl(SHORT_TTL)).unwrap();
    server.stop();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

#[test]
fn released_while_the_server_is_stopped_is_cleaned_up_later() {
    let (server, mgr) = server_and_manager();
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    server.stop();
    assert!(guard.release().unwrap_err().is_unavailable());
    server.resume();
    eventually("it is free", TEST_TIMEOUT, || !mgr.is_locked("x").unwrap());
}

#[test]
fn waiter_is_served_although_the_server_stopped_meanwhile() {
    let (server, mgr) = server_and_manager();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_call(&server.manager(), "x", |mgr, name| mgr.lock(name).map(drop));
    await_waiter(&mgr, "x");
    server.stop();
    server.resume();
    guard.release().unwrap().unwrap_released();
    waiting.join().unwrap().unwrap();
}

#[test]
fn server_that_forgot_gives_the_lock_again_with_a_higher_token() {
    let (server, mgr) = server_and_manager();
    // Several tokens of one moment, because the clock stands.
    (0..5).for_each(|_| drop(mgr.lock("x").unwrap()));
    let guard = mgr.lock_with("x", &with_ttl(RENEWED_TTL)).unwrap();
    server.forget();
    let next = server.manager().try_lock("x").unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    assert!(matches!(expect_loss(&guard), LockLost::Taken { .. }));
}

#[test]
fn locks_are_listed_by_pattern() {
    let (server, mgr) = server_and_manager();
    let guards = ["orders:1", "orders:2", "users:1"].map(|name| mgr.lock(name).unwrap());
    server.hold("orders:3", "somebody", 60 * SECOND);
    let waiting = spawn_call(&server.manager(), "orders:1", |mgr, name| mgr.lock(name).map(drop));
    await_waiter(&mgr, "orders:1");
    let found = mgr.locks("orders:*").unwrap();
    let names: Vec<_> = found.iter().map(|lock| lock.name()).collect();
    assert_eq!(names, ["orders:1", "orders:2", "orders:3"]);
    assert_eq!((found[0].waiters().len(), found[2].holder().id()), (1, "somebody"));
    let info = mgr.lock_info("users:1").unwrap().unwrap();
    assert_eq!(info.holder().id(), guards[2].id().as_str());
    drop(guards);
    waiting.join().unwrap().unwrap();
}

#[test]
fn manager_in_memory_has_no_connections() {
    let (_server, mgr) = server_and_manager();
    let error = mgr.connection().unwrap_err();
    assert!(error.is_unavailable(), "{error:?}");
    assert!(error.to_string().ends_with("use a real server for commands of your own"), "{error}");
    assert_eq!(mgr.server(), "memory");
}

#[test]
#[should_panic(expected = "no manager in memory: invalid lock options: ttl is 0")]
fn invalid_configuration_is_reported() {
    MemoryServer::with_real_time().manager_with(|config| config.ttl(Duration::ZERO));
}

#[test]
fn lock_without_renewal_expires() {
    let (server, mgr) = server_and_manager();
    let options = LockOptions::new().ttl(SHORT_TTL).renew(false);
    let guard = mgr.lock_with("x", &options).unwrap();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    server.manager().lock("x").unwrap().release().unwrap().unwrap_released();
}

/// With a clock that stands. Nothing here waits in real time.
mod manual {
    use std::{cell::RefCell, sync::Arc};

    use distlock::{HandleEvent, LockGuard, LostEvent, RenewedEvent};
    use parking_lot::Mutex;

    use super::*;
    use crate::support::eventually_some;

    #[derive(Debug, Default)]
    struct Log(Mutex<Vec<String>>);

    impl HandleEvent for Log {
        fn renewed(&self, event: &RenewedEvent<'_>) {
            self.0.lock().push(format!("renewed {}", event.lock()));
        }

        fn lost(&self, event: &LostEvent<'_>) {
            self.0.lock().push(format!("lost {}: {}", event.lock(), event.why()));
        }
    }

    #[test]
    fn lock_is_renewed_while_time_passes() {
        let server = MemoryServer::new();
        let log = Arc::new(Log::default());
        let mgr = server.manager_with(|config| config.ttl(9 * SECOND).event_handler(log.clone()));
        let guard = mgr.lock("x").unwrap();
        let left = guard.remaining();
        assert!(left > 8 * SECOND);
        assert_eq!(guard.remaining(), left, "the clock stands");
        server.advance(2 * SECOND);
        assert_eq!(guard.remaining(), left - 2 * SECOND);
        server.advance(10 * SECOND);
        assert!(guard.is_held());
        let renewals = log.0.lock().len();
        assert!((3..=5).contains(&renewals), "{renewals} in 12 s, at a ttl of 9 s");
        server.advance(3_600 * SECOND);
        assert!(guard.is_held());
        assert!(server.manager().try_lock("x").unwrap_err().is_contended());
        guard.release().unwrap().unwrap_released();
        assert_eq!(mgr.holder("x").unwrap(), None);
    }

    #[test]
    fn lock_without_renewal_expires_to_the_nanosecond() {
        let server = MemoryServer::new();
        let mgr = server.manager();
        let guard = mgr.lock_with("x", &LockOptions::new().ttl(10 * SECOND).renew(false)).unwrap();
        server.advance(guard.remaining() - Duration::from_nanos(1));
        assert!(guard.is_held());
        server.advance(Duration::from_nanos(1));
        assert!(!guard.is_held());
        assert_eq!(guard.lost().try_recv(), Ok(LockLost::Expired));
        drop(mgr.try_lock("x").unwrap());
    }

    #[test]
    fn losses_are_known_when_the_time_has_passed() {
        let server = MemoryServer::new();
        let log = Arc::new(Log::default());
        let mgr = server.manager_with(|config| config.event_handler(log.clone()));
        let (taken, gone) = (mgr.lock("taken").unwrap(), mgr.lock("gone").unwrap());
        server.hold("taken", OTHER, 60 * SECOND);
        assert!(server.take_away("gone"));
        assert!(taken.is_held() && gone.is_held(), "nobody can know yet");
        server.advance(11 * SECOND);
        assert!(matches!(taken.lost().try_recv(), Ok(LockLost::Taken { .. })));
        assert_eq!(gone.lost().try_recv(), Ok(LockLost::Gone));
        assert_eq!(log.0.lock().len(), 2, "{:?}", log.0.lock());
        server.stop();
        server.advance(11 * SECOND);
        server.resume();
        let guard = mgr.lock("other").unwrap();
        server.stop();
        server.advance(11 * SECOND);
        assert_eq!(guard.lost().try_recv(), Ok(LockLost::Expired));
    }

    #[test]
    fn wait_of_the_owner_takes_no_time() {
        let server = MemoryServer::new();
        let mgr = server.manager();
        server.hold("x", OTHER, 90 * SECOND);
        let late = mgr.try_lock_for("x", 60 * SECOND).unwrap_err();
        let LockError::Timeout { waited, .. } = late else { panic!("{late:?}") };
        assert_eq!(waited, 60 * SECOND);
        // Waits until it expires.
        drop(mgr.lock("x").unwrap());
        server.stop();
        assert!(mgr.try_lock_for("y", SECOND).unwrap_err().is_unavailable());
        assert!(mgr.lock("y").unwrap_err().is_unavailable());
    }

    #[test]
    fn waiter_on_another_thread_is_served_or_times_out() {
        let server = MemoryServer::new();
        let mgr = server.manager();
        let guard = mgr.lock("x").unwrap();
        let served = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
        await_waiter(&mgr, "x");
        let late = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, 5 * SECOND).map(drop));
        eventually("both wait", TEST_TIMEOUT, || {
            mgr.holder("x").unwrap().is_some_and(|holder| holder.waiters() == Some(2))
        });
        server.advance(6 * SECOND);
        assert!(late.join().unwrap().unwrap_err().is_timeout());
        guard.release().unwrap().unwrap_released();
        served.join().unwrap().unwrap();
    }

    /// The server keeps no lock, and the window for a hand-over stays open.
    ///
    /// Fault: N237
    #[test]
    fn try_behind_threads_of_its_process_names_them() {
        let server = MemoryServer::new();
        let mgr = server.manager_with(|config| config.local_handover(SECOND));
        let guard = mgr.lock("x").unwrap();
        server.take_away("x");
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
        let refused = eventually_some("it is behind the thread", TEST_TIMEOUT, || {
            mgr.try_lock("x").map(drop).err()
        });
        assert!(refused.is_contended(), "{refused:?}");
        let text = refused.to_string();
        assert!(text.contains("other threads of this process wait for it"), "{text}");
        drop(guard);
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn managers_shut_down_under_a_clock_that_stands() {
        let server = MemoryServer::new();
        let (mgr, other) = (server.manager(), server.manager());
        let (guard, kept) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
        server.stop();
        assert!(guard.release().is_err());
        mgr.shutdown();
        assert!(!kept.is_held());
        server.resume();
        assert!(other.is_locked("x").unwrap());
        server.advance(11 * SECOND);
        assert!(!other.is_locked("x").unwrap());
    }

    /// The storage for the guard is older than that for the clock of the thread.
    ///
    /// Fault: N15
    #[test]
    fn guard_in_thread_storage_is_released_with_its_thread() {
        thread_local!(static KEPT: RefCell<Option<LockGuard>> = const { RefCell::new(None) });
        let server = MemoryServer::new();
        let mgr = server.manager();
        let here = mgr.clone();
        let keep = move || KEPT.with(|kept| *kept.borrow_mut() = here.lock("x").ok());
        thread::spawn(keep).join().unwrap();
        assert!(!mgr.is_locked("x").unwrap());
    }

    /// Detaching waits until no copy of the first request can be applied.
    #[test]
    fn detaching_waits_by_the_clock_of_the_server() {
        ends(|| {
            let server = MemoryServer::new();
            let mgr = server.manager();
            server.advance(365 * 86_400 * SECOND);
            let detached = mgr.lock("x").unwrap().detach().unwrap();
            drop(server.manager().adopt(&detached).unwrap());
        });
    }

    #[test]
    fn clocks_of_two_servers_are_independent() {
        let (one, other) = (MemoryServer::new(), MemoryServer::new());
        let real = MemoryServer::with_real_time().manager().lock("x").unwrap();
        let guards = [&one, &other].map(|server| {
            let options = LockOptions::new().ttl(10 * SECOND).renew(false);
            server.manager().lock_with("x", &options).unwrap()
        });
        let left = guards[1].remaining();
        one.advance(3_600 * SECOND);
        assert!(!guards[0].is_held());
        assert_eq!(guards[1].remaining(), left);
        assert!(real.is_held());
    }
}

/// A writer that has waited gets the lock for its claim window only, and confirms it soon. Its
/// downgrade is the confirmation.
#[test]
fn downgrade_confirms_a_grant() {
    let server = MemoryServer::new();
    let (mgr, other) = (server.manager(), server.manager());
    let guard = other.rw_lock("x").unwrap().write().unwrap();
    let waiting = spawn_call(&mgr, "x", |mgr, name| {
        mgr.rw_lock(name)?.write_with(&LockOptions::new().renew(false))
    });
    await_waiter(&other, "x");
    drop(guard);
    let reader = waiting.join().unwrap().unwrap().downgrade().unwrap();
    server.advance(SECOND);
    assert!(reader.is_held());
    assert_eq!(mgr.metrics().renewals(), 0);
}
