//! `ClusterRenewals`: renews leases on the nodes of their slots. Each lock has a request of its
//! own, because a script may use the keys of one slot only; those to one node share a round trip.

use std::{collections::BTreeMap, slice, sync::Arc};

use super::{cluster_node::Part, redirect::Redirect, router::Router};
use crate::{
    backend::{
        LeaseRenewals, Renewal, RenewalLimits, RenewalReport,
        error::{BackendError, NodeError},
        redis::{
            Connection, Exchange, ExchangeLimits, exchange_all,
            renewals::{conclude, connect_by, member_renewal, renewal_request, renewal_timeout},
            requests_and_replies::{InCluster, Renew, RenewMembers, RenewSome},
        },
    },
    core::lease::Lease,
    sys::clock::{self, Moment},
};

/// Maximum number of nodes that are asked in turn about one lock: the former node of its slot, the
/// new one, and the one that is receiving the slot from it.
const ASKED_MAX: usize = 3;

pub(super) struct ClusterRenewals {
    router: Arc<Router>,
    /// By the number of the node. Each opens when it is first used.
    connections: BTreeMap<u64, Connection>,
}

impl ClusterRenewals {
    pub(super) fn new(router: Arc<Router>) -> ClusterRenewals {
        ClusterRenewals { router, connections: BTreeMap::new() }
    }

    /// Renews leases on one node. Reports those that another node must be asked about.
    fn renew_at(
        &mut self,
        part: &Arc<Part>,
        (leases, some): (&[&Arc<Lease>], &[usize]),
        limits: &mut ExchangeLimits<'_>,
        report: &mut RenewalReport,
    ) -> Vec<(usize, Redirect)> {
        let now = clock::now();
        let mut redirected = Vec::new();
        let connection =
            self.connections.entry(part.number).or_insert_with(|| part.node.reserved_connection());
        let parts: Vec<_> = some.iter().map(|at| Parts::of(leases[*at], now)).collect();
        let renewals: Vec<_> = parts.iter().map(Parts::request).collect();
        let is_sharded = self.router.is_sharded();
        let in_cluster = |request| InCluster { request, is_sharded, is_asking: false };
        let requests: Vec<_> = renewals.iter().map(in_cluster).collect();
        let mut results = exchange_all(&part.node, connection, &requests, limits);
        self.router.replicas().confirm_all(&part.node, connection, &mut results, limits);
        if results.iter().any(|result| result.as_ref().is_err_and(NodeError::is_timeout)) {
            // The next exchange must not wait for these replies.
            connection.poison();
        }
        for ((at, renewal), result) in some.iter().zip(&renewals).zip(results) {
            match result {
                Ok(Exchange { sent, reply: (_, replies) }) => {
                    if let Some((reply, ttl)) = replies.into_iter().zip(renewal.ttls()).next() {
                        report.renewals[*at] = conclude(leases[*at], sent, ttl, reply);
                    }
                }
                Err(failure) => match self.router.note(&failure, part) {
                    redirect @ (Redirect::Moved { .. } | Redirect::Ask(_) | Redirect::Wait) => {
                        redirected.push((*at, redirect));
                    }
                    _ => {
                        if failure.outcome_unknown {
                            leases[*at].on_unanswered_renewal(limits.deadline);
                        }
                        report.failure.get_or_insert(BackendError::Node(failure));
                    }
                },
            }
        }
        redirected
    }

    /// Renews one lease where the node said, without the token: if only some keys of a lock have
    /// been moved, a request for one of them succeeds.
    fn renew_redirected(
        &mut self,
        lease: &Arc<Lease>,
        mut redirect: Redirect,
        deadline: Moment,
    ) -> Result<Renewal, NodeError> {
        let Some(slot) = lease.claim.key.slot() else { return Err(unknown_slot()) };
        let now = clock::now();
        let parts = Parts::of(lease, now).without_token();
        let request = parts.request();
        let mut failure = None;
        for _ in 0..ASKED_MAX {
            let (part, is_asking) = match &redirect {
                Redirect::Ask(name) => (self.router.part(name)?, true),
                _ => (self.router.owner(slot, deadline)?, false),
            };
            let connection = self
                .connections
                .entry(part.number)
                .or_insert_with(|| part.node.reserved_connection());
            match self.router.ask_over(&part, connection, &request, is_asking, deadline) {
                Ok(exchange) => {
                    let reply = exchange.reply.1.into_iter().zip(request.ttls()).next();
                    self.router.replicas().confirm(&part.node, connection, deadline)?;
                    return reply
                        .map(|(reply, ttl)| conclude(lease, exchange.sent, ttl, reply))
                        .ok_or_else(|| NodeError::protocol("its reply lacks a lock"));
                }
                Err(error) => {
                    if error.outcome_unknown {
                        lease.on_unanswered_renewal(deadline);
                    }
                    redirect = self.router.note(&error, &part);
                    failure = Some(error);
                }
            }
            if !matches!(redirect, Redirect::Moved { .. } | Redirect::Ask(_)) {
                break;
            }
        }
        Err(failure.unwrap_or_else(unknown_slot))
    }
}

fn unknown_slot() -> NodeError {
    NodeError::not_sent(std::io::ErrorKind::NotFound.into())
}

impl LeaseRenewals for ClusterRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport {
        let unconfirmed = |lease: &&Arc<Lease>| Renewal::Unconfirmed { until: lease.deadline() };
        let mut report = RenewalReport {
            renewals: leases.iter().map(unconfirmed).collect(),
            failure: None,
            refusal: None,
            timed_out: false,
        };
        let timeout = renewal_timeout(&limits, self.router.operation_timeout);
        let deadline = clock::now().saturating_add(timeout).min(limits.stop_by);
        let mut by_part: BTreeMap<u64, (Arc<Part>, Vec<usize>)> = BTreeMap::new();
        for (at, lease) in leases.iter().enumerate() {
            let owner = lease.claim.key.slot().map(|slot| self.router.owner(slot, deadline));
            match owner {
                Some(Ok(part)) => {
                    by_part.entry(part.number).or_insert_with(|| (part, Vec::new())).1.push(at)
                }
                Some(Err(failure)) => {
                    report.failure.get_or_insert(BackendError::Node(failure));
                }
                None => {}
            }
        }
        // A node that does not reply must not delay the others.
        let mut by_part: Vec<_> = by_part.into_values().collect();
        by_part.sort_by_key(|(part, _)| part.failed_at());
        let mut redirected = Vec::new();
        let parts = by_part.len();
        for (done, (part, some)) in by_part.iter().enumerate() {
            let now = clock::now();
            let share = u32::try_from(parts - done).unwrap_or(u32::MAX);
            let until = now.saturating_add(deadline.duration_since(now) / share);
            let connect_by = connect_by(now, until, &limits, self.router.operation_timeout);
            let mut limits =
                ExchangeLimits { deadline: until, connect_by, check: &mut *limits.check };
            redirected.extend(self.renew_at(part, (leases, some), &mut limits, &mut report));
        }
        for (at, redirect) in redirected {
            match self.renew_redirected(leases[at], redirect, deadline) {
                Ok(renewal) => report.renewals[at] = renewal,
                Err(failure) => drop(report.failure.get_or_insert(BackendError::Node(failure))),
            }
        }
        self.connections.retain(|number, _| self.router.has_part(*number));
        report
    }

    fn reset(&mut self) {
        self.connections.clear();
    }
}

/// What the request for one lease consists of.
enum Parts<'a> {
    Alone(crate::backend::redis::requests_and_replies::Renewal<'a>),
    Member(crate::backend::redis::requests_and_replies::MemberRenewal<'a>),
}

impl<'a> Parts<'a> {
    fn of(lease: &'a Lease, now: Moment) -> Parts<'a> {
        match member_renewal(lease, now) {
            Some(member) => Parts::Member(member),
            None => Parts::Alone(renewal_request(lease, now)),
        }
    }

    fn without_token(mut self) -> Parts<'a> {
        match &mut self {
            Parts::Alone(renewal) => renewal.token_key = None,
            Parts::Member(renewal) => renewal.refresh_token = false,
        }
        self
    }

    fn request(&self) -> RenewSome<'_> {
        match self {
            Parts::Alone(renewal) => RenewSome::Alone(Renew(slice::from_ref(renewal))),
            Parts::Member(renewal) => RenewSome::Members(RenewMembers(slice::from_ref(renewal))),
        }
    }
}
