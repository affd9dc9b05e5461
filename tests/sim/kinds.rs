//! The kinds of locks that the clients of a run use, and who may hold a lock together.

use std::ops::Deref;

use distlock::{LockGuard, LockOptions, RedisMgr, Result, WriteGuard};

/// Number of permits of each semaphore.
pub(crate) const LIMIT: u32 = 2;

/// What all locks of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Mutexes,
    ReadWriteLocks,
    Semaphores,
}

/// How one client holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Mutex,
    Read,
    Write,
    /// This number of permits.
    Permits(u32),
}

pub(crate) enum Guard {
    Writer(WriteGuard),
    Other(LockGuard),
}

impl Family {
    /// Several nodes keep no semaphores.
    pub(crate) fn random(nodes: usize, rng: &mut fastrand::Rng) -> Family {
        match rng.u32(..5) {
            0 | 1 => Family::ReadWriteLocks,
            2 if nodes == 1 => Family::Semaphores,
            _ => Family::Mutexes,
        }
    }

    /// The kind of the next lock that a client acquires.
    pub(crate) fn next_kind(self, rng: &mut fastrand::Rng) -> Kind {
        match self {
            Family::Mutexes => Kind::Mutex,
            Family::ReadWriteLocks if rng.u32(..3) == 0 => Kind::Write,
            Family::ReadWriteLocks => Kind::Read,
            Family::Semaphores => Kind::Permits(rng.u32(1..=LIMIT)),
        }
    }
}

impl Kind {
    pub(crate) fn acquire(
        self,
        mgr: &RedisMgr,
        name: &str,
        options: &LockOptions,
    ) -> Result<Guard> {
        Ok(match self {
            Kind::Mutex => Guard::Other(mgr.lock_with(name, options)?),
            Kind::Read => Guard::Other(mgr.rw_lock(name)?.read_with(options)?.into()),
            Kind::Write => Guard::Writer(mgr.rw_lock(name)?.write_with(options)?),
            Kind::Permits(count) => {
                let permits = mgr.semaphore(name, LIMIT)?;
                Guard::Other(permits.acquire_with(count, options)?.into())
            }
        })
    }

    /// The value of the lock key while a group has the lock; `None` for a lock held alone.
    pub(crate) fn group(self) -> Option<&'static [u8]> {
        match self {
            Kind::Mutex | Kind::Write => None,
            Kind::Read => Some(b"distlock:read"),
            Kind::Permits(_) => Some(b"distlock:permits"),
        }
    }

    /// Whether clients may hold a lock like this together: all of them are readers, or have at most
    /// the limit of permits.
    pub(crate) fn may_share_with(self, others: &[Kind]) -> bool {
        let permits = |kind: &Kind| match kind {
            Kind::Permits(count) => *count,
            _ => 0,
        };
        others.is_empty()
            || self.group().is_some()
                && others.iter().all(|other| other.group() == self.group())
                && permits(&self) + others.iter().map(permits).sum::<u32>() <= LIMIT
    }
}

impl Deref for Guard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        match self {
            Guard::Writer(guard) => guard,
            Guard::Other(guard) => guard,
        }
    }
}

impl From<Guard> for LockGuard {
    fn from(guard: Guard) -> LockGuard {
        match guard {
            Guard::Writer(guard) => guard.into(),
            Guard::Other(guard) => guard,
        }
    }
}

#[test]
fn only_readers_and_few_permits_share_a_lock() {
    for kind in [Kind::Mutex, Kind::Read, Kind::Write, Kind::Permits(1), Kind::Permits(2)] {
        assert!(kind.may_share_with(&[]));
        let alone = [Kind::Mutex, Kind::Write];
        assert!(alone.iter().all(|other| !kind.may_share_with(&[*other])));
        assert_eq!(kind.may_share_with(&[Kind::Read; 9]), kind == Kind::Read);
        assert_eq!(kind.may_share_with(&[Kind::Permits(1)]), kind == Kind::Permits(1));
        assert!(!kind.may_share_with(&[Kind::Permits(1); 2]));
    }
}
