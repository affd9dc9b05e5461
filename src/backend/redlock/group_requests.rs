//! Groups over several nodes: which are refused, turning a writer into a reader, and the members
//! that a quorum reports.

use std::collections::HashMap;

use super::{BroadcastOptions, NodeConnections, Redlock, Response, release::ReleaseRequest, round};
use crate::{
    backend::{
        Feature, OptionalCalls, Passed,
        error::BackendError,
        redis::{
            Exchange,
            list_requests::GroupReport,
            requests_and_replies::{Acquire, AcquireReply, Release},
        },
    },
    core::{
        claim::Claim,
        holder::Holder,
        kind::{HeldBy, LockKind},
        lease::Lease,
        lock_lost::LockLost,
        node_answer::Vote,
        quorum::{NodeDeadlines, Verdict},
        validity::deadline_from_sent,
    },
    sys::clock::{self, Moment},
};

impl OptionalCalls for Redlock {
    fn refusal_of(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            // Of each two quorums, one node decides: it keeps the lock for one holder, or for a
            // group without a limit. It cannot count the members that other quorums have.
            Feature::Kind(kind) => kind.membership().filter(|group| group.limit > 1).map(|_| {
                "over several nodes, counting permits on each of them could grant more than the \
                 limit; use one server for semaphores"
            }),
            other => other.refusal_of_mutexes_only(),
        }
    }

    /// Turns a writer into a reader on a quorum of the nodes. Asks once more if that fails: the
    /// first request gets half of the time. Until a node has carried it out, the node keeps the
    /// lock for the writer, which excludes others too. Renewals find such a node, and repair it.
    fn downgrade(&self, lease: &Lease, deadline: Moment) -> Result<Passed, BackendError> {
        let (claim, ttl) = (&lease.claim, lease.ttl());
        let request = |_| Acquire::downgrade(lease);
        let excluded = lease.node_deadlines.lock().excluded();
        let counts = |node, sent| self.votes_at(node, sent) && !excluded.contains(node);
        let vote = |node: usize, exchange: &Exchange<AcquireReply>| match exchange.reply {
            AcquireReply::Held { .. } if counts(node, exchange.sent) => Vote::Yes,
            AcquireReply::Held { .. } | AcquireReply::Late { .. } => Vote::Unknown,
            AcquireReply::WrongType | AcquireReply::Busy { .. } | AcquireReply::Queued { .. } => {
                Vote::No
            }
        };
        let halfway = deadline.halfway();
        let mut connections = self.checkout(deadline)?;
        let first = BroadcastOptions::new(self.all_nodes(), halfway);
        let mut responses = self.ask(&mut connections, first, request, vote);
        if responses.verdict() != Verdict::Granted && clock::now() < deadline {
            let second = BroadcastOptions::new(self.all_nodes(), deadline);
            responses = self.ask(&mut connections, second, request, vote);
        }
        drop(connections);
        match responses.verdict() {
            Verdict::Granted => {}
            Verdict::Rejected => {
                let by = responses.by_node.iter().find_map(|response| match response {
                    Response::Replied(exchange) => exchange.reply.holder().cloned().map(Box::new),
                    _ => None,
                });
                // A minority may still keep it. What this does not reach expires.
                let reader = Claim { kind: LockKind::Read, ..claim.clone() };
                let request = ReleaseRequest::new(Release::of_claim(&reader, ""), false);
                let release = |connections: &mut NodeConnections| {
                    self.release(connections, request, deadline)
                };
                let _ = self.pool().with_connections(deadline, release);
                return Ok(Passed::Lost(by.map_or(LockLost::Gone, |by| LockLost::Taken { by })));
            }
            Verdict::Pending | Verdict::NoQuorum => {
                return Err(BackendError::from_responses(self, responses, describe));
            }
        }
        let mut node_deadlines = NodeDeadlines::new(self.len());
        excluded.iter().for_each(|node| node_deadlines.exclude(node));
        for (node, (response, vote)) in responses.by_node.iter().zip(&responses.votes).enumerate() {
            match (response, vote) {
                (Response::Replied(exchange), Some(Vote::Yes)) => {
                    node_deadlines.confirm(node, deadline_from_sent(exchange.sent, ttl));
                }
                (Response::Replied(_), Some(Vote::No)) => node_deadlines.revoke(node),
                _ => {}
            }
        }
        Ok(Passed::To(lease.granted_until(node_deadlines)))
    }
}

/// Returns the group that the nodes report, with the members that at least `needed` of them report.
/// Others are claims that are not granted yet, or that have lost nodes. If the nodes have more
/// members than they list, their number is the largest that `needed` nodes reach.
pub(super) fn common_members<'a>(
    reports: impl Iterator<Item = &'a GroupReport> + Clone,
    needed: usize,
) -> Option<GroupReport> {
    let (mut members, mut counts): (Vec<Holder>, HashMap<&str, usize>) = Default::default();
    for member in reports.clone().flat_map(|report| &report.members) {
        let count = counts.entry(member.id()).or_default();
        *count += 1;
        if *count == needed {
            members.push(member.clone());
        }
    }
    let listed = members.iter().filter_map(|member| member.held_by().members()).sum();
    // A node counts all members of a group, but lists only the first of a large one.
    let size = |report: &GroupReport| report.held_by.members().unwrap_or(0);
    let is_cut_short = |report: &GroupReport| size(report) > report.members.len() as u64;
    let mut sizes: Vec<u64> = reports.clone().map(size).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let common_size = sizes.get(needed - 1).filter(|_| reports.clone().any(is_cut_short));
    let count = Some(common_size.copied().unwrap_or(0).max(listed));
    let held_by = match reports.clone().next()?.held_by {
        HeldBy::Permits { .. } => HeldBy::Permits { count },
        HeldBy::Readers { .. } | HeldBy::One => HeldBy::Readers { count },
    };
    Some(GroupReport { held_by, members })
}

fn describe(reply: &AcquireReply) -> String {
    match reply {
        AcquireReply::Held { .. } => "downgraded".into(),
        AcquireReply::WrongType => "not held".into(),
        other => round::describe(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_a_minority_are_left_out() {
        let report = |ids: &[&str]| {
            let held_by = HeldBy::Readers { count: Some(ids.len() as u64) };
            let one = HeldBy::Readers { count: Some(1) };
            let members = ids.iter().map(|id| Holder::from_member(id.as_bytes(), 9, one)).collect();
            GroupReport { held_by, members }
        };
        let reports = [report(&["a", "b"]), report(&["c", "a"]), report(&["b", "a"])];
        let group = common_members(reports.iter(), 2).unwrap();
        let ids: Vec<_> = group.members.iter().map(Holder::id).collect();
        assert_eq!(
            (ids.as_slice(), group.held_by),
            (&["a", "b"][..], HeldBy::Readers { count: Some(2) })
        );
        assert_eq!(common_members([].iter(), 2), None);
        let stray = [report(&["a"]), report(&["b"])];
        let group = common_members(stray.iter(), 2).unwrap();
        assert_eq!((group.members.len(), group.held_by), (0, HeldBy::Readers { count: Some(0) }));
    }

    /// Fault: N222
    #[test]
    fn members_that_no_node_lists_are_counted() {
        let one = HeldBy::Readers { count: Some(1) };
        let report = |size| GroupReport {
            held_by: HeldBy::Readers { count: Some(size) },
            members: vec![Holder::from_member(b"a", 9, one)],
        };
        let count = |sizes: [u64; 3]| {
            let group = common_members(sizes.map(report).iter(), 2).unwrap();
            group.held_by.members()
        };
        assert_eq!(count([1, 1, 1]), Some(1));
        assert_eq!(count([1_500, 1, 1_400]), Some(1_400));
        assert_eq!(count([1, 1_500, 0]), Some(1));
    }
}
