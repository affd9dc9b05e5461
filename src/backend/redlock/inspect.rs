//! Requests that change nothing and may be repeated: the holder of a lock, and whether the nodes
//! respond.

use std::time::Duration;

use super::{
    BroadcastOptions, NodeConnections, Redlock, Response, Responses, most_reported_holder,
};
use crate::{
    backend::{
        Inspection, ReportedIds,
        error::BackendError,
        redis::{
            Request,
            group_requests::add_members_to_holder,
            requests_and_replies::{Inspect, Ping},
        },
    },
    core::{
        holder::Holder,
        key::LockKey,
        node_answer::Vote,
        quorum::{Verdict, is_out_of_reach, prevents_quorum, quorum},
    },
    sys::clock::{self, Moment},
};

/// How long to wait for the other nodes once a quorum has replied.
const INSPECT_STRAGGLER_GRACE: Duration = Duration::from_millis(20);

impl Redlock {
    /// Returns the holder of a lock according to a quorum. Waits for slow nodes only if the result
    /// depends on them.
    pub(crate) fn inspect(&self, key: &LockKey) -> Result<Inspection<Holder>, BackendError> {
        let deadline = clock::now().saturating_add(self.operation_timeout());
        let found = self.inspect_by(key, deadline)?;
        let found = add_members_to_holder(key, found, |request| {
            let mut connections = self.checkout(deadline)?;
            self.list_members(&mut connections, request, deadline)
        })?;
        Ok(match found {
            // The members on different nodes are claims that are not granted yet.
            Inspection::Held(holder) if holder.held_by().members() == Some(0) => Inspection::Free,
            found => found,
        })
    }

    fn inspect_by(
        &self,
        key: &LockKey,
        deadline: Moment,
    ) -> Result<Inspection<Holder>, BackendError> {
        match self.decide_holder(self.inspect_with(key, INSPECT_STRAGGLER_GRACE, deadline)?) {
            // The nodes that were not waited for may decide it.
            Err(_) if clock::now() < deadline => {
                self.decide_holder(self.inspect_with(key, self.operation_timeout(), deadline)?)
            }
            result => result,
        }
    }

    /// Returns the ids of all holders that any node reports, as far as the nodes reply by
    /// `deadline`.
    pub(super) fn reported_ids(
        &self,
        key: &LockKey,
        deadline: Moment,
    ) -> Result<ReportedIds, BackendError> {
        let grace = deadline.duration_since(clock::now());
        let responses = self.inspect_with(key, grace, deadline)?;
        let mut ids: Vec<Vec<u8>> = Vec::new();
        let mut wrong = 0;
        for response in &responses.by_node {
            let Response::Replied(exchange) = response else { continue };
            match &exchange.reply {
                Inspection::Held(holder) if !ids.iter().any(|id| id == holder.id_bytes()) => {
                    ids.push(holder.id_bytes().to_vec());
                }
                Inspection::WrongType => wrong += 1,
                Inspection::Held(_) | Inspection::Free => {}
            }
        }
        Ok(match ids.as_slice() {
            [] if prevents_quorum(wrong, self.len()) => Inspection::WrongType,
            [] => Inspection::Free,
            _ => Inspection::Held(ids),
        })
    }

    fn inspect_with(
        &self,
        key: &LockKey,
        grace: Duration,
        deadline: Moment,
    ) -> Result<Responses<Inspection<Holder>>, BackendError> {
        let responses = self.ask_twice(grace, deadline, |_| Inspect(key))?;
        match responses.verdict() {
            Verdict::Granted => Ok(responses),
            _ => Err(BackendError::from_responses(self, responses, describe)),
        }
    }

    /// Determines the holder. Fails if the replies leave that open.
    fn decide_holder(
        &self,
        responses: Responses<Inspection<Holder>>,
    ) -> Result<Inspection<Holder>, BackendError> {
        let nodes = self.len();
        let (mut wrong, mut without_reply, mut waiters) = (0, 0, 0);
        let mut reported: Vec<&Holder> = Vec::new();
        for response in &responses.by_node {
            match response {
                Response::Replied(exchange) => match &exchange.reply {
                    Inspection::Held(holder) => {
                        reported.push(holder);
                        // All waiters queue on one of the nodes.
                        waiters = waiters.max(holder.waiters().unwrap_or(0));
                    }
                    Inspection::WrongType => wrong += 1,
                    Inspection::Free => {}
                },
                _ => without_reply += 1,
            }
        }
        let most_reported =
            most_reported_holder(reported.into_iter().map(|holder| (holder, holder)));
        match most_reported {
            Some((count, holder)) if count >= quorum(nodes) => {
                let holder = holder.clone();
                Ok(Inspection::Held(
                    holder
                        .with_nodes(responses.node_answers(self, describe))
                        .waited_for_by(waiters),
                ))
            }
            _ if prevents_quorum(wrong, nodes) => Ok(Inspection::WrongType),
            most_reported
                if is_out_of_reach(
                    most_reported.map_or(0, |(count, _)| count),
                    without_reply,
                    nodes,
                ) =>
            {
                Ok(Inspection::Free)
            }
            _ => Err(BackendError::from_responses(self, responses, describe)),
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
        let responses = self.ask_once(&mut connections, deadline, grace, &request);
        let stale = responses.nodes_where(Response::is_broken);
        if responses.verdict() == Verdict::Granted || stale.is_empty() {
            return Ok(responses);
        }
        Ok(self.ask_once(&mut connections, deadline, grace, &request))
    }

    fn ask_once<C: Request>(
        &self,
        connections: &mut NodeConnections,
        deadline: Moment,
        grace: Duration,
        request: &impl Fn(usize) -> C,
    ) -> Responses<C::Reply> {
        let options = BroadcastOptions {
            straggler_grace: grace,
            ..BroadcastOptions::new(self.all_nodes(), deadline)
        };
        self.ask(connections, options, request, |_, _| Vote::Yes)
    }
}

fn describe(reply: &Inspection<Holder>) -> String {
    match reply {
        Inspection::Held(holder) => format!("held by {holder}"),
        Inspection::Free => "free".into(),
        Inspection::WrongType => "its key holds something that is not a lock".into(),
    }
}
