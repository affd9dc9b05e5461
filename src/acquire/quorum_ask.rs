//! One round: requests the lock from the nodes, and releases the votes if the round is lost.

use std::time::Duration;

use super::{Acquirer, attempt::Attempt, backoff::release_wait_until};
use crate::{
    backend::{
        redis::{
            Ack, Exchange, NodeError, NodeErrorKind,
            requests_and_replies::{Acquire, AcquireMode, AcquireReply, Release, ReleaseReply},
        },
        redlock::{
            self, AskError, BroadcastOptions, EXPIRY_SLACK, NodeConnections, Response,
            most_reported_holder,
        },
    },
    core::{
        holder::Holder,
        node_answer::{NodeAnswer, Vote},
        quorum::{NodeSet, Verdict, quorum},
    },
    sys::clock::{self, Moment},
};

/// Minimum request timeout, because a third of a short lease would be too little.
const REQUEST_TIMEOUT_MIN: Duration = Duration::from_millis(50);

/// A release in flight to a node. Until it is confirmed or has expired, the node is asked for
/// nothing else, because the release could take effect after a later request.
pub(super) struct PendingRelease {
    pub(super) node: usize,
    /// Time from which the node ignores the release.
    pub(super) expires_at: Moment,
    /// Shows whether the reply has arrived; `None` if the reply was lost.
    ack: Option<Ack>,
}

impl PendingRelease {
    fn is_acknowledged(&self) -> bool {
        self.ack.as_ref().is_some_and(Ack::is_acknowledged)
    }

    /// Whether the node may have ignored the release as expired. A late reply may report that.
    fn may_have_expired(&self, now: Moment) -> bool {
        now >= self.expires_at
            || self.is_acknowledged() && now.saturating_add(EXPIRY_SLACK) >= self.expires_at
    }
}

/// Responses of the nodes to one round.
pub(super) struct AcquireResponses {
    pub(super) verdict: Verdict,
    responses: redlock::Responses<AcquireReply>,
    asked_all: bool,
    claim_window_only: bool,
}

impl AcquireResponses {
    pub(super) fn by_node(&self) -> &[Response<AcquireReply>] {
        &self.responses.by_node
    }

    pub(super) fn votes(&self) -> &[Option<Vote>] {
        &self.responses.votes
    }

    /// Whether all nodes were asked.
    pub(super) fn asked_all(&self) -> bool {
        self.asked_all
    }

    /// Whether the queue node was asked for the claim window only.
    pub(super) fn claim_window_only(&self) -> bool {
        self.claim_window_only
    }

    /// Reply of a node, if it has replied.
    pub(super) fn reply_of(&self, node: usize) -> Option<&AcquireReply> {
        match self.responses.by_node.get(node) {
            Some(Response::Replied(Exchange { reply, .. })) => Some(reply),
            _ => None,
        }
    }

    /// Time at which the request was sent to a node, if the node has replied.
    pub(super) fn sent_at(&self, node: usize) -> Option<Moment> {
        match self.responses.by_node.get(node) {
            Some(Response::Replied(exchange)) => Some(exchange.sent),
            _ => None,
        }
    }

    /// Whether this node keeps the lock for us, whether or not its vote counts.
    pub(super) fn is_held_on(&self, node: usize) -> bool {
        matches!(self.reply_of(node), Some(AcquireReply::Held { .. }))
    }

    fn replies(&self) -> impl Iterator<Item = &AcquireReply> {
        (0..self.responses.by_node.len()).filter_map(|node| self.reply_of(node))
    }

    /// Whether the key has another type on enough nodes to prevent a quorum.
    pub(super) fn is_wrong_type(&self) -> bool {
        let nodes = self.responses.by_node.len();
        let wrong = self.replies().filter(|reply| matches!(reply, AcquireReply::WrongType)).count();
        wrong > nodes - quorum(nodes)
    }

    fn most_reported_holder(&self) -> Option<(usize, &Holder)> {
        most_reported_holder(
            self.replies().filter_map(AcquireReply::holder).map(|holder| (holder, holder)),
        )
    }

    /// Current holder, as most of the nodes report it.
    pub(super) fn holder(&self) -> Option<Holder> {
        if let [Response::Replied(exchange)] = self.responses.by_node.as_slice() {
            return exchange.reply.holder().cloned();
        }
        self.most_reported_holder().map(|(_, holder)| holder.clone())
    }

    /// Whether the vote is split: by these replies, no contender can have a quorum.
    pub(super) fn is_split(&self) -> bool {
        let nodes = self.responses.by_node.len();
        let without_reply = nodes - self.replies().count();
        nodes > 1
            && self.asked_all
            && self
                .most_reported_holder()
                .is_none_or(|(count, _)| count + without_reply < quorum(nodes))
    }

    pub(super) fn node_answers(&self, ctx: &Acquirer) -> Vec<NodeAnswer> {
        self.responses.node_answers(&ctx.redlock, describe)
    }

    pub(super) fn into_error(self, ctx: &Acquirer) -> AskError {
        AskError::from_responses(&ctx.redlock, self.responses, describe)
    }
}

fn describe(reply: &AcquireReply) -> String {
    match reply {
        AcquireReply::Held { .. } => "granted".into(),
        AcquireReply::Busy { holder, .. } | AcquireReply::Queued { holder, .. } => {
            format!("held by {holder}")
        }
        AcquireReply::WrongType => "its key holds something that is not a lock".into(),
        AcquireReply::Expired { .. } => "the request expired".into(),
    }
}

impl Attempt<'_> {
    /// Asks all nodes, or only the queue node. If no quorum grants the lock, releases the votes at
    /// once, except the vote of the head on the queue node.
    pub(super) fn ask(
        &mut self,
        mode: AcquireMode,
        ask_all: bool,
    ) -> Result<AcquireResponses, AskError> {
        let redlock = self.ctx.redlock.clone();
        let now = clock::now();
        let deadline = now.saturating_add(self.request_timeout()).min(self.call_deadline());
        let claim_window_only = self.asks_for_claim_window(mode, ask_all);
        if matches!(mode, AcquireMode::Enqueue | AcquireMode::Poll) {
            self.queue_requested = true;
        }
        let mut connections = redlock.checkout(deadline).map_err(AskError::Node)?;
        self.flush_pending_releases(&mut connections);
        if matches!(mode, AcquireMode::Enqueue | AcquireMode::Poll) {
            self.queued_on = self.queued_on.union(NodeSet::single(self.queue_node));
            self.may_hold = self.may_hold.union(NodeSet::single(self.queue_node));
        }
        let targets = self.targets(ask_all)?;
        let queue_entry =
            if matches!(mode, AcquireMode::Try) { String::new() } else { self.queue_entry() };
        let token_min = self.token_min.unwrap_or_else(|| redlock.token_min());
        let (queue_node, claim, repair_ttl_ms) =
            (self.queue_node, self.claim, self.ctx.repair_ttl_ms(self.claim));
        let window_ms = u64::try_from(self.claim_window().as_millis()).unwrap_or(u64::MAX);
        let request = |node| Acquire {
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: if claim_window_only && node == queue_node {
                window_ms
            } else {
                claim.ttl_ms()
            },
            mode: if node == queue_node { mode } else { AcquireMode::Try },
            queue_entry: if node == queue_node { &queue_entry } else { "" },
            repair_ttl_ms,
            token_min,
        };
        let vote = |node: usize, exchange: &Exchange<AcquireReply>| match exchange.reply {
            AcquireReply::Held { .. }
                if redlock.node(node).quarantine_left(exchange.sent).is_some() =>
            {
                Vote::Unknown
            }
            AcquireReply::Held { .. } => Vote::Yes,
            AcquireReply::Busy { .. } | AcquireReply::Queued { .. } => Vote::No,
            // No contender has the vote of this node, so it must not count as a rejection.
            AcquireReply::WrongType | AcquireReply::Expired { .. } => Vote::Unknown,
        };
        let preferred =
            if self.has_several_nodes() { NodeSet::single(queue_node) } else { NodeSet::EMPTY };
        let options = if ask_all {
            BroadcastOptions { preferred, ..BroadcastOptions::new(targets, deadline) }
        } else {
            BroadcastOptions::awaiting_all(targets, deadline)
        };
        let responses = redlock.ask(&mut connections, options, request, vote);
        let (unanswered, outcome_unknown) = (responses.unanswered(), responses.outcome_unknown());
        if !outcome_unknown.is_empty() {
            self.broken_until = self.broken_until.max(deadline);
        }
        // Nodes that had not replied before may have been asked over another connection now, or not
        // at all, so their earlier requests may still take effect.
        self.broken_until = self.in_flight_until();
        self.unanswered = (unanswered, deadline);
        let verdict = match responses.verdict() {
            _ if !ask_all => self.queue_node_verdict(&responses),
            // A quorum without the queue node must not overtake the queue.
            Verdict::Granted
                if self.has_several_nodes() && responses.votes[queue_node] == Some(Vote::No) =>
            {
                Verdict::Rejected
            }
            verdict => verdict,
        };
        self.needs_full_lease &= verdict == Verdict::Granted;
        let responses =
            AcquireResponses { verdict, responses, asked_all: ask_all, claim_window_only };
        let held: NodeSet = (0..redlock.len()).filter(|node| responses.is_held_on(*node)).collect();
        let may_be_held = held.union(unanswered).union(outcome_unknown);
        self.may_hold = self.may_hold.union(may_be_held);
        if self.has_several_nodes() && ask_all && verdict != Verdict::Granted {
            self.is_head = self.stays_head(mode, &responses);
            let head = if self.is_head { NodeSet::single(queue_node) } else { NodeSet::EMPTY };
            self.release_votes(&mut connections, may_be_held.difference(head), now, deadline);
            // A node that confirmed the release has executed the request, which came before it.
            self.unanswered.0 = self.unanswered.0.intersection(self.may_hold);
        }
        Ok(responses)
    }

    /// Timeout of a request. A short lease leaves no time for a long wait.
    pub(super) fn request_timeout(&self) -> Duration {
        self.ctx.redlock.operation_timeout().min((self.claim.ttl / 3).max(REQUEST_TIMEOUT_MIN))
    }

    /// Whether to ask the queue node to keep the lock for the claim window only. A waiter may keep
    /// the lock there without a quorum. If the waiter dies, the key must not keep the lock from
    /// others for a whole ttl.
    fn asks_for_claim_window(&self, mode: AcquireMode, ask_all: bool) -> bool {
        let expects_to_wait = self.is_head || self.has_lost_rounds();
        self.has_several_nodes()
            && (!ask_all || (!self.needs_full_lease && expects_to_wait && self.can_wait(mode)))
    }

    fn can_wait(&self, mode: AcquireMode) -> bool {
        mode != AcquireMode::Leave && clock::now() < self.wait_deadline
    }

    /// Nodes to ask. A node with a pending release is left out, because the release could take
    /// effect after the request.
    fn targets(&self, ask_all: bool) -> Result<NodeSet, AskError> {
        let pending: NodeSet = self.pending_releases.iter().map(|release| release.node).collect();
        let targets =
            if ask_all { self.ctx.redlock.all_nodes() } else { NodeSet::single(self.queue_node) }
                .difference(pending);
        if targets.is_empty() {
            return Err(AskError::Node(NodeError {
                outcome_unknown: false,
                kind: NodeErrorKind::TimedOut,
            }));
        }
        Ok(targets)
    }

    /// Verdict if only the queue node was asked.
    fn queue_node_verdict(&self, responses: &redlock::Responses<AcquireReply>) -> Verdict {
        match responses.votes.get(self.queue_node) {
            Some(Some(Vote::No)) => Verdict::Rejected,
            _ => Verdict::NoQuorum,
        }
    }

    /// Whether we stay the head of the queue. The head of the queue keeps its vote on the queue
    /// node, so that later contenders give way. Four cases end that: we asked for the full ttl
    /// there; we may not wait any longer; an earlier node reports a holder, so the queue belongs
    /// there; or too few nodes voted yes or no.
    fn stays_head(&self, mode: AcquireMode, responses: &AcquireResponses) -> bool {
        let held_earlier = (0..self.queue_node)
            .any(|node| responses.reply_of(node).is_some_and(|reply| reply.holder().is_some()));
        let wants_to_stay = responses.claim_window_only() && self.can_wait(mode);
        wants_to_stay
            && responses.verdict == Verdict::Rejected
            && responses.is_held_on(self.queue_node)
            && !held_earlier
    }

    fn flush_pending_releases(&mut self, connections: &mut NodeConnections) {
        let now = clock::now();
        // A distant node always replies later than we wait, so read what has arrived since.
        self.pending_releases
            .iter()
            .for_each(|release| self.ctx.redlock.drain_replies(connections, release.node));
        let expired = self
            .pending_releases
            .iter()
            .filter(|release| release.may_have_expired(now))
            .map(|release| release.node);
        let expired: NodeSet = expired.collect();
        self.pending_releases
            .retain(|release| now < release.expires_at && !release.is_acknowledged());
        // A release that was not confirmed in time may have been ignored, so send it again.
        let head = if self.is_head { NodeSet::single(self.queue_node) } else { NodeSet::EMPTY };
        let to_release = std::mem::take(&mut self.to_release)
            .union(expired.intersection(self.may_hold))
            .difference(head);
        if !to_release.is_empty() {
            let timeout = self.ctx.redlock.operation_timeout();
            self.release_votes(connections, to_release, now, now.saturating_add(timeout));
        }
    }

    /// Releases the votes that were won or may have been won. A node executes the release after the
    /// request. If a node does not confirm in time, it is not asked again until it has confirmed or
    /// the release has expired: a late release would free a vote that a later request has won.
    fn release_votes(
        &mut self,
        connections: &mut NodeConnections,
        nodes: NodeSet,
        asked_at: Moment,
        deadline: Moment,
    ) {
        if nodes.is_empty() {
            return;
        }
        let now = clock::now();
        let wait_until = release_wait_until(asked_at, now, self.call_deadline());
        if now >= wait_until {
            // The caller has no time left. Release these votes with the next round, or else in the
            // background.
            self.to_release = self.to_release.union(nodes);
            return;
        }
        let deadline = deadline.max(wait_until);
        let options =
            BroadcastOptions { wait_until, ..BroadcastOptions::awaiting_all(nodes, deadline) };
        let queue_entry = self.queue_entry();
        let claim = self.claim;
        let release = |_| Release {
            key: &claim.key,
            id: claim.id.as_str().as_bytes(),
            queue_entry: &queue_entry,
            expires: true,
        };
        let responses = self.ctx.redlock.ask(connections, options, release, |_, _| Vote::Yes);
        for node in nodes.iter() {
            match &responses.by_node[node] {
                // The node ignored the release, which had expired. We may still hold the lock
                // there.
                Response::Replied(Exchange { reply: ReleaseReply::Expired { .. }, .. }) => {}
                Response::Replied(_) => {
                    self.may_hold = self.may_hold.difference(NodeSet::single(node));
                    self.queued_on = self.queued_on.difference(NodeSet::single(node));
                }
                Response::Failed(failure) if !failure.outcome_unknown => {}
                _ => {
                    let ack = responses
                        .pending_acks
                        .iter()
                        .find(|(of, _)| *of == node)
                        .map(|(_, ack)| ack.clone());
                    self.pending_releases.push(PendingRelease {
                        node,
                        expires_at: deadline.saturating_add(EXPIRY_SLACK),
                        ack,
                    });
                    self.broken_until = self.broken_until.max(deadline);
                }
            }
        }
    }
}
