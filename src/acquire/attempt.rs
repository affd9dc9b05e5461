//! `Attempt`: one acquisition in progress. Decides how to ask next, and how long to wait first.
//!
//! With several nodes the queue is on one of them, the queue node. The waiter at the head of the
//! queue holds the lock on that node. Of all waiters, only the head asks the other nodes.
//! Contenders therefore do not split the votes for long.

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    Acquirer, Residue,
    backoff::{Observation, follower_interval, unsubscribed_poll_interval, vote_backoff},
    quorum_ask::{AcquireResponses, PendingRelease},
    retry::RetryState,
};
use crate::{
    backend::{
        redis::{
            NodeError, NodeErrorKind,
            requests_and_replies::{AcquireMode, AcquireReply},
        },
        redlock::{AskError, Response},
    },
    core::{
        claim::{Claim, Grant, InFlight},
        holder::Holder,
        node_answer::Vote,
        quorum::{NodeDeadlines, NodeSet, Verdict, agreed_token},
        token::FencingToken,
        validity::{deadline_from_grant, deadline_from_sent, needs_immediate_confirmation},
    },
    error::LockError,
    sys::clock::{self, Moment},
    wait::{GrantNotice, WaitHandle, Wake},
};

/// Maximum number of lost rounds after which a caller still retries a split vote, although its wait
/// deadline has passed. Otherwise `try_lock` calls that start together could all fail, although no
/// contender got the lock.
const SPLIT_VOTE_RETRIES_MAX: u32 = 5;
/// Maximum number of rounds in which the nodes may disagree about the fencing token. One more
/// counts as a failure; otherwise a node that never stores the token could cause a tight loop.
const TOKEN_ROUNDS_MAX: u32 = 5;

pub(super) struct Attempt<'a> {
    pub(super) ctx: &'a Acquirer,
    pub(super) claim: &'a Claim,
    pub(super) started: Moment,
    /// Time until which the caller waits for the lock.
    pub(super) wait_deadline: Moment,
    pub(super) wait_handle: Option<WaitHandle>,
    /// Node on which this attempt queues.
    pub(super) queue_node: usize,
    /// A request to join the queue has been sent since `queue_node` last changed.
    pub(super) queue_requested: bool,
    /// Nodes on which we may have a queue entry. Includes a former queue node that has not
    /// confirmed the removal of our entry.
    pub(super) queued_on: NodeSet,
    /// The queue node reported our queue entry in the last round.
    queue_confirmed: bool,
    /// We hold the lock on the queue node, and now need the votes of the other nodes.
    pub(super) is_head: bool,
    /// We had a quorum, but replies were slow. Ask the queue node for the full TTL, instead of the
    /// claim window, before returning the lock.
    pub(super) needs_full_lease: bool,
    /// Nodes that may know our id, as the holder or in the queue.
    pub(super) may_hold: NodeSet,
    /// Nodes on which the lock and the queue entry of our claim must be released before the next
    /// request, for example because the queue node changed.
    pub(super) to_release: NodeSet,
    pub(super) pending_releases: Vec<PendingRelease>,
    /// Latest time at which a request whose reply was lost can still take effect.
    pub(super) broken_until: Moment,
    /// Nodes that had not replied when the last round was decided, and the time until which they
    /// may still execute its request.
    pub(super) unanswered: (NodeSet, Moment),
    /// Token that a quorum must store, once nodes have returned different ones.
    pub(super) token_min: Option<u64>,
    token_rounds: u32,
    /// Rounds lost to other contenders so far.
    lost_rounds: u32,
    /// Current run of failures; `None` once a round has had a usable result.
    pub(super) retry: Option<RetryState>,
    pub(super) holder: Option<Holder>,
    /// Another holder was reported at least once.
    pub(super) contended: bool,
    /// Server time of the last reply that reported us as queued. An earlier grant is ignored,
    /// because we no longer had it when that reply was sent.
    queued_at_us: u64,
}

/// What to do after a round.
enum NextStep {
    Granted(Grant),
    AskAgain,
    WaitUntil(Moment),
}

impl<'a> Attempt<'a> {
    pub(super) fn new(ctx: &'a Acquirer, claim: &'a Claim, wait: Option<Duration>) -> Attempt<'a> {
        let started = clock::now();
        Attempt {
            ctx,
            claim,
            started,
            wait_deadline: wait.map_or(Moment::NEVER, |wait| started.saturating_add(wait)),
            wait_handle: None,
            queue_node: ctx.redlock.preferred_queue_node(),
            queue_requested: false,
            queued_on: NodeSet::EMPTY,
            queue_confirmed: false,
            is_head: false,
            needs_full_lease: false,
            may_hold: NodeSet::EMPTY,
            to_release: NodeSet::EMPTY,
            pending_releases: Vec::new(),
            broken_until: started,
            unanswered: (NodeSet::EMPTY, started),
            token_min: None,
            token_rounds: 0,
            lost_rounds: 0,
            retry: None,
            holder: None,
            contended: false,
            queued_at_us: 0,
        }
    }

    pub(super) fn run(&mut self) -> Result<Grant, LockError> {
        if self.wait_deadline > self.started && self.ctx.listener.is_subscribed() {
            // The subscription is up, so the first request can already join the queue if the lock
            // is taken.
            self.ensure_wait_handle();
        }
        loop {
            let until = match self.step()? {
                NextStep::Granted(grant) => return Ok(grant),
                NextStep::AskAgain => continue,
                NextStep::WaitUntil(until) => until,
            };
            if let Some(grant) = self.wait(until)? {
                return Ok(grant);
            }
        }
    }

    fn step(&mut self) -> Result<NextStep, LockError> {
        self.switch_queue_node();
        self.queue_confirmed = false;
        let (mode, queue_requested_before) = (self.choose_mode(), self.queue_requested);
        let responses = match self.ask(mode, self.should_ask_all(mode)) {
            Ok(responses) => responses,
            Err(error) => return self.on_failure(error).map(NextStep::WaitUntil),
        };
        if responses.is_wrong_type() {
            return Err(self.wrong_type_error());
        }
        if !responses.asked_all() && responses.is_held_on(self.queue_node) {
            (self.is_head, self.retry) = (true, None);
            return Ok(NextStep::AskAgain);
        }
        match responses.verdict {
            Verdict::Granted => self.on_quorum(&responses),
            Verdict::Rejected => {
                self.retry = None;
                self.on_rejected(mode, queue_requested_before, &responses)
            }
            Verdict::Pending | Verdict::NoQuorum => {
                self.on_failure(responses.into_error(self.ctx)).map(NextStep::WaitUntil)
            }
        }
    }

    /// Whether to ask all nodes, and not only the queue node. While other waiters are ahead of us
    /// in the queue, the other nodes can report only one new fact: that a preferred queue node has
    /// recovered.
    fn should_ask_all(&self, mode: AcquireMode) -> bool {
        let expects_contention =
            || self.lost_rounds > 0 || self.ctx.crowd.is_likely(self.claim.key.lock_key());
        !self.has_several_nodes()
            || self.is_head
            || self.needs_full_lease
            || !expects_contention()
            || self.retry.is_some()
            || mode == AcquireMode::Try
            || self.ctx.redlock.may_have_recovered(self.queue_node)
    }

    /// Whether at least one round was lost to other contenders.
    pub(super) fn has_lost_rounds(&self) -> bool {
        self.lost_rounds > 0
    }

    pub(super) fn has_several_nodes(&self) -> bool {
        self.ctx.redlock.len() > 1
    }

    /// Chooses the mode of the next request. Queueing needs a subscription, because a hand-over
    /// skips waiters that the server cannot notify.
    fn choose_mode(&self) -> AcquireMode {
        if clock::now() >= self.wait_deadline {
            if self.queued_on.contains(self.queue_node) {
                AcquireMode::Leave
            } else {
                AcquireMode::Try
            }
        } else if !self.ctx.listener.is_subscribed() {
            AcquireMode::Try
        } else if self.queue_requested || self.queued_on.contains(self.queue_node) {
            // This includes an entry from before the queue moved to another node and back.
            // `Enqueue` would add a second entry, and one of the two would stay in the queue.
            AcquireMode::Poll
        } else if self.wait_handle.is_some() {
            AcquireMode::Enqueue
        } else {
            AcquireMode::Try
        }
    }

    /// Follows the queue if it moved to another node, and marks what we hold on the former one for
    /// release.
    fn switch_queue_node(&mut self) {
        if !self.has_several_nodes() {
            return;
        }
        let queue_node = match self.ctx.listener.queue_node() {
            Some(queue_node) => queue_node,
            None if self.queue_requested || self.is_head => self.queue_node,
            None => self.ctx.redlock.preferred_queue_node(),
        };
        if queue_node != self.queue_node {
            if self.queue_requested || self.is_head {
                self.to_release = self.to_release.union(NodeSet::single(self.queue_node));
            }
            (self.queue_node, self.queue_requested, self.is_head) = (queue_node, false, false);
        }
    }

    /// Handles a quorum of grants. The lock is ours if the quorum keeps it for long enough and
    /// agrees on one token.
    fn on_quorum(&mut self, responses: &AcquireResponses) -> Result<NextStep, LockError> {
        let nodes = self.ctx.redlock.len();
        let claim_window_only =
            responses.claim_window_only() && self.claim_window() < self.claim.ttl;
        let mut deadlines = NodeDeadlines::new(nodes);
        let mut tokens: SmallVec<[u64; 8]> = SmallVec::new();
        let mut first_sent = clock::now();
        for (node, (response, vote)) in
            responses.by_node().iter().zip(responses.votes()).enumerate()
        {
            match (response, vote) {
                (Response::Replied(exchange), Some(Vote::Yes)) => {
                    let kept_for = if claim_window_only && node == self.queue_node {
                        self.claim_window()
                    } else {
                        self.claim.ttl
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
        self.pending_releases.iter().for_each(|release| deadlines.exclude(release.node));
        let now = clock::now();
        let left =
            deadlines.valid_until().map_or(Duration::ZERO, |deadline| deadline.duration_since(now));
        if claim_window_only && needs_immediate_confirmation(left, now.duration_since(first_sent)) {
            self.needs_full_lease = true;
            return Ok(NextStep::AskAgain);
        }
        if left.is_zero() {
            // The replies took longer than the lease. Asking again restores the full lease if the
            // lock is still ours.
            return self
                .on_failure(AskError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut)))
                .map(NextStep::WaitUntil);
        }
        match agreed_token(&tokens, nodes) {
            Ok(token) => {
                if responses.is_held_on(self.queue_node) {
                    self.queued_on = self.queued_on.difference(NodeSet::single(self.queue_node));
                }
                Ok(NextStep::Granted(self.build_grant(token, deadlines, claim_window_only)))
            }
            Err(highest) => {
                self.token_min = Some(highest);
                self.token_rounds += 1;
                if self.token_rounds > TOKEN_ROUNDS_MAX {
                    return self
                        .on_failure(AskError::Node(NodeError::outcome_unknown(
                            NodeErrorKind::TokenDisagreement,
                        )))
                        .map(NextStep::WaitUntil);
                }
                Ok(NextStep::AskAgain)
            }
        }
    }

    /// Handles a round that was lost to other contenders. `queue_requested_before` says whether we
    /// had asked to join this queue before the round.
    fn on_rejected(
        &mut self,
        mode: AcquireMode,
        queue_requested_before: bool,
        responses: &AcquireResponses,
    ) -> Result<NextStep, LockError> {
        self.lost_rounds += 1;
        self.token_min = None;
        if let Some(holder) = responses.holder() {
            if !self.contended {
                self.contended = true;
                self.ctx.redlock.observer().contended(
                    self.claim.key.name(),
                    &self.claim.id,
                    &holder,
                );
            }
            self.holder = Some(if self.has_several_nodes() && responses.asked_all() {
                holder.with_nodes(responses.node_answers(self.ctx))
            } else {
                holder
            });
        }
        let now = clock::now();
        let reply = responses.reply_of(self.queue_node);
        if let Some(AcquireReply::Queued {
            now_us,
            holder,
            position,
            newly_queued,
            no_subscriber,
        }) = reply
        {
            self.queue_confirmed = true;
            self.queued_at_us = *now_us;
            let observation = Observation::new(now, holder, *position);
            if let Some(wait_handle) = &self.wait_handle {
                wait_handle.set_position(*position);
            }
            if let (true, true, Some(wait_handle)) =
                (queue_requested_before, newly_queued, &self.wait_handle)
            {
                // The server lost the queue, and with it the entries of the other waiters in this
                // process.
                wait_handle.wake_same_lock();
            }
            if let (true, Some(wait_handle)) = (no_subscriber, &self.wait_handle) {
                // A hand-over would skip us, because the server has no subscriber on our channel.
                let sent_at = responses.sent_at(self.queue_node).unwrap_or(self.started);
                let resubscribed = wait_handle.invalidate_subscription(self.queue_node, sent_at)
                    && wait_handle.ensure_subscribed(self.wait_deadline);
                return Ok(if resubscribed {
                    NextStep::AskAgain
                } else {
                    NextStep::WaitUntil(
                        now.saturating_add(unsubscribed_poll_interval(self.jitter_seed())),
                    )
                });
            }
            return Ok(NextStep::WaitUntil(observation.next_poll(self.jitter_seed())));
        }
        let pause = vote_backoff(self.lost_rounds, responses.is_split(), self.jitter_seed());
        // The head must ask again before its claim window on the queue node ends.
        let pause = now.saturating_add(if self.is_head {
            pause.min(self.claim_window() / 3)
        } else {
            pause
        });
        if mode == AcquireMode::Leave || now >= self.wait_deadline {
            if responses.is_split()
                && self.lost_rounds <= SPLIT_VOTE_RETRIES_MAX
                && pause < self.call_deadline()
            {
                return Ok(NextStep::WaitUntil(pause));
            }
            let replied = reply.is_some_and(|reply| !matches!(reply, AcquireReply::Expired { .. }));
            if mode == AcquireMode::Leave && replied
                || !(self.queued_on.contains(self.queue_node) || self.is_head)
            {
                // We left the queue, or were never in it.
                self.may_hold = self.may_hold.difference(NodeSet::single(self.queue_node));
                self.queued_on = self.queued_on.difference(NodeSet::single(self.queue_node));
            }
            return Err(self.timeout_error());
        }
        if self.is_head || responses.is_split() {
            return Ok(NextStep::WaitUntil(pause));
        }
        // If the key holds another type, there is no queue to join.
        let has_queue = reply.is_some_and(|reply| !matches!(reply, AcquireReply::WrongType));
        if self.prepare_to_wait() && has_queue {
            return Ok(NextStep::AskAgain);
        }
        Ok(NextStep::WaitUntil(now.saturating_add(unsubscribed_poll_interval(self.jitter_seed()))))
    }

    /// Latest time at which the call returns: the wait deadline plus one operation timeout.
    pub(super) fn call_deadline(&self) -> Moment {
        self.wait_deadline.saturating_add(self.ctx.redlock.operation_timeout())
    }

    /// Gets a wait handle and a subscription for the calling thread. Returns false if there can be
    /// no subscription now.
    fn prepare_to_wait(&mut self) -> bool {
        let wait_deadline = self.wait_deadline;
        self.ensure_wait_handle().ensure_subscribed(wait_deadline)
    }

    fn ensure_wait_handle(&mut self) -> &WaitHandle {
        let Attempt { ctx, claim, wait_handle, .. } = self;
        wait_handle
            .get_or_insert_with(|| ctx.listener.register(claim.key.lock_key(), claim.id.as_str()))
    }

    /// Sleeps until it is time to ask again, or until the lock is granted.
    fn wait(&mut self, mut until: Moment) -> Result<Option<Grant>, LockError> {
        let (wait_deadline, call_deadline) = (self.wait_deadline, self.call_deadline());
        // With several nodes, a waiter that is not queued must ask again itself in order to queue.
        let polls_itself = self.retry.is_some()
            || self.is_head
            || (self.has_several_nodes() && !self.queue_confirmed);
        for release in &self.pending_releases {
            until = until.min(release.expires_at);
        }
        let polls_itself = polls_itself || !self.pending_releases.is_empty();
        // Even a wait for a server to come back needs a handle, because a shutdown must wake it.
        let wait_handle = self.ensure_wait_handle();
        loop {
            // After the wait deadline, rounds continue until the call deadline.
            let bound = if clock::now() < wait_deadline { wait_deadline } else { call_deadline };
            match wait_handle.wait(until.min(bound)) {
                Wake::Granted(notice) => {
                    let grant = self.accept_grant(notice);
                    if let (None, Some(wait_handle)) = (&grant, &self.wait_handle) {
                        // This thread now asks again, and keeps its handle. Another thread must
                        // read the subscription meanwhile.
                        wait_handle.promote_follower();
                    }
                    return Ok(grant);
                }
                Wake::Recheck => return Ok(None),
                Wake::Closed => return Err(LockError::Shutdown),
                // One thread polls for all waiters of this lock in the process. The others only
                // check regularly whether they have become the first.
                Wake::Timeout
                    if clock::now() < wait_deadline
                        && !polls_itself
                        && !wait_handle.is_first_in_process() =>
                {
                    until = clock::now().saturating_add(follower_interval(wait_handle.number()));
                }
                Wake::Timeout => return Ok(None),
            }
        }
    }

    /// Returns the grant if the message alone is enough to hold the lock. Otherwise the caller asks
    /// again. If the message is stale, the reply shows whether we hold the lock or are still
    /// queued. If the server is distant, the reply grants the full ttl. With several nodes, a grant
    /// message only makes us the head of the queue, which then asks all nodes.
    fn accept_grant(&mut self, notice: GrantNotice) -> Option<Grant> {
        if self.has_several_nodes() {
            self.is_head = true;
            return None;
        }
        // Our queue entry set the duration. Do not trust a longer one in the message.
        let granted_for =
            Duration::from_millis(notice.px_ms).min(self.claim.ttl).min(self.ctx.claim_window);
        let now = clock::now();
        let clock_sample = self.ctx.redlock.node(self.queue_node).clock_sample()?;
        let deadline = deadline_from_grant(&clock_sample, notice.granted_at_us, granted_for, now);
        if notice.granted_at_us < self.queued_at_us
            || deadline.duration_since(now) < granted_for / 4
        {
            log_safely!(debug, "a grant of {:?} arrived too late to be used", self.claim.key);
            return None;
        }
        if needs_immediate_confirmation(deadline.duration_since(now), clock_sample.round_trip()) {
            return None;
        }
        let mut deadlines = NodeDeadlines::new(1);
        deadlines.confirm(0, deadline);
        self.queued_on = NodeSet::EMPTY;
        Some(self.build_grant(notice.token, deadlines, true))
    }

    fn build_grant(&self, token: u64, node_deadlines: NodeDeadlines, provisional: bool) -> Grant {
        let may_be_in_flight = clock::now() < self.broken_until;
        let queue_entry = if !self.queued_on.is_empty() || may_be_in_flight {
            self.queue_entry()
        } else {
            String::new()
        };
        let (unanswered, unanswered_until) = self.unanswered;
        let in_flight = InFlight { broken_until: self.broken_until, unanswered, unanswered_until };
        Grant {
            token: FencingToken(token),
            node_deadlines,
            provisional,
            in_flight,
            may_hold: self.may_hold,
            queue_entry,
        }
    }

    pub(super) fn timeout_error(&mut self) -> LockError {
        let name = self.claim.key.name().to_owned();
        let server = self.ctx.redlock.label().clone();
        let holder = self.holder.take().map(Box::new);
        match holder {
            Some(holder) if self.wait_deadline == self.started => {
                LockError::Held { name, holder, server }
            }
            holder => LockError::Timeout {
                name,
                holder,
                waited: clock::now().duration_since(self.started),
                server,
            },
        }
    }

    fn wrong_type_error(&self) -> LockError {
        LockError::WrongType {
            name: self.claim.key.name().to_owned(),
            key: self.claim.key.lock_key().to_owned(),
            server: self.ctx.redlock.label().clone(),
        }
    }

    pub(super) fn residue(&self) -> Option<Residue> {
        let in_flight_until = self.in_flight_until();
        let may_be_in_flight = clock::now() < in_flight_until;
        let nodes = if may_be_in_flight {
            self.ctx.redlock.all_nodes()
        } else {
            self.may_hold.union(self.to_release)
        };
        let queue_entry = if may_be_in_flight || !self.queued_on.is_empty() {
            self.queue_entry()
        } else {
            String::new()
        };
        (!nodes.is_empty()).then_some(Residue { queue_entry, in_flight_until, nodes })
    }

    /// Latest time at which a request that has not been answered can still take effect.
    pub(super) fn in_flight_until(&self) -> Moment {
        let (unanswered, until) = self.unanswered;
        if unanswered.is_empty() { self.broken_until } else { self.broken_until.max(until) }
    }

    /// How long a grant keeps the lock for us until it is confirmed.
    pub(super) fn claim_window(&self) -> Duration {
        self.ctx.claim_window_for(self.claim)
    }

    pub(super) fn queue_entry(&self) -> String {
        self.ctx.queue_entry(self.claim)
    }

    pub(super) fn jitter_seed(&self) -> u64 {
        clock::now().as_nanos() ^ self.wait_handle.as_ref().map_or(0, WaitHandle::number)
    }
}
