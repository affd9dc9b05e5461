//! What tests of users construct: errors, holders, events, and a lock manager.

use std::{io, sync::Arc};

use distlock::{
    FencingToken, HandleEvent, HeldBy, Holder, LockError, LockGuard, LockLost, LockManager,
    LockOptions, LostEvent, RedisMgr, Vote, generate_lock_id, testing::MemoryServer,
};
use parking_lot::Mutex;

use super::OTHER;
use crate::helpers::SECOND;

fn other() -> Holder {
    Holder::new(OTHER).with_ttl_left(60 * SECOND).with_waiters(0)
}

#[test]
fn constructed_error_is_like_that_of_a_server() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    server.hold("x", OTHER, 65 * SECOND);
    let late = mgr.try_lock_for("x", 5 * SECOND).unwrap_err();
    let held = mgr.try_lock("x").unwrap_err();
    server.stop();
    let away = mgr.try_lock("x").unwrap_err();
    let LockError::Unavailable { cause, .. } = &away else { panic!("{away:?}") };
    for (constructed, real) in [
        (LockError::timeout("x", Some(other()), 5 * SECOND), &late),
        (LockError::held("x", other()), &held),
        (LockError::unavailable("x", cause.to_string()), &away),
    ] {
        let what_happened = |error: &LockError| error.to_string().replace(error.advice(), "");
        assert_eq!(what_happened(&constructed), what_happened(real));
    }
    assert_eq!(late.holder(), Some(&other()));
}

#[test]
fn each_error_can_be_constructed() {
    let answers = [("a:6379", Vote::Yes, "granted"), ("b:6379", Vote::No, "held by b")];
    for (error, words) in [
        (LockError::tls("x", "unknown issuer"), "unknown issuer"),
        (LockError::pool_exhausted("x", 3), "all 3 pooled connections are in use"),
        (LockError::pool_exhausted("x", 1), "the only pooled connection is in use"),
        (LockError::refused("x", "OOM", "not allowed"), "refused with OOM not allowed; free"),
        (LockError::no_quorum("x", 3, &answers), "3 of 2 nodes (a:6379: granted; b:6379: held"),
        (LockError::wrong_type("x", "lock:x"), "holds something that is not a lock"),
        (LockError::invalid_name("it is empty"), "invalid lock name: it is empty"),
        (LockError::invalid_options("ttl is 0s"), "invalid lock options: ttl is 0s"),
        (LockError::invalid_config("no URL"), "invalid configuration: no URL"),
        (LockError::lost("x", LockLost::taken(other())), "it is now held by otherhost"),
        (LockError::would_deadlock("x"), "would wait for itself"),
        (LockError::cancelled("x", SECOND), "cancelled after 1s"),
        (LockError::no_thread("renewals", io::Error::other("limit")), "renewals: limit"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn constructed_holder_reports_what_it_was_given() {
    let holder = other().with_held_for(SECOND).with_held_by(HeldBy::readers(3));
    assert_eq!((holder.id(), holder.host()), (OTHER, Some("otherhost")));
    assert_eq!((holder.held_for(), holder.ttl_left()), (Some(SECOND), Some(60 * SECOND)));
    assert_eq!((holder.waiters(), holder.held_by()), (Some(0), HeldBy::readers(3)));
    assert!(other().with_held_by(HeldBy::permits(2)).to_string().contains("with 2 permits in all"));
}

#[test]
fn constructed_event_reaches_a_handler() {
    #[derive(Debug, Default)]
    struct Losses(Mutex<Vec<String>>);

    impl HandleEvent for Losses {
        fn lost(&self, event: &LostEvent<'_>) {
            self.0.lock().push(format!("{} {}: {}", event.lock(), event.token(), event.why()));
        }
    }

    let losses = Losses::default();
    let (id, token) = (generate_lock_id(), FencingToken::new(7));
    losses.lost(&LostEvent::new("x", &id, token, &LockLost::Gone, SECOND));
    assert_eq!(losses.0.into_inner(), [format!("x 7: {}", LockLost::Gone)]);
}

/// A manager whose server can be reached only for some locks.
#[derive(Debug)]
struct Fake(RedisMgr);

impl LockManager for Fake {
    fn lock_with(&self, name: &str, options: &LockOptions) -> distlock::Result<LockGuard> {
        match name {
            "away" => Err(LockError::unavailable(name, "connection refused")),
            _ => self.0.lock_with(name, options),
        }
    }

    fn holder(&self, name: &str) -> distlock::Result<Option<Holder>> {
        self.0.holder(name)
    }

    fn shutdown(&self) {
        self.0.shutdown();
    }
}

#[test]
fn fake_manager_needs_three_methods() {
    let fake: Arc<dyn LockManager> = Arc::new(Fake(MemoryServer::new().manager()));
    for refused in [
        fake.lock("away").map(drop),
        fake.try_lock("away").map(drop),
        fake.try_lock_for("away", SECOND).map(drop),
    ] {
        assert!(refused.unwrap_err().is_unavailable());
    }
    let guard = fake.lock("x").unwrap();
    assert!(fake.try_lock("x").unwrap_err().is_contended() && fake.is_locked("x").unwrap());
    drop(guard);
    assert!(fake.server().ends_with("Fake"));
    for unsupported in [
        fake.lock_all(&["x"]).map(drop),
        fake.rw_lock("x").map(drop),
        fake.semaphore("x", 1).map(drop),
        fake.lock_reentrant("x").map(drop),
        fake.acquire_lock("x", SECOND, SECOND).map(drop),
        fake.release_lock("x", "id").map(drop),
        fake.locks("*").map(drop),
        fake.lock_info("x").map(drop),
        fake.force_release("x").map(drop),
        fake.force_release_if("x", "id").map(drop),
        fake.ping().map(drop),
    ] {
        let error = unsupported.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("use a RedisMgr"), "{error}");
    }
    fake.shutdown();
    assert!(matches!(fake.lock("x"), Err(LockError::Shutdown)));
}

/// Each method of the trait is that of the manager, not the one that refuses.
#[test]
fn manager_behind_the_trait_refuses_nothing() {
    let manager = || MemoryServer::new().manager();
    let mgr = manager();
    expect_no_refusal(&mgr);
    expect_no_refusal(Arc::new(mgr));
    expect_no_refusal(manager());
    expect_no_refusal(Box::new(manager()) as Box<dyn LockManager>);
}

fn expect_no_refusal(locks: impl LockManager) {
    drop(locks.lock_all(&["a", "b"]).unwrap());
    drop(locks.rw_lock("r").unwrap().read().unwrap());
    drop(locks.semaphore("s", 2).unwrap().acquire().unwrap());
    drop(locks.adopt(&locks.lock("d").unwrap().detach().unwrap()).unwrap());
    drop(locks.lock_reentrant("e").unwrap());
    let id = locks.acquire_lock("i", SECOND, SECOND).unwrap().unwrap();
    assert_eq!(locks.locks("*").unwrap().len(), 1);
    assert_eq!(locks.lock_info("i").unwrap().unwrap().holder().id(), id);
    assert!(locks.release_lock("i", &id).unwrap());
    assert!(!locks.force_release("i").unwrap());
    let gone = locks.force_release_if("i", &id).unwrap();
    assert_eq!(gone, distlock::Released::Gone);
    assert_eq!(locks.ping().unwrap(), std::time::Duration::ZERO);
    assert_eq!(locks.server(), "memory");
    assert!(locks.metrics().acquired() > 0);
}
