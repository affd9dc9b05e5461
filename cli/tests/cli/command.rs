//! `distlock` as a process that is waited for, with a ceiling, and never outlives its test.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
};

use serde_json::Value;

use crate::support::{CEILING, RedisServer, Watchdog, eventually_some};

/// How it ended, and all that it said.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` when a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A process that runs; it is killed when dropped.
pub(crate) struct Running {
    child: Child,
    heard: Vec<JoinHandle<String>>,
    _watchdog: Watchdog,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command without anything in its environment that could tell it of a server.
pub(crate) fn distlock(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distlock"));
    let ours = [
        "REDIS_URL",
        "DISTLOCK_URL",
        "DISTLOCK_PASSWORD_FILE",
        "DISTLOCK_PREFIX",
        "DISTLOCK_QUARANTINE",
        "DISTLOCK_LOG",
    ];
    for name in ours {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// The same with all that it needs to work with this server, however slow the machine.
pub(crate) fn at(server: &RedisServer, args: &[&str]) -> Command {
    at_url(&server.url(), args)
}

pub(crate) fn at_url(url: &str, args: &[&str]) -> Command {
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
    let streams = (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"));
    let heard = vec![thread::spawn(|| read(streams.0)), thread::spawn(|| read(streams.1))];
    Running { child, heard, _watchdog: watchdog }
}

/// Runs it to its end.
#[track_caller]
pub(crate) fn run(command: Command) -> Ended {
    start(command).wait()
}

/// Runs it, and reads the JSON that it must have printed.
#[track_caller]
pub(crate) fn json(command: Command) -> (Value, Ended) {
    let ended = run(command);
    let value = serde_json::from_str(&ended.out).unwrap_or_else(|error| panic!("no JSON ({error}): {ended:?}"));
    (value, ended)
}

impl Running {
    #[track_caller]
    pub(crate) fn wait(mut self) -> Ended {
        let status = eventually_some("the command ends", CEILING, || self.child.try_wait().expect("cannot wait"));
        let mut heard = self.heard.drain(..).map(|thread| thread.join().expect("a reader panicked"));
        let (out, err) = (heard.next().unwrap_or_default(), heard.next().unwrap_or_default());
        drop(heard);
        Ended { code: status.code(), out, err }
    }
}

impl Ended {
    /// It must have ended like this.
    #[track_caller]
    pub(crate) fn with(self, code: i32) -> Ended {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
        self
    }

    /// It must have said this on standard error, in one sentence, and nothing on standard output.
    #[track_caller]
    pub(crate) fn only_says(self, part: &str) -> Ended {
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
