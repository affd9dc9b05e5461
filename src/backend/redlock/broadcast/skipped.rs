//! Nodes that a broadcast asks, or goes on to wait for, only once the replies of the others show
//! that they are needed.

use super::Broadcast;
use crate::{
    backend::{
        redis::{Exchange, NodeError, NodeErrorKind, Request},
        redlock::Response,
    },
    core::{
        node_reply::Vote,
        quorum::{NodeSet, Verdict},
    },
    sys::clock::{self, Moment},
};

impl<C: Request, F: Fn(usize) -> C, V: Fn(usize, &Exchange<C::Reply>) -> Vote>
    Broadcast<'_, '_, C, F, V>
{
    /// If the other nodes do not suffice, asks the nodes that were skipped, because they may be
    /// healthy again. Asks none if an open connection broke, because the caller then asks all nodes
    /// again at once. Returns the new end of the wait. It leaves half of the remaining time, so
    /// that the caller can ask again if the skipped nodes do not reply.
    pub(super) fn ask_backed_off(&mut self, until: Moment) -> Moment {
        let now = clock::now();
        if self.options.will_retry || self.responses.verdict() != Verdict::NoQuorum || now >= until
        {
            return until;
        }
        let is_broken = |response: &Response<_>| {
            matches!(response, Response::Failed(NodeError { outcome_unknown: true, .. }))
        };
        let backed_off = self.backed_off();
        if backed_off.is_empty() || !self.responses.nodes_where(is_broken).is_empty() {
            return until;
        }
        backed_off.iter().for_each(|node| self.ask(node));
        now.saturating_add(until.duration_since(now) / 2)
    }

    /// Whether to go on waiting although a quorum has replied, because a silent node is needed.
    /// Asks the needed nodes that were skipped.
    pub(super) fn awaits_needed(&mut self) -> bool {
        let Some(needed) = self.options.needed else { return false };
        if self.responses.verdict() != Verdict::Granted {
            return false;
        }
        let now = clock::now();
        let latest = now.saturating_add(self.options.needed_wait);
        if now >= *self.needed_until.get_or_insert(latest) {
            return false;
        }
        let backed_off = self.backed_off();
        let needed = needed(self.unanswered().union(backed_off));
        needed.intersection(backed_off).iter().for_each(|node| self.ask(node));
        !needed.is_empty()
    }

    fn backed_off(&self) -> NodeSet {
        let is_backing_off = |response: &Response<_>| {
            matches!(response, Response::Failed(NodeError { kind: NodeErrorKind::BackingOff, .. }))
        };
        self.responses.nodes_where(is_backing_off).difference(self.unanswered())
    }
}
