//! `GrantListener`: the subscription on which grant messages arrive. The waiting threads share it
//! by the leader/followers pattern. One of them is the leader: it reads the socket, keeps its own
//! grant, and hands the other grants to the followers. A dedicated thread would add a thread switch
//! to every grant, and would have to run even while no thread waits.
//!
//! *Invariant*: while the subscription is up and a thread sleeps, another thread reads the
//! subscription or is about to. A thread that is about to sleep announces it first, and then checks
//! whether the subscription is idle. A leader that stops returns the subscription first, and then
//! looks for a sleeping thread to promote. So at least one of the two notices the other.

use std::{sync::Arc, time::Duration};

use super::registry::{WaitRegistry, WaitSlot, Wake};
use crate::{
    backend::{Backend, CancelHandle, GrantStream, QueuePlace, StreamEvent, error::NodeError},
    core::backoff::{RETRY_PAUSE_MAX, retry_backoff},
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex},
    },
};

/// Maximum pause before the next subscription to a server that reports no subscriber.
const SUBSCRIBE_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Minimum lifetime of a subscription that counts as healthy.
const HEALTHY_LIFETIME_MIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct GrantListener {
    backend: Arc<dyn Backend>,
    channel: String,
    pub(super) registry: WaitRegistry,
    /// The subscription, and the thread that uses it.
    state: Mutex<SubscriptionState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SubscriptionState {
    subscribed: Subscribed,
    /// Where the subscription leads to, and the time since when it does.
    place: Option<QueuePlace>,
    opened_at: Moment,
    /// Closes the connection, so that the thread that reads the subscription wakes up.
    cancel_handle: Option<CancelHandle>,
    /// Consecutive failures to subscribe, and the earliest time of the next attempt.
    failures: u32,
    retry_at: Moment,
    /// The outage of the subscription has been logged.
    outage_logged: bool,
    closed: bool,
}

#[derive(Debug, Default)]
enum Subscribed {
    #[default]
    No,
    /// A thread is subscribing.
    Connecting,
    /// Up, but no thread reads it.
    Idle(Box<dyn GrantStream>),
    /// A thread reads it.
    Reading,
}

impl GrantListener {
    pub(crate) fn new(backend: Arc<dyn Backend>, channel: String) -> GrantListener {
        GrantListener {
            backend,
            channel,
            registry: WaitRegistry::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// Whether a grant message would be received.
    pub(crate) fn is_subscribed(&self) -> bool {
        matches!(self.state.lock().subscribed, Subscribed::Idle(_) | Subscribed::Reading)
    }

    /// Returns where to queue; `None` if a grant message would not be received.
    pub(crate) fn place(&self) -> Option<QueuePlace> {
        let state = self.state.lock();
        let is_up = matches!(state.subscribed, Subscribed::Idle(_) | Subscribed::Reading);
        state.place.filter(|_| is_up)
    }

    /// Wakes all waiters, because the manager is shutting down, and closes the subscription.
    pub(crate) fn close(&self) {
        self.registry.close();
        let (cancel_handle, idle) = {
            let mut state = self.state.lock();
            state.closed = true;
            let idle = matches!(state.subscribed, Subscribed::Idle(_))
                .then(|| std::mem::replace(&mut state.subscribed, Subscribed::No));
            (state.cancel_handle.take(), idle)
        };
        clock::wake_all(&self.changed);
        if let Some(cancel_handle) = cancel_handle {
            cancel_handle.cancel();
        }
        drop(idle);
    }

    /// Subscribes if there is no subscription. Returns false if that is not possible now. Blocks
    /// until `until` at the latest.
    pub(super) fn ensure_subscribed(&self, until: Moment, opener: &WaitSlot) -> bool {
        // If another thread is subscribing, that takes no longer than this.
        let opened_by = until.min(clock::now().saturating_add(self.backend.operation_timeout()));
        let mut state = self.state.lock();
        loop {
            match &state.subscribed {
                Subscribed::Reading => return true,
                Subscribed::Connecting if state.closed || clock::now() >= opened_by => {
                    return false;
                }
                Subscribed::Connecting => clock::park(&self.changed, &mut state, opened_by),
                Subscribed::No if state.closed || clock::now() < state.retry_at => return false,
                Subscribed::No | Subscribed::Idle(_) => break,
            }
        }
        let subscribed = std::mem::replace(&mut state.subscribed, Subscribed::Connecting);
        drop(state);
        if let Subscribed::Idle(mut subscription) = subscribed
            && subscription.is_open()
        {
            self.return_subscription(Some(subscription));
            // A thread that could have read the subscription may have gone to sleep meanwhile.
            self.promote_follower();
            return true;
        }
        let deadline = self.backend.operation_deadline();
        let opened = self.backend.open_stream(&self.channel, until.min(deadline)).and_then(open);
        self.on_subscribe_result(opened, until < deadline, opener)
    }

    fn on_subscribe_result(
        &self,
        opened: Result<(Box<dyn GrantStream>, CancelHandle), NodeError>,
        has_less_time: bool,
        opener: &WaitSlot,
    ) -> bool {
        let now = clock::now();
        let mut state = self.state.lock();
        let is_subscribed = match opened {
            Ok(_) if state.closed => {
                state.subscribed = Subscribed::No;
                drop(state);
                false
            }
            Ok((stream, cancel_handle)) => {
                (state.place, state.opened_at) = (Some(stream.place()), now);
                state.subscribed = Subscribed::Idle(stream);
                state.cancel_handle = Some(cancel_handle);
                drop(state);
                // Hand-overs may have skipped waiters while there was no subscription.
                self.registry.wake_others(opener);
                true
            }
            // Causes no back-off, because a caller with more time may succeed.
            Err(cause) if has_less_time && cause.is_timeout() => {
                state.subscribed = Subscribed::No;
                drop(state);
                false
            }
            Err(cause) => {
                state.subscribed = Subscribed::No;
                state.record_failure(now, RETRY_PAUSE_MAX);
                let first = !std::mem::replace(&mut state.outage_logged, true);
                drop(state);
                if first {
                    let (server, reason) = (self.backend.label(), cause.kind);
                    log_safely!(
                        warn,
                        "could not subscribe to grants at {server}: {reason}; waiters poll instead"
                    );
                }
                false
            }
        };
        clock::wake_all(&self.changed);
        is_subscribed
    }

    /// Takes the subscription if it is idle.
    pub(super) fn take_subscription(&self) -> Option<Box<dyn GrantStream>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut state.subscribed, Subscribed::Reading) {
            Subscribed::Idle(subscription) => Some(subscription),
            other => {
                state.subscribed = other;
                None
            }
        }
    }

    pub(super) fn has_idle_subscription(&self) -> bool {
        matches!(self.state.lock().subscribed, Subscribed::Idle(_))
    }

    /// Puts the subscription back for the next thread; `None` means that it was closed.
    fn return_subscription(&self, subscription: Option<Box<dyn GrantStream>>) {
        let now = clock::now();
        let mut state = self.state.lock();
        let is_healthy = now.duration_since(state.opened_at) >= HEALTHY_LIFETIME_MIN;
        let recovered = match &subscription {
            Some(stream) if is_healthy && state.record_success() => Some(stream.label().clone()),
            _ => None,
        };
        let (subscribed, unused) = match subscription {
            Some(subscription) if !state.closed => (Subscribed::Idle(subscription), None),
            unused => (Subscribed::No, unused),
        };
        if matches!(subscribed, Subscribed::No) {
            state.cancel_handle = None;
        }
        state.subscribed = subscribed;
        drop(state);
        // Closed after the mutex is unlocked.
        drop(unused);
        clock::wake_all(&self.changed);
        if let Some(server) = recovered {
            log_safely!(info, "receiving grants from {server} again");
        }
    }

    /// Records how long a closed subscription lasted. A subscription that broke early counts as a
    /// failed attempt; otherwise subscribing could become a tight loop.
    fn record_lifetime(&self) {
        let now = clock::now();
        let mut state = self.state.lock();
        if now.duration_since(state.opened_at) >= HEALTHY_LIFETIME_MIN {
            state.failures = 0;
        } else {
            state.record_failure(now, RETRY_PAUSE_MAX);
        }
    }

    /// Closes the subscription, because the server at `place` has replied to a request sent at
    /// `asked_at` that our channel has no subscriber. The subscription then seems to lead to
    /// another server, as after a failover. Keeps a subscription that is newer than the request.
    /// Returns true if the subscription was idle: then the caller must replace it, because no other
    /// thread does.
    pub(super) fn invalidate(&self, place: QueuePlace, asked_at: Moment) -> bool {
        let now = clock::now();
        let (idle, cancel_handle, first) = {
            let mut state = self.state.lock();
            let is_newer = state.place != Some(place) || asked_at < state.opened_at;
            if is_newer || !matches!(state.subscribed, Subscribed::Idle(_) | Subscribed::Reading) {
                return false;
            }
            // The next subscription may lead to the right server, so the first retry needs no
            // pause. If that subscription does not either, pause before each further one.
            let mut first = false;
            if state.failures > 0 || now.duration_since(state.opened_at) < HEALTHY_LIFETIME_MIN {
                state.record_failure(now, SUBSCRIBE_PAUSE_MAX);
                first = !std::mem::replace(&mut state.outage_logged, true);
            }
            let is_idle = matches!(state.subscribed, Subscribed::Idle(_));
            let idle = is_idle.then(|| std::mem::replace(&mut state.subscribed, Subscribed::No));
            (idle, state.cancel_handle.take(), first)
        };
        let server = self.backend.label();
        if first {
            log_safely!(
                warn,
                "could not receive grants from {server}: it reports no subscriber; \
                 waiters poll instead"
            );
        }
        log_safely!(debug, "closing the subscription to {server}, which has no subscriber");
        // Closed after the mutex is unlocked.
        let was_idle = idle.is_some();
        drop(idle);
        if let Some(cancel_handle) = cancel_handle {
            cancel_handle.cancel();
        }
        was_idle
    }

    /// If no thread reads the subscription, makes a sleeping one read it.
    pub(super) fn promote_follower(&self) {
        if self.has_idle_subscription() {
            self.registry.promote_follower();
        }
    }

    /// Reads the subscription as the leader until there is a signal for `slot`, or until `until`.
    pub(super) fn lead(
        &self,
        mut stream: Box<dyn GrantStream>,
        slot: &WaitSlot,
        until: Moment,
    ) -> Wake {
        if slot.is_cancellable() {
            match stream.wake_handle() {
                Ok(wake) => slot.set_wake_read(Some(wake)),
                // A cancellation is noticed at the next poll.
                Err(error) => log_safely!(debug, "cannot be woken: {}", error.kind),
            }
        }
        let failure = loop {
            if let Some(wake) = slot.take_wake() {
                self.return_subscription(Some(stream));
                return wake;
            }
            if clock::now() >= until {
                self.return_subscription(Some(stream));
                return Wake::Timeout;
            }
            match stream.receive(until) {
                Ok(Some(StreamEvent::Grant(id, notice))) => {
                    self.registry.deliver(&id, notice);
                }
                Ok(Some(StreamEvent::SubscriptionChanged(concerns))) => {
                    self.registry.wake_where(&*concerns)
                }
                Ok(None) => {}
                Err(failure) => break Some(failure),
            }
            if self.should_move(&*stream) {
                break None;
            }
        };
        let server = stream.label().clone();
        drop(stream);
        self.return_subscription(None);
        match failure {
            Some(failure) => {
                self.record_lifetime();
                log_safely!(debug, "lost the subscription to {server}: {}", failure.kind);
            }
            None => log_safely!(debug, "queueing on {server} no longer"),
        }
        // All waiters must ask again. A new subscription has already woken the others; without one,
        // wake them here. This thread asks again too, unless a signal for it arrived before.
        if !self.ensure_subscribed(until, slot) {
            self.registry.wake_others(slot);
        }
        slot.take_wake().unwrap_or(Wake::Recheck)
    }

    /// Whether the queue should be elsewhere, and the subscription has been here for long enough.
    fn should_move(&self, stream: &dyn GrantStream) -> bool {
        self.backend.should_move_queue(stream.place())
            && clock::now().duration_since(self.state.lock().opened_at) >= HEALTHY_LIFETIME_MIN
    }
}

/// Adds the handle by which other threads close a stream.
fn open(stream: Box<dyn GrantStream>) -> Result<(Box<dyn GrantStream>, CancelHandle), NodeError> {
    let cancel_handle = stream.cancel_handle()?;
    Ok((stream, cancel_handle))
}

impl SubscriptionState {
    /// Schedules the next attempt after a pause of at most `pause_max`, plus jitter.
    fn record_failure(&mut self, now: Moment, pause_max: Duration) {
        self.failures = self.failures.saturating_add(1);
        self.retry_at = self.retry_at.max(now.saturating_add(retry_backoff(
            self.failures,
            pause_max,
            now.as_nanos(),
        )));
    }

    /// Records that the subscription is healthy. Returns whether its outage had been logged.
    fn record_success(&mut self) -> bool {
        self.failures = 0;
        std::mem::take(&mut self.outage_logged)
    }
}
