//! The core promises, each as one function over whatever serves locks: one server, three nodes, and
//! three nodes the first of which, where waiters prefer to line up, is dead.

use std::{thread, time::Duration};

use distlock::{LockError, LockGuard, LockLost, RedisMgr, Released};
use parking_lot::Mutex;

use crate::{
    helpers::{
        SECOND, SHORT_TIMEOUT, UnwrapReleased, completes_within, config_long_timeouts, expect_loss,
        in_thread, with_ttl,
    },
    support::{CEILING, Nodes, eventually},
};

/// Something that serves locks to several managers.
trait Subject {
    /// A manager of its own, as another process would have it.
    fn manager(&self) -> RedisMgr;
    /// Takes the lock away behind everybody's back.
    fn forget(&self, name: &str);
}

/// Servers some of which may be dead.
struct Service(Nodes);

impl Service {
    fn start(nodes: usize, dead: &[usize]) -> Box<dyn Subject> {
        let nodes = Nodes::start(nodes);
        dead.iter().for_each(|node| nodes.kill(*node));
        Box::new(Service(nodes))
    }
}

impl Subject for Service {
    fn manager(&self) -> RedisMgr {
        RedisMgr::new(config_long_timeouts(self.0.urls()).quarantine(Duration::ZERO)).unwrap()
    }

    fn forget(&self, name: &str) {
        for node in self.0.running() {
            self.0.server(node).cli(&["DEL", &format!("lock:{name}")]);
        }
    }
}

const SUBJECTS: [fn() -> Box<dyn Subject>; 3] =
    [|| Service::start(1, &[]), || Service::start(3, &[]), || Service::start(3, &[0])];

macro_rules! promises {
    ($($promise:ident),+) => {$(
        #[test]
        fn $promise() {
            SUBJECTS.iter().for_each(|subject| promise::$promise(&*subject()));
        }
    )+};
}

promises!(
    one_holder_at_a_time,
    tokens_rise_with_every_grant,
    who_asks_first_is_served_first,
    a_release_frees_the_lock,
    a_lost_lock_stays_lost,
    trying_does_not_wait,
    locks_of_other_names_are_independent
);

fn waiters(mgr: &RedisMgr, name: &str) -> u64 {
    mgr.holder(name).unwrap().and_then(|holder| holder.waiters()).unwrap_or(0)
}

fn await_waiters(mgr: &RedisMgr, name: &str, count: u64) {
    eventually("they wait", CEILING, || waiters(mgr, name) == count);
}

mod promise {
    use super::*;

    /// Goal: no two believe at once. Method: a counter that is read, and written back later, by
    /// threads of two managers.
    pub(super) fn one_holder_at_a_time(subject: &dyn Subject) {
        const ROUNDS: u64 = 50;
        let managers = [subject.manager(), subject.manager()];
        let (counter, inside) = (Mutex::new(0_u64), Mutex::new(()));
        thread::scope(|threads| {
            for mgr in managers.iter().cycle().take(6) {
                threads.spawn(|| {
                    for _ in 0..ROUNDS {
                        let guard = mgr.lock("counter").unwrap();
                        let alone = inside.try_lock().expect("two threads are inside");
                        let seen = *counter.lock();
                        thread::yield_now();
                        *counter.lock() = seen + 1;
                        drop(alone);
                        guard.release().unwrap().unwrap_released();
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 6 * ROUNDS);
    }

    pub(super) fn tokens_rise_with_every_grant(subject: &dyn Subject) {
        let (here, there) = (subject.manager(), subject.manager());
        let tokens = Mutex::new(vec![0]);
        thread::scope(|threads| {
            for mgr in [&here, &there, &here, &there] {
                threads.spawn(|| {
                    for _ in 0..50 {
                        let guard = mgr.lock("counter").unwrap();
                        tokens.lock().push(guard.fencing_token().as_u64());
                    }
                });
            }
        });
        let tokens = tokens.into_inner();
        assert_eq!(tokens.len(), 201);
        assert!(tokens.is_sorted_by(|earlier, later| earlier < later), "{tokens:?}");
    }

    pub(super) fn who_asks_first_is_served_first(subject: &dyn Subject) {
        let managers = [subject.manager(), subject.manager(), subject.manager()];
        let holder = managers[0].lock("line").unwrap();
        let served = Mutex::new(Vec::new());
        thread::scope(|threads| {
            for (number, mgr) in managers.iter().cycle().take(9).enumerate() {
                let served = &served;
                threads.spawn(move || {
                    let guard = mgr.lock("line").unwrap();
                    served.lock().push(number);
                    drop(guard);
                });
                await_waiters(&managers[0], "line", number as u64 + 1);
            }
            holder.release().unwrap().unwrap_released();
        });
        assert_eq!(*served.lock(), Vec::from_iter(0..9));
    }

    pub(super) fn a_release_frees_the_lock(subject: &dyn Subject) {
        let (here, there) = (subject.manager(), subject.manager());
        let guard = here.lock("x").unwrap();
        let waiting = in_thread(&there, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waiters(&here, "x", 1);
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap());
        assert_eq!(there.holder("x").unwrap(), None);
        drop(here.try_lock("x").unwrap());
        drop(there.try_lock("x").unwrap());
    }

    pub(super) fn a_lost_lock_stays_lost(subject: &dyn Subject) {
        let (here, there) = (subject.manager(), subject.manager());
        let guard = here.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        subject.forget("x");
        let next = there.lock("x").unwrap();
        let why = expect_loss(&guard);
        assert!(matches!(why, LockLost::Taken { .. } | LockLost::Gone), "{why:?}");
        assert!(next.fencing_token() > guard.fencing_token());
        let outcome = guard.release().unwrap();
        assert!(matches!(outcome, Released::OwnedByOther(_)), "{outcome:?}");
        assert_eq!(here.holder("x").unwrap().unwrap().id(), next.id().as_str());
        assert!(next.is_held());
    }

    pub(super) fn trying_does_not_wait(subject: &dyn Subject) {
        let (here, there) = (subject.manager(), subject.manager());
        let guard: LockGuard = here.lock("x").unwrap();
        // A wait would last for the lease, which is much longer.
        let refused =
            completes_within(20 * SHORT_TIMEOUT, "trying", || there.try_lock("x").unwrap_err());
        assert!(matches!(refused, LockError::Held { .. }), "{refused:?}");
        assert!(refused.is_contended() && !refused.is_timeout());
        assert_eq!(waiters(&here, "x"), 0);
        assert!(guard.is_held());
    }

    pub(super) fn locks_of_other_names_are_independent(subject: &dyn Subject) {
        let mgr = subject.manager();
        let guards = ["a", "b", "ab", "a:b"].map(|name| mgr.try_lock(name).unwrap());
        for guard in &guards {
            assert_eq!(mgr.holder(guard.name()).unwrap().unwrap().id(), guard.id().as_str());
        }
    }
}
