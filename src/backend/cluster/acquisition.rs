//! `ClusterAcquisition`: one claim on the node of its slot. Everything but the choice of the node
//! is as on a single server.

use std::{cell::RefCell, sync::Arc, time::Duration};

use super::{ClusterBackend, cluster_node::Part, subscriptions::Subscriptions};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Answer, Asking, Contention, NextStep, QueuePlace,
        error::NodeError,
        redis::{
            ClaimServer, Exchange, Purpose, RedisAcquisition, Yielding,
            requests::{Acquire, AcquireReply},
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
    pub(super) backend: &'a ClusterBackend,
    pub(super) slot: u16,
    /// The node that replied last.
    pub(super) last: RefCell<Option<Arc<Part>>>,
}

impl ClaimServer for SlotServer<'_> {
    fn acquire(
        &self,
        request: &Acquire<'_>,
        deadline: Moment,
    ) -> Result<Exchange<AcquireReply>, NodeError> {
        let (part, exchange) =
            self.backend.exchange_with_part(request.key, request, Purpose::Claim, deadline)?;
        *self.last.borrow_mut() = Some(part);
        Ok(exchange)
    }

    /// Times of different nodes cannot be compared, so a grant by another node than the one that
    /// replied last is confirmed by a request.
    fn clock_sample(&self, server: u64) -> Option<ClockSample> {
        let last = self.last.borrow();
        last.as_ref().filter(|part| part.number == server)?.node.clock_sample()
    }

    fn must_confirm(&self) -> bool {
        self.backend.router.replicas().are_required()
    }

    fn yielding(&self) -> Option<&Yielding> {
        self.backend.yielding.as_ref()
    }
}

pub(super) struct ClusterAcquisition<'a> {
    claim: RedisAcquisition<'a, SlotServer<'a>>,
    subscriptions: &'a Subscriptions,
    slot: u16,
    is_queued: bool,
    /// A node has replied that the lock is held.
    was_contended: bool,
    /// We have found that the slot is not subscribed yet.
    awaits_subscription: bool,
}

impl<'a> ClusterAcquisition<'a> {
    pub(super) fn on(
        server: SlotServer<'a>,
        request: AcquireRequest<'a>,
    ) -> ClusterAcquisition<'a> {
        let (slot, router) = (server.slot, &server.backend.router);
        ClusterAcquisition {
            subscriptions: &router.subscriptions,
            claim: RedisAcquisition::on(server, router.operation_timeout, request),
            slot,
            is_queued: false,
            was_contended: false,
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
        let is_first = is_early && !std::mem::replace(&mut self.awaits_subscription, true);
        if is_first && self.was_contended {
            // The last request has just reported the holder.
            return Answer::Contended(Contention { holder: None, next: ask_again() });
        }
        let asking = if is_early { Asking::Try } else { asking };
        let answer = self.claim.ask(asking, place);
        self.was_contended |= matches!(answer, Answer::Contended(_));
        match answer {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::{Backend, cluster::Router},
        core::{claim::Claim, id::generate_lock_id, key::LockKey, kind::LockKind},
    };

    /// An answer that no node has given would close the breaker of [`Config::fail_fast`], and no
    /// call would fail fast any more.
    ///
    /// [`Config::fail_fast`]: crate::Config::fail_fast
    ///
    /// Fault: N256
    #[test]
    fn first_answer_comes_from_a_node() {
        let router = Router::unreachable().0;
        let backend = ClusterBackend { router, yielding: None };
        let key = LockKey::new("lock:", "x").unwrap().in_cluster().unwrap();
        let (id, ttl) = (generate_lock_id(), Duration::from_secs(10));
        let claim = Claim { key, id, ttl, kind: LockKind::Mutex, token: 0 };
        let deadline = clock::now().saturating_add(ttl);
        let request = AcquireRequest {
            claim: &claim,
            channel: "distlock:client:x",
            claim_window: ttl,
            repair_ttl_ms: 0,
            wait_deadline: deadline,
            call_deadline: deadline,
            cancel: None,
            places: None,
        };
        let answer = backend.acquisition(request).ask(Asking::Queue, Some(QueuePlace(1)));
        assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
    }
}
