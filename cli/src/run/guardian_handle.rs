//! `GuardianHandle`: the wrapper's side of its guardian.

use std::{
    fmt,
    io::{self, PipeWriter, Write as _},
    os::unix::process::CommandExt as _,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use distlock::{AttemptedEvent, HandleEvent};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
    time::Timespec,
};

use super::message::{GuardianMessage, LockSpec};

/// First argument of a guardian process.
pub(super) const GUARDIAN_ARG: &str = "__guardian";

/// The guardian's name in process lists. It differs from the wrapper's, because `killall -9
/// distlock` must not kill the process that cleans up after such a kill.
const PROCESS_NAME: &str = "distlock-guard";

/// Maximum time for which a guardian may read nothing in the middle of a message, or before one
/// that it must not miss.
const WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// A running guardian. Dropping the handle ends it without further effect.
#[derive(Debug)]
pub(super) struct GuardianHandle {
    /// `None` once the process has been reaped.
    pid: Option<Pid>,
    writer: Arc<MessageWriter>,
}

impl GuardianHandle {
    /// Starts a guardian, away from the wrapper's terminal, process group and standard streams,
    /// except standard error, for the message that it has ended the command. The locks' names are
    /// arguments for people who read process lists.
    pub(super) fn start(names: &[&str]) -> io::Result<GuardianHandle> {
        let (reader, writer) = io::pipe()?;
        // A guardian that does not read must not block its wrapper.
        rustix::io::ioctl_fionbio(&writer, true)?;
        let child = super::own_executable(PROCESS_NAME)
            .arg(GUARDIAN_ARG)
            .arg(std::process::id().to_string())
            .args(names)
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .process_group(0)
            .spawn()?;
        Ok(GuardianHandle {
            pid: Some(Pid::from_child(&child)),
            writer: Arc::new(MessageWriter::new(writer, WRITE_STALL_TIMEOUT)),
        })
    }

    pub(super) fn send(&self, message: &GuardianMessage) {
        self.writer.send(message);
    }

    /// An event handler for the manager that requests the locks. Their ids are not known before.
    pub(super) fn acquire_reporter(&self, lock: LockSpec) -> AcquireReporter {
        AcquireReporter { writer: self.writer.clone(), lock }
    }

    /// Notes that `pid` has ended and was reaped. Returns whether it was the guardian.
    pub(super) fn note_exit(&mut self, pid: Pid) -> bool {
        if self.pid != Some(pid) {
            return false;
        }
        self.pid = None;
        log::warn!("the guardian process has ended");
        true
    }
}

impl Drop for GuardianHandle {
    fn drop(&mut self) {
        // After a panic, the guardian must intervene, which it does when the pipe is closed.
        if std::thread::panicking() {
            return;
        }
        if let Some(pid) = self.pid.take() {
            // If the process cannot be killed, it has already ended.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

#[derive(Debug)]
struct MessageWriter {
    pipe: PipeWriter,
    stall_timeout: Duration,
    /// The last message found no room. The next one does not wait for it.
    is_stalled: AtomicBool,
}

impl MessageWriter {
    fn new(pipe: PipeWriter, stall_timeout: Duration) -> MessageWriter {
        MessageWriter { pipe, stall_timeout, is_stalled: AtomicBool::new(false) }
    }

    fn send(&self, message: &GuardianMessage) {
        let Some(line) = message.to_line() else { return };
        // These are not repeated. A lock or group that it does not know, the guardian cannot end.
        let is_needed =
            matches!(message, GuardianMessage::Acquiring(_) | GuardianMessage::Started(..));
        let waits = is_needed && !self.is_stalled.load(Ordering::Relaxed);
        let result = write(&self.pipe, &line, self.stall_timeout, waits);
        self.is_stalled.store(result.is_err(), Ordering::Relaxed);
        if let Err(error) = result {
            log::warn!("the guardian does not read its messages: {error}");
        }
    }
}

/// Writes a message as a whole, or nothing of it if the pipe is full, unless it `waits`. If only a
/// part of it fits, the rest is written as the guardian reads, which may take `timeout` for each
/// part.
fn write(mut pipe: &PipeWriter, message: &[u8], timeout: Duration, waits: bool) -> io::Result<()> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    let mut rest = message;
    while !rest.is_empty() {
        match pipe.write(rest) {
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock
                    && (waits || rest.len() < message.len()) =>
            {
                let room = poll(&mut [PollFd::new(pipe, PollFlags::OUT)], Some(&timeout));
                if room == Ok(0) {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends the id of each lock to the guardian before the server can receive it.
pub(super) struct AcquireReporter {
    writer: Arc<MessageWriter>,
    lock: LockSpec,
}

impl fmt::Debug for AcquireReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireReporter").finish_non_exhaustive()
    }
}

impl HandleEvent for AcquireReporter {
    fn attempted(&self, event: &AttemptedEvent<'_>) {
        let (name, id) = (event.lock().to_owned(), event.id().to_string());
        let lock = LockSpec { name, id, ..self.lock.clone() };
        self.writer.send(&GuardianMessage::Acquiring(Box::new(lock)));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, PipeReader},
        thread,
    };

    use super::*;

    /// More than a pipe holds, which is 64 KiB at most.
    const LONG: usize = 1 << 20;
    const LIMIT: Duration = Duration::from_secs(60);

    fn pipe() -> (PipeReader, PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        (reader, writer)
    }

    /// Fault: N96
    #[test]
    fn message_longer_than_pipe_is_written_whole() {
        let (reader, writer) = pipe();
        let received = thread::spawn(|| {
            BufReader::new(reader).lines().map(|line| line.unwrap().len()).collect()
        });
        for message in ["x".repeat(LONG), "y".into()] {
            write(&writer, format!("{message}\n").as_bytes(), LIMIT, false).unwrap();
        }
        drop(writer);
        let received: Vec<_> = received.join().unwrap();
        assert_eq!(received, [LONG, 1]);
    }

    /// With many names, the ids of all locks are sent at once. The guardian has just been started.
    ///
    /// Fault: N96
    #[test]
    fn guardian_that_reads_late_misses_no_lock() {
        const LOCKS: usize = 10_000;
        let (reader, writer) = pipe();
        let full = writer.try_clone().unwrap();
        let received = thread::spawn(move || {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            while poll(&mut [PollFd::new(&full, PollFlags::OUT)], Some(&at_once)) != Ok(0) {
                thread::yield_now();
            }
            drop(full);
            BufReader::new(reader).lines().map_while(Result::ok).count()
        });
        let writer = MessageWriter::new(writer, LIMIT);
        for _ in 0..LOCKS {
            writer.send(&GuardianMessage::Started(7, Duration::ZERO));
        }
        drop(writer);
        assert_eq!(received.join().unwrap(), LOCKS);
    }

    #[test]
    fn guardian_that_does_not_read_does_not_block() {
        let (reader, writer) = pipe();
        for message in [LONG, 1] {
            let failed =
                write(&writer, "x".repeat(message).as_bytes(), Duration::ZERO, true).unwrap_err();
            assert_eq!(failed.kind(), io::ErrorKind::WouldBlock);
        }
        drop(reader);
        // A child that another test has just forked has a copy of the reader until it runs exec.
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&writer, PollFlags::OUT)], Some(&limit));
        let failed = write(&writer, b"x", LIMIT, true).unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::BrokenPipe);
    }
}
