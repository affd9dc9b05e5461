//! `Observer`: receives every step in the life of a lock, counts it and calls the event handlers.

pub(crate) mod event;
pub(crate) mod metrics;
mod span;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

pub(crate) use self::span::{HoldSpan, WaitSpan};
use crate::{
    core::{holder::Holder, id::LockId, lock_lost::LockLost, token::FencingToken},
    error::LockError,
    observe::{
        event::{
            AcquiredEvent, AttemptedEvent, ContendedEvent, DetachedEvent, FailedEvent, HandleEvent,
            LostEvent, ReconnectedEvent, ReleasedEvent, RenewalFailedEvent, RenewalOverdueEvent,
            RenewedEvent, RetryingEvent, ServerChangedEvent, TimedOutEvent, UnreachableEvent,
        },
        metrics::{Count, Metrics, Recorder},
    },
    sys::{
        clock::Moment,
        display::{HumanDuration, Quoted},
        outbox::Outbox,
        user_code,
    },
};

/// The observer of one manager.
#[derive(Debug)]
pub(crate) struct Observer {
    metrics: Arc<Recorder>,
    handlers: Arc<HandlerList>,
    outbox: Arc<Outbox>,
}

/// The user's handlers, which may panic or block.
#[derive(Debug)]
struct HandlerList {
    handlers: Vec<Arc<dyn HandleEvent>>,
    panicked: AtomicBool,
}

impl HandlerList {
    /// Calls the handlers on the current thread.
    fn call_each(&self, event: impl Fn(&dyn HandleEvent)) {
        for handler in &self.handlers {
            let result = catch_unwind(AssertUnwindSafe(|| event(&**handler)));
            if let Err(panic) = result {
                // Dropping the payload of a panic may panic again.
                std::mem::forget(panic);
                if !self.panicked.swap(true, Ordering::AcqRel) {
                    log_safely!(
                        warn,
                        "an event handler panicked; locks are not affected, \
                         and further panics are not logged"
                    );
                }
            }
        }
    }
}

impl Observer {
    /// `metrics_by_lock` makes lock names a label of the exported metrics.
    ///
    /// # Errors
    ///
    /// Fails if the thread that calls user code cannot be spawned.
    pub(crate) fn start(
        handlers: Vec<Arc<dyn HandleEvent>>,
        server: Arc<str>,
        nodes: usize,
        metrics_by_lock: bool,
    ) -> Result<Arc<Observer>, LockError> {
        let metrics = Arc::new(Recorder::new(server, nodes, metrics_by_lock));
        let handlers = Arc::new(HandlerList { handlers, panicked: AtomicBool::new(false) });
        let counts = metrics.clone();
        let on_drop = move || counts.count(Count::ReportsDropped);
        let outbox =
            Outbox::start(Recorder::EXPORT_INTERVAL, metrics.clone().exporter(), on_drop).map_err(
                |cause| LockError::NoThread { purpose: "loggers and event handlers", cause },
            )?;
        Ok(Arc::new(Observer { metrics, handlers, outbox }))
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.metrics.snapshot()
    }

    /// Runs what other threads may depend on: user code that it reports to is called on a thread of
    /// its own.
    pub(crate) fn shield<T>(&self, action: impl FnOnce() -> T) -> T {
        user_code::leave_to(self.outbox.clone(), action)
    }

    /// Stops accepting queued events.
    pub(crate) fn close(&self) {
        self.outbox.close();
    }

    /// Waits until what was queued has been reported, after [`close`](Self::close).
    pub(crate) fn await_reports(&self, until: Moment) {
        self.outbox.await_end(until);
    }

    /// Calls the handlers on the outbox's thread. `prepare` copies what the event needs.
    fn dispatch_queued<E: Fn(&dyn HandleEvent) + Send + 'static>(
        &self,
        prepare: impl FnOnce() -> E,
    ) {
        if !self.handlers.handlers.is_empty() {
            let (handlers, event) = (self.handlers.clone(), prepare());
            self.outbox.send(move || handlers.call_each(event));
        }
    }

    /// Queues an event of a lock.
    fn dispatch_of_lock(
        &self,
        lock: &str,
        id: &LockId,
        event: impl Fn(&dyn HandleEvent, &str, &LockId) + Send + 'static,
    ) {
        self.dispatch_queued(|| {
            let (lock, id) = (Box::<str>::from(lock), id.clone());
            move |handler| event(handler, &lock, &id)
        });
    }

    pub(crate) fn attempted(&self, lock: &str, id: &LockId, wait: Option<Duration>) {
        self.metrics.count_of(Count::Attempted, lock);
        self.handlers.call_each(|handler| handler.attempted(&AttemptedEvent { lock, id, wait }));
    }

    /// Queued, because the calling thread is about to wait. Other waiters may rely on that thread
    /// to read the subscription and to poll, so a slow handler must not delay it.
    pub(crate) fn contended(&self, lock: &str, id: &LockId, holder: impl FnOnce() -> Holder) {
        self.metrics.contended(lock);
        self.dispatch_queued(|| {
            let (lock, id, holder) = (Box::<str>::from(lock), id.clone(), holder());
            move |handler| {
                let (lock, id, holder) = (&*lock, &id, &holder);
                handler.contended(&ContendedEvent { lock, id, holder });
            }
        });
    }

    pub(crate) fn acquired(&self, event: AcquiredEvent<'_>) {
        self.metrics.acquired(event.lock, event.waited);
        self.handlers.call_each(|handler| handler.acquired(&event));
    }

    pub(crate) fn timed_out(&self, event: TimedOutEvent<'_>) {
        self.metrics.timed_out(event.lock, event.waited);
        self.handlers.call_each(|handler| handler.timed_out(&event));
    }

    /// Reports that an acquisition failed or timed out.
    pub(crate) fn not_acquired(
        &self,
        lock: &str,
        id: &LockId,
        waited: Duration,
        error: &LockError,
    ) {
        if error.is_contended() {
            self.timed_out(TimedOutEvent { lock, id, waited, holder: error.holder() });
        } else {
            self.metrics.failed(lock, error);
            self.handlers
                .call_each(|handler| handler.failed(&FailedEvent { lock, id, waited, error }));
        }
    }

    /// A grant that is confirmed was for the claim window only, so what is left of it is no margin.
    pub(crate) fn renewed(&self, event: RenewedEvent<'_>, confirms_grant: bool) {
        let RenewedEvent { lock, id, margin, took } = event;
        self.metrics.renewed(lock, (!confirms_grant).then_some(margin), took);
        self.dispatch_of_lock(lock, id, move |handler, lock, id| {
            handler.renewed(&RenewedEvent { lock, id, margin, took });
        });
    }

    pub(crate) fn renewal_failed(
        &self,
        lock: &str,
        id: &LockId,
        why: &Arc<str>,
        remaining: Duration,
    ) {
        self.metrics.count_of(Count::RenewalsFailed, lock);
        let why = why.clone();
        self.dispatch_of_lock(lock, id, move |handler, lock, id| {
            handler.renewal_failed(&RenewalFailedEvent { lock, id, why: &why, remaining });
        });
    }

    /// Reports an acquisition that goes on trying. Called once for each outage.
    pub(crate) fn retrying(&self, lock: &str, id: &LockId, why: &str, gives_up_in: Duration) {
        let server = self.metrics.server();
        let name = Quoted(lock);
        log_safely!(info, "could not acquire lock {name} at {server} yet, still trying: {why}");
        let (server, why) = (server.clone(), Box::<str>::from(why));
        self.dispatch_of_lock(lock, id, move |handler, lock, id| {
            let (server, why) = (&*server, &*why);
            handler.retrying(&RetryingEvent { lock, id, server, why, gives_up_in });
        });
    }

    pub(crate) fn renewal_overdue(&self, lock: &str, id: &LockId, remaining: Duration) {
        self.metrics.count_of(Count::RenewalsOverdue, lock);
        self.dispatch_of_lock(lock, id, move |handler, lock, id| {
            handler.renewal_overdue(&RenewalOverdueEvent { lock, id, remaining });
        });
    }

    /// Reports a loss, by the thread that notices it. Called once for each.
    pub(crate) fn lost(
        &self,
        lock: &str,
        id: &LockId,
        token: FencingToken,
        why: &LockLost,
        held: Duration,
    ) {
        self.metrics.lost(lock, held, why);
        let server = self.metrics.server();
        if *why == LockLost::Shutdown {
            // The program has asked for it.
            log_safely!(info, "lock {} at {server} is lost: {why}", Quoted(lock));
        } else {
            log_safely!(warn, "lock {} at {server} is lost: {why}", Quoted(lock));
        }
        let why = why.clone();
        self.dispatch_of_lock(lock, id, move |handler, lock, id| {
            handler.lost(&LostEvent { lock, id, token, why: &why, held });
        });
    }

    pub(crate) fn released(&self, event: ReleasedEvent<'_>) {
        self.metrics.released(event.lock, event.held);
        self.handlers.call_each(|handler| handler.released(&event));
    }

    pub(crate) fn detached(&self, event: DetachedEvent<'_>) {
        self.metrics.detached(event.lock, event.held);
        self.handlers.call_each(|handler| handler.detached(&event));
    }

    /// Counts a server whose outage [`unreachable`](Self::unreachable) reports next.
    pub(crate) fn node_down(&self) {
        self.metrics.node_down();
    }

    pub(crate) fn node_up(&self) {
        self.metrics.node_up();
    }

    /// Records whether no node of a cluster replies. Its nodes are not counted one by one.
    pub(crate) fn cluster_down(&self, is_down: bool) {
        self.metrics.cluster_down(is_down);
    }

    /// Reports a server to which no connection can be opened; `has_replied` if it refuses them.
    /// Called once for each outage.
    pub(crate) fn unreachable(&self, server: &Arc<str>, has_replied: bool, why: &str) {
        let state = if has_replied { "refuses connections" } else { "is unreachable" };
        log_safely!(warn, "{server} {state}: {why}");
        self.dispatch_queued(|| {
            let (server, why) = (server.clone(), Box::<str>::from(why));
            move |handler| {
                handler.unreachable(&UnreachableEvent { server: &server, why: &why });
            }
        });
    }

    /// `was_unreachable` says whether [`unreachable`](Self::unreachable) has reported the outage.
    pub(crate) fn reconnected(&self, server: &Arc<str>, away: Duration, was_unreachable: bool) {
        if was_unreachable {
            log_safely!(info, "{server} is reachable again after {}", HumanDuration(away));
        }
        self.metrics.count(Count::Reconnected);
        self.dispatch_queued(|| {
            let server = server.clone();
            move |handler| handler.reconnected(&ReconnectedEvent { server: &server, away })
        });
    }

    pub(crate) fn server_changed(
        &self,
        server: &Arc<str>,
        replaced: bool,
        quarantine: Option<Duration>,
    ) {
        self.metrics.count(Count::ServersChanged);
        self.dispatch_queued(|| {
            let server = server.clone();
            move |handler| {
                let event = ServerChangedEvent { server: &server, replaced, quarantine };
                handler.server_changed(&event);
            }
        });
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.outbox.close();
    }
}
