//! After a failed request: when to retry, or the error to return. Pure.

use std::time::Duration;

use crate::{
    backend::error::{BackendError, NodeError, NodeErrorKind},
    core::{
        backoff::{RETRY_PAUSE_MAX, retry_backoff},
        validity::request_timeout,
    },
    sys::clock::Moment,
};

/// Number of failures in a row at which the outage is reported. The first one may just be a stale
/// connection.
pub(super) const REPORT_AT_FAILURE: u32 = 2;

/// A run of failures that no success has ended.
#[derive(Debug)]
pub(super) struct RetryState {
    since: Moment,
    /// Start of the outage. A failure that is not the fault of the servers, or that ends on its
    /// own, sets it to now.
    unavailable_since: Moment,
    failures: u32,
    /// Last error other than a plain timeout, with the last useful reply of each node.
    last_specific_error: Option<BackendError>,
}

/// An outage, during which the acquisition goes on trying.
#[derive(Debug)]
pub(super) struct OutageReport {
    pub(super) error: String,
    /// Time at which the acquisition fails unless the servers reply.
    pub(super) gives_up_at: Moment,
}

/// What bounds the retries of one acquisition.
pub(super) struct RetryLimits {
    /// The ttl that requests ask for.
    pub(super) ttl: Duration,
    /// Without a wait deadline, how long to go on while the servers are unavailable.
    pub(super) outage_max: Duration,
    pub(super) wait_deadline: Moment,
    pub(super) operation_timeout: Duration,
    /// Longest time for which a backend that works may leave a claim without a reply.
    pub(super) longest_silence: Duration,
    /// The caller may get its grant without asking.
    pub(super) waits_in_queue: bool,
    /// A holder has been reported.
    pub(super) has_holder: bool,
    /// Number of failures in a row that end the call although it has time left.
    pub(super) failures_max: u32,
}

pub(super) enum RetryDecision {
    RetryAt {
        at: Moment,
        /// The outage, if it must be reported now: once for each.
        report: Option<OutageReport>,
    },
    /// The failures began only after the wait deadline, and a holder has been reported before.
    TimedOut,
    Fail(BackendError),
}

impl RetryState {
    pub(super) fn new(now: Moment) -> RetryState {
        RetryState { since: now, unavailable_since: now, failures: 0, last_specific_error: None }
    }

    /// Whether the servers are taken to be unavailable.
    pub(super) fn is_outage(&self) -> bool {
        self.failures >= REPORT_AT_FAILURE
    }

    pub(super) fn on_failure(
        &mut self,
        mut error: BackendError,
        limits: &RetryLimits,
        now: Moment,
        jitter_seed: u64,
    ) -> RetryDecision {
        self.failures += 1;
        // A queued waiter receives its grant without a pooled connection, and a quarantine ends on
        // its own.
        if (limits.waits_in_queue && error.is_pool_exhausted()) || error.has_quarantined_nodes() {
            self.unavailable_since = now;
        }
        let (is_transient, is_timeout) = (error.is_transient(), error.is_timeout());
        if !is_timeout {
            error.recall(self.last_specific_error.take());
        }
        let may_be_applied = error.is_outcome_unknown() || is_timeout;
        // The connection may lead to a former master, and for a while the host name may as well. A
        // new master may be without the replicas that it needs. If the caller has time, wait.
        let is_first_replica_reply = self.failures == 1 && error.is_not_master();
        // After the wait, retry only what may have been applied: the lock may be ours.
        let may_recover = is_transient && (now < limits.wait_deadline || may_be_applied)
            || error.may_be_failover() && now < limits.wait_deadline;
        let call_deadline = limits.wait_deadline.saturating_add(limits.operation_timeout);
        let give_up_at = if limits.wait_deadline == Moment::NEVER {
            self.unavailable_since.saturating_add(limits.outage_max.max(limits.longest_silence))
        } else {
            Moment::NEVER
        };
        let fails_fast = self.failures >= limits.failures_max && error.is_outage();
        if (may_recover || is_first_replica_reply)
            && !fails_fast
            && now < call_deadline.min(give_up_at)
        {
            let report = (self.failures == REPORT_AT_FAILURE).then(|| {
                let gives_up_at = limits.wait_deadline.min(give_up_at);
                OutageReport { error: error.to_string(), gives_up_at }
            });
            if !is_timeout {
                self.last_specific_error = Some(error);
            }
            // After the first failure, retry at once: a stale connection has been closed, and a
            // wrong clock sample has been replaced.
            let at = if self.failures == 1 && (may_be_applied || is_first_replica_reply) {
                now
            } else {
                now.saturating_add(retry_backoff(self.failures, RETRY_PAUSE_MAX, jitter_seed))
            };
            return RetryDecision::RetryAt { at, report };
        }
        if is_transient && limits.has_holder && self.since >= limits.wait_deadline {
            return RetryDecision::TimedOut;
        }
        let error =
            if is_timeout { self.last_specific_error.take().unwrap_or(error) } else { error };
        let timeout = request_timeout(limits.operation_timeout, limits.ttl);
        RetryDecision::Fail(if error.is_timeout() && timeout < limits.operation_timeout {
            // The server may be healthy, but farther away than this lease allows.
            let short_lease = NodeErrorKind::ShortLease(limits.ttl);
            BackendError::Node(NodeError::outcome_unknown(short_lease))
        } else {
            error
        })
    }
}
