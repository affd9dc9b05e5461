//! Until a lock is ours: ask, wait for the grant, look again. Ends with a grant, or with the limit that fired.

mod mailbox;
mod patience;
mod subscriber;

use std::{sync::Arc, time::Duration};

pub(crate) use self::{mailbox::Mailbox, subscriber::Subscriber};
use self::{
    mailbox::{Handover, Ticket, Woken},
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
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) subscriber: Subscriber,
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
    /// Since when nothing but failures came back, and how many.
    trouble: Option<(Moment, u32)>,
    holder: Option<Holder>,
    /// The server's time when it last told us that we were in line: whatever it granted before is void.
    queued_at_us: u64,
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
        loop {
            let mode = self.mode();
            let until = match self.ask(mode) {
                Ok(Answer { sent, reply: Acquired::Held { token, .. } }) => {
                    let deadline = deadline_from(sent, self.claim.ttl);
                    if clock::now() < deadline {
                        return Ok(Grant { token: FencingToken(token), deadline, provisional: false });
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
                        self.on.mailbox.others_look_again(ticket);
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

    /// How to ask now. Waiting needs a subscription: a waiter that cannot be told of its grant is passed over.
    fn mode(&self) -> Mode {
        if clock::now() >= self.limit {
            if self.in_line { Mode::Leave } else { Mode::Try }
        } else if !self.on.subscriber.is_live() {
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

    /// Gets the calling thread into the mailbox and the subscription up; false when there is none to be had now.
    fn prepare_to_wait(&mut self) -> bool {
        if self.ticket.is_none() {
            self.ticket = Some(self.on.mailbox.open(self.claim.key.lock(), self.claim.id.as_str()));
        }
        let patience = clock::now().saturating_add(self.on.node.operation_timeout());
        self.on.subscriber.await_live(patience.min(self.limit))
    }

    /// Sleeps until it is time to ask again, or the lock is handed over.
    fn wait(&mut self, mut until: Moment) -> Result<Option<Grant>, LockError> {
        let hard_limit = self.hard_limit();
        let ticket = match &self.ticket {
            Some(ticket) => ticket,
            // Waiting for a server to come back takes a place in the mailbox too: shutting down must wake us.
            None => self.ticket.insert(self.on.mailbox.open(self.claim.key.lock(), self.claim.id.as_str())),
        };
        loop {
            // Past the limit, asking goes on until the hard limit.
            let bound = if clock::now() < self.limit { self.limit } else { hard_limit };
            match ticket.wait(until.min(bound)) {
                Woken::Granted(handover) => return Ok(self.accept(handover)),
                Woken::Look => return Ok(None),
                Woken::Closed => return Err(LockError::Shutdown),
                // One thread looks for all that wait here; the others only keep time.
                Woken::Time if clock::now() < self.limit && self.trouble.is_none() && !ticket.is_front() => {
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
        Some(Grant { token: FencingToken(handover.token), deadline, provisional: true })
    }

    /// What to do after a failure: when to ask again, or the error that ends it.
    fn troubled(&mut self, failure: Failure) -> Result<Moment, LockError> {
        let now = clock::now();
        let (since, count) = self.trouble.map_or((now, 0), |(since, count)| (since, count + 1));
        self.trouble = Some((since, count));
        // Without a limit of the caller's, a server that stays away for a whole lease is reported.
        let patience = since.saturating_add(self.claim.ttl.max(self.on.node.operation_timeout()));
        if !failure.is_passing() || now >= self.hard_limit() || now >= patience {
            if failure.is_passing() && self.holder.is_some() && since >= self.limit {
                return Err(self.too_late());
            }
            return Err(self.on.node.error(failure, Action::Acquire, Some(self.claim.key.name())));
        }
        // A connection that went stale is replaced at once, and a reading of the server's clock is by every answer.
        if count == 0 && (failure.sent || matches!(failure.reason, Reason::TimedOut)) {
            return Ok(now);
        }
        Ok(now.saturating_add(retry_pause(count, self.dice())))
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

    /// Our entry in the queue: for how long to claim, where to tell, and whom.
    fn waiter(&self) -> String {
        let claim_ms = self.on.claim_window.min(self.claim.ttl).as_millis();
        format!("{claim_ms} {} {}", self.on.subscriber.channel(), self.claim.id)
    }

    fn dice(&self) -> u64 {
        clock::now().as_nanos() ^ self.ticket.as_ref().map_or(0, Ticket::number)
    }
}
