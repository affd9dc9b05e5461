//! Giving a lock up: what it says, what it leaves, and servers that do not answer meanwhile.

use std::{panic, sync::Arc, thread, time::Duration};

use distlock::{HandleEvent, LockError, LockGuard, LostEvent, RedisMgr, Released, ReleasedEvent};
use parking_lot::Mutex;

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queued, completes_within,
        config_long_timeouts, config_short_timeout, fence_key, get, in_thread, is_renewal, manager,
        queued, server_behind_proxy, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, Fault, Monitor, Nodes, RedisServer, contains, eventually},
};

const LOCK: &str = "lock:x";

#[test]
fn a_release_says_how_it_went() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert_eq!(mgr.lock("x").unwrap().release().unwrap(), Released::Released);
    assert_eq!(server.keys(), [fence_key("x")]);

    let guard = mgr.lock("x").unwrap();
    server.cli(&["DEL", LOCK]);
    assert_eq!(guard.release().unwrap(), Released::Gone);

    let guard = mgr.lock("x").unwrap();
    server.cli(&["SET", LOCK, "a stranger", "PX", "60000"]);
    let Released::OwnedByOther(holder) = guard.release().unwrap() else {
        panic!("it is another's")
    };
    assert_eq!(holder.id(), "a stranger");
    assert_eq!(get(&server, LOCK).as_deref(), Some("a stranger"));
}

#[test]
fn a_drop_releases() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    drop(mgr.lock("x").unwrap());
    assert_eq!(get(&server, LOCK), None);
    drop(mgr.try_lock("x").unwrap());
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn a_release_whose_reply_is_lost_is_a_release() {
    for fault in [
        Fault::DropReply,
        Fault::ResetAfterRequest,
        Fault::CloseAfterRequest,
        Fault::ResetBeforeRequest,
    ] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
        let guard = mgr.lock("x").unwrap();
        let lost = proxy.on_request(contains(LOCK), fault.clone());
        assert_eq!(guard.release().unwrap(), Released::Released, "{fault:?}");
        assert_eq!(lost.fired(), 1);
        assert_eq!(get(&server, LOCK), None, "{fault:?}");
    }
}

/// The first request hands the lock to the waiter; asking again must not take it away from there.
#[test]
fn a_handover_whose_reply_is_lost_happens_once() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    let lost = proxy.on_request(contains(LOCK), Fault::DropReply);
    let outcome = guard.release().unwrap();
    lost.wait_fired();
    let next = waiting.join().unwrap().unwrap();
    assert_eq!(outcome, Released::Released);
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    next.release().unwrap().unwrap_released();
}

#[test]
fn a_release_at_a_stopped_server_fails_in_time_and_is_made_up_for() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url()).ttl(600 * SECOND)).unwrap();
    let guard = mgr.lock("x").unwrap();
    server.stop();
    let error = completes_within(CALL_LIMIT, "release", || guard.release().unwrap_err());
    assert!(error.is_unavailable(), "{error}");
    assert!(error.to_string().starts_with("could not release lock \"x\" at 127.0.0.1:"), "{error}");
    server.cont();
    await_gone(&server, LOCK);
}

#[test]
fn a_drop_at_a_stopped_server_is_bounded_and_made_up_for() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url()).ttl(600 * SECOND)).unwrap();
    let guards = [mgr.lock("x").unwrap(), mgr.lock("y").unwrap()];
    server.stop();
    completes_within(2 * CALL_LIMIT, "drop", || drop(guards));
    server.cont();
    await_gone(&server, LOCK);
    await_gone(&server, "lock:y");
}

#[test]
fn a_release_that_arrives_late_leaves_the_next_holder_alone() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let guard = mgr.lock("x").unwrap();
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest).forever();
    assert!(guard.release().unwrap_err().is_unavailable());
    assert!(manager(&server).force_release("x").unwrap());
    let next = manager(&server).lock("x").unwrap();
    let commands = server.monitor();
    late.disarm();
    late.let_go();
    commands.wait_for("\"EVALSHA\"");
    drop(mgr.lock("y").unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    assert!(next.is_held());
}

#[test]
fn a_release_without_the_right_to_publish_still_frees_the_lock() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-publish"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", server.addr()))).unwrap();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

#[test]
fn a_guard_can_be_released_on_another_thread() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for finish in [|guard| LockGuard::release(guard).unwrap().unwrap_released(), drop::<LockGuard>]
    {
        let guard = mgr.lock("x").unwrap();
        thread::spawn(move || finish(guard)).join().unwrap();
        assert_eq!(get(&server, LOCK), None);
    }
}

#[test]
fn a_guard_outlives_its_manager() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    drop(mgr);
    let commands = server.monitor();
    commands.wait_for("lua] \"PEXPIRE\" \"lock:x\"");
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn a_panic_releases() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let panicked = thread::spawn({
        let mgr = mgr.clone();
        move || {
            let _guard = mgr.lock("x").unwrap();
            // Quieter than a panic, and unwinds like one.
            panic::resume_unwind(Box::new("work went wrong"));
        }
    });
    assert!(panicked.join().is_err());
    assert_eq!(get(&server, LOCK), None);
    drop(mgr.try_lock("x").unwrap());
}

#[test]
fn a_guard_that_outlives_a_shutdown_does_no_harm() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (released, dropped) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
    mgr.shutdown();
    let other = manager(&server).lock("x").unwrap();
    let outcome = completes_within(CALL_LIMIT, "release", || released.release());
    assert!(
        matches!(outcome, Ok(Released::OwnedByOther(_)) | Err(LockError::Shutdown)),
        "{outcome:?}"
    );
    completes_within(CALL_LIMIT, "drop", || drop(dropped));
    assert_eq!(get(&server, LOCK).as_deref(), Some(other.id().as_str()));
}

#[test]
fn a_renewal_under_way_changes_nothing_after_a_release() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let under_way = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    under_way.wait_fired();
    let lost = guard.lost().clone();
    guard.release().unwrap().unwrap_released();
    let next = manager(&server).lock("x").unwrap();
    let commands = server.monitor();
    under_way.let_go();
    commands.wait_for("lua] \"GET\" \"lock:x\"");
    assert_eq!(lost.recv_timeout(CEILING), Err(crossbeam_channel::RecvTimeoutError::Disconnected));
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// For a while in which other locks are renewed, the server hears nothing of those that were
/// released.
#[test]
fn nothing_is_renewed_after_a_release() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let watched = mgr.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    server.monitor().wait_for("lua] \"PEXPIRE\" \"lock:y\"");
    let released: Vec<_> =
        (0..50).map(|n| mgr.lock_with(&format!("x{n}"), &with_ttl(3 * SECOND)).unwrap()).collect();
    for guard in released {
        guard.release().unwrap().unwrap_released();
    }
    let commands = server.monitor();
    let count = |part: &str| commands.lines().iter().filter(|line| line.contains(part)).count();
    eventually("the other lock is renewed", CEILING, || count("lua] \"PEXPIRE\" \"lock:y\"") >= 3);
    assert_eq!(count(LOCK), 0, "{:#?}", commands.lines());
    assert!(watched.is_held());
}

#[test]
fn acquire_lock_and_release_lock_keep_the_promises_of_the_design() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let ttl = 3 * SECOND;
    let id = mgr.acquire_lock("x", ttl, Duration::ZERO).unwrap().expect("it is free");
    assert_eq!(get(&server, LOCK).as_deref(), Some(id.as_str()));
    assert_eq!(other.acquire_lock("x", ttl, Duration::from_millis(50)).unwrap(), None);
    assert_eq!(queued(&server, "x"), 0);

    for wrong in ["", "wrong", distlock::generate_lock_id().as_str()] {
        assert!(!mgr.release_lock("x", wrong).unwrap(), "{wrong:?}");
        assert!(!other.release_lock("x", wrong).unwrap(), "{wrong:?}");
    }
    assert!(!mgr.release_lock("y", &id).unwrap(), "it is the identifier of another lock");
    // The wrong identifiers have not ended its renewal.
    let commands = server.monitor();
    eventually("it is renewed many times", CEILING, || renewals(&commands) >= 4);
    assert_eq!(get(&server, LOCK).as_deref(), Some(id.as_str()));

    assert!(mgr.release_lock("x", &id).unwrap());
    assert!(!mgr.release_lock("x", &id).unwrap());
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn release_lock_knows_identifiers_of_other_managers() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let id = mgr.acquire_lock("x", 30 * SECOND, SECOND).unwrap().unwrap();
    let waiting =
        in_thread(&mgr, "x", |mgr, name| mgr.acquire_lock(name, 30 * SECOND, Duration::MAX));
    await_queued(&server, "x", 1);
    assert!(other.release_lock("x", &id).unwrap());
    let next = waiting.join().unwrap().unwrap().expect("it was released");
    assert_ne!(next, id);
    assert!(other.release_lock("x", &next).unwrap());
    assert_eq!(get(&server, LOCK), None);
}

#[derive(Debug, Default)]
struct Ends(Mutex<Vec<&'static str>>);

impl HandleEvent for Ends {
    fn released(&self, _: &ReleasedEvent<'_>) {
        self.0.lock().push("released");
    }
    fn lost(&self, _: &LostEvent<'_>) {
        self.0.lock().push("lost");
    }
}

/// The second one must not overtake the first, which would be told that its lock had been lost.
#[test]
fn of_two_who_release_one_identifier_at_once_the_first_does_it() {
    let told = Arc::new(Ends::default());
    let handler = told.clone();
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).operation_timeout(8 * SECOND).event_handler(handler)
    });
    let id = mgr.acquire_lock("x", 30 * SECOND, SECOND).unwrap().unwrap();
    let release = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let own = id.clone();
    let first = in_thread(&mgr, "x", move |mgr, name| mgr.release_lock(name, &own));
    release.wait_fired();
    assert!(!completes_within(CALL_LIMIT, "the second", || mgr.release_lock("x", &id)).unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(id.as_str()));
    release.let_go();
    assert!(first.join().unwrap().unwrap());
    assert_eq!((get(&server, LOCK), mgr.metrics().lost()), (None, 0));
    assert!(!mgr.release_lock("x", &id).unwrap());
    mgr.shutdown();
    assert_eq!(*told.0.lock(), ["released"]);
}

#[test]
fn who_could_not_release_an_identifier_can_try_again() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let id = mgr.acquire_lock("x", 30 * SECOND, SECOND).unwrap().unwrap();
    let release =
        proxy.on_request(contains(LOCK), Fault::ReplaceReply(b"-ERR not now\r\n".to_vec()));
    assert!(mgr.release_lock("x", &id).is_err());
    assert_eq!(release.fired(), 1);
    // What is taken back in the background may come first.
    eventually("it can be released", CEILING, || {
        server.cli(&["SET", LOCK, &id, "PX", "60000"]);
        mgr.release_lock("x", &id).unwrap()
    });
}

#[test]
fn an_operator_can_take_a_lock_away() {
    let server = RedisServer::start();
    let (mgr, operator) = (manager(&server), manager(&server));
    assert!(!operator.force_release("x").unwrap());
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(operator.force_release("x").unwrap());
    let next = waiting.join().unwrap().unwrap();
    let Released::OwnedByOther(holder) = guard.release().unwrap() else {
        panic!("it was handed on")
    };
    assert_eq!(holder.id(), next.id().as_str());
    assert!(next.is_held());
}

/// A client of another kind, whose identifier is any bytes.
fn strange_take(server: &RedisServer, id: &[u8]) {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd("SET").arg(LOCK).arg(id).arg("PX").arg(600_000).exec(&mut connection).unwrap();
}

/// Identifiers that are no text, or that are told in part.
fn strange_ids() -> Vec<Vec<u8>> {
    let random = b"\x00\xff \x80\r\n\xc3".to_vec();
    let texts = [
        "".to_owned(),
        " a\n b ".to_owned(),
        "é".repeat(300),
        format!("x{}", "é".repeat(300)),
        "i".repeat(1 << 20),
    ];
    texts
        .into_iter()
        .map(String::into_bytes)
        .chain([random, vec![0xff; 20], vec![0xff; 512], vec![0xff; 600]])
        .collect()
}

#[test]
fn an_operator_can_take_a_lock_away_whatever_its_holder_calls_itself() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for id in strange_ids() {
        let what = id[..id.len().min(30)].escape_ascii().to_string();
        strange_take(&server, &id);
        assert!(mgr.force_release("x").unwrap(), "{what}");
        assert!(!server.query::<bool>(&["EXISTS", LOCK]), "{what}");
        // By what is told of it, and by all of it.
        strange_take(&server, &id);
        let told = mgr.holder("x").unwrap().unwrap().id().to_owned();
        assert_eq!(mgr.force_release_if("x", &told).unwrap(), Released::Released, "{what}");
        if let Ok(whole) = std::str::from_utf8(&id) {
            strange_take(&server, &id);
            assert_eq!(mgr.force_release_if("x", whole).unwrap(), Released::Released, "{what}");
        }
        assert!(!server.query::<bool>(&["EXISTS", LOCK]), "{what}");
        strange_take(&server, b"\xff\xfe another");
        assert!(
            matches!(mgr.force_release_if("x", &told), Ok(Released::OwnedByOther(_))),
            "{what}"
        );
        assert!(server.query::<bool>(&["EXISTS", LOCK]), "{what}");
    }
}

#[test]
fn an_operator_can_take_a_lock_away_on_all_nodes_whatever_its_holder_calls_itself() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    let take = |id: &[u8]| (0..3).for_each(|node| strange_take(nodes.server(node), id));
    let kept =
        || (0..3).filter(|node| nodes.server(*node).query::<bool>(&["EXISTS", LOCK])).count();
    for id in strange_ids() {
        take(&id);
        assert!(mgr.force_release("x").unwrap());
        assert_eq!(kept(), 0);
        take(&id);
        let told = mgr.holder("x").unwrap().unwrap().id().to_owned();
        assert_eq!(mgr.force_release_if("x", &told).unwrap(), Released::Released);
        assert_eq!(kept(), 0);
    }
}

/// The lock changes hands after somebody has looked who holds it; both call themselves by bytes
/// that look alike as text.
#[test]
fn who_comes_after_a_holder_that_is_no_text_keeps_the_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    assert_eq!(mgr.holder("warm").unwrap(), None);
    strange_take(&server, &[0xff; 20]);
    // The first request asks who it is.
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest).after(1);
    let forcing = in_thread(&mgr, "x", |mgr, name| mgr.force_release(name));
    late.wait_fired();
    strange_take(&server, &[0xfe; 20]);
    late.let_go();
    assert!(!forcing.join().unwrap().unwrap());
    assert!(server.query::<bool>(&["EXISTS", LOCK]));
}

fn renewals(commands: &Monitor) -> usize {
    commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count()
}
