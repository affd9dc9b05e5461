//! Semaphores: limits, claims of several permits, reports.

use distlock::{HeldBy, LockError, LockKind, Semaphore};

use super::{LONG, Subject, spawn_waiter};
use crate::helpers::UnwrapReleased;

/// Promise: P12
#[test]
fn permits_are_limited_and_counted() {
    for subject in Subject::all() {
        let (one, two) = (subject.manager(), subject.manager());
        let (here, there) = (one.semaphore("s", 3).unwrap(), two.semaphore("s", 3).unwrap());
        assert_eq!((here.name(), here.limit(), here.available().unwrap()), ("s", 3, 3));
        let pair = here.acquire_many(2).unwrap();
        assert_eq!((pair.count(), there.available().unwrap()), (2, 1));
        assert!(matches!(pair.kind(), LockKind::Permits { limit: 3, count: 2, .. }));
        let single = there.try_acquire().unwrap();
        assert!(single.fencing_token() > pair.fencing_token());
        let error = here.try_acquire().unwrap_err();
        assert!(error.is_contended(), "{error}");
        assert!(error.to_string().contains("with 3 of 3 permits in use, and 1 needed"), "{error}");

        let holders = here.holders().unwrap();
        let described: Vec<_> =
            holders.iter().map(|one| format!("{} {:?}", one.id(), one.held_by())).collect();
        let expect = |id: &str, count| format!("{id} Permits {{ count: Some({count}) }}");
        for expected in [expect(pair.id().as_str(), 2), expect(single.id().as_str(), 1)] {
            assert!(described.contains(&expected), "{described:?}");
        }
        assert_eq!(holders.len(), 2);
        pair.release().unwrap().unwrap_released();
        assert_eq!(there.available().unwrap(), 2);
        drop(single);
        assert!(here.holders().unwrap().is_empty());
        assert_eq!(here.available().unwrap(), 3);
    }
}

#[test]
fn impossible_numbers_are_refused_with_a_reason() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let reason = |error: LockError| match error {
            LockError::InvalidOptions { reason, .. } => reason,
            other => panic!("{other:?}"),
        };
        assert!(reason(mgr.semaphore("s", 0).unwrap_err()).contains("at least 1"));
        let permits: Semaphore = mgr.semaphore("s", 3).unwrap();
        for (count, but) in [(0, ""), (4, ", but 3 is the limit of the semaphore")] {
            let reason = reason(permits.acquire_many(count).unwrap_err());
            let whole = "ask for at least 1 and at most 3";
            assert_eq!(reason, format!("{count} permits were asked for{but}; {whole}"));
        }
        let many = mgr.semaphore("s", u32::MAX).unwrap();
        let reason = reason(many.acquire_many(10_000).unwrap_err());
        assert!(reason.contains("9999 is the maximum"), "{reason}");
        let most = many.acquire_many(9_999).unwrap();
        assert_eq!(many.available().unwrap(), u32::MAX - 9_999);
        most.release().unwrap().unwrap_released();
        assert_eq!(many.available().unwrap(), u32::MAX);
    }
}

/// Promise: P12
#[test]
fn small_claim_does_not_pass_a_waiting_large_one() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let permits = mgr.semaphore("s", 3).unwrap();
        let (one, two) = (permits.acquire().unwrap(), permits.acquire().unwrap());
        let here = permits.clone();
        let large = spawn_waiter(&mgr, "s", 1, move || here.acquire_many(3));
        let error = permits.try_acquire().unwrap_err();
        assert!(error.is_contended(), "one is free, but not for it");
        let text = error.to_string();
        assert!(text.contains("has enough free permits, but clients that wait"), "{text}");
        drop(one);
        assert!(permits.try_acquire().unwrap_err().is_contended() && !large.is_finished());
        drop(two);
        assert_eq!(large.join().unwrap().unwrap().count(), 3);
    }
}

#[test]
fn changed_limit_counts_for_later_claims() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let (wide, narrow) = (mgr.semaphore("s", 3).unwrap(), mgr.semaphore("s", 1).unwrap());
        let held = [wide.acquire().unwrap(), wide.acquire().unwrap()];
        assert!(narrow.try_acquire().unwrap_err().is_contended());
        assert_eq!(narrow.available().unwrap(), 0);
        assert!(held.iter().all(|permit| permit.is_held()), "a lower limit revokes nothing");
        let third = wide.try_acquire().unwrap();
        drop((held, third));
        assert!(narrow.try_acquire().unwrap().is_held());
    }
}

#[test]
fn mutex_of_the_same_name_waits_for_all_permits() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let permits = mgr.semaphore("s", 2).unwrap();
        let one = permits.acquire().unwrap();
        let here = mgr.clone();
        let mutex = spawn_waiter(&mgr, "s", 1, move || here.try_lock_for("s", LONG));
        assert!(permits.try_acquire().unwrap_err().is_contended());
        drop(one);
        let mutex = mutex.join().unwrap().unwrap();
        assert_eq!(permits.available().unwrap(), 0);
        assert_eq!(permits.holders().unwrap()[0].id(), mutex.id().as_str());
        let refused = permits.try_acquire().unwrap_err();
        let holder = refused.holder().unwrap();
        assert_eq!((holder.id(), holder.held_by()), (mutex.id().as_str(), HeldBy::One));
        let readers = mgr.rw_lock("s").unwrap();
        assert!(readers.try_read().unwrap_err().is_contended());
        drop(mutex);
        let _reader = readers.read().unwrap();
        assert!(permits.try_acquire().unwrap_err().is_contended(), "readers exclude permits");
    }
}
