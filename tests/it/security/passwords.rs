//! Passwords appear in no error, log line or debug output.

use std::error::Error;

use distlock::{Config, LockError, RedisMgr};

use crate::{
    helpers::{SECOND, capture_log, config_short_timeout, in_own_process},
    support::{FaultProxy, RedisServer, garbage_server},
};

/// A server without `AUTH` quotes the beginning of its arguments in the error.
///
/// Fault: F74
#[test]
fn no_part_of_a_password_is_repeated_in_an_error() {
    let password = "0123456789abcdef".repeat(16);
    let server = RedisServer::builder().arg("--rename-command").arg("AUTH").arg("").start();
    for login in [format!(":{password}"), format!("user:{password}")] {
        let mgr = RedisMgr::new(config_short_timeout(format!("redis://{login}@{}", server.addr())))
            .unwrap();
        let error = mgr.try_lock("x").unwrap_err();
        assert!(!format!("{error} {error:?}").contains(&password[..16]), "{error}");
    }
}

/// Fault: F74
/// Promise: P11
#[test]
fn password_appears_in_no_output() {
    if !in_own_process("security::passwords::password_appears_in_no_output", &[]) {
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
    let mut outputs = Vec::new();
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
        outputs.push(format!("{config:?}"));
        let mgr = match RedisMgr::new(config) {
            Ok(mgr) => mgr,
            Err(error) => {
                outputs.push(format!("{error} {error:?}"));
                continue;
            }
        };
        outputs.push(format!("{mgr:?} {}", mgr.server()));
        if mgr.server().ends_with(&proxy.addr().to_string()) {
            drop(mgr.lock("warm").unwrap());
            proxy.refuse();
        }
        let mut record = |error: LockError| {
            let mut cause: Option<&dyn Error> = Some(&error);
            while let Some(error) = cause {
                outputs.push(format!("{error} {error:?}"));
                cause = error.source();
            }
        };
        mgr.ping().map_or_else(&mut record, drop);
        mgr.holder("x").map_or_else(&mut record, drop);
        mgr.release_lock("x", "id").map_or_else(&mut record, drop);
        mgr.try_lock("x")
            .map_or_else(&mut record, |guard| logged.lock().push(format!("{guard:?}")));
        match mgr.connection() {
            Ok(mut connection) => {
                let reply = redis::cmd("GET").arg("x").query::<Option<String>>(&mut connection);
                outputs.push(format!("{connection:?} {reply:?} {:?}", mgr.connection()));
            }
            Err(error) => record(error),
        }
        mgr.shutdown();
    }
    outputs.append(&mut logged.lock());
    assert!(outputs.len() > 60, "{}", outputs.len());
    assert!(outputs.iter().any(|text| text.contains("connected to")), "nothing was logged");
    for text in outputs {
        assert!(
            !text.contains(PASSWORD) && !text.contains(ENCODED) && !text.contains("hunter2"),
            "{text}"
        );
    }
}
