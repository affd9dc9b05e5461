//! Whatever happens while a manager is shut down, what it holds is released as far as the servers
//! answer.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use distlock::{AttemptedEvent, HandleEvent, LockError, LockGuard, LockOptions, RedisMgr};

use crate::{
    helpers::{
        SECOND, UnwrapReleased, await_queued, config_long_timeouts, config_medium_timeout,
        in_thread, is_renewal, manager, queued, server_behind_proxy, spawn_queued_waiter,
    },
    support::{CEILING, Fault, Nodes, RedisServer, contains, eventually},
};

const MANY: usize = 20;

fn many(mgr: &RedisMgr) -> Vec<LockGuard> {
    (0..MANY).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect()
}

fn left_on(server: &RedisServer) -> Vec<String> {
    server.query(&["KEYS", "lock:n*"])
}

#[test]
fn a_request_that_fails_leaves_no_lock_behind() {
    let refused = Fault::ReplaceReply(b"-ERR not now\r\n".to_vec());
    for fault in [Fault::ResetAfterRequest, Fault::ResetBeforeRequest, Fault::DropReply, refused] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
        let guards = many(&mgr);
        let failed = proxy.on_request(contains("lock:n"), fault.clone());
        mgr.shutdown();
        assert_eq!(failed.fired(), 1, "{fault:?}");
        assert_eq!(left_on(&server), [""; 0], "{fault:?}");
        drop(guards);
    }
}

/// A name that the rights forbid was asked for, and there is no taking back what may be left of it.
#[test]
fn what_cannot_be_taken_back_leaves_no_lock_behind() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~lock:*", "~distlock:*", "&*", "+@all"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", server.addr()))).unwrap();
    // Who has waited before has a line, and may be in it whatever the answer was.
    let guard = manager(&server).lock("warm").unwrap();
    assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
    guard.release().unwrap().unwrap_released();
    let guards = many(&mgr);
    server.cli(&["ACL", "SETUSER", "app", "resetkeys", "~lock:n*", "~distlock:*"]);
    assert!(mgr.try_lock_for("forbidden", SECOND).is_err());
    mgr.shutdown();
    assert_eq!(left_on(&server), [""; 0]);
    drop(guards);
}

#[test]
fn a_node_that_hangs_leaves_no_lock_on_the_others() {
    let nodes = Nodes::start(3);
    for hung in 0..3 {
        let config = config_long_timeouts(nodes.urls())
            .quarantine(Duration::ZERO)
            .operation_timeout(8 * SECOND);
        let mgr = RedisMgr::new(config).unwrap();
        let guards = many(&mgr);
        nodes.stop(hung);
        mgr.shutdown();
        for well in (0..3).filter(|node| *node != hung) {
            assert_eq!(left_on(nodes.server(well)), [""; 0], "node {well}, while {hung} hangs");
        }
        nodes.cont(hung);
        drop(guards);
        nodes.server(hung).cli(&["FLUSHALL"]);
    }
}

/// Goal: thousands of locks can be released in the time that there is, however long the way.
/// Method: an answer is held back for as long as it may be asked for; what comes behind it is
/// released meanwhile.
#[test]
fn no_release_waits_for_the_answer_to_another() {
    for (count, dead) in [(1, None), (3, None), (3, Some(1))] {
        let nodes = Nodes::start(count).behind_proxies(&[0]);
        let config = config_long_timeouts(nodes.urls())
            .quarantine(Duration::ZERO)
            .operation_timeout(60 * SECOND);
        let mgr = RedisMgr::new(config.ttl(600 * SECOND)).unwrap();
        let guards = many(&mgr);
        dead.into_iter().for_each(|node| nodes.kill(node));
        let held = nodes.proxy(0).on_request(contains("lock:n3"), Fault::HoldReply).forever();
        let ending = in_thread(&mgr, "", |mgr, _| mgr.shutdown());
        let alive = || (0..count).filter(|node| dead != Some(*node));
        eventually("all are released", CEILING, || {
            alive().all(|node| left_on(nodes.server(node)).is_empty())
        });
        held.wait_fired();
        assert_eq!(held.fired(), 1, "it was asked for again");
        held.let_go();
        ending.join().unwrap();
        drop(guards);
    }
}

/// Of two who shut down, one perhaps because of a signal, the faster one to return may end the
/// process.
#[test]
fn whoever_else_shuts_down_waits_for_it_too() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guards = many(&mgr);
    let releases = proxy
        .on_request(contains("lock:n"), Fault::DelayReply(Duration::from_millis(50)))
        .forever();
    let first = in_thread(&mgr, "", |mgr, _| mgr.shutdown());
    releases.wait_fired();
    mgr.shutdown();
    assert_eq!(left_on(&server), [""; 0]);
    first.join().unwrap();
    drop(guards);
}

/// An answer that does not come is waited for no longer once the time is needed.
#[test]
fn what_is_under_way_leaves_time_for_what_is_held() {
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).ttl(18 * SECOND).operation_timeout(4 * SECOND)
    });
    // More than can be released in the moment by which the shutdown begins later than the renewal.
    let guards: Vec<_> = (0..1_000).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    proxy.on_request(is_renewal("lock:n0"), Fault::HoldRequest).wait_fired();
    mgr.shutdown();
    assert_eq!(left_on(&server), [""; 0]);
    drop(guards);
}

/// It was let in, and shows up at the pool when that is closed.
#[test]
fn a_call_that_runs_into_a_shutdown_says_so() {
    #[derive(Debug)]
    struct Ends(Arc<OnceLock<RedisMgr>>);

    impl HandleEvent for Ends {
        fn attempted(&self, _: &AttemptedEvent<'_>) {
            self.0.get().unwrap().shutdown();
        }
    }

    let server = RedisServer::start();
    for wait in [Some(Duration::ZERO), Some(SECOND), None] {
        let own = Arc::new(OnceLock::new());
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url()).event_handler(Arc::new(Ends(own.clone()))),
        )
        .unwrap();
        own.set(mgr.clone()).unwrap();
        let options = wait.map_or(LockOptions::new(), |wait| LockOptions::new().wait(wait));
        let error = mgr.lock_with("x", &options).unwrap_err();
        assert!(matches!(error, LockError::Shutdown), "{wait:?}: {error:?}");
    }
}

/// Goal: waiters that are late for the renewer, which gives up the places of others, share few
/// connections. Method: they ask for their places while the manager is shut down; and then no
/// answer comes, so that each is on its connection when the others come.
#[test]
fn many_who_wait_leave_over_few_connections() {
    const WAITERS: u32 = 40;
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_medium_timeout(url).pool_size(WAITERS));
    let guard = manager(&server).lock("x").unwrap();
    // Where one stands in line, others go there at once.
    let first = spawn_queued_waiter(&server, &mgr, "x");
    let asked = proxy.on_request(contains("lock:x"), Fault::HoldReply).times(WAITERS as usize);
    let mut waiting: Vec<_> =
        (0..WAITERS).map(|_| in_thread(&mgr, "x", |mgr, name| mgr.lock(name))).collect();
    waiting.push(first);
    asked.wait_fired_times(WAITERS as usize);
    mgr.shutdown();
    let left = proxy.on_request(contains("lock:x"), Fault::HoldReply).forever();
    asked.let_go();
    for waiting in waiting {
        assert!(matches!(waiting.join().unwrap(), Err(LockError::Shutdown)));
    }
    // Four at a time, each twice at most; and on a slow machine others for what is left of the time
    // then.
    assert!(left.fired() < 20, "{}", left.fired());
    left.let_go();
    drop(guard);
}

/// Where answers come, all of them get away in time.
#[test]
fn many_who_wait_are_gone_when_they_have_been_told() {
    const WAITERS: usize = 120;
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(2)).unwrap();
    let guard = manager(&server).lock("x").unwrap();
    let waiting: Vec<_> =
        (0..WAITERS).map(|_| in_thread(&mgr, "x", |mgr, name| mgr.lock(name))).collect();
    await_queued(&server, "x", WAITERS);
    mgr.shutdown();
    for waiting in waiting {
        assert!(matches!(waiting.join().unwrap(), Err(LockError::Shutdown)));
    }
    assert_eq!(queued(&server, "x"), 0);
    server.await_clients(0..=2);
    drop(guard);
}
