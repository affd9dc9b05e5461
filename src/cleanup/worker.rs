//! The thread that cleans up.
//!
//! Invariant: an entry that is taken from the queue is cleaned up, has expired, is put back, or is
//! dropped after a panic. After a shutdown, what is left expires.

use std::{fmt, slice, sync::Arc, time::Duration};

use super::{Shared, Step, queue::Cleanup};
use crate::{
    backend::{Backend, CleanupLimits, ResidueCleaner, error::BackendError},
    sys::{
        clock::{self, Moment},
        display::Quoted,
        logging::isolate_panic,
    },
};

/// Maximum number of entries that are cleaned up together.
const BATCH_MAX: usize = 32;
/// Maximum number of locks named in one message.
const NAMES_MAX: usize = 10;
/// Time without work after which the thread ends.
const IDLE_MAX: Duration = Duration::from_secs(1);

pub(super) struct Worker {
    backend: Arc<dyn Backend>,
    shared: Arc<Shared>,
    cleaner: Box<dyn ResidueCleaner + Send>,
}

impl Worker {
    pub(super) fn new(backend: Arc<dyn Backend>, shared: Arc<Shared>) -> Worker {
        Worker { cleaner: backend.clone().residue_cleaner(), backend, shared }
    }

    pub(super) fn run(mut self) {
        while let Some(step) = self.shared.next_step(BATCH_MAX, IDLE_MAX) {
            match step {
                Step::CleanUp(due) => self.clean_up(due),
                Step::ReportOverflow => log_safely!(
                    warn,
                    "the clean-up queue is full; some abandoned locks are left to expire"
                ),
                Step::Drain(cleanups, deadline) => {
                    self.drain(cleanups, deadline);
                    // Closed before the end of this thread is reported.
                    self.cleaner.close();
                }
            }
        }
    }

    /// Tries each entry once. Entries that fail are retried later.
    fn clean_up(&mut self, due: Vec<(Cleanup, u32)>) {
        let (mut cleanups, failures): (Vec<_>, Vec<_>) = due.into_iter().unzip();
        let shared = self.shared.clone();
        // The time that remains after the shutdown began is needed to release what is held.
        let is_shutting_down = || shared.is_shutting_down();
        let error = self.try_each(&mut cleanups, CleanupLimits::Unless(&is_shutting_down));
        let mut left: Vec<_> = cleanups.into_iter().zip(failures).collect();
        left.retain(|(cleanup, _)| !cleanup.residue.is_empty());
        // As at a shutdown: what a minority of several nodes keeps is in nobody's way.
        let keeps_others_out = |cleanup: &Cleanup| {
            cleanup.released.is_some() && self.backend.excludes_others(&cleanup.residue)
        };
        let mut releases =
            left.iter().filter(|(cleanup, failures)| *failures == 0 && keeps_others_out(cleanup));
        if let (Some(error), Some((cleanup, _))) = (&error, releases.next()) {
            let name = Quoted(cleanup.claim.key.name());
            match releases.count() {
                0 => log_safely!(warn, "could not release lock {name} yet, still trying: {error}"),
                more => log_safely!(
                    warn,
                    "could not release lock {name} and {more} more yet, still trying: {error}"
                ),
            }
        } else if let (Some(error), Some((cleanup, _))) = (error, left.first()) {
            let name = Quoted(cleanup.claim.key.name());
            log_safely!(debug, "could not clean up lock {name} yet: {error}");
        }
        let now = clock::now();
        let queue = &mut self.shared.state.lock().queue;
        left.into_iter().for_each(|(cleanup, failures)| queue.retry_later(cleanup, failures, now));
    }

    /// Cleans up at a shutdown. A second pass makes up for lost replies and for connections that
    /// were closed meanwhile.
    fn drain(&mut self, mut remaining: Vec<Cleanup>, deadline: Moment) {
        let mut error = None;
        for _ in 0..2 {
            error = self.try_each(&mut remaining, CleanupLimits::HalfUntil(deadline)).or(error);
            remaining.retain(|cleanup| !cleanup.residue.is_empty());
        }
        // What a minority of several nodes keeps is in nobody's way, except on the queue node.
        remaining.retain(|cleanup| self.backend.excludes_others(&cleanup.residue));
        if !remaining.is_empty() {
            let why = error.map_or_else(
                || "some replies did not come in time".into(),
                |error| error.to_string(),
            );
            let mut names: Vec<_> =
                remaining.iter().map(|cleanup| cleanup.claim.key.name()).collect();
            names.sort_unstable();
            log_safely!(
                warn,
                "could not release {} locks at shutdown ({}): {why}; they are left to expire",
                remaining.len(),
                NameList(names)
            );
        }
    }

    /// Tries each entry once. After a panic, tries each on its own, and drops the one that panics:
    /// it would panic at every try and disturb the others.
    fn try_each(
        &mut self,
        cleanups: &mut [Cleanup],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        if let Some(error) = self.try_together(cleanups, limits) {
            return error;
        }
        let mut error = None;
        for one in cleanups {
            match self.try_together(slice::from_mut(one), limits) {
                Some(why) => error = why.or(error),
                None => one.residue.clear(),
            }
        }
        error
    }

    /// Returns `None` after a panic.
    fn try_together(
        &mut self,
        cleanups: &mut [Cleanup],
        limits: CleanupLimits<'_>,
    ) -> Option<Option<BackendError>> {
        let residues = cleanups.iter_mut().map(|cleanup| (&cleanup.claim, &mut cleanup.residue));
        let mut residues: Vec<_> = residues.collect();
        let result = isolate_panic(|| self.cleaner.clean_up(&mut residues, limits));
        if result.is_none() {
            // Replies in flight on these connections cannot be matched to requests any more.
            self.cleaner.close();
        }
        result
    }
}

/// The first names of a list.
struct NameList<'a>(Vec<&'a str>);

impl fmt::Display for NameList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> =
            self.0.iter().take(NAMES_MAX).map(|name| Quoted(name).to_string()).collect();
        f.write_str(&shown.join(", "))?;
        match self.0.len() - shown.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
