//! `LostRounds`: the rounds that a claim has lost to other contenders, and what follows one. Pure.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use super::queue_position::QueuePosition;
use crate::{
    backend::{
        AcquireRequest, NextStep, QueuePlace, QueueReport,
        redis::requests::{AcquireMode, AcquireReply},
        redlock::{footprint::Footprint, round::Round, round_pauses::vote_backoff},
    },
    sys::clock::Moment,
};

/// Maximum number of lost rounds after which a caller still retries a split vote, although its wait
/// deadline has passed. Otherwise `try_lock` calls that start together could all fail, although no
/// contender got the lock.
const SPLIT_VOTE_RETRIES_MAX: u32 = 5;

#[derive(Debug, Default)]
pub(super) struct LostRounds {
    /// Number of those that asked all nodes. A poll of the queue node takes no votes, so the next
    /// round need not wait for longer.
    count: u32,
    /// There was one, also if it only asked the queue node.
    any: bool,
}

impl LostRounds {
    pub(super) fn any(&self) -> bool {
        self.any
    }

    pub(super) fn add(&mut self, asked_all: bool) {
        self.any = true;
        self.count += u32::from(asked_all);
    }

    /// Decides what follows `round`, which was lost and has been added.
    pub(super) fn next_step(
        &self,
        request: &AcquireRequest<'_>,
        mode: AcquireMode,
        queue: &mut QueuePosition,
        footprint: &mut Footprint,
        round: &Round,
        now: Moment,
    ) -> NextStep {
        let queue_node = queue.node();
        let reply = round.reply_of(queue_node);
        if let Some(AcquireReply::Queued {
            holder, position, newly_queued, no_subscriber, ..
        }) = reply
        {
            queue.on_confirmed();
            return NextStep::AwaitGrant(QueueReport {
                place: QueuePlace(queue_node),
                position: *position,
                holder: holder.clone(),
                was_lost: queue.was_requested() && *newly_queued,
                no_subscriber: *no_subscriber,
                sent_at: round.sent_at(queue_node).unwrap_or(now),
            });
        }
        let is_split = round.is_split();
        let pause = vote_backoff(self.count, is_split, jitter_seed(request, now));
        // The head must ask again before its claim window on the queue node ends.
        let longest = if queue.is_head() { request.claim_window / 3 } else { Duration::MAX };
        let again_at = now.saturating_add(pause.min(longest));
        if mode == AcquireMode::Leave || now >= request.wait_deadline {
            if is_split && self.count <= SPLIT_VOTE_RETRIES_MAX && again_at < request.call_deadline
            {
                return NextStep::AskAgainAt(again_at);
            }
            let may_be_queued = footprint.queued_on.contains(queue_node);
            let is_not_queued = mode == AcquireMode::Leave || !may_be_queued;
            if is_not_queued && matches!(reply, Some(AcquireReply::Busy { .. })) {
                // We left the queue, or were never in it. A vote is forgotten once it is released.
                footprint.forget(queue_node);
            }
            return NextStep::GiveUp;
        }
        // The queue belongs on an earlier node. A subscription moves there while its thread waits.
        let must_move =
            mode != AcquireMode::Try && round.claim_window_only && round.is_held_on(queue_node);
        if queue.is_head() || is_split || must_move {
            return NextStep::AskAgainAt(again_at);
        }
        // If the key holds another type, there is no queue to join.
        let exists = reply.is_some_and(|reply| !matches!(reply, AcquireReply::WrongType));
        NextStep::Queue { exists }
    }
}

fn jitter_seed(request: &AcquireRequest<'_>, now: Moment) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.claim.id.as_str().hash(&mut hasher);
    now.as_nanos() ^ hasher.finish()
}
