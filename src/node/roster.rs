//! `Roster`: which server stands behind each of several nodes, and whether it may vote. Pure.
//!
//! A node that lost its memory has forgotten whom it gave locks to, and would give them to others. It may vote again when
//! the longest lease has passed, for then whatever it forgot has expired. A node whose run is younger than that, or that
//! turns out to be another server than before, is taken to have lost its memory, unless it writes all down before it
//! answers.

use std::{sync::Arc, time::Duration};

use super::identity::Identity;
use crate::clock::Moment;

#[derive(Debug)]
pub(crate) struct Roster {
    nodes: Vec<Member>,
    /// The longest lease that anybody takes; zero lets every node vote at once.
    quarantine: Duration,
}

#[derive(Debug)]
struct Member {
    label: Arc<str>,
    run: Option<String>,
    votes_from: Moment,
}

/// What a look at a node's server led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    Fit,
    /// It may have lost its memory, and does not vote for this long.
    Quarantined(Duration),
    /// It is a replica, and would refuse all writes, or forget those that it has not heard of.
    Replica,
    /// It is the same server as this other node.
    Duplicate(Arc<str>),
}

impl Roster {
    pub(crate) fn new(labels: impl Iterator<Item = Arc<str>>, quarantine: Duration) -> Roster {
        let member = |label| Member { label, run: None, votes_from: Moment::from_nanos(0) };
        Roster { nodes: labels.map(member).collect(), quarantine }
    }

    /// Whether another run was met at a node before.
    pub(crate) fn knew_another(&self, node: usize, identity: &Identity) -> bool {
        let run = self.nodes.get(node).and_then(|member| member.run.as_ref());
        run.is_some_and(|run| *run != identity.run)
    }

    /// A new connection has found out which server a node is.
    pub(crate) fn meet(&mut self, node: usize, identity: &Identity) -> Finding {
        if !identity.is_master {
            return Finding::Replica;
        }
        let twin = |(other, member): &(usize, &Member)| *other != node && member.run.as_ref() == Some(&identity.run);
        if let Some((_, twin)) = self.nodes.iter().enumerate().find(twin) {
            return Finding::Duplicate(twin.label.clone());
        }
        let quarantine = self.quarantine;
        let Some(member) = self.nodes.get_mut(node) else { return Finding::Fit };
        let known = member.run.replace(identity.run.clone());
        if known.as_ref() == Some(&identity.run) || identity.forgets_nothing {
            return Finding::Fit;
        }
        // Another run, however old, is another memory; the first that is seen is judged by its age.
        let age = if known.is_some() { Duration::ZERO } else { identity.up_for };
        let left = quarantine.saturating_sub(age);
        member.votes_from = identity.asked_at.saturating_add(left);
        if left.is_zero() { Finding::Fit } else { Finding::Quarantined(left) }
    }

    /// From when on the votes of a node count.
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

    fn roster() -> Roster {
        Roster::new(["a", "b", "c"].into_iter().map(Arc::from), QUARANTINE)
    }

    fn server(run: &str, up_for: u64, asked_at: u64) -> Identity {
        Identity {
            run: run.into(),
            up_for: Duration::from_secs(up_for),
            asked_at: at(asked_at),
            is_master: true,
            forgets_nothing: false,
        }
    }

    #[test]
    fn a_young_server_does_not_vote_before_what_it_forgot_has_expired() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &server("x", 4, 100)), Finding::Quarantined(Duration::from_secs(6)));
        assert_eq!(roster.votes_from(0), at(106));
        // Another connection to the same run changes nothing.
        assert_eq!(roster.meet(0, &server("x", 5, 101)), Finding::Fit);
        assert_eq!(roster.votes_from(0), at(106));
        assert_eq!(roster.meet(1, &server("y", 10, 100)), Finding::Fit);
        assert!(roster.votes_from(1) <= at(100));
    }

    #[test]
    fn another_server_behind_the_same_address_is_another_memory() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &server("x", 1_000, 100)), Finding::Fit);
        assert_eq!(roster.meet(0, &server("promoted", 5_000, 200)), Finding::Quarantined(QUARANTINE));
        assert_eq!(roster.votes_from(0), at(210));
    }

    #[test]
    fn another_run_is_known_from_the_one_before() {
        let mut roster = roster();
        assert!(!roster.knew_another(0, &server("x", 99, 100)), "nobody was there before");
        roster.meet(0, &server("x", 99, 100));
        assert!(!roster.knew_another(0, &server("x", 99, 100)));
        assert!(roster.knew_another(0, &server("y", 99, 100)));
        assert!(!roster.knew_another(1, &server("y", 99, 100)), "it was at another node");
    }

    #[test]
    fn a_server_that_forgets_nothing_votes_at_once() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &Identity { forgets_nothing: true, ..server("x", 0, 100) }), Finding::Fit);
        assert_eq!(roster.meet(0, &Identity { forgets_nothing: true, ..server("y", 0, 200) }), Finding::Fit);
    }

    #[test]
    fn replicas_and_duplicates_are_told() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &Identity { is_master: false, ..server("r", 99, 100) }), Finding::Replica);
        assert_eq!(roster.meet(0, &server("x", 99, 100)), Finding::Fit);
        assert_eq!(roster.meet(2, &server("x", 99, 100)), Finding::Duplicate("a".into()));
        // A name that leads elsewhere later is no duplicate any more.
        roster.meet(0, &server("y", 99, 200));
        assert_eq!(roster.meet(2, &server("x", 99, 200)), Finding::Fit);
    }

    #[test]
    fn without_a_quarantine_everybody_votes() {
        let mut roster = Roster::new(["a"].into_iter().map(Arc::from), Duration::ZERO);
        assert_eq!(roster.meet(0, &server("x", 0, 100)), Finding::Fit);
    }
}
