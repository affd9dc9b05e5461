//! `Observer`: receives every step in the life of a lock, counts it and calls the event handlers.

mod dispatcher;
pub(crate) mod event;
pub(crate) mod metrics;
mod span;

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use self::dispatcher::{EventDispatcher, LockRef, QueuedEvent};
pub(crate) use self::span::{HoldSpan, WaitSpan};
#[cfg(feature = "testing")]
use crate::sys::sim;
use crate::{
    core::{holder::Holder, id::LockId, lock_lost::LockLost, token::FencingToken},
    error::LockError,
    observe::{
        event::{
            AcquiredEvent, AttemptedEvent, FailedEvent, HandleEvent, ReleasedEvent, TimedOutEvent,
        },
        metrics::{Count, Metrics, Recorder},
    },
};

/// The observer of one manager.
#[derive(Debug)]
pub(crate) struct Observer {
    metrics: Recorder,
    /// `None` if the user has set no handlers.
    handlers: Option<Handlers>,
}

#[derive(Debug)]
struct Handlers {
    list: Arc<HandlerList>,
    dispatcher: EventDispatcher,
}

/// The user's handlers, which may panic or block.
#[derive(Debug)]
struct HandlerList {
    handlers: Vec<Arc<dyn HandleEvent>>,
    panicked: AtomicBool,
}

impl HandlerList {
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
    /// # Errors
    ///
    /// Fails if there are handlers, and their thread cannot be spawned.
    pub(crate) fn start(
        handlers: Vec<Arc<dyn HandleEvent>>,
        server: Arc<str>,
    ) -> io::Result<Arc<Observer>> {
        let handlers = if handlers.is_empty() {
            None
        } else {
            let handlers = Arc::new(HandlerList { handlers, panicked: AtomicBool::new(false) });
            // A simulated thread cannot wait on this queue, so a simulation calls the handlers
            // directly.
            #[cfg(feature = "testing")]
            let dispatcher = if sim::world().is_some() {
                EventDispatcher::closed()
            } else {
                EventDispatcher::start(handlers.clone())?
            };
            #[cfg(not(feature = "testing"))]
            let dispatcher = EventDispatcher::start(handlers.clone())?;
            Some(Handlers { dispatcher, list: handlers })
        };
        Ok(Arc::new(Observer { metrics: Recorder::new(server), handlers }))
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.metrics.snapshot()
    }

    /// Stops accepting queued events.
    pub(crate) fn close(&self) {
        if let Some(handlers) = &self.handlers {
            handlers.dispatcher.close();
        }
    }

    /// Calls the handlers on the current thread.
    fn dispatch_inline(&self, event: impl Fn(&dyn HandleEvent)) {
        if let Some(handlers) = &self.handlers {
            handlers.list.call_each(event);
        }
    }

    /// Calls the handlers on the dispatcher's thread.
    fn dispatch_queued(&self, event: impl FnOnce() -> QueuedEvent) {
        #[cfg(feature = "testing")]
        if sim::world().is_some() {
            if let Some(handlers) = &self.handlers {
                event().dispatch(&handlers.list);
            }
            return;
        }
        if let Some(handlers) = &self.handlers
            && !handlers.dispatcher.send(event())
        {
            self.metrics.count(Count::EventsDropped);
        }
    }

    pub(crate) fn attempted(&self, lock: &str, id: &LockId, wait: Option<Duration>) {
        self.metrics.count(Count::Attempted);
        self.dispatch_inline(|handler| handler.attempted(&AttemptedEvent { lock, id, wait }));
    }

    /// Queued, because the calling thread is about to wait. Other waiters may rely on that thread
    /// to read the subscription and to poll, so a slow handler must not delay it.
    pub(crate) fn contended(&self, lock: &str, id: &LockId, holder: &Holder) {
        self.metrics.contended(lock);
        self.dispatch_queued(|| QueuedEvent::Contended {
            of: LockRef::new(lock, id),
            holder: Box::new(holder.clone()),
        });
    }

    pub(crate) fn acquired(&self, event: AcquiredEvent<'_>) {
        self.metrics.acquired(event.lock, event.waited);
        self.dispatch_inline(|handler| handler.acquired(&event));
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
            self.metrics.timed_out(lock, waited);
            let event = TimedOutEvent { lock, id, waited, holder: error.holder() };
            self.dispatch_inline(|handler| handler.timed_out(&event));
        } else {
            self.metrics.failed(error);
            self.dispatch_inline(|handler| {
                handler.failed(&FailedEvent { lock, id, waited, error })
            });
        }
    }

    pub(crate) fn renewed(&self, lock: &str, id: &LockId, margin: Duration, took: Duration) {
        self.metrics.renewed(lock, margin, took);
        self.dispatch_queued(|| QueuedEvent::Renewed { of: LockRef::new(lock, id), margin, took });
    }

    pub(crate) fn renewal_failed(
        &self,
        lock: &str,
        id: &LockId,
        why: &Arc<str>,
        remaining: Duration,
    ) {
        self.metrics.count(Count::RenewalsFailed);
        self.dispatch_queued(|| QueuedEvent::RenewalFailed {
            of: LockRef::new(lock, id),
            why: why.clone(),
            remaining,
        });
    }

    pub(crate) fn renewal_overdue(&self, lock: &str, id: &LockId, remaining: Duration) {
        self.metrics.count(Count::RenewalsOverdue);
        self.dispatch_queued(|| QueuedEvent::RenewalOverdue {
            of: LockRef::new(lock, id),
            remaining,
        });
    }

    pub(crate) fn lost(
        &self,
        lock: &str,
        id: &LockId,
        token: FencingToken,
        why: &LockLost,
        held: Duration,
    ) {
        self.metrics.lost(lock, held, why);
        self.dispatch_queued(|| QueuedEvent::Lost {
            of: LockRef::new(lock, id),
            token,
            why: why.clone(),
            held,
        });
    }

    pub(crate) fn released(&self, event: ReleasedEvent<'_>) {
        self.metrics.released(event.lock, event.held);
        self.dispatch_inline(|handler| handler.released(&event));
    }

    pub(crate) fn reconnected(&self, server: &Arc<str>, away: Duration) {
        self.metrics.count(Count::Reconnected);
        self.dispatch_queued(|| QueuedEvent::Reconnected { server: server.clone(), away });
    }

    pub(crate) fn server_changed(
        &self,
        server: &Arc<str>,
        replaced: bool,
        quarantine: Option<Duration>,
    ) {
        self.metrics.count(Count::ServersChanged);
        self.dispatch_queued(|| QueuedEvent::ServerChanged {
            server: server.clone(),
            replaced,
            quarantine,
        });
    }
}

impl LockRef {
    fn new(lock: &str, id: &LockId) -> LockRef {
        LockRef { lock: lock.into(), id: id.clone() }
    }
}
