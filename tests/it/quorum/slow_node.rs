//! A node that is far away, and well, beside others nearby.

#![expect(clippy::disallowed_methods, reason = "a way takes its time by the clock of the test")]

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

use super::nodes_holding;
use crate::{
    helpers::{SECOND, config_long_timeouts},
    support::{CEILING, Nodes, eventually},
};

/// Less than a node may be behind before it is asked no more.
const WAY: Duration = Duration::from_millis(80);

/// A way to a server on which answers take `WAY`, however many, and how many have connected. Its
/// threads end with the connections, and with the tests.
fn distant(to: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
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
                    let _ = sender.send((Instant::now() + WAY, bytes[..read].to_vec()));
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

/// Goal: what a node that is far away owes because others answer before it is on its way, and costs
/// no connection. Method: so many locks are taken, one after the other, that it owes a hundred
/// answers at a time.
#[test]
fn a_distant_node_that_is_asked_often_keeps_its_connection() {
    let nodes = Nodes::start(3);
    let (distant, connections) = distant(nodes.server(2).addr());
    let urls = format!("{},{},redis://{distant}", nodes.url(0), nodes.url(1));
    // No renewal falls due, which would go over a connection of its own.
    let config =
        config_long_timeouts(urls).ttl(600 * SECOND).quarantine(Duration::ZERO).pool_size(1);
    let mgr = RedisMgr::new(config).unwrap();
    // None of them is given up yet, for what that leaves to be taken back is taken back over
    // another connection.
    let mut warm = Vec::new();
    eventually("all keep one", CEILING, || {
        warm.push(mgr.lock(&format!("warm{}", warm.len())).unwrap());
        warm.iter().any(|guard| nodes_holding(&nodes, guard).len() == 3)
    });
    let before = connections.load(Ordering::SeqCst);
    let guards: Vec<_> = (0..300).map(|number| mgr.lock(&format!("x{number}")).unwrap()).collect();
    assert_eq!((connections.load(Ordering::SeqCst) - before, mgr.metrics().reconnected()), (0, 0));
    mgr.shutdown();
    drop((guards, warm));
}
