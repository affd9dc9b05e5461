//! What becomes of an acquisition while servers fail it: when to ask again, or the error that ends it.

use super::{
    attempt::Attempt,
    patience::{RETRY_MAX, retry_pause},
};
use crate::{
    clock::{self, Moment},
    error::{Action, LockError},
    node::{Failure, Reason},
    redlock::{LATE_SLACK, Trouble},
    text::Quoted,
};

/// Beyond the one that may only be a stale connection's.
const TELL_AT: u32 = 2;

/// A row of failures that no success has ended.
pub(super) struct Struggle {
    since: Moment,
    /// Since when nothing but the servers has been to blame.
    away_since: Moment,
    failures: u32,
    /// The last one that says more than that time ran out.
    telling: Option<Trouble>,
}

impl Attempt<'_> {
    /// What to do after a failure: when to ask again, or the error that ends it.
    pub(super) fn troubled(&mut self, trouble: Trouble) -> Result<Moment, LockError> {
        let (now, hard_limit, dice) = (clock::now(), self.hard_limit(), self.dice());
        let timeout = self.on.redlock.operation_timeout();
        // One of several may have been left alone by us for a while, until something late was void.
        let silent = if self.several() { timeout.saturating_mul(2).saturating_add(LATE_SLACK) } else { timeout };
        let struggle = self.trouble.get_or_insert(Struggle { since: now, away_since: now, failures: 0, telling: None });
        struggle.failures += 1;
        // Who is in line needs no connection to be told that it is its turn; and a quarantine ends by itself.
        if (self.in_line && trouble.is_pool_exhausted()) || trouble.is_quarantine() {
            struggle.away_since = now;
        }
        let (since, failures) = (struggle.since, struggle.failures);
        let (passing, sent, silence) = (trouble.is_passing(), trouble.sent(), trouble.is_silence());
        // Nothing is unclear about a server that was not reached, and who does not want to wait does not want to retry.
        let in_vain = self.limit == self.started && !sent && !silence;
        // A connection may have stayed with a former master, and so may the name for a while: who has time waits for it.
        let replica = trouble.is_about_a_replica();
        let demoted = failures == 1 && replica;
        let comes_back = passing && !in_vain || replica && now < self.limit;
        // Without a limit of the caller's, a server that stays away for a whole lease is reported.
        let patience = struggle.away_since.saturating_add(self.claim.ttl.max(silent));
        let patience = if self.limit == Moment::NEVER { patience } else { Moment::NEVER };
        if (comes_back || demoted) && now < hard_limit.min(patience) {
            // A connection that went stale is replaced at once, and a reading of the server's clock is by every answer.
            let stale = failures == 1 && (sent || silence || demoted);
            if failures == TELL_AT {
                let (name, server) = (Quoted(self.claim.key.name()), self.on.redlock.label());
                say!(info, "cannot acquire lock {name} at {server} yet, and keeps trying: {trouble}");
                // Each waits for as long as it is told to, counted from when it has seen it.
                if let Some(ticket) = &self.ticket
                    && ticket.is_front()
                    && !self.on.listener.is_live()
                {
                    ticket.neighbours_look_again();
                }
            }
            if !silence {
                struggle.telling = Some(trouble);
            }
            return Ok(if stale { now } else { now.saturating_add(retry_pause(failures, RETRY_MAX, dice)) });
        }
        if passing && self.holder.is_some() && since >= self.limit {
            return Err(self.too_late());
        }
        let trouble = if silence { struggle.telling.take().unwrap_or(trouble) } else { trouble };
        let trouble = if trouble.is_silence() && self.ask_max() < timeout {
            // The server may be as well as ever, and only farther away than this lease allows.
            Trouble::Alone(Failure::unclear(Reason::ShortLease(self.claim.ttl)))
        } else {
            trouble
        };
        Err(self.on.redlock.error(trouble, Action::Acquire, Some(self.claim.key.name())))
    }
}
