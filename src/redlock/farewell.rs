//! `Farewell`: the few connections over which calls take their leave, one after the other, once pool and renewer have ended.
//! Any number of them may have waited until then.

use super::{Ending, Leaving, Links, NodeSet, Redlock, Trouble, Unheard};
use crate::{
    clock::{self, Moment},
    node::{Failure, Reason},
    sync::{Condvar, Mutex},
};

/// So many leave at a time.
const PLACES: usize = 4;

#[derive(Debug)]
pub(super) struct Farewell {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    waiting: usize,
    /// Kept only for as long as somebody waits for them.
    idle: Vec<Links>,
}

impl Farewell {
    pub(super) fn new() -> Farewell {
        Farewell { state: Mutex::default(), freed: Condvar::new() }
    }

    /// Connections, or `Some(None)` where they are to be made; `None` when the turn has not come until then.
    fn enter(&self, until: Moment) -> Option<Option<Links>> {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.taken == PLACES && clock::now() < until {
            clock::park(&self.freed, &mut state, until);
        }
        state.waiting -= 1;
        if state.taken < PLACES {
            state.taken += 1;
            return Some(state.idle.pop());
        }
        None
    }

    fn leave(&self, links: Links) {
        let mut state = self.state.lock();
        state.taken -= 1;
        state.idle.push(links);
        let unused = if state.waiting == 0 { std::mem::take(&mut state.idle) } else { Vec::new() };
        drop(state);
        clock::wake_one(&self.freed);
        // Closed outside the lock.
        drop(unused);
    }
}

impl Redlock {
    /// [`release`](Redlock::release) for a call that has outlived pool and renewer.
    pub(crate) fn release_last(&self, leaving: Leaving<'_>, until: Moment) -> Ending {
        let Some(links) = self.farewell.enter(until) else { return Ending::unheard(self.all()) };
        let mut links = links.unwrap_or_else(|| self.reserved());
        let ending = self.release(&mut links, leaving, until.after(clock::now()));
        self.farewell.leave(links);
        ending
    }
}

impl Ending {
    /// Nobody was asked in time.
    pub(crate) fn unheard(all: NodeSet) -> Ending {
        let outcome = Err(Trouble::Alone(Failure::unclear(Reason::TimedOut)));
        Ending { outcome, unsettled: all, unheard: Unheard::new(), released: NodeSet::NONE, may_be_done: all }
    }
}
