//! The members of a group on the server: expiry, lost keys, and repeated requests.

use std::mem;

use distlock::{HeldBy, LockLost, LockOptions, Released, testing::servers::Script};

use super::{LONG, Subject, members_key, spawn_waiter};
use crate::{
    helpers::{
        SECOND, UnwrapReleased, config_long_timeouts, expect_loss, manager, pttl,
        server_behind_proxy, token_key, with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

/// Options of a holder that dies: nobody renews its lease.
fn dying() -> LockOptions {
    with_ttl(SECOND).renew(false)
}

/// Fault: N152
/// Promise: P12
#[test]
fn dead_reader_expires_and_the_others_keep_the_lock() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        let living = lock.read().unwrap();
        mem::forget(lock.read_with(&dying()).unwrap());
        let members = || mgr.lock_info("r").unwrap().unwrap().members().len();
        assert_eq!(members(), 2);
        eventually("the dead reader expires", TEST_TIMEOUT, || members() == 1);
        assert!(lock.try_write().unwrap_err().is_contended() && living.is_held());
        living.release().unwrap().unwrap_released();
        // One of several nodes may keep the dead reader for a little longer.
        eventually("a writer gets it", TEST_TIMEOUT, || lock.try_write().is_ok());
    }
}

/// Fault: N152
#[test]
fn lock_of_dead_readers_goes_to_a_waiting_writer() {
    for subject in Subject::with_nodes() {
        let mgr = subject.manager();
        let lock = mgr.rw_lock("r").unwrap();
        mem::forget(lock.read_with(&dying()).unwrap());
        mem::forget(lock.read_with(&dying()).unwrap());
        let here = lock.clone();
        let writer = spawn_waiter(&mgr, "r", 1, move || here.try_write_for(LONG));
        assert!(writer.join().unwrap().unwrap().is_held());
    }
}

/// Fault: N152
#[test]
fn permit_of_a_dead_holder_becomes_free() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let permits = mgr.semaphore("s", 2).unwrap();
        let living = permits.acquire().unwrap();
        mem::forget(permits.acquire_with(1, &dying()).unwrap());
        assert!(permits.try_acquire().unwrap_err().is_contended());
        let next = permits.try_acquire_for(LONG).unwrap();
        assert!(next.is_held() && living.is_held());
        assert_eq!(permits.available().unwrap(), 0);
    }
}

/// A member whose whole process is dead: nobody removes it from the members.
///
/// Fault: N152
#[test]
fn expired_permit_does_not_count_before_it_is_removed() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let permits = mgr.semaphore("s", 2).unwrap();
    let living = permits.acquire_with(1, &LockOptions::new().renew(false)).unwrap();
    let (seconds, _): (u64, u64) = server.query(&["TIME"]);
    let expires = (seconds * 1000 + 2500).to_string();
    server.cli(&["ZADD", &members_key("s"), &expires, "dead"]);
    let next = permits.try_acquire_for(LONG).unwrap();
    assert!(next.is_held() && living.is_held(), "it came only with the end of the group");
    assert_eq!(server.query::<u64>(&["ZCARD", &members_key("s")]), 2, "the dead one is removed");
}

/// Promise: P12
#[test]
fn group_does_not_expire_before_its_last_member() {
    const EXPIRIES: &str = "
        local now = redis.call('TIME')
        local lock = now[1] * 1000 + math.floor(now[2] / 1000) + redis.call('PTTL', KEYS[1])
        return {lock, tonumber(redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2])}";
    let server = RedisServer::start();
    let lock = manager(&server).rw_lock("r").unwrap();
    let mut readers = Vec::new();
    for seconds in [5, 2, 20, 9] {
        let ttl = LockOptions::new().ttl(seconds * SECOND).renew(false);
        readers.push(lock.read_with(&ttl).unwrap());
        let keys = ["EVAL", EXPIRIES, "2", "lock:r", &members_key("r")];
        let (lock, last): (u64, u64) = server.query(&keys);
        // PTTL rounds to whole milliseconds.
        assert!(lock + 2 >= last, "the group expires {} ms too early", last - lock);
    }
}

/// Fault: N153
#[test]
fn nobody_joins_a_group_whose_members_are_lost() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let reader = lock.read_with(&with_ttl(2 * SECOND)).unwrap();
    server.cli(&["DEL", &members_key("r")]);
    assert!(lock.try_read().unwrap_err().is_contended(), "how many there are is not known");
    assert!(lock.try_write().unwrap_err().is_contended());
    assert_eq!(expect_loss(&reader), LockLost::Gone);
    let here = lock.clone();
    let next = spawn_waiter(&mgr, "r", 1, move || here.try_read_for(LONG));
    assert!(next.join().unwrap().unwrap().is_held(), "the group expires");
}

/// Fault: N153
#[test]
fn members_of_a_deleted_group_do_not_come_back() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let permits = mgr.semaphore("s", 2).unwrap();
    mem::forget(permits.acquire().unwrap());
    let lost = permits.acquire().unwrap();
    server.cli(&["DEL", "lock:s"]);
    let (one, two) = (permits.try_acquire().unwrap(), permits.try_acquire().unwrap());
    assert_eq!(server.query::<u64>(&["ZCARD", &members_key("s")]), 2);
    assert_eq!(expect_loss_soon(lost), LockLost::Gone);
    drop((one, two));
    assert_eq!(permits.available().unwrap(), 2);
}

/// Releases a lock that is lost already, and returns the reason.
fn expect_loss_soon(permit: distlock::Permit) -> LockLost {
    match permit.release().unwrap() {
        distlock::Released::Gone => LockLost::Gone,
        other => panic!("{other:?}"),
    }
}

/// Fault: N153
#[test]
fn members_key_of_another_type_admits_nobody() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let reader = lock.read_with(&with_ttl(2 * SECOND)).unwrap();
    server.cli(&["DEL", &members_key("r")]);
    server.cli(&["SET", &members_key("r"), "a string", "PX", "60000"]);
    assert!(lock.try_read().unwrap_err().is_contended());
    assert_eq!(expect_loss(&reader), LockLost::Gone);
    assert!(lock.try_read_for(LONG).unwrap().is_held(), "a new group begins");
}

/// Fault: N155
#[test]
fn full_server_renews_and_releases_members() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let reader = lock.read_with(&with_ttl(SECOND)).unwrap();
    let here = lock.clone();
    let writer = spawn_waiter(&mgr, "r", 1, move || here.try_write_for(LONG));
    server.config_set("maxmemory", "1");
    let renewals = mgr.metrics().renewals();
    eventually("it is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() >= renewals + 4);
    assert!(reader.is_held());
    reader.release().unwrap().unwrap_released();
    let writer = writer.join().unwrap().unwrap();
    assert!(lock.try_read().is_err(), "new locks are refused");
    let reader = writer.downgrade().unwrap();
    reader.release().unwrap().unwrap_released();
}

/// Promise: P12
#[test]
fn repeated_request_gets_a_new_or_a_decided_token() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock = mgr.rw_lock("r").unwrap();
    let (one, two) = (lock.read().unwrap(), lock.read().unwrap());
    let again = |id: &str, token_min, decided| ask_again(&server, id, token_min, decided);
    let latest = two.fencing_token().as_u64();
    let id = one.id().as_str();
    let latest_again = again(id, 0, "0");
    assert!(latest_again > latest, "the last token is another member's");
    // One of several nodes stores the minimum, and then needs no larger token.
    let stored = || -> String { server.query(&["GET", &token_key("r")]) };
    assert_eq!(again(id, latest_again + 5, "0"), latest_again + 5);
    assert_eq!(again(id, latest_again + 3, "0"), latest_again + 5, "it may have a larger one");
    assert_eq!(again(id, latest_again + 3, "1"), latest_again + 3);
    assert_eq!(again(id, latest_again + 7, "1"), latest_again + 7);
    assert_eq!(stored().parse::<u64>().unwrap(), latest_again + 7);
    assert_eq!(server.query::<u64>(&["ZCARD", &members_key("r")]), 2, "it is a member once");
    assert!(pttl(&server, "lock:r") > 0);
}

/// Over several nodes, a release does not wait for the reply that there are more waiters to serve.
///
/// Promise: P12
#[test]
fn repeated_request_admits_waiting_readers() {
    let server = RedisServer::start();
    let lock = manager(&server).rw_lock("r").unwrap();
    let reader = lock.read().unwrap();
    let mut waiter = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd("SUBSCRIBE").arg("waiters").exec(&mut waiter).unwrap();
    for id in ["a", "b", "c"] {
        let entry = format!("distlock:read/0/1,20000 waiters {id}");
        server.cli(&["RPUSH", &crate::helpers::queue_key("r"), &entry]);
    }
    ask_again(&server, reader.id().as_str(), 0, "0");
    assert_eq!(server.query::<u64>(&["ZCARD", &members_key("r")]), 4);
}

/// A clean-up of what the writer may have left comes after its downgrade. Otherwise the reader
/// would lose a node and still count it.
///
/// Fault: N185
/// Promise: P12
#[test]
fn release_of_a_writer_leaves_the_reader_it_has_become() {
    let server = RedisServer::start();
    let lock = manager(&server).rw_lock("r").unwrap();
    let reader = lock.write().unwrap().downgrade().unwrap();
    let release = |members: &str| -> String {
        let keys = keys_of_lock();
        let mut words = vec!["EVAL", Script::ReleaseGroup.text(), "5"];
        words.extend(keys.iter().map(String::as_str));
        words.extend(["7", reader.id().as_str(), "", "", members, "1"]);
        server.query(&words)
    };
    assert_eq!(release("-1"), "7 gone");
    assert_eq!(server.query::<u64>(&["ZCARD", &members_key("r")]), 1);
    assert_eq!(release("1"), "7 released");
}

/// A request to join the queue that is carried out late, or twice, leaves an entry of a client that
/// has the lock by now.
///
/// Fault: N190
/// Promise: P2
#[test]
fn second_queue_entry_of_a_holder_changes_nothing() {
    let server = RedisServer::start();
    let permits = manager(&server).semaphore("s", 3).unwrap();
    let (held, ended) = (permits.acquire().unwrap(), permits.acquire().unwrap());
    let mut listener = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd("SUBSCRIBE").arg("waiters").exec(&mut listener).unwrap();
    for count in [1, 3] {
        let entry = format!("distlock:permits/3/{count},1 waiters {}", held.id());
        server.cli(&["RPUSH", &crate::helpers::queue_key("s"), &entry]);
    }
    let expires = || -> f64 { server.query(&["ZSCORE", &members_key("s"), held.id().as_str()]) };
    let before = expires();
    ended.release().unwrap().unwrap_released();
    assert!(expires() >= before, "the claim window of an entry has replaced its time");
    assert_eq!(server.query::<u64>(&["LLEN", &crate::helpers::queue_key("s")]), 0);
    assert!(permits.try_acquire().unwrap().is_held());
    held.release().unwrap().unwrap_released();
}

/// The lease of a downgrade counts from the request to which the reply came. An earlier request may
/// have been carried out long before.
///
/// Fault: N189
/// Promise: P2
#[test]
fn repeated_downgrade_keeps_the_reader_for_a_whole_ttl_again() {
    let server = RedisServer::start();
    let lock = manager(&server).rw_lock("r").unwrap();
    let reader = lock.write().unwrap().downgrade().unwrap();
    let again = |ttl_ms: &str| {
        let keys = keys_of_lock();
        let mut words = vec!["EVAL", Script::AcquireGroup.text(), "5"];
        words.extend(keys.iter().map(String::as_str));
        words.extend(["7", reader.id().as_str(), ttl_ms, "9999999999999999", "0", "downgrade", ""]);
        words.extend(["distlock:read", "0", "1", "0000000000000001", "1", "1"]);
        let reply: String = server.query(&words);
        assert!(reply.starts_with("7 held "), "{reply}");
    };
    let expires = || -> f64 { server.query(&["ZSCORE", &members_key("r"), reader.id().as_str()]) };
    let hour = "3600000";
    let before = expires();
    again(hour);
    let after = expires();
    assert!(after > before + 3_000_000.0, "{before}, then {after}");
    let left = [pttl(&server, "lock:r"), pttl(&server, &members_key("r"))];
    assert!(left.iter().all(|left| *left > 3_000_000), "{left:?}");
    // A request that was delayed never shortens the time.
    again("1000");
    assert!(expires() >= after);
    assert_eq!(server.query::<u64>(&["ZCARD", &members_key("r")]), 1);
    assert_eq!(reader.release().unwrap(), Released::Released);
}

/// The keys of the lock `r`, as the scripts of groups expect them.
fn keys_of_lock() -> [String; 5] {
    [
        "lock:r".to_owned(),
        crate::helpers::queue_key("r"),
        token_key("r"),
        crate::helpers::FENCE.to_owned(),
        members_key("r"),
    ]
}

/// Asks again for the read lock `r`, as a client does whose reply was lost, or of which several
/// nodes disagree. Returns the token.
fn ask_again(server: &RedisServer, id: &str, token_min: u64, decided: &str) -> u64 {
    let token_min = format!("{token_min:016}");
    let keys = keys_of_lock();
    let hash = acquire_hash(server);
    let mut words = vec!["EVALSHA", &hash, "5"];
    words.extend(keys.iter().map(String::as_str));
    words.extend(["7", id, "30000", "9999999999999999", "0", "try", ""]);
    words.extend(["distlock:read", "0", "1", &token_min, decided, "1"]);
    let reply: String = server.query(&words);
    let fields: Vec<_> = reply.split(' ').collect();
    assert_eq!(fields[1], "held", "{reply}");
    fields[3].parse().unwrap()
}

/// Fault: N156
#[test]
fn lost_replies_to_readers_are_asked_for_again() {
    for fault in [Fault::ResetAfterRequest, Fault::CloseAfterRequest] {
        // On a busy machine, neither a timeout nor a renewal nor a clean-up comes in between.
        let config =
            |url| config_long_timeouts(url).ttl(600 * SECOND).operation_timeout(60 * SECOND);
        let (server, proxy, mgr) = server_behind_proxy(config);
        let direct = manager(&server).rw_lock("warm").unwrap();
        direct.write().unwrap().downgrade().unwrap().release().unwrap().unwrap_released();
        let lose_next = || proxy.on_request(contains("distlock:members:{lock:r}"), fault.clone());
        let members = || server.query::<u64>(&["ZCARD", &members_key("r")]);
        let lock = mgr.rw_lock("r").unwrap();

        let lost = lose_next();
        let reader = lock.try_read_for(LONG).unwrap();
        assert_eq!((lost.fired(), members()), (1, 1));
        let lost = lose_next();
        assert_eq!(reader.release().unwrap(), Released::Released);
        assert_eq!((lost.fired(), members()), (1, 0));

        let writer = lock.write().unwrap();
        let token = writer.fencing_token();
        let lost = lose_next();
        let reader = writer.downgrade().unwrap();
        assert_eq!((lost.fired(), members(), reader.fencing_token()), (1, 1, token));
        assert!(lock.try_write().unwrap_err().is_contended());
        drop(reader);
    }
}

/// The hash of the script that acquires a read lock.
fn acquire_hash(server: &RedisServer) -> String {
    let source = concat!(
        include_str!("../../../src/backend/redis/lua/prelude.lua"),
        include_str!("../../../src/backend/redis/lua/token.lua"),
        include_str!("../../../src/backend/redis/lua/group/acquire_alone.lua"),
        include_str!("../../../src/backend/redis/lua/notify.lua"),
        include_str!("../../../src/backend/redis/lua/group/members.lua"),
        include_str!("../../../src/backend/redis/lua/group/grant.lua"),
        include_str!("../../../src/backend/redis/lua/group/acquire.lua"),
        include_str!("../../../src/backend/redis/lua/report.lua")
    );
    server.query(&["SCRIPT", "LOAD", source])
}

/// Fifty groups of a thousand listed members each would be a reply of 7 MB.
///
/// Fault: F62
#[test]
fn many_large_groups_are_listed_with_their_sizes() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let hold = |number| {
            let permits = mgr.semaphore(&format!("s{number}"), 2_000).unwrap();
            permits.acquire_with(1_500, &with_ttl(LONG)).unwrap()
        };
        let held: Vec<_> = (0..50).map(hold).collect();
        let found = mgr.locks("*").unwrap();
        assert_eq!(found.len(), held.len());
        for lock in found {
            let held_by = lock.holder().held_by();
            assert!(matches!(held_by, HeldBy::Permits { count: Some(1_500), .. }), "{held_by:?}");
        }
    }
}
