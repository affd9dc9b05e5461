//! `Voice`: standard error behind a thread of its own. Who reads it slowly, or not at all, holds up that thread and nobody else:
//! a pipe can be full, and a terminal stopped.

use std::{
    io::{self, Write},
    sync::OnceLock,
    thread,
    time::Duration,
};

use crossbeam_channel::{Sender, bounded};
use nix::sys::signal::SigSet;

/// What does not fit is dropped.
const ROOM: usize = 1_024;

/// For how long the end of this program waits for who reads. Somebody may wait for that end, so it is not for ever.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(2);

static VOICE: OnceLock<Sender<Said>> = OnceLock::new();

enum Said {
    Text(Vec<u8>),
    /// Somebody waits until all before this is written.
    Awaited(Sender<()>),
}

/// From now on nobody who says something waits until it is read. Where the system gives no thread all stays as it was.
pub(crate) fn begin() {
    let (queue, said) = bounded(ROOM);
    let speak = move || {
        // A terminal would stop the whole process if this wrote to it without having its foreground.
        let _ = SigSet::all().thread_block();
        for said in said {
            match said {
                Said::Text(text) => drop(io::stderr().write_all(&text)),
                Said::Awaited(written) => drop(written.try_send(())),
            }
        }
    };
    if thread::Builder::new().name("voice".into()).spawn(speak).is_ok() {
        let _ = VOICE.set(queue);
    }
}

/// Returns when all that was said is written, or when that has taken too long: about `patience`.
pub(crate) fn await_written(patience: Duration) {
    let Some(queue) = VOICE.get() else { return };
    let (sender, written) = bounded(1);
    if queue.send_timeout(Said::Awaited(sender), patience).is_ok() {
        let _ = written.recv_timeout(patience);
    }
}

/// Standard error, with or without the thread. Each piece is written as one. Who closed it does not want to know.
#[derive(Debug)]
pub(crate) struct Voice;

impl Write for Voice {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        match VOICE.get() {
            Some(queue) => drop(queue.try_send(Said::Text(piece.to_vec()))),
            None => drop(io::stderr().write_all(piece)),
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
