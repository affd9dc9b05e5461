//! Listing the locks of several nodes: finds their keys by scanning, then asks for holders and
//! waiters in small batches. Changes nothing.

use super::{
    BroadcastOptions, NodeConnections, Redlock, Response, Responses,
    common_members::common_members, most_reported_holder,
};
use crate::{
    backend::{
        Inspection,
        error::BackendError,
        redis::{
            Request,
            listing::{DESCRIBE_BATCH_MAX, LIST_TIMEOUTS_MAX, Listing, ScanProgress},
            requests::list::{DescribeLocks, GroupReport, HeldDescription, Scan, key_pattern},
        },
    },
    core::{
        key::LockKey,
        node_reply::Vote,
        quorum::{NodeSet, prevents_quorum},
    },
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

/// What the nodes replied about a batch of locks.
pub(super) type Descriptions = Responses<Vec<Inspection<HeldDescription>>>;

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
        let mut connections = self.checkout(began.saturating_add(timeout))?;
        let mut listing = Listing::new(prefix);
        let pattern = key_pattern(prefix, pattern);
        let mut nodes = self.scan(&mut connections, &mut listing, &pattern, end)?;
        for batch in listing.take_keys().chunks(DESCRIBE_BATCH_MAX) {
            let request = |_| DescribeLocks::in_list(batch);
            let responses =
                self.ask_responsive(&mut connections, nodes, &mut nodes, end, request)?;
            for (index, key) in batch.iter().enumerate() {
                listing.add_lock(self.combine(key, &responses, index).1)?;
            }
        }
        Ok(listing.into_locks())
    }

    /// Finds the keys of all nodes, and returns the nodes whose scan was complete.
    fn scan(
        &self,
        connections: &mut NodeConnections,
        listing: &mut Listing<'_>,
        pattern: &str,
        end: Moment,
    ) -> Result<NodeSet, BackendError> {
        let mut progress = vec![ScanProgress::start(); self.len()];
        let (mut unfinished, mut responsive) = (self.all_nodes(), self.all_nodes());
        while !unfinished.is_empty() {
            let scan = |node: usize| Scan { cursor: &progress[node].cursor, pattern };
            let responses =
                self.ask_responsive(connections, unfinished, &mut responsive, end, scan)?;
            unfinished = unfinished.intersection(responsive);
            for (node, response) in responses.by_node.into_iter().enumerate() {
                if let Response::Replied(exchange) = response {
                    listing.add_keys(exchange.reply.keys)?;
                    let connected_at = connections.0[node].opened_at();
                    if progress[node].advance(connected_at, exchange.reply.next_cursor) {
                        unfinished = unfinished.difference(NodeSet::single(node));
                    }
                }
            }
        }
        Ok(responsive)
    }

    /// Asks nodes, and asks those with a stale connection again, within one operation timeout and
    /// before `end`. Removes nodes that do not reply from `responsive`, and fails if no quorum of
    /// them is left.
    pub(super) fn ask_responsive<C: Request>(
        &self,
        connections: &mut NodeConnections,
        targets: NodeSet,
        responsive: &mut NodeSet,
        end: Moment,
        request: impl Fn(usize) -> C,
    ) -> Result<Responses<C::Reply>, BackendError> {
        let deadline = clock::now().saturating_add(self.operation_timeout()).min(end);
        let mut ask = |nodes| {
            let options = BroadcastOptions::awaiting_all(nodes, deadline);
            self.ask(connections, options, &request, |_, _| Vote::Yes)
        };
        let mut responses = ask(targets);
        let stale = responses.nodes_where(Response::is_lost);
        if !stale.is_empty() && clock::now() < deadline {
            responses.replace(stale, ask(stale));
        }
        *responsive = responsive.difference(targets.difference(responses.nodes_voting(Vote::Yes)));
        if responsive.len() < self.quorum_size() {
            return Err(BackendError::from_responses(self, responses, |_| "replied".into()));
        }
        Ok(responses)
    }

    /// Combines what the nodes replied about the lock at `index` of a batch. The holder is the one
    /// that most of them report. Returns also how many do. A group of which no member is on a
    /// quorum does not hold its lock for certain.
    pub(super) fn combine(
        &self,
        key: &LockKey,
        responses: &Descriptions,
        index: usize,
    ) -> (usize, Inspection<LockInfo>) {
        let (mut wrong, mut queue): (usize, Option<&HeldDescription>) = (0, None);
        let mut reported: Vec<&HeldDescription> = Vec::new();
        for response in &responses.by_node {
            let Response::Replied(exchange) = response else { continue };
            match exchange.reply.get(index) {
                Some(Inspection::Held(held)) => {
                    reported.push(held);
                    // All waiters queue on one of the nodes.
                    if queue.is_none_or(|queue| held.holder.waiters() > queue.holder.waiters()) {
                        queue = Some(held);
                    }
                }
                Some(Inspection::WrongType) => wrong += 1,
                Some(Inspection::Free) | None => {}
            }
        }
        let most_reported = most_reported_holder(reported.iter().map(|held| (&held.holder, *held)));
        let (count, held, queue) = match (most_reported, queue) {
            _ if prevents_quorum(wrong, self.len()) => return (0, Inspection::WrongType),
            (Some((count, held)), Some(queue)) => (count, held, queue),
            _ => return (0, Inspection::Free),
        };
        let holder = held.holder.clone().waited_for_by(queue.holder.waiters().unwrap_or(0));
        let holder = holder.with_nodes(responses.node_replies(self, describe(index)));
        let (waiters, certain) = (queue.waiters.clone(), count >= self.quorum_size());
        let mut lock = LockInfo::new(key.name(), holder, held.token, waiters, certain);
        let groups = reported.iter().filter_map(|held| held.group.as_ref());
        if held.group.is_some()
            && let Some(GroupReport { held_by, members }) =
                common_members(groups, self.quorum_size())
        {
            lock.set_group(held_by, members);
            if held_by.members() == Some(0) {
                lock.set_uncertain();
            }
        }
        (count, Inspection::Held(lock))
    }
}

/// Says what a node replied about the lock at `index` of a batch.
pub(super) fn describe(index: usize) -> impl Fn(&Vec<Inspection<HeldDescription>>) -> String {
    move |reply| match reply.get(index) {
        Some(Inspection::Held(held)) => format!("held by {}", held.holder),
        Some(Inspection::Free) => "free".into(),
        Some(Inspection::WrongType) => "its key holds something that is not a lock".into(),
        None => String::new(),
    }
}
