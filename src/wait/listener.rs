//! `GrantListener`: the subscription on which grant messages arrive. The waiting threads share it
//! by the leader/followers pattern. One of them is the leader: it reads the socket, keeps its own
//! grant, and hands the other grants to the followers. A dedicated thread would add a thread switch
//! to every grant, and would have to run even while no thread waits.
//!
//! *Invariant*: while the subscription is up and a thread sleeps, another thread reads the
//! subscription or is about to. A thread that is about to sleep announces it first, and then checks
//! whether the subscription is idle. A leader that stops returns the subscription first, and then
//! looks for a sleeping thread to promote. So at least one of the two notices the other.

use std::{sync::Arc, thread::ThreadId, time::Duration};

use redis::Value;

use super::{
    handle::WaitHandle,
    registry::{GrantNotice, WaitRegistry, WaitSlot, Wake},
    subscription::{Subscription, subscribe_budget},
};
use crate::{
    backend::{
        redis::{CancelHandle, NodeError, NodeErrorKind, PubSubMessage},
        redlock::Redlock,
    },
    core::backoff::{RETRY_PAUSE_MAX, retry_backoff},
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex},
        threads,
    },
};

/// Maximum pause before the next subscription to a server that reports no subscriber.
const SUBSCRIBE_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Minimum lifetime of a subscription that counts as healthy.
const HEALTHY_LIFETIME_MIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct GrantListener {
    redlock: Arc<Redlock>,
    channel: String,
    pub(super) registry: WaitRegistry,
    /// The subscription, and the thread that uses it.
    state: Mutex<SubscriptionState>,
    changed: Condvar,
}

#[derive(Debug)]
struct SubscriptionState {
    subscribed: Subscribed,
    /// Node that the subscription leads to, and the time since when it does.
    node: usize,
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

#[derive(Debug)]
enum Subscribed {
    No,
    /// This thread is subscribing.
    Connecting(Option<ThreadId>),
    /// Up, but no thread reads it.
    Idle(Box<Subscription>),
    /// A thread reads it.
    Reading,
}

impl GrantListener {
    pub(crate) fn new(redlock: Arc<Redlock>, channel: String) -> GrantListener {
        let state = SubscriptionState {
            subscribed: Subscribed::No,
            node: 0,
            opened_at: Moment::from_nanos(0),
            cancel_handle: None,
            failures: 0,
            retry_at: Moment::from_nanos(0),
            outage_logged: false,
            closed: false,
        };
        GrantListener {
            redlock,
            channel,
            registry: WaitRegistry::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// Registers the calling thread as a waiter. The thread must do so before it asks the server
    /// for a queue entry; otherwise its grant could arrive before it is registered.
    pub(crate) fn register(self: &Arc<GrantListener>, lock: &str, id: &str) -> WaitHandle {
        WaitHandle::new(self.clone(), lock, id)
    }

    /// Whether a grant message would be received.
    pub(crate) fn is_subscribed(&self) -> bool {
        matches!(self.state.lock().subscribed, Subscribed::Idle(_) | Subscribed::Reading)
    }

    /// Returns the node to queue on; `None` if a grant message would not be received.
    pub(crate) fn queue_node(&self) -> Option<usize> {
        let state = self.state.lock();
        matches!(state.subscribed, Subscribed::Idle(_) | Subscribed::Reading).then_some(state.node)
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
        // If another thread is subscribing, that takes no longer than this, unless a user's logger
        // blocks the thread.
        let opened_by = until.min(clock::now().saturating_add(self.redlock.operation_timeout()));
        let mut state = self.state.lock();
        loop {
            match &state.subscribed {
                Subscribed::Reading => return true,
                // A user's logger is acquiring a lock on the thread that subscribes. The logger
                // must not wait for its own thread.
                Subscribed::Connecting(by) if threads::is_current(*by) => return false,
                Subscribed::Connecting(_) if state.closed || clock::now() >= opened_by => {
                    return false;
                }
                Subscribed::Connecting(_) => clock::park(&self.changed, &mut state, opened_by),
                Subscribed::No if state.closed || clock::now() < state.retry_at => return false,
                Subscribed::No | Subscribed::Idle(_) => break,
            }
        }
        let subscribed =
            std::mem::replace(&mut state.subscribed, Subscribed::Connecting(threads::current()));
        drop(state);
        if let Subscribed::Idle(subscription) = subscribed
            && subscription.is_open()
        {
            self.return_subscription(Some(subscription));
            // A thread that could have read the subscription may have gone to sleep meanwhile.
            self.promote_follower();
            return true;
        }
        let deadline = clock::now().saturating_add(self.redlock.operation_timeout());
        let short_budget = until < deadline;
        let opened = self.subscribe_to_any(until.min(deadline), short_budget);
        self.on_subscribe_result(opened, short_budget, opener)
    }

    /// Subscribes on the first node where that works. Nodes that failed recently come last.
    fn subscribe_to_any(
        &self,
        deadline: Moment,
        short_budget: bool,
    ) -> Result<(Subscription, CancelHandle), NodeError> {
        let mut nodes: Vec<usize> = self.redlock.all_nodes().iter().collect();
        nodes.sort_by_key(|node| !self.redlock.node(*node).is_healthy());
        let mut failed = NodeError { outcome_unknown: false, kind: NodeErrorKind::TimedOut };
        for (tried, node) in nodes.iter().enumerate() {
            let now = clock::now();
            let budget = subscribe_budget(deadline.duration_since(now), tried, nodes.len());
            // Even a healthy node may be too distant to reply within such a short time.
            let short_budget = short_budget || budget < self.redlock.operation_timeout() / 3;
            let until = now.saturating_add(budget);
            match Subscription::open(*node, self.redlock.node(*node), &self.channel, until) {
                Ok(subscribed) => return Ok(subscribed),
                Err(failure) => {
                    if !ran_out_of_budget(&failure, short_budget) {
                        self.redlock.node(*node).record_failure(clock::now());
                    }
                    failed = failure;
                }
            }
        }
        Err(failed)
    }

    fn on_subscribe_result(
        &self,
        opened: Result<(Subscription, CancelHandle), NodeError>,
        short_budget: bool,
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
            Ok((subscription, cancel_handle)) => {
                (state.node, state.opened_at) = (subscription.node, subscription.opened_at);
                state.subscribed = Subscribed::Idle(Box::new(subscription));
                state.cancel_handle = Some(cancel_handle);
                drop(state);
                // Hand-overs may have skipped waiters while there was no subscription.
                self.registry.wake_others(opener);
                true
            }
            Err(failure) if ran_out_of_budget(&failure, short_budget) => {
                state.subscribed = Subscribed::No;
                drop(state);
                false
            }
            Err(failure) => {
                state.subscribed = Subscribed::No;
                state.record_failure(now, RETRY_PAUSE_MAX);
                let first = !std::mem::replace(&mut state.outage_logged, true);
                drop(state);
                if first {
                    let (server, reason) = (self.redlock.label(), failure.kind);
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
    pub(super) fn take_subscription(&self) -> Option<Box<Subscription>> {
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
    fn return_subscription(&self, subscription: Option<Box<Subscription>>) {
        let now = clock::now();
        let mut state = self.state.lock();
        let healthy_node = subscription
            .as_ref()
            .filter(|subscription| {
                now.duration_since(subscription.opened_at) >= HEALTHY_LIFETIME_MIN
            })
            .map(|subscription| subscription.node);
        let recovered_node = healthy_node.filter(|_| state.record_success());
        let (subscribed, unused) = match subscription {
            Some(subscription) if !state.closed => (Subscribed::Idle(subscription), None),
            unused => (Subscribed::No, unused),
        };
        if matches!(subscribed, Subscribed::No) {
            state.cancel_handle = None;
        }
        state.subscribed = subscribed;
        drop(state);
        // Closed outside the lock.
        drop(unused);
        clock::wake_all(&self.changed);
        if let Some(node) = recovered_node {
            log_safely!(info, "receiving grants from {} again", self.redlock.node(node).label());
        }
    }

    /// Records how long a closed subscription lasted. A subscription that broke early counts as a
    /// failed attempt; otherwise subscribing could become a tight loop.
    fn record_lifetime(&self, opened_at: Moment) {
        let now = clock::now();
        let mut state = self.state.lock();
        if now.duration_since(opened_at) >= HEALTHY_LIFETIME_MIN {
            state.failures = 0;
        } else {
            state.record_failure(now, RETRY_PAUSE_MAX);
        }
    }

    /// Closes the subscription, because the queue node has replied to a request sent at `asked_at`
    /// that our channel has no subscriber. The subscription then seems to lead to another server,
    /// as after a failover. Keeps a subscription that is newer than the request. Returns true if
    /// the subscription was idle: then the caller must replace it, because no other thread does.
    pub(super) fn invalidate(&self, node: usize, asked_at: Moment) -> bool {
        let now = clock::now();
        let (idle, cancel_handle, first) = {
            let mut state = self.state.lock();
            let is_newer = state.node != node || asked_at < state.opened_at;
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
        let server = self.redlock.node(node).label();
        if first {
            log_safely!(
                warn,
                "could not receive grants from {server}: it reports no subscriber; \
                 waiters poll instead"
            );
        }
        log_safely!(debug, "closing the subscription to {server}, which has no subscriber");
        // Closed outside the lock.
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
        mut subscription: Box<Subscription>,
        slot: &WaitSlot,
        until: Moment,
    ) -> Wake {
        loop {
            if let Some(wake) = slot.take_wake() {
                self.return_subscription(Some(subscription));
                return wake;
            }
            let now = clock::now();
            if now >= until {
                self.return_subscription(Some(subscription));
                return Wake::Timeout;
            }
            match subscription.receive(now, until, self.redlock.operation_timeout()) {
                Ok(message) => {
                    if let Some(message) = message {
                        self.dispatch(&message, &mut subscription);
                    }
                    if !self.should_switch_node(&subscription) {
                        continue;
                    }
                    log_safely!(
                        debug,
                        "queueing on {} from now on",
                        self.redlock.node(self.redlock.preferred_queue_node()).label()
                    );
                    drop(subscription);
                    self.return_subscription(None);
                    if !self.ensure_subscribed(until, slot) {
                        self.registry.wake_others(slot);
                    }
                    return slot.take_wake().unwrap_or(Wake::Recheck);
                }
                Err(failure) => {
                    let (opened_at, node) = (subscription.opened_at, subscription.node);
                    drop(subscription);
                    self.return_subscription(None);
                    self.record_lifetime(opened_at);
                    log_safely!(
                        debug,
                        "lost the subscription to {}: {}",
                        self.redlock.node(node).label(),
                        failure.kind
                    );
                    // All waiters must ask again. A new subscription has already woken the others;
                    // without one, wake them here. This thread asks again too, unless a signal for
                    // it arrived before the error.
                    if !self.ensure_subscribed(until, slot) {
                        self.registry.wake_others(slot);
                    }
                    return slot.take_wake().unwrap_or(Wake::Recheck);
                }
            }
        }
    }

    /// Whether the queue should be on another node, and the subscription has been on this one for
    /// long enough.
    fn should_switch_node(&self, subscription: &Subscription) -> bool {
        self.redlock.should_switch_queue_node(subscription.node)
            && clock::now().duration_since(subscription.opened_at) >= HEALTHY_LIFETIME_MIN
    }

    fn dispatch(&self, message: &Value, subscription: &mut Subscription) {
        match PubSubMessage::parse(message) {
            PubSubMessage::Grant(granted) => {
                let notice = GrantNotice {
                    token: granted.token,
                    granted_at_us: granted.granted_at_us,
                    px_ms: granted.px_ms,
                };
                self.registry.deliver(granted.id, notice);
            }
            PubSubMessage::Invalid
                if !std::mem::replace(&mut subscription.garbage_logged, true) =>
            {
                log_safely!(warn, "ignoring messages on {} that are not grants", self.channel);
            }
            PubSubMessage::Invalid => {}
            PubSubMessage::NotAMessage => {}
        }
    }
}

/// Whether an attempt may have failed only because it had less time than an operation timeout. Such
/// a failure causes no back-off, because a caller with more time may succeed.
fn ran_out_of_budget(failure: &NodeError, short_budget: bool) -> bool {
    short_budget && matches!(failure.kind, NodeErrorKind::TimedOut)
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
