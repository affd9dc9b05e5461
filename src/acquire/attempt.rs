//! One acquisition under way: how to ask next, and how long to wait before that.
//!
//! With several nodes the line is on one of them. Whoever stands at its head has the lock on that node, and asks all of
//! them; the others wait. So contenders do not split the votes for long, and only one of them asks.

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    Acquirer, Leftover,
    mailbox::{Handover, Woken},
    patience::{Sight, poll_pause, tick, vote_pause},
    struggle::Struggle,
    ticket::Ticket,
    vote::{Ballot, Unsettled},
};
use crate::{
    clock::{self, Moment},
    error::LockError,
    grant::{Claim, Grant, Late, deadline_from, deadline_of_grant, has_to_be_confirmed_at_once},
    holder::Holder,
    node::{
        Failure, Reason,
        calls::{Acquired, Mode},
    },
    redlock::{NodeSet, Slip, Trouble, Verdict, Vote, Votes, agreed_token},
    token::FencingToken,
};

/// So often a caller who does not want to wait asks again when the votes were split, and nobody got the lock.
const SPLITS_MAX: u32 = 5;
/// So often nodes are asked to agree on a token before that counts as a failure.
const TOKEN_ROUNDS_MAX: u32 = 5;

pub(super) struct Attempt<'a> {
    pub(super) on: &'a Acquirer,
    pub(super) claim: &'a Claim,
    pub(super) started: Moment,
    /// The end of the caller's patience.
    pub(super) limit: Moment,
    pub(super) ticket: Option<Ticket>,
    /// The node on which to stand in line.
    pub(super) order: usize,
    /// A request to join the line has been sent since it was last on another node.
    pub(super) in_line: bool,
    /// The nodes in whose line we may stand; also one that went away and has not confirmed that we have left it.
    pub(super) lined: NodeSet,
    /// It said so when it was last asked.
    queued: bool,
    /// The lock is ours on that node, and we have to win the others.
    pub(super) leading: bool,
    /// The votes are there, but have come so slowly that the node with the line, which keeps the lock for the claim window, is to
    /// keep it for longer.
    pub(super) whole: bool,
    /// Where our id may be: as the holder's, or in the line.
    pub(super) known: NodeSet,
    /// Nodes where it has to be taken back before anything else, since the line has moved.
    pub(super) strays: NodeSet,
    pub(super) unsettled: Vec<Unsettled>,
    /// Until when a request whose answer was lost may still be carried out.
    pub(super) late_until: Moment,
    /// The nodes that had not answered when the last ask was decided, and until when they may carry it out.
    pub(super) open: (NodeSet, Moment),
    /// What token a quorum is to store, once they have given different ones.
    pub(super) token_min: Option<u64>,
    token_rounds: u32,
    /// Votes lost so far.
    losses: u32,
    /// Nothing but failures has come back since the last answer.
    pub(super) trouble: Option<Struggle>,
    pub(super) holder: Option<Holder>,
    /// Somebody was seen to stand in the way.
    pub(super) contended: bool,
    /// The server's time when it last told us that we were in line: whatever it granted before is void.
    queued_at_us: u64,
}

/// What to do next.
enum Step {
    Done(Grant),
    Again,
    Wait(Moment),
}

impl<'a> Attempt<'a> {
    pub(super) fn new(on: &'a Acquirer, claim: &'a Claim, wait: Option<Duration>) -> Attempt<'a> {
        let started = clock::now();
        Attempt {
            on,
            claim,
            started,
            limit: wait.map_or(Moment::NEVER, |wait| started.saturating_add(wait)),
            ticket: None,
            order: on.redlock.preferred(),
            in_line: false,
            lined: NodeSet::NONE,
            queued: false,
            leading: false,
            whole: false,
            known: NodeSet::NONE,
            strays: NodeSet::NONE,
            unsettled: Vec::new(),
            late_until: started,
            open: (NodeSet::NONE, started),
            token_min: None,
            token_rounds: 0,
            losses: 0,
            trouble: None,
            holder: None,
            contended: false,
            queued_at_us: 0,
        }
    }

    pub(super) fn run(&mut self) -> Result<Grant, LockError> {
        if self.limit > self.started && self.on.listener.is_live() {
            // Where waiting is usual, the first ask takes a place in line, if the lock is not free.
            self.ticket();
        }
        loop {
            let until = match self.step()? {
                Step::Done(grant) => return Ok(grant),
                Step::Again => continue,
                Step::Wait(until) => until,
            };
            if let Some(grant) = self.wait(until)? {
                return Ok(grant);
            }
        }
    }

    fn step(&mut self) -> Result<Step, LockError> {
        self.follow_the_line();
        self.queued = false;
        let (mode, stood) = (self.mode(), self.in_line);
        let ballot = match self.ask(mode, self.asks_all(mode)) {
            Ok(ballot) => ballot,
            Err(trouble) => return self.troubled(trouble).map(Step::Wait),
        };
        if ballot.is_wrong_type() {
            return Err(self.wrong_type());
        }
        if !ballot.is_full() && ballot.holds_on(self.order) {
            (self.leading, self.trouble) = (true, None);
            return Ok(Step::Again);
        }
        match ballot.verdict {
            Verdict::Won => self.won(&ballot),
            Verdict::Lost => {
                self.trouble = None;
                self.lost(mode, stood, &ballot)
            }
            Verdict::Open | Verdict::Unreachable => self.troubled(ballot.into_trouble(self.on)).map(Step::Wait),
        }
    }

    /// Whether all nodes are asked, or only the one with the line: as long as others stand before us there, the rest
    /// would say nothing new, but that a node that everybody prefers is back.
    fn asks_all(&self, mode: Mode) -> bool {
        let expects_others = || self.losses > 0 || self.on.crowd.is_likely(self.claim.key.lock());
        !self.several()
            || self.leading
            || self.whole
            || !expects_others()
            || self.trouble.is_some()
            || mode == Mode::Try
            || self.on.redlock.may_be_back(self.order)
    }

    /// Whether others stood in the way.
    pub(super) fn has_lost(&self) -> bool {
        self.losses > 0
    }

    pub(super) fn several(&self) -> bool {
        self.on.redlock.len() > 1
    }

    /// How to ask now. Waiting needs a line: a waiter that cannot be told of its grant is passed over.
    fn mode(&self) -> Mode {
        if clock::now() >= self.limit {
            if self.lined.has(self.order) { Mode::Leave } else { Mode::Try }
        } else if !self.on.listener.is_live() {
            Mode::Try
        } else if self.in_line || self.lined.has(self.order) {
            // Also where we stood before the line moved: a second place would be left behind.
            Mode::Look
        } else if self.ticket.is_some() {
            Mode::Join
        } else {
            Mode::Try
        }
    }

    /// The line may have moved to another node; what we have on the former one goes back.
    fn follow_the_line(&mut self) {
        if !self.several() {
            return;
        }
        let order = match self.on.listener.order() {
            Some(order) => order,
            None if self.in_line || self.leading => self.order,
            None => self.on.redlock.preferred(),
        };
        if order != self.order {
            if self.in_line || self.leading {
                self.strays = self.strays.with(NodeSet::only(self.order));
            }
            (self.order, self.in_line, self.leading) = (order, false, false);
        }
    }

    /// A quorum keeps the lock for us. It is ours if it does so for long enough, and under one token.
    fn won(&mut self, ballot: &Ballot) -> Result<Step, LockError> {
        let nodes = self.on.redlock.len();
        let brief = ballot.is_brief() && self.window() < self.claim.ttl;
        let mut votes = Votes::new(nodes);
        let mut tokens: SmallVec<[u64; 8]> = SmallVec::new();
        let mut asked = clock::now();
        for (node, (slip, vote)) in ballot.slips().iter().zip(ballot.votes()).enumerate() {
            match (slip, vote) {
                (Slip::Said(answer), Some(Vote::Yes)) => {
                    let given = if brief && node == self.order { self.window() } else { self.claim.ttl };
                    votes.confirm(node, deadline_from(answer.sent, given));
                    asked = asked.min(answer.sent);
                    tokens.extend(answer.reply.token());
                }
                (Slip::Said(_), Some(Vote::No)) => votes.strike(node),
                _ => {}
            }
        }
        // A release that is still on its way there would take away what a renewal finds.
        self.unsettled.iter().for_each(|release| votes.bar(release.node));
        let now = clock::now();
        let left = votes.validity().map_or(Duration::ZERO, |deadline| deadline.after(now));
        if brief && has_to_be_confirmed_at_once(left, now.after(asked)) {
            self.whole = true;
            return Ok(Step::Again);
        }
        if left.is_zero() {
            // The answers took longer than the lease. Asking again makes it whole, if it is still ours.
            return self.troubled(Trouble::Alone(Failure::unclear(Reason::TimedOut))).map(Step::Wait);
        }
        match agreed_token(&tokens, nodes) {
            Ok(token) => {
                if ballot.holds_on(self.order) {
                    self.lined = self.lined.without(NodeSet::only(self.order));
                }
                Ok(Step::Done(self.grant(token, votes, brief)))
            }
            Err(highest) => {
                self.token_min = Some(highest);
                self.token_rounds += 1;
                if self.token_rounds > TOKEN_ROUNDS_MAX {
                    return self.troubled(Trouble::Alone(Failure::unclear(Reason::NoOneToken))).map(Step::Wait);
                }
                Ok(Step::Again)
            }
        }
    }

    /// Others keep us from a quorum. `stood` says whether we have stood in this line since it was last moved.
    fn lost(&mut self, mode: Mode, stood: bool, ballot: &Ballot) -> Result<Step, LockError> {
        self.losses += 1;
        self.token_min = None;
        if let Some(holder) = ballot.holder() {
            if !self.contended {
                self.contended = true;
                self.on.redlock.observer().contended(self.claim.key.name(), &self.claim.id, &holder);
            }
            self.holder =
                Some(if self.several() && ballot.is_full() { holder.said_by(ballot.answers(self.on)) } else { holder });
        }
        let now = clock::now();
        let standing = ballot.standing(self.order);
        if let Some(Acquired::Queued { now_us, holder, position, joined, deaf }) = standing {
            self.queued = true;
            self.queued_at_us = *now_us;
            let sight = Sight::new(now, holder, *position);
            if let Some(ticket) = &self.ticket {
                ticket.stands_at(*position);
            }
            if let (true, true, Some(ticket)) = (stood, joined, &self.ticket) {
                // The server has lost the line, and with it the places of our neighbours.
                ticket.neighbours_look_again();
            }
            if let (true, Some(ticket)) = (deaf, &self.ticket) {
                // We would be passed over.
                let asked = ballot.asked(self.order).unwrap_or(self.started);
                let again = ticket.distrust_line(self.order, asked) && ticket.open_line(self.limit);
                return Ok(if again { Step::Again } else { Step::Wait(now.saturating_add(poll_pause(self.dice()))) });
            }
            return Ok(Step::Wait(sight.next_look(self.dice())));
        }
        let pause = vote_pause(self.losses, ballot.is_split(), self.dice());
        // The head must be back before the node with the line takes it for dead.
        let pause = now.saturating_add(if self.leading { pause.min(self.window() / 3) } else { pause });
        if mode == Mode::Leave || now >= self.limit {
            if ballot.is_split() && self.losses <= SPLITS_MAX && pause < self.hard_limit() {
                return Ok(Step::Wait(pause));
            }
            let heard = standing.is_some_and(|said| !matches!(said, Acquired::Late { .. }));
            if mode == Mode::Leave && heard || !(self.lined.has(self.order) || self.leading) {
                // Left the line, or never was in it.
                self.known = self.known.without(NodeSet::only(self.order));
                self.lined = self.lined.without(NodeSet::only(self.order));
            }
            return Err(self.too_late());
        }
        if self.leading || ballot.is_split() {
            return Ok(Step::Wait(pause));
        }
        // There is no line where the key is of another type.
        let has_line = standing.is_some_and(|said| !matches!(said, Acquired::WrongType));
        if self.prepare_to_wait() && has_line {
            return Ok(Step::Again);
        }
        Ok(Step::Wait(now.saturating_add(poll_pause(self.dice()))))
    }

    /// The last moment for the call: the caller's patience, and one operation timeout.
    pub(super) fn hard_limit(&self) -> Moment {
        self.limit.saturating_add(self.on.redlock.operation_timeout())
    }

    /// Gets the calling thread a ticket and the line up; false when there is none to be had now.
    fn prepare_to_wait(&mut self) -> bool {
        let limit = self.limit;
        self.ticket().open_line(limit)
    }

    fn ticket(&mut self) -> &Ticket {
        let Attempt { on, claim, ticket, .. } = self;
        ticket.get_or_insert_with(|| on.listener.ticket(claim.key.lock(), claim.id.as_str()))
    }

    /// Sleeps until it is time to ask again, or the lock is handed over.
    fn wait(&mut self, mut until: Moment) -> Result<Option<Grant>, LockError> {
        let (limit, hard_limit) = (self.limit, self.hard_limit());
        // Who is not in line on one of several nodes has to get there itself.
        let looks_itself = self.trouble.is_some() || self.leading || (self.several() && !self.queued);
        // Waiting for a server to come back takes a ticket too: shutting down must wake us.
        for release in &self.unsettled {
            until = until.min(release.void);
        }
        let looks_itself = looks_itself || !self.unsettled.is_empty();
        let ticket = self.ticket();
        loop {
            // Past the limit, asking goes on until the hard limit.
            let bound = if clock::now() < limit { limit } else { hard_limit };
            match ticket.wait(until.min(bound)) {
                Woken::Granted(handover) => {
                    let grant = self.accept(handover);
                    if let (None, Some(ticket)) = (&grant, &self.ticket) {
                        // It is off to ask instead of leaving, so somebody else has to listen.
                        ticket.call_listener();
                    }
                    return Ok(grant);
                }
                Woken::Look => return Ok(None),
                Woken::Closed => return Err(LockError::Shutdown),
                // One thread looks for all that wait here; the others only keep time.
                Woken::Time if clock::now() < limit && !looks_itself && !ticket.is_front() => {
                    until = clock::now().saturating_add(tick(ticket.number()));
                }
                Woken::Time => return Ok(None),
            }
        }
    }

    /// Whether a handover is worth something by itself. A stale one is not: asking again finds out where we are. One over a
    /// long way is not either: asking again makes it whole. That of one node among several makes us the head of the line, who
    /// asks all.
    fn accept(&mut self, handover: Handover) -> Option<Grant> {
        if self.several() {
            self.leading = true;
            return None;
        }
        // Nobody else may say for how long: our entry in the line did.
        let px = Duration::from_millis(handover.px_ms).min(self.claim.ttl).min(self.on.claim_window);
        let now = clock::now();
        let reading = self.on.redlock.node(self.order).reading()?;
        let deadline = deadline_of_grant(&reading, handover.granted_at_us, px, now);
        if handover.granted_at_us < self.queued_at_us || deadline.after(now) < px / 4 {
            say!(debug, "a grant of {:?} came too late to be used", self.claim.key);
            return None;
        }
        if has_to_be_confirmed_at_once(deadline.after(now), reading.took()) {
            return None;
        }
        let mut votes = Votes::new(1);
        votes.confirm(0, deadline);
        self.lined = NodeSet::NONE;
        Some(self.grant(handover.token, votes, true))
    }

    fn grant(&self, token: u64, votes: Votes, provisional: bool) -> Grant {
        let late = clock::now() < self.late_until;
        let place = if !self.lined.is_empty() || late { self.waiter() } else { String::new() };
        let (open, open_until) = self.open;
        let late = Late { broken_until: self.late_until, open, open_until };
        Grant { token: FencingToken(token), votes, provisional, late, nodes: self.known, place }
    }

    pub(super) fn too_late(&mut self) -> LockError {
        let name = self.claim.key.name().to_owned();
        let server = self.on.redlock.label().clone();
        let holder = self.holder.take().map(Box::new);
        match holder {
            Some(holder) if self.limit == self.started => LockError::Held { name, holder, server },
            holder => LockError::Timeout { name, holder, waited: clock::now().after(self.started), server },
        }
    }

    fn wrong_type(&self) -> LockError {
        LockError::WrongType {
            name: self.claim.key.name().to_owned(),
            key: self.claim.key.lock().to_owned(),
            server: self.on.redlock.label().clone(),
        }
    }

    pub(super) fn leftover(&self) -> Option<Leftover> {
        let late_until = self.late_until();
        let late = clock::now() < late_until;
        let nodes = if late { self.on.redlock.all() } else { self.known.with(self.strays) };
        let waiter = if late || !self.lined.is_empty() { self.waiter() } else { String::new() };
        (!nodes.is_empty()).then_some(Leftover { waiter, late_until, nodes })
    }

    /// Until when something that was asked, and has not been answered, may be carried out.
    pub(super) fn late_until(&self) -> Moment {
        let (open, until) = self.open;
        if open.is_empty() { self.late_until } else { self.late_until.max(until) }
    }

    /// For how long it may keep the lock from others without having it.
    pub(super) fn window(&self) -> Duration {
        self.on.window(self.claim)
    }

    pub(super) fn waiter(&self) -> String {
        self.on.waiter(self.claim)
    }

    pub(super) fn dice(&self) -> u64 {
        clock::now().as_nanos() ^ self.ticket.as_ref().map_or(0, Ticket::number)
    }
}
