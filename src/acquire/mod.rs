//! Until a lock is ours: ask, wait for the grant, look again. Ends with a grant, or with the limit that fired.

mod listener;
mod mailbox;
mod patience;

use std::{sync::Arc, time::Duration};

pub(crate) use self::listener::Listener;
use self::{
    listener::Ticket,
    mailbox::{Handover, Woken},
    patience::{Sight, poll_pause, retry_pause, tick},
};
use crate::{
    clock::{self, Moment},
    error::{Action, LockError},
    grant::{Claim, FencingToken, Grant, deadline_from, deadline_of_grant},
    holder::Holder,
    node::{
        Answer, Failure, Reason, RedisNode,
        script::{Acquire, Acquired, Mode},
    },
};

/// No ask takes less time than this, however short the lease.
const ASK_MIN: Duration = Duration::from_millis(50);

/// What it takes to acquire.
#[derive(Debug)]
pub(crate) struct Acquirer {
    pub(crate) node: Arc<RedisNode>,
    pub(crate) listener: Arc<Listener>,
    pub(crate) claim_window: Duration,
    /// Whether a holder without an expiry is given one: never with an empty prefix, where it may be anybody's data.
    pub(crate) heal: bool,
}

/// An acquisition that ended without the lock.
#[derive(Debug)]
pub(crate) struct NotAcquired {
    pub(crate) error: LockError,
    /// The server may know the claim, and has to be told to forget it.
    pub(crate) leftover: Option<Leftover>,
}

/// What an acquisition may have left at the server.
#[derive(Debug)]
pub(crate) struct Leftover {
    /// Its entry in the queue, or empty.
    pub(crate) waiter: String,
    /// Until when a request of it that is still on its way may be carried out.
    pub(crate) late_until: Moment,
}

impl Acquirer {
    /// Takes the lock, waiting for at most `wait`; returns by then plus one operation timeout.
    pub(crate) fn run(&self, claim: &Claim, wait: Option<Duration>) -> Result<Grant, Box<NotAcquired>> {
        let mut attempt = Attempt::new(self, claim, wait);
        attempt.run().map_err(|error| Box::new(NotAcquired { error, leftover: attempt.leftover() }))
    }

    /// The entry of a claim in the queue: for how long to claim, where to tell, and whom.
    pub(crate) fn waiter(&self, claim: &Claim) -> String {
        let claim_ms = self.claim_window.min(claim.ttl).as_millis();
        format!("{claim_ms} {} {}", self.listener.channel(), claim.id)
    }
}

/// One acquisition under way.
struct Attempt<'a> {
    on: &'a Acquirer,
    claim: &'a Claim,
    started: Moment,
    /// The end of the caller's patience.
    limit: Moment,
    ticket: Option<Ticket>,
    /// A request to join the line has been sent.
    in_line: bool,
    /// The server may have our id: as the holder's, or in the line.
    may_be_known: bool,
    /// Until when a request whose answer was lost may still be carried out.
    late_until: Moment,
    /// Nothing but failures has come back since the last answer.
    trouble: Option<Trouble>,
    holder: Option<Holder>,
    /// The server's time when it last told us that we were in line: whatever it granted before is void.
    queued_at_us: u64,
}

struct Trouble {
    since: Moment,
    failures: u32,
    /// The last failure that says more than that time ran out.
    telling: Option<Failure>,
}

impl<'a> Attempt<'a> {
    fn new(on: &'a Acquirer, claim: &'a Claim, wait: Option<Duration>) -> Attempt<'a> {
        let started = clock::now();
        Attempt {
            on,
            claim,
            started,
            limit: wait.map_or(Moment::NEVER, |wait| started.saturating_add(wait)),
            ticket: None,
            in_line: false,
            may_be_known: false,
            late_until: started,
            trouble: None,
            holder: None,
            queued_at_us: 0,
        }
    }

    fn run(&mut self) -> Result<Grant, LockError> {
        if self.limit > self.started && self.on.listener.is_live() {
            // Where waiting is usual, the first ask takes a place in line, if the lock is not free.
            self.ticket();
        }
        loop {
            let mode = self.mode();
            let until = match self.ask(mode) {
                Ok(Answer { sent, reply: Acquired::Held { token, .. } }) => {
                    let deadline = deadline_from(sent, self.claim.ttl);
                    if clock::now() < deadline {
                        return Ok(self.grant(token, deadline, false));
                    }
                    // The answer took longer than the lease. Asking again makes it whole, if it is still ours.
                    self.may_be_known = true;
                    self.troubled(Failure::unclear(Reason::TimedOut))?
                }
                Ok(Answer { reply: Acquired::Queued { now_us, holder, position, joined }, .. }) => {
                    self.trouble = None;
                    self.queued_at_us = now_us;
                    let sight = Sight::new(clock::now(), &holder, position);
                    self.holder = Some(holder);
                    if let (Mode::Look, true, Some(ticket)) = (mode, joined, &self.ticket) {
                        // The server has lost the line, and with it the places of our neighbours.
                        ticket.neighbours_look_again();
                    }
                    sight.next_look(self.dice())
                }
                Ok(Answer { reply: Acquired::Busy { holder, .. }, .. }) => {
                    self.trouble = None;
                    self.holder = Some(holder);
                    if mode == Mode::Leave || clock::now() >= self.limit {
                        // Left the line, or never was in it.
                        self.may_be_known &= self.in_line && mode != Mode::Leave;
                        return Err(self.too_late());
                    }
                    if self.prepare_to_wait() {
                        continue;
                    }
                    clock::now().saturating_add(poll_pause(self.dice()))
                }
                Ok(Answer { reply: Acquired::Late { .. }, .. }) => {
                    self.troubled(Failure { sent: false, reason: Reason::TimedOut })?
                }
                Ok(Answer { reply: Acquired::WrongType, .. }) => return Err(self.wrong_type()),
                Err(failure) => {
                    self.may_be_known |= failure.sent;
                    self.troubled(failure)?
                }
            };
            if let Some(grant) = self.wait(until)? {
                return Ok(grant);
            }
        }
    }

    /// How to ask now. Waiting needs a line: a waiter that cannot be told of its grant is passed over.
    fn mode(&self) -> Mode {
        if clock::now() >= self.limit {
            if self.in_line { Mode::Leave } else { Mode::Try }
        } else if !self.on.listener.is_live() {
            Mode::Try
        } else if self.in_line {
            Mode::Look
        } else if self.ticket.is_some() {
            Mode::Join
        } else {
            Mode::Try
        }
    }

    fn ask(&mut self, mode: Mode) -> Result<Answer<Acquired>, Failure> {
        let now = clock::now();
        // A short lease leaves no time for a long wait for an answer.
        let ask_max = self.on.node.operation_timeout().min((self.claim.ttl / 3).max(ASK_MIN));
        let deadline = now.saturating_add(ask_max).min(self.hard_limit());
        let waiter = if matches!(mode, Mode::Try) { String::new() } else { self.waiter() };
        if matches!(mode, Mode::Join | Mode::Look) {
            self.in_line = true;
            self.may_be_known = true;
        }
        let call = Acquire {
            key: &self.claim.key,
            id: self.claim.id.as_str(),
            ttl_ms: self.claim.ttl_ms(),
            mode,
            waiter: &waiter,
            heal: self.on.heal,
        };
        let answer = self.on.node.ask(&call, deadline);
        if matches!(&answer, Err(failure) if failure.sent) {
            self.late_until = self.late_until.max(deadline);
        }
        answer
    }

    /// The last moment for the call: the caller's patience, and one operation timeout.
    fn hard_limit(&self) -> Moment {
        self.limit.saturating_add(self.on.node.operation_timeout())
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
        let (limit, hard_limit, in_trouble) = (self.limit, self.hard_limit(), self.trouble.is_some());
        // Waiting for a server to come back takes a ticket too: shutting down must wake us.
        let ticket = self.ticket();
        loop {
            // Past the limit, asking goes on until the hard limit.
            let bound = if clock::now() < limit { limit } else { hard_limit };
            match ticket.wait(until.min(bound)) {
                Woken::Granted(handover) => {
                    let grant = self.accept(handover);
                    if let (None, Some(ticket)) = (grant, &self.ticket) {
                        // It is off to ask instead of leaving, so somebody else has to listen.
                        ticket.call_listener();
                    }
                    return Ok(grant);
                }
                Woken::Look => return Ok(None),
                Woken::Closed => return Err(LockError::Shutdown),
                // One thread looks for all that wait here; the others only keep time.
                Woken::Time if clock::now() < limit && !in_trouble && !ticket.is_front() => {
                    until = clock::now().saturating_add(tick(ticket.number()));
                }
                Woken::Time => return Ok(None),
            }
        }
    }

    /// Whether a handover is still worth something. A stale one is not: asking again finds out where we are.
    fn accept(&self, handover: Handover) -> Option<Grant> {
        let px = Duration::from_millis(handover.px_ms).min(self.claim.ttl);
        let now = clock::now();
        let deadline = deadline_of_grant(&self.on.node.reading()?, handover.granted_at_us, px, now);
        if handover.granted_at_us < self.queued_at_us || deadline.after(now) < px / 4 {
            log::debug!("a grant of {:?} came too late to be used", self.claim.key);
            return None;
        }
        Some(self.grant(handover.token, deadline, true))
    }

    fn grant(&self, token: u64, deadline: Moment, provisional: bool) -> Grant {
        Grant { token: FencingToken(token), deadline, provisional, late_until: self.late_until }
    }

    /// What to do after a failure: when to ask again, or the error that ends it.
    fn troubled(&mut self, failure: Failure) -> Result<Moment, LockError> {
        let (now, hard_limit, dice) = (clock::now(), self.hard_limit(), self.dice());
        let trouble = self.trouble.get_or_insert(Trouble { since: now, failures: 0, telling: None });
        trouble.failures += 1;
        let (since, failures) = (trouble.since, trouble.failures);
        let passing = failure.is_passing();
        // Nothing is unclear about a server that was not reached, and who does not want to wait does not want to retry.
        let in_vain = self.limit == self.started && !failure.sent && !matches!(failure.reason, Reason::TimedOut);
        // Without a limit of the caller's, a server that stays away for a whole lease is reported. Who is in line needs
        // no connection to be told that it is its turn.
        let waits_on = self.limit != Moment::NEVER || (self.in_line && matches!(failure.reason, Reason::PoolExhausted));
        let patience = since.saturating_add(self.claim.ttl.max(self.on.node.operation_timeout()));
        let patience = if waits_on { Moment::NEVER } else { patience };
        if passing && !in_vain && now < hard_limit.min(patience) {
            // A connection that went stale is replaced at once, and a reading of the server's clock is by every answer.
            let stale = failures == 1 && (failure.sent || matches!(failure.reason, Reason::TimedOut));
            if !matches!(failure.reason, Reason::TimedOut) {
                trouble.telling = Some(failure);
            }
            return Ok(if stale { now } else { now.saturating_add(retry_pause(failures, dice)) });
        }
        if passing && self.holder.is_some() && since >= self.limit {
            return Err(self.too_late());
        }
        let failure = match failure.reason {
            Reason::TimedOut => trouble.telling.take().unwrap_or(failure),
            _ => failure,
        };
        Err(self.on.node.error(failure, Action::Acquire, Some(self.claim.key.name())))
    }

    fn too_late(&mut self) -> LockError {
        let name = self.claim.key.name().to_owned();
        let server = self.on.node.label().clone();
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
            server: self.on.node.label().clone(),
        }
    }

    fn leftover(&self) -> Option<Leftover> {
        let late = clock::now() < self.late_until;
        (self.may_be_known || late).then(|| Leftover {
            waiter: if self.in_line { self.waiter() } else { String::new() },
            late_until: self.late_until,
        })
    }

    fn waiter(&self) -> String {
        self.on.waiter(self.claim)
    }

    fn dice(&self) -> u64 {
        clock::now().as_nanos() ^ self.ticket.as_ref().map_or(0, Ticket::number)
    }
}
