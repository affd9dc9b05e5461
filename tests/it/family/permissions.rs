//! The permissions that locks of several clients need.

use distlock::RedisMgr;

use super::{LONG, spawn_waiter};
use crate::{
    helpers::{SECOND, UnwrapReleased, config_long_timeouts, manager, with_ttl},
    security::permissions::list::{LOCK_PERMISSIONS, SHARED_PERMISSIONS},
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

const WORDS: [&str; 8] = ["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetchannels", "-@all"];

fn manager_of_user(server: &RedisServer) -> RedisMgr {
    let url = format!("redis://app:pw@{}", server.addr());
    RedisMgr::new(config_long_timeouts(url)).unwrap()
}

/// A server does not say which command a script may not run. The library finds `+zadd` by the line
/// of the script, and not `+lindex`, which a function of the script needs.
///
/// Fault: F76
#[test]
fn error_names_the_permission_that_a_group_lacks() {
    for missing in ["+zadd", "+lindex"] {
        let server = RedisServer::start();
        let listed = LOCK_PERMISSIONS.into_iter().chain(SHARED_PERMISSIONS);
        let granted = listed.filter(|permission| *permission != missing);
        server.cli(&WORDS.into_iter().chain(granted).collect::<Vec<_>>());
        let permits = manager_of_user(&server).semaphore("s", 1).unwrap();
        let error = match permits.acquire() {
            Err(error) => error,
            Ok(first) => {
                let here = permits.clone();
                let waiter = move || here.try_acquire_for(LONG).map(drop);
                let waiter = spawn_waiter(&manager(&server), "s", 1, waiter);
                let error = first.release().unwrap_err();
                let _ = waiter.join().unwrap();
                error
            }
        };
        assert!(error.is_refused() && error.to_string().contains(missing), "{error}");
    }
}

#[test]
fn listed_permissions_suffice_for_readers_and_permits() {
    let readme = include_str!("../../../README.md");
    let (_, listed) = readme.split_once("Read-write locks and semaphores also need").unwrap();
    let listed = listed.split("\n\n").next().unwrap();
    let listed: Vec<&str> = listed.split('`').filter(|word| word.starts_with('+')).collect();
    assert_eq!(listed, SHARED_PERMISSIONS);
    let server = RedisServer::start();
    let listed =
        LOCK_PERMISSIONS.iter().copied().chain(SHARED_PERMISSIONS).chain(["+scan", "+lrange"]);
    server.cli(&WORDS.into_iter().chain(listed).collect::<Vec<_>>());
    let mgr = manager_of_user(&server);

    let lock = mgr.rw_lock("r").unwrap();
    let writer = lock.write().unwrap();
    let here = lock.clone();
    let second = spawn_waiter(&mgr, "r", 1, move || here.try_read_for(LONG));
    let reader = writer.downgrade().unwrap();
    let second = second.join().unwrap().unwrap();
    assert_eq!(mgr.locks("*").unwrap()[0].members().len(), 2);
    reader.release().unwrap().unwrap_released();
    second.release().unwrap().unwrap_released();

    let permits = mgr.semaphore("s", 2).unwrap();
    let pair = permits.acquire_with(2, &with_ttl(SECOND)).unwrap();
    let here = permits.clone();
    let next = spawn_waiter(&mgr, "s", 1, move || here.try_acquire_for(LONG));
    let renewals = mgr.metrics().renewals();
    eventually("it is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() >= renewals + 2);
    pair.release().unwrap().unwrap_released();
    next.join().unwrap().unwrap().release().unwrap().unwrap_released();
}

/// A user who lacks one of them gets no lock, and leaves none to others.
///
/// Fault: F76
#[test]
fn missing_permission_leaves_no_lock_behind() {
    let server = RedisServer::start();
    let all = manager(&server);
    for missing in SHARED_PERMISSIONS {
        let words = ["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetchannels", "-@all"];
        let others = SHARED_PERMISSIONS.into_iter().filter(|permission| *permission != missing);
        let granted = LOCK_PERMISSIONS.iter().copied().chain(others);
        server.cli(&words.into_iter().chain(granted).collect::<Vec<_>>());
        let url = format!("redis://app:pw@{}", server.addr());
        let mgr = RedisMgr::new(config_long_timeouts(url)).unwrap();
        let (read, permit) = (format!("r{missing}"), format!("s{missing}"));
        let refused = [
            (mgr.rw_lock(&read).unwrap().try_read().is_err(), read),
            (mgr.semaphore(&permit, 2).unwrap().try_acquire().is_err(), permit),
        ];
        for (_, name) in refused.iter().filter(|(is_refused, _)| *is_refused) {
            assert!(!all.is_locked(name).unwrap(), "{name}");
        }
        let needed = ["+zadd", "+pexpireat"].contains(&missing);
        assert!(!needed || refused.iter().any(|(is_refused, _)| *is_refused), "{missing}");
    }
}
