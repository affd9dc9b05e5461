//! The guardian, seen from the wrapper: a process that ends the command and gives its lock up if the wrapper is killed.

use std::{
    fmt,
    io::{self, PipeWriter, Write as _},
    os::unix::process::CommandExt as _,
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use distlock::{AttemptedEvent, HandleEvent};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
    time::Timespec,
};

use super::word::{Lock, Word};

/// The first argument of a process that is a guardian.
pub(super) const STEP: &str = "__guardian";

/// Not that of the wrapper: who ends all processes of that name, by SIGKILL, shall not end the one that is there for this.
const NAME: &str = "distlock-guard";

/// For how long a guardian may read nothing in the middle of a word.
const PATIENCE: Duration = Duration::from_secs(1);

/// Has nothing to do, and is ended, when this is dropped.
#[derive(Debug)]
pub(super) struct Guardian {
    /// Empty once it has been reaped.
    pid: Option<Pid>,
    line: Arc<Line>,
}

impl Guardian {
    /// Away from the wrapper's terminal, process group and standard streams. The name of the lock is for people who list
    /// processes.
    pub(super) fn start(name: &str) -> io::Result<Guardian> {
        let (reader, line) = io::pipe()?;
        // A guardian that does not read must not hold its wrapper up.
        rustix::io::ioctl_fionbio(&line, true)?;
        let child = super::own_program(NAME)
            .arg(STEP)
            .arg(name)
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Guardian { pid: Some(Pid::from_child(&child)), line: Arc::new(Line(line)) })
    }

    pub(super) fn tell(&self, word: &Word) {
        self.line.tell(word);
    }

    /// For the manager that asks for the lock, of which all but the identifier is known before.
    pub(super) fn asking(&self, lock: Lock) -> Asking {
        Asking { line: self.line.clone(), lock }
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

#[derive(Debug)]
struct Line(PipeWriter);

impl Line {
    fn tell(&self, word: &Word) {
        let Some(line) = word.line() else { return };
        if let Err(error) = write(&self.0, &line, PATIENCE) {
            log::warn!("the guardian does not listen: {error}");
        }
    }
}

/// Writes all of a word or, where there is no room, nothing of it. The rest of one that has no room as a whole is read while it
/// is written; for each part of it there is `patience`.
fn write(mut pipe: &PipeWriter, word: &[u8], patience: Duration) -> io::Result<()> {
    let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
    let mut rest = word;
    while !rest.is_empty() {
        match pipe.write(rest) {
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && rest.len() < word.len() => {
                let room = poll(&mut [PollFd::new(pipe, PollFlags::OUT)], Some(&patience));
                if room == Ok(0) {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Tells the guardian under which identifier the lock is asked for, before the server can hear of it.
pub(super) struct Asking {
    line: Arc<Line>,
    lock: Lock,
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").finish_non_exhaustive()
    }
}

impl HandleEvent for Asking {
    fn attempted(&self, event: &AttemptedEvent<'_>) {
        let lock = Lock { id: event.id().to_string(), ..self.lock.clone() };
        self.line.tell(&Word::Asking(Box::new(lock)));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, PipeReader},
        thread,
    };

    use super::*;

    /// The room is 64 KiB where there is no shortage.
    const LONG: usize = 1 << 20;

    fn pipe() -> (PipeReader, PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        (reader, writer)
    }

    #[test]
    fn words_that_are_longer_than_the_pipe_has_room_for_are_heard() {
        let (reader, writer) = pipe();
        let heard = thread::spawn(|| BufReader::new(reader).lines().map(|line| line.unwrap().len()).collect());
        for word in ["x".repeat(LONG), "y".into()] {
            write(&writer, format!("{word}\n").as_bytes(), Duration::from_secs(60)).unwrap();
        }
        drop(writer);
        let heard: Vec<_> = heard.join().unwrap();
        assert_eq!(heard, [LONG, 1]);
    }

    #[test]
    fn a_guardian_that_does_not_read_holds_nobody_up() {
        let (reader, writer) = pipe();
        for word in [LONG, 1] {
            let failed = write(&writer, "x".repeat(word).as_bytes(), Duration::ZERO).unwrap_err();
            assert_eq!(failed.kind(), io::ErrorKind::WouldBlock);
        }
        drop(reader);
        let failed = write(&writer, b"x", Duration::from_secs(60)).unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::BrokenPipe);
    }
}
