//! Requests that change nothing and may be repeated: looks at one lock, and whether the nodes
//! respond.

use std::{slice, time::Duration};

use super::{
    BroadcastOptions, Redlock, Response, Responses,
    list::{Descriptions, describe},
};
use crate::{
    backend::{
        Inspection, Looks, ReportedIds,
        error::BackendError,
        redis::{
            Request, group_requests::add_members, list_requests::DescribeLocks,
            requests_and_replies::Ping,
        },
    },
    core::{
        holder::Holder,
        key::LockKey,
        node_answer::Vote,
        quorum::{Verdict, is_out_of_reach, prevents_quorum},
    },
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

/// How long to wait for the other nodes once a quorum has replied.
const INSPECT_STRAGGLER_GRACE: Duration = Duration::from_millis(20);

impl Looks for Redlock {
    /// Returns the holder of a lock according to a quorum. Waits for slow nodes only if the result
    /// depends on them.
    fn inspect(&self, key: &LockKey) -> Result<Inspection<Holder>, BackendError> {
        let deadline = clock::now().saturating_add(self.operation_timeout());
        let mut found = [self.inspect_by(key, deadline)?];
        add_members(slice::from_ref(key), &mut found, |request| {
            let mut connections = self.checkout(deadline)?;
            self.list_members(&mut connections, request, self.all_nodes(), deadline)
        })?;
        let [found] = found;
        Ok(match found.map(|lock| lock.into_holder()) {
            // The members on different nodes are claims that are not granted yet.
            Inspection::Held(holder) if holder.held_by().members() == Some(0) => Inspection::Free,
            found => found,
        })
    }

    /// Returns the ids of all holders that any node reports, as far as the nodes reply by
    /// `deadline`.
    fn reported_ids(&self, key: &LockKey, deadline: Moment) -> Result<ReportedIds, BackendError> {
        let grace = deadline.duration_since(clock::now());
        let responses = self.describe_with(key, grace, deadline)?;
        let mut ids: Vec<Vec<u8>> = Vec::new();
        let mut wrong = 0;
        for response in &responses.by_node {
            let Response::Replied(exchange) = response else { continue };
            match exchange.reply.1.first() {
                Some(Inspection::Held(held)) => {
                    let id = held.holder.id_bytes();
                    if !ids.iter().any(|known| known == id) {
                        ids.push(id.to_vec());
                    }
                }
                Some(Inspection::WrongType) => wrong += 1,
                Some(Inspection::Free) | None => {}
            }
        }
        Ok(match ids.as_slice() {
            [] if prevents_quorum(wrong, self.len()) => Inspection::WrongType,
            [] => Inspection::Free,
            _ => Inspection::Held(ids),
        })
    }

    fn lookup(
        &self,
        key: &LockKey,
        waiters_max: u64,
    ) -> Result<Inspection<LockInfo>, BackendError> {
        let end = clock::now().saturating_add(self.operation_timeout());
        let mut connections = self.checkout(end)?;
        let (all, mut responsive) = (self.all_nodes(), self.all_nodes());
        let request = |_| DescribeLocks::lookup(key, waiters_max);
        // A silent node must leave time for the request for the members.
        let until = end.halfway();
        let responses =
            self.ask_responsive(&mut connections, all, &mut responsive, until, request)?;
        let mut found = [self.combine(key, &responses, 0).1];
        self.add_members(&mut connections, responsive, slice::from_ref(key), &mut found, end)?;
        let [found] = found;
        Ok(found)
    }
}

impl Redlock {
    fn inspect_by(
        &self,
        key: &LockKey,
        deadline: Moment,
    ) -> Result<Inspection<LockInfo>, BackendError> {
        let ask = |grace| self.decide(key, self.describe_with(key, grace, deadline)?);
        match ask(INSPECT_STRAGGLER_GRACE) {
            // The nodes that were not waited for may decide it.
            Err(_) if clock::now() < deadline => ask(self.operation_timeout()),
            result => result,
        }
    }

    fn describe_with(
        &self,
        key: &LockKey,
        grace: Duration,
        deadline: Moment,
    ) -> Result<Descriptions, BackendError> {
        let responses = self.ask_twice(grace, deadline, |_| DescribeLocks::lookup(key, 0))?;
        match responses.verdict() {
            Verdict::Granted => Ok(responses),
            _ => Err(BackendError::from_responses(self, responses, describe(0))),
        }
    }

    /// Determines the holder. Fails if the replies leave that open.
    fn decide(
        &self,
        key: &LockKey,
        responses: Descriptions,
    ) -> Result<Inspection<LockInfo>, BackendError> {
        let without_reply = self.len() - responses.nodes_voting(Vote::Yes).len();
        let (count, found) = self.combine(key, &responses, 0);
        match found {
            Inspection::Held(lock) if lock.is_certain() => Ok(Inspection::Held(lock)),
            Inspection::WrongType => Ok(Inspection::WrongType),
            _ if is_out_of_reach(count, without_reply, self.len()) => Ok(Inspection::Free),
            _ => Err(BackendError::from_responses(self, responses, describe(0))),
        }
    }

    /// Measures how long a quorum takes to reply.
    pub(crate) fn ping(&self) -> Result<Duration, BackendError> {
        let started = clock::now();
        let deadline = started.saturating_add(self.operation_timeout());
        let responses = self.ask_twice(Duration::ZERO, deadline, |_| Ping)?;
        match responses.verdict() {
            Verdict::Granted => Ok(clock::now().duration_since(started)),
            _ => Err(BackendError::from_responses(self, responses, |()| "replied".into())),
        }
    }

    /// Asks, and asks again if a connection was stale. The second attempt replaces it.
    fn ask_twice<C: Request>(
        &self,
        grace: Duration,
        deadline: Moment,
        request: impl Fn(usize) -> C,
    ) -> Result<Responses<C::Reply>, BackendError> {
        let mut connections = self.checkout(deadline)?;
        let mut ask = || {
            let all = BroadcastOptions::new(self.all_nodes(), deadline);
            let options = BroadcastOptions { straggler_grace: grace, ..all };
            self.ask(&mut connections, options, &request, |_, _| Vote::Yes)
        };
        let responses = ask();
        let stale = responses.nodes_where(Response::is_broken);
        if responses.verdict() == Verdict::Granted || stale.is_empty() {
            return Ok(responses);
        }
        Ok(ask())
    }
}
