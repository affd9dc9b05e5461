//! `VoteReleases`: the releases of votes that a claim won in lost rounds.

use std::time::Duration;

use super::{
    BroadcastOptions, NodeConnections, Redlock, footprint::Footprint, responses::Response,
    round_pauses::release_wait_until,
};
use crate::{
    backend::{
        AcquireRequest,
        redis::{
            Exchange,
            requests::{Release, ReleaseReply},
        },
    },
    core::{ack::Ack, node_reply::Vote, quorum::NodeSet, validity::EXPIRY_SLACK},
    sys::clock::{self, Moment},
};

/// Minimum pause before a release that could not be sent is sent again; otherwise a node that is
/// skipped without a back-off would be asked in a tight loop.
const RESEND_PAUSE_MIN: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
pub(super) struct VoteReleases {
    /// Nodes on which the lock and the queue entry of our claim must be released before the next
    /// request, for example because the queue node changed.
    pub(super) to_release: NodeSet,
    /// Nodes to which the release of a vote could not be sent, and when to send it again.
    unsent: Vec<(usize, Moment)>,
    pending: Vec<PendingRelease>,
}

/// A release in flight to a node. Until it is confirmed or has expired, the node is asked for
/// nothing else, because the release could take effect after a later request.
#[derive(Debug)]
struct PendingRelease {
    node: usize,
    /// Time from which the node ignores the release.
    expires_at: Moment,
    /// Shows whether the reply has arrived; `None` if the reply was lost.
    ack: Option<Ack>,
}

impl PendingRelease {
    fn is_acknowledged(&self) -> bool {
        self.ack.as_ref().is_some_and(Ack::is_acknowledged)
    }

    /// Whether the node may have ignored the release as expired. A late reply may report that.
    fn may_have_expired(&self, now: Moment) -> bool {
        now >= self.expires_at
            || self.is_acknowledged() && now.saturating_add(EXPIRY_SLACK) >= self.expires_at
    }
}

impl VoteReleases {
    /// Nodes to which a release is in flight.
    pub(super) fn pending(&self) -> NodeSet {
        self.pending.iter().map(|release| release.node).collect()
    }

    /// Whether votes are still to be released, or their releases to be confirmed.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.pending.is_empty() || !self.unsent.is_empty()
    }

    /// Time at which the next release must be sent, or its node can be asked again in any case.
    pub(super) fn next_due(&self) -> Moment {
        let expiries = self.pending.iter().map(|release| release.expires_at);
        expiries.chain(self.unsent.iter().map(|(_, at)| *at)).min().unwrap_or(Moment::NEVER)
    }

    /// Drops the unsent releases of nodes that have replied to a later request. It decides whether
    /// their votes are released.
    pub(super) fn drop_unsent(&mut self, replied: NodeSet) {
        self.unsent.retain(|(node, _)| !replied.contains(*node));
    }

    /// Sends what is due, except to the nodes in `keep`.
    pub(super) fn send_due(
        &mut self,
        redlock: &Redlock,
        connections: &mut NodeConnections,
        footprint: &mut Footprint,
        request: &AcquireRequest<'_>,
        keep: NodeSet,
    ) {
        let now = clock::now();
        // A distant node always replies later than we wait, so read what has arrived since.
        for release in &self.pending {
            redlock.drain_replies(connections, release.node);
        }
        let expired = self.pending.iter().filter(|release| release.may_have_expired(now));
        let expired: NodeSet = expired.map(|release| release.node).collect();
        self.pending.retain(|release| now < release.expires_at && !release.is_acknowledged());
        let due = self.unsent.iter().filter(|(_, at)| now >= *at);
        let due: NodeSet = due.map(|(node, _)| *node).collect();
        self.drop_unsent(due.union(keep));
        // A release that was not confirmed in time may have been ignored, so send it again.
        let to_release = std::mem::take(&mut self.to_release)
            .union(expired.intersection(footprint.may_hold))
            .union(due)
            .difference(keep);
        let deadline = now.saturating_add(redlock.operation_timeout());
        self.send(redlock, connections, footprint, request, to_release, now, deadline);
    }

    /// Releases the votes that were won or may have been won. A node executes the release after the
    /// request, which was sent at `asked_at`. If a node does not confirm in time, it is not asked
    /// again until it has confirmed or the release has expired: a late release would free a vote
    /// that a later request has won.
    #[expect(clippy::too_many_arguments, reason = "one call, of one round")]
    pub(super) fn send(
        &mut self,
        redlock: &Redlock,
        connections: &mut NodeConnections,
        footprint: &mut Footprint,
        request: &AcquireRequest<'_>,
        nodes: NodeSet,
        asked_at: Moment,
        deadline: Moment,
    ) {
        if nodes.is_empty() {
            return;
        }
        let now = clock::now();
        let wait_until = release_wait_until(asked_at, now, request.call_deadline);
        if now >= wait_until {
            // The caller has no time left. Release these votes with the next round, or else in the
            // background.
            self.to_release = self.to_release.union(nodes);
            return;
        }
        let deadline = deadline.max(wait_until);
        let options =
            BroadcastOptions { wait_until, ..BroadcastOptions::awaiting_all(nodes, deadline) };
        let queue_entry = request.queue_entry();
        let release = Release::of_claim(request.claim, &queue_entry);
        let release = |_| Release { expires: true, ..release };
        let responses = redlock.ask(connections, options, release, |_, _| Vote::Yes);
        for node in nodes.iter() {
            match &responses.by_node[node] {
                // The node ignored the release, which had expired. We may still hold the lock
                // there.
                Response::Replied(Exchange { reply: ReleaseReply::Late, .. }) => {}
                Response::Replied(_) => footprint.forget(node),
                // Where we may be queued, we ask again, and keep our place until then.
                Response::Failed(failure) if !failure.outcome_unknown => {
                    if !footprint.queued_on.contains(node) {
                        let (health, now) = (&redlock.node(node).health, clock::now());
                        let at = health.backoff_until().max(now.saturating_add(RESEND_PAUSE_MIN));
                        self.unsent.push((node, at));
                    }
                }
                _ => {
                    let ack = responses.pending_acks.iter().find(|(of, _)| *of == node);
                    self.pending.push(PendingRelease {
                        node,
                        expires_at: deadline.saturating_add(EXPIRY_SLACK),
                        ack: ack.map(|(_, ack)| ack.clone()),
                    });
                    footprint.on_pending_release(deadline);
                }
            }
        }
    }
}
