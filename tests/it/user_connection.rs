//! Connections that users borrow from the pool for commands of their own.

use std::time::Duration;

use distlock::{LockError, PooledConnection, RedisMgr};

use crate::{
    helpers::{SECOND, UnwrapReleased, config_long_timeouts, get, manager, server_behind_proxy},
    support::{Fault, Nodes, RedisServer, command},
};

const LOCK: &str = "lock:x";

/// Fault: N6
#[test]
fn state_set_on_a_borrowed_connection_does_not_leak() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "weak", "on", ">pw", "~none:*", "+@all"]);
    type Misuse = fn(&mut PooledConnection);
    let misuses: [(&str, Misuse); 9] = [
        ("SELECT", |c| send(c, &["SELECT", "3"])),
        ("select", |c| send(c, &["select", "3"])),
        ("SELECT in a pipeline", |c| {
            let _ = redis::pipe().cmd("PING").cmd("SELECT").arg(3).query::<redis::Value>(c);
        }),
        ("SELECT in a transaction", |c| {
            let _ = redis::pipe().atomic().cmd("SELECT").arg(3).query::<redis::Value>(c);
        }),
        ("AUTH", |c| send(c, &["AUTH", "weak", "pw"])),
        ("HELLO", |c| send(c, &["HELLO", "3", "AUTH", "weak", "pw"])),
        ("CLIENT REPLY", |c| send(c, &["CLIENT", "REPLY", "OFF"])),
        ("MULTI", |c| send(c, &["MULTI"])),
        ("SUBSCRIBE", |c| send(c, &["SUBSCRIBE", "news"])),
    ];
    for (what, misuse) in misuses {
        // With a pool of one, the next call gets the same connection.
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url()).pool_size(1).operation_timeout(2 * SECOND),
        )
        .unwrap();
        misuse(&mut mgr.connection().unwrap());
        let guard = mgr.try_lock("x").unwrap_or_else(|error| panic!("after {what}: {error}"));
        let refused = manager(&server).try_lock("x").map(drop);
        assert!(matches!(refused, Err(LockError::Held { .. })), "after {what}: {refused:?}");
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "after {what}");
        guard.release().unwrap().unwrap_released();
        assert_eq!(get(&server, LOCK), None, "after {what}");
    }
}

/// Sends a command; some get no reply, and the others do not matter here.
fn send(connection: &mut PooledConnection, words: &[&str]) {
    let _ = redis::Cmd::new().arg(words).query::<redis::Value>(connection);
}

/// Each reply of a pipeline arrives in time, but all of them together do not.
///
/// Fault: N43
/// Promise: P6
#[test]
fn pipeline_takes_one_timeout_in_total() {
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(2 * SECOND));
    proxy.on_request(command("GET"), Fault::DelayReply(SECOND)).forever();
    let mut connection = mgr.connection().unwrap();
    let mut commands = redis::pipe();
    for _ in 0..4 {
        commands.cmd("GET").arg("x");
    }
    let error = commands.query::<Vec<Option<String>>>(&mut connection).unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

/// Fault: N141
#[test]
fn connection_lent_after_a_restart_is_alive() {
    let ping_after_restart = |mgr: &RedisMgr, restart: &dyn Fn()| {
        for _ in 0..5 {
            mgr.ping().unwrap();
            restart();
            redis::cmd("PING").query::<String>(&mut mgr.connection().unwrap()).unwrap();
        }
    };
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(1)).unwrap();
    ping_after_restart(&mgr, &|| server.restart());
    let nodes = Nodes::start(3);
    let config = config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO);
    let mgr = RedisMgr::new(config.pool_size(1)).unwrap();
    ping_after_restart(&mgr, &|| nodes.restart(0));
}
