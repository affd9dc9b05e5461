//! What must be true throughout a run: mutual exclusion, keys on a quorum, rising tokens, reasons
//! for losses, and bounded calls.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use distlock::{LockGuard, LockId};

use super::{
    client::Incident,
    fault_free::{FAULT_TOLERANT_LEASE_MIN, FaultSummary, KeyPresence},
    scenario::Scenario,
    world::{ProcessState, Sim, Time},
};

/// A guard that was handed to a client, as the checks know it.
pub(crate) struct GuardRecord {
    pub(crate) process: usize,
    pub(crate) name: String,
    pub(crate) id: LockId,
    pub(crate) token: u64,
    /// When the lock was requested. A node that lost data after that may have lost this lock.
    pub(crate) requested_at: Time,
    /// How long the lock is kept without a renewal.
    pub(crate) lease: Time,
    /// By node.
    pub(crate) presence: RefCell<Vec<KeyPresence>>,
    pub(crate) guard: RefCell<Option<LockGuard>>,
    /// Whether the guard has reported that the lock is not held any more.
    pub(crate) reported_lost: Cell<bool>,
}

#[derive(Default)]
pub(crate) struct Invariants {
    pub(crate) records: RefCell<Vec<Rc<GuardRecord>>>,
    /// Last token of each name.
    tokens: RefCell<BTreeMap<String, u64>>,
    /// Whether a node that lost its data may vote at once.
    pub(crate) data_loss_is_excused: Cell<bool>,
    pub(crate) counts: RefCell<BTreeMap<&'static str, u64>>,
}

impl Invariants {
    pub(crate) fn count(&self, what: &'static str) {
        *self.counts.borrow_mut().entry(what).or_default() += 1;
    }

    /// Whether the guard reports that the lock is held now.
    pub(crate) fn is_held(&self, sim: &Sim, record: &GuardRecord) -> bool {
        if sim.process_state(record.process) == ProcessState::Dead {
            return false;
        }
        let guard = record.guard.borrow();
        let held =
            guard.as_ref().is_some_and(|guard| sim.on_clock_of(record.process, || guard.is_held()));
        if held && record.reported_lost.get() {
            sim.violation(format!("{} is held again after it was lost", record.name));
        }
        if !held {
            record.reported_lost.set(true);
        }
        held
    }

    fn is_excused(&self, sim: &Sim, record: &GuardRecord) -> bool {
        let lost_data = |since| {
            sim.net.borrow().servers.iter().any(|node| node.forgot_at.iter().any(|at| *at >= since))
        };
        self.data_loss_is_excused.get() && lost_data(record.requested_at)
    }

    /// Checks a lock that a client has just acquired.
    pub(crate) fn granted(&self, sim: &Sim, record: &Rc<GuardRecord>) {
        let GuardRecord { process, name, id, token, .. } = &**record;
        sim.log(|| format!("process {process} HOLDS {name} with token {token} as {id}"));
        self.count("granted");
        self.records.borrow_mut().retain(|other| {
            other.guard.borrow().is_some() && sim.process_state(other.process) != ProcessState::Dead
        });
        if !self.is_held(sim, record) {
            return self.count("granted too late");
        }
        for other in self.records.borrow().iter().filter(|other| other.name == *name) {
            if self.is_held(sim, other) {
                // Of two grants around a loss of data, the older one may be read last.
                if self.is_excused(sim, other) || self.is_excused(sim, record) {
                    self.count("excused overlap");
                    continue;
                }
                sim.violation(format!(
                    "process {process} holds {name} with token {token}, and process {} still \
                     holds it with token {}",
                    other.process, other.token
                ));
            }
        }
        // Of two grants around a loss of data, the older one may be read last.
        let last = self.tokens.borrow_mut().insert(name.clone(), *token);
        let excused = self.is_excused(sim, record);
        if last.is_some_and(|last| last >= *token) && !excused {
            sim.violation(format!(
                "{name} was granted with token {token} after token {}",
                last.unwrap_or(0)
            ));
        }
        self.records.borrow_mut().push(record.clone());
        self.check_quorum(sim, record);
    }

    /// Checks that a lock that is held has its key on a quorum of the nodes.
    fn check_quorum(&self, sim: &Sim, record: &GuardRecord) {
        let (key, now) = (format!("lock:{}", record.name), sim.now.get());
        let net = sim.net.borrow();
        let needed = net.servers.len() / 2 + 1;
        let mut presence = record.presence.borrow_mut();
        presence.resize(net.servers.len(), KeyPresence::default());
        let with_key =
            net.servers.iter().zip(presence.iter_mut()).filter_map(|(node, presence)| {
                let has_key = node.fake.keys.peek(key.as_bytes(), node.now_us(now))
                    == Some(record.id.as_str().as_bytes());
                presence.observe(has_key, now);
                (has_key || node.forgot_at.iter().any(|at| *at >= record.requested_at))
                    .then_some(())
            });
        let count = with_key.count();
        drop((net, presence));
        if count < needed && self.is_held(sim, record) && !self.is_excused(sim, record) {
            sim.violation(format!(
                "process {} holds {} (token {}), but only {count} nodes have its key, and \
                 {needed} are needed",
                record.process, record.name, record.token
            ));
        }
    }

    /// Checks the locks whose keys the last step changed.
    pub(crate) fn check_changed(&self, sim: &Sim) {
        let changed_keys = std::mem::take(&mut sim.net.borrow_mut().changed_keys);
        for (_, key) in changed_keys {
            let Some(name) = key.strip_prefix(b"lock:") else { continue };
            for record in
                self.records.borrow().iter().filter(|record| record.name.as_bytes() == name)
            {
                self.check_quorum(sim, record);
            }
        }
    }

    /// Checks all locks.
    pub(crate) fn check_all(&self, sim: &Sim) {
        for record in self.records.borrow().iter() {
            if record.guard.borrow().is_some() {
                self.check_quorum(sim, record);
            }
        }
    }

    /// Checks that there is a reason for a loss or a failed renewal. The holder released the lock
    /// at `until` or later.
    pub(crate) fn check_incident(
        &self,
        sim: &Sim,
        scenario: &Scenario,
        record: &GuardRecord,
        until: Time,
        (faults, incident): &(FaultSummary, Incident),
    ) {
        // A lock that came by a grant is at first kept for a claim window only.
        let timeout = scenario.operation_timeout.min(scenario.claim_window);
        // A failed renewal costs no lock. It may have met a connection that broke long ago, or have
        // had too little time.
        let excused = matches!(incident, Incident::RenewalFailed(_))
            && (record.lease < FAULT_TOLERANT_LEASE_MIN || !faults.was_never_faulty());
        let end = until.min(faults.at);
        if !excused && faults.could_renew(record.lease, end, timeout, &record.presence.borrow()) {
            let GuardRecord { process, name, token, .. } = record;
            sim.violation(format!(
                "process {process} had no reason to report about {name} (token {token}): {}; \
                 {faults:?}",
                incident.text()
            ));
        }
    }

    /// Checks that a call has returned in time.
    pub(crate) fn check_duration(
        &self,
        sim: &Sim,
        what: &str,
        took: Time,
        bound: Time,
        suspended: Time,
    ) {
        // Clocks differ by up to one percent, and a thread may be scheduled late.
        let bound = bound + bound / 100 + suspended + 5 * super::world::MS;
        if took > bound {
            sim.violation(format!(
                "{what} took {} ms, and its limit is {} ms",
                took / 1_000_000,
                bound / 1_000_000
            ));
        }
    }
}
