//! Runs `distlock` as a process, with a time limit.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
};

use serde_json::Value;

use crate::support::{RedisServer, TEST_TIMEOUT, Watchdog, eventually_some};

/// A process that has ended: its exit code and output.
#[derive(Debug)]
pub(crate) struct Finished {
    /// `None` when a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A running process. It is killed on drop.
pub(crate) struct Running {
    child: Child,
    readers: Vec<JoinHandle<String>>,
    _watchdog: Watchdog,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command, without environment variables that could name a server.
pub(crate) fn distlock(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distlock"));
    let ours = [
        "REDIS_URL",
        "DISTLOCK_URL",
        "DISTLOCK_PASSWORD_FILE",
        "DISTLOCK_PREFIX",
        "DISTLOCK_TABLE",
        "DISTLOCK_QUARANTINE",
        "DISTLOCK_LOG",
    ];
    for name in ours {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// The same for this server, with a timeout long enough for a slow machine.
pub(crate) fn distlock_at(server: &RedisServer, args: &[&str]) -> Command {
    distlock_at_url(&server.url(), args)
}

pub(crate) fn distlock_at_url(url: &str, args: &[&str]) -> Command {
    let mut command = distlock(args);
    command.args(["--timeout", "20s"]).env("DISTLOCK_URL", url);
    command
}

pub(crate) fn start(mut command: Command) -> Running {
    let watchdog = Watchdog::start();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    watchdog.guard(child.id());
    let streams =
        (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"));
    let readers = vec![thread::spawn(|| read(streams.0)), thread::spawn(|| read(streams.1))];
    Running { child, readers, _watchdog: watchdog }
}

/// Runs the command to its end.
#[track_caller]
pub(crate) fn run_to_end(command: Command) -> Finished {
    start(command).wait()
}

/// Runs the command, and parses the JSON that it prints.
#[track_caller]
pub(crate) fn run_for_json(command: Command) -> (Value, Finished) {
    let ended = run_to_end(command);
    let value = serde_json::from_str(&ended.out)
        .unwrap_or_else(|error| panic!("no JSON ({error}): {ended:?}"));
    (value, ended)
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> Finished {
        let status = eventually_some("the command ends", TEST_TIMEOUT, || {
            self.child.try_wait().expect("cannot wait")
        });
        let mut readers =
            self.readers.drain(..).map(|thread| thread.join().expect("a reader panicked"));
        let (out, err) = (readers.next().unwrap_or_default(), readers.next().unwrap_or_default());
        drop(readers);
        Finished { code: status.code(), out, err }
    }
}

impl Finished {
    /// Checks the exit code.
    #[track_caller]
    pub(crate) fn expect_code(self, code: i32) -> Finished {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
        self
    }

    /// Checks that the output is one line on standard error, which contains this text.
    #[track_caller]
    pub(crate) fn expect_error(self, part: &str) -> Finished {
        assert!(self.out.is_empty(), "{self:?}");
        assert!(self.err.starts_with("distlock: ") && self.err.lines().count() == 1, "{self:?}");
        assert!(self.err.contains(part), "{part:?} is not in {self:?}");
        self
    }
}

fn read(mut stream: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
