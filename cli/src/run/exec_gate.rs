//! The gate: starts a command in such a way that it runs only once the guardian knows about it.
//!
//! If the wrapper started the command itself and was killed before it reported that, nothing would
//! end the command. So the wrapper starts this program again, as a gate. The gate waits for a byte
//! on a pipe, and then becomes the command. If the pipe is closed instead, the gate ends.

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

use super::kill::ProcessGroup;
use crate::{
    exit::{Exit, Failure, Outcome},
    format,
};

/// First argument of a gate process.
pub(super) const GATE_ARG: &str = "__gate";

const OPEN_BYTE: u8 = b'!';

/// Where a process finds its own descriptors. A minimal `/dev` may lack the link to them; `/proc`
/// is there, because this program was started through it.
const FD_DIR: &str = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };

/// A process that will become the command.
#[derive(Debug)]
pub(super) struct ExecGate {
    pub(super) pid: Pid,
    opener: PipeWriter,
}

impl ExecGate {
    /// Starts a gate as the leader of a new process group.
    pub(super) fn start(
        command: &[OsString],
        environment: &[(&str, String)],
    ) -> io::Result<ExecGate> {
        let (reader, opener) = io::pipe()?;
        // The gate inherits this descriptor besides the standard streams.
        fcntl_setfd(&reader, FdFlags::empty())?;
        let child = super::own_executable("distlock")
            .arg(GATE_ARG)
            .arg(reader.as_raw_fd().to_string())
            .args(command)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .spawn()?;
        Ok(ExecGate { pid: Pid::from_child(&child), opener })
    }

    pub(super) fn group(&self) -> ProcessGroup {
        ProcessGroup(self.pid)
    }

    /// Lets the gate become the command. If it has died meanwhile, SIGCHLD reports that.
    pub(super) fn open(mut self) {
        let _ = self.opener.write_all(&[OPEN_BYTE]);
    }

    /// Kills the gate instead.
    pub(super) fn abort(self) {
        self.group().send(&[Signal::KILL]);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// Runs the gate. Returns only if the command cannot be started.
pub(super) fn gate_main(mut arguments: impl Iterator<Item = OsString>) -> Outcome {
    let pipe_fd = arguments.next().and_then(|number| number.to_str()?.parse::<RawFd>().ok());
    let (Some(pipe_fd), Some(program)) = (pipe_fd, arguments.next()) else {
        return Err(Failure::usage("this argument is internal to distlock run"));
    };
    match wait_until_opened(pipe_fd) {
        Ok(true) => {}
        Ok(false) => return Ok(Exit::CannotRun),
        // The failure says nothing about the command itself.
        Err(error) => {
            let why = format!(
                "cannot learn when to start {}: {error}",
                format::escape(&program.to_string_lossy())
            );
            return Err(Failure::new(Exit::CannotRun, why));
        }
    }
    Err(exec_failure(&program, &Command::new(&program).args(arguments).exec()))
}

fn wait_until_opened(pipe_fd: RawFd) -> io::Result<bool> {
    let mut pipe = File::open(format!("{FD_DIR}/{pipe_fd}"))?;
    // The command must not inherit it.
    nix::unistd::close(pipe_fd)?;
    let mut byte = [0];
    Ok(pipe.read(&mut byte)? == 1 && byte[0] == OPEN_BYTE)
}

/// Whether the program exists, so that it is its interpreter that was not found.
fn exists(program: &OsStr) -> bool {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).is_file();
    }
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

fn exec_failure(program: &OsStr, error: &io::Error) -> Failure {
    let name = format::escape(&program.to_string_lossy());
    match error.kind() {
        ErrorKind::NotFound if exists(program) => Failure::new(
            Exit::CannotRun,
            format!(
                "cannot run {name}: its interpreter is missing; check its first line, which begins \
                 with #!"
            ),
        ),
        ErrorKind::NotFound if program.is_empty() => Failure::new(
            Exit::NotFound,
            "cannot run the command: its name is empty; write one after --",
        ),
        ErrorKind::NotFound => Failure::new(
            Exit::NotFound,
            format!("cannot run {name}: command not found; check its name and PATH"),
        ),
        ErrorKind::PermissionDenied => Failure::new(
            Exit::CannotRun,
            format!("cannot run {name}: permission denied; check that it is executable"),
        ),
        _ => Failure::new(Exit::CannotRun, format!("cannot run {name}: {error}")),
    }
}
