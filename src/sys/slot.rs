//! `Slot`: a value that one thread sets once, and that others wait for. Unlike a channel, it can be
//! waited for by every clock.

use crate::sys::{
    clock::{self, Moment},
    sync::{Condvar, Mutex},
};

#[derive(Debug)]
pub(crate) struct Slot<T> {
    value: Mutex<Option<T>>,
    filled: Condvar,
}

impl<T> Default for Slot<T> {
    fn default() -> Slot<T> {
        Slot { value: Mutex::new(None), filled: Condvar::new() }
    }
}

impl<T: Clone> Slot<T> {
    /// Sets the value, unless there is one.
    pub(crate) fn fill(&self, value: T) {
        self.value.lock().get_or_insert(value);
        clock::wake_all(&self.filled);
    }

    /// Waits for the value. Returns `None` if there is none by `until`.
    pub(crate) fn wait_until(&self, until: Moment) -> Option<T> {
        let mut value = self.value.lock();
        while value.is_none() && clock::now() < until {
            clock::park(&self.filled, &mut value, until);
        }
        value.clone()
    }
}
