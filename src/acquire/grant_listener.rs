//! `Listener`: the subscription on which grants come. Of the threads that wait, one listens for
//! all: it reads the socket, keeps its own grant and brings the others theirs. So a grant takes no
//! detour over another thread on its way to the one that waits for it, and a manager for which
//! nobody waits has nothing running.
//!
//! *Invariant*: while the line is up and somebody sleeps, somebody listens, or is on the way to. A
//! thread that is about to sleep says so first and then looks whether the line is free; one that
//! stops listening frees the line first and then looks for a sleeper to call. Whichever comes
//! second sees the other.

use std::{sync::Arc, thread::ThreadId, time::Duration};

use redis::Value;

use super::{
    backoff::{POLL_INTERVAL_MAX, RETRY_PAUSE_MAX, retry_backoff, subscribe_budget},
    subscription::Subscription,
    wait_handle::WaitHandle,
    wait_registry::{GrantNotice, WaitRegistry, WaitSlot, Wake},
};
use crate::{
    clock::{self, Moment},
    node::{CancelHandle, NodeError, NodeErrorKind, PubSubMessage},
    redlock::Redlock,
    sync::{Condvar, Mutex},
    threads,
};

/// A line that was up for this long was a good one.
const HEALTHY_LIFETIME_MIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct GrantListener {
    redlock: Arc<Redlock>,
    channel: String,
    pub(super) registry: WaitRegistry,
    /// Guards who has the line.
    state: Mutex<SubscriptionState>,
    changed: Condvar,
}

#[derive(Debug)]
struct SubscriptionState {
    subscribed: Subscribed,
    /// The node it leads to, and since when.
    node: usize,
    opened_at: Moment,
    /// Cuts the line of whoever listens.
    cancel_handle: Option<CancelHandle>,
    /// Attempts to open the line that failed in a row, and when the next one may be made.
    failures: u32,
    retry_at: Moment,
    /// Somebody was told that no grant is heard.
    outage_logged: bool,
    closed: bool,
}

#[derive(Debug)]
enum Subscribed {
    No,
    /// This thread is opening it.
    Connecting(Option<ThreadId>),
    /// Up, and nobody listens.
    Idle(Box<Subscription>),
    /// A thread listens.
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

    /// A place to wait in. A thread has to have one before it asks the server for a place in line.
    pub(crate) fn register(self: &Arc<GrantListener>, lock: &str, id: &str) -> WaitHandle {
        WaitHandle::new(self.clone(), lock, id)
    }

    /// Whether a grant would be heard.
    pub(crate) fn is_subscribed(&self) -> bool {
        matches!(self.state.lock().subscribed, Subscribed::Idle(_) | Subscribed::Reading)
    }

    /// The node on which to wait in line, while a grant from it would be heard.
    pub(crate) fn queue_node(&self) -> Option<usize> {
        let state = self.state.lock();
        matches!(state.subscribed, Subscribed::Idle(_) | Subscribed::Reading).then_some(state.node)
    }

    /// Wakes all waiters for good.
    pub(crate) fn close(&self) {
        self.registry.close();
        let (cancel_handle, idle) = {
            let mut state = self.state.lock();
            state.closed = true;
            let line = matches!(state.subscribed, Subscribed::Idle(_))
                .then(|| std::mem::replace(&mut state.subscribed, Subscribed::No));
            (state.cancel_handle.take(), line)
        };
        clock::wake_all(&self.changed);
        if let Some(cancel_handle) = cancel_handle {
            cancel_handle.cancel();
        }
        drop(idle);
    }

    /// Opens the line if it is down; false when it cannot be opened now. Blocks until `until` at
    /// the latest.
    pub(super) fn ensure_subscribed(&self, until: Moment, opener: &WaitSlot) -> bool {
        // Whoever opens it has no longer than that, but for a logger, which is code of users' and
        // may take its time.
        let opened_by = until.min(clock::now().saturating_add(self.redlock.operation_timeout()));
        let mut state = self.state.lock();
        loop {
            match &state.subscribed {
                Subscribed::Reading => return true,
                // A logger that is called meanwhile, and wants a lock, would wait for itself.
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
            // Somebody may have fallen asleep meanwhile, who would have taken it.
            self.promote_follower();
            return true;
        }
        let deadline = clock::now().saturating_add(self.redlock.operation_timeout());
        let short_budget = until < deadline;
        let opened = self.subscribe_to_any(until.min(deadline), short_budget);
        self.on_subscribe_result(opened, short_budget, opener)
    }

    /// Subscribes on the first node where that works; those that failed of late come last.
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
            // It may be well, and too far away for so short a time.
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
                // Whoever waited through a gap may have been passed over in it.
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
                        "cannot hear of grants from {server}: {reason}; waiters look by themselves"
                    );
                }
                false
            }
        };
        clock::wake_all(&self.changed);
        is_subscribed
    }

    /// Takes the line if it is free.
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

    /// Gives the line back, whole or not at all.
    fn return_subscription(&self, subscription: Option<Box<Subscription>>) {
        let now = clock::now();
        let mut state = self.state.lock();
        let healthy_node = subscription
            .as_ref()
            .filter(|wire| now.duration_since(wire.opened_at) >= HEALTHY_LIFETIME_MIN)
            .map(|wire| wire.node);
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
            log_safely!(info, "hears of grants from {} again", self.redlock.node(node).label());
        }
    }

    /// A line that did not last counts as one that could not be opened, lest it be opened in a
    /// tight loop.
    fn record_lifetime(&self, opened_at: Moment) {
        let now = clock::now();
        let mut state = self.state.lock();
        if now.duration_since(opened_at) >= HEALTHY_LIFETIME_MIN {
            state.failures = 0;
        } else {
            state.record_failure(now, RETRY_PAUSE_MAX);
        }
    }

    /// The node on which a waiter stands says that nobody listened there when it was asked at
    /// `asked`: the line leads to another server, as after a failover. It is cut, unless it is
    /// a later one. True if it was free, so that nobody else opens it anew.
    pub(super) fn invalidate(&self, node: usize, asked_at: Moment) -> bool {
        let now = clock::now();
        let (idle, cancel_handle, first) = {
            let mut state = self.state.lock();
            let is_newer = state.node != node || asked_at < state.opened_at;
            if is_newer || !matches!(state.subscribed, Subscribed::Idle(_) | Subscribed::Reading) {
                return false;
            }
            // The next one may lead there. If it does not either, all of them may lead elsewhere
            // for ever.
            let mut first = false;
            if state.failures > 0 || now.duration_since(state.opened_at) < HEALTHY_LIFETIME_MIN {
                state.record_failure(now, POLL_INTERVAL_MAX);
                first = !std::mem::replace(&mut state.outage_logged, true);
            }
            let free = matches!(state.subscribed, Subscribed::Idle(_));
            let idle = free.then(|| std::mem::replace(&mut state.subscribed, Subscribed::No));
            (idle, state.cancel_handle.take(), first)
        };
        let server = self.redlock.node(node).label();
        if first {
            log_safely!(
                warn,
                "cannot hear of grants from {server}: it says that nobody listens; waiters look by themselves"
            );
        }
        log_safely!(debug, "gives up a line to {server} on which nothing comes");
        // Closed outside the lock.
        let was_free = idle.is_some();
        drop(idle);
        if let Some(cancel_handle) = cancel_handle {
            cancel_handle.cancel();
        }
        was_free
    }

    /// If nobody listens, has a sleeper do it.
    pub(super) fn promote_follower(&self) {
        if self.has_idle_subscription() {
            self.registry.promote_follower();
        }
    }

    /// Listens until there is news for `slot` or the moment has come.
    pub(super) fn lead(
        &self,
        mut subscription: Box<Subscription>,
        slot: &WaitSlot,
        until: Moment,
    ) -> Wake {
        loop {
            if let Some(woken) = slot.take_wake() {
                self.return_subscription(Some(subscription));
                return woken;
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
                        "waits on {} from now on",
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
                        "lost the line to {}: {}",
                        self.redlock.node(node).label(),
                        failure.kind
                    );
                    // News may have come together with the end; else everybody has to look. If the
                    // line can be opened again, opening it has told the others.
                    if !self.ensure_subscribed(until, slot) {
                        self.registry.wake_others(slot);
                    }
                    return slot.take_wake().unwrap_or(Wake::Recheck);
                }
            }
        }
    }

    /// The line is better on another node, and has been on this one for a while.
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
                log_safely!(warn, "ignores messages on {} that are not grants", self.channel);
            }
            PubSubMessage::Invalid => {}
            PubSubMessage::NotAMessage => {}
        }
    }
}

/// Whether somebody who has less than an operation timeout could not wait for it. Who has more must
/// not be kept from trying.
fn ran_out_of_budget(failure: &NodeError, short_budget: bool) -> bool {
    short_budget && matches!(failure.kind, NodeErrorKind::TimedOut)
}

impl SubscriptionState {
    /// Makes a pause of at most `longest` before the line is opened again.
    fn record_failure(&mut self, now: Moment, pause_max: Duration) {
        self.failures = self.failures.saturating_add(1);
        self.retry_at = self.retry_at.max(now.saturating_add(retry_backoff(
            self.failures,
            pause_max,
            now.as_nanos(),
        )));
    }

    /// The line has proved good. True if somebody was told that it was not.
    fn record_success(&mut self) -> bool {
        self.failures = 0;
        std::mem::take(&mut self.outage_logged)
    }
}
