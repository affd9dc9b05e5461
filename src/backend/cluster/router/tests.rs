//! Routers for tests.

use std::sync::Arc;

use super::{Endpoint, Observer, RedisSettings, Router, ServerName};

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
