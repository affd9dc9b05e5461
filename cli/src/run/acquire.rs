//! Acquires the lock, while signals can end the wait.

use std::{io, thread};

use crossbeam_channel::{Receiver, bounded, select};
use distlock::{ContendedEvent, HandleEvent, LockError, LockGuard, LockManager, LockOptions};

use super::signals;
use crate::{args::Permits, format, output};

/// How the attempt to acquire the lock ended.
#[derive(Debug)]
pub(super) enum AcquireResult {
    Acquired(LockGuard),
    Failed(LockError),
    /// A signal ended the wait. The lock is not held, and its queue entry is removed.
    Interrupted(i32),
}

/// The lock that the command needs.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) name: &'a str,
    pub(super) shared: bool,
    pub(super) permits: Option<Permits>,
    pub(super) options: LockOptions,
}

impl Request<'_> {
    fn send(&self, mgr: &dyn LockManager) -> Result<LockGuard, LockError> {
        match self.permits {
            Some(Permits { count, limit }) => mgr
                .semaphore(self.name, limit)?
                .acquire_with(count, &self.options)
                .map(LockGuard::from),
            None if self.shared => {
                mgr.rw_lock(self.name)?.read_with(&self.options).map(LockGuard::from)
            }
            None => mgr.lock_with(self.name, &self.options),
        }
    }
}

/// Acquires the lock on a thread of its own.
pub(super) fn acquire(
    mgr: &dyn LockManager,
    request: &Request<'_>,
    received: &Receiver<i32>,
) -> io::Result<AcquireResult> {
    thread::scope(|scope| {
        let (sender, results) = bounded(1);
        // The channel has room for the one result, so sending it never blocks.
        let lock = move || drop(sender.send(request.send(mgr)));
        thread::Builder::new().name("acquire".into()).spawn_scoped(scope, lock)?;
        let result = loop {
            select! {
                recv(results) -> result => break match result {
                    Ok(Ok(guard)) => AcquireResult::Acquired(guard),
                    Ok(Err(error)) => AcquireResult::Failed(error),
                    Err(_) => AcquireResult::Failed(LockError::Shutdown),
                },
                recv(received) -> signal => if let Ok(signal) = signal
                    && signals::is_forwarded(signal)
                {
                    mgr.shutdown();
                    break AcquireResult::Interrupted(signal);
                },
            }
        };
        Ok(result)
    })
}

/// Reports which holder the command waits for.
#[derive(Debug)]
pub(super) struct WaitReporter;

impl HandleEvent for WaitReporter {
    fn contended(&self, event: &ContendedEvent<'_>) {
        let (lock, holder) = (event.lock().escape_debug(), event.holder().to_string());
        output::print_message(&format!(
            "waiting for lock \"{lock}\", held by {}",
            format::escape(&holder)
        ));
    }
}
