//! What only the tests of the library need, besides what they share with those of the command.

use std::{
    env, fs,
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use distlock::{Config, LockGuard, RedisMgr, testing::servers::Script};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{FaultProxy, Monitor, RedisServer, TEST_TIMEOUT, Watchdog, eventually};

pub(crate) use crate::shared_helpers::*;

/// Operation timeout for tests in which the server does not reply.
pub(crate) const SHORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Waits until the release of this lock would read the fence if it handed the lock over, which only
/// the first hand-over of each ten seconds does.
pub(crate) fn await_check_of_fence(server: &RedisServer, guard: &LockGuard) {
    let tens = |us: u64| us / 10_000_000;
    eventually("the next ten seconds begin", TEST_TIMEOUT, || {
        let (seconds, _): (u64, u64) = server.query(&["TIME"]);
        tens(seconds * 1_000_000) > tens(guard.fencing_token().into())
    });
}

/// Recognizes a request, or a recorded line of it, that asks for a mutex without joining its queue.
fn is_try() -> impl Fn(&str) -> bool {
    let acquire = Script::Acquire.text();
    let hash = redis::Script::new(acquire).get_hash().to_owned();
    let begin = acquire.lines().next().unwrap();
    // Only waiters send a channel.
    move |request| {
        (request.contains(&hash) || request.contains(begin))
            && !request.contains("distlock:client:")
    }
}

/// Matches requests for a mutex that do not join its queue.
pub(crate) fn tries_mutex(words: &[Vec<u8>]) -> bool {
    let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
    is_try()(&words.join(" "))
}

/// Number of recorded requests for a mutex that do not join its queue.
pub(crate) fn tries(commands: &Monitor) -> usize {
    let is_try = is_try();
    commands.lines().iter().filter(|line| is_try(line)).count()
}

/// A configuration for servers that do not reply.
pub(crate) fn config_short_timeout(url: impl Into<String>) -> Config {
    config_long_timeouts(url).operation_timeout(SHORT_TIMEOUT)
}

/// A configuration in which a lost request is soon retried, and a request that arrives is in time.
pub(crate) fn config_medium_timeout(url: impl Into<String>) -> Config {
    config_long_timeouts(url).operation_timeout(4 * SECOND)
}

/// A server that knows the scripts, a proxy in front of it, and a manager that connects to the
/// proxy.
pub(crate) fn server_behind_proxy(
    config: impl FnOnce(String) -> Config,
) -> (RedisServer, FaultProxy, RedisMgr) {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config(proxy.url())).unwrap();
    eventually("it replies", TEST_TIMEOUT, || mgr.ping().is_ok());
    (server, proxy, mgr)
}

/// Asserts that a lease ends before its key expires. The key is read first, so that a slow machine
/// cannot make this fail.
#[track_caller]
pub(crate) fn expect_deadline_before_key_expiry(server: &RedisServer, guard: &LockGuard) {
    let key = pttl(server, &format!("lock:{}", guard.name()));
    let left = guard.remaining();
    // The server reports whole milliseconds.
    assert!(
        left <= Duration::from_millis(u64::try_from(key).expect("an expiry") + 1),
        "{left:?} of {key} ms"
    );
}

#[track_caller]
pub(crate) fn await_gone(server: &RedisServer, key: &str) {
    eventually("the key is gone", TEST_TIMEOUT, || get(server, key).is_none());
}

/// A client in another language: compare and delete.
pub(crate) fn foreign_release(server: &RedisServer, key: &str, id: &str) -> bool {
    const SCRIPT: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] \
                          then return redis.call('DEL', KEYS[1]) else return 0 end";
    server.query::<i64>(&["EVAL", SCRIPT, "1", key, id]) == 1
}

/// Calls a function when it is dropped, also if an assertion fails. A thread scope needs this,
/// because it waits for its threads however it is left.
pub(crate) struct Defer<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Maximum duration of a test in its own process; longer than all its waits together.
const OWN_PROCESS_MAX: Duration = Duration::from_secs(15 * 60);

/// Runs the named test again in its own process. Returns true only there. For tests of what exists
/// once in a process, such as the logger.
#[track_caller]
pub(crate) fn in_own_process(test: &str, env: &[(&str, &str)]) -> bool {
    const MARK: &str = "DISTLOCK_TEST_ALONE";
    if env::var_os(MARK).is_some() {
        return true;
    }
    let program = env::current_exe().unwrap();
    let watchdog = Watchdog::start();
    let mut command = Command::new(program);
    command.args([test, "--exact", "--nocapture"]).env(MARK, "1").envs(env.iter().copied());
    let child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    watchdog.guard(child.id());
    let pid = Pid::from_child(&child);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    let ended = receiver.recv_timeout(OWN_PROCESS_MAX).or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        receiver.recv_timeout(TEST_TIMEOUT)
    });
    let output = ended.unwrap().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}: {stdout}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(stdout.contains("1 passed"), "no test has the name {test}: {stdout}");
    false
}

/// The names of the library's threads in this process, one for each thread, sorted.
pub(crate) fn distlock_threads() -> Vec<String> {
    let name = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(name);
    let mut ours: Vec<_> = names.filter(|name| name.starts_with("distlock")).collect();
    ours.sort();
    ours
}

/// Number of open files of this process.
pub(crate) fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The address of the server as errors show it.
pub(crate) fn label(server: &RedisServer) -> Arc<str> {
    format!("127.0.0.1:{}", server.port()).into()
}

/// Records log messages from here on, up to `level`. Only for tests that run `in_own_process`,
/// because a process has one logger.
pub(crate) fn capture_log(level: log::LevelFilter) -> &'static Mutex<Vec<String>> {
    static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

    struct Capture;

    impl log::Log for Capture {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &log::Record<'_>) {
            LOGGED.lock().push(format!("{} {} {}", record.level(), record.target(), record.args()));
        }

        fn flush(&self) {}
    }

    log::set_logger(&Capture).unwrap();
    log::set_max_level(level);
    &LOGGED
}
