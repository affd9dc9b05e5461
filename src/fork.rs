//! What each process has for itself: a forked child begins anew, for what it has copied may be locked by a thread that it
//! does not have.

use std::sync::OnceLock;

/// A value for each process. That of the parent stays where it is, untouched.
pub(crate) struct PerProcess<T>(OnceLock<Box<Own<T>>>);

struct Own<T> {
    pid: u32,
    value: T,
    /// That of a child.
    next: PerProcess<T>,
}

impl<T: Default> PerProcess<T> {
    pub(crate) const fn new() -> PerProcess<T> {
        PerProcess(OnceLock::new())
    }

    pub(crate) fn get(&self) -> &T {
        let pid = std::process::id();
        let mut place = self;
        loop {
            // Nothing in here waits or calls out, so that hardly ever a fork finds it half done.
            let own = place.0.get_or_init(|| Box::new(Own { pid, value: T::default(), next: PerProcess::new() }));
            if own.pid == pid {
                return &own.value;
            }
            place = &own.next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_process_finds_its_own_again_behind_those_of_others() {
        let place: PerProcess<AtomicU32> = PerProcess::new();
        let of_a_parent = Own { pid: 0, value: AtomicU32::new(7), next: PerProcess::new() };
        assert!(place.0.set(Box::new(of_a_parent)).is_ok());
        place.get().store(9, Ordering::Relaxed);
        assert_eq!(place.get().load(Ordering::Relaxed), 9);
        assert_eq!(place.0.get().map(|own| own.value.load(Ordering::Relaxed)), Some(7));
    }
}
