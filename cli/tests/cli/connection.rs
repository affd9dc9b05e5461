//! From options, environment and files to servers; and that no password gets out.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt as _, process::Command, time::Duration};

use tempfile::TempDir;

use super::command::{Ended, at, at_url, distlock, run};
use crate::{
    kit::{BOUNDED, foreign_take, within},
    support::{Fault, FaultProxy, Nodes, RedisServer, garbage_server, silent_server},
};

const SECRET: &str = "correct,horse battery";

/// The name of the lock that is held on this server alone, so that it can be told from others.
fn marked(name: &str) -> RedisServer {
    let server = RedisServer::start();
    mark(&server, name);
    server
}

fn mark(server: &RedisServer, name: &str) {
    assert!(foreign_take(server, &format!("lock:{name}"), "somebody", 600_000));
}

#[track_caller]
fn lists(command: Command, name: &str) {
    let ended = run(command).with(0);
    let names: Vec<&str> = ended.out.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, [name], "{ended:?}");
}

fn with(mut command: Command, name: &str, value: impl AsRef<OsStr>) -> Command {
    command.env(name, value);
    command
}

#[test]
fn an_option_comes_before_the_environment_and_ours_before_the_common_one() {
    let (one, two, three) = (marked("one"), marked("two"), marked("three"));
    let common = || with(distlock(&["ls"]), "REDIS_URL", three.url());
    let ours = || with(common(), "DISTLOCK_URL", two.url());
    lists(common(), "three");
    lists(ours(), "two");
    lists(with(common(), "DISTLOCK_URL", ""), "three");
    let mut option = ours();
    lists(
        {
            option.args(["--url", &one.url()]);
            option
        },
        "one",
    );
    // Before the subcommand as well.
    lists(with(distlock(&["--url", &one.url(), "ls"]), "DISTLOCK_URL", two.url()), "one");
}

/// To pass it over would be to lock elsewhere than everybody else.
#[test]
fn an_address_in_the_environment_that_is_no_text_is_refused_and_not_repeated() {
    let server = RedisServer::start();
    let latin = OsStr::from_bytes(b"redis://:caf\xe9-au-lait@127.0.0.1:1");
    for (name, other, url) in
        [("DISTLOCK_URL", "REDIS_URL", server.url()), ("REDIS_URL", "DISTLOCK_URL", String::new())]
    {
        for args in [&["ls"][..], &["doctor"], &["bench"], &["run", "x", "--", "true"]] {
            let ended = run(with(with(distlock(args), name, latin), other, &url)).with(64).only_says(name);
            assert!(!ended.err.contains("caf") && !ended.err.contains("au-lait"), "{ended:?}");
        }
    }
    // What comes before it is taken.
    run(with(with(distlock(&["ls"]), "REDIS_URL", latin), "DISTLOCK_URL", server.url())).with(0);
    run(with(distlock(&["ls", "--url", &server.url()]), "DISTLOCK_URL", latin)).with(0);
}

#[test]
fn several_nodes_are_named_by_several_options_or_with_commas() {
    let nodes = Nodes::start(3);
    for node in 0..2 {
        mark(nodes.server(node), "both");
    }
    let urls = [0, 1, 2].map(|node| nodes.url(node));
    let [first, second, third] = urls.each_ref().map(String::as_str);
    let commas = urls.join(",");
    let ways = [
        distlock(&["ls", "--url", first, "--url", second, "--url", third]),
        distlock(&["ls", "--url", &commas]),
        distlock(&["ls", "--url", &format!("{first},{second}"), "--url", third]),
        with(distlock(&["ls"]), "DISTLOCK_URL", &commas),
    ];
    for way in ways {
        let ended = run(way).with(0);
        assert!(ended.out.contains("both") && !ended.out.contains("not certain"), "{ended:?}");
    }
}

#[test]
fn a_prefix_is_an_option_or_in_the_environment() {
    let server = marked("other");
    assert!(foreign_take(&server, "mine:x", "somebody", 600_000));
    lists(at(&server, &["ls", "--prefix", "mine:"]), "x");
    lists(with(at(&server, &["ls"]), "DISTLOCK_PREFIX", "mine:"), "x");
}

/// That is how a variable is taken away in a unit of systemd's, and in many scripts.
#[test]
fn a_variable_that_is_empty_is_not_set() {
    let server = marked("x");
    for name in ["DISTLOCK_PASSWORD_FILE", "DISTLOCK_QUARANTINE", "DISTLOCK_LOG"] {
        lists(with(at(&server, &["ls"]), name, ""), "x");
    }
    run(at(&server, &["ls", "--password-file", ""])).with(64);
}

/// A server with a password, and a file with that password.
fn guarded(text: &str) -> (RedisServer, TempDir, String) {
    let server = RedisServer::builder().password(SECRET).start();
    mark(&server, "kept");
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap().to_owned();
    (server, folder, path)
}

fn bare_url(server: &RedisServer) -> String {
    format!("redis://{}", server.addr())
}

#[track_caller]
fn tells_no_secret(ended: &Ended) {
    for part in [SECRET, "correct", "battery", "correct%2Chorse%20battery"] {
        assert!(!ended.out.contains(part) && !ended.err.contains(part), "{ended:?}");
    }
}

#[test]
fn a_password_is_the_first_line_of_a_file() {
    for text in [SECRET.to_owned(), format!("{SECRET}\n"), format!("{SECRET}\r\n"), format!("{SECRET}\nnot this\n")] {
        let (server, _folder, file) = guarded(&text);
        lists(distlock(&["ls", "--url", &bare_url(&server), "--password-file", &file]), "kept");
        lists(with(at_url(&bare_url(&server), &["ls"]), "DISTLOCK_PASSWORD_FILE", &file), "kept");
    }
}

#[test]
fn a_password_in_the_url_of_the_environment_works_and_comes_before_the_file() {
    let (server, folder, _) = guarded(SECRET);
    let other = folder.path().join("other");
    fs::write(&other, "wrong\n").unwrap();
    lists(at(&server, &["ls"]), "kept");
    lists(at(&server, &["ls", "--password-file", other.to_str().unwrap()]), "kept");
}

#[test]
fn a_password_file_that_cannot_be_used_is_named() {
    let (server, folder, file) = guarded("\nsecond line\n");
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
        (&endless, "is over 64 KiB"),
    ] {
        let path = path.to_str().unwrap();
        let ended = run(at_url(&bare_url(&server), &["ls", "--password-file", path])).with(64).only_says(says);
        assert!(ended.err.contains(path), "{ended:?}");
    }
}

/// Every user of the machine can read it there.
#[test]
fn a_password_on_the_command_line_is_refused_and_not_repeated() {
    let (server, _folder, _) = guarded(SECRET);
    let url = server.url();
    let second = format!("redis://h,{url}");
    for args in [
        &["ls", "--url", &url][..],
        &["ls", "--url", &second],
        &["show", "x", "--url", "redis://h", "--url", &url],
        &["doctor", &url],
        &["bench", &url],
        &["run", "x", "--url", &url, "--", "true"],
        // Misplaced, where it would be repeated by whoever complains of it.
        &[&url, "ls"],
        &["ls", "--uri", &url],
        &["release", "x", &url],
    ] {
        let ended = run(distlock(args)).with(64).only_says("DISTLOCK_URL");
        tells_no_secret(&ended);
    }
}

#[test]
fn a_wrong_or_missing_password_is_said_and_not_repeated() {
    let (server, _folder, _) = guarded(SECRET);
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "Tr0ub4dor&3\n").unwrap();
    let args = ["ls", "--password-file", file.to_str().unwrap()];
    let ended = run(at_url(&bare_url(&server), &args)).with(69).only_says("WRONGPASS");
    assert!(!ended.err.contains("Tr0ub4dor"), "{ended:?}");
    let ended = run(with(distlock(&["ls"]), "DISTLOCK_URL", format!("redis://:Tr0ub4dor@{}", server.addr())));
    assert!(!ended.with(69).only_says("WRONGPASS").err.contains("Tr0ub4dor"));
    run(at_url(&bare_url(&server), &["ls"])).with(69).only_says("NOAUTH");
}

/// Whatever a server answers, at once or when it has let us in.
#[test]
fn what_a_server_answers_is_told_cut_and_without_the_password() {
    let secret = "correct-horse-battery";
    let noise = format!("{secret} \x1b[31m\u{202e}{}{secret}", "é".repeat(100_000));
    let real = RedisServer::builder().password(secret).start();
    for reply in ["-ERR NOISE\r\n", "-correct-horse-battery NOISE\r\n", "!NOISE\r\n", "+NOISE\r\n", "$9\r\nNOISE\r\n"] {
        let reply = reply.replace("NOISE", &noise);
        let proxy = FaultProxy::in_front_of(real.addr());
        let of_locks = |words: &[Vec<u8>]| words.iter().any(|word| word.starts_with(b"EVAL") || word == b"SCAN");
        let hostile = proxy.on_request(of_locks, Fault::ReplaceReply(reply.clone().into_bytes())).forever();
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
                let command = with(distlock(&[&["--timeout", "500ms"][..], args].concat()), "DISTLOCK_URL", &url);
                let ended = run(command);
                let (out, err) = (&ended.out, &ended.err);
                let head = format!("{args:?} {:?}: {:.2000}{:.2000}", ended.code, out, err);
                assert!(ended.code == Some(69) && out.is_empty(), "{head}");
                assert!(!err.contains("correct") && !err.contains("battery") && err.len() < 3_000, "{head}");
                assert!(err.trim_end().chars().all(|c| !c.is_control() && c != '\u{202e}'), "{head:?}");
            }
        }
        assert!(hostile.fired() > 5);
    }
}

#[test]
fn servers_that_are_away_are_named_and_not_waited_for() {
    let server = RedisServer::start();
    let (url, address) = (server.url(), server.addr().to_string());
    server.kill();
    let silent = silent_server();
    for (url, address) in [(&url, address), (&silent.url(), silent.addr().to_string())] {
        for args in [&["ls"][..], &["show", "x"], &["release", "x", "--force"]] {
            let mut command = distlock(args);
            command.args(["--timeout", "300ms", "--url", url]);
            within(BOUNDED, "giving up", || run(command)).with(69).only_says(&address);
        }
    }
}

#[test]
fn urls_and_options_that_cannot_work_are_a_matter_of_usage() {
    for (url, says) in [
        ("http://127.0.0.1:6379", "unknown scheme"),
        ("127.0.0.1", "not a server URL"),
        ("rediss://127.0.0.1", "TLS"),
        ("redis://127.0.0.1:1,redis://127.0.0.1:1", "named twice"),
    ] {
        run(distlock(&["ls", "--url", url])).with(64).only_says(says);
        run(with(distlock(&["ls"]), "DISTLOCK_URL", url)).with(64).only_says(says);
    }
    // On a command line it may be a password.
    let url = "redis://127.0.0.1:port";
    run(distlock(&["ls", "--url", url])).with(64).only_says("it has to be a number");
    run(with(distlock(&["ls"]), "DISTLOCK_URL", url)).with(64).only_says("cannot be read");
    let bad = ["0", "10", "1 parsec"].map(|timeout| run(distlock(&["ls", "--timeout", timeout])).with(64));
    assert!(bad[0].err.contains("operation_timeout") && bad[1].err.contains("300ms"), "{bad:?}");
    let long = "x".repeat(2_000);
    run(distlock(&["ls", "--prefix", &long])).with(64).only_says("prefix");
    run(distlock(&["nonsense"])).with(64);
    run(distlock(&[])).with(64);
}

#[test]
fn a_socket_file_is_a_server_too() {
    let server = RedisServer::builder().unix_socket().start();
    mark(&server, "local");
    lists(distlock(&["ls", "--url", &server.unix_url()]), "local");
}

/// Nobody listens on standard error any more.
#[test]
fn a_closed_standard_error_changes_nothing() {
    let mut command = distlock(&["ls", "--url", "redis://127.0.0.1:1", "--timeout", "1s"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = command.stderr(writer).stdout(std::process::Stdio::null()).spawn().unwrap();
    let ended = within(Duration::from_secs(60), "giving up", || child.wait().unwrap());
    assert_eq!(ended.code(), Some(69));
}
