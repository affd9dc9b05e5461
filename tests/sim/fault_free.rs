//! Decides whether a lost lock is excused: remembers when each process and each node last had a
//! fault. A lock that is lost although it could have been renewed was lost without a reason.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    net::{Link, Server},
    node::Mode,
    world::{MS, NEVER, ProcessState, SEC, Sim, Time, US},
};

/// Maximum number of one-way trips of a renewal: connect, log in and load a script, each of them
/// twice.
const RENEWAL_TRIPS_MAX: Time = 20;
/// Stalls of up to one in this many parts of a lease are no excuse. Longer ones are, because a
/// process cannot renew while it does not run.
const STALL_DIVISOR: Time = 10;
/// Minimum lease that must survive faults at a minority of the nodes. Waiting for a silent node, or
/// for a new connection, can take longer than a shorter lease can spare.
pub(crate) const FAULT_TOLERANT_LEASE_MIN: Time = 100 * MS;
/// Maximum error of a node's uptime, which is the difference of two times in whole seconds.
const UPTIME_ERROR_MAX: Time = 2 * SEC;

/// When each process and node last had a fault.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    /// Longest delay of a packet without a fault.
    pub(crate) usual_delay: Time,
    /// Time for which a node that may have lost data does not vote.
    pub(crate) quarantine: Time,
    /// Time of the last fault, by process and node.
    last_faults: BTreeMap<(usize, usize), Time>,
    /// The process and node pairs that had a fault at the last check.
    ongoing: BTreeSet<(usize, usize)>,
    /// Process, end and length of each stall.
    stalls: Vec<(usize, Time, Time)>,
}

impl FaultLog {
    /// Logs a fault between a process and a node that lasts until `until`.
    pub(crate) fn add_fault(&mut self, process: usize, node: usize, until: Time) {
        let last = self.last_faults.entry((process, node)).or_default();
        *last = until.max(*last);
    }

    /// Logs that a thread of a process is kept from running.
    pub(crate) fn add_stall(&mut self, process: usize, until: Time, span: Time) {
        self.stalls.push((process, until, span));
    }

    /// Faults that a process can have noticed by `at`.
    fn summary_for(&self, process: usize, nodes: usize, at: Time, ttl: Time) -> FaultSummary {
        let last_fault = |node| self.last_faults.get(&(process, node)).copied().unwrap_or(0);
        let recent = |(of, until, _): &&(usize, Time, Time)| *of == process && *until + ttl >= at;
        let stalled = self.stalls.iter().filter(recent).map(|(_, _, span)| span).sum();
        let ever_stalled = self.stalls.iter().any(|(of, _, _)| *of == process);
        FaultSummary {
            at,
            usual_delay: self.usual_delay,
            last_faults: (0..nodes).map(last_fault).collect(),
            stalled,
            ever_stalled,
        }
    }
}

/// The last period in which a node had a holder's key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyPresence {
    from: Time,
    until: Time,
}

impl KeyPresence {
    pub(crate) fn observe(&mut self, present: bool, now: Time) {
        match (present, self.until == NEVER) {
            (true, false) => *self = KeyPresence { from: now, until: NEVER },
            (false, true) => self.until = now,
            _ => {}
        }
    }
}

/// Faults that affect one process, as of one moment.
#[derive(Clone, Debug)]
pub(crate) struct FaultSummary {
    pub(crate) at: Time,
    usual_delay: Time,
    /// By node: time of the last fault at the node or on the link to it.
    last_faults: Vec<Time>,
    /// Total time within the longest lease for which threads of the process were kept from
    /// running.
    stalled: Time,
    ever_stalled: bool,
}

impl FaultSummary {
    /// Whether a lease that was needed until `end` could have been renewed throughout its length.
    /// That is so if delays and stalls were short, and no node had a fault. A quorum of nodes that
    /// had the key and no fault is enough, unless the lease is very short.
    ///
    /// `timeout` is the shortest timeout of the scenario.
    pub(crate) fn could_renew(
        &self,
        lease: Time,
        end: Time,
        timeout: Time,
        presence: &[KeyPresence],
    ) -> bool {
        let limit = lease.min(timeout);
        let fast =
            RENEWAL_TRIPS_MAX * self.usual_delay <= limit && STALL_DIVISOR * self.stalled <= limit;
        let healthy = |node: &usize| self.last_faults[*node] + lease < end;
        // A renewal is due two thirds of a lease before its end.
        let had_key = |node: &usize| {
            let KeyPresence { from, until } = presence.get(*node).copied().unwrap_or_default();
            from + lease * 2 / 3 < end && end <= until.saturating_add(lease / 10)
        };
        let nodes = self.last_faults.len();
        let quorum = lease >= FAULT_TOLERANT_LEASE_MIN
            && (0..nodes).filter(healthy).filter(had_key).count() > nodes / 2;
        fast && (quorum || (0..nodes).all(|node| healthy(&node)))
    }

    /// Whether there was never a fault or a stall. A process that was ever late may have unread
    /// replies, and then does not send a request where another process would.
    pub(crate) fn was_never_faulty(&self) -> bool {
        !self.ever_stalled && self.last_faults.iter().all(|last| *last == 0)
    }
}

impl Sim {
    /// Logs the faults that exist at this moment.
    pub(crate) fn log_faults(&self) {
        let (now, net, mut log) = (self.now.get(), self.net.borrow(), self.fault_log.borrow_mut());
        for (process, links) in net.links.iter().enumerate() {
            let suspended = self.process_state(process) != ProcessState::Running;
            for (node, (link, server)) in links.iter().zip(&net.servers).enumerate() {
                let faulty = suspended
                    || is_link_faulty(link, log.usual_delay)
                    || is_node_faulty(server, now, log.quarantine);
                let pair = (process, node);
                // A fault that has ended since the last check counts as ending now, because nothing
                // is checked between two events.
                let was_faulty =
                    if faulty { !log.ongoing.insert(pair) } else { log.ongoing.remove(&pair) };
                if faulty || was_faulty {
                    log.add_fault(process, node, now);
                }
            }
        }
    }

    pub(crate) fn fault_summary(&self, process: usize, ttl: Time) -> FaultSummary {
        let nodes = self.net.borrow().servers.len();
        self.fault_log.borrow().summary_for(process, nodes, self.now.get(), ttl)
    }
}

fn is_link_faulty(link: &Link, usual_delay: Time) -> bool {
    link.to_node_blocked || link.to_client_blocked || link.max_delay > usual_delay
}

fn is_node_faulty(server: &Server, now: Time, quarantine: Time) -> bool {
    let votes_from = server.started_at + quarantine + UPTIME_ERROR_MAX;
    let quarantined = quarantine > 0 && server.started_at > 0 && now < votes_from;
    !server.up || server.stopped || server.fake.mode != Mode::Normal || quarantined
}

/// A lease of 600 ms that was needed until 1,000 ms, on a network with delays of up to 300 µs.
#[test]
fn loss_is_excused_by_fault_within_lease() {
    let (at, usual_delay) = (SEC, 300 * US);
    let last_faults = |times: &[Time]| FaultSummary {
        at,
        usual_delay,
        last_faults: times.to_vec(),
        stalled: 0,
        ever_stalled: false,
    };
    let always = KeyPresence { from: 0, until: NEVER };
    let unexcused = |faults: &FaultSummary, presence: &[KeyPresence]| {
        faults.could_renew(600 * MS, at, 50 * MS, presence)
    };
    assert!(unexcused(&last_faults(&[399 * MS]), &[]));
    assert!(!unexcused(&last_faults(&[400 * MS]), &[always]), "the only node had a fault");
    assert!(
        !unexcused(&FaultSummary { usual_delay: 3 * MS, ..last_faults(&[0]) }, &[always]),
        "the delays are too long"
    );
    assert!(
        !unexcused(&FaultSummary { stalled: 61 * MS, ..last_faults(&[0]) }, &[always]),
        "the process was stalled"
    );
    let one_faulty = last_faults(&[0, 0, at]);
    assert!(
        !unexcused(&one_faulty, &[always, KeyPresence::default(), always]),
        "the faulty node was needed"
    );
    assert!(unexcused(&one_faulty, &[always, always, KeyPresence::default()]));
    assert!(
        !unexcused(&one_faulty, &[always, KeyPresence { from: 700 * MS, until: NEVER }, always]),
        "the node got the key too late"
    );
    assert!(
        !unexcused(&one_faulty, &[always, KeyPresence { from: 0, until: 900 * MS }, always]),
        "the node lost the key"
    );
    assert!(!unexcused(&last_faults(&[0, at, at]), &[always; 3]), "no quorum");
}
