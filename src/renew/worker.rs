//! The worker thread: renews, over its own connections, so that no lock is lost when users exhaust
//! the pool.
//!
//! Invariant: every lease that it takes from the schedule is scheduled again, or has ended. An
//! exchange with unreachable servers ends before another lease loses its chance of a renewal.

use std::{mem, sync::Arc, time::Duration};

use super::{context::Context, schedule::Generation};
use crate::{
    backend::{
        error::BackendError,
        redis::{
            Exchange, NodeError, NodeErrorKind, Request,
            requests_and_replies::{Renew, RenewReply, Renewal},
        },
        redlock::{BroadcastOptions, NodeConnections, Response, Responses},
    },
    core::{
        lease::Lease,
        node_answer::Vote,
        quorum::{NodeSet, Verdict},
    },
    sys::{
        clock::{self, Moment},
        logging::isolate_panic,
    },
};

/// Maximum number of locks in one renewal request; otherwise one request could block the server for
/// long. Still large enough that locks share the cost of a round trip.
pub(super) const RENEWAL_BATCH_MAX: usize = 100;
/// Minimum timeout of a renewal; otherwise one urgent lease would fail all others in its batch.
const RENEWAL_TIMEOUT_MIN: Duration = Duration::from_millis(50);
/// Maximum wait for the remaining nodes once a quorum has replied to a renewal.
const STRAGGLER_GRACE_MAX: Duration = Duration::from_millis(50);
/// Maximum time for which an exchange goes on while the manager shuts down; enough for a
/// re-acquisition, after which the lock must be released.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(250);
/// Maximum time of a connection attempt that outlasts its exchange. Bounds the number of attempts
/// in progress.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(1);

/// Result of one renewal request for one lock.
struct Settlement {
    /// Nodes on which nobody holds the lock.
    missing: NodeSet,
    /// Fewer than a quorum confirmed the renewal; retry soon.
    unconfirmed: bool,
}

impl Settlement {
    fn ended() -> Settlement {
        Settlement { missing: NodeSet::EMPTY, unconfirmed: false }
    }
}

/// A lease, and the nodes on which its lock must be re-acquired.
pub(super) type MissingOn = (Generation, Arc<Lease>, NodeSet);

/// Combined result of the renewal batches of one pass.
#[derive(Default)]
struct BatchReport {
    missing: Vec<MissingOn>,
    /// Nodes that had not replied when the quorum had, and were not awaited.
    stragglers: NodeSet,
    /// Nodes that were awaited and did not reply. Later batches of the pass do not wait for them.
    unresponsive: NodeSet,
    /// Log-once flags: a pass logs each kind of failure at most once, for all locks together.
    refusal_logged: bool,
    failure_logged: bool,
}

pub(super) struct Worker {
    pub(super) context: Context,
    connections: NodeConnections,
    /// Earliest time of the next exchange with nodes that reply long after the others.
    pub(super) listens_at: Moment,
}

impl Worker {
    pub(super) fn new(context: Context) -> Worker {
        Worker {
            connections: context.redlock.reserved_connections(),
            context,
            listens_at: Moment::from_nanos(0),
        }
    }

    pub(super) fn run(mut self) {
        while let Some(due) = self.context.shared.wait_for_renewals() {
            let BatchReport { missing, stragglers, .. } = self.renew(due);
            self.reacquire_all(missing);
            let missing =
                self.isolate_panic(|worker| worker.listen_to(stragglers)).unwrap_or_default();
            self.reacquire_all(missing);
        }
    }

    /// Runs `action`. Returns `None` after a panic.
    pub(super) fn isolate_panic<T>(&mut self, action: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let result = isolate_panic(|| action(self));
        if result.is_none() {
            // Replies in flight on the old connections cannot be matched to requests any more.
            self.connections = self.context.redlock.reserved_connections();
        }
        result
    }

    fn renew(&mut self, mut due: Vec<(Generation, Arc<Lease>)>) -> BatchReport {
        let mut report = BatchReport::default();
        while !due.is_empty() {
            let rest = due.split_off(due.len().min(RENEWAL_BATCH_MAX));
            let went_well = self
                .isolate_panic(|worker| worker.renew_batch(&due, &mut report))
                .unwrap_or_else(|| {
                    self.renew_each(&due, &mut report);
                    true
                });
            if !went_well {
                // The failed batch must not delay the rest, which is due again before the batch is
                // retried.
                let now = clock::now();
                let mut state = self.context.shared.state.lock();
                for (generation, _) in &rest {
                    state.schedule.requeue(*generation, now);
                }
                break;
            }
            due = rest;
        }
        report
    }

    /// Renews each lock of a batch on its own, after a panic. The lock that causes the panic is
    /// retried until its deadline.
    fn renew_each(&mut self, batch: &[(Generation, Arc<Lease>)], report: &mut BatchReport) {
        for one in batch {
            if self
                .isolate_panic(|worker| worker.renew_batch(std::slice::from_ref(one), report))
                .is_none()
            {
                self.context.shared.state.lock().schedule.on_failed(one.0, clock::now());
            }
        }
    }

    fn renew_batch(&mut self, due: &[(Generation, Arc<Lease>)], report: &mut BatchReport) -> bool {
        let now = clock::now();
        // Skip leases that were released or ended since they fell due.
        let mut least_left = Duration::MAX;
        let batch: Vec<_> = {
            let state = self.context.shared.state.lock();
            let alive = |(generation, lease): &&(Generation, Arc<Lease>)| {
                let remaining = lease.deadline().duration_since(now);
                let alive = !remaining.is_zero() && state.schedule.contains(*generation);
                least_left = if alive { least_left.min(remaining) } else { least_left };
                alive
            };
            due.iter().filter(alive).collect()
        };
        // Use half of the shortest remaining time, so that a second try fits into the rest.
        let timeout =
            (least_left / 2).max(RENEWAL_TIMEOUT_MIN).min(self.context.redlock.operation_timeout());
        let renewals: Vec<_> = batch.iter().map(|(_, lease)| build_renewal(lease, now)).collect();
        if renewals.is_empty() {
            return true;
        }
        // Stragglers must not delay a renewal that a quorum has confirmed.
        let grace = STRAGGLER_GRACE_MAX.min(least_left / 4);
        let round = BroadcastOptions {
            straggler_grace: grace,
            ..BroadcastOptions::new(self.context.redlock.all_nodes(), now.saturating_add(timeout))
        };
        let mut responses = self.ask(round, |_| Renew(&renewals), |_, _| Vote::Yes);
        self.hear_the_rest(&batch, &renewals, least_left, &mut responses, &mut report.unresponsive);
        let quorum = responses.verdict() == Verdict::Granted;
        if quorum {
            report.stragglers =
                report.stragglers.union(responses.unanswered().difference(report.unresponsive));
        }
        if !quorum
            && batch.len() > 1
            && let Some((code, message)) = find_refusal(&responses)
        {
            // Find the lock that causes the refusal by bisection, because one request for each lock
            // would take too long over a slow connection.
            if !mem::replace(&mut report.refusal_logged, true) {
                let (server, locks) = (self.context.redlock.label(), batch.len());
                log_safely!(
                    warn,
                    "could not renew {locks} locks in one request at {server}: {code} {message}; \
                     trying smaller requests"
                );
            }
            let (one, other) = due.split_at(due.len() / 2);
            self.renew_batch(one, report);
            self.renew_batch(other, report);
            return true;
        }
        let mut failed = Vec::new();
        let several = self.context.redlock.len() > 1;
        for (index, (generation, lease)) in batch.iter().enumerate() {
            let Settlement { missing, unconfirmed } =
                self.apply_renewal(*generation, lease, &responses, index);
            if unconfirmed {
                failed.push(lease);
            }
            if several && !missing.is_empty() {
                report.missing.push((*generation, lease.clone(), missing));
            }
        }
        let mut cause = None;
        if !quorum {
            let why = BackendError::from_responses(&self.context.redlock, responses, |_| {
                "renewed".into()
            })
            .to_string();
            if !mem::replace(&mut report.failure_logged, true) {
                log_safely!(
                    warn,
                    "could not renew {} locks at {}: {why}",
                    batch.len(),
                    self.context.redlock.label()
                );
            }
            cause = Some(why);
        }
        if !failed.is_empty() {
            let why = cause.unwrap_or_else(|| "too few nodes confirmed it".into());
            self.report_failure(&failed, &why.into());
        }
        quorum
    }

    /// Applies the replies about one lock of a batch.
    fn apply_renewal(
        &self,
        generation: Generation,
        lease: &Arc<Lease>,
        responses: &Responses<(u64, Vec<RenewReply>)>,
        index: usize,
    ) -> Settlement {
        let excluded = self.context.shared.state.lock().schedule.excluded(generation);
        let outcome = self.collect_replies(lease, responses, index, excluded);
        let Some(deadline) = self.apply_replies(generation, lease, &outcome) else {
            return Settlement::ended();
        };
        let now = clock::now();
        let margin = lease.deadline().duration_since(now);
        // If the confirmation came after the deadline, `expire` handles the lease.
        let alive = outcome.replies.is_empty() || lease.update_deadline(deadline, now);
        let mut state = self.context.shared.state.lock();
        let unconfirmed = outcome.confirmations < self.context.redlock.quorum_size();
        let missing = if alive { outcome.missing.difference(excluded) } else { NodeSet::EMPTY };
        if unconfirmed {
            state.schedule.on_failed(generation, now);
        } else if alive {
            state.schedule.on_renewed(generation, outcome.first_sent);
            drop(state);
            let (claim, took) = (&lease.claim, now.duration_since(outcome.first_sent));
            self.context.redlock.observer().renewed(claim.key.name(), &claim.id, margin, took);
        }
        Settlement { missing, unconfirmed }
    }

    /// Sends a request over the worker's own connections and collects the replies. Stops early if
    /// the lease of another due renewal has no more time left than this exchange has taken, or if
    /// the manager shuts down.
    pub(super) fn ask<C: Request>(
        &mut self,
        round: BroadcastOptions<'_>,
        call: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Exchange<C::Reply>) -> Vote,
    ) -> Responses<C::Reply> {
        let Worker { context: Context { redlock, shared, .. }, connections, .. } = self;
        let (since, stop) = (clock::now(), shared.shutdown_deadline());
        let deadline = round.deadline.min(stop);
        // Let a connection attempt outlast this exchange: it may still help another lease.
        let connect_by = since
            .saturating_add(redlock.operation_timeout().min(CONNECT_TIMEOUT_MAX))
            .max(deadline)
            .min(stop);
        let mut stopped = false;
        let grace = since.saturating_add(SHUTDOWN_GRACE.min(redlock.operation_timeout() / 2));
        let mut check = |now| {
            let next = shared.check_exchange(since, grace, now);
            stopped = next.is_none();
            next
        };
        let wait_until = round.wait_until.min(deadline);
        let on_idle = Some(&mut check as &mut dyn FnMut(Moment) -> Option<Moment>);
        let round = BroadcastOptions { deadline, wait_until, connect_by, on_idle, ..round };
        let mut responses = redlock.ask(connections, round, call, vote);
        if stopped {
            // Close these connections: the next exchange must not wait for the same nodes.
            for node in responses.unanswered().iter() {
                connections.0[node].poison();
                responses.by_node[node] =
                    Response::Failed(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
            }
        }
        responses
    }

    fn report_failure(&self, failed: &[&Arc<Lease>], why: &Arc<str>) {
        let now = clock::now();
        for lease in failed {
            let (claim, left) = (&lease.claim, lease.deadline().duration_since(now));
            let observer = self.context.redlock.observer();
            observer.renewal_failed(claim.key.name(), &claim.id, why, left);
        }
    }
}

pub(super) fn build_renewal(lease: &Lease, now: Moment) -> Renewal<'_> {
    Renewal {
        lock: lease.claim.key.lock_key(),
        id: lease.claim.id.as_str(),
        ttl_ms: lease.claim.ttl_ms(),
        token_key: lease.should_refresh_token(now).then(|| lease.claim.key.token_key()),
    }
}

/// Returns the first refusal that may be caused by a single lock, and not by the state of the
/// server.
fn find_refusal<T>(responses: &Responses<T>) -> Option<(&str, &str)> {
    responses.by_node.iter().find_map(|response| match response {
        Response::Failed(failure) if failure.is_server_wide() => None,
        Response::Failed(NodeError { kind: NodeErrorKind::Refused { code, message }, .. }) => {
            Some((&**code, &**message))
        }
        _ => None,
    })
}
