//! `Sleeper`: until when a thread sleeps, so that others wake it only for earlier work.

use crate::sys::clock::Moment;

/// The time until which a thread sleeps; `None` while it works.
#[derive(Debug, Default)]
pub(crate) struct Sleeper(Option<Moment>);

impl Sleeper {
    pub(crate) fn sleeps_until(&mut self, until: Moment) {
        self.0 = Some(until);
    }

    pub(crate) fn works(&mut self) {
        self.0 = None;
    }

    /// Whether the thread must be woken, because it sleeps past `due`.
    pub(crate) fn must_wake(&mut self, due: Moment) -> bool {
        let wake = self.0.is_some_and(|until| due < until);
        if wake {
            // The next caller need not wake it again.
            self.0 = None;
        }
        wake
    }
}
