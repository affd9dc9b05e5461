//! Every order in which threads can meet over the mailbox; see `make loom`. Mailbox and slots are the real ones.

use loom::{model, sync::Arc, thread};

use super::mailbox::{Handover, Mailbox, Woken};
use crate::{clock::Moment, sync::Mutex};

const GRANT: Handover = Handover { token: 5, granted_at_us: 6, px_ms: 7 };

/// A grant that comes while its waiter leaves is taken by it, or was for nobody.
#[test]
fn a_grant_is_taken_or_was_for_nobody() {
    model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let slot = mailbox.open("x", "a", None);
        let delivers = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.deliver("a", GRANT))
        };
        mailbox.shut(&slot);
        let delivered = delivers.join().unwrap();
        assert_eq!(slot.take().is_some(), delivered);
    });
}

/// A grant, a call to look and the end of the manager come at once to a waiter that lies down to sleep.
#[test]
fn a_sleeper_hears_everything() {
    model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let slot = mailbox.open("x", "a", None);
        let delivers = {
            let mailbox = mailbox.clone();
            thread::spawn(move || assert!(mailbox.deliver("a", GRANT)))
        };
        let closes = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.close())
        };
        slot.sleep(Moment::NEVER);
        let mut heard = vec![slot.take().unwrap()];
        delivers.join().unwrap();
        closes.join().unwrap();
        heard.extend(slot.take());
        heard.extend(slot.take());
        heard.sort_by_key(|news| *news == Woken::Closed);
        heard.dedup();
        assert_eq!(heard, [Woken::Granted(GRANT), Woken::Closed]);
    });
}

/// The invariant of listener.rs: one stops listening while another lies down. The line is only a flag here.
#[test]
fn the_baton_is_never_lost() {
    model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let free = Arc::new(Mutex::new(false));
        let slot = mailbox.open("x", "a", None);
        let leaves = {
            let (mailbox, free) = (mailbox.clone(), free.clone());
            thread::spawn(move || {
                // As `give_back` and `call_listener` do it.
                *free.lock() = true;
                let is_free = *free.lock();
                if is_free {
                    mailbox.call_listener();
                }
            })
        };
        // As `Ticket::wait` does it.
        while !std::mem::take(&mut *free.lock()) {
            slot.lie_down();
            let is_free = *free.lock();
            if !is_free {
                slot.sleep(Moment::NEVER);
            }
            slot.get_up();
        }
        leaves.join().unwrap();
    });
}

/// Of two sleepers one is called, and the other is called when that one passes it on.
#[test]
fn a_call_reaches_a_sleeper_although_one_gets_up() {
    model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let slot = mailbox.open("x", "a", None);
        slot.lie_down();
        let calls = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.call_listener())
        };
        // It gets up by itself meanwhile: either it was called, or it is told by looking that nobody listens.
        let called = slot.get_up();
        calls.join().unwrap();
        assert!(!slot.get_up() || !called, "called twice");
    });
}
