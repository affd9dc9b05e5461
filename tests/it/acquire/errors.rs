//! Errors as sentences: what was tried, on which lock and server, and what happened.

use std::error::Error;

use distlock::{Action, LockError, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, Defer, FENCE, SECOND, UnwrapReleased, completes_within, config_long_timeouts,
        config_medium_timeout, config_short_timeout, get, label, manager, queue_key, spawn_call,
        token_key,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually, garbage_server},
};

const LOCK: &str = "lock:x";

/// Asserts that an error names the lock, the server, and all of `parts`.
#[track_caller]
fn assert_sentence(error: &LockError, server: &str, parts: &[&str]) {
    let text = error.to_string();
    for part in ["lock \"x\"", server].iter().chain(parts) {
        assert!(text.contains(part), "{text:?} does not contain {part:?}");
    }
    assert!(!text.contains("Error {") && !text.contains("Some("), "{text:?} is not a sentence");
}

#[test]
fn wrong_credentials_are_refused_with_advice() {
    let server = RedisServer::builder().password("right").start();
    let port = label(&server);
    for (login, code, advice) in [
        ("", "NOAUTH", "put a password into the URL or Config::password"),
        (":wrong@", "WRONGPASS", "check the user in the URL"),
        ("nobody:right@", "WRONGPASS", "check the user in the URL"),
    ] {
        let mgr = RedisMgr::new(config_medium_timeout(format!("redis://{login}{port}"))).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert_eq!((error.code(), error.is_refused()), (Some(code), true), "{login}: {error}");
        assert_sentence(&error, &port, &["could not acquire", code, advice]);
        assert!(error.advice().starts_with(advice), "{}", error.advice());
        assert_eq!(format!("{error:?}"), format!("Refused: {error}"), "main prints this");
        // Waiting would not help, so lock() fails too.
        let waited = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap_err());
        assert_eq!(waited.code(), Some(code));
        assert_eq!(mgr.ping().unwrap_err().code(), Some(code));
        assert_eq!(mgr.holder("x").unwrap_err().code(), Some(code));
    }
    assert!(RedisMgr::new(config_long_timeouts(server.url())).unwrap().try_lock("x").is_ok());
}

/// Fault: F58
#[test]
fn missing_server_is_unavailable() {
    let port = {
        let gone = RedisServer::start();
        gone.kill();
        gone.port()
    };
    let check = "check the URL, and whether the server runs";
    for (url, server, cause, advice) in [
        (format!("redis://127.0.0.1:{port}"), format!("127.0.0.1:{port}"), "refused", check),
        (
            "redis://no-such-host.invalid:7".into(),
            "no-such-host.invalid:7".into(),
            "could not acquire",
            "try again later",
        ),
        ("unix:///nowhere/redis.sock".into(), "/nowhere/redis.sock".into(), "No such file", check),
    ] {
        let mgr = RedisMgr::new(config_short_timeout(url)).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable() && !error.is_contended(), "{error:?}");
        assert_sentence(&error, &server, &[cause, advice]);
        assert!(error.source().is_some());
        let LockError::Unavailable { action: Action::Ping, name: None, .. } =
            mgr.ping().unwrap_err()
        else {
            panic!("the ping failed for another reason");
        };
    }
}

/// Redis before version 6 refuses any password with the same code if it has none itself.
#[test]
fn password_for_a_server_without_one_is_refused_with_advice() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_medium_timeout(format!("redis://:pw@{}", server.addr())));
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.unwrap().try_lock("x"));
    let error = error.unwrap_err();
    assert_sentence(&error, &label(&server), &["AUTH", "has no password, remove it"]);
    assert!(error.is_refused(), "{error:?}");
}

#[test]
fn protected_mode_is_reported_with_advice() {
    let server = garbage_server(
        "-DENIED Redis is running in protected mode because protected mode is enabled\r\n",
    );
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let error = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap_err());
    assert_eq!(error.code(), Some("DENIED"), "{error:?}");
    assert_sentence(
        &error,
        "protected mode",
        &["could not acquire", "set a password on the server"],
    );
}

/// Every retry would have the same reply.
///
/// Fault: F72
#[test]
fn server_of_another_kind_is_reported_at_once() {
    for begin in ["HTTP/1.1 400 Bad Request\r\n", "\x5b\0\0\0\x0a5.5.5-10.11.6-MariaDB\0"] {
        let server = garbage_server(begin);
        let mgr = RedisMgr::new(config_short_timeout(server.url()).ttl(600 * SECOND)).unwrap();
        let error = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("it is not a Redis server (its reply begins with \""), "{text}");
        assert!(text.ends_with("; check the host and the port in the URL"), "{text}");
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

/// Fault: N11
#[test]
fn key_of_another_type_is_reported_and_unchanged() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.cli(&["RPUSH", LOCK, "precious"]);
    for error in
        [mgr.try_lock("x").unwrap_err(), mgr.lock("x").unwrap_err(), mgr.holder("x").unwrap_err()]
    {
        assert!(matches!(&error, LockError::WrongType { key, .. } if key == LOCK), "{error:?}");
        assert_sentence(
            &error,
            &label(&server),
            &["holds something that is not a lock", "was not changed"],
        );
    }
    let forced = mgr.force_release("x").unwrap_err();
    assert!(matches!(&forced, LockError::WrongType { .. }), "{forced:?}");
    let _ = mgr.release_lock("x", "id");
    assert_eq!(server.query::<Vec<String>>(&["LRANGE", LOCK, "0", "-1"]), ["precious"]);
    assert_eq!(server.keys(), [LOCK]);
}

/// A TLS server answers with an alert record, because it takes the request for a broken handshake.
///
/// Fault: N84
/// Promise: P10
#[test]
fn tls_port_is_reported_as_one() {
    let server = garbage_server(b"\x15\x03\x01\x00\x02\x02\x46");
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    let label = server.url().replace("redis://", "");
    assert_sentence(&error, &label, &["could not acquire", "begins like TLS", "use rediss://"]);
}

/// Fault: N11
#[test]
fn auxiliary_key_of_another_type_is_unchanged() {
    for key in [&queue_key("x"), &token_key("x"), FENCE] {
        let server = RedisServer::start();
        let mgr = manager(&server);
        server.cli(&["HSET", key, "field", "precious"]);
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert_eq!(error.code(), Some("WRONGTYPE"), "{error:?}");
        assert_sentence(&error, &label(&server), &["could not acquire"]);
        assert_eq!(server.query::<String>(&["HGET", key, "field"]), "precious");
        assert_eq!(get(&server, LOCK), None);
    }
}

/// Fault: F38
#[test]
fn server_state_is_reported_by_its_code() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let states: [(&str, &[&str], &[&str]); 3] = [
        (
            "NOREPLICAS",
            &["CONFIG", "SET", "min-replicas-to-write", "1"],
            &["CONFIG", "SET", "min-replicas-to-write", "0"],
        ),
        ("READONLY", &["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"]),
        ("OOM", &["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]),
    ];
    for (code, begin, end) in states {
        server.cli(begin);
        // lock() would wait for the end of the failover.
        let lock = if code == "OOM" { RedisMgr::lock } else { RedisMgr::try_lock };
        let error = completes_within(CALL_LIMIT, "lock", || lock(&mgr, "x").unwrap_err());
        assert_eq!(error.code(), Some(code), "{error:?}");
        assert_sentence(&error, &label(&server), &["could not acquire", code]);
        server.cli(end);
        mgr.try_lock("x").unwrap().release().unwrap().unwrap_released();
    }
}

/// Fault: F36
#[test]
fn server_busy_with_a_script_is_unavailable() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    mgr.ping().unwrap();
    server.config_set("lua-time-limit", "50");
    let busy = std::thread::scope(|threads| {
        let endless = threads.spawn(|| {
            let mut connection =
                redis::Client::open(server.url()).unwrap().get_connection().unwrap();
            let _ = redis::cmd("EVAL")
                .arg("while true do end")
                .arg(0)
                .query::<redis::Value>(&mut connection);
        });
        // If an assertion fails, the scope would wait for the endless script.
        let _ended = Defer(|| {
            if std::thread::panicking() {
                server.kill()
            }
        });
        let busy = completes_within(CALL_LIMIT, "try_lock", || {
            loop {
                // The endless script may not have begun yet.
                match mgr.try_lock("x") {
                    Err(error) => break error,
                    Ok(guard) => drop(guard),
                }
                assert!(!endless.is_finished(), "the script has ended");
            }
        });
        eventually("the script is killed", TEST_TIMEOUT, || {
            endless.is_finished() || kill_script(&server)
        });
        busy
    });
    assert!(busy.is_unavailable(), "{busy:?}");
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

fn kill_script(server: &RedisServer) -> bool {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd("SCRIPT").arg("KILL").query::<()>(&mut connection).is_ok()
}

/// The server reports that it has too many clients in reply to the first request on a connection,
/// which is AUTH if there is a password. Clients come and go, so a call with time left waits.
///
/// Fault: N23
/// Promise: P10
#[test]
fn full_server_is_reported_and_waited_for() {
    for server in [RedisServer::start(), RedisServer::builder().password("hunter2").start()] {
        let held = manager(&server);
        let mut connection = held.connection().unwrap();
        let mut limit_to = |clients: &str| {
            redis::cmd("CONFIG")
                .arg(&["SET", "maxclients", clients])
                .query::<()>(&mut connection)
                .unwrap();
            let stats: String = redis::cmd("INFO").arg("stats").query(&mut connection).unwrap();
            let rejected =
                stats.lines().find_map(|line| line.strip_prefix("rejected_connections:"));
            rejected.unwrap().parse::<u64>().unwrap()
        };
        limit_to("1");
        let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert_sentence(&error, &label(&server), &["max number of clients"]);
        assert!(error.is_unavailable() && !error.to_string().contains("password"), "{error:?}");
        let before = limit_to("1");
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, TEST_TIMEOUT));
        eventually("it is rejected", TEST_TIMEOUT, || {
            waiting.is_finished() || limit_to("1") > before
        });
        limit_to("1000");
        drop(waiting.join().unwrap().unwrap());
    }
}
