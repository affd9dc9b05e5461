//! A healthy node with a long round trip, beside nearby nodes.

#![expect(clippy::disallowed_methods, reason = "the delay is measured by the test's own clock")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use distlock::RedisMgr;

use super::{manager, nodes_holding};
use crate::{
    helpers::{
        SECOND, UnwrapReleased, capture_log, config_long_timeouts, in_own_process, timed, with_ttl,
    },
    support::{Fault, Nodes, TEST_TIMEOUT, contains, eventually},
};

/// Delay of each reply. Short enough that the node never has the maximum of unread replies.
const DELAY: Duration = Duration::from_millis(80);

/// Starts a proxy that delays every reply by `DELAY`; also returns the number of connections
/// accepted so far. Threads end with their connections, or with the process.
fn slow_proxy(to: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            count.fetch_add(1, Ordering::SeqCst);
            let Ok(mut server) = TcpStream::connect(to) else { continue };
            let (mut from_server, mut to_client) =
                (server.try_clone().unwrap(), client.try_clone().unwrap());
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            thread::spawn(move || std::io::copy(&mut client, &mut server));
            let (sender, late) = mpsc::channel::<(Instant, Vec<u8>)>();
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(read @ 1..) = from_server.read(&mut bytes) {
                    let _ = sender.send((Instant::now() + DELAY, bytes[..read].to_vec()));
                }
            });
            thread::spawn(move || {
                for (at, bytes) in late {
                    thread::sleep(at.saturating_duration_since(Instant::now()));
                    let _ = to_client.write_all(&bytes);
                }
            });
        }
    });
    (addr, connections)
}

/// Goal: a slow node owes many replies because the others reply first; its connection must stay
/// open. Method: acquire locks in sequence until about a hundred replies are unread at a time.
///
/// Fault: N117
#[test]
fn slow_node_with_many_unread_replies_keeps_its_connection() {
    let nodes = Nodes::start(3);
    let (slow_proxy, connections) = slow_proxy(nodes.server(2).addr());
    let urls = format!("{},{},redis://{slow_proxy}", nodes.url(0), nodes.url(1));
    // With this ttl no renewal is due, which would use another connection.
    let config =
        config_long_timeouts(urls).ttl(600 * SECOND).quarantine(Duration::ZERO).pool_size(1);
    let mgr = RedisMgr::new(config).unwrap();
    // The guards stay alive: cleaning up after a release would use another connection.
    let mut warm = Vec::new();
    eventually("all nodes hold one of the locks", TEST_TIMEOUT, || {
        warm.push(mgr.lock(&format!("warm{}", warm.len())).unwrap());
        warm.iter().any(|guard| nodes_holding(&nodes, guard).len() == 3)
    });
    let before = connections.load(Ordering::SeqCst);
    let guards: Vec<_> = (0..300).map(|number| mgr.lock(&format!("x{number}")).unwrap()).collect();
    assert_eq!((connections.load(Ordering::SeqCst) - before, mgr.metrics().reconnected()), (0, 0));
    mgr.shutdown();
    drop((guards, warm));
}

/// No caller waits for the slow node's reply that it does not know the script.
///
/// Fault: N103
#[test]
fn slow_node_that_forgets_scripts_gets_them_again() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    let round = || {
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        // Reads all replies. Otherwise the unread ones would soon make the manager close the
        // connection, and the next connection would send the scripts anyway.
        mgr.locks("*").unwrap();
    };
    let server = nodes.server(2);
    let commands = server.monitor();
    let grants =
        || commands.lines().iter().filter(|line| line.contains("lua] \"SET\" \"lock:x\"")).count();
    eventually("the slow node gives the lock", TEST_TIMEOUT, || {
        round();
        grants() > 0
    });
    nodes
        .proxy(2)
        .on_request(contains("lock:x"), Fault::DelayReply(Duration::from_millis(50)))
        .forever();
    server.cli(&["SCRIPT", "FLUSH"]);
    commands.wait_for("FLUSH");
    let before = grants();
    eventually("it gives the lock again", TEST_TIMEOUT, || {
        round();
        grants() > before
    });
}

/// Some readers need a new connection to node 2, because they ask at the same time. A connection
/// attempt gets no reply.
///
/// Fault: N245
#[test]
fn reader_waits_briefly_for_a_connection_to_another_node() {
    let nodes = Nodes::start(3).in_fixed_order();
    // A reader waits for the reply of its queue node for at most a quarter of the timeout.
    let timeout = TEST_TIMEOUT / 3;
    let config = super::config_long_timeouts(&nodes).operation_timeout(timeout);
    let mgr = RedisMgr::new(config).unwrap();
    for node in [0, 1] {
        nodes.proxy(node).on_request(contains("lock:x"), Fault::DelayReply(SECOND / 2)).forever();
    }
    nodes.proxy(2).mute_new();
    let read = || {
        let lock = mgr.rw_lock("x").unwrap();
        timed(|| lock.read_with(&with_ttl(600 * SECOND)).unwrap())
    };
    thread::scope(|threads| {
        let readers: Vec<_> = (0..4).map(|_| threads.spawn(read)).collect();
        for reader in readers {
            let (guard, span) = reader.join().unwrap();
            assert!(guard.is_held() && span < timeout / 8, "a reader waited for {span:?}");
        }
    });
}

/// Goal: the minority that misses a release in the background concerns nobody. Method: node 2 gets
/// no request; the others confirm the release at once.
///
/// Fault: N244
/// Promise: P9
#[test]
fn background_release_missed_by_one_node_delays_no_lock() {
    let test = "quorum::slow_node::background_release_missed_by_one_node_delays_no_lock";
    if !in_own_process(test, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Debug);
    let nodes = Nodes::start(3).in_fixed_order();
    let timeout = TEST_TIMEOUT / 2;
    let config = super::config_long_timeouts(&nodes).operation_timeout(timeout);
    let mgr = RedisMgr::new(config).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    eventually("all nodes have it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.stop(2);
    guard.release_later();
    eventually("the clean-up of node 2 has failed once", TEST_TIMEOUT, || {
        logged.lock().iter().any(|line| line.contains("lock \"x\" yet"))
    });
    for _ in 0..5 {
        let (guard, span) = timed(|| mgr.try_lock("x").unwrap());
        assert!(span < timeout / 4, "try_lock took {span:?}");
        guard.release().unwrap().unwrap_released();
    }
    // Otherwise the shutdown of the manager would wait for it.
    nodes.kill(2);
    let lines = logged.lock();
    let is_false = |line: &&String| {
        line.contains("could not release lock") && line.matches("cleaned up").count() >= 2
    };
    assert_eq!(lines.iter().find(is_false), None);
}

/// All nodes failed recently, and so are not asked again at once.
///
/// Fault: N172
/// Promise: P7
#[test]
fn background_release_in_an_outage_is_logged() {
    let test = "quorum::slow_node::background_release_in_an_outage_is_logged";
    if !in_own_process(test, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(super::config_short_timeout(&nodes)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    (0..3).for_each(|node| nodes.kill(node));
    (0..4).for_each(|_| drop(guard.renew().unwrap_err()));
    guard.release_later();
    eventually("it is logged", TEST_TIMEOUT, || {
        logged.lock().join("\n").contains("could not release lock \"x\" yet, still trying: ")
    });
}
