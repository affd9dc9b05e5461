//! What a hostile peer can make grow, and where that ends.

use std::{
    io::Write,
    net::TcpStream,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use distlock::{LockError, RedisMgr};

use crate::{
    helpers::{
        SECOND, UnwrapReleased, capture_log, completes_within, config_long_timeouts,
        in_own_process, manager, server_behind_proxy, spawn_queued_waiter,
    },
    support::{
        CEILING, Fault, Nodes, RedisServer, command, contains, endless_server, eventually, instead,
        request,
    },
};

/// The bound on a reply, and what sockets hold besides.
const REPLY_MAX: usize = 64 << 20;

#[test]
fn a_reply_without_an_end_costs_no_more_than_its_bound() {
    let floods = [
        ("one text", "$2000000000\r\n", "xxxx"),
        ("many numbers", "*2000000000\r\n", ":1\r\n"),
        ("a line", "+", "xxxx"),
        ("no end of arrays", "*1\r\n", "*1\r\n"),
    ];
    for (what, head, body) in floods {
        let flood = endless_server(head, body);
        let mgr = RedisMgr::new(config_long_timeouts(flood.url())).unwrap();
        let error = mgr.ping().unwrap_err();
        assert!(error.is_unavailable(), "{what}: {error}");
        eventually("it has noticed that nobody listens", CEILING, || flood.said() > 0);
        assert!(flood.said() < REPLY_MAX, "{what}: {} bytes were taken", flood.said());
    }
}

/// Of several nodes each is listened to in turns, and no turn begins to count anew.
#[test]
fn a_reply_without_an_end_of_one_of_several_nodes_costs_no_more_than_its_bound() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = RedisMgr::new(config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    drop(mgr.lock("warm").unwrap());
    let flood = [&b"$500000000\r\n"[..], &vec![b'x'; REPLY_MAX]].concat();
    nodes.proxy(2).on_request(contains("lock:x"), Fault::ReplaceReply(flood)).forever();
    nodes.kill(0);
    // Which asks all of them, whatever they have answered before.
    let error = mgr.lock_info("x").unwrap_err();
    assert!(error.nodes()[2].message.contains("too long"), "{error}");
}

/// A minute's worth of what anybody who may publish can say in a second: noise, and grants for
/// nobody.
#[test]
fn a_flood_of_messages_is_told_once_and_costs_nobody_a_grant() {
    if !in_own_process("limits::a_flood_of_messages_is_told_once_and_costs_nobody_a_grant", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    let channels: Vec<String> = server.query(&["PUBSUB", "CHANNELS", "distlock:client:*"]);
    let [channel] = channels.as_slice() else { panic!("{channels:?}") };
    let noise = [
        request(&["PUBLISH", channel, "\u{1b}[31m"]),
        request(&["PUBLISH", channel, "0 0 0 x"]),
        request(&["PUBLISH", channel, "1 2 3 nobody"]),
    ];
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.write_all(&noise.concat().repeat(10_000)).unwrap();
    let published = || server.calls("publish");
    eventually("all has been said", CEILING, || published() == 30_000);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
    let told: Vec<_> =
        logged.lock().iter().filter(|line| line.contains("not grants")).cloned().collect();
    assert_eq!(told.len(), 1, "{told:#?}");
    assert!(!told[0].contains('\u{1b}'));
}

/// Whoever may write the keys may call himself anything.
#[test]
fn what_others_are_called_is_cut() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.cli(&["SET", "lock:x", &"é".repeat(1 << 20), "PX", "600000"]);
    let holder = mgr.holder("x").unwrap().unwrap();
    assert!(holder.id().len() <= 512, "{} bytes", holder.id().len());
    let error = mgr.try_lock("x").unwrap_err();
    let said = format!("{error} {error:?}");
    assert!(said.len() < 4096, "{} bytes", said.len());
    let Err(LockError::Held { holder, .. }) = mgr.try_lock("x") else { panic!("{error:?}") };
    assert!(holder.to_string().len() < 1024);
    let listed = mgr.locks("*").unwrap();
    assert!(listed[0].holder().id().len() <= 512);
}

/// A server that answers every step of a scan with more keys, and with where to go on.
#[test]
fn a_list_of_keys_without_an_end_ends() {
    let step = format!("*2\r\n$1\r\n7\r\n*400000\r\n{}", "$1\r\na\r\n".repeat(400_000));
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    proxy.on_request(command("SCAN"), Fault::ReplaceReply(step.into_bytes())).forever();
    let error = mgr.locks("*").unwrap_err();
    assert!(error.to_string().contains("ever more keys"), "{error}");
}

/// A server whose scan tells `steps` times of `each` keys, none of them twice, with so much behind
/// them; then it ends.
fn scan_of_many(steps: usize, each: usize, behind: usize) -> Fault {
    let (told, behind) = (AtomicUsize::new(0), "x".repeat(behind));
    instead(move || {
        let step = told.fetch_add(1, Ordering::Relaxed);
        let keys = (0..each).map(|key| {
            let key = format!("lock:{step}-{key}-{behind}");
            format!("${}\r\n{key}\r\n", key.len())
        });
        let next = u8::from(step + 1 < steps);
        format!("*2\r\n$1\r\n{next}\r\n*{each}\r\n{}", keys.collect::<String>()).into_bytes()
    })
}

/// The most that this process has had in memory so far, in bytes.
pub(crate) fn most_used() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    most.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// What cannot be the name of a lock is nothing to keep.
#[test]
fn a_list_of_huge_keys_costs_no_more_than_one_of_them() {
    if !in_own_process("limits::a_list_of_huge_keys_costs_no_more_than_one_of_them", &[]) {
        return;
    }
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let before = most_used();
    let steps = proxy.on_request(command("SCAN"), scan_of_many(128, 1, 3_900_000)).times(128);
    assert!(mgr.locks("*").unwrap().is_empty());
    assert_eq!(steps.fired(), 128);
    let grown = most_used() - before;
    assert!(grown < 128 << 20, "{grown} bytes for keys that are none of ours");
}

/// Names of locks, each of which may be one, and all of them are too many.
#[test]
fn a_list_of_long_names_without_an_end_ends() {
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    proxy.on_request(command("SCAN"), scan_of_many(100, 4_000, 1_000)).forever();
    let error = mgr.locks("*").unwrap_err();
    assert!(error.to_string().contains("ever more keys"), "{error}");
}

/// Long names are refused before anything is sent, and whatever is said about a lock is short.
#[test]
fn sentences_about_locks_are_short() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let name = "\u{1b}é".repeat(300);
    let guard = mgr.lock(&name).unwrap();
    for error in [
        mgr.try_lock(&name).unwrap_err(),
        mgr.try_lock_for(&name, Duration::from_millis(1)).unwrap_err(),
    ] {
        let said = error.to_string();
        assert!(said.len() < 1024 && !said.contains('\u{1b}'), "{said:?}");
    }
    let listed = mgr.locks("*").unwrap()[0].to_string();
    assert!(listed.len() < 1024 && !listed.contains('\u{1b}'), "{listed:?}");
    let huge = mgr.try_lock(&"x".repeat(1 << 20)).unwrap_err().to_string();
    assert!(huge.len() < 1024, "{} bytes", huge.len());
    assert!(mgr.locks(&"x".repeat(1 << 20)).is_err());
    completes_within(60 * SECOND, "releasing", || guard.release()).unwrap().unwrap_released();
}
