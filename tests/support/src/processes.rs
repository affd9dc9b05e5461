//! Workers: child processes for tests that need several processes.
//!
//! The test binary runs itself again as a worker. Parent and worker exchange lines over the
//! worker's standard input and output. A test binary that spawns workers has a test
//! `worker::entry`, which gets its role from [`WorkerSide::from_env`] and does nothing without one.

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process};

use super::watchdog::Watchdog;
use super::{POLL, TEST_TIMEOUT, eventually, eventually_some, process_state};

const ENTRY: &str = "worker::entry";
const ROLE: &str = "DISTLOCK_WORKER_ROLE";
const ARG: &str = "DISTLOCK_WORKER_";

/// Distinguishes the worker's messages from the output of the test harness.
const MARK: &str = "@ ";

/// The parent's handle of a worker. Dropping it kills and reaps the worker; the worker is also
/// killed when the parent dies.
pub struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    output: Arc<Output>,
    readers: Vec<JoinHandle<()>>,
    _watchdog: Watchdog,
}

#[derive(Default)]
struct Output {
    state: Mutex<Transcript>,
    changed: Condvar,
}

#[derive(Default)]
struct Transcript {
    /// The worker's messages that no caller has taken yet.
    lines: Vec<String>,
    all: String,
    ended: bool,
}

impl Worker {
    /// Runs the role `role` in a new process. The keys of `args` are case-insensitive.
    pub fn spawn(role: &str, args: &[(&str, &str)]) -> Self {
        let watchdog = Watchdog::start();
        let program = env::current_exe().expect("cannot find the test binary");
        let mut child = Command::new(program)
            .args([ENTRY, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(args.iter().map(|(key, value)| (variable(key), value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("cannot run the test binary again");
        watchdog.guard(child.id());
        let output = Arc::new(Output::default());
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        let readers = vec![
            record(stdout, Arc::clone(&output), true),
            record(stderr, Arc::clone(&output), false),
        ];
        Self { input: child.stdin.take(), child, output, readers, _watchdog: watchdog }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends one line to the worker.
    #[track_caller]
    pub fn send(&mut self, line: &str) {
        let input = self.input.as_mut().expect("the worker's input was closed");
        if let Err(error) = input.write_all(format!("{line}\n").as_bytes()) {
            panic!("cannot send {line:?}: {error}\n{}", self.transcript());
        }
    }

    /// Makes the worker's [`WorkerSide::hear`] return `None`.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Waits for a message that starts with `prefix`, and returns the rest of it. Other messages
    /// stay for later calls.
    #[track_caller]
    pub fn expect(&self, prefix: &str) -> String {
        self.expect_any(&[prefix])[prefix.len()..].trim().to_owned()
    }

    /// Waits for a message that starts with one of `prefixes`, and returns it in full.
    #[track_caller]
    pub fn expect_any(&self, prefixes: &[&str]) -> String {
        let wanted = |line: &str| prefixes.iter().any(|prefix| line.starts_with(prefix));
        self.take_line(TEST_TIMEOUT, wanted).unwrap_or_else(|| {
            panic!("no message starts with any of {prefixes:?}:\n{}", self.transcript())
        })
    }

    /// Returns the next message, if one arrives within `timeout`.
    pub fn try_line(&self, timeout: Duration) -> Option<String> {
        self.take_line(timeout, |_| true)
    }

    /// Everything that the worker has printed so far.
    pub fn transcript(&self) -> String {
        let pid = self.pid();
        format!("worker {pid}:\n{}", self.output.state.lock().all)
    }

    pub fn signal(&mut self, signal: Signal) {
        // After the worker has been reaped, its pid may belong to another process.
        let status = self.child.try_wait().expect("cannot query the worker's status");
        assert!(status.is_none(), "the worker ended with {status:?}\n{}", self.transcript());
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("cannot send a signal to the worker");
    }

    /// Freezes all threads of the worker.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        let pid = self.pid();
        eventually("the worker is stopped", TEST_TIMEOUT, || process_state(pid) == Some('T'));
    }

    /// Like [`stop`](Self::stop), for a worker that may end at any moment. Returns false if it has
    /// ended.
    pub fn stop_if_running(&mut self) -> bool {
        if self.child.try_wait().expect("cannot query the worker's status").is_some() {
            return false;
        }
        let _ = kill_process(Pid::from_child(&self.child), Signal::STOP);
        let pid = self.pid();
        eventually_some("the worker is stopped or has ended", TEST_TIMEOUT, || {
            match process_state(pid) {
                Some('T') => Some(true),
                // A process that is already exiting does not stop any more.
                Some('Z' | 'X') | None => Some(false),
                Some(_) => None,
            }
        })
    }

    pub fn cont(&mut self) {
        self.signal(Signal::CONT);
    }

    /// Kills the worker, which has no chance to clean up, and waits until it has ended.
    pub fn kill(&mut self) -> ExitStatus {
        let _ = self.child.kill();
        self.child.wait().expect("cannot wait for the worker")
    }

    /// Waits until the worker ends on its own.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().expect("cannot wait for the worker") {
                return status;
            }
            assert!(Instant::now() < deadline, "the worker does not end: {}", self.transcript());
            thread::sleep(POLL);
        }
    }

    fn take_line(&self, ceiling: Duration, wanted: impl Fn(&str) -> bool) -> Option<String> {
        let deadline = Instant::now() + ceiling;
        let mut state = self.output.state.lock();
        loop {
            if let Some(at) = state.lines.iter().position(|line| wanted(line)) {
                return Some(state.lines.remove(at));
            }
            if state.ended || Instant::now() >= deadline {
                return None;
            }
            self.output.changed.wait_until(&mut state, deadline);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

fn variable(key: &str) -> String {
    format!("{ARG}{}", key.to_ascii_uppercase())
}

/// Reads `source` to its end on a new thread. If `is_stdout`, it contains the worker's messages.
fn record(
    source: impl Read + Send + 'static,
    output: Arc<Output>,
    is_stdout: bool,
) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut source = BufReader::new(source);
        let mut bytes = Vec::new();
        while source.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let line = String::from_utf8_lossy(&bytes).into_owned();
            let mut state = output.state.lock();
            state.all.push_str(&line);
            if is_stdout && let Some(line) = line.strip_prefix(MARK) {
                state.lines.push(line.trim_end().to_owned());
            }
            output.changed.notify_all();
            bytes.clear();
        }
        if is_stdout {
            output.state.lock().ended = true;
            output.changed.notify_all();
        }
    })
}

/// The worker's connection to its parent.
pub struct WorkerSide {
    role: String,
}

impl WorkerSide {
    /// Returns `None` in a process that was not started as a worker.
    pub fn from_env() -> Option<Self> {
        let role = env::var(ROLE).ok()?;
        Some(Self { role })
    }

    pub fn role(&self) -> &str {
        &self.role
    }

    #[track_caller]
    pub fn arg(&self, key: &str) -> String {
        let role = &self.role;
        self.try_arg(key).unwrap_or_else(|| panic!("the worker {role} has no argument {key}"))
    }

    pub fn try_arg(&self, key: &str) -> Option<String> {
        env::var(variable(key)).ok()
    }

    /// Sends one message to the parent.
    pub fn say(&self, line: impl AsRef<str>) {
        // The harness prints the name of the running test without a newline at its end, hence the
        // first newline here.
        let line = format!("\n{MARK}{}\n", line.as_ref());
        let mut output = io::stdout().lock();
        let sent = output.write_all(line.as_bytes()).and_then(|()| output.flush());
        sent.expect("cannot write to the parent");
    }

    /// Waits for the next line from the parent. Returns `None` once the parent has closed the
    /// input.
    pub fn hear(&self) -> Option<String> {
        let mut line = String::new();
        let read = io::stdin().read_line(&mut line).expect("cannot read the input");
        (read > 0).then(|| line.trim_end().to_owned())
    }
}
