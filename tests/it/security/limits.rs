//! Limits on what a malicious server or client can make this library use or log.

use std::{
    io::Write,
    net::TcpStream,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use distlock::{LockError, RedisMgr};

use crate::{
    helpers::{
        SECOND, UnwrapReleased, capture_log, completes_within, config_long_timeouts,
        in_own_process, manager, server_behind_proxy, spawn_queued_waiter,
    },
    support::{
        Fault, Nodes, RedisServer, TEST_TIMEOUT, command, contains, endless_server, eventually,
        instead, request,
    },
};

/// Maximum size of a reply, and what the socket buffers hold besides.
const REPLY_MAX: usize = 64 << 20;

/// Fault: F72
/// Promise: P11
#[test]
fn endless_reply_is_read_up_to_its_limit() {
    let floods = [
        ("one string", "$2000000000\r\n", "xxxx"),
        ("many numbers", "*2000000000\r\n", ":1\r\n"),
        ("one line", "+", "xxxx"),
        ("endless nested arrays", "*1\r\n", "*1\r\n"),
    ];
    for (what, head, body) in floods {
        let flood = endless_server(head, body);
        let mgr = RedisMgr::new(config_long_timeouts(flood.url())).unwrap();
        let error = mgr.ping().unwrap_err();
        assert!(error.is_unavailable(), "{what}: {error}");
        eventually("the server has noticed the closed connection", TEST_TIMEOUT, || {
            flood.said() > 0
        });
        assert!(flood.said() < REPLY_MAX, "{what}: {} bytes were read", flood.said());
    }
}

/// Nodes are read in turns; the limit applies to all parts of a reply together.
///
/// Fault: N40
#[test]
fn endless_reply_of_one_node_is_read_up_to_its_limit() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = RedisMgr::new(config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    drop(mgr.lock("warm").unwrap());
    let flood = [&b"$500000000\r\n"[..], &vec![b'x'; REPLY_MAX]].concat();
    nodes.proxy(2).on_request(contains("lock:x"), Fault::ReplaceReply(flood)).forever();
    nodes.kill(0);
    // This call asks all nodes, also those in back-off.
    let error = mgr.lock_info("x").unwrap_err();
    assert!(error.nodes()[2].message.contains("too long"), "{error}");
}

/// Any client that may publish can send such messages: garbage, and grants of unknown ids.
///
/// Fault: F45
#[test]
fn flood_of_messages_is_logged_once_and_hides_no_grant() {
    if !in_own_process("security::limits::flood_of_messages_is_logged_once_and_hides_no_grant", &[])
    {
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
        request(&["PUBLISH", channel, "1 2 3 unknown"]),
    ];
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.write_all(&noise.concat().repeat(10_000)).unwrap();
    let published = || server.calls("publish");
    eventually("all messages are published", TEST_TIMEOUT, || published() == 30_000);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
    let warnings: Vec<_> =
        logged.lock().iter().filter(|line| line.contains("not grants")).cloned().collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(!warnings[0].contains('\u{1b}'));
}

/// Any client that may write keys can choose its id.
#[test]
fn long_id_of_another_client_is_cut() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.cli(&["SET", "lock:x", &"é".repeat(1 << 20), "PX", "600000"]);
    let holder = mgr.holder("x").unwrap().unwrap();
    assert!(holder.id().len() <= 512, "{} bytes", holder.id().len());
    let error = mgr.try_lock("x").unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.len() < 4096, "{} bytes", text.len());
    let Err(LockError::Held { holder, .. }) = mgr.try_lock("x") else { panic!("{error:?}") };
    assert!(holder.to_string().len() < 1024);
    let listed = mgr.locks("*").unwrap();
    assert!(listed[0].holder().id().len() <= 512);
}

/// Each step of the scan returns more keys and a cursor.
#[test]
fn endless_scan_is_an_error() {
    let step = format!("*2\r\n$1\r\n7\r\n*400000\r\n{}", "$1\r\na\r\n".repeat(400_000));
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    proxy.on_request(command("SCAN"), Fault::ReplaceReply(step.into_bytes())).forever();
    let error = mgr.locks("*").unwrap_err();
    assert!(error.to_string().contains("keeps reporting more keys"), "{error}");
}

/// Replies of a scan with this number of steps and of keys a step. All keys differ, and end in this
/// number of bytes.
fn scan_of_many(steps: usize, keys_per_step: usize, suffix_len: usize) -> Fault {
    let (replies, suffix) = (AtomicUsize::new(0), "x".repeat(suffix_len));
    instead(move || {
        let step = replies.fetch_add(1, Ordering::Relaxed);
        let keys = (0..keys_per_step).map(|key| {
            let key = format!("lock:{step}-{key}-{suffix}");
            format!("${}\r\n{key}\r\n", key.len())
        });
        let next = u8::from(step + 1 < steps);
        let head = format!("*2\r\n$1\r\n{next}\r\n*{keys_per_step}\r\n");
        format!("{head}{}", keys.collect::<String>()).into_bytes()
    })
}

/// The peak memory of this process in bytes.
pub(crate) fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Keys that are too long for a lock are not kept.
///
/// Fault: N51
#[test]
fn list_of_huge_keys_uses_little_memory() {
    if !in_own_process("security::limits::list_of_huge_keys_uses_little_memory", &[]) {
        return;
    }
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let before = peak_memory();
    let steps = proxy.on_request(command("SCAN"), scan_of_many(128, 1, 3_900_000)).times(128);
    assert!(mgr.locks("*").unwrap().is_empty());
    assert_eq!(steps.fired(), 128);
    let grown = peak_memory() - before;
    assert!(grown < 128 << 20, "{grown} bytes for keys that are not locks");
}

/// Each key is a valid lock name, but together they exceed the limit.
///
/// Fault: N51
#[test]
fn endless_list_of_long_names_is_an_error() {
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    proxy.on_request(command("SCAN"), scan_of_many(100, 4_000, 1_000)).forever();
    let error = mgr.locks("*").unwrap_err();
    assert!(error.to_string().contains("keeps reporting more keys"), "{error}");
}

/// Names that are too long are refused before a request is sent; valid long names are shortened.
#[test]
fn messages_about_long_names_are_short() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let name = "\u{1b}é".repeat(300);
    let guard = mgr.lock(&name).unwrap();
    for error in [
        mgr.try_lock(&name).unwrap_err(),
        mgr.try_lock_for(&name, Duration::from_millis(1)).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.len() < 1024 && !text.contains('\u{1b}'), "{text:?}");
    }
    let listed = mgr.locks("*").unwrap()[0].to_string();
    assert!(listed.len() < 1024 && !listed.contains('\u{1b}'), "{listed:?}");
    let huge = mgr.try_lock(&"x".repeat(1 << 20)).unwrap_err().to_string();
    assert!(huge.len() < 1024, "{} bytes", huge.len());
    assert!(mgr.locks(&"x".repeat(1 << 20)).is_err());
    completes_within(60 * SECOND, "release", || guard.release()).unwrap().unwrap_released();
}

/// Fault: F18
#[test]
fn connections_are_few_for_any_number_of_threads() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(3)).unwrap();
    thread::scope(|threads| {
        for n in 0..16 {
            let mgr = &mgr;
            threads.spawn(move || {
                for _ in 0..20 {
                    drop(mgr.lock(&format!("n{}", n % 4)).unwrap());
                }
            });
        }
    });
    // The pool, and for renewals, grant messages, clean-up and releases without the pool.
    server.await_clients(0..=7);
}
