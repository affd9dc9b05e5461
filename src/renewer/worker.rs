//! The renewer's thread: lock, decide, unlock, act, sleep until the earliest moment. It has a connection of its own, so
//! that users who exhaust the pool cost nobody a lock.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use redis::Value;

use super::{
    Errand, Shared,
    schedule::{Generation, Over},
    undo::Undo,
};
use crate::{
    clock::{self, Moment},
    error::LockLost,
    grant::deadline_from,
    holder::Holder,
    lease::{End, Lease},
    node::{
        Answer, Connection, Failure, Reason, RedisNode,
        script::{By, Call, Release, Renew, Renewal, Renewed},
    },
    text::Quoted,
};

/// Locks in one call of the renewal script: enough to make round trips cheap, few enough not to hold the server up.
const BATCH: usize = 100;
/// No exchange is given less time than this, whatever is urgent.
const BATCH_MIN: Duration = Duration::from_millis(50);
/// While an answer is out, this often is looked whether it is time to end.
const GLANCE: Duration = Duration::from_millis(100);

/// What the thread found to do.
enum Work {
    Step(Step),
    Stop,
}

struct Step {
    over: Vec<(Arc<Lease>, Over)>,
    renew: Vec<(Generation, Arc<Lease>)>,
    undo: Option<(Undo, Duration)>,
    errands: Vec<Errand>,
}

pub(super) struct Worker {
    node: Arc<RedisNode>,
    connection: Connection,
    shared: Arc<Shared>,
}

impl Worker {
    pub(super) fn new(node: Arc<RedisNode>, shared: Arc<Shared>) -> Worker {
        Worker { connection: node.reserved(), node, shared }
    }

    pub(super) fn run(mut self) {
        loop {
            match self.next() {
                Work::Step(step) => {
                    // A fault in here must not end the renewal of other locks. What it leaves under way is not
                    // renewed again, and its holders are told at their deadlines.
                    if catch_unwind(AssertUnwindSafe(|| self.act(step))).is_err() {
                        self.connection.poison();
                        log::error!("the lock renewer met a defect of its own; please report it");
                    }
                }
                Work::Stop => return self.finish(),
            }
        }
    }

    fn act(&mut self, step: Step) {
        self.bury(step.over);
        for errand in step.errands {
            self.run_errand(errand);
        }
        self.renew(step.renew);
        if let Some((undo, pause)) = step.undo {
            self.undo(undo, pause);
        }
    }

    fn next(&self) -> Work {
        let mut state = self.shared.state.lock();
        loop {
            if state.stop.is_some() {
                return Work::Stop;
            }
            let now = clock::now();
            let over = state.schedule.take_over(now);
            let renew = state.schedule.take_due(now);
            let undo = state.undos.take_due(now);
            let errands = std::mem::take(&mut state.errands);
            if !(over.is_empty() && renew.is_empty() && undo.is_none() && errands.is_empty()) {
                return Work::Step(Step { over, renew, undo, errands });
            }
            let until = state.schedule.earliest().min(state.undos.earliest());
            state.asleep_until = Some(until);
            clock::park(&self.shared.changed, &mut state, until);
            state.asleep_until = None;
        }
    }

    /// Ends what is over. The key is released if it is still ours: a renewal may have been applied unseen.
    fn bury(&self, over: Vec<(Arc<Lease>, Over)>) {
        for (lease, why) in over {
            let why = match why {
                Over::Deadline => LockLost::Expired,
                Over::MaxHold => LockLost::MaxHold,
            };
            // The holder may have noticed first.
            self.lose(&lease, why);
            if !matches!(lease.ended(), Some(End::Released)) {
                let now = clock::now();
                let undo = Undo {
                    claim: lease.claim.clone(),
                    waiter: String::new(),
                    until: now.saturating_add(lease.claim.ttl),
                };
                self.shared.state.lock().undo(undo, now);
            }
        }
    }

    fn lose(&self, lease: &Lease, why: LockLost) {
        if lease.end(End::Lost(why.clone())) {
            log::warn!("lock {} of {} is lost: {why}", Quoted(lease.claim.key.name()), self.node.label());
        }
    }

    fn renew(&mut self, mut due: Vec<(Generation, Arc<Lease>)>) {
        while !due.is_empty() {
            let rest = due.split_off(due.len().min(BATCH));
            let went_well = self.renew_batch(&due);
            if !went_well {
                // One batch's trouble must not delay the others: they are due again before it is.
                let now = clock::now();
                let mut state = self.shared.state.lock();
                for (generation, _) in &rest {
                    state.schedule.put_back(*generation, now);
                }
                return;
            }
            due = rest;
        }
    }

    fn renew_batch(&mut self, batch: &[(Generation, Arc<Lease>)]) -> bool {
        let now = clock::now();
        // Without those that were let go of, or ended, since they fell due.
        let mut left = Duration::MAX;
        let batch: Vec<_> = {
            let state = self.shared.state.lock();
            let alive = |(generation, lease): &&(Generation, Arc<Lease>)| {
                let remaining = lease.deadline().after(now);
                let alive = !remaining.is_zero() && state.schedule.is_kept(*generation);
                left = if alive { left.min(remaining) } else { left };
                alive
            };
            batch.iter().filter(alive).collect()
        };
        // Half of what the most urgent has left, so that a second try fits in; but its urgency must not fail the others.
        let patience = (left / 2).max(BATCH_MIN).min(self.node.operation_timeout());
        let deadline = now.saturating_add(patience);
        let renewals: Vec<_> = batch
            .iter()
            .map(|(_, lease)| Renewal {
                lock: lease.claim.key.lock(),
                id: lease.claim.id.as_str(),
                ttl_ms: lease.claim.ttl_ms(),
            })
            .collect();
        if renewals.is_empty() {
            return true;
        }
        match self.ask(&Renew(&renewals), deadline) {
            Ok(Answer { sent, reply: (_, answers) }) => {
                for ((generation, lease), answer) in batch.iter().zip(answers) {
                    self.settle(*generation, lease, sent, answer);
                }
                true
            }
            Err(Failure { reason: Reason::Refused { code, message }, .. }) if batch.len() > 1 => {
                // Find out whom the server means.
                log::warn!("{} refused to renew {} locks at once: {code} {message}", self.node.label(), batch.len());
                for (generation, lease) in batch {
                    self.renew_batch(&[(*generation, lease.clone())]);
                }
                true
            }
            Err(failure) => {
                log::warn!("could not renew {} locks at {}: {}", batch.len(), self.node.label(), failure.reason);
                let now = clock::now();
                let mut state = self.shared.state.lock();
                for (generation, _) in batch {
                    state.schedule.failed(*generation, now);
                }
                false
            }
        }
    }

    fn settle(&self, generation: Generation, lease: &Arc<Lease>, sent: Moment, answer: Renewed) {
        let why = match answer {
            Renewed::Yes => {
                if lease.confirm(deadline_from(sent, lease.claim.ttl), clock::now()) {
                    self.shared.state.lock().schedule.renewed(generation, sent);
                }
                // A confirmation that came too late is for `bury`: the deadline has passed.
                return;
            }
            Renewed::Gone => LockLost::Gone,
            Renewed::Other(id) => LockLost::Taken { by: Box::new(Holder::known_by_id(id)) },
        };
        // A lease that was released while its renewal was under way is not there any more, and that is no loss.
        let kept = self.shared.state.lock().schedule.forget(generation);
        if kept.is_some() {
            self.lose(lease, why);
        }
    }

    /// Asks over the renewer's own connection. While the answer is out, holders of leases that run out are told.
    fn ask<C: Call>(&mut self, call: &C, deadline: Moment) -> Result<Answer<C::Reply>, Failure> {
        let mut by = By::Hash;
        loop {
            let (end, stop) = self.limits();
            let deadline = deadline.min(stop);
            // Connecting cannot be watched, so it has to be short.
            let connect_by = clock::now().saturating_add(self.node.operation_timeout() / 2);
            self.node.connect(&mut self.connection, connect_by.min(deadline).min(end))?;
            let pending = self.node.send(&mut self.connection, call, by, deadline)?;
            let reply = self.await_reply(deadline)?;
            match self.node.settle(&mut self.connection, call, pending, reply) {
                Err(failure) if by == By::Hash && failure.is_unknown_script() => by = By::Text,
                result => return result,
            }
        }
    }

    fn await_reply(&mut self, deadline: Moment) -> Result<Value, Failure> {
        loop {
            let (end, stop) = self.limits();
            let now = clock::now();
            if let Some(reply) = self.connection.receive_until(end.min(deadline).min(now.saturating_add(GLANCE)))? {
                return Ok(reply);
            }
            let now = clock::now();
            if now >= deadline.min(stop) {
                self.connection.poison();
                return Err(Failure::unclear(Reason::TimedOut));
            }
            let over = self.shared.state.lock().schedule.take_over(now);
            self.bury(over);
        }
    }

    /// When a lease ends next, and until when the server may be talked to.
    fn limits(&self) -> (Moment, Moment) {
        let state = self.shared.state.lock();
        (state.schedule.earliest_end(), state.stop.unwrap_or(Moment::NEVER))
    }

    fn run_errand(&mut self, errand: Errand) {
        let Errand { claim, deadline, answer } = errand;
        let release = Release { key: &claim.key, id: claim.id.as_str(), waiter: "" };
        let outcome = if clock::now() < deadline {
            self.ask(&release, deadline).map(|answer| answer.reply)
        } else {
            Err(Failure { sent: false, reason: Reason::TimedOut })
        };
        // Nobody may be waiting any more.
        let _ = answer.send(outcome);
    }

    fn undo(&mut self, undo: Undo, pause: Duration) {
        let now = clock::now();
        // What is left over must not hold up what is due.
        let due = self.shared.state.lock().schedule.earliest();
        let patience = due.after(now).max(BATCH_MIN).min(self.node.operation_timeout());
        if let Err(failure) = self.release(&undo, now.saturating_add(patience)) {
            log::debug!("could not take back {} yet: {}", Quoted(undo.claim.key.name()), failure.reason);
            self.shared.state.lock().undos.failed(undo, pause, clock::now());
        }
    }

    fn release(&mut self, undo: &Undo, deadline: Moment) -> Result<(), Failure> {
        let release = Release { key: &undo.claim.key, id: undo.claim.id.as_str(), waiter: &undo.waiter };
        self.ask(&release, deadline).map(drop)
    }

    fn finish(mut self) {
        let (leases, undos, errands) = {
            let mut state = self.shared.state.lock();
            (state.schedule.take_all(), state.undos.take_all(), std::mem::take(&mut state.errands))
        };
        for errand in errands {
            self.run_errand(errand);
        }
        for lease in &leases {
            lease.end(End::Lost(LockLost::Shutdown));
        }
        let until = clock::now();
        let undos = undos.into_iter().chain(leases.iter().map(|lease| Undo {
            claim: lease.claim.clone(),
            waiter: String::new(),
            until,
        }));
        for undo in undos {
            if let Err(failure) = self.release(&undo, Moment::NEVER) {
                log::warn!("shut down without releasing all locks, which are left to expire: {}", failure.reason);
                return;
            }
        }
    }
}
