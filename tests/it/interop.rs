//! The clients of other libraries, as docs/interoperability.md says. They are installed from
//! their package registries into the target folder, in the versions that `interop/` names.

use std::{
    fs,
    io::{BufRead, BufReader, Lines, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use distlock::{LockError, RedisMgr};

use crate::{
    helpers::{Defer, UnwrapReleased, config_long_timeouts, get},
    support::{RedisServer, TEST_TIMEOUT, Watchdog, eventually, trial_succeeded},
};

const NAME: &str = "job";

#[derive(Clone, Copy)]
enum Language {
    Python,
    JavaScript,
}

impl Language {
    fn folder(self) -> PathBuf {
        let name = match self {
            Language::Python => "python",
            Language::JavaScript => "javascript",
        };
        // The versions are part of the name, so that a change installs the clients again.
        let versions = match self {
            Language::Python => include_str!("interop/requirements.txt"),
            Language::JavaScript => include_str!("interop/package-lock.json"),
        };
        let sum = versions
            .bytes()
            .fold(0_u32, |sum, byte| sum.rotate_left(5).wrapping_add(u32::from(byte)));
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("interop-{name}-{sum:08x}"))
    }

    /// Installs the clients, unless they are installed. Returns false if that is not possible here.
    fn install(self, test: &str) -> bool {
        let folder = self.folder();
        if folder.is_dir() {
            return true;
        }
        let partial = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let source = source_folder();
        let installed = match self {
            Language::Python => Command::new("python3")
                .args(["-m", "pip", "install", "--quiet", "--no-deps", "--retries=1"])
                .args(["--timeout=15", "--disable-pip-version-check", "--target"])
                .arg(partial.path())
                .arg("--requirement")
                .arg(source.join("requirements.txt"))
                .output(),
            Language::JavaScript => {
                for file in ["package.json", "package-lock.json"] {
                    fs::copy(source.join(file), partial.path().join(file)).unwrap();
                }
                Command::new("npm")
                    .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
                    .args(["--fetch-retries=1", "--fetch-timeout=15000"])
                    .current_dir(partial.path())
                    .output()
            }
        };
        if !trial_succeeded(test, "the client cannot be installed", installed) {
            return false;
        }
        // Of several tests that install at once, the first wins.
        if fs::rename(partial.path(), &folder).is_ok() {
            drop(partial.keep());
        }
        folder.is_dir()
    }

    fn command(self) -> Command {
        let (program, script) = match self {
            Language::Python => ("python3", "client.py"),
            Language::JavaScript => ("node", "client.js"),
        };
        let mut command = Command::new(program);
        command.env("PYTHONPATH", self.folder()).env("DISTLOCK_MODULES", self.folder());
        command.arg(source_folder().join(script));
        command
    }
}

fn source_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/interop")
}

/// A process that locks with another library.
struct Client {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _watchdog: Watchdog,
}

impl Client {
    /// Returns `None` if the client cannot run here.
    fn start(language: Language, library: &str, server: &RedisServer, key: &str) -> Option<Client> {
        if !language.install(library) {
            return None;
        }
        let watchdog = Watchdog::start();
        let mut command = language.command();
        command.args([library, &server.port().to_string(), key]);
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = match started {
            Ok(process) => process,
            Err(error) => {
                trial_succeeded(library, "the client cannot run", Err(error));
                return None;
            }
        };
        watchdog.guard(process.id());
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut client = Client { process, input, output, _watchdog: watchdog };
        assert_eq!(client.reply(), "ready");
        Some(client)
    }

    fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    #[track_caller]
    fn reply(&mut self) -> String {
        self.output.next().expect("the client ended").unwrap()
    }

    #[track_caller]
    fn expect(&mut self, command: &str, reply: &str) {
        self.send(command);
        assert_eq!(self.reply(), reply, "{command}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn manager(server: &RedisServer, prefix: &str) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap()
}

/// Adds one to a counter in steps that lose an addition if two clients do it at once.
fn count(server: &RedisServer) {
    let count = get(server, "count").map_or(0, |count| count.parse::<u64>().unwrap());
    server.cli(&["SET", "count", &(count + 1).to_string()]);
}

/// The client and distlock lock `prefix` + `NAME` in turn, and then at the same time.
fn competes(language: Language, library: &str, prefix: &str) {
    const ROUNDS: u64 = 50;
    let server = RedisServer::start();
    let mgr = manager(&server, prefix);
    let key = format!("{prefix}{NAME}");
    let queue = format!("distlock:queue:{{{key}}}");
    let Some(mut client) = Client::start(language, library, &server, &key) else { return };

    // The client holds the lock, and releases it or lets it expire.
    for (ttl, releases) in [(30, true), (1, false)] {
        client.expect(&format!("try {ttl}"), "held");
        if releases {
            match mgr.try_lock(NAME) {
                Err(LockError::Held { holder, .. }) => assert!(holder.lock_id().is_none()),
                other => panic!("{other:?}"),
            }
        }
        thread::scope(|scope| {
            let waiting = scope.spawn(|| mgr.lock(NAME).unwrap().release().unwrap());
            if releases {
                eventually("it waits", TEST_TIMEOUT, || {
                    server.query::<u64>(&["LLEN", &queue]) == 1
                });
                client.expect("release", "done");
            }
            waiting.join().unwrap().unwrap_released();
        });
    }

    // distlock holds the lock.
    let guard = mgr.try_lock(NAME).unwrap();
    client.expect("try 30", "busy");
    client.send("acquire 30");
    guard.release().unwrap().unwrap_released();
    assert_eq!(client.reply(), "held");
    client.expect("release", "done");

    // Both want it all the time.
    let stop = AtomicBool::new(false);
    let ours = thread::scope(|scope| {
        let stop_at_the_end = Defer(|| stop.store(true, Ordering::Relaxed));
        let counting = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                let guard = mgr.lock(NAME).unwrap();
                count(&server);
                guard.release().unwrap().unwrap_released();
                rounds += 1;
            }
            rounds
        });
        client.expect(&format!("count {ROUNDS}"), "done");
        drop(stop_at_the_end);
        counting.join().unwrap()
    });
    assert_eq!(get(&server, "count"), Some((ROUNDS + ours).to_string()), "{ours} of distlock");
}

#[test]
fn redis_py_competes() {
    competes(Language::Python, "redis-py", "lock:");
}

#[test]
fn redlock_py_competes() {
    competes(Language::Python, "redlock-py", "lock:");
}

#[test]
fn pottery_competes() {
    competes(Language::Python, "pottery", "redlock:");
}

#[test]
fn node_redlock_competes() {
    competes(Language::JavaScript, "redlock", "lock:");
}

#[test]
fn sesamecare_redlock_competes() {
    competes(Language::JavaScript, "@sesamecare-oss/redlock", "lock:");
}

#[test]
fn redis_semaphore_mutex_competes() {
    competes(Language::JavaScript, "redis-semaphore", "mutex:");
}

#[test]
fn python_redis_lock_competes_if_it_does_not_wait() {
    competes(Language::Python, "python-redis-lock", "lock:");
}

#[test]
fn python_redis_lock_does_not_notice_our_releases() {
    let server = RedisServer::start();
    let mgr = manager(&server, "lock:");
    let library = "python-redis-lock";
    let Some(mut client) = Client::start(Language::Python, library, &server, "lock:job") else {
        return;
    };
    let waits = || server.clients().iter().any(|client| client["cmd"] == "blpop");
    let guard = mgr.try_lock(NAME).unwrap();
    client.send("wait 29");
    eventually("it waits", TEST_TIMEOUT, waits);
    guard.release().unwrap().unwrap_released();
    assert!(waits(), "the release woke it");
    server.cli(&["LPUSH", "lock-signal:job", "1"]);
    assert_eq!(client.reply(), "held");
    client.expect("release", "done");
}

#[test]
fn python_redis_lock_resets_every_lock_of_the_default_prefix() {
    let server = RedisServer::start();
    let library = "python-redis-lock";
    let Some(mut client) = Client::start(Language::Python, library, &server, "lock:other") else {
        return;
    };
    let guard = manager(&server, "lock:").try_lock(NAME).unwrap();
    let elsewhere = manager(&server, "app:lock:").try_lock(NAME).unwrap();
    client.expect("reset_all", "done");
    assert_eq!(get(&server, "lock:job"), None);
    assert_eq!(get(&server, "app:lock:job").as_deref(), Some(elsewhere.id().as_str()));
    drop(guard);
}

#[test]
fn lock_kept_in_a_hash_or_a_sorted_set_is_refused() {
    // Redisson keeps a hash, the Semaphore of redis-semaphore a sorted set.
    let server = RedisServer::start();
    server.cli(&["HSET", "lock:hash", "uuid:1", "1"]);
    server.cli(&["ZADD", "lock:set", "1", "uuid"]);
    let mgr = manager(&server, "lock:");
    for name in ["hash", "set"] {
        assert!(matches!(mgr.try_lock(name), Err(LockError::WrongType { .. })), "{name}");
    }
}
