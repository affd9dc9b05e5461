//! `RedisRenewals`: renews leases on one server.

use std::{ops::Range, sync::Arc, time::Duration};

use super::{
    Connection, Exchange, ExchangeLimits, NodeError, NodeErrorKind, RedisNode, Replicas,
    exchange_all,
    requests::{LeaseToRenew, Renew, RenewReply},
};
use crate::{
    backend::{LeaseRenewals, Renewal, RenewalLimits, RenewalReport, error::BackendError},
    core::{
        claim::whole_ms, holder::Holder, kind::PERMITS_MAX, lease::Lease, lock_lost::LockLost,
        validity::deadline_from_sent,
    },
    sys::clock::{self, Moment},
};

/// Minimum timeout of a renewal; otherwise one urgent lease would fail all others in its batch.
const RENEWAL_TIMEOUT_MIN: Duration = Duration::from_millis(50);
/// Maximum number of requests in one exchange; otherwise leases that fall due meanwhile would wait
/// for long.
pub(crate) const RENEWAL_REQUESTS_MAX: usize = 10;
/// Maximum time of a connection attempt that outlasts its exchange. Bounds the number of attempts
/// in progress.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(1);

pub(super) struct RedisRenewals {
    node: Arc<RedisNode>,
    operation_timeout: Duration,
    replicas: Replicas,
    /// Opens when it is first used.
    connection: Connection,
}

impl LeaseRenewals for RedisRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport {
        let began = clock::now();
        let timeout = renewal_timeout(&limits, self.operation_timeout);
        let deadline = began.saturating_add(timeout).min(limits.stop_by);
        let connect_by = connect_by(began, deadline, &limits, self.operation_timeout);
        let batch_max = limits.batch_max;
        let mut limits = ExchangeLimits { deadline, connect_by, check: limits.check };
        renew_on_one_server(leases, batch_max, deadline, |requests| self.ask(requests, &mut limits))
    }

    fn requests_max(&self) -> usize {
        RENEWAL_REQUESTS_MAX
    }

    fn probe(&mut self, _: RenewalLimits<'_>) {
        self.node.discovery().refresh();
    }

    fn reset(&mut self) {
        self.connection = self.node.reserved_connection();
    }
}

impl RedisRenewals {
    pub(super) fn new(
        node: Arc<RedisNode>,
        operation_timeout: Duration,
        replicas: Replicas,
    ) -> RedisRenewals {
        RedisRenewals { connection: node.reserved_connection(), node, operation_timeout, replicas }
    }

    fn ask(
        &mut self,
        requests: &[Renew<'_>],
        limits: &mut ExchangeLimits<'_>,
    ) -> Vec<RenewalResult> {
        let mut results = exchange_all(&self.node, &mut self.connection, requests, limits);
        self.replicas.confirm_all(&self.node, &mut self.connection, &mut results, limits);
        results
    }
}

/// Reply to one request of a renewal.
pub(crate) type RenewalResult = Result<Exchange<Vec<RenewReply>>, NodeError>;

/// Renews leases on a server that decides alone, in one exchange. Each request is for at most
/// `batch_max` leases. After `deadline`, the server shortens no ttl any more.
pub(crate) fn renew_on_one_server(
    leases: &[&Arc<Lease>],
    batch_max: usize,
    deadline: Moment,
    mut ask: impl FnMut(&[Renew<'_>]) -> Vec<RenewalResult>,
) -> RenewalReport {
    let now = clock::now();
    let mut report = RenewalReport::unconfirmed(leases);
    let renewals: Vec<_> = leases.iter().map(|lease| renewal_request(lease, now)).collect();
    let batches = batches(&renewals, batch_max);
    let requests: Vec<_> = batches.iter().map(|batch| Renew(&renewals[batch.clone()])).collect();
    for (batch, result) in batches.into_iter().zip(ask(&requests)) {
        match result {
            Ok(Exchange { sent, reply: replies, .. }) => {
                for (at, reply) in batch.zip(replies) {
                    report.renewals[at] = conclude(leases[at], sent, renewals[at].ttl(), reply);
                }
            }
            Err(failure) => {
                if failure.outcome_unknown {
                    leases[batch].iter().for_each(|lease| lease.on_unanswered_renewal(deadline));
                }
                report.timed_out |= failure.is_timeout() && failure.outcome_unknown;
                report.refusal = report.refusal.take().or_else(|| refusal_of_one_lock(&failure));
                report.failure.get_or_insert(BackendError::Node(failure));
            }
        }
    }
    report
}

/// The claims that each request renews: at most `batch_max`, and together at most as many members
/// as one claim may have, because one request for more would block the server.
fn batches(renewals: &[LeaseToRenew<'_>], batch_max: usize) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let (mut first, mut members) = (0, 0);
    for (at, renewal) in renewals.iter().enumerate() {
        if at > first && (at - first == batch_max || members + renewal.count > PERMITS_MAX) {
            batches.push(first..at);
            (first, members) = (at, 0);
        }
        members += renewal.count;
    }
    batches.extend((first < renewals.len()).then_some(first..renewals.len()));
    batches
}

/// `ttl` is that of the request: the lease may have got another one since.
pub(crate) fn conclude(lease: &Lease, sent: Moment, ttl: Duration, reply: RenewReply) -> Renewal {
    let why = match reply {
        RenewReply::Renewed => {
            let ttl = lease.kept_for(ttl, sent);
            let until = deadline_from_sent(sent, ttl).max(lease.deadline());
            return Renewal::Confirmed { until, sent };
        }
        RenewReply::Gone => LockLost::Gone,
        RenewReply::HeldByOther(id) => LockLost::Taken { by: Box::new(Holder::from_id(id)) },
    };
    // A request in flight may acquire it again.
    Renewal::Lost { why, leaves_residue: clock::now() < lease.in_flight.until() }
}

pub(crate) fn renewal_request(lease: &Lease, now: Moment) -> LeaseToRenew<'_> {
    LeaseToRenew {
        key: &lease.claim.key,
        id: lease.claim.id.as_str(),
        count: lease.claim.kind.membership().map_or(0, |membership| membership.count),
        ttl_ms: whole_ms(lease.ttl_at(now)),
        never_shorten: lease.may_be_kept_longer(),
        refresh_token: lease.should_refresh_token(now),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        claim::{Claim, Grant},
        id::generate_lock_id,
        key::LockKey,
        kind::LockKind,
    };

    #[test]
    fn one_request_renews_no_more_members_than_one_claim_has() {
        let key = LockKey::new("", "x").unwrap();
        let sizes = |counts: &[u32]| {
            let of = |count: &u32| LeaseToRenew {
                key: &key,
                id: "a",
                count: *count,
                ttl_ms: 1,
                never_shorten: false,
                refresh_token: false,
            };
            let batches = batches(&counts.iter().map(of).collect::<Vec<_>>(), 3);
            assert!(batches.iter().cloned().flatten().eq(0..counts.len()), "{batches:?}");
            batches.iter().map(Range::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), [] as [usize; 0]);
        assert_eq!(sizes(&[1; 7]), [3, 3, 1]);
        assert_eq!(sizes(&[0; 7]), [3, 3, 1]);
        assert_eq!(sizes(&[PERMITS_MAX, 0, PERMITS_MAX, 1, 1]), [2, 1, 2]);
        assert_eq!(sizes(&[5_000, 4_999, 1]), [2, 1]);
    }

    /// The holder extends its lease while a renewal with the former ttl is in flight.
    ///
    /// Fault: N171
    #[test]
    fn renewal_counts_with_the_ttl_that_it_asked_for() {
        let (now, short) = (clock::now(), Duration::from_secs(20));
        for kind in [LockKind::Mutex, LockKind::Read] {
            let key = LockKey::new("", "x").unwrap();
            let claim = Claim { key, id: generate_lock_id(), ttl: short, kind, token: 0 };
            let grant = Grant::of_one_server(1, now, short, now);
            let lease = Arc::new(Lease::new(claim, grant, now));
            let sent = now.saturating_add(Duration::from_secs(5));
            let report = renew_on_one_server(&[&lease], 100, clock::now(), |requests| {
                assert_eq!(requests.len(), 1);
                lease.set_ttl(Duration::from_secs(600));
                vec![Ok(Exchange { sent, server_us: Some(1), reply: vec![RenewReply::Renewed] })]
            });
            let Renewal::Confirmed { until, .. } = report.renewals[0] else {
                panic!("{:?}", report.renewals)
            };
            assert!(until <= sent.saturating_add(short), "{:?}", until.duration_since(sent));
        }
    }
}
