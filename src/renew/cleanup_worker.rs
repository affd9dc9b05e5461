//! Clean-up in pipelined batches. One by one, each entry would take a round trip; over a slow
//! connection, entries could be added faster than they are cleaned up.

use std::time::Duration;

use super::{cleanup_queue::Cleanup, worker::Worker};
use crate::{
    backend::{
        redis::requests_and_replies::{Ping, Release, ReleaseReply},
        redlock::{AskError, BroadcastOptions, Response, Responses},
    },
    core::{node_answer::Vote, quorum::NodeSet},
    sys::{
        clock::{self, Moment},
        display::Quoted,
    },
};

/// Maximum number of requests sent before their replies are read. Twice as many replies may be
/// unread on a connection.
pub(super) const PIPELINE_MAX: usize = 32;
/// Maximum time by which clean-up delays a due renewal.
const CLEANUP_SLICE_MAX: Duration = Duration::from_millis(50);

/// Time that clean-up that began at `since` has left before it must make room for renewals.
fn slice_left(since: Moment) -> Duration {
    since.saturating_add(CLEANUP_SLICE_MAX).duration_since(clock::now())
}

impl Worker {
    /// Cleans up what is due. Entries that fail are retried after their delay.
    pub(super) fn run_due_cleanups(&mut self, due: Vec<(Cleanup, Duration)>) {
        let (mut cleanups, delays): (Vec<_>, Vec<_>) = due.into_iter().unzip();
        let redlock = self.desk.redlock.clone();
        let now = clock::now();
        // Skip nodes in back-off; otherwise, many entries for them could delay the clean-up of
        // others.
        let is_backing_off =
            |node: &usize| redlock.len() > 1 && redlock.node(*node).is_backing_off(now);
        let mut unreachable = redlock.all_nodes().iter().filter(is_backing_off).collect();
        let error = self.release_batch(&mut cleanups, &mut unreachable, |_| {
            // A new deadline for each request: an expired one would close connections to healthy
            // nodes.
            Some(clock::now().saturating_add(redlock.operation_timeout()))
        });
        let mut left: Vec<_> = cleanups.into_iter().zip(delays).collect();
        left.retain(|(cleanup, _)| !cleanup.nodes.is_empty());
        if let (Some(error), Some((cleanup, _))) = (error, left.first()) {
            log_safely!(
                debug,
                "could not clean up lock {} yet: {error}",
                Quoted(cleanup.claim.key.name())
            );
        }
        let now = clock::now();
        let queue = &mut self.desk.shared.state.lock().cleanups;
        left.into_iter().for_each(|(cleanup, delay)| queue.retry_later(cleanup, delay, now));
    }

    /// Tries each entry of a batch once, and removes from it the nodes that confirm. Skips the
    /// nodes in `unreachable`, and adds those that do not reply or cannot be reached. `deadline`
    /// returns the time until which a reply is awaited, or `None` if there is no time for one.
    pub(super) fn release_batch(
        &mut self,
        batch: &mut [Cleanup],
        unreachable: &mut NodeSet,
        deadline: impl Fn(&Worker) -> Option<Moment>,
    ) -> Option<AskError> {
        let (since, count, mut error) = (clock::now(), batch.len(), None);
        for (index, cleanup) in batch.iter_mut().enumerate() {
            let targets = cleanup.nodes.difference(*unreachable);
            let Some(deadline) = deadline(self).filter(|_| !targets.is_empty()) else { continue };
            // With one node, wait for the first reply: it ensures that the server has the script.
            let first = index == 0 && (count == 1 || self.desk.redlock.len() == 1);
            let waits = first || !self.can_pipeline(targets);
            let wait_until = if waits { deadline } else { clock::now() };
            let round = BroadcastOptions {
                wait_until,
                ..BroadcastOptions::awaiting_all(targets, deadline)
            };
            let Some(responses) =
                self.isolate_panic(|worker| worker.release_one(cleanup, round, since))
            else {
                // Drop the entry: it would panic at every try and disturb the others.
                cleanup.nodes = NodeSet::EMPTY;
                continue;
            };
            if waits {
                *unreachable =
                    unreachable.union(responses.timed_out()).union(self.not_connected(&responses));
                if !cleanup.nodes.is_empty() {
                    error = Some(AskError::from_responses(&self.desk.redlock, responses, |_| {
                        "cleaned up".into()
                    }));
                }
            }
        }
        error = self.await_acks(batch, unreachable, deadline(self), since).or(error);
        batch.iter_mut().for_each(Cleanup::drop_acknowledged);
        error
    }

    /// Releases residue on the nodes of `round`, and removes the nodes that confirm from the entry.
    fn release_one(
        &mut self,
        cleanup: &mut Cleanup,
        round: BroadcastOptions<'_>,
        since: Moment,
    ) -> Responses<ReleaseReply> {
        let (claim, queue_entry) = (cleanup.claim.clone(), cleanup.queue_entry.clone());
        let release = |_| Release {
            key: &claim.key,
            id: claim.id.as_str().as_bytes(),
            queue_entry: &queue_entry,
            expires: false,
        };
        let mut responses = self.ask(round, slice_left(since), release, |_, _| Vote::Yes);
        cleanup.nodes = cleanup
            .nodes
            .difference(responses.nodes_where(|response| matches!(response, Response::Replied(_))));
        cleanup.pending_acks.append(&mut responses.pending_acks);
        responses
    }

    /// Pings the nodes with unread replies. The reply to the ping comes after those replies.
    fn await_acks(
        &mut self,
        batch: &[Cleanup],
        unreachable: &mut NodeSet,
        deadline: Option<Moment>,
        since: Moment,
    ) -> Option<AskError> {
        let targets = batch
            .iter()
            .fold(NodeSet::EMPTY, |targets, cleanup| targets.union(cleanup.awaiting_ack()));
        let targets = targets.difference(*unreachable);
        let round =
            BroadcastOptions::awaiting_all(targets, deadline.filter(|_| !targets.is_empty())?);
        let responses = self.isolate_panic(|worker| {
            worker.ask(round, slice_left(since), |_| Ping, |_, _| Vote::Yes)
        })?;
        *unreachable = unreachable.union(responses.timed_out());
        let answered = responses.nodes_voting(Vote::Yes);
        (!targets.difference(answered).is_empty())
            .then(|| AskError::from_responses(&self.desk.redlock, responses, |()| "replied".into()))
    }
}
