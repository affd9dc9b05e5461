//! A resolver that hangs: lookups have no deadline of their own, so callers leave them behind.

use std::{env, fs, net::UdpSocket, process::Command};

use distlock::RedisMgr;

use super::LOCK;
use crate::{
    kit::{BOUNDED, SECOND, UnwrapReleased, get, impatient, manager, within},
    support::{CEILING, RedisServer, run_elsewhere},
};

/// Set in a network of its own, whose only resolver is at the address that no other network here has.
const MARK: &str = "DISTLOCK_TEST_RESOLVER";
const NAMESPACES: [&str; 4] = ["--user", "--map-root-user", "--mount", "--net"];
/// Its arguments are a list of resolvers, a list of where names are looked for, and a program with its arguments.
const ENTER: &str = r#"ip link set lo up && mount --bind "$1" /etc/resolv.conf && mount --bind "$2" /etc/nsswitch.conf &&
    shift 2 && exec "$@""#;

/// Runs a test again where this process is root of a network and may say who resolves names. False there.
///
/// Needs no rights here, but user namespaces and `ip`; where they are missing, that is said, and nothing is shown.
fn elsewhere(test: &str) -> bool {
    if env::var_os(MARK).is_some() {
        return false;
    }
    let folder = env::temp_dir().join(format!("distlock-resolver-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (servers, order) = (folder.join("resolv.conf"), folder.join("nsswitch.conf"));
    fs::write(&servers, "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n").unwrap();
    fs::write(&order, "hosts: files dns\n").unwrap();
    run_elsewhere(test, "no network of its own", |program| {
        let mut unshare = Command::new("unshare");
        unshare.args(NAMESPACES).args(["sh", "-c", ENTER, "sh"]).args([&servers, &order]).args(program);
        unshare.env(MARK, "1").output()
    });
    fs::remove_dir_all(&folder).unwrap();
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
    if elsewhere("faults::resolver::a_resolver_that_hangs_holds_nobody_up_and_one_thread_at_the_most") {
        return;
    }
    let silent = UdpSocket::bind("127.0.0.1:53").unwrap();
    silent.set_read_timeout(Some(CEILING)).unwrap();
    let server = RedisServer::start();
    let near = manager(&server);
    let held = near.lock("x").unwrap();
    let mgr = RedisMgr::new(impatient("redis://locks.example:6379")).unwrap();
    for _ in 0..3 {
        let error = within(BOUNDED, "trying", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        let error = within(BOUNDED, "waiting", || mgr.try_lock_for("x", SECOND).unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        assert!(lookups() <= 1, "{} lookups", lookups());
    }
    silent.recv(&mut [0; 512]).expect("it was asked for the name");
    // Whoever knows an address needs no resolver.
    assert_eq!(get(&server, LOCK).as_deref(), Some(held.id().as_str()));
    held.release().unwrap().unwrap_released();
    within(BOUNDED, "dropping", || drop(mgr));
}
