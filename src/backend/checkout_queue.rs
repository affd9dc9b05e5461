//! `CheckoutQueue`: the threads that wait for a pooled connection. First come, first served, but
//! releases before all others.
//!
//! In r2d2, all threads wait on one condition variable. With thousands of them, each wake-up and
//! each timeout takes time in proportion to their number, and a connection goes to whichever thread
//! runs first. Here each thread is woken when it is its turn.
//!
//! Invariant: a place is free only if no thread waits. A thread that is no longer among those that
//! wait has a place, or the queue is closed.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    core::cancel::CancelToken,
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex},
    },
};

/// Who is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    /// A release, which lets others go on.
    Release,
    Other,
}

#[derive(Debug)]
pub(super) struct CheckoutQueue {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: u32,
    waiting: BTreeMap<(Urgency, u64), Arc<Condvar>>,
    next_ticket: u64,
    is_closed: bool,
}

/// The right to one connection of the pool, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    queue: Arc<CheckoutQueue>,
}

/// Places for the locks that one call acquires one after the other.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "mysql"), expect(dead_code, reason = "only databases reserve places"))]
pub(crate) struct ReservedPlaces(Mutex<Vec<Place>>);

impl ReservedPlaces {
    #[cfg(feature = "mysql")]
    pub(super) fn take(&self) -> Option<Place> {
        self.0.lock().pop()
    }
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    Closed,
    /// Or cancelled.
    TimedOut,
}

impl CheckoutQueue {
    pub(super) fn new(places: u32) -> CheckoutQueue {
        let (waiting, next_ticket, is_closed) = (BTreeMap::new(), 0, false);
        CheckoutQueue { state: Mutex::new(State { free: places, waiting, next_ticket, is_closed }) }
    }

    /// Waits for a place until `deadline`.
    pub(super) fn enter(
        self: &Arc<Self>,
        urgency: Urgency,
        deadline: Moment,
    ) -> Result<Place, NoPlace> {
        self.enter_unless(urgency, deadline, None)
    }

    /// Waits for a place until `deadline`, or until `cancel` is cancelled.
    pub(super) fn enter_unless(
        self: &Arc<Self>,
        urgency: Urgency,
        deadline: Moment,
        cancel: Option<&CancelToken>,
    ) -> Result<Place, NoPlace> {
        let is_cancelled = || cancel.is_some_and(CancelToken::is_cancelled);
        let _registration;
        let mut state = self.state.lock();
        if !state.is_closed && state.free == 0 {
            let ticket = (urgency, state.next_ticket);
            state.next_ticket += 1;
            let turn = Arc::new(Condvar::new());
            state.waiting.insert(ticket, turn.clone());
            if let Some(cancel) = cancel {
                // A token that is cancelled already wakes this thread now, which takes the mutex.
                drop(state);
                let (queue, turn) = (self.clone(), turn.clone());
                _registration = cancel.on_cancel(Arc::new(move || {
                    // Otherwise the thread may be between its look at the token and its sleep.
                    drop(queue.state.lock());
                    clock::wake_one(&turn);
                }));
                state = self.state.lock();
            }
            while state.waiting.contains_key(&ticket) {
                if is_cancelled() || clock::now() >= deadline {
                    state.waiting.remove(&ticket);
                    return Err(NoPlace::TimedOut);
                }
                clock::park(&turn, &mut state, deadline);
            }
        } else if !state.is_closed {
            state.free -= 1;
        }
        if state.is_closed {
            return Err(NoPlace::Closed);
        }
        drop(state);
        let place = Place { queue: self.clone() };
        // Another thread may have passed the place on meanwhile, because of the same token.
        if is_cancelled() { Err(NoPlace::TimedOut) } else { Ok(place) }
    }

    /// Waits for several places, as for [one](Self::enter_unless). Two callers that had some of
    /// them each could wait for each other, so only the one that has the only place of `turn`
    /// gathers them.
    #[cfg(feature = "mysql")]
    pub(super) fn enter_many(
        self: &Arc<Self>,
        turn: &Arc<CheckoutQueue>,
        count: u32,
        deadline: Moment,
        cancel: Option<&CancelToken>,
    ) -> Result<ReservedPlaces, NoPlace> {
        let _turn = turn.enter_unless(Urgency::Other, deadline, cancel)?;
        let places = (0..count).map(|_| self.enter_unless(Urgency::Other, deadline, cancel));
        Ok(ReservedPlaces(Mutex::new(places.collect::<Result<_, _>>()?)))
    }

    /// Ends all waiting, now and later.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.values().for_each(|turn| clock::wake_one(turn));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        let next = state.waiting.pop_first();
        if next.is_none() {
            state.free += 1;
        }
        drop(state);
        if let Some((_, turn)) = next {
            clock::wake_one(&turn);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;

    fn later() -> Moment {
        clock::now().saturating_add(Duration::from_secs(60))
    }

    fn await_waiting(queue: &CheckoutQueue, count: usize) {
        while queue.state.lock().waiting.len() < count {
            thread::yield_now();
        }
    }

    /// Fault: N136
    #[test]
    fn threads_are_served_in_turn_and_releases_first() {
        let queue = Arc::new(CheckoutQueue::new(1));
        let place = queue.enter(Urgency::Other, later()).unwrap();
        let (served, order) = mpsc::channel();
        thread::scope(|threads| {
            let callers = [(Urgency::Other, 1), (Urgency::Other, 2), (Urgency::Release, 0)];
            for (waiting, (urgency, caller)) in callers.into_iter().enumerate() {
                let (queue, served) = (&queue, served.clone());
                threads.spawn(move || {
                    let _place = queue.enter(urgency, later()).unwrap();
                    served.send(caller).unwrap();
                });
                await_waiting(queue, waiting + 1);
            }
            drop(place);
        });
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(queue.state.lock().free, 1);
    }

    #[test]
    fn thread_that_gave_up_gets_no_place() {
        let queue = Arc::new(CheckoutQueue::new(1));
        let place = queue.enter(Urgency::Other, later()).unwrap();
        let gave_up = queue.enter(Urgency::Other, clock::now());
        assert_eq!(gave_up.unwrap_err(), NoPlace::TimedOut);
        drop(place);
        assert!(queue.enter(Urgency::Other, clock::now()).is_ok());
    }

    #[test]
    fn closed_queue_ends_all_waiting() {
        let queue = Arc::new(CheckoutQueue::new(1));
        let place = queue.enter(Urgency::Other, later()).unwrap();
        thread::scope(|threads| {
            let waiting = threads.spawn(|| queue.enter(Urgency::Other, later()).map(drop));
            await_waiting(&queue, 1);
            queue.close();
            assert_eq!(waiting.join().unwrap(), Err(NoPlace::Closed));
        });
        drop(place);
        assert_eq!(queue.enter(Urgency::Release, later()).unwrap_err(), NoPlace::Closed);
    }
}
