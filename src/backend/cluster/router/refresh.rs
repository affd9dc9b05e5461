//! How the router learns the map: one thread asks the nodes, and the others wait for its result.

use std::{
    cmp::Reverse,
    io,
    ops::Deref,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{Router, State};
use crate::{
    backend::{cluster::map_request::ask_for_map, error::NodeError},
    sys::{
        clock::{self, Moment},
        threads,
    },
};

/// Minimum time from one question about the map to the next; otherwise each of many callers would
/// ask while a node is unreachable.
const REFRESH_PAUSE: Duration = Duration::from_millis(50);

/// The duty of one thread to ask for the map. Other threads wait until this is dropped, even if the
/// thread panics.
struct Refreshing<R: Deref<Target = Router>>(R);

impl Router {
    /// Fails only if no map is known at all.
    pub(super) fn refresh_if_stale(&self, deadline: Moment) -> Result<(), NodeError> {
        let now = clock::now();
        {
            let state = self.state.lock();
            if !state.is_stale || (state.is_known && state.is_early(now)) {
                return Ok(());
            }
        }
        // The other half is left for the request itself.
        let refreshed = self.refresh(now.saturating_add(deadline.duration_since(now) / 2));
        if self.state.lock().is_known { Ok(()) } else { refreshed }
    }

    /// Asks for the map on another thread, if it is not known, or may have changed.
    pub(in crate::backend::cluster) fn begin_refresh(self: &Arc<Router>) {
        let now = clock::now();
        {
            let mut state = self.state.lock();
            if !state.is_stale || state.is_early(now) || state.is_refreshing {
                return;
            }
            state.is_refreshing = true;
        }
        let (refreshing, deadline) =
            (Refreshing(self.clone()), now.saturating_add(self.operation_timeout));
        // If there is no thread for it, this drops it.
        let _ = threads::spawn("distlock-cluster", move || drop(refreshing.ask(deadline)));
    }

    /// Asks the nodes for the map, one after the other, until one knows it. If another thread is
    /// asking already, waits for its result.
    pub(super) fn refresh(&self, deadline: Moment) -> Result<(), NodeError> {
        let mut state = self.state.lock();
        if state.is_refreshing {
            while state.is_refreshing {
                if clock::now() >= deadline {
                    return Err(NodeError::not_sent(io::ErrorKind::TimedOut.into()));
                }
                clock::park(&self.refreshed, &mut state, deadline);
            }
            return state.last_refresh.clone();
        }
        state.is_refreshing = true;
        drop(state);
        Refreshing(self).ask(deadline)
    }
}

impl<R: Deref<Target = Router>> Refreshing<R> {
    fn ask(self, deadline: Moment) -> Result<(), NodeError> {
        let router = &*self.0;
        let mut parts = {
            let mut state = router.state.lock();
            // What the other threads find if this one panics.
            let panicked = io::Error::other("the thread that asked for the map has panicked");
            state.last_refresh = Err(NodeError::not_sent(panicked));
            state.parts.clone()
        };
        // The node that failed last comes last.
        parts.sort_by_key(|part| Reverse(part.failed_at()));
        let mut nodes: Vec<_> = router
            .endpoint
            .cluster
            .iter()
            .filter(|name| parts.iter().all(|part| part.name != **name))
            .map(|name| (name.clone(), router.node(name)))
            .collect();
        nodes.reverse();
        nodes.extend(parts.iter().map(|part| (part.name.clone(), part.node.clone())));
        let found = ask_for_map(nodes, deadline);
        let mut state = router.state.lock();
        state.asked_at = Some(clock::now());
        let result = found.map(|(map, is_sharded)| {
            let masters = map.masters();
            state.parts.retain(|part| masters.contains(&&part.name));
            state.map = map;
            (state.is_known, state.is_stale) = (true, false);
            router.is_sharded.store(is_sharded, Ordering::Release);
        });
        state.last_refresh = result.clone();
        drop(state);
        router.on_new_map();
        result
    }
}

impl<R: Deref<Target = Router>> Drop for Refreshing<R> {
    fn drop(&mut self) {
        self.0.state.lock().is_refreshing = false;
        clock::wake_all(&self.0.refreshed);
    }
}

impl State {
    fn is_early(&self, now: Moment) -> bool {
        self.asked_at.is_some_and(|at| now.duration_since(at) < REFRESH_PAUSE)
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
        let (router, _) = Router::unreachable();
        let ask = || router.refresh(clock::now().saturating_add(Duration::from_secs(10)));
        router.set_wake(Arc::new(|| panic!("while it asks for the map")));
        assert!(catch_unwind(AssertUnwindSafe(ask)).is_err());
        router.set_wake(Arc::new(|| ()));
        let error = ask().unwrap_err();
        assert!(!error.is_timeout(), "{error:?}");
    }
}
