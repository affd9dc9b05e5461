//! `Roster`: which server stands behind each of several nodes, and whether it may vote. Pure.
//!
//! A node that lost its memory has forgotten whom it gave locks to, and would give them to others. It may vote again when
//! the longest lease has passed, for then whatever it forgot has expired. A node whose run is younger than that, or that
//! turns out to be another server than before, is taken to have lost its memory, unless what it kept proves that it has
//! not: a node that writes all down before it answers is told to remember for how long it has done so. Who follows another
//! server takes over that one's memory, as far as it was sent, in place of its own.

use std::{mem, sync::Arc, time::Duration};

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
    promotion: Option<String>,
    /// The run that was met last as a replica, if it has not been met as a master since.
    replica: Option<String>,
    /// It was led to another node's server after its run, which may since be another node's.
    astray: bool,
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

/// What a node that was just met has to be told, about its memory and for the next run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upkeep {
    /// It loses nothing from now on, in this run at least, and has lost nothing for this long.
    Remember(Duration),
    /// What it remembers proves nothing any more, for it may lose what comes now, or has it from its master. Then it has to be
    /// met again, if ever.
    Forget(Moment),
    /// It is too early to tell it anything; it has to be met again, no earlier than then.
    MeetAgain(Moment),
    Nothing,
}

impl Roster {
    pub(crate) fn new(labels: impl Iterator<Item = Arc<str>>, quarantine: Duration) -> Roster {
        let votes_from = Moment::from_nanos(0);
        let member = |label| Member { label, run: None, promotion: None, replica: None, astray: false, votes_from };
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
            if let Some(member) = self.nodes.get_mut(node) {
                member.replica = Some(identity.run.clone());
            }
            return Finding::Replica;
        }
        let is_here = |member: &Member| !member.astray && member.run.as_ref() == Some(&identity.run);
        let twin = self.nodes.iter().enumerate().find(|(other, member)| *other != node && is_here(member));
        let twin = twin.map(|(_, twin)| twin.label.clone());
        let quarantine = self.quarantine;
        let Some(member) = self.nodes.get_mut(node) else { return Finding::Fit };
        member.astray = twin.is_some();
        if let Some(twin) = twin {
            return Finding::Duplicate(twin);
        }
        let known = member.run.replace(identity.run.clone());
        let before = mem::replace(&mut member.promotion, identity.promotion.clone());
        let was_replica = member.replica.take().as_ref() == Some(&identity.run);
        let was_promoted = identity.promotion.is_some() && identity.promotion != before;
        if known.as_ref() == Some(&identity.run) && !was_replica && !was_promoted {
            return Finding::Fit;
        }
        // Another run, however old, is another memory; the first that is seen is judged by its age.
        let age = if known.is_none() && !was_replica { identity.up_for } else { Duration::ZERO };
        let kept = identity.memory.filter(|_| identity.forgets_nothing && !was_replica).unwrap_or_default();
        let from = identity.asked_at.saturating_add(quarantine.saturating_sub(age.max(kept)));
        // What a memory proves may be its master's, if it was one of a replica in the run before.
        member.votes_from = member.votes_from.max(from);
        let left = member.votes_from.after(identity.asked_at);
        if left.is_zero() { Finding::Fit } else { Finding::Quarantined(left) }
    }

    /// What has to be done about the memory of a node that was just met and found fit.
    pub(crate) fn upkeep(&self, node: usize, identity: &Identity) -> Upkeep {
        let votes_from = self.votes_from(node);
        let lasted = if identity.promotion.is_some() { identity.up_for } else { identity.memory.unwrap_or_default() };
        match (identity.forgets_nothing, identity.memory) {
            _ if self.quarantine.is_zero() => Upkeep::Nothing,
            (false, Some(_)) if identity.promotion.is_some() => Upkeep::Forget(votes_from),
            (false, Some(_)) => Upkeep::Forget(Moment::NEVER),
            (false, None) if identity.promotion.is_none() => Upkeep::Nothing,
            _ if votes_from > identity.asked_at => Upkeep::MeetAgain(votes_from),
            _ => Upkeep::Remember(lasted.max(self.quarantine)),
        }
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
            promotion: None,
            forgets_nothing: false,
            memory: None,
        }
    }

    fn promoted(run: &str, promotion: &str, up_for: u64, asked_at: u64) -> Identity {
        Identity { promotion: Some(promotion.into()), ..server(run, up_for, asked_at) }
    }

    fn durable(run: &str, up_for: u64, asked_at: u64, memory: Option<u64>) -> Identity {
        let memory = memory.map(Duration::from_secs);
        Identity { forgets_nothing: true, memory, ..server(run, up_for, asked_at) }
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
    fn a_promoted_server_is_told_for_how_long_it_has_been_the_master() {
        let mut roster = roster();
        let fresh = promoted("x", "first", 0, 100);
        assert_eq!(roster.meet(0, &fresh), Finding::Quarantined(QUARANTINE));
        assert_eq!(roster.upkeep(0, &fresh), Upkeep::MeetAgain(at(110)));
        // What it remembers is its master's.
        assert_eq!(roster.upkeep(0, &Identity { memory: Some(QUARANTINE), ..fresh }), Upkeep::Forget(at(110)));
        let lasted = promoted("x", "first", 0, 110);
        assert_eq!(roster.meet(0, &lasted), Finding::Fit);
        assert_eq!(roster.votes_from(0), at(110));
        assert_eq!(roster.upkeep(0, &lasted), Upkeep::Remember(QUARANTINE));
        let minute = Duration::from_secs(60);
        assert_eq!(roster.upkeep(0, &promoted("x", "first", 60, 111)), Upkeep::Remember(minute));
        // It does not tell for ever that it was a replica.
        assert_eq!(roster.meet(0, &server("x", 5_000, 200)), Finding::Fit);
        // Who was told so votes at once, where nobody else was met before.
        assert_eq!(roster.meet(1, &promoted("y", "second", 10, 200)), Finding::Fit);
        assert_eq!(roster.meet(1, &promoted("z", "third", 10, 200)), Finding::Quarantined(QUARANTINE));
    }

    #[test]
    fn a_server_that_was_a_replica_meanwhile_has_another_memory() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &server("x", 99, 100)), Finding::Fit);
        assert_eq!(roster.meet(0, &promoted("x", "first", 60, 200)), Finding::Quarantined(QUARANTINE));
        assert_eq!(roster.meet(0, &promoted("x", "second", 60, 300)), Finding::Quarantined(QUARANTINE));
        assert_eq!(roster.votes_from(0), at(310));
    }

    /// Also where it does not tell any more when it is met again.
    #[test]
    fn a_server_that_was_met_as_a_replica_has_another_memory() {
        let mut roster = roster();
        let replica = |run, asked_at| Identity { is_master: false, ..server(run, 99, asked_at) };
        roster.meet(0, &server("x", 99, 100));
        for (node, run) in [(0, "x"), (1, "y")] {
            assert_eq!(roster.meet(node, &replica(run, 200)), Finding::Replica);
            // What it remembers is its master's.
            let master = |asked_at| durable(run, 99, asked_at, Some(60));
            assert_eq!(roster.meet(node, &master(300)), Finding::Quarantined(QUARANTINE));
            assert_eq!(roster.meet(node, &master(301)), Finding::Fit);
            assert_eq!(roster.votes_from(node), at(310));
        }
    }

    /// Its next run has the same memory, its master's, and nobody has met that one as a replica.
    #[test]
    fn a_restart_does_not_end_a_quarantine_before_its_time() {
        let mut roster = roster();
        let replica = Identity { is_master: false, ..server("x", 99, 300) };
        assert_eq!(roster.meet(0, &replica), Finding::Replica);
        assert_eq!(roster.meet(0, &durable("x", 99, 301, Some(60))), Finding::Quarantined(QUARANTINE));
        let left = Finding::Quarantined(Duration::from_secs(9));
        assert_eq!(roster.meet(0, &durable("restarted", 0, 302, Some(60))), left);
        assert_eq!(roster.votes_from(0), at(311));
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
    fn a_server_that_has_proved_its_memory_votes_at_once() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &durable("x", 0, 100, Some(10))), Finding::Fit);
        assert_eq!(roster.meet(0, &durable("y", 0, 200, Some(60))), Finding::Fit);
        assert!(roster.votes_from(0) <= at(200));
    }

    #[test]
    fn settings_alone_prove_nothing() {
        let mut roster = roster();
        assert_eq!(roster.meet(0, &durable("x", 99, 100, None)), Finding::Fit, "it is old enough");
        assert_eq!(roster.meet(0, &durable("y", 0, 200, None)), Finding::Quarantined(QUARANTINE), "its disk is empty");
        assert_eq!(roster.meet(1, &durable("z", 1, 200, None)), Finding::Quarantined(Duration::from_secs(9)));
        assert_eq!(roster.meet(2, &durable("short", 1, 200, Some(4))), Finding::Quarantined(Duration::from_secs(6)));
        // What another setting let through may be lost.
        let everysec = Identity { memory: Some(QUARANTINE), ..server("w", 0, 300) };
        assert_eq!(roster.meet(0, &everysec), Finding::Quarantined(QUARANTINE));
    }

    #[test]
    fn a_memory_is_told_when_it_has_lasted() {
        let mut roster = roster();
        let young = durable("x", 4, 100, None);
        roster.meet(0, &young);
        assert_eq!(roster.upkeep(0, &young), Upkeep::MeetAgain(at(106)));
        assert_eq!(roster.upkeep(0, &durable("x", 9, 105, None)), Upkeep::MeetAgain(at(106)));
        assert_eq!(roster.upkeep(0, &durable("x", 10, 106, None)), Upkeep::Remember(QUARANTINE));
        assert_eq!(roster.upkeep(0, &durable("x", 10, 107, Some(1))), Upkeep::Remember(QUARANTINE));
        // What others with longer leases have found out stands.
        assert_eq!(roster.upkeep(0, &durable("x", 99, 108, Some(60))), Upkeep::Remember(Duration::from_secs(60)));
    }

    #[test]
    fn a_memory_that_proves_nothing_is_taken_away() {
        let mut roster = roster();
        let everysec = server("x", 99, 100);
        roster.meet(0, &everysec);
        assert_eq!(roster.upkeep(0, &everysec), Upkeep::Nothing);
        assert_eq!(roster.upkeep(0, &Identity { memory: Some(QUARANTINE), ..everysec }), Upkeep::Forget(Moment::NEVER));
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
    fn names_that_change_places_are_no_duplicates_for_ever() {
        let mut roster = roster();
        let servers = [server("x", 99, 100), server("y", 99, 100), server("z", 99, 100)];
        for (node, server) in servers.iter().enumerate() {
            assert_eq!(roster.meet(node, server), Finding::Fit);
        }
        // In a circle: only the last one finds its new server's former name given up.
        for (node, label) in [(0, "b"), (1, "c")] {
            assert_eq!(roster.meet(node, &servers[node + 1]), Finding::Duplicate(label.into()));
        }
        for (node, led_to) in [(2, 0), (1, 2), (0, 1)] {
            assert_eq!(roster.meet(node, &servers[led_to]), Finding::Quarantined(QUARANTINE), "another memory");
            assert_eq!(roster.meet(node, &servers[led_to]), Finding::Fit);
            assert_eq!(roster.votes_from(node), at(110));
        }
        // A second name for a server stays out, whoever else has been refused.
        assert_eq!(roster.meet(0, &servers[0]), Finding::Duplicate("c".into()));
        assert_eq!(roster.meet(2, &servers[0]), Finding::Fit);
    }

    /// Nobody else has taken its server meanwhile.
    #[test]
    fn a_name_that_led_elsewhere_for_a_moment_is_the_same_node() {
        let mut roster = roster();
        roster.meet(0, &server("x", 99, 100));
        roster.meet(1, &server("y", 99, 100));
        assert_eq!(roster.meet(0, &server("y", 99, 101)), Finding::Duplicate("b".into()));
        assert_eq!(roster.meet(0, &server("x", 99, 102)), Finding::Fit);
        assert_eq!(roster.meet(2, &server("x", 99, 103)), Finding::Duplicate("a".into()));
    }

    #[test]
    fn without_a_quarantine_everybody_votes() {
        let mut roster = Roster::new(["a"].into_iter().map(Arc::from), Duration::ZERO);
        assert_eq!(roster.meet(0, &server("x", 0, 100)), Finding::Fit);
        assert_eq!(roster.upkeep(0, &durable("x", 0, 100, Some(9))), Upkeep::Nothing);
    }
}
