//! `EventDispatcher`: a thread that calls the event handlers on behalf of threads that must not
//! block.

use std::{io, sync::Arc, time::Duration};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;

use super::HandlerList;
use crate::{
    core::{holder::Holder, id::LockId, lock_lost::LockLost, token::FencingToken},
    observe::event::{
        ContendedEvent, LostEvent, ReconnectedEvent, RenewalFailedEvent, RenewalOverdueEvent,
        RenewedEvent, ServerChangedEvent,
    },
    sys::threads,
};

/// Maximum number of queued events: about a second of a busy manager. A longer queue would only
/// mean that a handler is too slow.
const QUEUED_EVENTS_MAX: usize = 1_024;

/// An event waiting in the queue.
#[derive(Debug)]
pub(super) enum QueuedEvent {
    Contended { of: LockRef, holder: Box<Holder> },
    Renewed { of: LockRef, margin: Duration, took: Duration },
    RenewalFailed { of: LockRef, why: Arc<str>, remaining: Duration },
    RenewalOverdue { of: LockRef, remaining: Duration },
    Lost { of: LockRef, token: FencingToken, why: LockLost, held: Duration },
    Reconnected { server: Arc<str>, away: Duration },
    ServerChanged { server: Arc<str>, replaced: bool, quarantine: Option<Duration> },
}

/// The acquisition that an event belongs to.
#[derive(Debug)]
pub(super) struct LockRef {
    pub(super) lock: Box<str>,
    pub(super) id: LockId,
}

impl QueuedEvent {
    pub(super) fn dispatch(&self, handlers: &HandlerList) {
        match self {
            QueuedEvent::Contended { of: LockRef { lock, id }, holder } => {
                handlers
                    .call_each(|handler| handler.contended(&ContendedEvent { lock, id, holder }));
            }
            QueuedEvent::Renewed { of: LockRef { lock, id }, margin, took } => {
                let event = RenewedEvent { lock, id, margin: *margin, took: *took };
                handlers.call_each(|handler| handler.renewed(&event));
            }
            QueuedEvent::RenewalFailed { of: LockRef { lock, id }, why, remaining } => {
                let event = RenewalFailedEvent { lock, id, why, remaining: *remaining };
                handlers.call_each(|handler| handler.renewal_failed(&event));
            }
            QueuedEvent::RenewalOverdue { of: LockRef { lock, id }, remaining } => {
                handlers.call_each(|handler| {
                    handler.renewal_overdue(&RenewalOverdueEvent {
                        lock,
                        id,
                        remaining: *remaining,
                    })
                });
            }
            QueuedEvent::Lost { of: LockRef { lock, id }, token, why, held } => {
                let event = LostEvent { lock, id, token: *token, why, held: *held };
                handlers.call_each(|handler| handler.lost(&event));
            }
            QueuedEvent::Reconnected { server, away } => {
                handlers.call_each(|handler| {
                    handler.reconnected(&ReconnectedEvent { server, away: *away })
                });
            }
            QueuedEvent::ServerChanged { server, replaced, quarantine } => {
                let event =
                    ServerChangedEvent { server, replaced: *replaced, quarantine: *quarantine };
                handlers.call_each(|handler| handler.server_changed(&event));
            }
        }
    }
}

/// The queue and its thread. Once the queue is closed, the thread dispatches the remaining events
/// and ends.
#[derive(Debug)]
pub(super) struct EventDispatcher {
    queue: Mutex<Option<Sender<QueuedEvent>>>,
}

impl EventDispatcher {
    pub(super) fn start(handlers: Arc<HandlerList>) -> io::Result<EventDispatcher> {
        let (queue, events) = bounded::<QueuedEvent>(QUEUED_EVENTS_MAX);
        let run = move || events.into_iter().for_each(|event| event.dispatch(&handlers));
        threads::spawn("distlock-events", run)?;
        Ok(EventDispatcher { queue: Mutex::new(Some(queue)) })
    }

    /// Creates a queue that is closed from the beginning.
    #[cfg(feature = "testing")]
    pub(super) fn closed() -> EventDispatcher {
        EventDispatcher { queue: Mutex::new(None) }
    }

    /// Queues an event. Returns false if the queue is full or closed.
    pub(super) fn send(&self, event: QueuedEvent) -> bool {
        let queue = self.queue.lock().clone();
        queue.is_some_and(|queue| queue.try_send(event).is_ok())
    }

    /// Closes the queue. Does not wait for the thread, because a handler may block forever.
    pub(super) fn close(&self) {
        let queue = self.queue.lock().take();
        drop(queue);
    }
}
