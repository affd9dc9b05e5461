//! Forked children. A child has a copy of all memory, but only one thread. Mutexes that the other
//! threads held stay locked, and `parking_lot` can loop forever, because its table of parked
//! threads contains threads that do not exist. Therefore a child of a process that has created a
//! manager must not use that manager, and cannot create another.

use std::sync::atomic::{AtomicU32, Ordering};

static OWNER: OwnerProcess = OwnerProcess(AtomicU32::new(0));

/// Call before creating a manager. From then on, no child of this process can create one. Returns
/// false in such a child.
pub(crate) fn claim_process() -> bool {
    OWNER.claim(std::process::id())
}

/// Whether this process is a child of one that has created a manager. Does not block.
pub(crate) fn is_forked_child() -> bool {
    OWNER.is_other(std::process::id())
}

/// Id of the process that created the first manager; 0 before.
struct OwnerProcess(AtomicU32);

impl OwnerProcess {
    fn claim(&self, pid: u32) -> bool {
        if self.0.load(Ordering::Relaxed) == 0 {
            // Another thread of this process may have been faster.
            let _ = self.0.compare_exchange(0, pid, Ordering::Relaxed, Ordering::Relaxed);
        }
        self.0.load(Ordering::Relaxed) == pid
    }

    fn is_other(&self, pid: u32) -> bool {
        !matches!(self.0.load(Ordering::Relaxed), owner if owner == 0 || owner == pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: F10
    #[test]
    fn only_the_first_process_can_claim() {
        let owner = OwnerProcess(AtomicU32::new(0));
        assert!(!owner.is_other(7), "there is no manager yet");
        assert!(owner.claim(7) && owner.claim(7));
        assert!(!owner.is_other(7));
        assert!(!owner.claim(8) && owner.is_other(8));
        assert!(owner.claim(7), "a rejected child must not change the owner");
    }
}
