//! What Redlock can do of what not every backend can, and why it refuses the rest.

use super::{BroadcastOptions, NodeConnections, Redlock, Response, release::ReleaseRequest, round};
use crate::{
    backend::{
        Feature, OptionalCalls, Passed,
        error::BackendError,
        redis::{
            Exchange,
            requests::{Acquire, AcquireReply, Release},
        },
    },
    core::{
        claim::Claim,
        kind::LockKind,
        lease::Lease,
        lock_lost::LockLost,
        node_reply::Vote,
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
            AcquireReply::Held { .. } | AcquireReply::Late => Vote::Unknown,
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

fn describe(reply: &AcquireReply) -> String {
    match reply {
        AcquireReply::Held { .. } => "downgraded".into(),
        AcquireReply::WrongType => "not held".into(),
        other => round::describe(other),
    }
}
