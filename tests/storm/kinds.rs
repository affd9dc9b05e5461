//! The kinds of locks in a storm: how a worker acquires each of them.

use std::{ops::Deref, time::Duration};

use distlock::{
    LockError, LockGuard, LockKind, LockOptions, Permit, ReadGuard, RedisMgr, Released, WriteGuard,
    redis,
};
use fastrand::Rng;

use crate::history::Sharing;

/// How long a client of another library keeps a lock at most.
pub(crate) const FOREIGN_TTL: Duration = Duration::from_millis(400);

/// The guard of a lock of any kind.
pub(crate) enum Guard {
    Mutex(LockGuard),
    Read(ReadGuard),
    Write(WriteGuard),
    Permit(Permit),
}

impl Guard {
    pub(crate) fn release(self) -> distlock::Result<Released> {
        match self {
            Guard::Mutex(guard) => guard.release(),
            Guard::Read(guard) => guard.release(),
            Guard::Write(guard) => guard.release(),
            Guard::Permit(guard) => guard.release(),
        }
    }

    pub(crate) fn sharing(&self) -> Sharing {
        match self.kind() {
            LockKind::Read => Sharing::Read,
            LockKind::Write => Sharing::Write,
            LockKind::Permits { limit, count, .. } => Sharing::Permits { limit, count },
            _ => Sharing::Mutex,
        }
    }
}

impl Deref for Guard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        match self {
            Guard::Mutex(guard) => guard,
            Guard::Read(guard) => guard,
            Guard::Write(guard) => guard,
            Guard::Permit(guard) => guard,
        }
    }
}

/// Chooses how to acquire a lock. Mutexes do not keep the order of other kinds in the queue, and
/// clients of other libraries have no place there, so each is only among the holders of some locks.
pub(crate) fn choose(lock: u32, rng: &mut Rng) -> Sharing {
    let permits = |rng: &mut Rng| {
        let limit = rng.u32(2..=4);
        Sharing::Permits { limit, count: rng.u32(1..=limit.min(3)) }
    };
    match (lock % 3, rng.u32(..10)) {
        (1, 0..2) => Sharing::Mutex,
        (2, 0) => Sharing::Foreign,
        (0, 0..7) | (_, 9) => permits(rng),
        (_, 2..4) => Sharing::Write,
        _ => Sharing::Read,
    }
}

/// The same over several nodes. They keep no permits, and a client of another library would need a
/// quorum too.
pub(crate) fn choose_over_nodes(lock: u32, rng: &mut Rng) -> Sharing {
    match choose(lock, rng) {
        Sharing::Permits { .. } | Sharing::Foreign => Sharing::Read,
        sharing => sharing,
    }
}

pub(crate) fn acquire(
    mgr: &RedisMgr,
    name: &str,
    sharing: Sharing,
    options: &LockOptions,
) -> Result<Guard, LockError> {
    match sharing {
        Sharing::Read => mgr.rw_lock(name)?.read_with(options).map(Guard::Read),
        Sharing::Write => mgr.rw_lock(name)?.write_with(options).map(Guard::Write),
        Sharing::Permits { limit, count } => {
            mgr.semaphore(name, limit)?.acquire_with(count, options).map(Guard::Permit)
        }
        Sharing::Mutex | Sharing::Foreign => mgr.lock_with(name, options).map(Guard::Mutex),
    }
}

/// Acquires a lock as clients of other libraries do. Returns whether that succeeded. Reads the id
/// back, because the faults of the network include a reply that comes twice, which this client
/// would take for the reply to its next request.
pub(crate) fn acquire_foreign(mgr: &RedisMgr, key: &str, id: &str) -> bool {
    let Ok(mut connection) = mgr.connection() else { return false };
    let ttl = FOREIGN_TTL.as_millis() as u64;
    let mut set = redis::cmd("SET");
    set.arg(key).arg(id).arg("NX").arg("PX").arg(ttl);
    let mut get = redis::cmd("GET");
    get.arg(key);
    set.query::<Option<String>>(&mut connection).is_ok_and(|reply| reply.is_some())
        && get.query::<Option<String>>(&mut connection).is_ok_and(|now| now.as_deref() == Some(id))
}

pub(crate) fn release_foreign(mgr: &RedisMgr, key: &str, id: &str) {
    const DELETE_IF_EQUAL: &str =
        "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end";
    if let Ok(mut connection) = mgr.connection() {
        let mut delete = redis::cmd("EVAL");
        delete.arg(DELETE_IF_EQUAL).arg(1).arg(key).arg(id);
        // Without a reply, the lock expires.
        let _ = delete.query::<()>(&mut connection);
    }
}
