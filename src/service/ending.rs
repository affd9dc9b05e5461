//! How locks are given up: by their holders, by others, and when they came to nothing.

use std::time::Duration;

use super::{Core, Kept};
use crate::{
    clock::{self, Moment},
    error::{Action, LockError, LockLost, Result},
    event::ReleasedEvent,
    grant::Claim,
    key::LockKey,
    lease::{End, Lease},
    node::calls::Inspected,
    redlock::{Ending, Leaving, NodeSet, Slip, Trouble, past_a_failover},
    released::Released,
    renewer::tell_loss,
};

/// How long a release waits for a pooled connection before it takes another way.
const POOL_PATIENCE: Duration = Duration::from_millis(5);

impl Core {
    /// The end of the story: of the lease, of its renewal, of the lock; in this order, so that nobody believes in a
    /// lock that may be free. Takes at most `patience`.
    pub(crate) fn give_up(&self, kept: Kept, patience: Duration) -> Result<Released> {
        let Kept { lease, registration } = kept;
        let was_held = lease.is_held(clock::now()) && lease.end(End::Released);
        drop(registration);
        self.tell_loss(&lease);
        if lease.ended() == Some(End::Lost(LockLost::Shutdown)) {
            // The shutdown has released it, or left it to expire.
            return Err(LockError::Shutdown);
        }
        let held = lease.hold.held(clock::now());
        let (outcome, released) = self.release_claim(&lease, was_held, patience);
        // A request that is still under way would find the lock free, and take it for nobody.
        let (now, late) = (clock::now(), lease.late);
        let open = late.open_at(now).without(released);
        if now < late.broken_until {
            self.renewer.undo(&lease.claim, &lease.place, self.redlock.all(), late.until());
        } else if !open.is_empty() {
            self.renewer.undo(&lease.claim, &lease.place, open, late.open_until);
        }
        if was_held {
            self.tell_release(&lease, held, &outcome);
        }
        outcome
    }

    fn tell_loss(&self, lease: &Lease) {
        if let Some(End::Lost(_)) = lease.ended() {
            lease.hold.end("lost");
            tell_loss(self.redlock.observer(), lease);
        }
    }

    /// Tells how a lock went in which its holder believed until now. The server may know better.
    fn tell_release(&self, lease: &Lease, held: Duration, outcome: &Result<Released>) {
        let (observer, lock, id, token) =
            (self.redlock.observer(), lease.claim.key.name(), &lease.claim.id, lease.token);
        let why = match outcome {
            Ok(Released::Gone) => LockLost::Gone,
            Ok(Released::OwnedByOther(by)) => LockLost::Taken { by: Box::new(by.clone()) },
            Ok(Released::Released) | Err(_) => {
                lease.hold.end("released");
                return observer.released(ReleasedEvent { lock, id, token, held, confirmed: outcome.is_ok() });
            }
        };
        lease.hold.end("lost");
        observer.lost(lock, id, token, &why, held);
    }

    /// The same for a holder who does not ask how it went: a lock that is known to be lost is not released again.
    pub(crate) fn let_go(&self, kept: Kept, patience: Duration) -> Result<()> {
        let held = kept.lease.is_held(clock::now());
        self.tell_loss(&kept.lease);
        match kept.lease.ended() {
            None if held => self.give_up(kept, patience).map(drop),
            None | Some(End::Lost(LockLost::Expired | LockLost::MaxHold)) => {
                // A renewal may have been applied without our knowing, or the first request may still be.
                let lease = &kept.lease;
                let nodes = if clock::now() < lease.late.broken_until { self.redlock.all() } else { lease.nodes() };
                self.withdraw(&lease.claim, &lease.place, nodes, lease.late.until(), patience);
                Ok(())
            }
            Some(_) => Ok(()),
        }
    }

    /// Releases a lock of our own; what fails is repeated in the background. Like keeping a lock, giving it up does
    /// not depend on the pool. Also tells which nodes kept it until now.
    pub(super) fn release_claim(
        &self,
        lease: &Lease,
        was_held: bool,
        patience: Duration,
    ) -> (Result<Released>, NodeSet) {
        let (claim, now) = (&lease.claim, clock::now());
        let until = now.saturating_add(patience);
        let left = || until.after(clock::now());
        let open = lease.late.open_at(now);
        let ask = |may_be_done| {
            let (id, waiter) = (claim.id.as_str().as_bytes(), lease.place.as_str());
            let leaving = Leaving { key: &claim.key, id, waiter, was_held, open, may_be_done };
            let alone = || self.redlock.release_last(leaving, until);
            match self.redlock.links(clock::now().saturating_add(POOL_PATIENCE).min(until)) {
                Ok(mut links) => self.redlock.release(&mut links, leaving, left()),
                // A lock that came after pool and renewer had been ended.
                Err(_) if self.is_closed() => alone(),
                Err(_) => match self.renewer.release(claim, waiter, was_held, may_be_done, until) {
                    Some(ending) => ending,
                    None if self.is_closed() => alone(),
                    None => Ending::unheard(self.redlock.all()),
                },
            }
        };
        let Ending { outcome, unsettled, mut unheard, released, .. } = past_a_failover(until, ask);
        let kept =
            if outcome.is_err() && self.redlock.len() == 1 { lease.nodes() } else { lease.nodes().both(unsettled) };
        if !kept.is_empty() {
            // After a shutdown there is no background, and the lock is left to expire.
            self.renewer.undo(claim, &lease.place, kept, now);
        }
        unheard.retain(|(node, _)| lease.nodes().has(*node));
        if !unheard.is_empty() {
            // Most answers come with the next use of their connections.
            self.renewer.doubt(claim, &lease.place, unheard, clock::now().saturating_add(self.operation_timeout()));
        }
        let failed = |trouble| self.redlock.error(trouble, Action::Release, Some(claim.key.name()));
        (outcome.map_err(failed), released)
    }

    /// Releases what is held under `id`, by whomever.
    pub(super) fn release(&self, key: &LockKey, id: &str) -> Result<Released> {
        self.release_by(key, id.as_bytes(), false, self.operation_deadline())
    }

    /// Takes the lock away from the holder of which this identifier is told.
    pub(crate) fn force_release_if(&self, key: &LockKey, id: &str) -> Result<Released> {
        let deadline = self.operation_deadline();
        match self.release_by(key, id.as_bytes(), false, deadline)? {
            // The text that is told stands for bytes that are none: those are its own, and compared.
            Released::OwnedByOther(holder) if holder.id() == id && holder.id_bytes() != id.as_bytes() => {
                self.release_by(key, holder.id_bytes(), false, deadline)
            }
            released => Ok(released),
        }
    }

    fn release_by(&self, key: &LockKey, id: &[u8], was_held: bool, deadline: Moment) -> Result<Released> {
        let failed = |trouble| self.redlock.error(trouble, Action::Release, Some(key.name()));
        let ask = |may_be_done| match self.redlock.links(deadline) {
            Ok(mut links) => {
                let leaving = Leaving { key, id, waiter: "", was_held, open: NodeSet::NONE, may_be_done };
                self.redlock.release(&mut links, leaving, deadline.after(clock::now()))
            }
            Err(failure) => {
                let outcome = Err(Trouble::Alone(failure));
                Ending { outcome, may_be_done, ..Ending::unheard(self.redlock.all()) }
            }
        };
        past_a_failover(deadline, ask).outcome.map_err(failed)
    }

    /// Takes the lock away from whoever holds it, a quorum of the nodes or some of them; true if it did.
    pub(crate) fn force_release(&self, key: &LockKey) -> Result<bool> {
        let failed = |trouble| self.redlock.error(trouble, Action::Inspect, Some(key.name()));
        let deadline = self.operation_deadline();
        // Half the time, so that there is another half for taking it away.
        let ballot = self.redlock.inspect_all(key, self.operation_timeout() / 2).map_err(failed)?;
        let mut ids: Vec<&[u8]> = Vec::new();
        for slip in &ballot.slips {
            if let Slip::Said(answer) = slip
                && let Inspected::Held(holder) = &answer.reply
                && !ids.contains(&holder.id_bytes())
            {
                ids.push(holder.id_bytes());
            }
        }
        // By their identifiers: should an answer be lost, asking again must not hit the next holder.
        let outcomes: Vec<_> = ids.into_iter().map(|id| self.release_by(key, id, true, deadline)).collect();
        // Whose release went through was the only one who could hold it, whatever is not known of the others.
        if outcomes.iter().any(|outcome| matches!(outcome, Ok(Released::Released))) {
            return Ok(true);
        }
        outcomes.into_iter().find_map(Result::err).map_or(Ok(false), Err)
    }

    /// Makes nodes forget a claim that came to nothing. Takes at most `patience`.
    pub(super) fn withdraw(&self, claim: &Claim, waiter: &str, nodes: NodeSet, late_until: Moment, patience: Duration) {
        if !self.renewer.undo(claim, waiter, nodes, late_until) {
            // Shut down: nobody is left to do it in the background. What fails is left to expire.
            let leaving = Leaving {
                key: &claim.key,
                id: claim.id.as_str().as_bytes(),
                waiter,
                was_held: false,
                open: NodeSet::NONE,
                may_be_done: NodeSet::NONE,
            };
            let ending = self.redlock.release_last(leaving, clock::now().saturating_add(patience));
            if let Err(trouble) = ending.outcome {
                say!(debug, "left {:?} to expire: {trouble}", claim.key);
            }
        }
    }
}
