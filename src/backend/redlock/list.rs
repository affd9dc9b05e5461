//! Listing locks: finds their keys by scanning, then asks for holders and waiters in small batches.
//! Changes nothing.

use std::collections::BTreeSet;

use super::{
    BroadcastOptions, NodeConnections, Redlock, Response, Responses, most_reported_holder,
};
use crate::{
    backend::{
        Inspection,
        error::BackendError,
        redis::{
            NodeError, NodeErrorKind, Request,
            list::{DescribeLocks, Description, HeldDescription, Scan, key_pattern},
        },
    },
    core::{key::LockKey, node_answer::Vote, quorum::NodeSet},
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

/// Maximum number of locks in one script call, which blocks a server for less than a millisecond.
/// Up to 5 ms would be acceptable; the rest is a reserve for slow machines and long queues.
const DESCRIBE_BATCH_MAX: usize = 50;
/// Maximum number of waiters described for one lock of a list, and for all locks of a batch
/// together.
const WAITERS_PER_LOCK_MAX: u64 = 100;
const WAITERS_PER_REPLY_MAX: u64 = 1_000;
/// Maximum number of scan steps and reported keys together. Servers with locks need far fewer.
const SCAN_WORK_MAX: usize = 1 << 20;
/// Maximum number of bytes that a list keeps: 256 for each of `SCAN_WORK_MAX` locks.
const LIST_BYTES_MAX: usize = 256 << 20;
/// Maximum number of times that a node is scanned from the beginning again. A node that keeps
/// closing its connections is most likely the same server all the time, and listing it must end.
const SCAN_RESTARTS_MAX: u32 = 8;
/// Maximum time for all steps of a list together, in operation timeouts.
const LIST_TIMEOUTS_MAX: u32 = 60;

/// Bytes that a list may still keep. Without a limit, servers could report names and waiters
/// without end.
struct MemoryBudget(usize);

impl MemoryBudget {
    fn reserve(&mut self, bytes: usize) -> Result<(), BackendError> {
        self.0 = self.0.checked_sub(bytes).ok_or_else(too_many_keys)?;
        Ok(())
    }

    fn reserve_lock(&mut self, lock: &LockInfo) -> Result<(), BackendError> {
        let waiters: usize = lock.waiters().iter().map(|waiter| waiter.id().len()).sum();
        self.reserve(lock.name().len() + lock.holder().id().len() + waiters)
    }
}

/// Progress of the scan of one node.
#[derive(Clone)]
struct ScanProgress {
    cursor: String,
    /// When the connection was opened over which the last keys came.
    connected_at: Option<Moment>,
    restarts: u32,
}

impl ScanProgress {
    fn start() -> ScanProgress {
        ScanProgress { cursor: "0".to_owned(), connected_at: None, restarts: 0 }
    }

    /// Records keys that came over the connection opened at `connected_at`, and where the next ones
    /// begin. Returns true if these were the last. Another connection may lead to another server,
    /// where the cursor means nothing, so the scan begins again.
    fn advance(&mut self, connected_at: Option<Moment>, next: Option<String>) -> bool {
        let reconnected = self.cursor != "0"
            && self.connected_at != connected_at
            && self.restarts < SCAN_RESTARTS_MAX;
        self.connected_at = connected_at;
        if reconnected {
            *self = ScanProgress { restarts: self.restarts + 1, ..ScanProgress::start() };
            return false;
        }
        next.map(|next| self.cursor = next).is_none()
    }
}

fn too_many_keys() -> BackendError {
    BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::Protocol(
        "it keeps reporting more keys".into(),
    )))
}

impl Redlock {
    /// Lists all locks that match, by name. Every quorum has a node that knows a given granted
    /// lock, so a quorum must reply from beginning to end.
    pub(crate) fn list_locks(
        &self,
        prefix: &str,
        pattern: &str,
    ) -> Result<Vec<LockInfo>, BackendError> {
        let (began, timeout) = (clock::now(), self.operation_timeout());
        let end = began.saturating_add(timeout.saturating_mul(LIST_TIMEOUTS_MAX));
        let mut connections =
            self.checkout(began.saturating_add(timeout)).map_err(BackendError::Node)?;
        let mut budget = MemoryBudget(LIST_BYTES_MAX);
        let (keys, mut nodes) =
            self.scan(&mut connections, &mut budget, prefix, &key_pattern(prefix, pattern), end)?;
        let mut locks = Vec::new();
        for batch in keys.chunks(DESCRIBE_BATCH_MAX) {
            let request = |_| DescribeLocks {
                keys: batch,
                waiters_per_lock_max: WAITERS_PER_LOCK_MAX,
                waiters_total_max: WAITERS_PER_REPLY_MAX,
            };
            let responses =
                self.ask_responsive(&mut connections, nodes, &mut nodes, end, request)?;
            for (index, key) in batch.iter().enumerate() {
                match self.evaluate_lookup(key, &responses, index) {
                    // Without a prefix, any string key may match. Only an id of this library shows
                    // that a key is a lock.
                    Inspection::Held(lock)
                        if !prefix.is_empty() || lock.holder().lock_id().is_some() =>
                    {
                        budget.reserve_lock(&lock)?;
                        locks.push(lock);
                    }
                    _ => {}
                }
            }
        }
        Ok(locks)
    }

    /// Looks up one lock, with as many of its waiters as fit into a reply.
    pub(crate) fn lookup(&self, key: &LockKey) -> Result<Inspection<LockInfo>, BackendError> {
        let end = clock::now().saturating_add(self.operation_timeout());
        let mut connections = self.checkout(end).map_err(BackendError::Node)?;
        let keys = std::slice::from_ref(key);
        let request = |_| DescribeLocks {
            keys,
            waiters_per_lock_max: WAITERS_PER_REPLY_MAX,
            waiters_total_max: WAITERS_PER_REPLY_MAX,
        };
        let responses = self.ask_responsive(
            &mut connections,
            self.all_nodes(),
            &mut self.all_nodes(),
            end,
            request,
        )?;
        Ok(self.evaluate_lookup(key, &responses, 0))
    }

    /// Returns the keys of all nodes, each once, and the nodes whose scan was complete.
    fn scan(
        &self,
        connections: &mut NodeConnections,
        budget: &mut MemoryBudget,
        prefix: &str,
        pattern: &str,
        end: Moment,
    ) -> Result<(Vec<LockKey>, NodeSet), BackendError> {
        let mut progress = vec![ScanProgress::start(); self.len()];
        let mut found: BTreeSet<LockKey> = BTreeSet::new();
        let (mut unfinished, mut responsive, mut work) = (self.all_nodes(), self.all_nodes(), 0);
        while !unfinished.is_empty() {
            work += 1;
            if work > SCAN_WORK_MAX {
                return Err(too_many_keys());
            }
            let scan = |node: usize| Scan { cursor: &progress[node].cursor, pattern };
            let responses =
                self.ask_responsive(connections, unfinished, &mut responsive, end, scan)?;
            unfinished = unfinished.intersection(responsive);
            for (node, response) in responses.by_node.into_iter().enumerate() {
                if let Response::Replied(exchange) = response {
                    work += exchange.reply.keys.len();
                    for key in exchange.reply.keys {
                        // A key that cannot be the name of a lock was written by another program,
                        // and may be of any length.
                        let Some(Ok(key)) =
                            key.strip_prefix(prefix).map(|name| LockKey::new(prefix, name))
                        else {
                            continue;
                        };
                        let bytes = key.lock_key().len();
                        if found.insert(key) {
                            budget.reserve(bytes)?;
                        }
                    }
                    if progress[node]
                        .advance(connections.0[node].opened_at(), exchange.reply.next_cursor)
                    {
                        unfinished = unfinished.difference(NodeSet::single(node));
                    }
                }
            }
        }
        Ok((found.into_iter().collect(), responsive))
    }

    /// Asks nodes, and asks those with a stale connection again, within one operation timeout and
    /// before `end`. Removes nodes that do not reply from `responsive`, and fails if no quorum of
    /// them is left.
    fn ask_responsive<C: Request>(
        &self,
        connections: &mut NodeConnections,
        targets: NodeSet,
        responsive: &mut NodeSet,
        end: Moment,
        request: impl Fn(usize) -> C,
    ) -> Result<Responses<C::Reply>, BackendError> {
        let deadline = clock::now().saturating_add(self.operation_timeout()).min(end);
        let mut responses = self.ask(
            connections,
            BroadcastOptions::awaiting_all(targets, deadline),
            &request,
            |_, _| Vote::Yes,
        );
        let is_stale = |response: &_| match response {
            Response::Failed(error) => error.outcome_unknown && error.is_transient(),
            _ => false,
        };
        let stale = responses.nodes_where(is_stale);
        if !stale.is_empty() && clock::now() < deadline {
            let second = self.ask(
                connections,
                BroadcastOptions::awaiting_all(stale, deadline),
                &request,
                |_, _| Vote::Yes,
            );
            for (node, (response, vote)) in second.by_node.into_iter().zip(second.votes).enumerate()
            {
                if stale.contains(node) {
                    (responses.by_node[node], responses.votes[node]) = (response, vote);
                }
            }
        }
        *responsive = responsive.difference(targets.difference(responses.nodes_voting(Vote::Yes)));
        if responsive.len() < self.quorum_size() {
            return Err(BackendError::from_responses(self, responses, |_| "replied".into()));
        }
        Ok(responses)
    }

    /// Combines what the nodes replied about the lock at `index` of a batch. The holder is the one
    /// that most of them report.
    fn evaluate_lookup(
        &self,
        key: &LockKey,
        responses: &Responses<(u64, Vec<Description>)>,
        index: usize,
    ) -> Inspection<LockInfo> {
        let (mut wrong, mut queue): (usize, Option<&HeldDescription>) = (0, None);
        let mut reported: Vec<&HeldDescription> = Vec::new();
        for response in &responses.by_node {
            let Response::Replied(exchange) = response else { continue };
            match exchange.reply.1.get(index) {
                Some(Description::Held(held)) => {
                    reported.push(held);
                    // All waiters queue on one of the nodes.
                    if queue.is_none_or(|queue| held.holder.waiters() > queue.holder.waiters()) {
                        queue = Some(held);
                    }
                }
                Some(Description::WrongType) => wrong += 1,
                Some(Description::Free) | None => {}
            }
        }
        let most_reported =
            most_reported_holder(reported.into_iter().map(|held| (&held.holder, held)));
        let (Some((count, held)), Some(queue)) = (most_reported, queue) else {
            return if wrong > self.len() - self.quorum_size() {
                Inspection::WrongType
            } else {
                Inspection::Free
            };
        };
        let mut holder = held.holder.clone().with_waiters(queue.holder.waiters().unwrap_or(0));
        if self.len() > 1 {
            let describe_one = |reply: &(u64, Vec<Description>)| {
                reply.1.get(index).map_or_else(String::new, describe)
            };
            holder = holder.with_nodes(responses.node_answers(self, describe_one));
        }
        let certain = count >= self.quorum_size();
        Inspection::Held(LockInfo::new(
            key.name(),
            holder,
            held.token,
            queue.waiters.clone(),
            certain,
        ))
    }
}

fn describe(description: &Description) -> String {
    match description {
        Description::Held(HeldDescription { holder, .. }) => format!("held by {holder}"),
        Description::Free => "free".into(),
        Description::WrongType => "its key holds something that is not a lock".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: N62
    #[test]
    fn scan_after_reconnect_starts_again() {
        let at = |nanos| Some(Moment::from_nanos(nanos));
        let to = |cursor: &str| Some(cursor.to_owned());
        let mut progress = ScanProgress::start();
        assert!(!progress.advance(at(1), to("17")) && !progress.advance(at(1), to("5")));
        assert_eq!(progress.cursor, "5");
        assert!(!progress.advance(at(2), None), "the scan ended with the keys of another server");
        assert_eq!(progress.cursor, "0");
        assert!(!progress.advance(at(3), to("17")), "the scan ended with its first keys");
        assert!(progress.advance(at(3), None));
        // The scan of a node that closes every connection ends too.
        let mut progress = ScanProgress::start();
        let steps = (1..).take_while(|step| {
            !progress.advance(at(*step), (step % 100 != 0).then(|| step.to_string()))
        });
        assert_eq!(steps.count(), 99);
    }
}
