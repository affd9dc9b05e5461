//! `Voters`: which server each of several nodes leads to, and whether it may vote. Pure.
//!
//! A node that lost its data has forgotten which locks it granted, and could grant them again. Its
//! votes count again once the longest lease has passed, because every lock that it forgot has then
//! expired.
//!
//! A node counts as having lost its data if its run is younger than the longest lease, or if its
//! server was replaced. A promoted replica counts as having lost its data too, whatever its uptime,
//! because it has only what its master had sent. The operator can declare that a young run has lost
//! nothing.

use std::{mem, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::server_info::ServerInfo;
use crate::sys::clock::Moment;

#[derive(Debug)]
pub(crate) struct Voters {
    nodes: Vec<NodeRecord>,
    /// Longest lease of any client. If it is zero, every node votes at once.
    quarantine: Duration,
}

#[derive(Debug, Default)]
struct NodeRecord {
    label: Arc<str>,
    run_id: Option<String>,
    promotion_id: Option<String>,
    /// Run id that was last seen as a replica; cleared when the node is seen as a master.
    replica_run_id: Option<String>,
    /// The node's address last led to the server of another node. The run id recorded here may
    /// since be that of another node's server.
    misdirected: bool,
    votes_from: Moment,
}

/// Result of observing a node's server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Eligibility {
    Eligible,
    /// The node may have lost its data. Its votes do not count for this long.
    Quarantined(Duration),
    /// The server is a replica. It rejects writes, and may lack the last writes of its master.
    Replica,
    /// The server is the same as that of another node.
    Duplicate(Arc<str>),
}

impl Voters {
    pub(crate) fn new(labels: impl Iterator<Item = Arc<str>>, quarantine: Duration) -> Voters {
        let member = |label| NodeRecord { label, ..NodeRecord::default() };
        Voters { nodes: labels.map(member).collect(), quarantine }
    }

    /// Whether the node's server had another run id when it was last observed.
    pub(crate) fn is_replacement(&self, node: usize, info: &ServerInfo) -> bool {
        let run = self.nodes.get(node).and_then(|member| member.run_id.as_ref());
        run.is_some_and(|run| *run != info.run_id)
    }

    /// Records which server a new connection to a node leads to.
    pub(crate) fn observe(&mut self, node: usize, info: &ServerInfo) -> Eligibility {
        if !info.is_master {
            if let Some(member) = self.nodes.get_mut(node) {
                member.replica_run_id = Some(info.run_id.clone());
            }
            return Eligibility::Replica;
        }
        let has_this_server = |member: &NodeRecord| {
            !member.misdirected && member.run_id.as_ref() == Some(&info.run_id)
        };
        let duplicate = self
            .nodes
            .iter()
            .enumerate()
            .find(|(other, member)| *other != node && has_this_server(member));
        let duplicate = duplicate.map(|(_, duplicate)| duplicate.label.clone());
        let quarantine = self.quarantine;
        let Some(member) = self.nodes.get_mut(node) else { return Eligibility::Eligible };
        member.misdirected = duplicate.is_some();
        if let Some(duplicate) = duplicate {
            return Eligibility::Duplicate(duplicate);
        }
        let known = member.run_id.replace(info.run_id.clone());
        let before = mem::replace(&mut member.promotion_id, info.promotion_id.clone());
        let was_replica = member.replica_run_id.take().as_ref() == Some(&info.run_id);
        let was_promoted = info.promotion_id.is_some() && info.promotion_id != before;
        if known.as_ref() == Some(&info.run_id) && !was_replica && !was_promoted {
            return Eligibility::Eligible;
        }
        // Only the first run that we see of a node is judged by its age. Any later run counts as
        // having lost its data, and a promoted server does not report since when it is a master.
        let is_judged_by_age = known.is_none() && !was_replica && !was_promoted;
        let age = match is_judged_by_age {
            true if info.is_declared_new => quarantine,
            true => info.uptime,
            false => Duration::ZERO,
        };
        let from = info.observed_at.saturating_add(quarantine.saturating_sub(age));
        // Never shorten a quarantine: two connections may observe the server in one order, and
        // report it in the other.
        member.votes_from = member.votes_from.max(from);
        let left = member.votes_from.duration_since(info.observed_at);
        if left.is_zero() { Eligibility::Eligible } else { Eligibility::Quarantined(left) }
    }

    /// The nodes in an order that all clients derive, in whatever order each of them names the
    /// nodes: by the run ids of their servers. Nodes that were never reached come last.
    pub(crate) fn order(&self) -> SmallVec<[usize; 8]> {
        let mut order: SmallVec<[usize; 8]> = (0..self.nodes.len()).collect();
        order.sort_by_key(|node| {
            let run_id = self.nodes.get(*node).and_then(|member| member.run_id.as_deref());
            (run_id.is_none(), run_id)
        });
        order
    }

    /// Returns the time from which the votes of a node count.
    pub(crate) fn votes_from(&self, node: usize) -> Moment {
        self.nodes.get(node).map_or(Moment::NEVER, |member| member.votes_from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARANTINE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(seconds * 1_000_000_000)
    }

    fn voters() -> Voters {
        Voters::new(["a", "b", "c"].into_iter().map(Arc::from), QUARANTINE)
    }

    fn server(run: &str, uptime: u64, observed_at: u64) -> ServerInfo {
        ServerInfo {
            run_id: run.into(),
            uptime: Duration::from_secs(uptime),
            observed_at: at(observed_at),
            is_master: true,
            is_declared_new: false,
            promotion_id: None,
        }
    }

    fn declared(info: ServerInfo) -> ServerInfo {
        ServerInfo { is_declared_new: true, ..info }
    }

    fn promoted(run: &str, promotion: &str, uptime: u64, observed_at: u64) -> ServerInfo {
        ServerInfo { promotion_id: Some(promotion.into()), ..server(run, uptime, observed_at) }
    }

    #[test]
    fn young_server_is_quarantined_until_old_leases_expire() {
        let mut voters = voters();
        assert_eq!(
            voters.observe(0, &server("x", 4, 100)),
            Eligibility::Quarantined(Duration::from_secs(6))
        );
        assert_eq!(voters.votes_from(0), at(106));
        // Another connection to the same run changes nothing.
        assert_eq!(voters.observe(0, &server("x", 5, 101)), Eligibility::Eligible);
        assert_eq!(voters.votes_from(0), at(106));
        assert_eq!(voters.observe(1, &server("y", 10, 100)), Eligibility::Eligible);
        assert!(voters.votes_from(1) <= at(100));
    }

    /// A declaration does not help a server that this manager knows to be a later one.
    ///
    /// Fault: N144
    #[test]
    fn server_declared_new_votes_at_once_unless_it_replaced_another() {
        let mut voters = voters();
        let new = declared(server("x", 1, 100));
        assert_eq!(voters.observe(0, &new), Eligibility::Eligible);
        assert_eq!(voters.observe(0, &server("x", 1, 100)), Eligibility::Eligible);
        assert!(voters.votes_from(0) <= at(100));
        let promoted = promoted("p", "first", 1, 100);
        for (node, info) in [(0, server("y", 1, 200)), (1, promoted)] {
            assert_eq!(voters.observe(node, &declared(info)), Eligibility::Quarantined(QUARANTINE));
        }
    }

    /// Fault: N140
    #[test]
    fn order_of_nodes_follows_from_their_servers() {
        let mut voters = voters();
        assert_eq!(voters.order().as_slice(), [0, 1, 2]);
        let mut observe = |node, run| {
            let _ = voters.observe(node, &server(run, 100, 100));
            voters.order().to_vec()
        };
        assert_eq!(observe(1, "y"), [1, 0, 2], "the others were never reached");
        assert_eq!(observe(2, "x"), [2, 1, 0]);
        assert_eq!(observe(0, "z"), [2, 1, 0]);
        assert_eq!(observe(2, "zz"), [1, 0, 2], "it was restarted");
    }

    #[test]
    fn replaced_server_is_quarantined() {
        let mut voters = voters();
        assert_eq!(voters.observe(0, &server("x", 1_000, 100)), Eligibility::Eligible);
        assert_eq!(
            voters.observe(0, &server("promoted", 5_000, 200)),
            Eligibility::Quarantined(QUARANTINE)
        );
        assert_eq!(voters.votes_from(0), at(210));
    }

    /// A promoted server does not report since when it is a master.
    ///
    /// Fault: N37
    #[test]
    fn promoted_server_is_quarantined_whatever_its_uptime() {
        let mut voters = voters();
        let observed = |at| promoted("x", "first", 5_000, at);
        assert_eq!(voters.observe(0, &observed(100)), Eligibility::Quarantined(QUARANTINE));
        assert_eq!(voters.observe(0, &observed(110)), Eligibility::Eligible);
        assert_eq!(voters.votes_from(0), at(110));
        // A server does not report for ever that it was a replica.
        assert_eq!(voters.observe(0, &server("x", 5_000, 200)), Eligibility::Eligible);
        assert_eq!(voters.votes_from(0), at(110));
    }

    #[test]
    fn server_promoted_since_last_seen_is_quarantined() {
        let mut voters = voters();
        assert_eq!(voters.observe(0, &server("x", 99, 100)), Eligibility::Eligible);
        assert_eq!(
            voters.observe(0, &promoted("x", "first", 60, 200)),
            Eligibility::Quarantined(QUARANTINE)
        );
        assert_eq!(
            voters.observe(0, &promoted("x", "second", 60, 300)),
            Eligibility::Quarantined(QUARANTINE)
        );
        assert_eq!(voters.votes_from(0), at(310));
    }

    /// Even if it no longer reports that it was a replica.
    ///
    /// Fault: N37
    #[test]
    fn server_seen_as_replica_is_quarantined() {
        let mut voters = voters();
        let replica =
            |run, observed_at| ServerInfo { is_master: false, ..server(run, 99, observed_at) };
        voters.observe(0, &server("x", 99, 100));
        for (node, run) in [(0, "x"), (1, "y")] {
            assert_eq!(voters.observe(node, &replica(run, 200)), Eligibility::Replica);
            assert_eq!(
                voters.observe(node, &server(run, 99, 300)),
                Eligibility::Quarantined(QUARANTINE)
            );
            assert_eq!(voters.observe(node, &server(run, 99, 301)), Eligibility::Eligible);
            assert_eq!(voters.votes_from(node), at(310));
        }
    }

    /// The first promotion was observed before the second, but is reported after it.
    ///
    /// Fault: N37
    #[test]
    fn late_report_does_not_shorten_quarantine() {
        let mut voters = voters();
        voters.observe(0, &server("x", 99, 100));
        for (promotion, observed_at) in [("second", 202), ("first", 200)] {
            assert_ne!(
                voters.observe(0, &promoted("x", promotion, 99, observed_at)),
                Eligibility::Eligible
            );
            assert_eq!(voters.votes_from(0), at(212));
        }
    }

    #[test]
    fn replacement_is_detected_for_the_same_node_only() {
        let mut voters = voters();
        assert!(!voters.is_replacement(0, &server("x", 99, 100)), "the node had no server before");
        voters.observe(0, &server("x", 99, 100));
        assert!(!voters.is_replacement(0, &server("x", 99, 100)));
        assert!(voters.is_replacement(0, &server("y", 99, 100)));
        assert!(!voters.is_replacement(1, &server("y", 99, 100)), "another node had a server");
    }

    #[test]
    fn replicas_and_duplicates_are_ineligible() {
        let mut voters = voters();
        assert_eq!(
            voters.observe(0, &ServerInfo { is_master: false, ..server("r", 99, 100) }),
            Eligibility::Replica
        );
        assert_eq!(voters.observe(0, &server("x", 99, 100)), Eligibility::Eligible);
        assert_eq!(voters.observe(2, &server("x", 99, 100)), Eligibility::Duplicate("a".into()));
        // An address that leads to another server later is no duplicate any more.
        voters.observe(0, &server("y", 99, 200));
        assert_eq!(voters.observe(2, &server("x", 99, 200)), Eligibility::Eligible);
    }

    /// Fault: N77
    #[test]
    fn nodes_that_swap_addresses_become_eligible_again() {
        let mut voters = voters();
        let servers = [server("x", 99, 100), server("y", 99, 100), server("z", 99, 100)];
        for (node, server) in servers.iter().enumerate() {
            assert_eq!(voters.observe(node, server), Eligibility::Eligible);
        }
        // The addresses move in a cycle. Only the last node finds its new server unclaimed, because
        // node 0 has been misdirected before.
        for (node, label) in [(0, "b"), (1, "c")] {
            assert_eq!(
                voters.observe(node, &servers[node + 1]),
                Eligibility::Duplicate(label.into())
            );
        }
        for (node, led_to) in [(2, 0), (1, 2), (0, 1)] {
            assert_eq!(
                voters.observe(node, &servers[led_to]),
                Eligibility::Quarantined(QUARANTINE),
                "the node's server was replaced"
            );
            assert_eq!(voters.observe(node, &servers[led_to]), Eligibility::Eligible);
            assert_eq!(voters.votes_from(node), at(110));
        }
        // A second address of a server is refused. The node that has the server stays eligible.
        assert_eq!(voters.observe(0, &servers[0]), Eligibility::Duplicate("c".into()));
        assert_eq!(voters.observe(2, &servers[0]), Eligibility::Eligible);
    }

    /// No other node has taken its server in the meantime.
    #[test]
    fn briefly_misdirected_node_stays_eligible() {
        let mut voters = voters();
        voters.observe(0, &server("x", 99, 100));
        voters.observe(1, &server("y", 99, 100));
        assert_eq!(voters.observe(0, &server("y", 99, 101)), Eligibility::Duplicate("b".into()));
        assert_eq!(voters.observe(0, &server("x", 99, 102)), Eligibility::Eligible);
        assert_eq!(voters.observe(2, &server("x", 99, 103)), Eligibility::Duplicate("a".into()));
    }

    #[test]
    fn zero_quarantine_lets_young_server_vote() {
        let mut voters = Voters::new(["a"].into_iter().map(Arc::from), Duration::ZERO);
        assert_eq!(voters.observe(0, &server("x", 0, 100)), Eligibility::Eligible);
    }
}
