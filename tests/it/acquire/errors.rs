//! Errors as sentences: what was tried, on which lock and server, what happened; and never a
//! password.

use std::error::Error;

use distlock::{Action, Config, LockError, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, Defer, SECOND, UnwrapReleased, await_gone, capture_log, completes_within,
        config_long_timeouts, config_medium_timeout, config_short_timeout, expect_loss, fence_key,
        foreign_take, get, in_own_process, in_thread, label, manager, queue_key, with_ttl,
    },
    support::{CEILING, FaultProxy, RedisServer, eventually, garbage_server},
};

const LOCK: &str = "lock:x";

/// All that an error of an acquisition has to say.
#[track_caller]
fn assert_sentence(error: &LockError, server: &str, says: &[&str]) {
    let text = error.to_string();
    for part in ["lock \"x\"", server].iter().chain(says) {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
    assert!(!text.contains("Error {") && !text.contains("Some("), "{text:?} is not a sentence");
}

#[test]
fn credentials_that_do_not_fit_are_refused_by_name() {
    let server = RedisServer::builder().password("right").start();
    let port = label(&server);
    for (login, code, advice) in [
        ("", "NOAUTH", "put a password into the URL"),
        (":wrong@", "WRONGPASS", "check the user and the password"),
        ("nobody:right@", "WRONGPASS", "check the user and the password"),
    ] {
        let mgr = RedisMgr::new(config_medium_timeout(format!("redis://{login}{port}"))).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert_eq!((error.code(), error.is_refused()), (Some(code), true), "{login}: {error}");
        assert_sentence(&error, &port, &["could not acquire", code, advice]);
        // Waiting would not mend it.
        let waited = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap_err());
        assert_eq!(waited.code(), Some(code));
        assert_eq!(mgr.ping().unwrap_err().code(), Some(code));
        assert_eq!(mgr.holder("x").unwrap_err().code(), Some(code));
    }
    assert!(RedisMgr::new(config_long_timeouts(server.url())).unwrap().try_lock("x").is_ok());
}

#[test]
fn a_server_that_is_not_there_is_unavailable() {
    let port = {
        let gone = RedisServer::start();
        gone.kill();
        gone.port()
    };
    for (url, server, says) in [
        (format!("redis://127.0.0.1:{port}"), format!("127.0.0.1:{port}"), "refused"),
        (
            "redis://no-such-host.invalid:7".into(),
            "no-such-host.invalid:7".into(),
            "could not acquire",
        ),
        ("unix:///nowhere/redis.sock".into(), "/nowhere/redis.sock".into(), "No such file"),
    ] {
        let mgr = RedisMgr::new(config_short_timeout(url)).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable() && !error.is_contended(), "{error:?}");
        assert_sentence(&error, &server, &[says, "try again"]);
        assert!(error.source().is_some());
        let LockError::Unavailable { action: Action::Ping, name: None, .. } =
            mgr.ping().unwrap_err()
        else {
            panic!("the ping found something else");
        };
    }
}

#[test]
fn a_server_in_protected_mode_says_what_to_do() {
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

#[test]
fn a_key_of_another_type_is_left_alone() {
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
            &["holds something else than a lock", "left alone"],
        );
    }
    let _ = mgr.force_release("x");
    let _ = mgr.release_lock("x", "id");
    assert_eq!(server.query::<Vec<String>>(&["LRANGE", LOCK, "0", "-1"]), ["precious"]);
    assert_eq!(server.keys(), [LOCK]);
}

/// As a server says that takes what it hears for a handshake that failed.
#[test]
fn a_port_for_tls_is_told_as_that() {
    let server = garbage_server(b"\x15\x03\x01\x00\x02\x02\x46");
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    let label = server.url().replace("redis://", "");
    assert_sentence(
        &error,
        &label,
        &["could not acquire", "begins like TLS", "not built into this version", "proxy"],
    );
}

#[test]
fn another_type_where_the_line_or_the_token_belongs_is_left_alone() {
    for key in [queue_key("x"), fence_key("x")] {
        let server = RedisServer::start();
        let mgr = manager(&server);
        server.cli(&["HSET", &key, "field", "precious"]);
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert_eq!(error.code(), Some("WRONGTYPE"), "{error:?}");
        assert_sentence(&error, &label(&server), &["could not acquire"]);
        assert_eq!(server.query::<String>(&["HGET", &key, "field"]), "precious");
        assert_eq!(get(&server, LOCK), None);
    }
}

#[test]
fn a_state_of_the_server_is_told_by_its_code() {
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
        // Who has time waits until there is a master again.
        let lock = if code == "READONLY" { RedisMgr::try_lock } else { RedisMgr::lock };
        let error = completes_within(CALL_LIMIT, "lock", || lock(&mgr, "x").unwrap_err());
        assert_eq!(error.code(), Some(code), "{error:?}");
        assert_sentence(&error, &label(&server), &["could not acquire", code]);
        server.cli(end);
        mgr.try_lock("x").unwrap().release().unwrap().unwrap_released();
    }
}

#[test]
fn a_holder_loses_nothing_to_a_state_that_passes_within_the_lease() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ttl = 12 * SECOND;
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    eventually("a renewal is overdue", CEILING, || guard.remaining() < ttl / 2);
    server.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    eventually("it is renewed", CEILING, || guard.remaining() > ttl * 7 / 10);
    // And one that does not pass ends the belief at the deadline.
    server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    assert_eq!(expect_loss(&guard), distlock::LockLost::Expired);
}

#[test]
fn a_server_that_is_busy_with_a_script_is_unavailable() {
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
        // Otherwise the scope would wait for the script where this fails.
        let _ended = Defer(|| {
            if std::thread::panicking() {
                server.kill()
            }
        });
        let busy = completes_within(CALL_LIMIT, "try_lock", || {
            loop {
                // Until the endless script has begun.
                match mgr.try_lock("x") {
                    Err(error) => break error,
                    Ok(guard) => drop(guard),
                }
                assert!(!endless.is_finished(), "the script has ended");
            }
        });
        eventually("it is stopped", CEILING, || endless.is_finished() || kill_script(&server));
        busy
    });
    assert!(busy.is_unavailable(), "{busy:?}");
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

fn kill_script(server: &RedisServer) -> bool {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd("SCRIPT").arg("KILL").query::<()>(&mut connection).is_ok()
}

/// Goal: requests that the server kept while it was paused do nothing once their callers have given
/// up.
#[test]
fn a_paused_server_leaves_no_lock_behind() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    drop(mgr.lock("warm").unwrap());
    server.cli(&["CLIENT", "PAUSE", "6000", "ALL"]);
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    assert!(error.is_unavailable(), "{error:?}");
    // Answered when the pause is over.
    server.cli(&["ECHO", "over"]);
    await_gone(&server, LOCK);
    assert!(foreign_take(&server, LOCK, "lock_1", 30_000));
    assert!(
        mgr.lock_with("x", &with_ttl(SECOND).wait(std::time::Duration::ZERO))
            .unwrap_err()
            .is_contended()
    );
}

/// The limit is told to whoever connects, as the answer to the first thing that is asked: signing
/// in, where that is needed. Clients come and go, so who has time waits for a place.
#[test]
fn a_server_that_takes_no_more_clients_says_so_and_is_waited_for() {
    for server in [RedisServer::start(), RedisServer::builder().password("hunter2").start()] {
        let held = manager(&server);
        let mut connection = held.connection().unwrap();
        let mut limit_to = |clients: &str| {
            redis::cmd("CONFIG")
                .arg(&["SET", "maxclients", clients])
                .query::<()>(&mut connection)
                .unwrap();
            let stats: String = redis::cmd("INFO").arg("stats").query(&mut connection).unwrap();
            let turned_away =
                stats.lines().find_map(|line| line.strip_prefix("rejected_connections:"));
            turned_away.unwrap().parse::<u64>().unwrap()
        };
        limit_to("1");
        let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert_sentence(&error, &label(&server), &["max number of clients"]);
        assert!(error.is_unavailable() && !error.to_string().contains("password"), "{error:?}");
        let before = limit_to("1");
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.try_lock_for(name, CEILING));
        eventually("it is turned away", CEILING, || {
            waiting.is_finished() || limit_to("1") > before
        });
        limit_to("1000");
        drop(waiting.join().unwrap().unwrap());
    }
}

/// A server without `AUTH` repeats the beginning of what it was given in its error.
#[test]
fn not_even_a_part_of_a_password_is_repeated() {
    let password = "0123456789abcdef".repeat(16);
    let server = RedisServer::builder().arg("--rename-command").arg("AUTH").arg("").start();
    for login in [format!(":{password}"), format!("user:{password}")] {
        let mgr = RedisMgr::new(config_short_timeout(format!("redis://{login}@{}", server.addr())))
            .unwrap();
        let error = mgr.try_lock("x").unwrap_err();
        assert!(!format!("{error} {error:?}").contains(&password[..16]), "{error}");
    }
}

#[test]
fn a_password_appears_in_no_output_of_any_kind() {
    if !in_own_process("errors::a_password_appears_in_no_output_of_any_kind", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Trace);
    const PASSWORD: &str = "hunter2-s3cr3t/@ß";
    const ENCODED: &str = "hunter2-s3cr3t%2F%40%C3%9F";
    let server = RedisServer::builder().password(PASSWORD).start();
    let other = RedisServer::builder().password("something else").start();
    let open = RedisServer::start();
    let echo = garbage_server(format!("-ERR what do you mean by {PASSWORD}?\r\n"));
    let code = garbage_server(format!("-{PASSWORD} is what you said\r\n"));
    let proxy = FaultProxy::in_front_of(server.addr());
    let mut said = Vec::new();
    for url in [
        server.url(),
        format!("redis://:{ENCODED}@{}", other.addr()),
        format!("redis://user:{ENCODED}@{}", other.addr()),
        format!("redis://:{ENCODED}@{}", open.addr()),
        format!("redis://:{ENCODED}@{}", echo.addr()),
        format!("redis://:{ENCODED}@{}", code.addr()),
        format!("redis://:{ENCODED}@{}", proxy.addr()),
        format!("redis://:{ENCODED}@127.0.0.1:1"),
        format!("redis://:{ENCODED}@127.0.0.1:99999"),
        format!("redis://:{ENCODED}@127.0.0.1/x"),
        format!("redis://:{PASSWORD}@127.0.0.1:1"),
        format!("rediss://:{ENCODED}@127.0.0.1"),
        format!("{ENCODED}://127.0.0.1"),
        format!("redis://:{ENCODED}@a:1,redis://:{ENCODED}@b:1"),
        ENCODED.to_owned(),
    ] {
        let config = Config::new(url).operation_timeout(SECOND / 2);
        said.push(format!("{config:?}"));
        let mgr = match RedisMgr::new(config) {
            Ok(mgr) => mgr,
            Err(error) => {
                said.push(format!("{error} {error:?}"));
                continue;
            }
        };
        said.push(format!("{mgr:?} {}", mgr.server()));
        if mgr.server().ends_with(&proxy.addr().to_string()) {
            drop(mgr.lock("warm").unwrap());
            proxy.refuse();
        }
        let mut tell = |error: LockError| {
            let mut cause: Option<&dyn Error> = Some(&error);
            while let Some(error) = cause {
                said.push(format!("{error} {error:?}"));
                cause = error.source();
            }
        };
        mgr.ping().map_or_else(&mut tell, drop);
        mgr.holder("x").map_or_else(&mut tell, drop);
        mgr.release_lock("x", "id").map_or_else(&mut tell, drop);
        mgr.try_lock("x").map_or_else(&mut tell, |guard| logged.lock().push(format!("{guard:?}")));
        match mgr.connection() {
            Ok(mut connection) => {
                let answer = redis::cmd("GET").arg("x").query::<Option<String>>(&mut connection);
                said.push(format!("{connection:?} {answer:?} {:?}", mgr.connection()));
            }
            Err(error) => tell(error),
        }
        mgr.shutdown();
    }
    said.append(&mut logged.lock());
    assert!(said.len() > 60, "{}", said.len());
    assert!(said.iter().any(|text| text.contains("connected to")), "nothing was logged");
    for text in said {
        assert!(
            !text.contains(PASSWORD) && !text.contains(ENCODED) && !text.contains("hunter2"),
            "{text}"
        );
    }
}
