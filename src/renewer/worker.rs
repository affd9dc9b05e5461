//! The renewer's thread: lock, decide, unlock, act, sleep until the earliest moment. It has connections of its own, so
//! that users who exhaust the pool cost nobody a lock.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use super::{
    Errand, Shared,
    desk::{Desk, Watch},
    schedule::{Generation, Over},
    sweep::AT_ONCE,
    tally::Tally,
    undo::Undo,
};
use crate::{
    clock::{self, Moment},
    lease::Lease,
    node::{
        Answer, Call, Failure, Reason,
        calls::{Renew, Renewal, Renewed},
    },
    redlock::{Ballot, Leaving, Links, NodeSet, Redlock, Round, Slip, Trouble, Verdict, Vote},
};

/// Locks in one call of the renewal script: enough to make round trips cheap, few enough not to hold the server up.
pub(super) const BATCH: usize = 100;
/// No renewal is given less time than this, whatever is urgent, and none that is due waits longer for what can be left off;
/// and no node has more once the others have answered.
pub(super) const BATCH_MIN: Duration = Duration::from_millis(50);
/// The delay by an exchange for which renewals wait for as long as their leases can spare.
pub(super) const SPARE: Duration = Duration::MAX;
/// So long a connection may take to come that is too late for whom it was made: a bound on how many can be under way.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// What the thread found to do.
pub(super) struct Step {
    pub(super) over: Vec<(Arc<Lease>, Over)>,
    pub(super) dangers: Vec<Arc<Lease>>,
    pub(super) renew: Vec<(Generation, Arc<Lease>)>,
    pub(super) undos: Vec<(Undo, Duration)>,
    pub(super) errands: Vec<Errand>,
    /// Some of what was to be taken back had to go.
    pub(super) overflowed: bool,
}

/// What was taken down about one lock.
struct Settled {
    /// The nodes that do not keep it, and nobody else there.
    missing: NodeSet,
    /// It has to be asked for again soon.
    unconfirmed: bool,
}

impl Settled {
    fn over() -> Settled {
        Settled { missing: NodeSet::NONE, unconfirmed: false }
    }
}

/// A lock, and the nodes on which it is to be taken anew.
pub(super) type Lacking = (Generation, Arc<Lease>, NodeSet);

/// What comes of renewing what is due, one batch after the other.
#[derive(Default)]
struct Run {
    lacking: Vec<Lacking>,
    /// Nodes that had not answered when the others had, and were not waited for.
    slow: NodeSet,
    /// Nodes that were waited for in vain; one batch's wait for them is enough.
    deaf: NodeSet,
    /// That a batch was refused has been told, and that some locks could not be renewed: once each, however many there are.
    refused: bool,
    failed: bool,
}

pub(super) struct Worker {
    pub(super) desk: Desk,
    links: Links,
    /// Not before then those are listened to again who answer long after the others.
    pub(super) listens_at: Moment,
}

impl Worker {
    pub(super) fn new(redlock: Arc<Redlock>, shared: Arc<Shared>) -> Worker {
        Worker { links: redlock.reserved(), desk: Desk { redlock, shared }, listens_at: Moment::from_nanos(0) }
    }

    pub(super) fn run(mut self) {
        while let Some(step) = self.desk.shared.next() {
            self.act(step);
        }
        self.finish();
    }

    fn act(&mut self, step: Step) {
        for over in step.over {
            self.apart(|worker| worker.desk.bury([over]));
        }
        self.apart(|worker| worker.desk.tell_danger(step.dangers, clock::now()));
        for errand in step.errands {
            self.apart(|worker| worker.run_errand(errand));
        }
        let Run { lacking, slow, .. } = self.renew(step.renew);
        if step.overflowed {
            say!(warn, "too much is waiting to be taken back; some of it is left to expire");
        }
        if !step.undos.is_empty() {
            self.apart(|worker| worker.sweep(step.undos));
        }
        self.mend_all(lacking);
        let lacking = self.apart(|worker| worker.listen_to(slow)).unwrap_or_default();
        self.mend_all(lacking);
    }

    /// Does something that a defect may end half way: one lock's trouble must not become the others'. `None` if it did.
    pub(super) fn apart<T>(&mut self, act: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let done = catch_unwind(AssertUnwindSafe(|| act(self)));
        done.map_err(|panic| {
            mem::forget(panic);
            // What is under way over the connections belongs to nobody any more.
            self.links = self.desk.redlock.reserved();
            say!(error, "the lock renewer met a defect of its own; please report it");
        })
        .ok()
    }

    fn renew(&mut self, mut due: Vec<(Generation, Arc<Lease>)>) -> Run {
        let mut run = Run::default();
        while !due.is_empty() {
            let rest = due.split_off(due.len().min(BATCH));
            let went_well = self.apart(|worker| worker.renew_batch(&due, &mut run)).unwrap_or_else(|| {
                self.renew_each(&due, &mut run);
                true
            });
            if !went_well {
                // One batch's trouble must not delay the others: they are due again before it is.
                let now = clock::now();
                let mut state = self.desk.shared.state.lock();
                for (generation, _) in &rest {
                    state.schedule.put_back(*generation, now);
                }
                break;
            }
            due = rest;
        }
        run
    }

    /// Finds out whose renewal meets a defect. That one is tried again, and told at its deadline.
    fn renew_each(&mut self, batch: &[(Generation, Arc<Lease>)], run: &mut Run) {
        for one in batch {
            if self.apart(|worker| worker.renew_batch(std::slice::from_ref(one), run)).is_none() {
                self.desk.shared.state.lock().schedule.failed(one.0, clock::now());
            }
        }
    }

    fn renew_batch(&mut self, due: &[(Generation, Arc<Lease>)], run: &mut Run) -> bool {
        let now = clock::now();
        // Without those that were let go of, or ended, since they fell due.
        let mut left = Duration::MAX;
        let batch: Vec<_> = {
            let state = self.desk.shared.state.lock();
            let alive = |(generation, lease): &&(Generation, Arc<Lease>)| {
                let remaining = lease.deadline().after(now);
                let alive = !remaining.is_zero() && state.schedule.is_kept(*generation);
                left = if alive { left.min(remaining) } else { left };
                alive
            };
            due.iter().filter(alive).collect()
        };
        // Half of what the most urgent has left, so that a second try fits in; but its urgency must not fail the others.
        let patience = (left / 2).max(BATCH_MIN).min(self.desk.redlock.operation_timeout());
        let renewals: Vec<_> = batch.iter().map(|(_, lease)| renewal(lease, now)).collect();
        if renewals.is_empty() {
            return true;
        }
        // What a quorum has confirmed is told in time.
        let grace = BATCH_MIN.min(left / 4);
        let round = Round { grace, ..Round::new(self.desk.redlock.all(), now.saturating_add(patience)) };
        let mut ballot = self.ask(round, SPARE, |_| Renew(&renewals), |_, _| Vote::Yes);
        self.hear_the_rest(&batch, &renewals, left, &mut ballot, &mut run.deaf);
        let quorum = ballot.verdict() == Verdict::Won;
        if quorum {
            run.slow = run.slow.with(ballot.open().without(run.deaf));
        }
        if !quorum
            && batch.len() > 1
            && let Some((code, message)) = refusal(&ballot)
        {
            // Find out whom the server means: in halves, for over a long way each request takes from the others' time.
            if !mem::replace(&mut run.refused, true) {
                let (server, locks) = (self.desk.redlock.label(), batch.len());
                say!(warn, "{server} refused to renew {locks} locks at once: {code} {message}");
            }
            let (one, other) = due.split_at(due.len() / 2);
            self.renew_batch(one, run);
            self.renew_batch(other, run);
            return true;
        }
        let mut failed = Vec::new();
        let several = self.desk.redlock.len() > 1;
        for (index, (generation, lease)) in batch.iter().enumerate() {
            let Settled { missing, unconfirmed } = self.settle(*generation, lease, &ballot, index);
            if unconfirmed {
                failed.push(lease);
            }
            if several && !missing.is_empty() {
                run.lacking.push((*generation, lease.clone(), missing));
            }
        }
        let mut trouble = None;
        if !quorum {
            let why = Trouble::of(&self.desk.redlock, ballot, |_| "renewed".into()).to_string();
            if !mem::replace(&mut run.failed, true) {
                say!(warn, "could not renew {} locks at {}: {why}", batch.len(), self.desk.redlock.label());
            }
            trouble = Some(why);
        }
        if !failed.is_empty() {
            let why = trouble.unwrap_or_else(|| "too few nodes keep it".into());
            self.desk.tell_failure(&failed, &why.into());
        }
        quorum
    }

    /// Takes down what the nodes said about one lock of a batch.
    fn settle(
        &self,
        generation: Generation,
        lease: &Arc<Lease>,
        ballot: &Ballot<(u64, Vec<Renewed>)>,
        index: usize,
    ) -> Settled {
        let barred = self.desk.shared.state.lock().schedule.barred(generation);
        let tally = self.tally(lease, ballot, index, barred);
        let Some(deadline) = self.count(generation, lease, &tally) else { return Settled::over() };
        let Tally { said, missing, confirmed, first_sent, .. } = tally;
        let now = clock::now();
        let margin = lease.deadline().after(now);
        // A confirmation that came too late is for `bury`: the deadline has passed.
        let alive = said.is_empty() || lease.revise(deadline, now);
        let mut state = self.desk.shared.state.lock();
        let unconfirmed = confirmed < self.desk.redlock.needed();
        let missing = if alive { missing.without(barred) } else { NodeSet::NONE };
        if unconfirmed {
            state.schedule.failed(generation, now);
        } else if alive {
            state.schedule.renewed(generation, first_sent);
            drop(state);
            let (claim, took) = (&lease.claim, now.after(first_sent));
            self.desk.redlock.observer().renewed(claim.key.name(), &claim.id, margin, took);
        }
        Settled { missing, unconfirmed }
    }

    /// Asks over the renewer's own connections. It is broken off for renewals that fall due meanwhile, `delay` after it has
    /// begun, and for one whose lease has no more left than it has taken at once.
    pub(super) fn ask<C: Call>(
        &mut self,
        round: Round<'_>,
        delay: Duration,
        call: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Answer<C::Reply>) -> Vote,
    ) -> Ballot<C::Reply> {
        let Worker { desk, links, .. } = self;
        let (since, stop) = (clock::now(), desk.limits().1);
        let before_the_end = stop == Moment::NEVER;
        let deadline = round.deadline.min(stop);
        // What a lease with little time left cannot wait for may come in time for another.
        let connect_by =
            since.saturating_add(desk.redlock.operation_timeout().min(CONNECT_MAX)).max(deadline).min(stop);
        let mut made_room = false;
        let mut watch = |now| match desk.watch(since, delay, before_the_end, now) {
            Watch::Until(next) => Some(next),
            Watch::MakeRoom => {
                made_room = true;
                None
            }
            Watch::End => None,
        };
        let wait_until = round.wait_until.min(deadline);
        let round = Round { deadline, wait_until, connect_by, meanwhile: Some(&mut watch), ..round };
        let mut ballot = desk.redlock.ask(links, round, call, vote);
        if made_room && delay == SPARE {
            // Whoever has taken this long is not waited for by the next one too.
            for node in ballot.open().iter() {
                links.0[node].poison();
                ballot.slips[node] = Slip::Failed(Failure::unclear(Reason::TimedOut));
            }
        }
        ballot
    }

    /// Whether what these nodes are asked can be sent at once, and its answer left to come.
    pub(super) fn can_be_left(&self, nodes: NodeSet) -> bool {
        nodes.iter().all(|node| self.links.0[node].is_connected() && self.links.0[node].owes() < AT_ONCE)
    }

    /// Those that there is no connection to, for want of which nothing was sent.
    pub(super) fn unreached<T>(&self, ballot: &Ballot<T>) -> NodeSet {
        let unsent = ballot.nodes_where(|slip| matches!(slip, Slip::Failed(failure) if !failure.sent));
        unsent.iter().filter(|node| !self.links.0[*node].is_connected()).collect()
    }

    pub(super) fn run_errand(&mut self, errand: Errand) {
        let Errand { claim, waiter, was_held, may_be_done, deadline, answer } = errand;
        let patience = deadline.after(clock::now());
        let leaving = Leaving {
            key: &claim.key,
            id: claim.id.as_str().as_bytes(),
            waiter: &waiter,
            was_held,
            open: NodeSet::NONE,
            may_be_done,
        };
        if !patience.is_zero() {
            let redlock = self.desk.redlock.clone();
            let ask = |round: Round<'_>| self.ask(round, SPARE, |_| leaving.call(), Leaving::vote);
            let ending = redlock.release_by(leaving, patience, ask);
            // Nobody may be waiting any more.
            let _ = answer.send(ending);
        }
    }
}

pub(super) fn renewal(lease: &Lease, now: Moment) -> Renewal<'_> {
    Renewal {
        lock: lease.claim.key.lock(),
        id: lease.claim.id.as_str(),
        ttl_ms: lease.claim.ttl_ms(),
        fence: lease.has_to_keep_token(now).then(|| lease.claim.key.fence()),
    }
}

/// The first refusal among what the nodes said that may be about one of the locks.
fn refusal<T>(ballot: &Ballot<T>) -> Option<(&str, &str)> {
    ballot.slips.iter().find_map(|slip| match slip {
        Slip::Failed(failure) if failure.is_about_the_server() => None,
        Slip::Failed(Failure { reason: Reason::Refused { code, message }, .. }) => Some((&**code, &**message)),
        _ => None,
    })
}
