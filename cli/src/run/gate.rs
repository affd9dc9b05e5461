//! The gate: how a command is started so that it runs only once its guardian knows of it.
//!
//! A process that is killed between starting a command and telling of it would leave a command that nobody knows. So
//! what is started is this program again. It waits for a word on a pipe, and then becomes the command; if the pipe
//! ends without the word, it ends too.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, ErrorKind, PipeWriter, Read as _, Write as _},
    os::{
        fd::{AsRawFd as _, RawFd},
        unix::{ffi::OsStrExt as _, process::CommandExt as _},
    },
    path::Path,
    process::Command,
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, Signal, WaitOptions, waitpid},
};

use super::process::Group;
use crate::{
    exit::{Exit, Failure, Outcome},
    text,
};

/// The first argument of a process that is a gate.
pub(super) const STEP: &str = "__gate";

const WORD: u8 = b'!';

/// Where our own are. A `/dev` of few devices may lack the way there; where this program is started from is beside them.
const DESCRIPTORS: &str = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };

/// A process that will be the command.
#[derive(Debug)]
pub(super) struct Gate {
    pub(super) pid: Pid,
    latch: PipeWriter,
}

impl Gate {
    /// In a process group of its own, which it leads.
    pub(super) fn start(command: &[OsString], environment: &[(&str, String)]) -> io::Result<Gate> {
        let (reader, latch) = io::pipe()?;
        // The one descriptor that it inherits besides the standard streams.
        fcntl_setfd(&reader, FdFlags::empty())?;
        let child = super::own_program("distlock")
            .arg(STEP)
            .arg(reader.as_raw_fd().to_string())
            .args(command)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .spawn()?;
        Ok(Gate { pid: Pid::from_child(&child), latch })
    }

    pub(super) fn group(&self) -> Group {
        Group(self.pid)
    }

    /// Lets the command begin. If the process has gone meanwhile, its end will be heard of.
    pub(super) fn open(mut self) {
        let _ = self.latch.write_all(&[WORD]);
    }

    /// There will be no command.
    pub(super) fn close(self) {
        self.group().send(&[Signal::KILL]);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// The other side: does not return when all goes well.
pub(super) fn step(mut arguments: impl Iterator<Item = OsString>) -> Outcome {
    let latch = arguments.next().and_then(|number| number.to_str()?.parse::<RawFd>().ok());
    let (Some(latch), Some(program)) = (latch, arguments.next()) else {
        return Err(Failure::usage("this is for the inside of distlock run"));
    };
    match is_opened(latch) {
        Ok(true) => {}
        Ok(false) => return Ok(Exit::CannotRun),
        // Not for want of the command.
        Err(error) => {
            let why = format!("cannot hear when {} is to begin: {error}", text::clean(&program.to_string_lossy()));
            return Err(Failure::new(Exit::CannotRun, why));
        }
    }
    Err(cannot_run(&program, &Command::new(&program).args(arguments).exec()))
}

fn is_opened(latch: RawFd) -> io::Result<bool> {
    let mut pipe = File::open(format!("{DESCRIPTORS}/{latch}"))?;
    // The command shall not inherit it.
    nix::unistd::close(latch)?;
    let mut word = [0];
    Ok(pipe.read(&mut word)? == 1 && word[0] == WORD)
}

/// Whether it is something else that was not found.
fn is_there(program: &OsStr) -> bool {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).is_file();
    }
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

fn cannot_run(program: &OsStr, error: &io::Error) -> Failure {
    let name = text::clean(&program.to_string_lossy());
    match error.kind() {
        ErrorKind::NotFound if is_there(program) => Failure::new(
            Exit::CannotRun,
            format!("cannot run {name}: its interpreter is missing; check the line in it that begins with #!"),
        ),
        ErrorKind::NotFound => Failure::new(
            Exit::NotFound,
            format!("cannot run {name}: there is no such command; check its name and PATH"),
        ),
        ErrorKind::PermissionDenied => {
            Failure::new(Exit::CannotRun, format!("cannot run {name}: it may not be executed; check its permissions"))
        }
        _ => Failure::new(Exit::CannotRun, format!("cannot run {name}: {error}")),
    }
}
