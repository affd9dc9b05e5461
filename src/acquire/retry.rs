//! After a failed round: when to retry, or the error that ends the acquisition.

use super::attempt::Attempt;
use crate::{
    backend::{
        redis::{NodeError, NodeErrorKind},
        redlock::{AskError, EXPIRY_SLACK},
    },
    core::backoff::{RETRY_PAUSE_MAX, retry_backoff},
    error::{Action, LockError},
    sys::{
        clock::{self, Moment},
        display::Quoted,
    },
};

/// Number of failures in a row at which the outage is logged. The first one may just be a stale
/// connection.
const LOG_AT_FAILURE: u32 = 2;

/// A run of failures that no success has ended.
pub(super) struct RetryState {
    since: Moment,
    /// Start of the outage. A failure that is not the fault of the servers, or that ends on its
    /// own, sets it to now.
    unavailable_since: Moment,
    failures: u32,
    /// Last error other than a plain timeout.
    last_specific_error: Option<AskError>,
}

impl Attempt<'_> {
    /// Handles a failed round. Returns when to retry, or the error that ends the acquisition.
    pub(super) fn on_failure(&mut self, error: AskError) -> Result<Moment, LockError> {
        let (now, call_deadline, jitter_seed) =
            (clock::now(), self.call_deadline(), self.jitter_seed());
        let timeout = self.ctx.redlock.operation_timeout();
        // With several nodes, one of them may have been skipped until a pending release to it had
        // expired.
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
        // A queued waiter receives its grant without a pooled connection, and a quarantine ends on
        // its own.
        if (self.queue_requested && error.is_pool_exhausted()) || error.has_quarantined_nodes() {
            retry.unavailable_since = now;
        }
        let (since, failures) = (retry.since, retry.failures);
        let (is_transient, outcome_unknown, is_timeout) =
            (error.is_transient(), error.is_outcome_unknown(), error.is_timeout());
        // Not sent, so the outcome is known, and `try_lock` does not retry.
        let is_pointless = self.wait_deadline == self.started && !outcome_unknown && !is_timeout;
        // The connection may lead to a former master, and for a while the host name may as well. If
        // the caller has time, wait until the name leads to the new master.
        let is_replica = error.is_not_master();
        let is_first_replica_reply = failures == 1 && is_replica;
        let may_recover = is_transient && !is_pointless || is_replica && now < self.wait_deadline;
        // Without a wait deadline, servers that are unavailable for a whole lease are reported.
        let give_up_at = retry.unavailable_since.saturating_add(self.claim.ttl.max(silence_max));
        let give_up_at =
            if self.wait_deadline == Moment::NEVER { give_up_at } else { Moment::NEVER };
        if (may_recover || is_first_replica_reply) && now < call_deadline.min(give_up_at) {
            // After the first failure, retry at once: a stale connection has been closed, and a
            // wrong clock sample has been replaced.
            let retry_at_once =
                failures == 1 && (outcome_unknown || is_timeout || is_first_replica_reply);
            if failures == LOG_AT_FAILURE {
                let (name, server) = (Quoted(self.claim.key.name()), self.ctx.redlock.label());
                log_safely!(
                    info,
                    "could not acquire lock {name} at {server} yet, still trying: {error}"
                );
                // Each waiter fails at a time that counts from its own first failure, so the other
                // waiters must notice the outage now.
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
            // The server may be healthy, but farther away than this lease allows.
            AskError::Node(NodeError::outcome_unknown(NodeErrorKind::ShortLease(self.claim.ttl)))
        } else {
            error
        };
        Err(self.ctx.redlock.lock_error(error, Action::Acquire, Some(self.claim.key.name())))
    }
}
