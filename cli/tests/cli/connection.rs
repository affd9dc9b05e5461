//! Servers and passwords from options, environment variables and files. No output contains a
//! password.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt as _, process::Command, time::Duration};

use tempfile::TempDir;

use super::command::{Finished, distlock, distlock_at, distlock_at_url, run_to_end};
use crate::{
    helpers::{CALL_LIMIT, completes_within, set_foreign_lock},
    support::{Fault, FaultProxy, Nodes, RedisServer, garbage_server, silent_server},
};

const SECRET: &str = "correct,horse battery";

/// A server with one held lock, by whose name the server can be identified.
fn server_with_lock(name: &str) -> RedisServer {
    let server = RedisServer::start();
    set_lock(&server, name);
    server
}

fn set_lock(server: &RedisServer, name: &str) {
    assert!(set_foreign_lock(server, &format!("lock:{name}"), "a client", 600_000));
}

#[track_caller]
fn expect_listed(command: Command, name: &str) {
    let ended = run_to_end(command).expect_code(0);
    let names: Vec<&str> =
        ended.out.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, [name], "{ended:?}");
}

fn with_env(mut command: Command, name: &str, value: impl AsRef<OsStr>) -> Command {
    command.env(name, value);
    command
}

#[test]
fn url_option_precedes_environment() {
    let (one, two, three) =
        (server_with_lock("one"), server_with_lock("two"), server_with_lock("three"));
    let common = || with_env(distlock(&["ls"]), "REDIS_URL", three.url());
    let own = || with_env(common(), "DISTLOCK_URL", two.url());
    expect_listed(common(), "three");
    expect_listed(own(), "two");
    expect_listed(with_env(common(), "DISTLOCK_URL", ""), "three");
    let mut option = own();
    expect_listed(
        {
            option.args(["--url", &one.url()]);
            option
        },
        "one",
    );
    // The option may also come before the subcommand.
    expect_listed(
        with_env(distlock(&["--url", &one.url(), "ls"]), "DISTLOCK_URL", two.url()),
        "one",
    );
}

/// If it were skipped, the command would use other servers than all other clients.
#[test]
fn non_utf8_url_in_environment_is_refused() {
    let server = RedisServer::start();
    let latin = OsStr::from_bytes(b"redis://:caf\xe9-au-lait@127.0.0.1:1");
    for (name, other, url) in
        [("DISTLOCK_URL", "REDIS_URL", server.url()), ("REDIS_URL", "DISTLOCK_URL", String::new())]
    {
        for args in [&["ls"][..], &["doctor"], &["bench"], &["run", "x", "--", "true"]] {
            let ended = run_to_end(with_env(with_env(distlock(args), name, latin), other, &url))
                .expect_code(64)
                .expect_error(name);
            assert!(!ended.err.contains("caf") && !ended.err.contains("au-lait"), "{ended:?}");
        }
    }
    // A setting of higher precedence still works.
    run_to_end(with_env(
        with_env(distlock(&["ls"]), "REDIS_URL", latin),
        "DISTLOCK_URL",
        server.url(),
    ))
    .expect_code(0);
    run_to_end(with_env(distlock(&["ls", "--url", &server.url()]), "DISTLOCK_URL", latin))
        .expect_code(0);
}

#[test]
fn nodes_are_given_by_repeated_option_or_commas() {
    let nodes = Nodes::start(3);
    for node in 0..2 {
        set_lock(nodes.server(node), "both");
    }
    let urls = [0, 1, 2].map(|node| nodes.url(node));
    let [first, second, third] = urls.each_ref().map(String::as_str);
    let commas = urls.join(",");
    let ways = [
        distlock(&["ls", "--url", first, "--url", second, "--url", third]),
        distlock(&["ls", "--url", &commas]),
        distlock(&["ls", "--url", &format!("{first},{second}"), "--url", third]),
        with_env(distlock(&["ls"]), "DISTLOCK_URL", &commas),
    ];
    for way in ways {
        let ended = run_to_end(way).expect_code(0);
        assert!(ended.out.contains("both") && !ended.out.contains("not certain"), "{ended:?}");
    }
}

#[test]
fn prefix_is_set_by_option_or_environment() {
    let server = server_with_lock("other");
    assert!(set_foreign_lock(&server, "mine:x", "a client", 600_000));
    expect_listed(distlock_at(&server, &["ls", "--prefix", "mine:"]), "x");
    expect_listed(with_env(distlock_at(&server, &["ls"]), "DISTLOCK_PREFIX", "mine:"), "x");
}

/// A systemd unit, and many scripts, can only clear a variable that way.
#[test]
fn empty_variable_counts_as_unset() {
    let server = server_with_lock("x");
    for name in ["DISTLOCK_PASSWORD_FILE", "DISTLOCK_QUARANTINE", "DISTLOCK_LOG"] {
        expect_listed(with_env(distlock_at(&server, &["ls"]), name, ""), "x");
    }
    run_to_end(distlock_at(&server, &["ls", "--password-file", ""])).expect_code(64);
}

/// The logger would take the word as the name of a crate, and log nothing.
#[test]
fn unknown_log_level_is_reported() {
    let server = RedisServer::start();
    let ls = |filter| run_to_end(with_env(distlock_at(&server, &["ls"]), "DISTLOCK_LOG", filter));
    for filter in ["verbose", "info, Loud"] {
        let ended = ls(filter).expect_code(0);
        let says = " is not a level, so nothing may be logged; the levels are off, error, warn, \
                    info, debug, trace\n";
        assert!(ended.err.starts_with("distlock: DISTLOCK_LOG: \""), "{ended:?}");
        assert!(ended.err.contains(says), "{ended:?}");
    }
    for filter in
        ["debug", "WARN", "distlock=trace,warn", "distlock", "distlock::renewer", "info/x"]
    {
        let ended = ls(filter).expect_code(0);
        assert!(!ended.err.contains("is not a level"), "{ended:?}");
    }
}

/// The library's errors name its settings, which a user of the command does not have.
#[test]
fn messages_name_options_of_the_command() {
    let (server, _folder, _) = server_with_password(SECRET);
    let url = url_without_password(&server);
    run_to_end(distlock_at_url(&url, &["ls"])).expect_code(69).expect_error("--password-file");
    run_to_end(distlock_at_url(&url.replace("://", "://:wrong@"), &["ls"]))
        .expect_code(69)
        .expect_error("--password-file");
    let (server, folder) = (RedisServer::start(), TempDir::with_prefix("distlock-").unwrap());
    let file = folder.path().join("password");
    fs::write(&file, "unneeded\n").unwrap();
    let args = ["ls", "--password-file", file.to_str().unwrap()];
    let ended = run_to_end(distlock_at_url(&url_without_password(&server), &args)).expect_code(69);
    let says = " refused with ERR in reply to AUTH; check the user in the URL, and the password in \
                DISTLOCK_URL or in --password-file; if the server has no password, leave out \
                --password-file, or the password in DISTLOCK_URL\n";
    assert!(ended.err.ends_with(says), "{ended:?}");
    let args = ["doctor", "--password-file", file.to_str().unwrap()];
    let ended = run_to_end(distlock_at_url(&url_without_password(&server), &args)).expect_code(1);
    assert!(ended.out.contains("ERR in reply to AUTH; check the user"), "{ended:?}");
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+time", "+ping"]);
    let url = format!("redis://app:pw@{}", server.addr());
    for args in [&["ls"][..], &["show", "x"], &["release", "x", "--force"]] {
        run_to_end(distlock_at_url(&url, args)).expect_code(69).expect_error("distlock doctor");
    }
    let nodes = "redis://127.0.0.1:1,redis://127.0.0.1:2,redis://127.0.0.1:3";
    for (args, message) in [
        (&["ls", "--timeout", "61s"][..], "--timeout is 61s, but must be 1ms to 60s"),
        (&["doctor", "--ttl", "5ms"], "--ttl is 5ms, but must be 10ms to 24h"),
        (&["doctor", "--ttl", "31s"], "--ttl is 31s, longer than the quarantine (30s)"),
        (&["bench", "--time", "1"], ""),
        (&["bench", "--time", "11m"], "--time is 11m, but must be 100ms to 10m"),
        (&["top", "--interval", "1ms"], "--interval is 1ms, but must be 50ms to 1h"),
    ] {
        let mut command = distlock(args);
        command.env("DISTLOCK_URL", nodes);
        let ended = run_to_end(command);
        if message.is_empty() {
            assert_eq!(ended.code, Some(69), "{ended:?}");
        } else {
            ended.expect_code(64).expect_error(message);
        }
    }
}

/// A server with a password, and a file with that password.
fn server_with_password(text: &str) -> (RedisServer, TempDir, String) {
    let server = RedisServer::builder().password(SECRET).start();
    set_lock(&server, "kept");
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap().to_owned();
    (server, folder, path)
}

fn url_without_password(server: &RedisServer) -> String {
    format!("redis://{}", server.addr())
}

#[track_caller]
fn expect_no_secret(ended: &Finished) {
    for part in [SECRET, "correct", "battery", "correct%2Chorse%20battery"] {
        assert!(!ended.out.contains(part) && !ended.err.contains(part), "{ended:?}");
    }
}

#[test]
fn password_is_first_line_of_file() {
    for text in [
        SECRET.to_owned(),
        format!("{SECRET}\n"),
        format!("{SECRET}\r\n"),
        format!("{SECRET}\nnot this\n"),
    ] {
        let (server, _folder, file) = server_with_password(&text);
        expect_listed(
            distlock(&["ls", "--url", &url_without_password(&server), "--password-file", &file]),
            "kept",
        );
        expect_listed(
            with_env(
                distlock_at_url(&url_without_password(&server), &["ls"]),
                "DISTLOCK_PASSWORD_FILE",
                &file,
            ),
            "kept",
        );
    }
}

#[test]
fn password_in_environment_url_precedes_file() {
    let (server, folder, _) = server_with_password(SECRET);
    let other = folder.path().join("other");
    fs::write(&other, "wrong\n").unwrap();
    expect_listed(distlock_at(&server, &["ls"]), "kept");
    expect_listed(
        distlock_at(&server, &["ls", "--password-file", other.to_str().unwrap()]),
        "kept",
    );
}

#[test]
fn unusable_password_file_is_named() {
    let (server, folder, file) = server_with_password("\nsecond line\n");
    let missing = folder.path().join("missing");
    let binary = folder.path().join("binary");
    fs::write(&binary, [0xff, 0xfe, b'\n']).unwrap();
    let empty = folder.path().join("empty");
    fs::write(&empty, "").unwrap();
    let file = std::path::PathBuf::from(file);
    let endless = std::path::PathBuf::from("/dev/zero");
    for (path, says) in [
        (&missing, "No such file"),
        (&file, "is empty"),
        (&empty, "is empty"),
        (&binary, "UTF-8"),
        (&endless, "is longer than 64 KiB"),
    ] {
        let path = path.to_str().unwrap();
        let ended = run_to_end(distlock_at_url(
            &url_without_password(&server),
            &["ls", "--password-file", path],
        ))
        .expect_code(64)
        .expect_error(says);
        assert!(ended.err.contains(path), "{ended:?}");
    }
}

/// Every user of the machine can read a command line.
#[test]
fn password_on_command_line_is_refused_unrepeated() {
    let (server, _folder, _) = server_with_password(SECRET);
    let url = server.url();
    let second = format!("redis://h,{url}");
    for args in [
        &["ls", "--url", &url][..],
        &["ls", "--url", &second],
        &["show", "x", "--url", "redis://h", "--url", &url],
        &["doctor", &url],
        &["bench", &url],
        &["run", "x", "--url", &url, "--", "true"],
        // Misplaced, so that an error message would usually repeat it.
        &[&url, "ls"],
        &["ls", "--uri", &url],
        &["release", "x", &url],
    ] {
        let ended = run_to_end(distlock(args)).expect_code(64).expect_error("DISTLOCK_URL");
        expect_no_secret(&ended);
    }
}

#[test]
fn wrong_password_is_reported_unrepeated() {
    let (server, _folder, _) = server_with_password(SECRET);
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "Tr0ub4dor&3\n").unwrap();
    let args = ["ls", "--password-file", file.to_str().unwrap()];
    let ended = run_to_end(distlock_at_url(&url_without_password(&server), &args))
        .expect_code(69)
        .expect_error("WRONGPASS");
    assert!(!ended.err.contains("Tr0ub4dor"), "{ended:?}");
    let ended = run_to_end(with_env(
        distlock(&["ls"]),
        "DISTLOCK_URL",
        format!("redis://:Tr0ub4dor@{}", server.addr()),
    ));
    assert!(!ended.expect_code(69).expect_error("WRONGPASS").err.contains("Tr0ub4dor"));
    run_to_end(distlock_at_url(&url_without_password(&server), &["ls"]))
        .expect_code(69)
        .expect_error("NOAUTH");
}

/// Hostile replies, to the first request or after the login.
///
/// Fault: N52
#[test]
fn server_error_is_cut_and_redacted() {
    let secret = "correct-horse-battery";
    let noise = format!("{secret} \x1b[31m\u{202e}{}{secret}", "é".repeat(100_000));
    let real = RedisServer::builder().password(secret).start();
    for reply in [
        "-ERR NOISE\r\n",
        "-correct-horse-battery NOISE\r\n",
        "!NOISE\r\n",
        "+NOISE\r\n",
        "$9\r\nNOISE\r\n",
    ] {
        let reply = reply.replace("NOISE", &noise);
        let proxy = FaultProxy::in_front_of(real.addr());
        let of_locks = |words: &[Vec<u8>]| {
            words.iter().any(|word| word.starts_with(b"EVAL") || word == b"SCAN")
        };
        let hostile =
            proxy.on_request(of_locks, Fault::ReplaceReply(reply.clone().into_bytes())).forever();
        let canned = garbage_server(reply.clone());
        for address in [proxy.addr(), canned.addr()] {
            let url = format!("redis://:{secret}@{address}");
            for args in [
                &["ls"][..],
                &["ls", "--json"],
                &["show", "x"],
                &["release", "x", "--force"],
                &["release", "x", "--if-id", "y"],
                &["run", "--no-wait", "x", "--", "true"],
                &["bench", "--time", "100ms"],
            ] {
                let command = with_env(
                    distlock(&[&["--timeout", "500ms"][..], args].concat()),
                    "DISTLOCK_URL",
                    &url,
                );
                let ended = run_to_end(command);
                let (out, err) = (&ended.out, &ended.err);
                let head = format!("{args:?} {:?}: {:.2000}{:.2000}", ended.code, out, err);
                assert_eq!((ended.code, out.is_empty()), (Some(69), !args.contains(&"--json")));
                for text in [out, err] {
                    assert!(!text.contains("correct") && !text.contains("battery"), "{head}");
                    assert!(text.len() < 3_000, "{head}");
                    let plain = |c: char| c == '\n' || (!c.is_control() && c != '\u{202e}');
                    assert!(text.chars().all(plain), "{head:?}");
                }
                assert_eq!(err.lines().count(), 1, "{head}");
            }
        }
        assert!(hostile.fired() > 5);
    }
}

#[test]
fn unreachable_servers_are_named_without_waiting() {
    let server = RedisServer::start();
    let (url, address) = (server.url(), server.addr().to_string());
    server.kill();
    let silent = silent_server();
    for (url, address) in [(&url, address), (&silent.url(), silent.addr().to_string())] {
        for args in [&["ls"][..], &["show", "x"], &["release", "x", "--force"]] {
            let mut command = distlock(args);
            command.args(["--timeout", "300ms", "--url", url]);
            let ended = completes_within(CALL_LIMIT, "the failure", || run_to_end(command))
                .expect_code(69)
                .expect_error(&address);
            let attempt = if args[0] == "release" { "could not release lock \"x\"" } else { "" };
            assert!(ended.err.contains(attempt), "{ended:?}");
        }
    }
}

#[test]
fn invalid_urls_and_options_exit_with_64() {
    for (url, says) in [
        ("http://127.0.0.1:6379", "unknown scheme"),
        ("127.0.0.1", "not a server URL"),
        ("rediss://127.0.0.1/#insecure", "remove #insecure"),
        ("redis://127.0.0.1:1,redis://127.0.0.1:1", "listed twice"),
    ] {
        run_to_end(distlock(&["ls", "--url", url])).expect_code(64).expect_error(says);
        run_to_end(with_env(distlock(&["ls"]), "DISTLOCK_URL", url))
            .expect_code(64)
            .expect_error(says);
    }
    // What is wrong is not taken for a password.
    let server = RedisServer::start();
    let url = url_without_password(&server);
    for list in [format!("{url},"), format!("{url},,{url}")] {
        run_to_end(distlock(&["ls", "--url", &list]))
            .expect_code(64)
            .expect_error("a URL in the list is empty");
    }
    run_to_end(distlock(&["ls", "--url", &format!(" {url} ")])).expect_code(0);
    // On a command line, a password is refused, so the syntax does not show one.
    for wrong in ["http://h", "redis+cluster://", "redis+sentinel://h", "mysql://"] {
        let option = run_to_end(distlock(&["ls", "--url", wrong])).expect_code(64);
        let argument = run_to_end(distlock(&["doctor", wrong])).expect_code(64);
        for ended in [option, argument] {
            assert!(ended.err.contains("[user@]") && !ended.err.contains(":password"), "{ended:?}");
        }
        let variable = run_to_end(with_env(distlock(&["ls"]), "DISTLOCK_URL", wrong));
        variable.expect_code(64).expect_error("[user[:password]@]");
    }
    // On a command line, this may be a password.
    let url = "redis://127.0.0.1:port";
    run_to_end(distlock(&["ls", "--url", url])).expect_code(64).expect_error("it must be a number");
    run_to_end(distlock(&["ls", "--url", "redis://127.0.0.1:1,127.0.0.1:2"]))
        .expect_code(64)
        .expect_error("each server needs a whole URL");
    run_to_end(with_env(distlock(&["ls"]), "DISTLOCK_URL", url))
        .expect_code(64)
        .expect_error("is invalid");
    let bad = ["0", "1 parsec"]
        .map(|timeout| run_to_end(distlock(&["ls", "--timeout", timeout])).expect_code(64));
    assert!(bad[0].err.contains("--timeout is 0s") && bad[1].err.contains("300ms"), "{bad:?}");
    let long = "x".repeat(2_000);
    run_to_end(distlock(&["ls", "--prefix", &long])).expect_code(64).expect_error("prefix");
    run_to_end(distlock(&["nonsense"])).expect_code(64);
    run_to_end(distlock(&[])).expect_code(64);
}

#[test]
fn unix_socket_can_be_used() {
    let server = RedisServer::builder().unix_socket().start();
    set_lock(&server, "local");
    expect_listed(distlock(&["ls", "--url", &server.unix_url()]), "local");
}

/// Standard error is a closed pipe.
#[test]
fn closed_stderr_keeps_exit_code() {
    let mut command = distlock(&["ls", "--url", "redis://127.0.0.1:1", "--timeout", "1s"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = command.stderr(writer).stdout(std::process::Stdio::null()).spawn().unwrap();
    let ended = completes_within(Duration::from_secs(60), "the failure", || child.wait().unwrap());
    assert_eq!(ended.code(), Some(69));
}
