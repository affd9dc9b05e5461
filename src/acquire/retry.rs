//! What becomes of an acquisition while servers fail it: when to ask again, or the error that ends
//! it.

use super::{
    attempt::Attempt,
    backoff::{RETRY_PAUSE_MAX, retry_backoff},
};
use crate::{
    clock::{self, Moment},
    display::Quoted,
    error::{Action, LockError},
    node::{NodeError, NodeErrorKind},
    redlock::{AskError, EXPIRY_SLACK},
};

/// Beyond the one that may only be a stale connection's.
const LOG_AT_FAILURE: u32 = 2;

/// A row of failures that no success has ended.
pub(super) struct RetryState {
    since: Moment,
    /// Since when nothing but the servers has been to blame.
    unavailable_since: Moment,
    failures: u32,
    /// The last one that says more than that time ran out.
    last_specific_error: Option<AskError>,
}

impl Attempt<'_> {
    /// What to do after a failure: when to ask again, or the error that ends it.
    pub(super) fn on_failure(&mut self, error: AskError) -> Result<Moment, LockError> {
        let (now, call_deadline, jitter_seed) =
            (clock::now(), self.call_deadline(), self.jitter_seed());
        let timeout = self.ctx.redlock.operation_timeout();
        // One of several may have been left alone by us for a while, until something late was void.
        let silence_max = if self.has_several_nodes() {
            timeout.saturating_mul(2).saturating_add(EXPIRY_SLACK)
        } else {
            timeout
        };
        let retry = self.retry.get_or_insert(RetryState {
            since: now,
            unavailable_since: now,
            failures: 0,
            last_specific_error: None,
        });
        retry.failures += 1;
        // Who is in line needs no connection to be told that it is its turn; and a quarantine ends
        // by itself.
        if (self.queue_requested && error.is_pool_exhausted()) || error.has_quarantined_nodes()
        {
            retry.unavailable_since = now;
        }
        let (since, failures) = (retry.since, retry.failures);
        let (is_transient, outcome_unknown, is_timeout) =
            (error.is_transient(), error.is_outcome_unknown(), error.is_timeout());
        // Nothing is unclear about a server that was not reached, and who does not want to wait
        // does not want to retry.
        let is_pointless = self.wait_deadline == self.started && !outcome_unknown && !is_timeout;
        // A connection may have stayed with a former master, and so may the name for a while: who
        // has time waits for it.
        let is_replica = error.is_not_master();
        let is_first_replica_reply = failures == 1 && is_replica;
        let may_recover = is_transient && !is_pointless || is_replica && now < self.wait_deadline;
        // Without a limit of the caller's, a server that stays away for a whole lease is reported.
        let give_up_at = retry.unavailable_since.saturating_add(self.claim.ttl.max(silence_max));
        let give_up_at =
            if self.wait_deadline == Moment::NEVER { give_up_at } else { Moment::NEVER };
        if (may_recover || is_first_replica_reply) && now < call_deadline.min(give_up_at) {
            // A connection that went stale is replaced at once, and a reading of the server's clock
            // is by every answer.
            let retry_at_once =
                failures == 1 && (outcome_unknown || is_timeout || is_first_replica_reply);
            if failures == LOG_AT_FAILURE {
                let (name, server) = (Quoted(self.claim.key.name()), self.ctx.redlock.label());
                log_safely!(
                    info,
                    "cannot acquire lock {name} at {server} yet, and keeps trying: {error}"
                );
                // Each waits for as long as it is told to, counted from when it has seen it.
                if let Some(wait_handle) = &self.wait_handle
                    && wait_handle.is_first_in_process()
                    && !self.ctx.listener.is_subscribed()
                {
                    wait_handle.wake_same_lock();
                }
            }
            if !is_timeout {
                retry.last_specific_error = Some(error);
            }
            return Ok(if retry_at_once {
                now
            } else {
                now.saturating_add(retry_backoff(failures, RETRY_PAUSE_MAX, jitter_seed))
            });
        }
        if is_transient && self.holder.is_some() && since >= self.wait_deadline {
            return Err(self.timeout_error());
        }
        let error =
            if is_timeout { retry.last_specific_error.take().unwrap_or(error) } else { error };
        let error = if error.is_timeout() && self.request_timeout() < timeout {
            // The server may be as well as ever, and only farther away than this lease allows.
            AskError::Node(NodeError::outcome_unknown(NodeErrorKind::ShortLease(self.claim.ttl)))
        } else {
            error
        };
        Err(self.ctx.redlock.lock_error(error, Action::Acquire, Some(self.claim.key.name())))
    }
}
