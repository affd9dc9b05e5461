//! `ClusterRenewals`: renews leases on the nodes of their slots. Each lock has a request of its
//! own, because a script may use the keys of one slot only; those to one node share a round trip.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    slice,
    sync::Arc,
};

use super::{cluster_node::Part, redirect_reply::Redirect, router::Router};
use crate::{
    backend::{
        LeaseRenewals, RenewalLimits, RenewalReport,
        error::BackendError,
        redis::{
            Connection, Exchange, ExchangeLimits, exchange_all,
            renewals::{conclude, connect_by, renewal_request, renewal_timeout},
            requests::{InCluster, LeaseToRenew, Renew},
        },
    },
    core::lease::Lease,
    sys::clock,
};

/// Maximum number of nodes that are asked in turn about one lock: the former node of its slot, the
/// new one, and the one that is receiving the slot from it.
const ASKED_MAX: usize = 3;

pub(super) struct ClusterRenewals {
    router: Arc<Router>,
    /// By the number of the node. Each opens when it is first used.
    connections: BTreeMap<u64, Connection>,
    /// Numbers of the nodes that failed when they were last asked.
    failing: BTreeSet<u64>,
}

impl ClusterRenewals {
    pub(super) fn new(router: Arc<Router>) -> ClusterRenewals {
        ClusterRenewals { router, connections: BTreeMap::new(), failing: BTreeSet::new() }
    }

    /// Renews leases on one node. Adds those that another node must be asked about to `exchanges`.
    /// Returns whether requests were sent that had no reply in time.
    fn renew_at(
        &mut self,
        NodeExchange { part, is_asking, redirects, some }: NodeExchange,
        leases: &[&Arc<Lease>],
        limits: &mut ExchangeLimits<'_>,
        exchanges: &mut Vec<NodeExchange>,
        report: &mut RenewalReport,
    ) -> bool {
        let mut timed_out = false;
        let now = clock::now();
        let connection =
            self.connections.entry(part.number).or_insert_with(|| part.node.reserved_connection());
        // If only some keys of a lock have been moved, a request for one of them succeeds.
        let with_token = redirects == 0;
        let renewals: Vec<_> = some
            .iter()
            .map(|at| {
                let renewal = renewal_request(leases[*at], now);
                LeaseToRenew { refresh_token: renewal.refresh_token && with_token, ..renewal }
            })
            .collect();
        let renews: Vec<_> = renewals.iter().map(slice::from_ref).map(Renew).collect();
        let is_sharded = self.router.is_sharded();
        let in_cluster = |request| InCluster { request, is_sharded, is_asking };
        let requests: Vec<_> = renews.iter().map(in_cluster).collect();
        let mut results = exchange_all(&part.node, connection, &requests, limits);
        self.router.replicas().confirm_all(&part.node, connection, &mut results, limits);
        for ((at, renewal), result) in some.iter().zip(&renewals).zip(results) {
            match result {
                Ok(Exchange { sent, reply: replies, .. }) => {
                    self.router.on_reply();
                    self.failing.remove(&part.number);
                    for reply in replies {
                        report.renewals[*at] = conclude(leases[*at], sent, renewal.ttl(), reply);
                    }
                }
                Err(failure) => {
                    timed_out |= failure.is_timeout() && failure.outcome_unknown;
                    let redirect = self.router.note(&failure, &part);
                    if matches!(redirect, Redirect::Unavailable) {
                        self.failing.insert(part.number);
                    }
                    let next = self.next_node(leases[*at], &redirect);
                    if let Some((part, is_asking)) = next.filter(|_| redirects + 1 < ASKED_MAX) {
                        add_to(exchanges, part, is_asking, redirects + 1, *at);
                        continue;
                    }
                    if failure.outcome_unknown {
                        leases[*at].on_unanswered_renewal(limits.deadline);
                    }
                    report.failure.get_or_insert(BackendError::Node(failure));
                }
            }
        }
        timed_out
    }

    /// Returns the node that a redirect names, and whether it may not serve the slot yet.
    fn next_node(&self, lease: &Lease, redirect: &Redirect) -> Option<(Arc<Part>, bool)> {
        match redirect {
            Redirect::Ask(name) => Some((self.router.part(name).ok()?, true)),
            Redirect::Moved { .. } | Redirect::Wait => {
                Some((self.router.known_owner(lease.claim.key.slot()?).ok()?, false))
            }
            Redirect::Unavailable | Redirect::None => None,
        }
    }
}

/// One exchange with a node.
struct NodeExchange {
    part: Arc<Part>,
    /// The node may not serve the slots yet.
    is_asking: bool,
    /// Number of nodes that were asked about these leases before.
    redirects: usize,
    /// Indexes of the leases.
    some: Vec<usize>,
}

/// Adds a lease to the exchange with this node.
fn add_to(
    exchanges: &mut Vec<NodeExchange>,
    part: Arc<Part>,
    is_asking: bool,
    redirects: usize,
    at: usize,
) {
    let key = (part.number, is_asking, redirects);
    let same = |one: &&mut NodeExchange| (one.part.number, one.is_asking, one.redirects) == key;
    match exchanges.iter_mut().find(same) {
        Some(exchange) => exchange.some.push(at),
        None => exchanges.push(NodeExchange { part, is_asking, redirects, some: vec![at] }),
    }
}

/// Whether fewer leases should be renewed together, because most exchanges had too little time.
/// There is one with each node. If a single node hangs, the leases of the others still share one.
fn is_too_much(timed_out: usize, exchanges: usize) -> bool {
    timed_out > exchanges / 2
}

impl LeaseRenewals for ClusterRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport {
        let mut report = RenewalReport::unconfirmed(leases);
        let timeout = renewal_timeout(&limits, self.router.operation_timeout);
        let deadline = clock::now().saturating_add(timeout).min(limits.stop_by);
        let mut exchanges = Vec::new();
        for (at, lease) in leases.iter().enumerate() {
            let owner = lease.claim.key.slot().map(|slot| self.router.known_owner(slot));
            match owner {
                Some(Ok(part)) => add_to(&mut exchanges, part, false, 0, at),
                Some(Err(failure)) => {
                    report.failure.get_or_insert(BackendError::Node(failure));
                }
                None => {}
            }
        }
        let (mut timed_out, mut exchanged) = (0, 0);
        loop {
            // A node that does not reply must not delay the others.
            exchanges.sort_by_key(|exchange| Reverse(exchange.part.failed_at()));
            let share = u32::try_from(exchanges.len()).unwrap_or(u32::MAX);
            let Some(exchange) = exchanges.pop() else { break };
            let now = clock::now();
            let until = now.saturating_add(deadline.duration_since(now) / share);
            let connect_by = connect_by(now, until, &limits, self.router.operation_timeout);
            let mut limits =
                ExchangeLimits { deadline: until, connect_by, check: &mut *limits.check };
            let is_late = self.renew_at(exchange, leases, &mut limits, &mut exchanges, &mut report);
            exchanged += 1;
            timed_out += usize::from(is_late);
        }
        report.timed_out = is_too_much(timed_out, exchanged);
        self.connections.retain(|number, _| self.router.has_part(*number));
        self.failing.retain(|number| self.router.has_part(*number));
        // On another thread, because leases of other nodes may fall due meanwhile.
        self.router.begin_refresh();
        report
    }

    fn is_at_failing_server(&self, lease: &Lease) -> bool {
        // Otherwise, nobody need look for the owner.
        !self.failing.is_empty()
            && lease
                .claim
                .key
                .slot()
                .and_then(|slot| self.router.known_owner(slot).ok())
                .is_some_and(|part| self.failing.contains(&part.number))
    }

    fn reset(&mut self) {
        self.connections.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: N259
    #[test]
    fn fewer_leases_are_renewed_together_if_most_nodes_are_late() {
        for (timed_out, exchanges, expected) in [
            (0, 0, false),
            (0, 3, false),
            (1, 1, true),
            (1, 2, false),
            (1, 3, false),
            (2, 3, true),
            (50, 50, true),
        ] {
            assert_eq!(is_too_much(timed_out, exchanges), expected, "{timed_out} of {exchanges}");
        }
    }
}
