//! `MessageReader`: receives the wrapper's messages in the guardian. A timeout is reported only
//! after all messages in the pipe have been read: a guardian that did not run for a while finds its
//! deadline passed, but the pipe may hold the messages that came in time.

use std::{os::fd::AsFd, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, read},
    time::Timespec,
};

use super::message::GuardianMessage;
use crate::clock;

#[derive(Debug)]
pub(super) struct MessageReader<P> {
    pipe: P,
    /// Bytes that do not form a whole line yet.
    buffer: Vec<u8>,
}

pub(super) enum Received {
    Message(GuardianMessage),
    /// No message came in time.
    Timeout,
    /// The wrapper has ended.
    Closed,
}

impl<P: AsFd> MessageReader<P> {
    pub(super) fn new(pipe: P) -> MessageReader<P> {
        MessageReader { pipe, buffer: Vec::new() }
    }

    /// Returns the next message. Waits for it until `until`, a time since boot.
    pub(super) fn next_message(&mut self, until: Option<Duration>) -> Received {
        loop {
            while let Some(line) = self.take_line() {
                if let Some(message) =
                    std::str::from_utf8(&line).ok().and_then(GuardianMessage::parse)
                {
                    return Received::Message(message);
                }
            }
            // Taken before the pipe is polled: what arrives during the poll must still be read.
            let left = until.map(|at| clock::time_to_next_check(at, clock::since_boot()));
            match self.fill(left) {
                Ok(0) if left == Some(Duration::ZERO) => return Received::Timeout,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return Received::Closed,
            }
        }
    }

    fn take_line(&mut self) -> Option<Vec<u8>> {
        let end = self.buffer.iter().position(|byte| *byte == b'\n')?;
        Some(self.buffer.drain(..=end).collect())
    }

    /// Reads what is there into the buffer, and returns how much; waits up to `left` for it.
    fn fill(&mut self, left: Option<Duration>) -> Result<usize, Errno> {
        let timer = left.map(Timespec::try_from).transpose().map_err(|_| Errno::INVAL)?;
        if poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], timer.as_ref())? == 0 {
            return Ok(0);
        }
        let mut part = [0; 4096];
        match read(&self.pipe, &mut part)? {
            0 => Err(Errno::PIPE),
            more => {
                self.buffer.extend(&part[..more]);
                Ok(more)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, PipeWriter, Write as _};

    use super::*;

    /// A deadline that has long passed.
    const PASSED: Option<Duration> = Some(Duration::ZERO);

    /// All messages that a reader receives until its deadline or until the pipe is closed, and
    /// whether it was closed.
    fn receive(
        until: Option<Duration>,
        write: impl FnOnce(PipeWriter) -> Option<PipeWriter>,
    ) -> (Vec<u64>, bool) {
        let (pipe, writer) = io::pipe().unwrap();
        let _open = write(writer);
        let mut reader = MessageReader::new(pipe);
        let mut received = Vec::new();
        loop {
            match reader.next_message(until) {
                Received::Message(GuardianMessage::HeldUntil(at)) => received.push(at.as_secs()),
                Received::Message(_) => unreachable!("no other message was sent"),
                Received::Timeout => return (received, false),
                Received::Closed => return (received, true),
            }
        }
    }

    fn send(mut pipe: &PipeWriter, at: u64) {
        pipe.write_all(&GuardianMessage::HeldUntil(Duration::from_secs(at)).to_line().unwrap())
            .unwrap();
    }

    /// Fault: N118
    #[test]
    fn all_messages_are_received_before_timeout() {
        let write = |pipe: PipeWriter| {
            (0..500).for_each(|at| send(&pipe, at));
            Some(pipe)
        };
        assert_eq!(receive(PASSED, write), ((0..500).collect(), false));
        assert_eq!(receive(PASSED, Some), (vec![], false));
    }

    #[test]
    fn all_messages_are_received_before_close() {
        let write = |pipe: PipeWriter| {
            (0..500).for_each(|at| send(&pipe, at));
            (&pipe).write_all(b"half").unwrap();
            None
        };
        // No deadline: a process that another test is starting has the writer until its `exec`.
        assert_eq!(receive(None, write), ((0..500).collect(), true));
    }

    #[test]
    fn malformed_messages_are_skipped() {
        let write = |pipe: PipeWriter| {
            (&pipe).write_all(b"{\n\xff\n\n").unwrap();
            send(&pipe, 7);
            (&pipe).write_all(b"half").unwrap();
            Some(pipe)
        };
        assert_eq!(receive(PASSED, write), (vec![7], false));
    }
}
