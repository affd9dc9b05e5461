//! Servers that cannot be reached are reported, whether or not a lock is held.

use std::{sync::Arc, time::Duration};

use distlock::{HandleEvent, ReconnectedEvent, RedisMgr, UnreachableEvent};
use parking_lot::Mutex;

use crate::{
    helpers::{SECOND, capture_log, config_medium_timeout, in_own_process},
    support::{Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, command, eventually},
};

#[derive(Debug, Default)]
struct Outages(Mutex<Vec<String>>);

impl Outages {
    fn lines(&self) -> Vec<String> {
        self.0.lock().clone()
    }
}

impl HandleEvent for Outages {
    fn unreachable(&self, event: &UnreachableEvent<'_>) {
        assert!(!event.why().is_empty());
        self.0.lock().push(format!("{} down", event.server()));
    }

    fn reconnected(&self, event: &ReconnectedEvent<'_>) {
        self.0.lock().push(format!("{} up", event.server()));
    }
}

/// Fault: N138
#[test]
fn dead_node_is_reported_although_no_lock_is_held() {
    let name = "observe::nodes::dead_node_is_reported_although_no_lock_is_held";
    if !in_own_process(name, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Info);
    let nodes = Nodes::start(3);
    let outages = Arc::new(Outages::default());
    let config = config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO).ttl(3 * SECOND);
    let mgr = RedisMgr::new(config.event_handler(outages.clone())).unwrap();
    assert_eq!((mgr.metrics().nodes(), mgr.metrics().nodes_reachable()), (3, 3));
    let label = format!("127.0.0.1:{}", nodes.server(1).port());
    let expect = |lines: &[&str], reachable: u64, line: &str| {
        let lines: Vec<_> = lines.iter().map(|what| format!("{label} {what}")).collect();
        eventually(line, TEST_TIMEOUT, || outages.lines() == lines);
        assert_eq!(mgr.metrics().nodes_reachable(), reachable);
        eventually("it is logged", TEST_TIMEOUT, || {
            logged.lock().iter().any(|text| text.contains(&format!("{label} {line}")))
        });
    };
    nodes.kill(1);
    expect(&["down"], 2, "is unreachable: ");
    nodes.restart(1);
    expect(&["down", "up"], 3, "is reachable again after ");
    // A frozen node accepts connections.
    nodes.stop(1);
    expect(&["down", "up", "down"], 2, "is unreachable: ");
    nodes.cont(1);
    expect(&["down", "up", "down", "up"], 3, "is reachable again after ");
    assert_eq!(mgr.metrics().attempted(), 0);
}

/// A server that replies is not unreachable.
#[test]
fn refused_connection_is_logged_as_such() {
    if !in_own_process("observe::nodes::refused_connection_is_logged_as_such", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let url = format!("redis://{}/999999", server.addr());
    let mgr = RedisMgr::new(config_medium_timeout(url)).unwrap();
    assert!(mgr.try_lock("x").unwrap_err().is_refused());
    let line = "refuses connections: it replied ERR DB index is out of range";
    eventually("it is logged", TEST_TIMEOUT, || {
        logged.lock().iter().any(|text| text.contains(line))
    });
}

/// No connection can be opened for a while, so the renewer reports an outage. Then nothing connects
/// any more, and only the replies over an open connection show that the server can be reached.
///
/// Fault: N238
#[test]
fn replies_over_an_open_connection_end_an_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let outages = Arc::new(Outages::default());
    let config = config_medium_timeout(proxy.url()).operation_timeout(SECOND).ttl(3 * SECOND);
    let mgr = RedisMgr::new(config.event_handler(outages.clone())).unwrap();
    let guard = mgr.lock("x").unwrap();
    let handshakes = proxy.on_request(command("time"), Fault::SwallowRequest).forever();
    eventually("an outage is reported", TEST_TIMEOUT, || outages.lines().len() == 1);
    assert_eq!(mgr.metrics().nodes_reachable(), 0);
    drop(guard);
    eventually("its end is reported", TEST_TIMEOUT, || {
        drop(mgr.try_lock("y"));
        outages.lines().len() == 2
    });
    assert_eq!((mgr.metrics().nodes_reachable(), mgr.metrics().reconnected()), (1, 1));
    assert!(handshakes.fired() > 0);
}

/// Each call asks the node of the URL for the map of the slots.
///
/// Fault: N255
#[test]
fn outage_of_a_node_in_the_url_of_a_cluster_is_reported_once() {
    let server = RedisServer::start();
    let label = server.addr().to_string();
    let outages = Arc::new(Outages::default());
    let config = config_medium_timeout(format!("redis+cluster://{label}"));
    let mgr = RedisMgr::new(config.event_handler(outages.clone())).unwrap();
    server.kill();
    for _ in 0..3 {
        mgr.try_lock("x").unwrap_err();
    }
    server.restart();
    eventually("its end is reported", TEST_TIMEOUT, || {
        mgr.try_lock("x").is_err() && outages.lines().iter().any(|line| line.ends_with(" up"))
    });
    assert_eq!(outages.lines(), [format!("{label} down"), format!("{label} up")]);
}
