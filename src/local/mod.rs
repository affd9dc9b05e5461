//! Waiting inside a process: the threads that want a lock which another thread of the same manager
//! holds or asks for. A release hands the lock to the first of them, without the server.
//!
//! `queue.rs` decides; this file wakes the threads. A thread that has left a queue finds the reason
//! in its [`LocalWaiter`], once the mutex of the queues has been unlocked. A thread
//! that others depend on has a [`Representative`], a [`LocalHold`] or a [`Passing`], whose
//! destructor passes the duty on. So no early return and no panic leaves the others without
//! anybody.

#[cfg(all(test, loom))]
mod loom_tests;
mod queue;
mod waiter;

use std::{collections::HashMap, fmt, num::NonZeroU64, sync::Arc, time::Duration};

pub(crate) use self::{queue::Terms, waiter::Wanted};
use self::{
    queue::{Arrival, HoldNumber, LocalQueue, Release, Signal, Ticket},
    waiter::{LocalWaiter, Woken},
};
use crate::{
    core::{cancel::CancelToken, claim::TOKENS_RESERVED},
    sys::{
        clock::{self, Moment},
        sync::Mutex,
    },
};

/// Part of what is left of a lease for which its lock may be handed over. The lease then is usually
/// not about to be renewed, and each holder has nearly all of it.
const WINDOWS_PER_LEASE: u32 = 8;
/// Divisor of the window: the part of it in which the lock is no longer handed over. The last
/// holder's release takes until the end of the window then, and waiters elsewhere wait no longer
/// than the windows before theirs add up to.
const END_DIVISOR: u32 = 8;

/// The local queues of a manager. `T` is a lock that is handed over.
#[derive(Debug)]
pub(crate) struct LocalQueues<T: Send + 'static> {
    window: Duration,
    shared: Mutex<Shared<T>>,
}

/// How a waiting thread is reached.
type Waiter<T> = Arc<LocalWaiter<Turn<T>>>;

struct Shared<T: Send + 'static> {
    queues: HashMap<Arc<str>, LocalQueue<Waiter<T>>>,
    last_number: NonZeroU64,
    is_closed: bool,
}

impl<T: Send + 'static> Shared<T> {
    /// A number that was not used before.
    fn next_number(&mut self) -> NonZeroU64 {
        self.last_number = self.last_number.saturating_add(1);
        self.last_number
    }
}

/// How a wait inside the process has ended.
#[derive(Debug)]
pub(crate) enum Turn<T: Send + 'static> {
    /// The lock was handed over.
    Taken(T),
    /// The thread asks the server, for itself and the threads behind it.
    Represents(Representative<T>),
    TimedOut,
    Cancelled,
    Closed,
}

/// The duty to ask the server. If it is dropped before a grant, it goes to the next thread.
#[derive(Debug)]
pub(crate) struct Representative<T: Send + 'static> {
    queue_ref: QueueRef<T>,
    /// The lock was granted.
    is_ended: bool,
}

/// A lock that the server has granted to this process. Dropping this is a release to the server:
/// the next thread asks it.
#[derive(Debug)]
pub(crate) struct LocalHold<T: Send + 'static> {
    queue_ref: QueueRef<T>,
    /// `None` once the lock has been released or passed on.
    number: Option<HoldNumber>,
}

/// A lock between two threads: its next holder has left the queue. If this is dropped, that thread
/// asks the server.
#[derive(Debug)]
pub(crate) struct Passing<T: Send + 'static> {
    queue_ref: QueueRef<T>,
    /// `None` once the next holder has the lock.
    number: Option<HoldNumber>,
    to: Waiter<T>,
}

/// One lock of a manager.
struct QueueRef<T: Send + 'static> {
    queues: Arc<LocalQueues<T>>,
    lock: Arc<str>,
}

impl<T: Send + 'static> LocalQueues<T> {
    /// Creates queues whose locks are handed over for at most `window` after each grant.
    pub(crate) fn new(window: Duration) -> LocalQueues<T> {
        let shared =
            Shared { queues: HashMap::new(), last_number: NonZeroU64::MIN, is_closed: false };
        LocalQueues { window, shared: Mutex::new(shared) }
    }

    /// Waits for the lock inside the process, until `until`. The flag says whether it had to wait.
    pub(crate) fn enter(
        self: &Arc<Self>,
        lock: &Arc<str>,
        wanted: Wanted,
        until: Moment,
        cancel: Option<&CancelToken>,
    ) -> (Turn<T>, bool) {
        let now = clock::now();
        let (waiter, ticket, watch_until) = {
            let mut shared = self.shared.lock();
            if shared.is_closed {
                return (Turn::Closed, false);
            }
            let ticket = Ticket(shared.next_number());
            if shared.queues.len() == shared.queues.capacity() {
                // Most locks are held for longer than their window. They need no queue then.
                shared.queues.retain(|_, queue| !queue.is_idle(now));
            }
            let queue = shared.queues.entry(lock.clone()).or_default();
            match queue.arrive(ticket, wanted.terms, now, || LocalWaiter::new(wanted)) {
                Arrival::Represents => {
                    return (Turn::Represents(self.representative(lock)), false);
                }
                Arrival::Waits { waiter, watch_until } => (waiter, ticket, watch_until),
            }
        };
        if let Some(watch_until) = watch_until {
            waiter.watch(watch_until);
        }
        (self.wait(lock, &waiter, ticket, until, cancel), true)
    }

    fn wait(
        self: &Arc<Self>,
        lock: &Arc<str>,
        waiter: &Waiter<T>,
        ticket: Ticket,
        until: Moment,
        cancel: Option<&CancelToken>,
    ) -> Turn<T> {
        let _cancellation = cancel.map(|token| {
            let waiter = waiter.clone();
            token.on_cancel(Arc::new(move || waiter.cancel()))
        });
        loop {
            let given_up = match waiter.wait(until) {
                Woken::Turn(turn) => return turn,
                Woken::WindowEnded => {
                    let decide =
                        |queue: &mut LocalQueue<_>| queue.on_window_end(ticket, clock::now());
                    self.obey(lock, self.with(lock, decide));
                    continue;
                }
                Woken::TimedOut => Turn::TimedOut,
                Woken::Cancelled => Turn::Cancelled,
            };
            if self.leave(lock, ticket) {
                return given_up;
            }
            // Another thread has removed it from the queue, and is about to say why.
            return waiter.wait_for_turn();
        }
    }

    /// Whether threads of this process wait for the lock that have not asked the server yet.
    pub(crate) fn has_waiting(&self, lock: &str) -> bool {
        self.shared.lock().queues.get(lock).is_some_and(LocalQueue::has_waiting)
    }

    /// Ends all waits, now and later.
    pub(crate) fn close(&self) {
        let waiting: Vec<_> = {
            let mut shared = self.shared.lock();
            shared.is_closed = true;
            shared.queues.drain().flat_map(|(_, mut queue)| queue.scatter()).collect()
        };
        waiting.into_iter().for_each(|waiter| waiter.give(Turn::Closed));
    }

    fn representative(self: &Arc<Self>, lock: &Arc<str>) -> Representative<T> {
        let queue_ref = QueueRef { queues: self.clone(), lock: lock.clone() };
        Representative { queue_ref, is_ended: false }
    }

    /// Returns false if the thread has left the queue already.
    fn leave(self: &Arc<Self>, lock: &Arc<str>, ticket: Ticket) -> bool {
        let left = self.with(lock, |queue| queue.leave(ticket, clock::now()));
        let Some(signal) = left else { return false };
        self.obey(lock, signal);
        true
    }

    /// Has the queue decide, and forgets it if it is not needed any more.
    fn with<D>(&self, lock: &Arc<str>, decide: impl FnOnce(&mut LocalQueue<Waiter<T>>) -> D) -> D {
        let now = clock::now();
        let mut shared = self.shared.lock();
        let queue = shared.queues.entry(lock.clone()).or_default();
        let decision = decide(queue);
        if queue.is_idle(now) {
            shared.queues.remove(lock);
        }
        decision
    }

    fn obey(self: &Arc<Self>, lock: &Arc<str>, signal: Option<Signal<Waiter<T>>>) {
        match signal {
            Some(Signal::Represent(waiter)) => {
                waiter.give(Turn::Represents(self.representative(lock)));
            }
            Some(Signal::Watch(waiter, until)) => waiter.watch(until),
            None => {}
        }
    }
}

impl<T: Send + 'static> Representative<T> {
    /// The servers granted the lock at `since`. Its lease ends at `deadline`.
    pub(crate) fn on_granted(mut self, since: Moment, deadline: Moment) -> LocalHold<T> {
        self.is_ended = true;
        let queue_ref = self.queue_ref.clone();
        let window =
            queue_ref.queues.window.min(deadline.duration_since(since) / WINDOWS_PER_LEASE);
        let window = window - window / END_DIVISOR;
        let number = HoldNumber(queue_ref.queues.shared.lock().next_number());
        queue_ref.decide(|queue| {
            queue.on_granted(number, since.saturating_add(window), TOKENS_RESERVED)
        });
        LocalHold { queue_ref, number: Some(number) }
    }

    /// Makes all threads behind this one ask the server too, because it is unreachable: each of
    /// them fails at a time that counts from its own first request.
    pub(crate) fn scatter(&self) {
        let QueueRef { queues, lock } = &self.queue_ref;
        for waiter in queues.with(lock, LocalQueue::scatter) {
            waiter.give(Turn::Represents(queues.representative(lock)));
        }
    }
}

impl<T: Send + 'static> Drop for Representative<T> {
    fn drop(&mut self) {
        if !self.is_ended {
            self.queue_ref.decide(|queue| queue.on_left(clock::now()));
        }
    }
}

impl<T: Send + 'static> LocalHold<T> {
    /// Chooses the next holder of a lock that was held on these terms. Returns `None` if the lock
    /// must be released at the server.
    pub(crate) fn pass(mut self, held: Terms) -> Option<Passing<T>> {
        let (queue_ref, number) = (self.queue_ref.clone(), self.number.take()?);
        let mut next = None;
        queue_ref.decide(|queue| match queue.release(number, Some(held), clock::now()) {
            Release::HandOver { to, signal } => {
                next = Some(to);
                signal
            }
            Release::ToServer(signal) => signal,
        });
        next.map(|to| Passing { queue_ref, number: Some(number), to })
    }
}

impl<T: Send + 'static> Drop for LocalHold<T> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.queue_ref.decide(|queue| match queue.release(number, None, clock::now()) {
                Release::HandOver { signal, .. } | Release::ToServer(signal) => signal,
            });
        }
    }
}

impl<T: Send + 'static> Passing<T> {
    /// What the next holder wants.
    pub(crate) fn wanted(&self) -> Wanted {
        self.to.wanted
    }

    /// Gives the lock to its next holder.
    pub(crate) fn complete(mut self, lock: impl FnOnce(LocalHold<T>) -> T) {
        let (queue_ref, number) = (self.queue_ref.clone(), self.number.take());
        self.to.give(Turn::Taken(lock(LocalHold { queue_ref, number })));
    }
}

impl<T: Send + 'static> Drop for Passing<T> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let QueueRef { queues, lock } = &self.queue_ref;
            queues.with(lock, |queue| queue.on_lost(number));
            self.to.give(Turn::Represents(queues.representative(lock)));
        }
    }
}

impl<T: Send + 'static> QueueRef<T> {
    fn decide(&self, decide: impl FnOnce(&mut LocalQueue<Waiter<T>>) -> Option<Signal<Waiter<T>>>) {
        let signal = self.queues.with(&self.lock, decide);
        self.queues.obey(&self.lock, signal);
    }
}

impl<T: Send + 'static> Clone for QueueRef<T> {
    fn clone(&self) -> QueueRef<T> {
        QueueRef { queues: self.queues.clone(), lock: self.lock.clone() }
    }
}

impl<T: Send + 'static> fmt::Debug for QueueRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QueueRef").field(&self.lock).finish()
    }
}

impl<T: Send + 'static> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("queues", &self.queues.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted {
        terms: Terms { ttl: Duration::from_secs(30), renew: true, is_local: true },
        max_hold: None,
        release_in_background: false,
    };

    /// A grant message may arrive late. Processes that wait elsewhere wait from when it was sent.
    #[test]
    fn window_counts_from_the_grant() {
        let window = Duration::from_secs(60);
        let (lease_end, now) = (Moment::NEVER, clock::now().saturating_add(2 * window));
        for (since, is_open) in [(clock::now(), true), (Moment::default(), false)] {
            let queues = Arc::new(LocalQueues::<()>::new(window));
            let (Turn::Represents(one), _) = queues.enter(&"x".into(), WANTED, now, None) else {
                panic!("nobody held it before")
            };
            let _hold = one.on_granted(since, lease_end);
            let shared = queues.shared.lock();
            assert_eq!(shared.queues.len(), usize::from(is_open));
            // `now` is two windows ahead.
            assert!(shared.queues.values().all(|queue| queue.is_idle(now)));
        }
    }

    /// A queue for each name that was ever locked would fill the memory.
    #[test]
    fn queues_of_locks_held_past_their_window_are_forgotten() {
        let window = Duration::from_millis(1);
        let queues = Arc::new(LocalQueues::<()>::new(window));
        let lease_end = clock::now().saturating_add(Duration::from_secs(3600));
        let mut holds = Vec::new();
        let mut hold_another = || {
            let lock: Arc<str> = holds.len().to_string().into();
            match queues.enter(&lock, WANTED, Moment::NEVER, None) {
                (Turn::Represents(one), false) => {
                    holds.push(one.on_granted(clock::now(), lease_end))
                }
                other => panic!("nobody held it before: {other:?}"),
            }
        };
        let number_of_queues = || queues.shared.lock().queues.len();
        let is_full = || number_of_queues() == queues.shared.lock().queues.capacity();
        hold_another();
        while !is_full() {
            hold_another();
        }
        clock::sleep_until(clock::now().saturating_add(window));
        hold_another();
        assert_eq!(number_of_queues(), 1, "{} locks are held", holds.len());
    }
}
