//! Getting the lock, while signals are heard.

use std::{io, thread};

use crossbeam_channel::{Receiver, bounded, select};
use distlock::{ContendedEvent, HandleEvent, LockError, LockGuard, LockOptions, RedisMgr};

use super::signals;
use crate::{output, text};

/// How asking for the lock went.
#[derive(Debug)]
pub(super) enum Asked {
    Got(LockGuard),
    Not(LockError),
    /// A signal ended the wait; nothing is held, and nobody stands in line.
    Ended(i32),
}

/// Asks on a thread of its own.
pub(super) fn ask(mgr: &RedisMgr, name: &str, options: &LockOptions, heard: &Receiver<i32>) -> io::Result<Asked> {
    thread::scope(|scope| {
        let (sender, answer) = bounded(1);
        // The answer is always taken, if only to be dropped.
        let ask = move || drop(sender.send(mgr.lock_with(name, options)));
        thread::Builder::new().name("acquire".into()).spawn_scoped(scope, ask)?;
        let asked = loop {
            select! {
                recv(answer) -> answer => break match answer {
                    Ok(Ok(guard)) => Asked::Got(guard),
                    Ok(Err(error)) => Asked::Not(error),
                    Err(_) => Asked::Not(LockError::Shutdown),
                },
                recv(heard) -> signal => if let Some(signal) = signal.ok().filter(|signal| signals::ends_wait(*signal)) {
                    mgr.shutdown();
                    break Asked::Ended(signal);
                },
            }
        };
        Ok(asked)
    })
}

/// Tells people for whom they wait.
#[derive(Debug)]
pub(super) struct Telling;

impl HandleEvent for Telling {
    fn contended(&self, event: &ContendedEvent<'_>) {
        let (lock, holder) = (event.lock().escape_debug(), event.holder().to_string());
        output::say(&format!("waits for lock \"{lock}\", held by {}", text::clean(&holder)));
    }
}
