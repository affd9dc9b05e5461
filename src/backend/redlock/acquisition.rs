//! `QuorumAcquisition`: one claim on several nodes.
//!
//! The queue is on one of the nodes, the queue node. The waiter at the head of the queue holds the
//! lock on that node. A waiter behind others asks only the queue node, unless its last round failed
//! or an earlier node may have recovered. So does a new claim for a lock that was contended when
//! this process last asked for it. Contenders therefore do not split the votes for long.

mod lost_rounds;
mod queue_position;
mod token_agreement;

use std::time::Duration;

use smallvec::SmallVec;

use self::{
    lost_rounds::LostRounds, queue_position::QueuePosition, token_agreement::TokenAgreement,
};
use super::{
    BroadcastOptions, Redlock,
    footprint::Footprint,
    responses::Response,
    round::{Round, vote},
    vote_releases::VoteReleases,
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Answer, Asking, Contention, QueuePlace,
        error::BackendError,
        redis::{
            Exchange, NodeError, NodeErrorKind,
            requests::{Acquire, AcquireMode, AcquireReply},
        },
    },
    core::{
        claim::{Grant, GrantNotice, Residue},
        node_reply::Vote,
        quorum::{NodeDeadlines, NodeSet, Verdict, agreed_token, prevents_quorum},
        token::FencingToken,
        validity::{deadline_from_sent, needs_immediate_confirmation, request_timeout},
    },
    sys::clock::{self, Moment},
};

pub(super) struct QuorumAcquisition<'a> {
    redlock: &'a Redlock,
    request: AcquireRequest<'a>,
    queue: QueuePosition,
    /// We had a quorum, but replies were slow. Ask the queue node for the full TTL, instead of the
    /// claim window, before returning the lock.
    needs_full_lease: bool,
    footprint: Footprint,
    releases: VoteReleases,
    token: TokenAgreement,
    lost_rounds: LostRounds,
    /// The last round had no usable result.
    is_failing: bool,
}

impl<'a> QuorumAcquisition<'a> {
    pub(super) fn new(redlock: &'a Redlock, request: AcquireRequest<'a>) -> QuorumAcquisition<'a> {
        QuorumAcquisition {
            redlock,
            request,
            queue: QueuePosition::new(redlock.preferred_queue_node()),
            needs_full_lease: false,
            footprint: Footprint::new(clock::now()),
            releases: VoteReleases::default(),
            token: TokenAgreement::new(),
            lost_rounds: LostRounds::default(),
            is_failing: false,
        }
    }

    /// Follows the queue if it moved to another node, and marks what we hold on the former one for
    /// release.
    fn follow_queue(&mut self, place: Option<QueuePlace>) {
        let queue_node = match place {
            Some(QueuePlace(node)) => node,
            None if self.queue.is_in_use() => self.queue.node(),
            None => self.redlock.preferred_queue_node(),
        };
        let former = self.queue.follow_to(queue_node);
        self.releases.to_release = self.releases.to_release.union(former);
    }

    fn mode(&self, asking: Asking) -> AcquireMode {
        let may_be_queued = self.footprint.queued_on.contains(self.queue.node());
        match asking {
            Asking::Last if may_be_queued => AcquireMode::Leave,
            Asking::Last | Asking::Try => AcquireMode::Try,
            // This includes an entry from before the queue moved to another node and back.
            // `Enqueue` would add a second entry, and one of the two would stay in the queue.
            Asking::Queue if self.queue.is_requested() || may_be_queued => AcquireMode::Poll,
            Asking::Queue => AcquireMode::Enqueue,
        }
    }

    /// Whether to ask all nodes, and not only the queue node. While other waiters are ahead of us
    /// in the queue, the other nodes can report only one new fact: that a preferred queue node has
    /// recovered. They would also give us votes that the head of the queue needs.
    fn should_ask_all(&self, mode: AcquireMode) -> bool {
        self.queue.is_head()
            || self.needs_full_lease
            || !self.expects_contention()
            || self.is_failing
            || mode == AcquireMode::Try
            || self.redlock.may_have_recovered(self.queue.node())
    }

    fn expects_contention(&self) -> bool {
        self.lost_rounds.any() || self.redlock.contended_locks.contains(&self.request.claim.key)
    }

    /// Asks all nodes, or only the queue node. If all were asked and no quorum grants the lock,
    /// releases the votes at once, except the vote of the head on the queue node.
    fn run_round(&mut self, mode: AcquireMode, ask_all: bool) -> Result<Round, BackendError> {
        let (redlock, request, queue_node) = (self.redlock, self.request, self.queue.node());
        let claim = request.claim;
        let timeout = request_timeout(redlock.operation_timeout(), claim.ttl);
        let deadline_at = |now: Moment| now.saturating_add(timeout).min(request.call_deadline);
        let claim_window_only = self.asks_for_claim_window(mode, ask_all);
        let queues = matches!(mode, AcquireMode::Enqueue | AcquireMode::Poll);
        let mut connections = redlock.checkout(deadline_at(clock::now()))?;
        let (footprint, releases) = (&mut self.footprint, &mut self.releases);
        let kept = self.queue.vote_of_head();
        releases.send_due(redlock, &mut connections, footprint, &request, kept);
        // The wait for connections, and for releases, takes no time from the request.
        let now = clock::now();
        let deadline = deadline_at(now);
        // A pending release could take effect after the request.
        let wanted = if ask_all { redlock.all_nodes() } else { NodeSet::single(queue_node) };
        let targets = wanted.difference(releases.pending());
        if targets.is_empty() || now >= deadline {
            let timed_out = NodeError::not_applied(NodeErrorKind::TimedOut);
            return Err(BackendError::Node(timed_out));
        }
        let known_before = footprint.may_hold;
        if queues && targets.contains(queue_node) {
            self.queue.on_requested();
            footprint.enqueue(queue_node);
        }
        let queue_entry =
            if mode == AcquireMode::Try { String::new() } else { request.queue_entry() };
        let token_min = self.token.min().unwrap_or_else(|| redlock.token_min());
        let token_known = self.token.take_known();
        let window_ms = u64::try_from(request.claim_window.as_millis()).unwrap_or(u64::MAX);
        let queue_ttl_ms = if claim_window_only { window_ms } else { claim.ttl_ms() };
        let acquire = |node| Acquire {
            kind: claim.kind,
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: if node == queue_node { queue_ttl_ms } else { claim.ttl_ms() },
            mode: if node == queue_node { mode } else { AcquireMode::Try },
            queue_entry: if node == queue_node { &queue_entry } else { "" },
            repair_ttl_ms: request.repair_ttl_ms,
            token_min: Some(token_min),
            is_token_decided: token_known.contains(node),
        };
        let vote_of = |node: usize, exchange: &Exchange<AcquireReply>| {
            let is_quarantined = redlock.node(node).quarantine_left(exchange.sent).is_some();
            vote(&exchange.reply, is_quarantined)
        };
        let options = if ask_all {
            BroadcastOptions {
                preferred: NodeSet::single(queue_node),
                preferred_wait: redlock.queue_node_wait(queue_node, claim.kind),
                ..BroadcastOptions::new(targets, deadline)
            }
        } else {
            BroadcastOptions::awaiting_all(targets, deadline)
        };
        let responses = redlock.ask(&mut connections, options, acquire, vote_of);
        let (unanswered, outcome_unknown) = (responses.unanswered(), responses.outcome_unknown());
        footprint.on_round(unanswered, outcome_unknown, known_before, deadline);
        releases.drop_unsent(responses.nodes_where(|one| matches!(one, Response::Replied(_))));
        let queue_vote = responses.votes.get(queue_node).copied().flatten();
        let verdict = match responses.verdict() {
            _ if !ask_all && queue_vote == Some(Vote::No) => Verdict::Rejected,
            _ if !ask_all => Verdict::NoQuorum,
            // A quorum without the queue node must not overtake the queue.
            Verdict::Granted if queue_vote == Some(Vote::No) => Verdict::Rejected,
            verdict => verdict,
        };
        self.needs_full_lease &= verdict == Verdict::Granted;
        let round = Round { verdict, responses, asked_all: ask_all, claim_window_only };
        let held: NodeSet = (0..redlock.len()).filter(|node| round.is_held_on(*node)).collect();
        let may_be_held = held.union(unanswered).union(outcome_unknown);
        footprint.may_hold = footprint.may_hold.union(may_be_held);
        if ask_all && verdict != Verdict::Granted {
            self.queue.set_head(self.is_head_after(mode, &round));
            let kept = self.queue.vote_of_head();
            let (footprint, to_release) = (&mut self.footprint, may_be_held.difference(kept));
            let connections = &mut connections;
            let releases = &mut self.releases;
            releases.send(redlock, connections, footprint, &request, to_release, now, deadline);
            // A node that confirmed the release has executed the request, which came before it.
            let in_flight = &mut footprint.in_flight;
            in_flight.unanswered = in_flight.unanswered.intersection(footprint.may_hold);
        }
        Ok(round)
    }

    /// Whether to ask the queue node to keep the lock for the claim window only. A waiter may keep
    /// the lock there without a quorum. If the waiter dies, the key must not keep the lock from
    /// others for a whole ttl.
    fn asks_for_claim_window(&self, mode: AcquireMode, ask_all: bool) -> bool {
        let expects_to_wait = self.queue.is_head() || self.lost_rounds.any();
        !ask_all || (!self.needs_full_lease && expects_to_wait && self.can_wait(mode))
    }

    fn can_wait(&self, mode: AcquireMode) -> bool {
        mode != AcquireMode::Leave && clock::now() < self.request.wait_deadline
    }

    /// Whether we are the head of the queue after a round without a quorum. The head keeps its vote
    /// on the queue node, so that later contenders give way. We are not the head in five cases: we
    /// asked for the full ttl there; we may not wait any longer; an earlier node reports a holder,
    /// so the queue belongs there; too few nodes voted yes or no; or the queue node does not keep
    /// the lock for us. If only its reply is late, the head stays the head until the next reply:
    /// a release would hand its vote, or its place, to the next waiter.
    fn is_head_after(&self, mode: AcquireMode, round: &Round) -> bool {
        let queue_node = self.queue.node();
        let held_earlier = self
            .redlock
            .preferred_to(queue_node)
            .any(|node| round.reply_of(node).is_some_and(|reply| reply.holder().is_some()));
        let is_late = round.responses.unanswered().contains(queue_node);
        let keeps_vote = round.is_held_on(queue_node)
            || (is_late && self.queue.is_head() && mode == AcquireMode::Poll);
        round.claim_window_only
            && self.can_wait(mode)
            && round.verdict == Verdict::Rejected
            && keeps_vote
            && !held_earlier
    }

    fn failed(&mut self, error: BackendError) -> Answer {
        self.is_failing = true;
        Answer::Failed(error)
    }

    /// Handles a quorum of grants. The lock is ours if the quorum keeps it for long enough and
    /// agrees on one token.
    fn on_quorum(&mut self, round: &Round) -> Answer {
        let (nodes, claim) = (self.redlock.len(), self.request.claim);
        let claim_window_only = round.claim_window_only && self.request.claim_window < claim.ttl;
        let mut deadlines = NodeDeadlines::new(nodes);
        let mut tokens: SmallVec<[u64; 8]> = SmallVec::new();
        let mut first_sent = clock::now();
        for (node, (response, vote)) in
            round.responses.by_node.iter().zip(&round.responses.votes).enumerate()
        {
            match (response, vote) {
                (Response::Replied(exchange), Some(Vote::Yes)) => {
                    let kept_for = if claim_window_only && node == self.queue.node() {
                        self.request.claim_window
                    } else {
                        claim.ttl
                    };
                    deadlines.confirm(node, deadline_from_sent(exchange.sent, kept_for));
                    first_sent = first_sent.min(exchange.sent);
                    tokens.extend(exchange.reply.token());
                }
                (Response::Replied(_), Some(Vote::No)) => deadlines.revoke(node),
                _ => {}
            }
        }
        // If a release is still in flight to a node, do not count that node: it could confirm a
        // renewal first, and then execute the release.
        self.releases.pending().iter().for_each(|node| deadlines.exclude(node));
        let now = clock::now();
        let left =
            deadlines.valid_until().map_or(Duration::ZERO, |deadline| deadline.duration_since(now));
        if claim_window_only && needs_immediate_confirmation(left, now.duration_since(first_sent)) {
            self.needs_full_lease = true;
            return Answer::Undecided;
        }
        let failed = |kind| BackendError::Node(NodeError::outcome_unknown(kind));
        if left.is_zero() {
            // The replies took longer than the lease. Asking again restores the full lease if the
            // lock is still ours.
            return self.failed(failed(NodeErrorKind::TimedOut));
        }
        match agreed_token(&tokens, nodes) {
            Ok(token) => {
                if round.is_held_on(self.queue.node()) {
                    let queue_node = NodeSet::single(self.queue.node());
                    self.footprint.queued_on = self.footprint.queued_on.difference(queue_node);
                }
                Answer::Granted(self.grant(token, first_sent, deadlines, claim_window_only))
            }
            Err(highest) => {
                let granted_on = round.responses.nodes_voting(Vote::Yes);
                if !self.token.on_disagreement(highest, granted_on) {
                    return self.failed(failed(NodeErrorKind::TokenDisagreement));
                }
                Answer::Undecided
            }
        }
    }

    /// Whether nobody has the lock, or can get it, because too many nodes are in quarantine.
    fn is_prevented_by_quarantine(&self, round: &Round) -> bool {
        let is_quarantined = |node: &usize| {
            round.sent_at(*node).is_some_and(|sent| !self.redlock.votes_at(*node, sent))
        };
        let nodes = self.redlock.len();
        let quarantined = (0..nodes).filter(is_quarantined).count();
        round.is_split() && prevents_quorum(quarantined, nodes)
    }

    /// Handles a round that was lost to other contenders.
    fn on_rejected(&mut self, mode: AcquireMode, round: &Round) -> Contention {
        self.lost_rounds.add(round.asked_all);
        self.token.on_rejected();
        self.is_failing = false;
        let holder = round.holder(self.queue.node()).map(|holder| match round.asked_all {
            true => holder.with_nodes(round.node_replies(self.redlock)),
            false => holder,
        });
        let (queue, footprint) = (&mut self.queue, &mut self.footprint);
        let lost = &self.lost_rounds;
        let next = lost.next_step(&self.request, mode, queue, footprint, round, clock::now());
        Contention { holder, next }
    }

    fn grant(
        &self,
        token: u64,
        since: Moment,
        node_deadlines: NodeDeadlines,
        provisional: bool,
    ) -> Grant {
        let may_be_left = !self.footprint.queued_on.is_empty()
            || clock::now() < self.footprint.in_flight.broken_until;
        Grant {
            token: FencingToken(token),
            since,
            node_deadlines,
            provisional,
            in_flight: self.footprint.in_flight,
            may_hold: self.footprint.may_hold,
            queue_entry: if may_be_left { self.request.queue_entry() } else { String::new() },
            is_token_in_fence: false,
        }
    }
}

impl Acquisition for QuorumAcquisition<'_> {
    fn ask(&mut self, asking: Asking, place: Option<QueuePlace>) -> Answer {
        self.follow_queue(place);
        self.queue.begin_round();
        let mode = self.mode(asking);
        let round = match self.run_round(mode, self.should_ask_all(mode)) {
            Ok(round) => round,
            Err(error) => return self.failed(error),
        };
        if round.is_wrong_type() {
            return Answer::WrongType;
        }
        if !round.asked_all && round.is_held_on(self.queue.node()) {
            self.queue.set_head(true);
            self.is_failing = false;
            return Answer::HeadOfQueue;
        }
        match round.verdict {
            Verdict::Granted => self.on_quorum(&round),
            Verdict::Rejected if !self.is_prevented_by_quarantine(&round) => {
                Answer::Contended(self.on_rejected(mode, &round))
            }
            Verdict::Rejected | Verdict::Pending | Verdict::NoQuorum => {
                self.failed(round.into_error(self.redlock))
            }
        }
    }

    /// The message only makes us the head of the queue, which then asks all nodes.
    fn on_grant_message(&mut self, _: GrantNotice) -> Option<Grant> {
        self.queue.set_head(true);
        None
    }

    fn put_off_until(&self) -> Moment {
        self.releases.next_due()
    }

    /// A waiter that is not queued must ask again itself in order to queue.
    fn must_ask_itself(&self) -> bool {
        self.queue.is_head() || !self.queue.is_confirmed() || self.releases.is_unfinished()
    }

    fn residue(&self) -> Option<Residue> {
        let (all, to_release) = (self.redlock.all_nodes(), self.releases.to_release);
        self.footprint.residue(clock::now(), all, to_release, || self.request.queue_entry())
    }
}

impl Drop for QuorumAcquisition<'_> {
    fn drop(&mut self) {
        self.redlock.contended_locks.record(&self.request.claim.key, self.lost_rounds.any());
    }
}
