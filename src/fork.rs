//! Forked children. A child has a copy of all memory and one of the threads: what the others had
//! locked stays locked, and `parking_lot`, whose table of parked threads names those that are not
//! there, can go round in circles for ever. So a child of a process that has made a manager touches
//! nothing of it, and gets none of its own.

use std::sync::atomic::{AtomicU32, Ordering};

static OWNER: OwnerProcess = OwnerProcess(AtomicU32::new(0));

/// To be asked before a manager is made: no child of this process can have one from now on. False
/// in such a child.
pub(crate) fn claim_process() -> bool {
    OWNER.claim(std::process::id())
}

/// Whether this is a child of a process that has made a manager. Waits for nothing.
pub(crate) fn is_forked_child() -> bool {
    OWNER.is_other(std::process::id())
}

/// The process that was the first to make a manager; 0 before.
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

    #[test]
    fn only_the_first_process_can_claim() {
        let owner = OwnerProcess(AtomicU32::new(0));
        assert!(!owner.is_other(7), "there is no manager yet");
        assert!(owner.claim(7) && owner.claim(7));
        assert!(!owner.is_other(7));
        assert!(!owner.claim(8) && owner.is_other(8));
        assert!(owner.claim(7), "a child that was refused changes nothing");
    }
}
