//! Servers that cannot keep locks: members of clusters, and proxies. A real server is in each test,
//! and the fault proxy changes what it says.

use distlock::{LockError, MySqlMgr};

use super::{config, create_table};
use crate::{
    helpers::{SECOND, UnwrapReleased},
    support::{FaultProxy, MySqlServer, RedisServer, change, contains},
};

const SETUP: &str = "SHOW GLOBAL VARIABLES";

/// A server that seems to reply to the setup of a session with `new` instead of `old`.
fn server_that_says(old: &'static [u8], new: &'static [u8]) -> (MySqlServer, FaultProxy) {
    let server = MySqlServer::start();
    create_table(&server);
    let proxy = FaultProxy::in_front_of_mysql(server.addr());
    let replace =
        move |reply: &[u8]| match reply.windows(old.len()).position(|window| window == old) {
            Some(at) => {
                let mut changed = [&reply[..at], new, &reply[at + old.len()..]].concat();
                // A packet that begins there is shorter now.
                if old.len() != new.len() {
                    changed[at - 4] = u8::try_from(new.len()).unwrap();
                }
                changed
            }
            None => reply.to_vec(),
        };
    proxy.on_request(contains(SETUP), change(replace)).forever();
    (server, proxy)
}

#[track_caller]
fn reason(proxy: &FaultProxy) -> String {
    match MySqlMgr::new(config(proxy.url()).ttl(77 * SECOND)).unwrap_err() {
        error @ LockError::InvalidConfig { .. } => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Fault: N160
#[test]
fn member_of_a_galera_cluster_is_refused_unless_allowed() {
    let (_server, proxy) = server_that_says(b"\x08wsrep_on\x03OFF", b"\x08wsrep_on\x02ON");
    let reason = reason(&proxy);
    assert!(reason.contains("Galera") && reason.contains("allow_cluster"), "{reason}");
    let mgr = MySqlMgr::new(config(proxy.url()).allow_cluster(true)).unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

/// Fault: N160
#[test]
fn proxy_that_ignores_the_idle_timeout_is_refused() {
    let (_server, proxy) = server_that_says(b"\x0277", b"\x0299");
    let reason = reason(&proxy);
    assert!(reason.contains("ignores SET SESSION wait_timeout"), "{reason}");
}

/// A Redis server waits for the client to begin.
///
/// Fault: F72
#[test]
fn server_that_sends_no_greeting_is_reported_as_such() {
    let server = RedisServer::start();
    let url = format!("mysql://root@{}/shop", server.addr());
    let mgr = MySqlMgr::new(config(url).operation_timeout(SECOND).ttl(2 * SECOND)).unwrap();
    let error = mgr.try_lock("x").unwrap_err();
    assert!(error.is_unavailable(), "{error:?}");
    let text = error.to_string();
    let says = "it sent no greeting in time: it hangs, or is no MySQL server; try again";
    assert!(text.contains(says), "{text}");
}
