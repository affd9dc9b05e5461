//! A server, and commands that run under its lock `x`. All their processes carry a mark of the test
//! in their environment, by which they are found.

use std::{
    fs::{self, File},
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use distlock::RedisMgr;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{
    helpers::{self, await_queue_length, get, queue_key},
    support::{RedisServer, TEST_TIMEOUT, Watchdog, eventually, eventually_some, process_state},
};

pub(super) const KEY: &str = "lock:x";
const MARK: &str = "DISTLOCK_TEST_MARK";

/// Writes its pid, and runs until it is killed.
pub(super) const RUN_UNTIL_KILLED: &str = "echo $$ >$DIR/pid; exec sleep 600";

/// The same, but ignores all signals that can be ignored; so does a child that it starts.
pub(super) const IGNORE_SIGNALS: &str = "trap '' TERM INT HUP; sleep 600 & echo $! >$DIR/other; \
    echo $$ >$DIR/pid; \
     while :; do sleep 600; done";

/// The server, the temporary folder and the settings of one test.
pub(super) struct Fixture {
    pub(super) server: RedisServer,
    pub(super) url: String,
    folder: TempDir,
    files: AtomicUsize,
}

/// A running `distlock run`.
pub(super) struct RunProcess {
    pub(super) child: Child,
    out: PathBuf,
    err: PathBuf,
    _watchdog: Watchdog,
}

impl Fixture {
    pub(super) fn new() -> Fixture {
        let server = RedisServer::start();
        let url = server.url();
        Fixture::at(server, url)
    }

    /// With a server that has its data again after a restart.
    pub(super) fn durable() -> Fixture {
        let server = RedisServer::builder().append_only(true).start();
        server.config_set("appendfsync", "always");
        let url = server.url();
        Fixture::at(server, url)
    }

    pub(super) fn at(server: RedisServer, url: String) -> Fixture {
        let folder = TempDir::with_prefix("distlock-").expect("no temporary folder");
        Fixture { server, url, folder, files: AtomicUsize::new(0) }
    }

    /// A `distlock run` with these options and the lock `x`. Its timeout is long enough for a slow
    /// machine.
    pub(super) fn command(&self, options: &[&str], command: &[&str]) -> Command {
        self.distlock(&[&["run"], options, &["x", "--"], command].concat())
    }

    /// The same with any subcommand.
    pub(super) fn distlock(&self, args: &[&str]) -> Command {
        let mut distlock = Command::new(env!("CARGO_BIN_EXE_distlock"));
        if !args.contains(&"--timeout") {
            distlock.args(["--timeout", "20s"]);
        }
        distlock.args(args);
        for name in [
            "REDIS_URL",
            "DISTLOCK_PASSWORD_FILE",
            "DISTLOCK_PREFIX",
            "DISTLOCK_QUARANTINE",
            "DISTLOCK_LOG",
        ] {
            distlock.env_remove(name);
        }
        distlock.envs(self.environment()).stdin(Stdio::null());
        distlock
    }

    pub(super) fn environment(&self) -> [(&'static str, String); 3] {
        [("DISTLOCK_URL", self.url.clone()), ("DIR", self.dir()), (MARK, self.dir())]
    }

    fn dir(&self) -> String {
        self.folder.path().to_string_lossy().into_owned()
    }

    pub(super) fn start(&self, command: Command) -> RunProcess {
        let (err, file) = self.file("err");
        let mut job = self.start_with_stderr(command, file);
        job.err = err;
        job
    }

    /// Starts the command with another standard error, which [`err`](RunProcess::err) then cannot
    /// read.
    pub(super) fn start_with_stderr(
        &self,
        mut command: Command,
        err: impl Into<Stdio>,
    ) -> RunProcess {
        let (out, file) = self.file("out");
        command.stdout(file).stderr(err);
        let mut job = RunProcess::start(command);
        job.out = out;
        job
    }

    fn file(&self, stream: &str) -> (PathBuf, File) {
        let path = self.path(&format!("{stream}{}", self.files.fetch_add(1, Ordering::SeqCst)));
        let file = File::create(&path).expect("cannot create a file");
        (path, file)
    }

    /// Runs a shell script under the lock. Its input stays open until
    /// [`end_input`](RunProcess::end_input).
    pub(super) fn run(&self, options: &[&str], script: &str) -> RunProcess {
        let mut command = self.command(options, &["sh", "-c", script]);
        command.stdin(Stdio::piped());
        self.start(command)
    }

    /// The same. Returns once the script has written its pid, with that.
    pub(super) fn run_until_started(&self, options: &[&str], script: &str) -> (RunProcess, u32) {
        let job = self.run(options, script);
        let pid = self.read_number("pid");
        (job, pid)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What a script has written into this file; empty if nothing.
    pub(super) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Waits until a script has written a line into this file.
    #[track_caller]
    pub(super) fn read_line(&self, name: &str) -> String {
        let line = || self.read(name).split_once('\n').map(|(line, _)| line.to_owned());
        eventually_some(&format!("a line in {name}"), TEST_TIMEOUT, line)
    }

    #[track_caller]
    pub(super) fn read_number(&self, name: &str) -> u32 {
        self.read_line(name).trim().parse().expect("a number")
    }

    pub(super) fn holder(&self) -> Option<String> {
        get(&self.server, KEY)
    }

    pub(super) fn manager(&self) -> RedisMgr {
        RedisMgr::new(helpers::config_long_timeouts(self.server.url())).expect("a manager")
    }

    #[track_caller]
    pub(super) fn await_queue_length(&self, waiters: usize) {
        await_queue_length(&self.server, "x", waiters);
    }

    /// All live processes of this test, with their command lines.
    pub(super) fn processes(&self) -> Vec<(u32, String)> {
        let mark = format!("{MARK}={}", self.dir());
        let all = fs::read_dir("/proc").expect("no /proc").flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter_map(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let is_marked =
                environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes());
            let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            is_marked.then(|| (pid, String::from_utf8_lossy(&command_line).replace('\0', " ")))
        })
        .collect()
    }

    /// Returns a value that prints the state of all processes if the test panics before it is
    /// dropped.
    pub(super) fn report_on_panic(&self) -> ReportOnPanic<'_> {
        ReportOnPanic(self)
    }

    /// Waits until the lock has been renewed this many times.
    #[track_caller]
    pub(super) fn await_renewals(&self, times: usize) {
        let commands = self.server.monitor();
        let renewals = || {
            commands
                .lines()
                .iter()
                .filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\""))
                .count()
        };
        eventually("the lock is renewed", TEST_TIMEOUT, || renewals() >= times);
    }

    /// The pid of the guardian.
    pub(super) fn guardian(&self) -> u32 {
        eventually_some("there is a guardian", TEST_TIMEOUT, || {
            self.processes()
                .into_iter()
                .find(|(_, command_line)| command_line.contains("__guardian"))
                .map(|(pid, _)| pid)
        })
    }

    /// Checks that no process, no lock and no queue entry is left.
    #[track_caller]
    pub(super) fn expect_nothing_left(&self) {
        assert_eq!(self.processes(), []);
        self.expect_lock_free();
    }

    #[track_caller]
    pub(super) fn expect_lock_free(&self) {
        assert_eq!(self.holder(), None);
        assert_eq!(self.server.query::<i64>(&["EXISTS", &queue_key("x")]), 0);
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for (pid, _) in self.processes() {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

pub(super) struct ReportOnPanic<'a>(&'a Fixture);

impl Drop for ReportOnPanic<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for (pid, command_line) in self.0.processes() {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            eprintln!("{command_line}: {stat}");
        }
        for file in fs::read_dir(self.0.folder.path()).into_iter().flatten().flatten() {
            eprintln!("{:?}: {:?}", file.file_name(), fs::read_to_string(file.path()));
        }
    }
}

impl RunProcess {
    /// Starts the command with its own streams, which `out` and `err` then cannot read.
    pub(super) fn start(mut command: Command) -> RunProcess {
        let watchdog = Watchdog::start();
        let child = command.spawn().expect("cannot run distlock");
        watchdog.guard(child.id());
        RunProcess { child, out: PathBuf::new(), err: PathBuf::new(), _watchdog: watchdog }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it has ended");
    }

    /// Waits until the process has ended.
    #[track_caller]
    pub(super) fn status(&mut self) -> ExitStatus {
        let ended = || self.child.try_wait().expect("cannot wait");
        eventually_some("distlock run has ended", TEST_TIMEOUT, ended)
    }

    #[track_caller]
    pub(super) fn code(&mut self) -> i32 {
        let status = self.status();
        // If the tests run at a terminal, the process dies of these signals instead.
        let key = status
            .signal()
            .filter(|signal| [Signal::INT, Signal::QUIT].map(Signal::as_raw).contains(signal));
        let code = status.code().or(key.map(|signal| 128 + signal));
        code.unwrap_or_else(|| panic!("{status:?}: {}", self.err()))
    }

    pub(super) fn end_input(&mut self) {
        drop(self.child.stdin.take());
    }

    pub(super) fn out(&self) -> String {
        fs::read_to_string(&self.out).expect("no output")
    }

    pub(super) fn err(&self) -> String {
        fs::read_to_string(&self.err).expect("no errors")
    }
}

impl Drop for RunProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).expect("it has ended");
}

/// Whether the process runs. One that has died but is not reaped does not.
pub(crate) fn is_alive(pid: u32) -> bool {
    !matches!(process_state(pid), None | Some('Z'))
}

#[track_caller]
pub(super) fn await_state(pid: u32, state: char) {
    eventually(&format!("process {pid} is in state {state}"), TEST_TIMEOUT, || {
        process_state(pid) == Some(state)
    });
}

/// Those of the signals that this process does not ignore. A background job of a script may ignore
/// some, and its children would inherit that.
pub(super) fn not_ignored(signals: &[Signal]) -> Vec<Signal> {
    let status = fs::read_to_string("/proc/self/status").expect("no /proc");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("no SigIgn");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a number");
    signals.iter().copied().filter(|signal| ignored >> (signal.as_raw() - 1) & 1 == 0).collect()
}

/// The same command, started with a signal ignored.
pub(super) fn with_ignored_signal(signal: &str, run: &Command) -> Command {
    started_by(&["sh", "-c", &format!("trap '' {signal}; exec \"$@\""), "sh"], run)
}

/// The same command, started through another one.
pub(super) fn started_by(starter: &[&str], run: &Command) -> Command {
    let mut command = Command::new(starter[0]);
    command.args(&starter[1..]).arg(run.get_program()).args(run.get_args());
    for (name, value) in run.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null());
    command
}

/// A ttl longer than any test.
pub(super) const LONG_TTL: &str = "10m";
