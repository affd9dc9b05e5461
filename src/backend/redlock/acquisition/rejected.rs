//! What follows a round that was lost to other contenders.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use super::QuorumAcquisition;
use crate::{
    backend::{
        Contention, NextStep, QueuePlace, QueueReport,
        redis::requests_and_replies::{AcquireMode, AcquireReply},
        redlock::{round::Round, round_pauses::vote_backoff},
    },
    sys::clock::{self, Moment},
};

/// Maximum number of lost rounds after which a caller still retries a split vote, although its wait
/// deadline has passed. Otherwise `try_lock` calls that start together could all fail, although no
/// contender got the lock.
const SPLIT_VOTE_RETRIES_MAX: u32 = 5;

impl QuorumAcquisition<'_> {
    /// Handles a round that was lost to other contenders. `queue_requested_before` says whether we
    /// had asked to join this queue before the round.
    pub(super) fn on_rejected(
        &mut self,
        mode: AcquireMode,
        queue_requested_before: bool,
        round: &Round,
    ) -> Contention {
        self.found_contended = true;
        // A poll of the queue node takes no votes, so the next round need not wait for longer.
        self.lost_rounds += u32::from(round.asked_all);
        (self.token_min, self.is_failing) = (None, false);
        let holder = round.holder(self.queue_node).map(|holder| match round.asked_all {
            true => holder.with_nodes(round.node_answers(self.redlock)),
            false => holder,
        });
        let next = self.next_step(mode, queue_requested_before, round);
        Contention { holder, next }
    }

    fn next_step(
        &mut self,
        mode: AcquireMode,
        queue_requested_before: bool,
        round: &Round,
    ) -> NextStep {
        let now = clock::now();
        let reply = round.reply_of(self.queue_node);
        if let Some(AcquireReply::Queued {
            holder, position, newly_queued, no_subscriber, ..
        }) = reply
        {
            self.queue_confirmed = true;
            return NextStep::AwaitGrant(QueueReport {
                place: QueuePlace(self.queue_node),
                position: *position,
                holder: holder.clone(),
                was_lost: queue_requested_before && *newly_queued,
                no_subscriber: *no_subscriber,
                sent_at: round.sent_at(self.queue_node).unwrap_or(now),
            });
        }
        let is_split = round.is_split();
        let pause = vote_backoff(self.lost_rounds, is_split, self.jitter_seed(now));
        // The head must ask again before its claim window on the queue node ends.
        let longest = if self.is_head { self.request.claim_window / 3 } else { Duration::MAX };
        let again_at = now.saturating_add(pause.min(longest));
        if mode == AcquireMode::Leave || now >= self.request.wait_deadline {
            if is_split
                && self.lost_rounds <= SPLIT_VOTE_RETRIES_MAX
                && again_at < self.request.call_deadline
            {
                return NextStep::AskAgainAt(again_at);
            }
            let may_be_queued = self.footprint.queued_on.contains(self.queue_node);
            let is_not_queued = mode == AcquireMode::Leave || !may_be_queued;
            if is_not_queued && matches!(reply, Some(AcquireReply::Busy { .. })) {
                // We left the queue, or were never in it. A vote is forgotten once it is released.
                self.footprint.forget(self.queue_node);
            }
            return NextStep::GiveUp;
        }
        // The queue belongs on an earlier node. A subscription moves there while its thread waits.
        let must_move = mode != AcquireMode::Try
            && round.claim_window_only
            && round.is_held_on(self.queue_node);
        if self.is_head || is_split || must_move {
            return NextStep::AskAgainAt(again_at);
        }
        // If the key holds another type, there is no queue to join.
        let exists = reply.is_some_and(|reply| !matches!(reply, AcquireReply::WrongType));
        NextStep::Queue { exists }
    }

    fn jitter_seed(&self, now: Moment) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.request.claim.id.as_str().hash(&mut hasher);
        now.as_nanos() ^ hasher.finish()
    }
}
