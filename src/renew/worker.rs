//! The worker thread: renews, over its own connections, so that no lock is lost when users exhaust
//! the pool.
//!
//! Invariant: every lease that it takes from the schedule is scheduled again, or has ended. An
//! exchange with unreachable servers ends before another lease loses its chance of a renewal.

use std::{mem, sync::Arc, time::Duration};

use super::{batch_size::BatchSize, context::Context, schedule::Generation};
use crate::{
    backend::{
        LeaseRenewals, RenewSoon, Renewal, RenewalLimits, RenewalReport,
        error::{BackendError, NodeError, NodeErrorKind},
    },
    core::lease::Lease,
    observe::event::RenewedEvent,
    sys::{
        clock::{self, Moment},
        display::{HumanDuration, Quoted},
        logging::isolate_panic,
    },
};

/// Maximum time for which an exchange goes on while the manager shuts down; enough for a
/// re-acquisition, after which the lock must be released.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(250);

/// A lease that is due.
type Due = (Generation, Arc<Lease>);

/// A pass logs each kind of failure at most once, for all locks together.
#[derive(Default)]
struct Logged {
    refusal: bool,
    failure: bool,
}

pub(super) struct Worker {
    context: Context,
    renewals: Box<dyn LeaseRenewals + Send>,
    batch_size: BatchSize,
}

impl Worker {
    pub(super) fn new(context: Context) -> Worker {
        let shared = context.shared.clone();
        let renew_soon: RenewSoon = Arc::new(move |ids| shared.renew_soon(ids));
        let renewals = context.backend.clone().lease_renewals(renew_soon);
        Worker { context, renewals, batch_size: BatchSize::new() }
    }

    pub(super) fn run(mut self, probe_interval: Duration) {
        let next_probe = || clock::now().saturating_add(probe_interval);
        let mut probe_at = next_probe();
        while let Some(due) = self.context.shared.wait_for_renewals(probe_at) {
            self.renew(due);
            // What can wait is done between renewals: a probe, or at least one repair. Otherwise
            // constant renewals would prevent all progress.
            let shared = self.context.shared.clone();
            let has_due = || shared.has_due_renewals(clock::now());
            let probes = clock::now() >= probe_at;
            if probes {
                self.probe();
            }
            // The probe may have read late replies to renewals, which show what to repair.
            if !probes || !has_due() {
                while self.repair() && !has_due() {}
            }
            if probes {
                probe_at = next_probe();
            }
        }
    }

    /// Runs `action`. Returns `None` after a panic.
    fn isolate_panic<T>(&mut self, action: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let result = isolate_panic(|| action(self));
        if result.is_none() {
            self.renewals.reset();
        }
        result
    }

    fn probe(&mut self) {
        let time = self.context.backend.operation_timeout();
        self.isolate_panic(|worker| {
            worker.exchange(time, |renewals, limits| renewals.probe(limits));
        });
    }

    fn renew(&mut self, mut due: Vec<Due>) {
        let mut logged = Logged::default();
        due.sort_by_cached_key(|(_, lease)| self.renewals.is_at_failing_server(lease));
        while !due.is_empty() {
            let together = self.batch_size.exchange_max(self.renewals.requests_max());
            let rest = due.split_off(due.len().min(together));
            let went_well = self
                .isolate_panic(|worker| worker.renew_batch(&due, &mut logged))
                .unwrap_or_else(|| {
                    self.renew_each(&due, &mut logged);
                    true
                });
            if !went_well {
                // The failed batch must not delay the rest, which is due again before the batch is
                // retried.
                let now = clock::now();
                let mut state = self.context.shared.state.lock();
                for (generation, _) in &rest {
                    state.schedule.schedule_renewal(*generation, now);
                }
                return;
            }
            due = rest;
        }
    }

    /// Renews each lock of a batch on its own, after a panic. The lock that causes the panic is
    /// retried until its deadline.
    fn renew_each(&mut self, batch: &[Due], logged: &mut Logged) {
        for one in batch {
            if self
                .isolate_panic(|worker| worker.renew_batch(std::slice::from_ref(one), logged))
                .is_none()
            {
                self.context.shared.state.lock().schedule.on_failed(one.0, clock::now());
            }
        }
    }

    /// Returns false if the servers did not confirm the request as a whole.
    fn renew_batch(&mut self, due: &[Due], logged: &mut Logged) -> bool {
        let began = clock::now();
        // Skip leases that were released or ended since they fell due.
        let batch: Vec<(&Due, Moment)> = {
            let state = self.context.shared.state.lock();
            let held = due.iter().filter(|(generation, _)| state.schedule.contains(*generation));
            let with_deadline = held.map(|one| (one, one.1.deadline()));
            with_deadline.filter(|(_, deadline)| *deadline > began).collect()
        };
        let Some(first_deadline) = batch.iter().map(|(_, deadline)| *deadline).min() else {
            return true;
        };
        let least_left = first_deadline.duration_since(began);
        let leases: Vec<_> = batch.iter().map(|((_, lease), _)| lease).collect();
        let RenewalReport { renewals, failure, too_few, refusal, timed_out } =
            self.exchange(least_left, |renewals, limits| renewals.renew(&leases, limits));
        if timed_out {
            self.batch_size.on_timed_out(batch.len());
        } else if failure.is_none() {
            self.batch_size.on_confirmed(batch.len());
        }
        if batch.len() > 1
            && let Some(refusal) = refusal
        {
            // Find the lock that causes the refusal by bisection, because one request for each lock
            // would take too long over a slow connection.
            if !mem::replace(&mut logged.refusal, true) {
                let (server, locks) = (self.context.backend.label(), batch.len());
                log_safely!(
                    warn,
                    "could not renew {locks} locks in one request at {server}: {refusal}; \
                     trying smaller requests"
                );
            }
            let mut refused = Vec::new();
            for ((one, deadline), renewal) in batch.into_iter().zip(renewals) {
                if matches!(renewal, Renewal::Unconfirmed { .. }) {
                    refused.push(one.clone());
                } else {
                    self.apply_renewal(one, began, deadline, renewal, None);
                }
            }
            let (some, others) = refused.split_at(refused.len() / 2);
            self.renew_batch(some, logged);
            self.renew_batch(others, logged);
            return true;
        }
        let went_well = failure.is_none();
        let error = failure.or(too_few);
        let mut failed = Vec::new();
        for ((one, deadline), renewal) in batch.into_iter().zip(renewals) {
            if !self.apply_renewal(one, began, deadline, renewal, error.as_ref()) {
                failed.push(&one.1);
            }
        }
        if !failed.is_empty() {
            let why = error.map_or_else(|| "no reply in time".into(), |error| error.to_string());
            if !went_well && !mem::replace(&mut logged.failure, true) {
                self.log_failure(&failed, &why);
            }
            self.report_failure(&failed, &why.into());
        }
        went_well
    }

    /// Applies the result for one lease of a batch that began at `began`, and whose deadline was
    /// `deadline` then. Returns false if it must be retried.
    fn apply_renewal(
        &self,
        (generation, lease): &Due,
        began: Moment,
        deadline: Moment,
        renewal: Renewal,
        failure: Option<&BackendError>,
    ) -> bool {
        let (generation, now, state) = (*generation, clock::now(), &self.context.shared.state);
        // A lease that was released while its renewal was in flight is not lost.
        if !state.lock().schedule.contains(generation) {
            return true;
        }
        match renewal {
            Renewal::Confirmed { until, sent } => {
                let margin = deadline.duration_since(now);
                // If the confirmation came after the deadline, `expire` handles the lease.
                if lease.update_deadline(until, now) {
                    let mut state = state.lock();
                    let confirms_grant = state.schedule.on_renewed(generation, sent);
                    // The request may have been sent later than it was built, with a ttl that the
                    // holder has changed meanwhile.
                    state.asked.on_outcome(generation, began.min(sent), Ok(()));
                    drop(state);
                    let (claim, took) = (&lease.claim, now.duration_since(sent));
                    let (lock, id) = (claim.key.name(), &claim.id);
                    let event = RenewedEvent { lock, id, margin, took };
                    self.context.observer.renewed(event, confirms_grant);
                }
                true
            }
            Renewal::Unconfirmed { until } => {
                lease.update_deadline(until, now);
                let mut state = state.lock();
                state.schedule.on_failed(generation, now);
                let timed_out = NodeError::outcome_unknown(NodeErrorKind::TimedOut);
                let failure = failure.cloned().unwrap_or(BackendError::Node(timed_out));
                state.asked.on_outcome(generation, began, Err(failure));
                false
            }
            Renewal::Lost { why, leaves_residue } => {
                let removed = state.lock().schedule.remove(generation);
                if removed.is_some() {
                    self.context.end_as_lost(lease, why);
                    if leaves_residue {
                        self.context.clean_up(lease);
                    }
                }
                true
            }
        }
    }

    /// Repairs one of the leases that the last renewals left. The next renewal finds what is left
    /// of them. Returns false if there was none.
    fn repair(&mut self) -> bool {
        let repaired = self.isolate_panic(|worker| {
            worker.exchange(Duration::MAX, |renewals, limits| renewals.repair(limits))
        });
        let Some(Some(left)) = repaired else { return false };
        left.into_iter().for_each(|residue| self.context.cleaner.clean_up_unless_held(residue));
        true
    }

    /// Lets the backend exchange requests and replies with the servers. It stops early if the lease
    /// of another due renewal has no more time left than this has taken, or if the manager shuts
    /// down.
    fn exchange<T>(
        &mut self,
        least_left: Duration,
        run: impl FnOnce(&mut dyn LeaseRenewals, RenewalLimits<'_>) -> T,
    ) -> T {
        let Worker { context: Context { backend, shared, .. }, renewals, batch_size } = self;
        let since = clock::now();
        let grace = since.saturating_add(SHUTDOWN_GRACE.min(backend.operation_timeout() / 2));
        let check = &mut |now: Moment| shared.check_exchange(since, grace, now);
        let stop_by = shared.shutdown_deadline();
        let batch_max = batch_size.max();
        run(renewals.as_mut(), RenewalLimits { least_left, stop_by, batch_max, check })
    }

    fn log_failure(&self, failed: &[&Arc<Lease>], why: &str) {
        let (server, now) = (self.context.backend.label(), clock::now());
        let deadline = failed.iter().map(|lease| lease.deadline()).min().unwrap_or(now);
        let left = HumanDuration(deadline.duration_since(now));
        match failed {
            [lease] => {
                let lock = Quoted(lease.claim.key.name());
                log_safely!(
                    warn,
                    "could not renew lock {lock} at {server}: {why}; its lease ends in {left} \
                     unless a retry succeeds"
                );
            }
            _ => log_safely!(
                warn,
                "could not renew {} locks at {server}: {why}; the first lease ends in {left} \
                 unless a retry succeeds",
                failed.len()
            ),
        }
    }

    fn report_failure(&self, failed: &[&Arc<Lease>], why: &Arc<str>) {
        let now = clock::now();
        for lease in failed {
            let (claim, left) = (&lease.claim, lease.deadline().duration_since(now));
            self.context.observer.renewal_failed(claim.key.name(), &claim.id, why, left);
        }
    }
}
