//! `Courier`: the thread that tells handlers what must not be told by a thread that others depend
//! on.

use std::{io, sync::Arc, time::Duration};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;

use super::HandlerList;
use crate::{
    error::LockLost,
    event::{
        ContendedEvent, DangerEvent, LostEvent, ReconnectedEvent, RenewalFailedEvent, RenewedEvent,
        ServerChangedEvent,
    },
    holder::Holder,
    id::LockId,
    threads,
    token::FencingToken,
};

/// A second of a busy manager; more means that the handler does not keep up.
const QUEUED_EVENTS_MAX: usize = 1_024;

/// An event on its way.
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

/// Which acquisition an event is about.
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
                    handler.danger(&DangerEvent { lock, id, remaining: *remaining })
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

/// The queue. When it is closed, the thread tells what is left, and ends.
#[derive(Debug)]
pub(super) struct EventDispatcher {
    queue: Mutex<Option<Sender<QueuedEvent>>>,
}

impl EventDispatcher {
    pub(super) fn start(handlers: Arc<HandlerList>) -> io::Result<EventDispatcher> {
        let (queue, events) = bounded::<QueuedEvent>(QUEUED_EVENTS_MAX);
        let run = move || events.into_iter().for_each(|notice| notice.dispatch(&handlers));
        threads::spawn("distlock-events", run)?;
        Ok(EventDispatcher { queue: Mutex::new(Some(queue)) })
    }

    /// One that nobody reads.
    #[cfg(feature = "testing")]
    pub(super) fn closed() -> EventDispatcher {
        EventDispatcher { queue: Mutex::new(None) }
    }

    /// False when there is no room.
    pub(super) fn send(&self, notice: QueuedEvent) -> bool {
        let queue = self.queue.lock().clone();
        queue.is_some_and(|queue| queue.try_send(notice).is_ok())
    }

    /// Takes nothing more. Nobody waits for the thread: a handler may have blocked it for good.
    pub(super) fn close(&self) {
        let queue = self.queue.lock().take();
        drop(queue);
    }
}
