//! `Refresh`: one thread asks for the map at a time, and the others wait for its result.

use std::{io, sync::Arc, time::Duration};

use crate::{
    backend::error::{NodeError, NodeErrorKind},
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex},
    },
};

/// Minimum time from one request for the map to the next; otherwise each of many callers would
/// ask while a node is unreachable. Doubles with each map that brings nothing new, because many
/// processes may ask the remaining nodes.
const REFRESH_PAUSE_MIN: Duration = Duration::from_millis(50);
const REFRESH_PAUSE_MAX: Duration = Duration::from_millis(400);

#[derive(Debug)]
pub(super) struct Refresh {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    is_running: bool,
    /// The result of the last request, and when it ended.
    last: Result<(), NodeError>,
    ended_at: Option<Moment>,
    /// Minimum time from then to the next one.
    pause: Duration,
}

/// The duty of one thread to ask. The others wait until this is dropped, even if the thread panics.
pub(super) struct Asking(Arc<Refresh>);

impl Refresh {
    pub(super) fn new() -> Arc<Refresh> {
        let pause = REFRESH_PAUSE_MIN;
        let state = State { is_running: false, last: Ok(()), ended_at: None, pause };
        Arc::new(Refresh { state: Mutex::new(state), ended: Condvar::new() })
    }

    /// Whether the last request has ended only just now.
    pub(super) fn is_early(&self) -> bool {
        let state = self.state.lock();
        state.ended_at.is_some_and(|at| clock::now().duration_since(at) < state.pause)
    }

    /// Returns nothing if another thread is asking.
    pub(super) fn begin(self: &Arc<Refresh>) -> Option<Asking> {
        let was_running = std::mem::replace(&mut self.state.lock().is_running, true);
        (!was_running).then(|| Asking(self.clone()))
    }

    /// Waits until `deadline` for the result of the thread that is asking.
    pub(super) fn wait(&self, deadline: Moment) -> Result<(), NodeError> {
        let mut state = self.state.lock();
        while state.is_running {
            if clock::now() >= deadline {
                return Err(NodeError::not_applied(NodeErrorKind::TimedOut));
            }
            clock::park(&self.ended, &mut state, deadline);
        }
        state.last.clone()
    }
}

impl Asking {
    /// `ask` returns whether the map is a new one.
    pub(super) fn run(
        self,
        ask: impl FnOnce() -> Result<bool, NodeError>,
    ) -> Result<(), NodeError> {
        // What the other threads find if this one panics.
        let panicked = io::Error::other("the thread that asked for the map has panicked");
        self.0.state.lock().last = Err(NodeError::not_applied(panicked));
        let result = ask();
        let mut state = self.0.state.lock();
        state.pause = match result {
            Ok(true) => REFRESH_PAUSE_MIN,
            Ok(false) | Err(_) => (state.pause * 2).min(REFRESH_PAUSE_MAX),
        };
        let result = result.map(drop);
        (state.last, state.ended_at) = (result.clone(), Some(clock::now()));
        result
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.state.lock().is_running = false;
        clock::wake_all(&self.0.ended);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Otherwise all threads would wait for a thread that is gone.
    ///
    /// Promise: P6
    #[test]
    fn panic_while_asking_for_the_map_lets_others_ask() {
        let refresh = Refresh::new();
        let deadline = clock::now().saturating_add(Duration::from_secs(10));
        let asking = refresh.begin().unwrap();
        assert!(refresh.begin().is_none(), "one thread asks at a time");
        let ask = || asking.run(|| panic!("while it asks for the map"));
        assert!(catch_unwind(AssertUnwindSafe(ask)).is_err());
        assert!(refresh.wait(deadline).unwrap_err().kind.to_string().contains("panicked"));
        assert!(refresh.begin().unwrap().run(|| Ok(true)).is_ok());
        assert!(refresh.wait(deadline).is_ok() && refresh.is_early());
    }

    /// Fault: N263
    #[test]
    fn maps_without_news_are_asked_for_less_often() {
        let refresh = Refresh::new();
        let ask = |map: Result<bool, NodeError>| {
            let _ = refresh.begin().unwrap().run(|| map);
            refresh.state.lock().pause.as_millis()
        };
        let failed = || Err(NodeError::not_applied(NodeErrorKind::TimedOut));
        assert_eq!(
            [Ok(true), Ok(false), failed(), Ok(false), Ok(false), Ok(true)].map(ask),
            [50, 100, 200, 400, 400, 50]
        );
    }
}
