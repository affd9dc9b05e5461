//! Decides which thread of a process is next for one lock, until when, and which one asks the
//! server. Pure.
//!
//! A thread that finds the local queue empty is a *representative*: it asks the server, and waits
//! in the server's queue. The other threads wait here. Once the server has granted the lock, its
//! *window* is open: each release hands the lock to the first waiting thread, without the server.
//! After the window, a release goes to the server, and the first waiting thread becomes the next
//! representative. That is how other clients get their turn.
//!
//! Invariants:
//! - While threads wait, there is a representative, or an open window that one of them watches: the
//!   *watcher* wakes when the window ends, and makes the first one a representative.
//! - A thread leaves the queue in one way only: with the lock, as a representative, or because it
//!   stops waiting. What it then owes to the others is decided in the same step.
//! - Only the hold that the server granted last is handed over.

use std::{collections::VecDeque, num::NonZeroU64, time::Duration};

use crate::sys::clock::Moment;

/// Identifies a waiting thread. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(pub(super) NonZeroU64);

/// Identifies what the server granted. Never reused, so that the release of a lock that was lost
/// does not hand over the lock of a later holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldNumber(pub(super) NonZeroU64);

/// How a lock is held, as far as its holder and its successor must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) ttl: Duration,
    pub(crate) renew: bool,
    /// The lock can be handed over on these terms.
    pub(crate) is_local: bool,
}

#[derive(Debug)]
struct Seat<S> {
    ticket: Ticket,
    terms: Terms,
    waiter: S,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    number: HoldNumber,
    window_end: Moment,
}

/// The local queue of one lock. `S` is how a waiting thread is reached. Small, because each held
/// lock has one.
#[derive(Debug)]
pub(crate) struct LocalQueue<S> {
    waiting: VecDeque<Seat<S>>,
    /// Number of threads that ask the server. More than one only while servers are unreachable.
    representatives: u32,
    /// Number of times that the hold may still be handed over.
    handovers_left: u16,
    /// A representative came from this queue and has not been granted the lock yet.
    has_promoted: bool,
    hold: Option<Hold>,
    watcher: Option<Ticket>,
}

/// What a new thread does.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival<S> {
    /// Asks the server.
    Represents,
    /// Waits, and watches the window until this time, if there is one.
    Waits { waiter: S, watch_until: Option<Moment> },
}

/// What a waiting thread must be told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Signal<S> {
    /// It is a representative now.
    Represent(S),
    /// It is the watcher now.
    Watch(S, Moment),
}

/// What a release does.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Release<S> {
    /// The lock goes to this thread, which has left the queue.
    HandOver { to: S, signal: Option<Signal<S>> },
    /// The lock goes to the server.
    ToServer(Option<Signal<S>>),
}

impl<S> Default for LocalQueue<S> {
    fn default() -> LocalQueue<S> {
        LocalQueue {
            waiting: VecDeque::new(),
            representatives: 0,
            handovers_left: 0,
            has_promoted: false,
            hold: None,
            watcher: None,
        }
    }
}

impl<S: Clone> LocalQueue<S> {
    /// Adds a thread that wants the lock. `waiter` is called if it must wait.
    pub(crate) fn arrive(
        &mut self,
        ticket: Ticket,
        terms: Terms,
        now: Moment,
        waiter: impl FnOnce() -> S,
    ) -> Arrival<S> {
        let window_end = self.open_window(now);
        if self.waiting.is_empty() && self.representatives == 0 && window_end.is_none() {
            self.representatives = 1;
            return Arrival::Represents;
        }
        let waiter = waiter();
        self.waiting.push_back(Seat { ticket, terms, waiter: waiter.clone() });
        let watch_until =
            window_end.filter(|_| self.representatives == 0 && self.watcher.is_none());
        if watch_until.is_some() {
            self.watcher = Some(ticket);
        }
        Arrival::Waits { waiter, watch_until }
    }

    /// The server has granted the lock to a representative.
    pub(crate) fn on_granted(
        &mut self,
        number: HoldNumber,
        window_end: Moment,
        handovers_max: u16,
    ) -> Option<Signal<S>> {
        self.representatives = self.representatives.saturating_sub(1);
        self.has_promoted = false;
        self.hold = Some(Hold { number, window_end });
        self.handovers_left = handovers_max;
        self.ensure_watched(window_end)
    }

    /// A representative has left without the lock.
    pub(crate) fn on_left(&mut self, now: Moment) -> Option<Signal<S>> {
        self.representatives = self.representatives.saturating_sub(1);
        self.has_promoted = false;
        self.watch_or_promote(now)
    }

    /// The holder releases the lock, which may be handed over to a thread that wants it on these
    /// terms.
    pub(crate) fn release(
        &mut self,
        number: HoldNumber,
        terms: Option<Terms>,
        now: Moment,
    ) -> Release<S> {
        let is_open = self.open_window(now).is_some();
        let Some(hold) = self.hold.filter(|hold| hold.number == number) else {
            return Release::ToServer(None);
        };
        let terms = terms.filter(|terms| terms.is_local);
        let fits = |seat: &Seat<S>| terms == Some(seat.terms);
        if is_open && self.handovers_left > 0 && self.waiting.front().is_some_and(fits) {
            self.handovers_left -= 1;
            if let Some(next) = self.waiting.pop_front() {
                if self.watcher == Some(next.ticket) {
                    self.watcher = None;
                }
                return Release::HandOver {
                    to: next.waiter,
                    signal: self.ensure_watched(hold.window_end),
                };
            }
        }
        self.hold = None;
        Release::ToServer(self.promote())
    }

    /// The lock was lost while it was handed over. Its next holder becomes a representative.
    pub(crate) fn on_lost(&mut self, number: HoldNumber) {
        if self.hold.is_some_and(|hold| hold.number == number) {
            self.hold = None;
        }
        self.representatives += 1;
        self.has_promoted = true;
        self.watcher = None;
    }

    /// The watcher has woken. It may have to go on watching.
    pub(crate) fn on_window_end(&mut self, ticket: Ticket, now: Moment) -> Option<Signal<S>> {
        if self.watcher != Some(ticket) {
            return None;
        }
        self.watcher = None;
        self.watch_or_promote(now)
    }

    /// A thread stops waiting. Returns `None` if it has left the queue before, so that it has got
    /// the lock or become a representative.
    pub(crate) fn leave(&mut self, ticket: Ticket, now: Moment) -> Option<Option<Signal<S>>> {
        let place = self.waiting.iter().position(|seat| seat.ticket == ticket)?;
        self.waiting.remove(place);
        if self.watcher != Some(ticket) {
            return Some(None);
        }
        self.watcher = None;
        Some(self.watch_or_promote(now))
    }

    /// Makes all waiting threads representatives, because the servers are unreachable, or the
    /// manager is shut down: each of them notices that in its own way.
    pub(crate) fn scatter(&mut self) -> Vec<S> {
        self.representatives += self.waiting.len() as u32;
        self.watcher = None;
        self.waiting.drain(..).map(|seat| seat.waiter).collect()
    }

    /// Whether threads wait that came before a caller which does not.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.has_promoted
    }

    /// Whether nothing is left to remember at `now`. A hold whose window has ended makes no
    /// difference: its release goes to the server, and the next thread that arrives asks it.
    pub(crate) fn is_idle(&self, now: Moment) -> bool {
        self.waiting.is_empty() && self.representatives == 0 && self.open_window(now).is_none()
    }

    fn open_window(&self, now: Moment) -> Option<Moment> {
        let window_end = self.hold.map(|hold| hold.window_end);
        window_end.filter(|window_end| now < *window_end)
    }

    /// What the waiting threads are owed while nobody watches the window.
    fn watch_or_promote(&mut self, now: Moment) -> Option<Signal<S>> {
        match self.open_window(now) {
            Some(window_end) => self.ensure_watched(window_end),
            None => self.promote(),
        }
    }

    /// Makes the last thread the watcher if there is none, because it waits longest.
    fn ensure_watched(&mut self, window_end: Moment) -> Option<Signal<S>> {
        if self.representatives > 0 || self.watcher.is_some() {
            return None;
        }
        let last = self.waiting.back()?;
        self.watcher = Some(last.ticket);
        Some(Signal::Watch(last.waiter.clone(), window_end))
    }

    /// Makes the first thread a representative if there is none.
    fn promote(&mut self) -> Option<Signal<S>> {
        if self.representatives > 0 {
            return None;
        }
        let first = self.waiting.pop_front()?;
        self.representatives = 1;
        self.has_promoted = true;
        self.watcher = None;
        Some(Signal::Represent(first.waiter))
    }
}

#[cfg(test)]
mod tests;
