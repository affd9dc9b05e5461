//! `RedisAcquisition`: one claim on one server, which decides alone.

use std::time::Duration;

use super::{
    Exchange, HeardSubscription, NodeError, NodeErrorKind,
    requests::{Acquire, AcquireMode, AcquireReply},
    yielding::Yielding,
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Answer, Asking, Contention, NextStep, QueuePlace, QueueReport,
        error::BackendError,
    },
    core::{
        claim::{Grant, GrantNotice, Residue},
        clock_sample::ClockSample,
        kind::LockKind,
        quorum::NodeSet,
        validity::{needs_immediate_confirmation, request_timeout, time_of_grant},
    },
    sys::clock::{self, Moment},
};

/// The only place for a queue.
pub(crate) const PLACE: QueuePlace = QueuePlace(0);

/// The server of a claim.
pub(crate) trait ClaimServer {
    /// Sends one request, and waits for its reply until `deadline`.
    fn acquire(
        &self,
        request: &Acquire<'_>,
        deadline: Moment,
    ) -> Result<Exchange<AcquireReply>, NodeError>;

    /// Returns the latest sample of the clock of the server with this number, if it is the server
    /// that replied last.
    fn clock_sample(&self, server: u64) -> Option<ClockSample>;

    /// Whether a lock counts as held only once a request has returned, even if the server has
    /// granted it by a message.
    fn must_confirm(&self) -> bool {
        false
    }

    /// Remembers whether the server has our subscription. With `None`, each request asks for that.
    fn heard_subscription(&self) -> Option<&HeardSubscription> {
        None
    }

    /// Decides when a release leaves its lock free for other clients.
    fn yielding(&self) -> Option<&Yielding> {
        None
    }
}

pub(crate) struct RedisAcquisition<'a, S> {
    server: S,
    operation_timeout: Duration,
    request: AcquireRequest<'a>,
    /// Our entry may be in the queue.
    may_be_queued: bool,
    /// The server may know our id, as the holder or in the queue.
    may_hold: bool,
    /// Latest time at which a request whose reply was lost can still take effect.
    broken_until: Moment,
    /// Server time of the last reply that reported us as queued. An earlier grant is ignored,
    /// because we no longer had it when that reply was sent.
    queued_at_us: u64,
}

impl<'a, S: ClaimServer> RedisAcquisition<'a, S> {
    pub(crate) fn on(
        server: S,
        operation_timeout: Duration,
        request: AcquireRequest<'a>,
    ) -> RedisAcquisition<'a, S> {
        RedisAcquisition {
            server,
            operation_timeout,
            request,
            may_be_queued: false,
            may_hold: false,
            broken_until: clock::now(),
            queued_at_us: 0,
        }
    }

    fn mode(&self, asking: Asking, is_subscribed: bool) -> AcquireMode {
        let is_mutex = self.request.claim.kind == LockKind::Mutex;
        match asking {
            Asking::Last if self.may_be_queued => AcquireMode::Leave,
            Asking::Last | Asking::Try => AcquireMode::Try,
            Asking::Queue if self.may_be_queued => AcquireMode::Poll,
            Asking::Queue if is_mutex && is_subscribed && self.is_heard() => {
                AcquireMode::EnqueueHeard
            }
            Asking::Queue => AcquireMode::Enqueue,
        }
    }

    /// Whether the server is known to have our subscription.
    fn is_heard(&self) -> bool {
        self.server.heard_subscription().is_some_and(|heard| heard.is_known(clock::now()))
    }

    fn exchange(&mut self, mode: AcquireMode) -> Result<Exchange<AcquireReply>, NodeError> {
        let claim = self.request.claim;
        let timeout = request_timeout(self.operation_timeout, claim.ttl);
        let deadline = clock::now().saturating_add(timeout).min(self.request.call_deadline);
        let checks_subscription = matches!(mode, AcquireMode::Enqueue | AcquireMode::Poll);
        let queues = checks_subscription || mode == AcquireMode::EnqueueHeard;
        let queue_entry =
            if mode == AcquireMode::Try { String::new() } else { self.request.queue_entry() };
        let request = Acquire {
            kind: claim.kind,
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: claim.ttl_ms(),
            mode,
            queue_entry: &queue_entry,
            repair_ttl_ms: self.request.repair_ttl_ms,
            token_min: None,
            is_token_decided: false,
        };
        let heard = self.server.heard_subscription();
        let connections_opened = heard.map(HeardSubscription::connections_opened);
        let result = self.server.acquire(&request, deadline);
        if checks_subscription
            && let Ok(Exchange { sent, reply: AcquireReply::Queued { no_subscriber, .. }, .. }) =
                &result
            && let (Some(heard), Some(opened)) = (heard, connections_opened)
        {
            heard.record(*sent, opened, !no_subscriber);
        }
        if let (Some(yielding), Ok(exchange)) = (self.server.yielding(), &result)
            && let Some(holder) = exchange.reply.holder()
        {
            yielding.on_holder(claim.key.lock_key(), holder, clock::now());
        }
        let is_unknown = matches!(&result, Err(failure) if failure.outcome_unknown);
        if is_unknown {
            self.broken_until = self.broken_until.max(deadline);
        }
        let queued = queues && (is_unknown || result.is_ok());
        self.may_be_queued |= queued;
        self.may_hold |= queued || is_unknown;
        result
    }

    fn on_held(&mut self, sent: Moment, token: u64, is_token_in_fence: bool) -> Answer {
        self.may_hold = true;
        let grant = self.grant(token, sent, self.request.claim.ttl);
        if grant.deadline() <= clock::now() {
            // The reply took longer than the lease. Asking again restores the full lease if the
            // lock is still ours.
            let late = NodeError::outcome_unknown(NodeErrorKind::TimedOut);
            return Answer::Failed(BackendError::Node(late));
        }
        self.may_be_queued = false;
        Answer::Granted(Grant { queue_entry: self.entry_left(), is_token_in_fence, ..grant })
    }

    fn grant(&self, token: u64, since: Moment, ttl: Duration) -> Grant {
        Grant::of_one_server(token, since, ttl, self.broken_until)
    }

    /// The queue entry, if the server may still have it or a late request may add it; or empty.
    fn entry_left(&self) -> String {
        let may_be_left = self.may_be_queued || clock::now() < self.broken_until;
        if may_be_left { self.request.queue_entry() } else { String::new() }
    }
}

impl<S: ClaimServer> Acquisition for RedisAcquisition<'_, S> {
    fn ask(&mut self, asking: Asking, place: Option<QueuePlace>) -> Answer {
        let mut mode = self.mode(asking, place.is_some());
        let mut result = self.exchange(mode);
        if mode == AcquireMode::EnqueueHeard
            && matches!(&result, Ok(Exchange { reply: AcquireReply::Queued { .. }, .. }))
            && !self.is_heard()
        {
            // Usually because the request has opened its connection, perhaps to another server.
            mode = AcquireMode::Poll;
            result = self.exchange(mode);
        }
        let Exchange { sent, server_us, reply } = match result {
            Ok(exchange) => exchange,
            Err(failure) => return Answer::Failed(BackendError::Node(failure)),
        };
        let (holder, next) = match reply {
            AcquireReply::Held { token, is_token_in_fence, .. } => {
                return self.on_held(sent, token, is_token_in_fence);
            }
            AcquireReply::WrongType => return Answer::WrongType,
            AcquireReply::Late => {
                let expired = NodeError::not_applied(NodeErrorKind::TimedOut);
                return Answer::Failed(BackendError::Node(expired));
            }
            AcquireReply::Queued { holder, position, newly_queued, no_subscriber } => {
                let was_lost = newly_queued && mode == AcquireMode::Poll;
                self.queued_at_us = server_us.unwrap_or(self.queued_at_us);
                let report = QueueReport {
                    place: PLACE,
                    position,
                    holder: holder.clone(),
                    was_lost,
                    no_subscriber,
                    sent_at: sent,
                };
                (holder, NextStep::AwaitGrant(report))
            }
            AcquireReply::Busy { holder, .. }
                if asking == Asking::Last || clock::now() >= self.request.wait_deadline =>
            {
                if mode == AcquireMode::Leave || !self.may_be_queued {
                    // We left the queue, or were never in it.
                    (self.may_hold, self.may_be_queued) = (false, false);
                }
                (holder, NextStep::GiveUp)
            }
            AcquireReply::Busy { holder, .. } => (holder, NextStep::Queue { exists: true }),
        };
        Answer::Contended(Contention { holder: Some(holder), next })
    }

    /// A stale message needs a request, which shows whether we hold the lock or are still queued.
    /// So does a distant server, whose reply grants the full ttl, and one whose replicas must have
    /// the lock.
    fn on_grant_message(&mut self, notice: GrantNotice) -> Option<Grant> {
        let claim = self.request.claim;
        // Our queue entry set the duration. Do not trust a longer one in the message.
        let granted_for = Duration::from_millis(notice.px_ms).min(self.request.claim_window);
        let now = clock::now();
        let clock_sample = self.server.clock_sample(notice.server)?;
        let since = time_of_grant(&clock_sample, notice.granted_at_us, now);
        let grant = self.grant(notice.token, since, granted_for);
        let left = grant.deadline().duration_since(now);
        if notice.granted_at_us < self.queued_at_us || left < granted_for / 4 {
            log_safely!(debug, "a grant of {:?} arrived too late to be used", claim.key);
            return None;
        }
        if self.server.must_confirm()
            || needs_immediate_confirmation(left, clock_sample.round_trip())
        {
            return None;
        }
        self.may_be_queued = false;
        Some(Grant { provisional: true, queue_entry: self.entry_left(), ..grant })
    }

    fn residue(&self) -> Option<Residue> {
        let in_flight_until = self.broken_until;
        (self.may_hold || clock::now() < in_flight_until)
            .then(|| Residue::new(NodeSet::single(0), &self.entry_left(), in_flight_until))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::core::{claim::Claim, holder::Holder, id::generate_lock_id, key::LockKey};

    /// A server that queues each waiter, and sends its first reply over a new connection.
    #[derive(Default)]
    struct Moved {
        heard: HeardSubscription,
        modes: RefCell<Vec<AcquireMode>>,
        /// The first request cannot be sent.
        is_away_at_first: bool,
    }

    impl ClaimServer for &Moved {
        fn acquire(
            &self,
            request: &Acquire<'_>,
            _: Moment,
        ) -> Result<Exchange<AcquireReply>, NodeError> {
            if self.modes.borrow().is_empty() {
                self.heard.on_connection_opened();
            }
            self.modes.borrow_mut().push(request.mode);
            if self.is_away_at_first && self.modes.borrow().len() == 1 {
                return Err(NodeError::not_applied(NodeErrorKind::TimedOut));
            }
            let reply = AcquireReply::Queued {
                holder: Holder::from_report(b"other", 1_000, 0, 0, 1),
                position: 0,
                newly_queued: request.mode != AcquireMode::Poll,
                no_subscriber: request.mode == AcquireMode::Poll,
            };
            Ok(Exchange { sent: clock::now(), server_us: Some(1), reply })
        }

        fn clock_sample(&self, _: u64) -> Option<ClockSample> {
            None
        }

        fn heard_subscription(&self) -> Option<&HeardSubscription> {
            Some(&self.heard)
        }
    }

    fn claim() -> Claim {
        Claim {
            key: LockKey::new("lock:", "x").unwrap(),
            id: generate_lock_id(),
            ttl: Duration::from_secs(9),
            kind: LockKind::Mutex,
            token: 0,
        }
    }

    fn acquisition<'a>(server: &'a Moved, claim: &'a Claim) -> RedisAcquisition<'a, &'a Moved> {
        let request = AcquireRequest {
            claim,
            channel: "distlock:client:x",
            claim_window: Duration::from_secs(1),
            repair_ttl_ms: 0,
            wait_deadline: Moment::NEVER,
            call_deadline: Moment::NEVER,
            cancel: None,
            places: None,
        };
        RedisAcquisition::on(server, Duration::from_secs(1), request)
    }

    #[test]
    fn request_that_was_not_sent_is_no_lost_queue_entry() {
        let server = Moved { is_away_at_first: true, ..Moved::default() };
        let claim = claim();
        let mut acquisition = acquisition(&server, &claim);
        let answers = [0, 1].map(|_| acquisition.ask(Asking::Queue, Some(PLACE)));
        assert_eq!(*server.modes.borrow(), [AcquireMode::Enqueue; 2]);
        let [Answer::Failed(_), Answer::Contended(Contention { next, .. })] = answers else {
            panic!("the second request is sent")
        };
        assert!(matches!(next, NextStep::AwaitGrant(report) if !report.was_lost));
    }

    /// The new connection may lead to another server, which does not have the subscription.
    ///
    /// Fault: N32
    /// Promise: P4
    #[test]
    fn waiter_asks_again_over_a_new_connection() {
        let server = Moved::default();
        server.heard.record(clock::now(), server.heard.connections_opened(), true);
        let claim = claim();
        let mut acquisition = acquisition(&server, &claim);
        let answer = acquisition.ask(Asking::Queue, Some(PLACE));
        assert_eq!(*server.modes.borrow(), [AcquireMode::EnqueueHeard, AcquireMode::Poll]);
        let Answer::Contended(Contention { next: NextStep::AwaitGrant(report), .. }) = answer
        else {
            panic!("it was not queued")
        };
        assert!(report.no_subscriber && !report.was_lost);
    }
}
