//! A server, and commands that run under the lock `x` of it. All their processes bear the mark of the test, by which they
//! are found.

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
    kit::{self, await_queued, get, queue_key},
    support::{CEILING, RedisServer, Watchdog, eventually, eventually_some, process_state},
};

pub(super) const KEY: &str = "lock:x";
const MARK: &str = "DISTLOCK_TEST_MARK";

/// Says that it runs, and goes on until it is ended.
pub(super) const STAY: &str = "echo $$ >$DIR/pid; exec sleep 600";

/// The same, not to be ended but by being killed; so is what it starts.
pub(super) const STUBBORN: &str = "trap '' TERM INT HUP; sleep 600 & echo $! >$DIR/other; echo $$ >$DIR/pid; \
     while :; do sleep 600; done";

pub(super) struct Scene {
    pub(super) server: RedisServer,
    pub(super) url: String,
    folder: TempDir,
    files: AtomicUsize,
}

/// A `distlock run`.
pub(super) struct Job {
    pub(super) child: Child,
    out: PathBuf,
    err: PathBuf,
    _watchdog: Watchdog,
}

impl Scene {
    pub(super) fn new() -> Scene {
        let server = RedisServer::start();
        let url = server.url();
        Scene::at(server, url)
    }

    pub(super) fn at(server: RedisServer, url: String) -> Scene {
        let folder = TempDir::with_prefix("distlock-").expect("no temporary folder");
        Scene { server, url, folder, files: AtomicUsize::new(0) }
    }

    /// `distlock run` with these options and `x` as the lock; at a server that is never away, however slow the machine.
    pub(super) fn command(&self, options: &[&str], command: &[&str]) -> Command {
        let mut run = Command::new(env!("CARGO_BIN_EXE_distlock"));
        if !options.contains(&"--timeout") {
            run.args(["--timeout", "20s"]);
        }
        run.arg("run").args(options).args(["x", "--"]).args(command);
        for name in ["REDIS_URL", "DISTLOCK_PASSWORD_FILE", "DISTLOCK_PREFIX", "DISTLOCK_QUARANTINE", "DISTLOCK_LOG"] {
            run.env_remove(name);
        }
        run.envs(self.environment()).stdin(Stdio::null());
        run
    }

    pub(super) fn environment(&self) -> [(&'static str, String); 3] {
        [("DISTLOCK_URL", self.url.clone()), ("DIR", self.dir()), (MARK, self.dir())]
    }

    fn dir(&self) -> String {
        self.folder.path().to_string_lossy().into_owned()
    }

    pub(super) fn start(&self, command: Command) -> Job {
        let (err, file) = self.file("err");
        let mut job = self.start_saying(command, file);
        job.err = err;
        job
    }

    /// The same with another place for what it says, of which the job knows nothing.
    pub(super) fn start_saying(&self, mut command: Command, err: impl Into<Stdio>) -> Job {
        let (out, file) = self.file("out");
        command.stdout(file).stderr(err);
        let mut job = Job::start(command);
        job.out = out;
        job
    }

    fn file(&self, stream: &str) -> (PathBuf, File) {
        let path = self.path(&format!("{stream}{}", self.files.fetch_add(1, Ordering::SeqCst)));
        let file = File::create(&path).expect("cannot create a file");
        (path, file)
    }

    /// Runs a shell script under the lock, with an input that lasts until it is [ended](Job::end_input).
    pub(super) fn run(&self, options: &[&str], script: &str) -> Job {
        let mut command = self.command(options, &["sh", "-c", script]);
        command.stdin(Stdio::piped());
        self.start(command)
    }

    /// The same; returns when the script has said that it runs, with its process.
    pub(super) fn running(&self, options: &[&str], script: &str) -> (Job, u32) {
        let job = self.run(options, script);
        let pid = self.number("pid");
        (job, pid)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What a script has written there; empty if nothing.
    pub(super) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Waits until a script has written a line there.
    #[track_caller]
    pub(super) fn line(&self, name: &str) -> String {
        let line = || self.read(name).split_once('\n').map(|(line, _)| line.to_owned());
        eventually_some(&format!("a line in {name}"), CEILING, line)
    }

    #[track_caller]
    pub(super) fn number(&self, name: &str) -> u32 {
        self.line(name).trim().parse().expect("a number")
    }

    pub(super) fn holder(&self) -> Option<String> {
        get(&self.server, KEY)
    }

    pub(super) fn manager(&self) -> RedisMgr {
        RedisMgr::new(kit::patient(self.server.url())).expect("a manager")
    }

    #[track_caller]
    pub(super) fn await_line(&self, waiters: usize) {
        await_queued(&self.server, "x", waiters);
    }

    /// All processes of this test that live.
    pub(super) fn processes(&self) -> Vec<(u32, String)> {
        let mark = format!("{MARK}={}", self.dir());
        let all = fs::read_dir("/proc").expect("no /proc").flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter_map(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let ours = environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes());
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            ours.then(|| (pid, String::from_utf8_lossy(&words).replace('\0', " ")))
        })
        .collect()
    }

    /// Tells what became of all processes if the test fails before this is dropped.
    pub(super) fn told_of(&self) -> Told<'_> {
        Told(self)
    }

    /// Waits until the lock is renewed that often.
    #[track_caller]
    pub(super) fn await_renewals(&self, times: usize) {
        let commands = self.server.monitor();
        let renewals = || commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count();
        eventually("the lock is renewed", CEILING, || renewals() >= times);
    }

    /// The process of the guardian, of which there is one.
    pub(super) fn guardian(&self) -> u32 {
        eventually_some("there is a guardian", CEILING, || {
            self.processes().into_iter().find(|(_, words)| words.contains("__guardian")).map(|(pid, _)| pid)
        })
    }

    /// No process, no lock, nobody in line.
    #[track_caller]
    pub(super) fn expect_nothing_left(&self) {
        assert_eq!(self.processes(), []);
        self.expect_no_lock();
    }

    #[track_caller]
    pub(super) fn expect_no_lock(&self) {
        assert_eq!(self.holder(), None);
        assert_eq!(self.server.query::<i64>(&["EXISTS", &queue_key("x")]), 0);
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for (pid, _) in self.processes() {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

pub(super) struct Told<'a>(&'a Scene);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for (pid, words) in self.0.processes() {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            eprintln!("{words}: {stat}");
        }
        for file in fs::read_dir(self.0.folder.path()).into_iter().flatten().flatten() {
            eprintln!("{:?}: {:?}", file.file_name(), fs::read_to_string(file.path()));
        }
    }
}

impl Job {
    /// With the streams that the command has, of which the job knows nothing.
    pub(super) fn start(mut command: Command) -> Job {
        let watchdog = Watchdog::start();
        let child = command.spawn().expect("cannot run distlock");
        watchdog.guard(child.id());
        Job { child, out: PathBuf::new(), err: PathBuf::new(), _watchdog: watchdog }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it has ended");
    }

    /// Waits for its end.
    #[track_caller]
    pub(super) fn status(&mut self) -> ExitStatus {
        let ended = || self.child.try_wait().expect("cannot wait");
        eventually_some("distlock run has ended", CEILING, ended)
    }

    #[track_caller]
    pub(super) fn code(&mut self) -> i32 {
        let status = self.status();
        // Of these it dies where tests are run at a terminal.
        let key = status.signal().filter(|signal| [Signal::INT, Signal::QUIT].map(Signal::as_raw).contains(signal));
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

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).expect("it has ended");
}

/// Whether it runs; a dead one that nobody has looked at yet does not.
pub(super) fn is_alive(pid: u32) -> bool {
    !matches!(process_state(pid), None | Some('Z'))
}

#[track_caller]
pub(super) fn await_state(pid: u32, state: char) {
    eventually(&format!("process {pid} is in state {state}"), CEILING, || process_state(pid) == Some(state));
}

/// The signals that this test and so its children do not ignore from the start, as jobs in the background of a script do.
pub(super) fn heard(signals: &[Signal]) -> Vec<Signal> {
    let status = fs::read_to_string("/proc/self/status").expect("no /proc");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("no SigIgn");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a number");
    signals.iter().copied().filter(|signal| ignored >> (signal.as_raw() - 1) & 1 == 0).collect()
}

/// The same command, where a signal is ignored from the start.
pub(super) fn ignoring(signal: &str, run: &Command) -> Command {
    through(&["sh", "-c", &format!("trap '' {signal}; exec \"$@\""), "sh"], run)
}

/// The same command, started by another one.
pub(super) fn through(starter: &[&str], run: &Command) -> Command {
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

/// So long that no lock expires in a test.
pub(super) const LONG: &str = "10m";
