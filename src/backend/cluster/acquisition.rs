//! `ClusterAcquisition`: one claim on the node of its slot. Everything but the choice of the node
//! is as on a single server.

use std::{cell::RefCell, sync::Arc, time::Duration};

use super::{
    cluster_node::Part,
    router::{Patience, Router},
    subscriptions::Subscriptions,
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Answer, Asking, Contention, NextStep, QueuePlace,
        error::NodeError,
        redis::{
            ClaimServer, Exchange, RedisAcquisition, Urgency, Yielding, ask_for_lock,
            requests_and_replies::{Acquire, AcquireReply, OfKind},
        },
    },
    core::{
        claim::{Grant, GrantNotice, Residue},
        clock_sample::ClockSample,
    },
    sys::clock::{self, Moment},
};

/// Maximum time for which a claim waits to be subscribed before it asks again.
const SUBSCRIBE_WAIT: Duration = Duration::from_millis(100);

/// The node of a slot, wherever it is now.
pub(super) struct SlotServer<'a> {
    pub(super) router: &'a Router,
    pub(super) slot: u16,
    pub(super) yielding: Option<&'a Yielding>,
    /// The node that replied last.
    pub(super) last: RefCell<Option<Arc<Part>>>,
}

impl ClaimServer for SlotServer<'_> {
    fn exchange(
        &self,
        request: &OfKind<Acquire<'_>>,
        deadline: Moment,
    ) -> Result<Exchange<AcquireReply>, NodeError> {
        let patience = Patience { deadline, waits_for_nodes: false };
        let replicas = self.router.replicas();
        let (part, exchange) = self.router.follow(self.slot, patience, |part, is_asking| {
            let mut connections = part.pool.get(Urgency::Other, deadline)?;
            let ask = |connection: &mut _| {
                self.router.ask_over(part, connection, request, is_asking, deadline)
            };
            ask_for_lock(&part.node, connections.only(), replicas, deadline, ask)
        })?;
        *self.last.borrow_mut() = Some(part);
        if let (Some(yielding), Some(holder)) = (self.yielding, exchange.reply.holder()) {
            yielding.on_holder(request.request.key.lock_key(), holder, clock::now());
        }
        Ok(exchange)
    }

    /// Times of different nodes cannot be compared, so a grant by another node than the one that
    /// replied last is confirmed by a request.
    fn clock_sample(&self, server: u64) -> Option<ClockSample> {
        let last = self.last.borrow();
        last.as_ref().filter(|part| part.number == server)?.node.clock_sample()
    }

    fn must_confirm(&self) -> bool {
        self.router.replicas().are_required()
    }
}

pub(super) struct ClusterAcquisition<'a> {
    claim: RedisAcquisition<'a, SlotServer<'a>>,
    subscriptions: &'a Subscriptions,
    slot: u16,
    is_queued: bool,
    /// We have found that the slot is not subscribed yet.
    awaits_subscription: bool,
}

impl<'a> ClusterAcquisition<'a> {
    pub(super) fn on(
        server: SlotServer<'a>,
        subscriptions: &'a Subscriptions,
        request: AcquireRequest<'a>,
    ) -> ClusterAcquisition<'a> {
        let (slot, timeout) = (server.slot, server.router.operation_timeout);
        ClusterAcquisition {
            claim: RedisAcquisition::on(server, timeout, request),
            subscriptions,
            slot,
            is_queued: false,
            awaits_subscription: false,
        }
    }
}

impl Acquisition for ClusterAcquisition<'_> {
    /// A hand-over skips waiters that nobody can notify, so this joins the queue only once the slot
    /// is subscribed. The subscription reports it, and makes the waiters of the slot ask again.
    fn ask(&mut self, asking: Asking, place: Option<QueuePlace>) -> Answer {
        let is_early =
            asking == Asking::Queue && !self.subscriptions.request(self.slot) && !self.is_queued;
        let ask_again = || NextStep::AskAgainAt(clock::now().saturating_add(SUBSCRIBE_WAIT));
        if is_early && !std::mem::replace(&mut self.awaits_subscription, true) {
            // The last request has just reported the holder.
            return Answer::Contended(Contention { holder: None, next: ask_again() });
        }
        let asking = if is_early { Asking::Try } else { asking };
        match self.claim.ask(asking, place) {
            Answer::Contended(Contention { holder, next: NextStep::Queue { .. } }) if is_early => {
                Answer::Contended(Contention { holder, next: ask_again() })
            }
            Answer::Contended(Contention { holder, next: NextStep::AwaitGrant(report) }) => {
                self.is_queued = true;
                if report.no_subscriber {
                    self.subscriptions.on_missing(self.slot, report.sent_at);
                }
                Answer::Contended(Contention { holder, next: NextStep::AwaitGrant(report) })
            }
            answer => answer,
        }
    }

    fn on_grant_message(&mut self, notice: GrantNotice) -> Option<Grant> {
        self.claim.on_grant_message(notice)
    }

    fn residue(&self) -> Option<Residue> {
        self.claim.residue()
    }
}
