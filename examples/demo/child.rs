//! A child process: acquires the lock, works, releases the lock, and records what it knew and when.

use std::{env, io::Read, process, thread, time::Duration};

use distlock::{Config, LockGuard, LockManager, MySqlConfig, MySqlMgr, RedisMgr};

use super::{
    LOCK,
    args::Child,
    database::Database,
    resource::{Resource, Work},
};
use crate::{
    common::{Result, nanos, now, sleep},
    history::{Event, Journal},
};

/// Maximum time for which a single server may be unreachable before the child fails.
const UNREACHABLE_MAX: Duration = Duration::from_secs(20);

pub(crate) fn run(args: &Child) -> Result {
    thread::spawn(|| {
        // The parent never writes to this pipe. A read returns when the parent has ended.
        let _ = std::io::stdin().read(&mut [0]);
        process::exit(1);
    });
    let worker =
        Worker { journal: Journal::open(&args.record)?, child: args.child, pid: process::id() };
    let outcome = worker.run_rounds(args);
    worker.record(match &outcome {
        Ok(()) => Event::Done,
        Err(error) => Event::Failed { why: error.to_string() },
    })?;
    outcome
}

/// The manager of the lock, and what it protects.
fn connect(args: &Child) -> Result<(Box<dyn LockManager>, Resource)> {
    let url = env::var("DISTLOCK_URL").unwrap_or_default();
    if Database::is_url(&url) {
        let resource = Resource::in_database(&url, &args.resource)?;
        let mgr = MySqlMgr::new(MySqlConfig::new(url).ttl(args.ttl))?;
        return Ok((Box::new(mgr), resource));
    }
    let mgr = RedisMgr::new(Config::from_env().ttl(args.ttl))?;
    let resource = Resource::find(&mgr, &args.resource)?;
    Ok((Box::new(mgr), resource))
}

struct Worker {
    journal: Journal,
    child: u32,
    pid: u32,
}

impl Worker {
    fn run_rounds(&self, args: &Child) -> Result {
        let (mgr, resource) = connect(args)?;
        for _ in 0..args.rounds {
            let guard = self.acquire(&*mgr)?;
            // Read before the check in `hold`. Otherwise a pause in between would make the hold
            // seem to start too late.
            let acquired_at = now();
            self.hold(guard, acquired_at, &resource, args.work)?;
            sleep(args.work.shortest().mul_f64(fastrand::f64() / 3.0));
        }
        Ok(())
    }

    fn acquire(&self, mgr: &dyn LockManager) -> Result<LockGuard> {
        self.record(Event::Wait)?;
        let started = now();
        loop {
            match mgr.lock(LOCK) {
                Ok(guard) => return Ok(guard),
                // Some of several nodes are down and will come back. Or there is one server, and a
                // busy machine has kept it from replying within the short ttl of the demo.
                Err(error)
                    if !error.nodes().is_empty()
                        || (error.is_unavailable() && now() < started + nanos(UNREACHABLE_MAX)) =>
                {
                    self.record(Event::Again { why: error.to_string() })?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn hold(&self, guard: LockGuard, acquired_at: u64, resource: &Resource, work: Work) -> Result {
        let token = guard.fencing_token();
        let Some(deadline) = deadline_if_held(&guard, acquired_at) else {
            return self.record_loss(&guard);
        };
        let enter = Event::Enter { deadline, token: token.as_u64(), id: guard.id().to_string() };
        self.journal.note_as_of(acquired_at, self.child, self.pid, enter)?;

        let read = resource.read(token)?;
        let end = now() + nanos(work.random());
        while now() < end {
            sleep(Work::STEP);
            if !self.check(&guard)? {
                break;
            }
        }

        let is_held = self.check(&guard)?;
        if !is_held {
            self.record_loss(&guard)?;
        }
        // After a loss, a program should not write. This one does, to show that the resource
        // rejects it.
        if let Some(value) = read {
            let accepted = resource.write(token, value + 1)?;
            self.record(Event::Write { token: token.as_u64(), value: value + 1, accepted })?;
        }
        if !is_held {
            return Ok(());
        }
        if !self.check(&guard)? {
            return self.record_loss(&guard);
        }
        self.record(Event::Leave)?;
        match guard.release() {
            // No reply in time: the library repeats the release in the background.
            Err(error) if !error.is_unavailable() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Returns whether the lock is still held. If it is, records that it was held before this call.
    fn check(&self, guard: &LockGuard) -> Result<bool> {
        let before = now();
        let deadline = deadline_if_held(guard, before);
        if let Some(deadline) = deadline {
            self.journal.note_as_of(before, self.child, self.pid, Event::Look { deadline })?;
        }
        Ok(deadline.is_some())
    }

    fn record_loss(&self, guard: &LockGuard) -> Result {
        let at = now();
        let why = guard.lost().recv().map_or_else(|_| "released".to_owned(), |why| why.to_string());
        Ok(self.journal.note_as_of(at, self.child, self.pid, Event::Lost { why })?)
    }

    fn record(&self, event: Event) -> Result {
        Ok(self.journal.note(self.child, self.pid, event)?)
    }
}

/// The deadline of the lease as seen at `before`; `None` if the lock is not held.
///
/// The remaining time is read after `before`. A pause in between makes the result too early, never
/// too late.
fn deadline_if_held(guard: &LockGuard, before: u64) -> Option<u64> {
    let deadline = before + nanos(guard.remaining());
    guard.is_held().then_some(deadline)
}
