//! A child: wants the lock, works under it, leaves, and writes down what it believed and when.

use std::{io::Read, process, thread, time::Duration};

use distlock::{LockGuard, RedisMgr};

use super::{
    LOCK,
    args::Child,
    resource::{Resource, Work},
};
use crate::{
    common::{Outcome, nanos, now, work_for},
    history::{Event, Journal},
};

/// For so long one server may not answer before that is an error.
const SERVER_AWAY_MAX: Duration = Duration::from_secs(20);

pub(crate) fn run(args: &Child) -> Outcome {
    thread::spawn(|| {
        // Our parent never writes: this is the end of its life, and so of ours.
        let _ = std::io::stdin().read(&mut [0]);
        process::exit(1);
    });
    let worker = Worker { journal: Journal::open(&args.record)?, child: args.child, pid: process::id() };
    let outcome = worker.rounds(args);
    worker.tell(match &outcome {
        Ok(()) => Event::Done,
        Err(error) => Event::Failed { why: error.to_string() },
    })?;
    outcome
}

struct Worker {
    journal: Journal,
    child: u32,
    pid: u32,
}

impl Worker {
    fn rounds(&self, args: &Child) -> Outcome {
        let mgr = RedisMgr::new(distlock::Config::from_env().ttl(args.ttl))?;
        let resource = Resource::find(&mgr, &args.resource)?;
        for _ in 0..args.rounds {
            let guard = self.take(&mgr)?;
            // Before the look that allows us to act: a pause in between must not make us seem later than we are.
            let entered = now();
            self.hold(guard, entered, &resource, args.work)?;
            work_for(args.work.shortest().mul_f64(fastrand::f64() / 3.0));
        }
        Ok(())
    }

    fn take(&self, mgr: &RedisMgr) -> Outcome<LockGuard> {
        self.tell(Event::Wait)?;
        let begun = now();
        loop {
            match mgr.lock(LOCK) {
                Ok(guard) => return Ok(guard),
                // Some of several nodes are away, and are on their way back; or a machine with much to do has kept the server
                // from answering for longer than our short lease.
                Err(error)
                    if !error.nodes().is_empty()
                        || (error.is_unavailable() && now() < begun + nanos(SERVER_AWAY_MAX)) =>
                {
                    self.tell(Event::Again { why: error.to_string() })?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn hold(&self, guard: LockGuard, entered: u64, resource: &Resource, work: Work) -> Outcome {
        let token = guard.fencing_token();
        let Some(deadline) = believes(&guard, entered) else { return self.lost(&guard) };
        let enter = Event::Enter { deadline, token: token.as_u64(), id: guard.id().to_string() };
        self.journal.note_as_of(entered, self.child, self.pid, enter)?;

        let read = resource.read(token)?;
        let end = now() + nanos(work.once());
        while now() < end {
            work_for(Work::STEP);
            if self.look(&guard)?.is_none() {
                break;
            }
        }

        let held = self.look(&guard)?.is_some();
        if !held {
            self.lost(&guard)?;
        }
        // A holder that has lost its lock should not write. This one does, to show that it gets nowhere.
        if let Some(value) = read {
            let accepted = resource.write(token, value + 1)?;
            self.tell(Event::Write { token: token.as_u64(), value: value + 1, accepted })?;
        }
        if !held {
            return Ok(());
        }
        if self.look(&guard)?.is_none() {
            return self.lost(&guard);
        }
        self.tell(Event::Leave)?;
        match guard.release() {
            // No answer in time; it is repeated in the background.
            Err(error) if !error.is_unavailable() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Whether the lock is still held; if so, that is recorded as of before the question.
    fn look(&self, guard: &LockGuard) -> Outcome<Option<u64>> {
        let before = now();
        let deadline = believes(guard, before);
        if let Some(deadline) = deadline {
            self.journal.note_as_of(before, self.child, self.pid, Event::Look { deadline })?;
        }
        Ok(deadline)
    }

    fn lost(&self, guard: &LockGuard) -> Outcome {
        let at = now();
        let why = guard.lost().recv().map_or_else(|_| "released".to_owned(), |why| why.to_string());
        Ok(self.journal.note_as_of(at, self.child, self.pid, Event::Lost { why })?)
    }

    fn tell(&self, event: Event) -> Outcome {
        Ok(self.journal.note(self.child, self.pid, event)?)
    }
}

/// The deadline of the belief, as seen at `before`, if it has not come.
///
/// The time that remains is asked for later than `before`, so that a pause in between makes this too early and not
/// too late.
fn believes(guard: &LockGuard, before: u64) -> Option<u64> {
    let deadline = before + nanos(guard.remaining());
    guard.is_held().then_some(deadline)
}
