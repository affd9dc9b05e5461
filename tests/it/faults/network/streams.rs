//! Processes whose standard streams are closed, and those that a broken pipe ends.

use std::{fs, path::PathBuf, time::Duration};

use distlock::RedisMgr;

use crate::faults::process::signal;
use crate::{
    helpers::{UnwrapReleased, config_long_timeouts, in_own_process, in_thread},
    support::{CEILING, Nodes, RedisServer, eventually},
};

unsafe extern "C" {
    fn dup(descriptor: i32) -> i32;
    fn dup2(descriptor: i32, place: i32) -> i32;
    fn close(descriptor: i32) -> i32;
}

/// The standard streams, closed.
struct Closed([i32; 3]);

impl Closed {
    fn all() -> Closed {
        // SAFETY: nothing in this process owns these three, and whoever prints meanwhile is told
        // that it cannot.
        let kept = [0, 1, 2].map(|stream| unsafe { dup(stream) });
        for stream in 0..3 {
            // SAFETY: as before.
            unsafe { close(stream) };
        }
        Closed(kept)
    }

    /// What has taken their places.
    fn in_their_places() -> Vec<PathBuf> {
        (0..3).filter_map(|stream| fs::read_link(format!("/proc/self/fd/{stream}")).ok()).collect()
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        for (kept, stream) in self.0.into_iter().zip(0..) {
            // SAFETY: what this value has kept goes back to where it was.
            unsafe { (dup2(kept, stream), close(kept)) };
        }
    }
}

/// What such a process prints, or a library that it has loaded, would be sent to the server as
/// commands.
#[test]
fn no_connection_takes_the_place_of_a_standard_stream() {
    if !in_own_process("faults::streams::no_connection_takes_the_place_of_a_standard_stream", &[]) {
        return;
    }
    let server = RedisServer::builder().unix_socket().start();
    let nodes = Nodes::start(3);
    for url in [server.url(), server.unix_url(), nodes.urls()] {
        let asked = if url == nodes.urls() { nodes.server(0) } else { &server };
        let closed = Closed::all();
        let mgr = RedisMgr::new(config_long_timeouts(&url).quarantine(Duration::ZERO)).unwrap();
        let guard = mgr.lock("x").unwrap();
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
        eventually("somebody listens", CEILING, || {
            !asked.query::<Vec<String>>(&["PUBSUB", "CHANNELS", "distlock:*"]).is_empty()
        });
        let found = Closed::in_their_places();
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
        drop(mgr);
        drop(closed);
        assert!(found.is_empty(), "{url}: {found:?}");
    }
}

/// Programs that end when nobody reads what they print do not end because a server has closed a
/// connection.
#[test]
fn a_connection_that_breaks_raises_no_signal() {
    if !in_own_process("faults::streams::a_connection_that_breaks_raises_no_signal", &[]) {
        return;
    }
    const SIGPIPE: i32 = 13;
    // SAFETY: no handler; the signal ends the process then.
    unsafe { signal(SIGPIPE, None) };
    let server = RedisServer::builder().unix_socket().start();
    for url in [server.url(), server.unix_url()] {
        let mgr = RedisMgr::new(config_long_timeouts(url)).unwrap();
        for _ in 0..20 {
            mgr.lock("x").unwrap().release().unwrap().unwrap_released();
            // Used so short a time ago that nobody looks at it before it is used again.
            assert!(server.kill_clients(&[]) > 0);
        }
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    }
}
