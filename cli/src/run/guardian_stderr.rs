//! `GuardianStderr`: the standard error of the wrapper, for the one message of its guardian.
//!
//! A write may block for as long as nobody reads, so a thread of its own writes the message. It is
//! no problem if the message is lost: the guardian's work comes first.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::fd::AsFd as _,
    thread,
};

use crossbeam_channel::{Receiver, bounded};

use crate::{format, stderr_writer::EXIT_FLUSH_TIMEOUT};

#[derive(Debug)]
pub(super) struct GuardianStderr {
    /// `None` once it is used or closed.
    file: Option<File>,
    /// Disconnected when the message is written.
    written: Option<Receiver<()>>,
}

impl GuardianStderr {
    /// Moves standard error here, so that nothing else of this process can write to it or keep it
    /// open. The reader of a pipe must not wait for the guardian for longer than necessary.
    pub(super) fn take() -> GuardianStderr {
        let copy = io::stderr().as_fd().try_clone_to_owned();
        let null = OpenOptions::new().write(true).open("/dev/null");
        let replaced = null.is_ok_and(|null| rustix::stdio::dup2_stderr(null).is_ok());
        let file = copy.ok().filter(|_| replaced).map(File::from);
        GuardianStderr { file, written: None }
    }

    /// Writes a message, unless there was one before.
    pub(super) fn report(&mut self, sentence: &str) {
        let Some(mut file) = self.file.take() else { return };
        let line = format!("distlock-guard: {}\n", format::escape(sentence));
        let (sender, written) = bounded(0);
        let write = move || {
            let _: Result<(), io::Error> = file.write_all(line.as_bytes());
            drop::<crossbeam_channel::Sender<()>>(sender);
        };
        if thread::Builder::new().name("stderr".into()).spawn(write).is_ok() {
            self.written = Some(written);
        }
    }

    /// Gives up standard error, unless a message is being written.
    pub(super) fn close(&mut self) {
        self.file = None;
    }
}

impl Drop for GuardianStderr {
    /// Waits for the message, for a limited time.
    fn drop(&mut self) {
        if let Some(written) = self.written.take() {
            let _ = written.recv_timeout(EXIT_FLUSH_TIMEOUT);
        }
    }
}
