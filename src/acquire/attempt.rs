//! One acquisition under way: how to ask next, and how long to wait before that.
//!
//! With several nodes the line is on one of them. Whoever stands at its head has the lock on that
//! node, and asks all of them; the others wait. So contenders do not split the votes for long, and
//! only one of them asks.

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    Acquirer, Residue,
    backoff::{Observation, follower_interval, unsubscribed_poll_interval, vote_backoff},
    quorum_ask::{AcquireResponses, PendingRelease},
    retry::RetryState,
    wait_handle::WaitHandle,
    wait_registry::{GrantNotice, Wake},
};
use crate::{
    clock::{self, Moment},
    error::LockError,
    grant::{
        Claim, Grant, InFlight, deadline_from_grant, deadline_from_sent,
        needs_immediate_confirmation,
    },
    holder::Holder,
    node::{
        NodeError, NodeErrorKind,
        requests::{AcquireMode, AcquireReply},
    },
    redlock::{AskError, NodeDeadlines, NodeSet, Response, Verdict, Vote, agreed_token},
    token::FencingToken,
};

/// So often a caller who does not want to wait asks again when the votes were split, and nobody got
/// the lock.
const SPLIT_VOTE_RETRIES_MAX: u32 = 5;
/// So often nodes are asked to agree on a token before that counts as a failure.
const TOKEN_ROUNDS_MAX: u32 = 5;

pub(super) struct Attempt<'a> {
    pub(super) ctx: &'a Acquirer,
    pub(super) claim: &'a Claim,
    pub(super) started: Moment,
    /// The end of the caller's patience.
    pub(super) wait_deadline: Moment,
    pub(super) wait_handle: Option<WaitHandle>,
    /// The node on which to stand in line.
    pub(super) queue_node: usize,
    /// A request to join the line has been sent since it was last on another node.
    pub(super) queue_requested: bool,
    /// The nodes in whose line we may stand; also one that went away and has not confirmed that we
    /// have left it.
    pub(super) queued_on: NodeSet,
    /// It said so when it was last asked.
    queue_confirmed: bool,
    /// The lock is ours on that node, and we have to win the others.
    pub(super) is_head: bool,
    /// The votes are there, but have come so slowly that the node with the line, which keeps the
    /// lock for the claim window, is to keep it for longer.
    pub(super) needs_full_lease: bool,
    /// Where our id may be: as the holder's, or in the line.
    pub(super) may_hold: NodeSet,
    /// Nodes where it has to be taken back before anything else, since the line has moved.
    pub(super) to_release: NodeSet,
    pub(super) pending_releases: Vec<PendingRelease>,
    /// Until when a request whose answer was lost may still be carried out.
    pub(super) broken_until: Moment,
    /// The nodes that had not answered when the last ask was decided, and until when they may
    /// carry it out.
    pub(super) unanswered: (NodeSet, Moment),
    /// What token a quorum is to store, once they have given different ones.
    pub(super) token_min: Option<u64>,
    token_rounds: u32,
    /// Votes lost so far.
    lost_rounds: u32,
    /// Nothing but failures has come back since the last answer.
    pub(super) retry: Option<RetryState>,
    pub(super) holder: Option<Holder>,
    /// Somebody was seen to stand in the way.
    pub(super) contended: bool,
    /// The server's time when it last told us that we were in line: whatever it granted before is
    /// void.
    queued_at_us: u64,
}

/// What to do next.
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
            // Where waiting is usual, the first ask takes a place in line, if the lock is not free.
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

    /// Whether all nodes are asked, or only the one with the line: as long as others stand before
    /// us there, the rest would say nothing new, but that a node that everybody prefers is
    /// back.
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

    /// Whether others stood in the way.
    pub(super) fn has_lost_rounds(&self) -> bool {
        self.lost_rounds > 0
    }

    pub(super) fn has_several_nodes(&self) -> bool {
        self.ctx.redlock.len() > 1
    }

    /// How to ask now. Waiting needs a line: a waiter that cannot be told of its grant is passed
    /// over.
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
            // Also where we stood before the line moved: a second place would be left behind.
            AcquireMode::Poll
        } else if self.wait_handle.is_some() {
            AcquireMode::Enqueue
        } else {
            AcquireMode::Try
        }
    }

    /// The line may have moved to another node; what we have on the former one goes back.
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

    /// A quorum keeps the lock for us. It is ours if it does so for long enough, and under one
    /// token.
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
                (Response::Replied(answer), Some(Vote::Yes)) => {
                    let kept_for = if claim_window_only && node == self.queue_node {
                        self.claim_window()
                    } else {
                        self.claim.ttl
                    };
                    deadlines.confirm(node, deadline_from_sent(answer.sent, kept_for));
                    first_sent = first_sent.min(answer.sent);
                    tokens.extend(answer.reply.token());
                }
                (Response::Replied(_), Some(Vote::No)) => deadlines.revoke(node),
                _ => {}
            }
        }
        // A release that is still on its way there would take away what a renewal finds.
        self.pending_releases.iter().for_each(|release| deadlines.exclude(release.node));
        let now = clock::now();
        let left =
            deadlines.valid_until().map_or(Duration::ZERO, |deadline| deadline.duration_since(now));
        if claim_window_only && needs_immediate_confirmation(left, now.duration_since(first_sent)) {
            self.needs_full_lease = true;
            return Ok(NextStep::AskAgain);
        }
        if left.is_zero() {
            // The answers took longer than the lease. Asking again makes it whole, if it is still
            // ours.
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

    /// Others keep us from a quorum. `stood` says whether we have stood in this line since it was
    /// last moved.
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
                // The server has lost the line, and with it the places of our neighbours.
                wait_handle.wake_same_lock();
            }
            if let (true, Some(wait_handle)) = (no_subscriber, &self.wait_handle) {
                // We would be passed over.
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
        // The head must be back before the node with the line takes it for dead.
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
                // Left the line, or never was in it.
                self.may_hold = self.may_hold.difference(NodeSet::single(self.queue_node));
                self.queued_on = self.queued_on.difference(NodeSet::single(self.queue_node));
            }
            return Err(self.timeout_error());
        }
        if self.is_head || responses.is_split() {
            return Ok(NextStep::WaitUntil(pause));
        }
        // There is no line where the key is of another type.
        let has_queue = reply.is_some_and(|reply| !matches!(reply, AcquireReply::WrongType));
        if self.prepare_to_wait() && has_queue {
            return Ok(NextStep::AskAgain);
        }
        Ok(NextStep::WaitUntil(now.saturating_add(unsubscribed_poll_interval(self.jitter_seed()))))
    }

    /// The last moment for the call: the caller's patience, and one operation timeout.
    pub(super) fn call_deadline(&self) -> Moment {
        self.wait_deadline.saturating_add(self.ctx.redlock.operation_timeout())
    }

    /// Gets the calling thread a ticket and the line up; false when there is none to be had now.
    fn prepare_to_wait(&mut self) -> bool {
        let limit = self.wait_deadline;
        self.ensure_wait_handle().ensure_subscribed(limit)
    }

    fn ensure_wait_handle(&mut self) -> &WaitHandle {
        let Attempt { ctx: on, claim, wait_handle: ticket, .. } = self;
        ticket.get_or_insert_with(|| on.listener.register(claim.key.lock_key(), claim.id.as_str()))
    }

    /// Sleeps until it is time to ask again, or the lock is handed over.
    fn wait(&mut self, mut until: Moment) -> Result<Option<Grant>, LockError> {
        let (limit, hard_limit) = (self.wait_deadline, self.call_deadline());
        // Who is not in line on one of several nodes has to get there itself.
        let polls_itself = self.retry.is_some()
            || self.is_head
            || (self.has_several_nodes() && !self.queue_confirmed);
        // Waiting for a server to come back takes a ticket too: shutting down must wake us.
        for release in &self.pending_releases {
            until = until.min(release.expires_at);
        }
        let polls_itself = polls_itself || !self.pending_releases.is_empty();
        let wait_handle = self.ensure_wait_handle();
        loop {
            // Past the limit, asking goes on until the hard limit.
            let bound = if clock::now() < limit { limit } else { hard_limit };
            match wait_handle.wait(until.min(bound)) {
                Wake::Granted(notice) => {
                    let grant = self.accept_grant(notice);
                    if let (None, Some(wait_handle)) = (&grant, &self.wait_handle) {
                        // It is off to ask instead of leaving, so somebody else has to listen.
                        wait_handle.promote_follower();
                    }
                    return Ok(grant);
                }
                Wake::Recheck => return Ok(None),
                Wake::Closed => return Err(LockError::Shutdown),
                // One thread looks for all that wait here; the others only keep time.
                Wake::Timeout
                    if clock::now() < limit
                        && !polls_itself
                        && !wait_handle.is_first_in_process() =>
                {
                    until = clock::now().saturating_add(follower_interval(wait_handle.number()));
                }
                Wake::Timeout => return Ok(None),
            }
        }
    }

    /// Whether a handover is worth something by itself. A stale one is not: asking again finds out
    /// where we are. One over a long way is not either: asking again makes it whole. That of
    /// one node among several makes us the head of the line, who asks all.
    fn accept_grant(&mut self, notice: GrantNotice) -> Option<Grant> {
        if self.has_several_nodes() {
            self.is_head = true;
            return None;
        }
        // Nobody else may say for how long: our entry in the line did.
        let granted_for =
            Duration::from_millis(notice.px_ms).min(self.claim.ttl).min(self.ctx.claim_window);
        let now = clock::now();
        let reading = self.ctx.redlock.node(self.queue_node).clock_sample()?;
        let deadline = deadline_from_grant(&reading, notice.granted_at_us, granted_for, now);
        if notice.granted_at_us < self.queued_at_us
            || deadline.duration_since(now) < granted_for / 4
        {
            log_safely!(debug, "a grant of {:?} came too late to be used", self.claim.key);
            return None;
        }
        if needs_immediate_confirmation(deadline.duration_since(now), reading.round_trip()) {
            return None;
        }
        let mut deadlines = NodeDeadlines::new(1);
        deadlines.confirm(0, deadline);
        self.queued_on = NodeSet::EMPTY;
        Some(self.build_grant(notice.token, deadlines, true))
    }

    fn build_grant(&self, token: u64, votes: NodeDeadlines, provisional: bool) -> Grant {
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
            node_deadlines: votes,
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

    /// Until when something that was asked, and has not been answered, may be carried out.
    pub(super) fn in_flight_until(&self) -> Moment {
        let (unanswered, until) = self.unanswered;
        if unanswered.is_empty() { self.broken_until } else { self.broken_until.max(until) }
    }

    /// For how long it may keep the lock from others without having it.
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
