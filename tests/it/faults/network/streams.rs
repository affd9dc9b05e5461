//! Processes with closed standard streams, and broken connections with the default SIGPIPE.

use std::{fs, path::PathBuf, time::Duration};

use distlock::RedisMgr;

use crate::faults::process::signal;
use crate::{
    helpers::{UnwrapReleased, config_long_timeouts, in_own_process, spawn_call},
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

unsafe extern "C" {
    fn dup(descriptor: i32) -> i32;
    fn dup2(descriptor: i32, target: i32) -> i32;
    fn close(descriptor: i32) -> i32;
}

/// Copies of the standard streams, which are closed.
struct ClosedStreams([i32; 3]);

impl ClosedStreams {
    fn new() -> ClosedStreams {
        // SAFETY: nothing in this process owns these three descriptors. Printing meanwhile only
        // fails.
        let kept = [0, 1, 2].map(|stream| unsafe { dup(stream) });
        for stream in 0..3 {
            // SAFETY: as before.
            unsafe { close(stream) };
        }
        ClosedStreams(kept)
    }

    /// The files that now have the numbers of the standard streams.
    fn replacements() -> Vec<PathBuf> {
        (0..3).filter_map(|stream| fs::read_link(format!("/proc/self/fd/{stream}")).ok()).collect()
    }
}

impl Drop for ClosedStreams {
    fn drop(&mut self) {
        for (kept, stream) in self.0.into_iter().zip(0..) {
            // SAFETY: each kept copy belongs to this value, and gets its old number again.
            unsafe { (dup2(kept, stream), close(kept)) };
        }
    }
}

/// Otherwise, what the process or one of its libraries prints would be sent to the server as
/// commands.
///
/// Fault: N64
#[test]
fn no_connection_gets_the_number_of_a_standard_stream() {
    if !in_own_process(
        "faults::network::streams::no_connection_gets_the_number_of_a_standard_stream",
        &[],
    ) {
        return;
    }
    let server = RedisServer::builder().unix_socket().start();
    let nodes = Nodes::start(3);
    for url in [server.url(), server.unix_url(), nodes.urls()] {
        let asked = if url == nodes.urls() { nodes.server(0) } else { &server };
        let closed = ClosedStreams::new();
        let mgr = RedisMgr::new(config_long_timeouts(&url).quarantine(Duration::ZERO)).unwrap();
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
        eventually("a client is subscribed", TEST_TIMEOUT, || {
            !asked.query::<Vec<String>>(&["PUBSUB", "CHANNELS", "distlock:*"]).is_empty()
        });
        let found = ClosedStreams::replacements();
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
        drop(mgr);
        drop(closed);
        assert!(found.is_empty(), "{url}: {found:?}");
    }
}

/// Many programs let SIGPIPE end them, for example if the reader of their output is gone. A
/// connection that the server has closed must not raise it.
///
/// Fault: N66
#[test]
fn broken_connection_raises_no_signal() {
    if !in_own_process("faults::network::streams::broken_connection_raises_no_signal", &[]) {
        return;
    }
    const SIGPIPE: i32 = 13;
    // SAFETY: sets no handler; with the default action the signal ends the process.
    unsafe { signal(SIGPIPE, None) };
    let server = RedisServer::builder().unix_socket().start();
    for url in [server.url(), server.unix_url()] {
        let mgr = RedisMgr::new(config_long_timeouts(url)).unwrap();
        for _ in 0..20 {
            mgr.lock("x").unwrap().release().unwrap().unwrap_released();
            // The connection was used so recently that it is not checked before its next use.
            assert!(server.kill_clients(&[]) > 0);
        }
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    }
}
