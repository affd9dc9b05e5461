//! Checks with loom every order in which additions and the thread can meet over the queue; run them
//! with `make loom`. The thread is run by the test, and does not clean up what it takes.

use std::time::Duration;

use loom::{model, sync::Arc as Checked, thread};

use super::*;
use crate::core::{
    ack::PendingAcks, id::generate_lock_id, key::LockKey, kind::LockKind, quorum::NodeSet,
};

const HOUR: Duration = Duration::from_secs(3600);

fn add(shared: &Shared) -> bool {
    let (now, nodes) = (clock::now(), NodeSet::single(0));
    let (key, kind) = (LockKey::new("", "x").unwrap(), LockKind::Mutex);
    let claim = Claim { key, id: generate_lock_id(), ttl: HOUR, kind, token: 0 };
    let mut state = shared.state.lock();
    let residue = Residue {
        nodes,
        queue_entry: String::new(),
        in_flight_until: now,
        keep_until: Moment::default(),
        pending_acks: PendingAcks::new(),
    };
    state.queue.add_residue(&claim, residue, now);
    shared.needs_thread(state, now)
}

/// Takes entries until the queue has been empty for `idle_max`, and returns their number.
fn work(shared: &Shared, idle_max: Duration) -> usize {
    let mut taken = 0;
    while let Some(step) = shared.next_step(1, idle_max) {
        taken += match step {
            Step::CleanUp(due) => due.len(),
            Step::Drain(all, _) => all.len(),
            Step::ReportOverflow => 0,
        };
    }
    taken
}

/// Work that arrives while the thread ends is done by that thread, or another one is started.
#[test]
fn no_entry_is_left_without_a_thread() {
    model(|| {
        let shared = Checked::new(Shared::default());
        assert!(add(&shared), "no thread runs");
        let worker = {
            let shared = shared.clone();
            thread::spawn(move || work(&shared, Duration::ZERO))
        };
        let needs_another = add(&shared);
        let taken = worker.join().unwrap();
        assert_eq!(taken, if needs_another { 1 } else { 2 });
        assert_eq!(shared.state.lock().is_running, needs_another);
    });
}

/// Work that arrives while the thread is about to wait wakes it, and so does a shutdown.
#[test]
fn thread_wakes_for_work_that_arrives_as_it_parks() {
    model(|| {
        let shared = Checked::new(Shared::default());
        shared.state.lock().is_running = true;
        let worker = {
            let shared = shared.clone();
            thread::spawn(move || work(&shared, HOUR))
        };
        assert!(!add(&shared), "the thread runs");
        let mut state = shared.state.lock();
        state.shutdown_deadline = Some(Moment::NEVER);
        assert!(!shared.needs_thread(state, Moment::from_nanos(0)));
        shared.await_end(Moment::NEVER);
        assert_eq!(worker.join().unwrap(), 1);
    });
}
