//! A resolver that hangs: lookups have no deadline of their own, so callers leave them behind.

use std::{env, fs, net::UdpSocket, process::Command};

use distlock::RedisMgr;

use crate::faults::LOCK;
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_short_timeout, get, manager,
    },
    support::{CEILING, RedisServer, eventually, run_elsewhere},
};

/// Set in a network of its own, whose only resolver is at the address that no other network here
/// has.
const MARK: &str = "DISTLOCK_TEST_RESOLVER";
const NAMESPACES: [&str; 4] = ["--user", "--map-root-user", "--mount", "--net"];
/// Its arguments are a list of resolvers, a list of where names are looked for, and a program with
/// its arguments.
const ENTER: &str = r#"ip link set lo up && mount --bind "$1" /etc/resolv.conf && mount --bind "$2" /etc/nsswitch.conf &&
    shift 2 && exec "$@""#;

/// Runs a test again where this process is root of a network and may say who resolves names. False
/// there.
///
/// Needs no rights here, but user namespaces and `ip`; where they are missing, that is said, and
/// nothing is shown.
fn elsewhere(test: &str) -> bool {
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

fn lookups() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    // The system keeps 15 letters.
    names.filter(|name| name.starts_with("distlock-resolv")).count()
}

#[test]
fn a_resolver_that_hangs_holds_nobody_up_and_one_thread_at_the_most() {
    if elsewhere(
        "faults::resolver::a_resolver_that_hangs_holds_nobody_up_and_one_thread_at_the_most",
    ) {
        return;
    }
    let silent = UdpSocket::bind("127.0.0.1:53").unwrap();
    silent.set_read_timeout(Some(CEILING)).unwrap();
    let server = RedisServer::start();
    let near = manager(&server);
    let held = near.lock("x").unwrap();
    let mgr = RedisMgr::new(config_short_timeout("redis://locks.example:6379")).unwrap();
    for _ in 0..3 {
        let error = completes_within(CALL_LIMIT, "trying", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        let error =
            completes_within(CALL_LIMIT, "waiting", || mgr.try_lock_for("x", SECOND).unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        assert!(lookups() <= 1, "{} lookups", lookups());
    }
    silent.recv(&mut [0; 512]).expect("it was asked for the name");
    // Whoever knows an address needs no resolver.
    assert_eq!(get(&server, LOCK).as_deref(), Some(held.id().as_str()));
    held.release().unwrap().unwrap_released();
    completes_within(CALL_LIMIT, "dropping", || drop(mgr));
}

/// What a resolver says to a question: one address of the fourth kind, and none of the sixth.
fn reply(question: &[u8]) -> Vec<u8> {
    const ADDRESS: &[u8] = b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\x7f\0\0\x01";
    let asks_for_four = question.ends_with(b"\0\x01\0\x01");
    let (count, address) = if asks_for_four { (b"\x01", ADDRESS) } else { (b"\0", &b""[..]) };
    [&question[..2], b"\x81\x80\0\x01\0", count, b"\0\0\0\0", &question[12..], address].concat()
}

/// As where the first of two resolvers is dead, and the second is asked after five seconds.
#[test]
fn a_resolver_that_answers_too_late_for_one_call_is_good_enough_for_the_next() {
    if elsewhere(
        "faults::resolver::a_resolver_that_answers_too_late_for_one_call_is_good_enough_for_the_next",
    ) {
        return;
    }
    let resolver = UdpSocket::bind("127.0.0.1:53").unwrap();
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_short_timeout(format!("redis://locks.example:{}", server.port())))
            .unwrap();
    let mut given_up = 0;
    let guard = loop {
        match completes_within(CALL_LIMIT, "trying", || mgr.try_lock("x")) {
            Ok(guard) => break guard,
            Err(error) => assert!(error.is_unavailable(), "{error}"),
        }
        given_up += 1;
        assert!(given_up < 5, "no answer is good enough");
        // Only now, when nobody waits for it.
        resolver.set_read_timeout(Some(CEILING)).unwrap();
        for _ in 0..2 {
            let mut question = [0; 512];
            let (length, asker) = resolver.recv_from(&mut question).unwrap();
            resolver.send_to(&reply(&question[..length]), asker).unwrap();
        }
        eventually("the lookup has ended", CEILING, || lookups() == 0);
    };
    assert!(given_up > 0, "nobody was asked");
    guard.release().unwrap().unwrap_released();
}
