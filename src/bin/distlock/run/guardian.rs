//! The guardian, seen from the wrapper: a process that ends the command and gives its lock up if the wrapper is killed.

use std::{
    io::{self, PipeWriter, Write as _},
    os::unix::process::CommandExt as _,
    process::Stdio,
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::word::Word;

/// The first argument of a process that is a guardian.
pub(super) const STEP: &str = "__guardian";

/// Has nothing to do, and is ended, when this is dropped.
#[derive(Debug)]
pub(super) struct Guardian {
    /// Empty once it has been reaped.
    pid: Option<Pid>,
    line: PipeWriter,
}

impl Guardian {
    /// Away from the wrapper's terminal, process group and standard streams. The name of the lock is for people who list
    /// processes.
    pub(super) fn start(name: &str) -> io::Result<Guardian> {
        let (reader, line) = io::pipe()?;
        // A guardian that does not read must not hold its wrapper up.
        rustix::io::ioctl_fionbio(&line, true)?;
        let child = super::own_program()
            .arg(STEP)
            .arg(name)
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Guardian { pid: Some(Pid::from_child(&child)), line })
    }

    pub(super) fn tell(&mut self, word: &Word) {
        let Some(line) = word.line() else { return };
        if let Err(error) = self.line.write_all(&line) {
            log::warn!("the guardian does not listen: {error}");
        }
    }

    /// Somebody else has found out that this process has ended.
    pub(super) fn has_ended(&mut self, pid: Pid) -> bool {
        if self.pid != Some(pid) {
            return false;
        }
        self.pid = None;
        log::warn!("the guardian has been ended");
        true
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        // After a panic it is needed: it steps in when the pipe is closed.
        if std::thread::panicking() {
            return;
        }
        if let Some(pid) = self.pid.take() {
            // What cannot be killed has ended by itself.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}
