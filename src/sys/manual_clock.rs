//! `ManualClock`: a clock that stands until it is advanced, for the threads that have entered
//! it. Only with the feature `testing`.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    mem::ManuallyDrop,
    sync::Arc,
    thread::{self, ThreadId},
    time::Duration,
};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// What a new clock shows, in nanoseconds.
const FIRST: u64 = 1_000_000_000_000;
/// How long an advance waits for a thread that does not wait, in real time, before it goes on: a
/// handler of events could wait for the thread that advances.
const BUSY_MAX: Duration = Duration::from_secs(60);

/// A clock that stands, except during [`advance`](Self::advance) and while its owner waits: there
/// is nobody else then who could advance it.
#[derive(Debug)]
pub(crate) struct ManualClock {
    /// The thread that created the clock.
    owner: ThreadId,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    now: u64,
    /// Number of threads that have entered and do not wait.
    busy: usize,
    waiting: BTreeMap<u64, Waiting>,
    tickets: u64,
}

#[derive(Debug)]
struct Waiting {
    place: usize,
    until: u64,
    woken: bool,
}

impl State {
    /// Wakes the waiting threads for which this holds.
    fn wake(&mut self, which: impl Fn(&Waiting) -> bool) {
        for waiting in self.waiting.values_mut().filter(|waiting| !waiting.woken) {
            if which(waiting) {
                waiting.woken = true;
                self.busy += 1;
            }
        }
    }

    /// Goes on to the next time at which a thread wakes, if that is not after `limit`.
    fn step(&mut self, limit: u64) -> bool {
        let sleeping = self.waiting.values().filter(|waiting| !waiting.woken);
        let Some(next) = sleeping
            .map(|waiting| waiting.until)
            .min()
            .filter(|next| *next <= limit && *next != u64::MAX)
        else {
            return false;
        };
        self.now = self.now.max(next);
        let now = self.now;
        self.wake(|waiting| waiting.until <= now);
        true
    }
}

thread_local! {
    /// Has no destructor, so that it is accessible in those of a thread: they may release locks.
    /// `Entered` drops what it sets.
    static CURRENT: RefCell<ManuallyDrop<Option<Arc<ManualClock>>>> =
        const { RefCell::new(ManuallyDrop::new(None)) };
}

/// The clock that the calling thread has entered, if any.
pub(crate) fn current() -> Option<Arc<ManualClock>> {
    CURRENT.with(|current| (**current.borrow()).clone())
}

/// Returns the clock before.
fn set_current(clock: Option<Arc<ManualClock>>) -> Option<Arc<ManualClock>> {
    ManuallyDrop::into_inner(CURRENT.replace(ManuallyDrop::new(clock)))
}

/// While this exists, the thread uses the clock.
#[derive(Debug)]
pub(crate) struct Entered {
    clock: Option<Arc<ManualClock>>,
    before: Option<Arc<ManualClock>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        drop(set_current(self.before.take()));
        if let Some(clock) = &self.clock {
            clock.state.lock().busy -= 1;
            clock.changed.notify_all();
        }
    }
}

/// Makes the calling thread use this clock, or the real one. Returns `None` if it does so already.
pub(crate) fn enter(clock: Option<&Arc<ManualClock>>) -> Option<Entered> {
    if current().as_ref().map(Arc::as_ptr) == clock.map(Arc::as_ptr) {
        return None;
    }
    if let Some(clock) = clock {
        clock.begin_thread();
    }
    Some(enter_begun(clock.cloned()))
}

/// Like [`enter`], on a thread that has been counted.
pub(super) fn enter_begun(clock: Option<Arc<ManualClock>>) -> Entered {
    Entered { before: set_current(clock.clone()), clock }
}

/// Whether a thread that uses a clock has ended, for a thread that joins it. That one must not be
/// counted as busy meanwhile: the clock has to go on while the joined thread waits.
#[derive(Debug)]
pub(crate) struct ThreadEnd {
    clock: Arc<ManualClock>,
    has_ended: Mutex<bool>,
}

impl ThreadEnd {
    pub(super) fn new(clock: &Arc<ManualClock>) -> Arc<ThreadEnd> {
        Arc::new(ThreadEnd { clock: clock.clone(), has_ended: Mutex::new(false) })
    }

    pub(super) fn wait(&self) {
        let _entered = enter(Some(&self.clock));
        let mut has_ended = self.has_ended.lock();
        while !*has_ended {
            self.clock.park(self.place(), u64::MAX, |wait| {
                MutexGuard::unlocked(&mut has_ended, wait);
            });
        }
    }

    pub(super) fn report(&self) {
        *self.has_ended.lock() = true;
        self.clock.wake(self.place());
    }

    fn place(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl ManualClock {
    pub(crate) fn new() -> Arc<ManualClock> {
        let state = State { now: FIRST, busy: 0, waiting: BTreeMap::new(), tickets: 0 };
        let (owner, state) = (thread::current().id(), Mutex::new(state));
        Arc::new(ManualClock { owner, state, changed: Condvar::new() })
    }

    /// Counts a thread that is about to start, so that the clock does not go on without it.
    pub(super) fn begin_thread(&self) {
        self.state.lock().busy += 1;
    }

    pub(super) fn cancel_thread(&self) {
        self.state.lock().busy -= 1;
    }

    pub(super) fn now(&self) -> u64 {
        self.state.lock().now
    }

    /// Waits at `place` until it is woken or `until` is reached. Calls `unlocked` with the wait
    /// itself, after which a wake cannot be missed.
    pub(super) fn park(&self, place: usize, until: u64, unlocked: impl FnOnce(&mut dyn FnMut())) {
        let ticket = {
            let mut state = self.state.lock();
            if until <= state.now {
                return;
            }
            state.tickets += 1;
            state.busy -= 1;
            let ticket = state.tickets;
            state.waiting.insert(ticket, Waiting { place, until, woken: false });
            ticket
        };
        self.changed.notify_all();
        unlocked(&mut || self.wait(ticket));
    }

    fn wait(&self, ticket: u64) {
        let is_owner = thread::current().id() == self.owner;
        let mut state = self.state.lock();
        while state.waiting.get(&ticket).is_some_and(|waiting| !waiting.woken) {
            if is_owner && state.busy == 0 && state.step(u64::MAX) {
                self.changed.notify_all();
            } else {
                self.changed.wait(&mut state);
            }
        }
        state.waiting.remove(&ticket);
    }

    /// Wakes all threads that wait at `place`.
    pub(super) fn wake(&self, place: usize) {
        self.state.lock().wake(|waiting| waiting.place == place);
        self.changed.notify_all();
    }

    /// Goes on by this span. Everything that is due meanwhile happens in its order, and before this
    /// returns.
    pub(crate) fn advance(&self, span: Duration) {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let mut state = self.state.lock();
        // The last value means never.
        let end = state.now.saturating_add(nanos).min(u64::MAX - 1);
        loop {
            self.await_idle(&mut state);
            if !state.step(end) {
                state.now = state.now.max(end);
                return;
            }
            self.changed.notify_all();
        }
    }

    /// Waits until all threads wait.
    fn await_idle(&self, state: &mut MutexGuard<'_, State>) {
        while state.busy > 0 && !self.changed.wait_for(state, BUSY_MAX).timed_out() {}
    }
}
