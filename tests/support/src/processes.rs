//! Child processes for tests across processes: the test binary runs itself again as a worker,
//! and the two talk in lines over the worker's standard input and output.
//!
//! A binary that spawns workers has a test `worker::entry`, which asks [`WorkerSide::from_env`]
//! for its role and does nothing when it has none.

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
use super::{CEILING, POLL, eventually, eventually_some, process_state};

const ENTRY: &str = "worker::entry";
const ROLE: &str = "DISTLOCK_WORKER_ROLE";
const ARG: &str = "DISTLOCK_WORKER_";

/// Marks the lines of the protocol among all that the test harness prints.
const MARK: &str = "@ ";

/// A worker as its parent sees it; killed and reaped when dropped, and also when the parent dies.
pub struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    heard: Arc<Heard>,
    readers: Vec<JoinHandle<()>>,
    _watchdog: Watchdog,
}

#[derive(Default)]
struct Heard {
    state: Mutex<Transcript>,
    changed: Condvar,
}

#[derive(Default)]
struct Transcript {
    /// The lines of the protocol that nobody has asked for yet.
    lines: Vec<String>,
    all: String,
    ended: bool,
}

impl Worker {
    /// Runs the role `role` in a process of its own; the keys of `args` are case-insensitive.
    pub fn spawn(role: &str, args: &[(&str, &str)]) -> Self {
        let watchdog = Watchdog::start();
        let program = env::current_exe().expect("the test binary has no path");
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
        let heard = Arc::new(Heard::default());
        let stdout = child.stdout.take().expect("it is piped");
        let stderr = child.stderr.take().expect("it is piped");
        let readers = vec![record(stdout, Arc::clone(&heard), true), record(stderr, Arc::clone(&heard), false)];
        Self { input: child.stdin.take(), child, heard, readers, _watchdog: watchdog }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends one line.
    #[track_caller]
    pub fn send(&mut self, line: &str) {
        let input = self.input.as_mut().expect("its input was ended");
        if let Err(error) = input.write_all(format!("{line}\n").as_bytes()) {
            panic!("cannot send {line:?}: {error}\n{}", self.transcript());
        }
    }

    /// Lets the worker's [`WorkerSide::hear`] return `None`.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Waits for a line that starts with `prefix` and returns the rest of it. Other lines stay
    /// for later calls.
    #[track_caller]
    pub fn expect(&self, prefix: &str) -> String {
        self.expect_any(&[prefix])[prefix.len()..].trim().to_owned()
    }

    /// Waits for a line that starts with one of `prefixes` and returns it in full.
    #[track_caller]
    pub fn expect_any(&self, prefixes: &[&str]) -> String {
        let wanted = |line: &str| prefixes.iter().any(|prefix| line.starts_with(prefix));
        self.take_line(CEILING, wanted)
            .unwrap_or_else(|| panic!("no line with any of {prefixes:?} from\n{}", self.transcript()))
    }

    /// The next line of the protocol, if one comes within `timeout`.
    pub fn try_line(&self, timeout: Duration) -> Option<String> {
        self.take_line(timeout, |_| true)
    }

    /// Everything that the worker has printed so far.
    pub fn transcript(&self) -> String {
        let pid = self.pid();
        format!("worker {pid}:\n{}", self.heard.state.lock().all)
    }

    pub fn signal(&mut self, signal: Signal) {
        // Once it has been reaped, the pid may have a new owner.
        let status = self.child.try_wait().expect("cannot ask for the worker");
        assert!(status.is_none(), "it has ended with {status:?}\n{}", self.transcript());
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the worker cannot be signalled");
    }

    /// Freezes the worker with all its threads.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        let pid = self.pid();
        eventually("the worker is stopped", CEILING, || process_state(pid) == Some('T'));
    }

    /// The same with one that may come to its end meanwhile; false if it has.
    pub fn stop_if_running(&mut self) -> bool {
        if self.child.try_wait().expect("cannot ask for the worker").is_some() {
            return false;
        }
        let _ = kill_process(Pid::from_child(&self.child), Signal::STOP);
        let pid = self.pid();
        eventually_some("the worker is stopped, or has ended", CEILING, || match process_state(pid) {
            Some('T') => Some(true),
            // One that was on its way out stops no more.
            Some('Z' | 'X') | None => Some(false),
            Some(_) => None,
        })
    }

    pub fn cont(&mut self) {
        self.signal(Signal::CONT);
    }

    /// Ends the worker without a chance to clean up, and waits until it is gone.
    pub fn kill(&mut self) -> ExitStatus {
        let _ = self.child.kill();
        self.child.wait().expect("cannot wait for the worker")
    }

    /// Waits until the worker has ended by itself.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + CEILING;
        loop {
            if let Some(status) = self.child.try_wait().expect("cannot wait for the worker") {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end: {}", self.transcript());
            thread::sleep(POLL);
        }
    }

    fn take_line(&self, ceiling: Duration, wanted: impl Fn(&str) -> bool) -> Option<String> {
        let deadline = Instant::now() + ceiling;
        let mut state = self.heard.state.lock();
        loop {
            if let Some(at) = state.lines.iter().position(|line| wanted(line)) {
                return Some(state.lines.remove(at));
            }
            if state.ended || Instant::now() >= deadline {
                return None;
            }
            self.heard.changed.wait_until(&mut state, deadline);
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

fn record(source: impl Read + Send + 'static, heard: Arc<Heard>, talks: bool) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut source = BufReader::new(source);
        let mut bytes = Vec::new();
        while source.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let line = String::from_utf8_lossy(&bytes).into_owned();
            let mut state = heard.state.lock();
            state.all.push_str(&line);
            if talks && let Some(line) = line.strip_prefix(MARK) {
                state.lines.push(line.trim_end().to_owned());
            }
            heard.changed.notify_all();
            bytes.clear();
        }
        if talks {
            heard.state.lock().ended = true;
            heard.changed.notify_all();
        }
    })
}

/// The worker's own side of the conversation.
pub struct WorkerSide {
    role: String,
}

impl WorkerSide {
    /// `None` in a process that was not started as a worker.
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
        self.try_arg(key).unwrap_or_else(|| panic!("the worker {role} was not given {key}"))
    }

    pub fn try_arg(&self, key: &str) -> Option<String> {
        env::var(variable(key)).ok()
    }

    /// Sends one line to the parent.
    pub fn say(&self, line: impl AsRef<str>) {
        // The harness leaves its own line about the running test open, hence the first newline.
        let line = format!("\n{MARK}{}\n", line.as_ref());
        let mut output = io::stdout().lock();
        let sent = output.write_all(line.as_bytes()).and_then(|()| output.flush());
        sent.expect("the parent does not listen");
    }

    /// The next line from the parent, or `None` when it has ended the input.
    pub fn hear(&self) -> Option<String> {
        let mut line = String::new();
        let read = io::stdin().read_line(&mut line).expect("cannot read the input");
        (read > 0).then(|| line.trim_end().to_owned())
    }
}
