//! `Listener`: the subscription on which grants come. Of the threads that wait, one listens for all: it reads the
//! socket, keeps its own grant and brings the others theirs. So a grant takes no detour over another thread on its way
//! to the one that waits for it, and a manager for which nobody waits has nothing running.
//!
//! *Invariant*: while the line is up and somebody sleeps, somebody listens, or is on the way to. A thread that is about
//! to sleep says so first and then looks whether the line is free; one that stops listening frees the line first and
//! then looks for a sleeper to call. Whichever comes second sees the other.

use std::{sync::Arc, thread::ThreadId, time::Duration};

use redis::Value;

use super::{
    mailbox::{Handover, Mailbox, Slot, Woken},
    patience::{PAUSE_MAX, RETRY_MAX, retry_pause, share},
    subscription::Subscription,
    ticket::Ticket,
};
use crate::{
    clock::{self, Moment},
    node::{Breaker, Failure, Heard, Reason},
    redlock::Redlock,
    sync::{Condvar, Mutex},
    threads,
};

/// A line that was up for this long was a good one.
const LASTING: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Listener {
    redlock: Arc<Redlock>,
    channel: String,
    pub(super) mailbox: Mailbox,
    /// Guards who has the line.
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    line: Line,
    /// The node it leads to, and since when.
    order: usize,
    opened_at: Moment,
    /// Cuts the line of whoever listens.
    breaker: Option<Breaker>,
    /// Attempts to open the line that failed in a row, and when the next one may be made.
    failures: u32,
    retry_at: Moment,
    /// Somebody was told that no grant is heard.
    told: bool,
    stop: bool,
}

#[derive(Debug)]
enum Line {
    Down,
    /// This thread is opening it.
    Opening(Option<ThreadId>),
    /// Up, and nobody listens.
    Free(Box<Subscription>),
    /// A thread listens.
    Taken,
}

impl Listener {
    pub(crate) fn new(redlock: Arc<Redlock>, channel: String) -> Listener {
        let state = State {
            line: Line::Down,
            order: 0,
            opened_at: Moment::from_nanos(0),
            breaker: None,
            failures: 0,
            retry_at: Moment::from_nanos(0),
            told: false,
            stop: false,
        };
        Listener { redlock, channel, mailbox: Mailbox::default(), state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// A place to wait in. A thread has to have one before it asks the server for a place in line.
    pub(crate) fn ticket(self: &Arc<Listener>, lock: &str, id: &str) -> Ticket {
        Ticket::new(self.clone(), lock, id)
    }

    /// Whether a grant would be heard.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.state.lock().line, Line::Free(_) | Line::Taken)
    }

    /// The node on which to wait in line, while a grant from it would be heard.
    pub(crate) fn order(&self) -> Option<usize> {
        let state = self.state.lock();
        matches!(state.line, Line::Free(_) | Line::Taken).then_some(state.order)
    }

    /// Wakes all waiters for good.
    pub(crate) fn close(&self) {
        self.mailbox.close();
        let (breaker, line) = {
            let mut state = self.state.lock();
            state.stop = true;
            let line = matches!(state.line, Line::Free(_)).then(|| std::mem::replace(&mut state.line, Line::Down));
            (state.breaker.take(), line)
        };
        clock::wake_all(&self.changed);
        if let Some(breaker) = breaker {
            breaker.cut();
        }
        drop(line);
    }

    /// Opens the line if it is down; false when it cannot be opened now. Blocks until `until` at the latest.
    pub(super) fn open(&self, until: Moment, opener: &Slot) -> bool {
        // Whoever opens it has no longer than that, but for a logger, which is code of users' and may take its time.
        let opened_by = until.min(clock::now().saturating_add(self.redlock.operation_timeout()));
        let mut state = self.state.lock();
        loop {
            match &state.line {
                Line::Taken => return true,
                // A logger that is called meanwhile, and wants a lock, would wait for itself.
                Line::Opening(by) if threads::is_current(*by) => return false,
                Line::Opening(_) if state.stop || clock::now() >= opened_by => return false,
                Line::Opening(_) => clock::park(&self.changed, &mut state, opened_by),
                Line::Down if state.stop || clock::now() < state.retry_at => return false,
                Line::Down | Line::Free(_) => break,
            }
        }
        let line = std::mem::replace(&mut state.line, Line::Opening(threads::current()));
        drop(state);
        if let Line::Free(wire) = line
            && wire.is_whole()
        {
            self.give_back(Some(wire));
            // Somebody may have fallen asleep meanwhile, who would have taken it.
            self.call_listener();
            return true;
        }
        let deadline = clock::now().saturating_add(self.redlock.operation_timeout());
        let hurry = until < deadline;
        let opened = self.subscribe_somewhere(until.min(deadline), hurry);
        self.opened(opened, hurry, opener)
    }

    /// Subscribes on the first node where that works; those that failed of late come last.
    fn subscribe_somewhere(&self, deadline: Moment, hurry: bool) -> Result<(Subscription, Breaker), Failure> {
        let mut nodes: Vec<usize> = self.redlock.all().iter().collect();
        nodes.sort_by_key(|node| !self.redlock.node(*node).is_well());
        let mut failed = Failure { sent: false, reason: Reason::TimedOut };
        for (tried, node) in nodes.iter().enumerate() {
            let now = clock::now();
            let share = share(deadline.after(now), tried, nodes.len());
            // It may be well, and too far away for so short a time.
            let hurry = hurry || share < self.redlock.operation_timeout() / 3;
            let until = now.saturating_add(share);
            match Subscription::open(*node, self.redlock.node(*node), &self.channel, until) {
                Ok(line) => return Ok(line),
                Err(failure) => {
                    if !is_haste(&failure, hurry) {
                        self.redlock.node(*node).failed(clock::now());
                    }
                    failed = failure;
                }
            }
        }
        Err(failed)
    }

    fn opened(&self, opened: Result<(Subscription, Breaker), Failure>, hurry: bool, opener: &Slot) -> bool {
        let now = clock::now();
        let mut state = self.state.lock();
        let up = match opened {
            Ok(_) if state.stop => {
                state.line = Line::Down;
                drop(state);
                false
            }
            Ok((wire, breaker)) => {
                (state.order, state.opened_at) = (wire.node, wire.opened_at);
                state.line = Line::Free(Box::new(wire));
                state.breaker = Some(breaker);
                drop(state);
                // Whoever waited through a gap may have been passed over in it.
                self.mailbox.others_look_again(opener);
                true
            }
            Err(failure) if is_haste(&failure, hurry) => {
                state.line = Line::Down;
                drop(state);
                false
            }
            Err(failure) => {
                state.line = Line::Down;
                state.failed(now, RETRY_MAX);
                let first = !std::mem::replace(&mut state.told, true);
                drop(state);
                if first {
                    let (server, reason) = (self.redlock.label(), failure.reason);
                    say!(warn, "cannot hear of grants from {server}: {reason}; waiters look by themselves");
                }
                false
            }
        };
        clock::wake_all(&self.changed);
        up
    }

    /// Takes the line if it is free.
    pub(super) fn take_line(&self) -> Option<Box<Subscription>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut state.line, Line::Taken) {
            Line::Free(wire) => Some(wire),
            other => {
                state.line = other;
                None
            }
        }
    }

    pub(super) fn is_free(&self) -> bool {
        matches!(self.state.lock().line, Line::Free(_))
    }

    /// Gives the line back, whole or not at all.
    fn give_back(&self, wire: Option<Box<Subscription>>) {
        let now = clock::now();
        let mut state = self.state.lock();
        let lasted = wire.as_ref().filter(|wire| now.after(wire.opened_at) >= LASTING).map(|wire| wire.node);
        let again = lasted.filter(|_| state.lasted());
        let (line, rest) = match wire {
            Some(wire) if !state.stop => (Line::Free(wire), None),
            rest => (Line::Down, rest),
        };
        if matches!(line, Line::Down) {
            state.breaker = None;
        }
        state.line = line;
        drop(state);
        // Closed outside the lock.
        drop(rest);
        clock::wake_all(&self.changed);
        if let Some(node) = again {
            say!(info, "hears of grants from {} again", self.redlock.node(node).label());
        }
    }

    /// A line that did not last counts as one that could not be opened, lest it be opened in a tight loop.
    fn judge(&self, opened_at: Moment) {
        let now = clock::now();
        let mut state = self.state.lock();
        if now.after(opened_at) >= LASTING {
            state.failures = 0;
        } else {
            state.failed(now, RETRY_MAX);
        }
    }

    /// The node on which a waiter stands says that nobody listened there when it was asked at `asked`: the line leads to another
    /// server, as after a failover. It is cut, unless it is a later one. True if it was free, so that nobody else opens it anew.
    pub(super) fn distrust(&self, order: usize, asked: Moment) -> bool {
        let now = clock::now();
        let (line, breaker, first) = {
            let mut state = self.state.lock();
            let later = state.order != order || asked < state.opened_at;
            if later || !matches!(state.line, Line::Free(_) | Line::Taken) {
                return false;
            }
            // The next one may lead there. If it does not either, all of them may lead elsewhere for ever.
            let mut first = false;
            if state.failures > 0 || now.after(state.opened_at) < LASTING {
                state.failed(now, PAUSE_MAX);
                first = !std::mem::replace(&mut state.told, true);
            }
            let free = matches!(state.line, Line::Free(_));
            let line = free.then(|| std::mem::replace(&mut state.line, Line::Down));
            (line, state.breaker.take(), first)
        };
        let server = self.redlock.node(order).label();
        if first {
            say!(warn, "cannot hear of grants from {server}: it says that nobody listens; waiters look by themselves");
        }
        say!(debug, "gives up a line to {server} on which nothing comes");
        // Closed outside the lock.
        let was_free = line.is_some();
        drop(line);
        if let Some(breaker) = breaker {
            breaker.cut();
        }
        was_free
    }

    /// If nobody listens, has a sleeper do it.
    pub(super) fn call_listener(&self) {
        if self.is_free() {
            self.mailbox.call_listener();
        }
    }

    /// Listens until there is news for `slot` or the moment has come.
    pub(super) fn listen(&self, mut wire: Box<Subscription>, slot: &Slot, until: Moment) -> Woken {
        loop {
            if let Some(woken) = slot.take() {
                self.give_back(Some(wire));
                return woken;
            }
            let now = clock::now();
            if now >= until {
                self.give_back(Some(wire));
                return Woken::Time;
            }
            match wire.hear(now, until, self.redlock.operation_timeout()) {
                Ok(message) => {
                    if let Some(message) = message {
                        self.dispatch(&message, &mut wire);
                    }
                    if !self.should_move(&wire) {
                        continue;
                    }
                    say!(debug, "waits on {} from now on", self.redlock.node(self.redlock.preferred()).label());
                    drop(wire);
                    self.give_back(None);
                    if !self.open(until, slot) {
                        self.mailbox.others_look_again(slot);
                    }
                    return slot.take().unwrap_or(Woken::Look);
                }
                Err(failure) => {
                    let (opened_at, order) = (wire.opened_at, wire.node);
                    drop(wire);
                    self.give_back(None);
                    self.judge(opened_at);
                    say!(debug, "lost the line to {}: {}", self.redlock.node(order).label(), failure.reason);
                    // News may have come together with the end; else everybody has to look. If the line can be
                    // opened again, opening it has told the others.
                    if !self.open(until, slot) {
                        self.mailbox.others_look_again(slot);
                    }
                    return slot.take().unwrap_or(Woken::Look);
                }
            }
        }
    }

    /// The line is better on another node, and has been on this one for a while.
    fn should_move(&self, wire: &Subscription) -> bool {
        self.redlock.should_leave(wire.node) && clock::now().after(wire.opened_at) >= LASTING
    }

    fn dispatch(&self, message: &Value, wire: &mut Subscription) {
        match Heard::of(message) {
            Heard::Grant(news) => {
                let grant = Handover { token: news.token, granted_at_us: news.granted_at_us, px_ms: news.px_ms };
                self.mailbox.deliver(news.id, grant);
            }
            Heard::Garbled if !std::mem::replace(&mut wire.garbled, true) => {
                say!(warn, "ignores messages on {} that are not grants", self.channel);
            }
            Heard::Garbled => {}
            Heard::Nothing => {}
        }
    }
}

/// Whether somebody who has less than an operation timeout could not wait for it. Who has more must not be kept from trying.
fn is_haste(failure: &Failure, hurry: bool) -> bool {
    hurry && matches!(failure.reason, Reason::TimedOut)
}

impl State {
    /// Makes a pause of at most `longest` before the line is opened again.
    fn failed(&mut self, now: Moment, longest: Duration) {
        self.failures = self.failures.saturating_add(1);
        self.retry_at = self.retry_at.max(now.saturating_add(retry_pause(self.failures, longest, now.as_nanos())));
    }

    /// The line has proved good. True if somebody was told that it was not.
    fn lasted(&mut self) -> bool {
        self.failures = 0;
        std::mem::take(&mut self.told)
    }
}
