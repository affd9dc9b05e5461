//! Requests that change nothing and may be repeated: looks at one lock, and whether the nodes
//! respond.

use std::time::Duration;

use super::{
    BroadcastOptions, Redlock, Response, Responses,
    list::{Descriptions, describe},
};
use crate::{
    backend::{
        Inspection, Looks, ReportedIds,
        error::BackendError,
        redis::{Request, requests::Ping, requests::list::DescribeLocks},
    },
    core::{
        holder::Holder,
        key::LockKey,
        node_reply::Vote,
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
        let ask = |options: &dyn Fn() -> BroadcastOptions<'static>| {
            let responses = self.describe_with(key, options)?;
            let is_complete = responses.nodes_voting(Vote::Yes) == self.all_nodes();
            Ok::<_, BackendError>((self.decide(key, responses)?, is_complete))
        };
        let waiting_for_others =
            |straggler_grace| BroadcastOptions { straggler_grace, ..self.of_all(deadline) };
        let mut inspection = ask(&|| waiting_for_others(INSPECT_STRAGGLER_GRACE));
        if inspection.is_err() && clock::now() < deadline {
            // The nodes that were not waited for may decide it.
            inspection = ask(&|| waiting_for_others(self.operation_timeout()));
        }
        if let Ok((Inspection::Held(holder), false)) = &inspection
            && holder.held_by().is_group()
        {
            // All other nodes may know members.
            inspection = ask(&|| BroadcastOptions::awaiting_all(self.all_nodes(), deadline));
        }
        Ok(match inspection?.0 {
            // The members on different nodes are claims that are not granted yet.
            Inspection::Held(holder) if holder.held_by().members() == Some(0) => Inspection::Free,
            found => found,
        })
    }

    /// Returns the ids of all holders that any node reports, as far as the nodes reply by
    /// `deadline`.
    fn reported_ids(&self, key: &LockKey, deadline: Moment) -> Result<ReportedIds, BackendError> {
        let grace = deadline.duration_since(clock::now());
        let all = || BroadcastOptions { straggler_grace: grace, ..self.of_all(deadline) };
        let responses = self.describe_with(key, &all)?;
        let mut ids: Vec<Vec<u8>> = Vec::new();
        let mut wrong = 0;
        for response in &responses.by_node {
            let Response::Replied(exchange) = response else { continue };
            match exchange.reply.first() {
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
        let responses =
            self.ask_responsive(&mut connections, all, &mut responsive, end, request)?;
        Ok(self.combine(key, &responses, 0).1)
    }
}

impl Redlock {
    fn describe_with(
        &self,
        key: &LockKey,
        options: &dyn Fn() -> BroadcastOptions<'static>,
    ) -> Result<Descriptions, BackendError> {
        let responses = self.ask_twice(options, |_| DescribeLocks::lookup(key, 0))?;
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
    ) -> Result<Inspection<Holder>, BackendError> {
        let without_reply = self.len() - responses.nodes_voting(Vote::Yes).len();
        let (count, found) = self.combine(key, &responses, 0);
        match found {
            Inspection::Held(lock) if count >= self.quorum_size() => {
                Ok(Inspection::Held(lock.into_holder()))
            }
            Inspection::WrongType => Ok(Inspection::WrongType),
            _ if is_out_of_reach(count, without_reply, self.len()) => Ok(Inspection::Free),
            _ => Err(BackendError::from_responses(self, responses, describe(0))),
        }
    }

    /// Measures how long a quorum takes to reply.
    pub(crate) fn ping(&self) -> Result<Duration, BackendError> {
        let started = clock::now();
        let deadline = started.saturating_add(self.operation_timeout());
        let responses = self.ask_twice(&|| self.of_all(deadline), |_| Ping)?;
        match responses.verdict() {
            Verdict::Granted => Ok(clock::now().duration_since(started)),
            _ => Err(BackendError::from_responses(self, responses, |()| "replied".into())),
        }
    }

    fn of_all(&self, deadline: Moment) -> BroadcastOptions<'static> {
        BroadcastOptions::new(self.all_nodes(), deadline)
    }

    /// Asks, and asks again if a connection was stale. The second attempt replaces it.
    fn ask_twice<C: Request>(
        &self,
        options: &dyn Fn() -> BroadcastOptions<'static>,
        request: impl Fn(usize) -> C,
    ) -> Result<Responses<C::Reply>, BackendError> {
        let mut connections = self.checkout(options().deadline)?;
        let mut ask = || self.ask(&mut connections, options(), &request, |_, _| Vote::Yes);
        let responses = ask();
        let stale = responses.nodes_where(Response::is_lost);
        if responses.verdict() == Verdict::Granted || stale.is_empty() {
            return Ok(responses);
        }
        Ok(ask())
    }
}
