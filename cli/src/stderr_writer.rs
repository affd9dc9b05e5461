//! `StderrWriter`: writes to standard error on a thread of its own, so that a full pipe or a
//! stopped terminal delays only that thread.

use std::{
    io::{self, Write},
    sync::OnceLock,
    thread,
    time::Duration,
};

use crossbeam_channel::{Sender, bounded};
use nix::sys::signal::SigSet;

/// Maximum number of messages that wait for the writer thread. Further ones are dropped.
const QUEUED_MESSAGES_MAX: usize = 1_024;

/// Maximum time that the end of the program waits for unwritten messages. It is bounded because
/// another process may wait for this one to end.
pub(crate) const EXIT_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

static QUEUE: OnceLock<Sender<Message>> = OnceLock::new();

enum Message {
    Text(Vec<u8>),
    /// Sent back through this channel once all earlier messages are written.
    Flush(Sender<()>),
}

/// Starts the writer thread, so that printing a message no longer blocks. If the system cannot
/// start a thread, messages are written directly, as before.
pub(crate) fn start_thread() {
    let (queue, messages) = bounded(QUEUED_MESSAGES_MAX);
    let write_all = move || {
        // If the process is not in the terminal's foreground, SIGTTOU would stop all of it.
        let _ = SigSet::all().thread_block();
        for message in messages {
            match message {
                Message::Text(text) => drop(io::stderr().write_all(&text)),
                Message::Flush(written) => drop(written.try_send(())),
            }
        }
    };
    if thread::Builder::new().name("stderr".into()).spawn(write_all).is_ok() {
        let _ = QUEUE.set(queue);
    }
}

/// Waits until all messages so far are written, for about `timeout` at most.
pub(crate) fn flush(timeout: Duration) {
    let Some(queue) = QUEUE.get() else { return };
    let (sender, written) = bounded(1);
    if queue.send_timeout(Message::Flush(sender), timeout).is_ok() {
        let _ = written.recv_timeout(timeout);
    }
}

/// Standard error. Writes each buffer in one piece, and ignores errors, because there is no other
/// place to report them.
#[derive(Debug)]
pub(crate) struct StderrWriter;

impl Write for StderrWriter {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        match QUEUE.get() {
            Some(queue) => drop(queue.try_send(Message::Text(piece.to_vec()))),
            None => drop(io::stderr().write_all(piece)),
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
