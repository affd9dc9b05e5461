//! `Farewell`: the few connections that late calls share for their releases, once pool and renewer
//! have ended. Any number of calls may wait until then.

use super::{AskError, NodeConnections, PendingAcks, Redlock, ReleaseOutcome, ReleaseRequest};
use crate::{
    backend::redis::{NodeError, NodeErrorKind},
    core::quorum::NodeSet,
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex},
    },
};

/// Maximum number of calls that release at the same time.
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
    /// Kept only while other calls wait for them.
    idle: Vec<NodeConnections>,
}

impl Farewell {
    pub(super) fn new() -> Farewell {
        Farewell { state: Mutex::default(), freed: Condvar::new() }
    }

    /// Waits for a turn. Returns connections, or `Some(None)` if the caller must make them; `None`
    /// if there was no turn by `until`.
    fn enter(&self, until: Moment) -> Option<Option<NodeConnections>> {
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

    fn leave(&self, links: NodeConnections) {
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
    pub(crate) fn release_last(
        &self,
        leaving: ReleaseRequest<'_>,
        until: Moment,
    ) -> ReleaseOutcome {
        let Some(links) = self.farewell.enter(until) else {
            return ReleaseOutcome::without_reply(self.all_nodes());
        };
        let mut links = links.unwrap_or_else(|| self.reserved_connections());
        let ending = self.release(&mut links, leaving, until.duration_since(clock::now()));
        self.farewell.leave(links);
        ending
    }
}

impl ReleaseOutcome {
    /// No reply in time. The release may have been applied on any of the nodes.
    pub(crate) fn without_reply(all: NodeSet) -> ReleaseOutcome {
        let outcome = Err(AskError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut)));
        ReleaseOutcome {
            result: outcome,
            unconfirmed: all,
            unacknowledged: PendingAcks::new(),
            released_on: NodeSet::EMPTY,
            maybe_applied: all,
        }
    }
}
