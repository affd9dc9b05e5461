//! What must be true throughout a run: mutual exclusion, keys on a quorum, rising tokens, reasons
//! for losses, and bounded calls.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use distlock::{LockId, testing::servers::Data};

use super::{
    client::Incident,
    fault_free::{FAULT_TOLERANT_LEASE_MIN, FaultSummary, KeyPresence},
    kinds::{Guard, Kind},
    net::Server,
    scenario::Scenario,
    world::{ProcessState, Sim, Time},
};

/// A guard that was handed to a client, as the checks know it.
pub(crate) struct GuardRecord {
    pub(crate) process: usize,
    pub(crate) name: String,
    pub(crate) id: LockId,
    pub(crate) kind: Kind,
    /// The token is not that of the writer that has become this reader.
    pub(crate) has_new_token: bool,
    pub(crate) token: u64,
    pub(crate) requested_at: Time,
    /// When the servers were asked for the lock: the first request with this identifier, since
    /// threads of a process may have handed the lock over. A node that lost data after that may
    /// have lost this lock.
    pub(crate) asked_servers_at: Time,
    /// How long the lock is kept without a renewal.
    pub(crate) lease: Time,
    /// By node.
    pub(crate) presence: RefCell<Vec<KeyPresence>>,
    pub(crate) guard: RefCell<Option<Guard>>,
    /// Whether the guard has reported that the lock is not held any more.
    pub(crate) reported_lost: Cell<bool>,
}

/// The tokens of one name.
#[derive(Default)]
struct Tokens {
    /// The largest one.
    last: u64,
    /// The largest one of a lock that was held alone.
    last_alone: u64,
    /// Ends of holds, each with its token.
    ended: Vec<(Time, u64)>,
}

impl Tokens {
    /// The token that this lock must exceed. Those who hold a lock together may get to know of
    /// their tokens in another order, and over several nodes may have the same one.
    fn floor_of(&self, record: &GuardRecord) -> u64 {
        if record.kind.group().is_none() {
            return self.last;
        }
        let before = self.ended.iter().filter(|(ended, _)| *ended <= record.requested_at);
        before.map(|(_, token)| *token).max().unwrap_or(0).max(self.last_alone)
    }
}

#[derive(Default)]
pub(crate) struct Invariants {
    pub(crate) records: RefCell<Vec<Rc<GuardRecord>>>,
    /// By name.
    tokens: RefCell<BTreeMap<String, Tokens>>,
    /// When each lock was first requested, by identifier.
    first_requests: RefCell<BTreeMap<String, Time>>,
    /// Whether a node that lost its data may vote at once.
    pub(crate) data_loss_is_excused: Cell<bool>,
    pub(crate) counts: RefCell<BTreeMap<&'static str, u64>>,
}

impl Invariants {
    pub(crate) fn count(&self, what: &'static str) {
        *self.counts.borrow_mut().entry(what).or_default() += 1;
    }

    /// When this lock was first requested; a request that the client made at `requested_at` has
    /// just been granted.
    pub(crate) fn first_request(&self, id: &LockId, requested_at: Time) -> Time {
        *self.first_requests.borrow_mut().entry(id.to_string()).or_insert(requested_at)
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
        self.data_loss_is_excused.get() && lost_data(record.asked_servers_at)
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
        let records = self.records.borrow();
        let is_other = |other: &&Rc<GuardRecord>| other.name == *name && self.is_held(sim, other);
        let others: Vec<_> = records.iter().filter(is_other).collect();
        let fits = |others: &[&Rc<GuardRecord>]| {
            record.kind.may_share_with(&others.iter().map(|other| other.kind).collect::<Vec<_>>())
        };
        if fits(&others) {
            if !others.is_empty() {
                self.count("held together");
            }
        } else {
            // Of two grants around a loss of data, the older one may be read last.
            let mut unexcused = others.clone();
            unexcused.retain(|other| !self.is_excused(sim, other));
            if self.is_excused(sim, record) || fits(&unexcused) {
                self.count("excused overlap");
            } else {
                let held = others.iter().map(|other| (other.process, other.token, other.kind));
                sim.violation(format!(
                    "process {process} holds {name} with token {token} ({:?}), and others still \
                     hold it: {:?}",
                    record.kind,
                    held.collect::<Vec<_>>()
                ));
            }
        }
        drop(others);
        drop(records);
        self.check_token(sim, record);
        self.records.borrow_mut().push(record.clone());
        self.check_quorum(sim, record);
    }

    fn check_token(&self, sim: &Sim, record: &GuardRecord) {
        let GuardRecord { name, token, .. } = record;
        let mut tokens = self.tokens.borrow_mut();
        let tokens = tokens.entry(name.clone()).or_default();
        let floor = tokens.floor_of(record);
        if self.is_excused(sim, record) {
            // Of two grants around a loss of data, the older one may be read last.
            *tokens = Tokens::default();
        } else if record.has_new_token && *token <= floor {
            sim.violation(format!("{name} was granted with token {token} after token {floor}"));
        }
        tokens.last = tokens.last.max(*token);
        if record.kind.group().is_none() {
            tokens.last_alone = *token;
        }
    }

    /// Notes that a client ends its hold.
    pub(crate) fn ended(&self, sim: &Sim, record: &GuardRecord) {
        let mut tokens = self.tokens.borrow_mut();
        let tokens = tokens.entry(record.name.clone()).or_default();
        tokens.ended.push((sim.now.get(), record.token));
    }

    /// Checks that a lock that is held has its key on a quorum of the nodes.
    fn check_quorum(&self, sim: &Sim, record: &GuardRecord) {
        let now = sim.now.get();
        let net = sim.net.borrow();
        let needed = net.servers.len() / 2 + 1;
        let mut presence = record.presence.borrow_mut();
        presence.resize(net.servers.len(), KeyPresence::default());
        let with_key =
            net.servers.iter().zip(presence.iter_mut()).filter_map(|(node, presence)| {
                let has_key = is_kept_on(node, record, now);
                presence.observe(has_key, now);
                (has_key || node.forgot_at.iter().any(|at| *at >= record.asked_servers_at))
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

/// Whether a node keeps the lock for this holder: as the value of the lock key, or as a member of
/// the group that it names.
fn is_kept_on(node: &Server, record: &GuardRecord, now: Time) -> bool {
    let now_us = node.now_us(now);
    let (lock, id) = (format!("lock:{}", record.name), record.id.as_str().as_bytes());
    let value = node.fake.keys.peek(lock.as_bytes(), now_us);
    // A node that has missed a downgrade keeps the lock for the writer.
    if value == Some(id) || record.kind.group().is_none() {
        return value == Some(id);
    }
    let members = format!("distlock:members:{{{lock}}}");
    let mut entries = node.fake.keys.live_entries(now_us);
    value == record.kind.group()
        && entries.any(|(key, data, _)| {
            key == members.as_bytes()
                && matches!(data, Data::Sorted(members)
                    if members.get(id).is_some_and(|expires| *expires > now_us / 1000))
        })
}
