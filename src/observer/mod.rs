//! `Observer`: what every step of a lock's life reports to. It counts, and tells the handlers.

mod courier;
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

use self::courier::{Courier, Notice, Subject};
pub(crate) use self::span::{Hold, Wait};
#[cfg(feature = "testing")]
use crate::testing;
use crate::{
    error::{LockError, LockLost},
    event::{AcquiredEvent, AttemptedEvent, FailedEvent, HandleEvent, ReleasedEvent, TimedOutEvent},
    holder::Holder,
    id::LockId,
    metrics::{Count, Metrics, Recorder},
    token::FencingToken,
};

/// One for each manager.
#[derive(Debug)]
pub(crate) struct Observer {
    metrics: Recorder,
    /// Only where somebody wants to hear.
    audience: Option<Audience>,
}

#[derive(Debug)]
struct Audience {
    handlers: Arc<Handlers>,
    courier: Courier,
}

/// Code of users', which may do anything.
#[derive(Debug)]
struct Handlers {
    list: Vec<Arc<dyn HandleEvent>>,
    panicked: AtomicBool,
}

impl Handlers {
    fn tell(&self, event: impl Fn(&dyn HandleEvent)) {
        for handler in &self.list {
            let told = catch_unwind(AssertUnwindSafe(|| event(&**handler)));
            if let Err(panic) = told {
                // What a panic brought along may panic again when it is dropped.
                std::mem::forget(panic);
                if !self.panicked.swap(true, Ordering::AcqRel) {
                    say!(warn, "an event handler panicked; that costs no lock, and is not logged again");
                }
            }
        }
    }
}

impl Observer {
    /// # Errors
    ///
    /// When there are handlers, and the system gives no thread for them.
    pub(crate) fn start(handlers: Vec<Arc<dyn HandleEvent>>, server: Arc<str>) -> io::Result<Arc<Observer>> {
        let audience = if handlers.is_empty() {
            None
        } else {
            let handlers = Arc::new(Handlers { list: handlers, panicked: AtomicBool::new(false) });
            // A simulated world has no thread that could sleep on a queue.
            #[cfg(feature = "testing")]
            let courier =
                if testing::world().is_some() { Courier::closed() } else { Courier::start(handlers.clone())? };
            #[cfg(not(feature = "testing"))]
            let courier = Courier::start(handlers.clone())?;
            Some(Audience { courier, handlers })
        };
        Ok(Arc::new(Observer { metrics: Recorder::new(server), audience }))
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.metrics.snapshot()
    }

    /// Tells no more of what happens in the background.
    pub(crate) fn close(&self) {
        if let Some(audience) = &self.audience {
            audience.courier.close();
        }
    }

    /// On the thread that calls.
    fn tell(&self, event: impl Fn(&dyn HandleEvent)) {
        if let Some(audience) = &self.audience {
            audience.handlers.tell(event);
        }
    }

    /// On the thread for that.
    fn send(&self, notice: impl FnOnce() -> Notice) {
        #[cfg(feature = "testing")]
        if testing::world().is_some() {
            if let Some(audience) = &self.audience {
                notice().tell(&audience.handlers);
            }
            return;
        }
        if let Some(audience) = &self.audience
            && !audience.courier.send(notice())
        {
            self.metrics.count(Count::EventsDropped);
        }
    }

    pub(crate) fn attempted(&self, lock: &str, id: &LockId, wait: Option<Duration>) {
        self.metrics.count(Count::Attempted);
        self.tell(|handler| handler.attempted(&AttemptedEvent { lock, id, wait }));
    }

    /// Told by the thread for that: while the caller's stands in line, others count on it to listen and to look.
    pub(crate) fn contended(&self, lock: &str, id: &LockId, holder: &Holder) {
        self.metrics.contended(lock);
        self.send(|| Notice::Contended { of: Subject::new(lock, id), holder: Box::new(holder.clone()) });
    }

    pub(crate) fn acquired(&self, event: AcquiredEvent<'_>) {
        self.metrics.acquired(event.lock, event.waited);
        self.tell(|handler| handler.acquired(&event));
    }

    /// An acquisition has come to nothing.
    pub(crate) fn not_acquired(&self, lock: &str, id: &LockId, waited: Duration, error: &LockError) {
        if error.is_contended() {
            self.metrics.timed_out(lock, waited);
            let event = TimedOutEvent { lock, id, waited, holder: error.holder() };
            self.tell(|handler| handler.timed_out(&event));
        } else {
            self.metrics.failed(error);
            self.tell(|handler| handler.failed(&FailedEvent { lock, id, waited, error }));
        }
    }

    pub(crate) fn renewed(&self, lock: &str, id: &LockId, margin: Duration, took: Duration) {
        self.metrics.renewed(lock, margin, took);
        self.send(|| Notice::Renewed { of: Subject::new(lock, id), margin, took });
    }

    pub(crate) fn renewal_failed(&self, lock: &str, id: &LockId, why: &Arc<str>, remaining: Duration) {
        self.metrics.count(Count::RenewalsFailed);
        self.send(|| Notice::RenewalFailed { of: Subject::new(lock, id), why: why.clone(), remaining });
    }

    pub(crate) fn danger(&self, lock: &str, id: &LockId, remaining: Duration) {
        self.metrics.count(Count::Dangers);
        self.send(|| Notice::Danger { of: Subject::new(lock, id), remaining });
    }

    pub(crate) fn lost(&self, lock: &str, id: &LockId, token: FencingToken, why: &LockLost, held: Duration) {
        self.metrics.lost(lock, held, why);
        self.send(|| Notice::Lost { of: Subject::new(lock, id), token, why: why.clone(), held });
    }

    pub(crate) fn released(&self, event: ReleasedEvent<'_>) {
        self.metrics.released(event.lock, event.held);
        self.tell(|handler| handler.released(&event));
    }

    pub(crate) fn reconnected(&self, server: &Arc<str>, away: Duration) {
        self.metrics.count(Count::Reconnected);
        self.send(|| Notice::Reconnected { server: server.clone(), away });
    }

    pub(crate) fn server_changed(&self, server: &Arc<str>, replaced: bool, quarantine: Option<Duration>) {
        self.metrics.count(Count::ServersChanged);
        self.send(|| Notice::ServerChanged { server: server.clone(), replaced, quarantine });
    }
}

impl Subject {
    fn new(lock: &str, id: &LockId) -> Subject {
        Subject { lock: lock.into(), id: id.clone() }
    }
}
