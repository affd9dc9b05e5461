//! `Claim` (what is requested) and `Grant` (what the nodes granted). Pure.

use std::time::Duration;

use crate::{
    core::{
        ack::PendingAcks,
        id::LockId,
        key::LockKey,
        kind::LockKind,
        quorum::{NodeDeadlines, NodeSet},
        token::FencingToken,
        validity::deadline_from_sent,
    },
    sys::clock::Moment,
};

/// Number of tokens after that of each grant that nobody else is granted: how often a process may
/// hand a lock over without the server. `RESERVED` in prelude.lua has the same value.
pub(crate) const TOKENS_RESERVED: u16 = 9_999;

/// One acquisition of one lock. All its requests have the same id until the outcome is known.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) key: LockKey,
    pub(crate) id: LockId,
    pub(crate) ttl: Duration,
    pub(crate) kind: LockKind,
    /// Fencing token of the holder; 0 while the lock is not granted.
    pub(crate) token: u64,
}

impl Claim {
    pub(crate) fn ttl_ms(&self) -> u64 {
        whole_ms(self.ttl)
    }
}

/// A ttl as servers are sent it.
pub(crate) fn whole_ms(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)
}

/// A granted lock. It is valid while a quorum keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) token: FencingToken,
    /// Earliest time at which a server can have granted the lock. Of a lock that was handed over
    /// inside the process, the beginning of the new hold.
    pub(crate) since: Moment,
    /// Deadline of the lock on each node.
    pub(crate) node_deadlines: NodeDeadlines,
    /// At least one node granted the lock for the claim window only, so it must be confirmed soon.
    pub(crate) provisional: bool,
    pub(crate) in_flight: InFlight,
    /// Nodes that may hold the lock.
    pub(crate) may_hold: NodeSet,
    /// Queue entry that may still be queued, or be added by a late request; or empty.
    pub(crate) queue_entry: String,
    /// The release need not send the token: what keeps later tokens above it has it already. Only
    /// backends look at this.
    pub(crate) is_token_in_fence: bool,
}

/// Requests of a successful claim that may still be applied. Applied after the release, such a
/// request would acquire the lock again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct InFlight {
    /// Latest time at which requests whose connection broke can still be applied.
    pub(crate) broken_until: Moment,
    /// Nodes that had not replied when the quorum was reached, and the latest time at which they
    /// can still apply the request.
    pub(crate) unanswered: NodeSet,
    pub(crate) unanswered_until: Moment,
}

impl InFlight {
    /// Nodes that have not replied and can still apply the request at `now`.
    pub(crate) fn unanswered_at(&self, now: Moment) -> NodeSet {
        if now < self.unanswered_until { self.unanswered } else { NodeSet::EMPTY }
    }

    /// Nodes of `all` that must be released once more after a release at `now`, and from when on.
    /// `released_on` are the nodes that have released the lock.
    pub(crate) fn left_after_release(
        &self,
        now: Moment,
        all: NodeSet,
        released_on: NodeSet,
    ) -> (NodeSet, Moment) {
        if now < self.broken_until {
            (all, self.until())
        } else {
            (self.unanswered_at(now).difference(released_on), self.unanswered_until)
        }
    }

    /// Latest time at which any of these requests can be applied.
    pub(crate) fn until(&self) -> Moment {
        if self.unanswered.is_empty() {
            self.broken_until
        } else {
            self.broken_until.max(self.unanswered_until)
        }
    }
}

/// Content of a grant message: the server has given the lock to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantNotice {
    pub(crate) token: u64,
    pub(crate) granted_at_us: u64,
    pub(crate) px_ms: u64,
    /// Number of the server whose clock this is, if several grant locks on their own; otherwise 0.
    pub(crate) server: u64,
}

/// What a claim may have left on the servers: the lock, or its queue entry. Only backends look
/// inside.
#[derive(Clone, Debug)]
pub(crate) struct Residue {
    pub(crate) nodes: NodeSet,
    /// Queue entry of the claim, or empty.
    pub(crate) queue_entry: String,
    /// Latest time at which a request that is still in flight can take effect.
    pub(crate) in_flight_until: Moment,
    /// Time until which the lock stays taken although it is released; `Moment::default()` for not
    /// at all.
    pub(crate) keep_until: Moment,
    /// Acks of a release that was sent to all these nodes. If there are any, the residue is cleaned
    /// up where the release is not acknowledged at `in_flight_until`.
    pub(crate) pending_acks: PendingAcks,
}

impl Residue {
    /// A residue without unread replies.
    pub(crate) fn new(nodes: NodeSet, queue_entry: &str, in_flight_until: Moment) -> Residue {
        let (queue_entry, pending_acks) = (queue_entry.to_owned(), PendingAcks::new());
        let keep_until = Moment::default();
        Residue { nodes, queue_entry, in_flight_until, keep_until, pending_acks }
    }

    /// For how long the lock stays taken if it is released at `now`, in milliseconds.
    pub(crate) fn keep_ms(&self, now: Moment) -> u64 {
        whole_ms(self.keep_until.duration_since(now))
    }

    /// Gives up what is left.
    pub(crate) fn clear(&mut self) {
        self.nodes = NodeSet::EMPTY;
    }

    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Whether all nodes have acknowledged the release.
    pub(crate) fn is_acknowledged(&self) -> bool {
        self.nodes.difference(self.nodes_by_ack(true)).is_empty()
    }

    /// Nodes that have been asked and have not replied.
    pub(crate) fn awaiting_ack(&self) -> NodeSet {
        self.nodes_by_ack(false).intersection(self.nodes)
    }

    /// Removes the nodes that have acknowledged the release.
    pub(crate) fn drop_acknowledged(&mut self) {
        self.nodes = self.nodes.difference(self.nodes_by_ack(true));
        self.pending_acks.retain(|(_, ack)| !ack.is_acknowledged());
    }

    fn nodes_by_ack(&self, acknowledged: bool) -> NodeSet {
        let acks = self.pending_acks.iter();
        let matching = acks.filter(|(_, ack)| ack.is_acknowledged() == acknowledged);
        matching.map(|(node, _)| *node).collect()
    }
}

impl Grant {
    /// What a server that decides alone has granted for `ttl` from `since` on. Requests whose
    /// connection broke can still be applied until `broken_until`.
    pub(crate) fn of_one_server(
        token: u64,
        since: Moment,
        ttl: Duration,
        broken_until: Moment,
    ) -> Grant {
        let mut node_deadlines = NodeDeadlines::new(1);
        node_deadlines.confirm(0, deadline_from_sent(since, ttl));
        let unanswered = NodeSet::EMPTY;
        Grant {
            token: FencingToken(token),
            since,
            node_deadlines,
            provisional: false,
            in_flight: InFlight { broken_until, unanswered, unanswered_until: broken_until },
            may_hold: NodeSet::single(0),
            queue_entry: String::new(),
            is_token_in_fence: false,
        }
    }

    pub(crate) fn deadline(&self) -> Moment {
        self.node_deadlines.valid_until().unwrap_or(Moment::from_nanos(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::id::generate_lock_id;

    #[test]
    fn unanswered_nodes_count_until_their_deadline() {
        let (begun, open_until) = (Moment::from_nanos(5), Moment::from_nanos(9));
        let late = InFlight {
            broken_until: begun,
            unanswered: NodeSet::single(2),
            unanswered_until: open_until,
        };
        assert_eq!(late.unanswered_at(begun), NodeSet::single(2));
        assert_eq!(late.unanswered_at(Moment::from_nanos(8)), NodeSet::single(2));
        assert_eq!(late.unanswered_at(open_until), NodeSet::EMPTY);
        assert_eq!(late.unanswered_at(Moment::from_nanos(10)), NodeSet::EMPTY);
        assert_eq!(late.until(), open_until);
        assert_eq!(InFlight { unanswered: NodeSet::EMPTY, ..late }.until(), begun);
    }

    #[test]
    fn ttl_rounded_down_to_whole_milliseconds() {
        let ask_for = |ttl| {
            let (key, kind) = (LockKey::new("", "x").unwrap(), LockKind::Mutex);
            Claim { key, id: generate_lock_id(), ttl, kind, token: 0 }.ttl_ms()
        };
        assert_eq!(ask_for(Duration::from_micros(1_500_999)), 1_500);
        assert_eq!(ask_for(Duration::MAX), u64::MAX);
    }
}
