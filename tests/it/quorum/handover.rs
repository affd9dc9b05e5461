//! A lock over several nodes passes from thread to thread of a process without the nodes.

use distlock::RedisMgr;

use super::{config_long_timeouts, key, manager, quorum, wait_until_free_everywhere, warm_up};
use crate::{
    helpers::{FENCE, SECOND, UnwrapReleased},
    support::Nodes,
    wait::handover::lock_in_turn,
};

/// The nodes that grant the lock next may be others, and their tokens are larger nevertheless than
/// those that were used inside the process.
///
/// Promise: P3
#[test]
fn threads_pass_a_lock_on_without_the_nodes() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 50;
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).local_handover(SECOND)).unwrap();
    warm_up(&nodes, &mgr);
    // As if the clocks had been set back: no token comes from a clock.
    let ahead = manager(&nodes).lock("x").unwrap().fencing_token().as_u64() + 3_600_000_000;
    wait_until_free_everywhere(&nodes, "x");
    for node in 0..nodes.len() {
        nodes.server(node).cli(&["SET", FENCE, &ahead.to_string()]);
    }
    let calls = || nodes.server(0).calls("evalsha");
    let mut last = None;
    for failed in [3, 4] {
        let before = calls();
        let tokens = lock_in_turn(&mgr, THREADS, ROUNDS);
        assert!(last < tokens.first().copied(), "the first one is not larger than the last");
        let (calls, locks) = (calls() - before, THREADS * ROUNDS);
        assert!(calls < locks as u64, "{calls} calls for {locks} locks");
        wait_until_free_everywhere(&nodes, "x");

        nodes.kill(failed);
        let guard = manager(&nodes).lock("x").unwrap();
        assert!(Some(&guard.fencing_token()) > tokens.last());
        assert!(nodes.keeping(&key("x"), guard.id().as_str()).len() >= quorum(&nodes));
        last = Some(guard.fencing_token());
        guard.release().unwrap().unwrap_released();
    }
}
