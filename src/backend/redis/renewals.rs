//! `RedisRenewals`: renews leases on one server.

use std::{sync::Arc, time::Duration};

use super::{
    Connection, Exchange, ExchangeLimits, NodeError, NodeErrorKind, RedisNode, exchange_within,
    requests_and_replies::{Renew, RenewReply, Renewal as RenewalRequest},
};
use crate::{
    backend::{LeaseRenewals, Renewal, RenewalLimits, RenewalReport, error::BackendError},
    core::{holder::Holder, lease::Lease, lock_lost::LockLost, validity::deadline_from_sent},
    sys::clock::{self, Moment},
};

/// Minimum timeout of a renewal; otherwise one urgent lease would fail all others in its batch.
const RENEWAL_TIMEOUT_MIN: Duration = Duration::from_millis(50);
/// Maximum time of a connection attempt that outlasts its exchange. Bounds the number of attempts
/// in progress.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(1);

pub(super) struct RedisRenewals {
    node: Arc<RedisNode>,
    operation_timeout: Duration,
    /// Opens when it is first used.
    connection: Connection,
}

impl LeaseRenewals for RedisRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport {
        renew_on_one_server(leases, |requests| self.ask(requests, limits))
    }

    fn probe(&mut self, _: RenewalLimits<'_>) {
        self.node.discovery().refresh();
    }

    fn reset(&mut self) {
        self.connection = self.node.reserved_connection();
    }
}

impl RedisRenewals {
    pub(super) fn new(node: Arc<RedisNode>, operation_timeout: Duration) -> RedisRenewals {
        RedisRenewals { connection: node.reserved_connection(), node, operation_timeout }
    }

    fn ask(
        &mut self,
        requests: &[RenewalRequest<'_>],
        limits: RenewalLimits<'_>,
    ) -> Result<Exchange<(u64, Vec<RenewReply>)>, NodeError> {
        let began = clock::now();
        let timeout = renewal_timeout(&limits, self.operation_timeout);
        let deadline = began.saturating_add(timeout).min(limits.stop_by);
        let connect_by = connect_by(began, deadline, &limits, self.operation_timeout);
        let mut limits = ExchangeLimits { deadline, connect_by, check: limits.check };
        let result =
            exchange_within(&self.node, &mut self.connection, &Renew(requests), &mut limits);
        if result.as_ref().is_err_and(NodeError::is_timeout) {
            // The next exchange must not wait for this reply.
            self.connection.poison();
        }
        result
    }
}

/// Renews leases by one request to a server that decides alone.
pub(crate) fn renew_on_one_server(
    leases: &[&Arc<Lease>],
    ask: impl FnOnce(&[RenewalRequest<'_>]) -> Result<Exchange<(u64, Vec<RenewReply>)>, NodeError>,
) -> RenewalReport {
    let requests: Vec<_> =
        leases.iter().map(|lease| renewal_request(lease, clock::now())).collect();
    match ask(&requests) {
        Ok(Exchange { sent, reply: (_, replies) }) => {
            let replies = leases.iter().zip(replies);
            let renewals = replies.map(|(lease, reply)| conclude(lease, sent, reply)).collect();
            RenewalReport { renewals, failure: None, refusal: None, timed_out: false }
        }
        Err(failure) => {
            let unconfirmed =
                |lease: &&Arc<Lease>| Renewal::Unconfirmed { until: lease.deadline() };
            RenewalReport {
                renewals: leases.iter().map(unconfirmed).collect(),
                refusal: refusal_of_one_lock(&failure),
                timed_out: failure.is_timeout() && failure.outcome_unknown,
                failure: Some(BackendError::Node(failure)),
            }
        }
    }
}

fn conclude(lease: &Lease, sent: Moment, reply: RenewReply) -> Renewal {
    let why = match reply {
        RenewReply::Renewed => {
            let until = deadline_from_sent(sent, lease.claim.ttl).max(lease.deadline());
            return Renewal::Confirmed { until, sent };
        }
        RenewReply::Gone => LockLost::Gone,
        RenewReply::HeldByOther(id) => LockLost::Taken { by: Box::new(Holder::from_id(id)) },
    };
    // A request in flight may acquire it again.
    Renewal::Lost { why, leaves_residue: clock::now() < lease.in_flight.until() }
}

pub(crate) fn renewal_request(lease: &Lease, now: Moment) -> RenewalRequest<'_> {
    RenewalRequest {
        lock: lease.claim.key.lock_key(),
        id: lease.claim.id.as_str(),
        ttl_ms: lease.claim.ttl_ms(),
        token_key: lease.should_refresh_token(now).then(|| lease.claim.key.token_key()),
    }
}

/// Time for one exchange: half of the shortest remaining time, so that a second try fits into the
/// rest.
pub(crate) fn renewal_timeout(limits: &RenewalLimits<'_>, operation_timeout: Duration) -> Duration {
    (limits.least_left / 2).max(RENEWAL_TIMEOUT_MIN).min(operation_timeout)
}

/// Lets a connection attempt outlast its exchange: it may still help another lease.
pub(crate) fn connect_by(
    began: Moment,
    deadline: Moment,
    limits: &RenewalLimits<'_>,
    operation_timeout: Duration,
) -> Moment {
    let longest = began.saturating_add(operation_timeout.min(CONNECT_TIMEOUT_MAX));
    longest.max(deadline).min(limits.stop_by)
}

/// The refusal, if a single lock may have caused it, and not the state of the server.
pub(crate) fn refusal_of_one_lock(failure: &NodeError) -> Option<String> {
    match &failure.kind {
        NodeErrorKind::Refused { code, message } if !failure.is_server_wide() => {
            Some(format!("{code} {message}"))
        }
        _ => None,
    }
}
