//! `LocalWaiter`: one thread that waits inside its process. A message ends its wait.

use std::{fmt, sync::Arc, time::Duration};

use super::queue::Terms;
use crate::sys::{
    clock::{self, Moment},
    sync::{Condvar, Mutex},
};

/// What a waiting thread wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) terms: Terms,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) release_in_background: bool,
}

pub(super) struct LocalWaiter<M> {
    pub(super) wanted: Wanted,
    state: Mutex<State<M>>,
    wakeup: Condvar,
}

struct State<M> {
    turn: Option<M>,
    /// Time until which the thread watches the window; `NEVER` if it need not.
    watch_until: Moment,
    is_cancelled: bool,
}

/// Why a thread has woken.
pub(super) enum Woken<M> {
    /// The message that ends the wait.
    Turn(M),
    WindowEnded,
    TimedOut,
    Cancelled,
}

impl<M> LocalWaiter<M> {
    pub(super) fn new(wanted: Wanted) -> Arc<LocalWaiter<M>> {
        let state = State { turn: None, watch_until: Moment::NEVER, is_cancelled: false };
        Arc::new(LocalWaiter { wanted, state: Mutex::new(state), wakeup: Condvar::new() })
    }

    /// Ends the wait with this message. Called once, by the thread that has removed this one from
    /// its queue.
    pub(super) fn give(&self, turn: M) {
        self.signal(|state| state.turn = Some(turn));
    }

    pub(super) fn watch(&self, until: Moment) {
        self.signal(|state| state.watch_until = until);
    }

    pub(super) fn cancel(&self) {
        self.signal(|state| state.is_cancelled = true);
    }

    fn signal(&self, set: impl FnOnce(&mut State<M>)) {
        set(&mut self.state.lock());
        clock::wake_one(&self.wakeup);
    }

    /// Sleeps until there is something to do, or until `until`.
    pub(super) fn wait(&self, until: Moment) -> Woken<M> {
        let mut state = self.state.lock();
        loop {
            if let Some(turn) = state.turn.take() {
                return Woken::Turn(turn);
            }
            if state.is_cancelled {
                return Woken::Cancelled;
            }
            let now = clock::now();
            if now >= until {
                return Woken::TimedOut;
            }
            if now >= state.watch_until {
                state.watch_until = Moment::NEVER;
                return Woken::WindowEnded;
            }
            let wake_at = until.min(state.watch_until);
            clock::park(&self.wakeup, &mut state, wake_at);
        }
    }

    /// Sleeps until its turn, which is certain.
    pub(super) fn wait_for_turn(&self) -> M {
        let mut state = self.state.lock();
        loop {
            if let Some(turn) = state.turn.take() {
                return turn;
            }
            clock::park(&self.wakeup, &mut state, Moment::NEVER);
        }
    }
}

impl<M> fmt::Debug for LocalWaiter<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalWaiter").field("wanted", &self.wanted).finish_non_exhaustive()
    }
}
