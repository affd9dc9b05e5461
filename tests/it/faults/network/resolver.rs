//! A resolver that hangs: lookups have no deadline, so callers do not wait for their end.

use std::{env, fs, net::UdpSocket, process::Command};

use distlock::RedisMgr;

use crate::faults::LOCK;
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_short_timeout, get, manager,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually, run_elsewhere},
};

/// Set in a network namespace whose only resolver is at an address that no other network here has.
const MARK: &str = "DISTLOCK_TEST_RESOLVER";
const NAMESPACES: [&str; 4] = ["--user", "--map-root-user", "--mount", "--net"];
/// The arguments are a list of resolvers, a list of name services, and a program with its
/// arguments.
const ENTER: &str = r#"ip link set lo up &&
    mount --bind "$1" /etc/resolv.conf && mount --bind "$2" /etc/nsswitch.conf &&
    shift 2 && exec "$@""#;

/// Runs this test again as root of its own network namespace, which has its own resolver. Returns
/// false in that process.
///
/// Needs user namespaces and `ip`, but no privileges. Where they are missing, it prints that
/// nothing was shown.
fn in_own_network(test: &str) -> bool {
    if env::var_os(MARK).is_some() {
        return false;
    }
    let folder = tempfile::tempdir().unwrap();
    let [servers, order] = ["resolv.conf", "nsswitch.conf"].map(|name| folder.path().join(name));
    fs::write(&servers, "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n").unwrap();
    fs::write(&order, "hosts: files dns\n").unwrap();
    run_elsewhere(test, "no network of its own", |program| {
        let mut unshare = Command::new("unshare");
        unshare
            .args(NAMESPACES)
            .args(["sh", "-c", ENTER, "sh"])
            .args([&servers, &order])
            .args(program);
        unshare.env(MARK, "1").output()
    });
    true
}

/// Number of threads that look up a name.
fn lookups() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    // The system keeps 15 characters.
    names.filter(|name| name.starts_with("distlock-resolv")).count()
}

/// Fault: F58
#[test]
fn hung_resolver_delays_no_call_and_uses_few_threads() {
    if in_own_network(
        "faults::network::resolver::hung_resolver_delays_no_call_and_uses_few_threads",
    ) {
        return;
    }
    let silent = UdpSocket::bind("127.0.0.1:53").unwrap();
    silent.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let server = RedisServer::start();
    let near = manager(&server);
    let held = near.lock("x").unwrap();
    let mgr = RedisMgr::new(config_short_timeout("redis://locks.example:6379")).unwrap();
    for _ in 0..3 {
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        let error =
            completes_within(CALL_LIMIT, "a wait", || mgr.try_lock_for("x", SECOND).unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        assert!(lookups() <= 3, "{} lookups", lookups());
    }
    silent.recv(&mut [0; 512]).expect("it was asked for the name");
    // A manager with an IP address needs no resolver.
    assert_eq!(get(&server, LOCK).as_deref(), Some(held.id().as_str()));
    held.release().unwrap().unwrap_released();
    completes_within(CALL_LIMIT, "drop", || drop(mgr));
}

/// The resolver's reply: one IPv4 address, and no IPv6 address.
fn reply(query: &[u8]) -> Vec<u8> {
    const ADDRESS: &[u8] = b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\x7f\0\0\x01";
    let is_ipv4 = query.ends_with(b"\0\x01\0\x01");
    let (count, address) = if is_ipv4 { (b"\x01", ADDRESS) } else { (b"\0", &b""[..]) };
    [&query[..2], b"\x81\x80\0\x01\0", count, b"\0\0\0\0", &query[12..], address].concat()
}

/// As if the first of two resolvers were dead, and the second were asked after five seconds.
///
/// Fault: N68
/// Promise: P6
#[test]
fn late_reply_of_a_resolver_serves_the_next_call() {
    if in_own_network("faults::network::resolver::late_reply_of_a_resolver_serves_the_next_call") {
        return;
    }
    let resolver = UdpSocket::bind("127.0.0.1:53").unwrap();
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_short_timeout(format!("redis://locks.example:{}", server.port())))
            .unwrap();
    let mut failed = 0;
    let guard = loop {
        match completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x")) {
            Ok(guard) => break guard,
            Err(error) => assert!(error.is_unavailable(), "{error}"),
        }
        failed += 1;
        assert!(failed < 5, "no reply of the resolver is used");
        // The reply is sent when no call is waiting for it.
        resolver.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        for _ in 0..2 {
            let mut query = [0; 512];
            let (length, sender) = resolver.recv_from(&mut query).unwrap();
            resolver.send_to(&reply(&query[..length]), sender).unwrap();
        }
        eventually("the lookup has ended", TEST_TIMEOUT, || lookups() == 0);
    };
    assert!(failed > 0, "the resolver was not asked");
    guard.release().unwrap().unwrap_released();
}
