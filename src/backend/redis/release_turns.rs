//! `ReleaseTurns`: connections, one to each node, that are reserved for releases. Callers that find
//! the pool exhausted use them one after the other, and so do calls that outlive a shutdown, of
//! which there can be any number.
//!
//! Invariant: at most one caller has the connections, and it holds no mutex meanwhile. Every caller
//! waits until its own deadline at most.

use std::sync::Arc;

use super::{NodeConnections, RedisNode};
use crate::sys::{
    clock::{self, Moment},
    sync::{Condvar, Mutex},
};

#[derive(Debug)]
pub(crate) struct ReleaseTurns {
    nodes: Arc<[Arc<RedisNode>]>,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    waiting: usize,
    /// Connections from an earlier turn. After a shutdown, kept only while other calls wait.
    idle: Option<NodeConnections>,
    is_closed: bool,
}

/// The right to use the connections, until it is dropped.
struct Turn<'a> {
    turns: &'a ReleaseTurns,
    /// `None` if they have not been made yet.
    connections: Option<NodeConnections>,
}

impl ReleaseTurns {
    pub(crate) fn new(nodes: Arc<[Arc<RedisNode>]>) -> ReleaseTurns {
        ReleaseTurns { nodes, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Runs `release` with the connections. Returns `None` if there was no time for it before
    /// `until`.
    pub(crate) fn run<T>(
        &self,
        until: Moment,
        release: impl FnOnce(&mut NodeConnections) -> T,
    ) -> Option<T> {
        let mut turn = self.wait(until).filter(|_| clock::now() < until)?;
        let reserve = || NodeConnections::reserved(&self.nodes);
        Some(release(turn.connections.get_or_insert_with(reserve)))
    }

    /// Waits for a turn. Returns `None` if there was none by `until`.
    fn wait(&self, until: Moment) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.is_taken && clock::now() < until {
            clock::park(&self.freed, &mut state, until);
        }
        state.waiting -= 1;
        if state.is_taken {
            return None;
        }
        state.is_taken = true;
        Some(Turn { turns: self, connections: state.idle.take() })
    }

    /// Closes the connections once no call waits for them.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let unused = if state.waiting == 0 { state.idle.take() } else { None };
        drop(state);
        drop(unused);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        state.is_taken = false;
        // A waiting call takes them, even if its deadline has passed.
        if !state.is_closed || state.waiting > 0 {
            state.idle = self.connections.take();
        }
        drop(state);
        clock::wake_one(&self.turns.freed);
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    fn soon() -> Moment {
        clock::now().saturating_add(Duration::from_millis(20))
    }

    fn later() -> Moment {
        clock::now().saturating_add(Duration::from_secs(60))
    }

    #[test]
    fn call_waits_for_its_turn_until_its_deadline() {
        let turns = ReleaseTurns::new(Arc::new([]));
        let turn = turns.wait(later());
        thread::scope(|threads| {
            let late = threads.spawn(|| turns.wait(soon()).is_some());
            assert!(!late.join().unwrap());
            let patient = threads.spawn(|| turns.wait(Moment::NEVER).is_some());
            drop(turn);
            assert!(patient.join().unwrap());
        });
        assert!(!turns.state.lock().is_taken);
    }

    #[test]
    fn connections_are_kept_until_closed_and_unused() {
        let turns = ReleaseTurns::new(Arc::new([]));
        let give_back = || {
            let mut turn = turns.wait(later()).unwrap();
            turn.connections.get_or_insert_with(|| NodeConnections(Box::new([])));
        };
        give_back();
        assert!(turns.state.lock().idle.is_some());
        turns.close();
        assert!(turns.state.lock().idle.is_none());
        turns.state.lock().waiting = 1;
        give_back();
        assert!(turns.state.lock().idle.is_some(), "a call waits for them");
        turns.state.lock().waiting = 0;
        give_back();
        assert!(turns.state.lock().idle.is_none());
    }
}
