//! Routers for tests, and when they ask for the map.

use std::{sync::Arc, time::Duration};

use super::{Endpoint, Observer, RedisSettings, Router, ServerName, clock};

impl Router {
    pub(in crate::backend::cluster) fn unreachable() -> (Arc<Router>, ServerName) {
        let endpoint = Arc::new(Endpoint::parse("redis+cluster://127.0.0.1:1").unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone(), 1, false).unwrap();
        let name = endpoint.cluster[0].clone();
        let settings = RedisSettings { pool_size: 1, ..RedisSettings::default() };
        (Arc::new(Router::new(endpoint, settings, observer)), name)
    }

    /// Enters the node of a slot into the map.
    pub(in crate::backend::cluster) fn serve(&self, slot: u16, node: &ServerName) {
        let mut state = self.state.lock();
        state.map.set_owner(slot, node.clone());
        (state.is_known, state.is_stale) = (true, false);
    }
}

/// A request for the map counts as a failure of each node that does not reply.
///
/// Fault: N263
#[test]
fn only_calls_for_slots_of_a_failed_node_wait_for_the_map() {
    let (router, failed) = Router::unreachable();
    let other = ServerName { port: failed.port + 1, ..failed.clone() };
    router.serve(1, &failed);
    router.serve(2, &other);
    let owner =
        |slot| router.owner(slot, clock::now().saturating_add(Duration::from_secs(60))).unwrap();
    let (failed, other) = (owner(1), owner(2));
    failed.note_failure();
    let never = other.failed_at();
    owner(2);
    assert_eq!(other.failed_at(), never, "the nodes were asked for the map");
    owner(1);
    assert_ne!(other.failed_at(), never, "no node was asked for the map");
}
