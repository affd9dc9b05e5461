//! Calls while too few servers are available to get the lock.

use std::time::Duration;

use distlock::RedisMgr;

use super::{expect_no_quorum, quarantine::IN_QUARANTINE, quorum};
use crate::{
    helpers::{SECOND, config_medium_timeout},
    support::Nodes,
};

/// Fault: N145
#[test]
fn bounded_wait_names_why_each_node_does_not_vote() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config_medium_timeout(nodes.urls()).quarantine(600 * SECOND)).unwrap();
    let error = mgr.try_lock_for("x", SECOND / 2).unwrap_err();
    expect_no_quorum(&nodes, &error);
    let in_quarantine =
        error.nodes().iter().filter(|answer| answer.message.starts_with(IN_QUARANTINE)).count();
    assert!(in_quarantine >= quorum(&nodes), "{error}");
    assert!(!error.to_string().contains("no reply in time"), "{error}");

    let mgr =
        RedisMgr::new(config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    nodes.kill(1);
    nodes.kill(2);
    let error = mgr.try_lock_for("x", SECOND / 2).unwrap_err();
    assert!(!error.nodes()[0].message.contains("no reply in time"), "{error}");
    for answer in &error.nodes()[1..] {
        assert!(answer.message.contains("refused"), "{error}");
    }
}
