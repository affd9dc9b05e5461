//! The thread that cleans up, in pipelined batches. One by one, each entry would take a round trip;
//! over a slow connection, entries could be added faster than they are cleaned up.
//!
//! Invariant: an entry that is taken from the queue is cleaned up, has expired, or is put back;
//! after a shutdown, what is left expires.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use super::{Due, Shared, Step, queue::Cleanup};
use crate::{
    backend::{
        redis::{
            Exchange, Request,
            requests_and_replies::{Ping, Release, ReleaseReply},
        },
        redlock::{AskError, BroadcastOptions, NodeConnections, Redlock, Response, Responses},
    },
    core::{node_answer::Vote, quorum::NodeSet},
    sys::{
        clock::{self, Moment},
        display::Quoted,
        threads,
    },
};

/// Maximum number of requests sent before their replies are read. Twice as many replies may be
/// unread on a connection.
const PIPELINE_MAX: usize = 32;
/// Time without work after which the thread ends.
const IDLE_MAX: Duration = Duration::from_secs(1);
/// Maximum wait for the replies of several nodes, of which some may not reply at all; enough for a
/// slow connection. A later reply counts at the next try.
const REPLY_WAIT_MAX: Duration = Duration::from_millis(250);
/// Interval at which an exchange checks whether the manager shuts down.
const SHUTDOWN_CHECK_INTERVAL: Duration = Duration::from_millis(20);

pub(super) struct Worker {
    redlock: Arc<Redlock>,
    shared: Arc<Shared>,
    /// Open when they are first used.
    connections: NodeConnections,
}

/// Limits of the exchanges about one batch.
#[derive(Clone, Copy)]
enum Limits {
    /// One operation timeout for each exchange, until the manager shuts down.
    UntilShutdown,
    /// Half of the time that is left until this deadline, which leaves the other half for a second
    /// try.
    HalfUntil(Moment),
}

impl Worker {
    pub(super) fn new(redlock: Arc<Redlock>, shared: Arc<Shared>) -> Worker {
        Worker { connections: redlock.reserved_connections(), redlock, shared }
    }

    pub(super) fn run(mut self) {
        self.shared.state.lock().thread_id = threads::current();
        loop {
            match self.shared.next_step(PIPELINE_MAX, IDLE_MAX) {
                Step::CleanUp(Due { cleanups, overflowed }) => {
                    if overflowed {
                        log_safely!(
                            warn,
                            "the clean-up queue is full; some abandoned locks are left to expire"
                        );
                    }
                    self.clean_up(cleanups);
                }
                Step::Drain(cleanups, deadline) => self.drain(cleanups, deadline),
                Step::Idle => {
                    // Closed before the end is reported, and not under the mutex.
                    self.connections = self.redlock.reserved_connections();
                    if self.shared.try_end() {
                        return;
                    }
                }
            }
        }
    }

    /// Tries each entry once. Entries that fail are retried after their delay.
    fn clean_up(&mut self, due: Vec<(Cleanup, Duration)>) {
        let (mut cleanups, delays): (Vec<_>, Vec<_>) = due.into_iter().unzip();
        let now = clock::now();
        // Skip nodes in back-off; otherwise, many entries for them could delay the clean-up of
        // others.
        let is_backing_off =
            |node: &usize| self.redlock.len() > 1 && self.redlock.node(*node).is_backing_off(now);
        let mut unreachable = self.redlock.all_nodes().iter().filter(is_backing_off).collect();
        let error = self.release_batch(&mut cleanups, &mut unreachable, Limits::UntilShutdown);
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
        let queue = &mut self.shared.state.lock().queue;
        left.into_iter().for_each(|(cleanup, delay)| queue.retry_later(cleanup, delay, now));
    }

    /// Cleans up at a shutdown. A second pass makes up for lost replies and for connections that
    /// were closed meanwhile.
    fn drain(&mut self, mut remaining: Vec<Cleanup>, deadline: Moment) {
        let first = self.release_all(&mut remaining, deadline);
        let error = self.release_all(&mut remaining, deadline).or(first);
        if !remaining.is_empty() {
            let why = error.map_or_else(
                || "some replies did not come in time".into(),
                |error| error.to_string(),
            );
            let count = remaining.len();
            log_safely!(
                warn,
                "could not release {count} locks at shutdown: {why}; they are left to expire"
            );
        }
    }

    /// Tries each entry once, and keeps the entries that nodes have not confirmed. Skips a node for
    /// the remaining entries once it does not reply or cannot be reached.
    fn release_all(&mut self, remaining: &mut Vec<Cleanup>, deadline: Moment) -> Option<AskError> {
        let (mut unreachable, mut error) = (NodeSet::EMPTY, None);
        for batch in remaining.chunks_mut(PIPELINE_MAX) {
            let limits = Limits::HalfUntil(deadline);
            error = self.release_batch(batch, &mut unreachable, limits).or(error);
        }
        remaining.retain(|cleanup| !cleanup.nodes.is_empty());
        error
    }

    /// Tries each entry of a batch once, and removes from it the nodes that confirm. Skips the
    /// nodes in `unreachable`, and adds those that do not reply or cannot be reached.
    fn release_batch(
        &mut self,
        batch: &mut [Cleanup],
        unreachable: &mut NodeSet,
        limits: Limits,
    ) -> Option<AskError> {
        let (count, mut error) = (batch.len(), None);
        for (index, cleanup) in batch.iter_mut().enumerate() {
            let targets = cleanup.nodes.difference(*unreachable);
            let Some(round) = self.round(targets, limits) else { continue };
            // With one node, wait for the first reply: it ensures that the server has the script.
            let first = index == 0 && (count == 1 || self.redlock.len() == 1);
            let waits = first || !self.can_pipeline(targets);
            let wait_until = if waits { round.wait_until } else { clock::now() };
            let round = BroadcastOptions { wait_until, ..round };
            let Some(responses) =
                self.isolate_panic(|worker| worker.release_one(cleanup, round, limits))
            else {
                // Drop the entry: it would panic at every try and disturb the others.
                cleanup.nodes = NodeSet::EMPTY;
                continue;
            };
            if waits {
                *unreachable =
                    unreachable.union(responses.timed_out()).union(self.not_connected(&responses));
                if !cleanup.nodes.is_empty() {
                    error = Some(AskError::from_responses(&self.redlock, responses, |_| {
                        "cleaned up".into()
                    }));
                }
            }
        }
        error = self.await_acks(batch, unreachable, limits).or(error);
        batch.iter_mut().for_each(Cleanup::drop_acknowledged);
        error
    }

    /// Releases residue on the nodes of `round`, and removes the nodes that confirm from the entry.
    fn release_one(
        &mut self,
        cleanup: &mut Cleanup,
        round: BroadcastOptions<'_>,
        limits: Limits,
    ) -> Responses<ReleaseReply> {
        let (claim, queue_entry) = (cleanup.claim.clone(), cleanup.queue_entry.clone());
        let release = |_| Release {
            key: &claim.key,
            id: claim.id.as_str().as_bytes(),
            queue_entry: &queue_entry,
            expires: false,
        };
        let mut responses = self.ask(round, limits, release, |_, _| Vote::Yes);
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
        limits: Limits,
    ) -> Option<AskError> {
        let targets = batch
            .iter()
            .fold(NodeSet::EMPTY, |targets, cleanup| targets.union(cleanup.awaiting_ack()));
        let targets = targets.difference(*unreachable);
        let round = self.round(targets, limits)?;
        let responses =
            self.isolate_panic(|worker| worker.ask(round, limits, |_| Ping, |_, _| Vote::Yes))?;
        *unreachable = unreachable.union(responses.timed_out());
        let answered = responses.nodes_voting(Vote::Yes);
        (!targets.difference(answered).is_empty())
            .then(|| AskError::from_responses(&self.redlock, responses, |()| "replied".into()))
    }

    /// A broadcast to these nodes; `None` if there are none, or no time for a reply. Each has a new
    /// deadline: an expired one would close connections to healthy nodes.
    fn round(&self, targets: NodeSet, limits: Limits) -> Option<BroadcastOptions<'static>> {
        let now = clock::now();
        let round = |deadline| BroadcastOptions::awaiting_all(targets, deadline);
        match limits {
            _ if targets.is_empty() => None,
            Limits::UntilShutdown => {
                let round = round(now.saturating_add(self.redlock.operation_timeout()));
                let wait_until = match self.redlock.len() {
                    1 => round.deadline,
                    _ => round.deadline.min(now.saturating_add(REPLY_WAIT_MAX)),
                };
                Some(BroadcastOptions { wait_until, ..round })
            }
            Limits::HalfUntil(end) if now < end => {
                Some(round(now.saturating_add(end.duration_since(now) / 2)))
            }
            Limits::HalfUntil(_) => None,
        }
    }

    /// Sends a request and collects the replies.
    fn ask<C: Request>(
        &mut self,
        round: BroadcastOptions<'_>,
        limits: Limits,
        call: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Exchange<C::Reply>) -> Vote,
    ) -> Responses<C::Reply> {
        let shared = self.shared.clone();
        // The time that remains after the shutdown began is needed to release what is held.
        let mut until_shutdown = |now: Moment| {
            (!shared.is_shutting_down()).then(|| now.saturating_add(SHUTDOWN_CHECK_INTERVAL))
        };
        let on_idle: Option<&mut dyn FnMut(Moment) -> Option<Moment>> = match limits {
            Limits::UntilShutdown => Some(&mut until_shutdown),
            Limits::HalfUntil(_) => None,
        };
        let round = BroadcastOptions { on_idle, ..round };
        self.redlock.ask(&mut self.connections, round, call, vote)
    }

    /// Whether requests to these nodes can be sent now, and their replies read later.
    fn can_pipeline(&self, nodes: NodeSet) -> bool {
        nodes.iter().all(|node| {
            self.connections.0[node].is_connected()
                && self.connections.0[node].unread_count() < PIPELINE_MAX
        })
    }

    /// Nodes to which nothing was sent because there is no connection.
    fn not_connected<T>(&self, responses: &Responses<T>) -> NodeSet {
        let unsent = responses.nodes_where(
            |response| matches!(response, Response::Failed(failure) if !failure.outcome_unknown),
        );
        unsent.iter().filter(|node| !self.connections.0[*node].is_connected()).collect()
    }

    /// Runs `action` and catches a panic, so that a bug in the handling of one lock does not affect
    /// the others. Returns `None` after a panic.
    fn isolate_panic<T>(&mut self, action: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let result = catch_unwind(AssertUnwindSafe(|| action(self)));
        result
            .map_err(|panic| {
                mem::forget(panic);
                // Replies in flight on the old connections cannot be matched to requests any more.
                self.connections = self.redlock.reserved_connections();
                log_safely!(error, "internal error in the clean-up of locks; please report it");
            })
            .ok()
    }
}
