//! `Courier`: the thread that tells handlers what must not be told by a thread that others depend on.

use std::{io, sync::Arc, time::Duration};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;

use super::Handlers;
use crate::{
    error::LockLost,
    event::{
        ContendedEvent, DangerEvent, LostEvent, ReconnectedEvent, RenewalFailedEvent, RenewedEvent, ServerChangedEvent,
    },
    holder::Holder,
    id::LockId,
    threads,
    token::FencingToken,
};

/// A second of a busy manager; more means that the handler does not keep up.
const QUEUE_LENGTH: usize = 1_024;

/// An event on its way.
#[derive(Debug)]
pub(super) enum Notice {
    Contended { of: Subject, holder: Box<Holder> },
    Renewed { of: Subject, margin: Duration, took: Duration },
    RenewalFailed { of: Subject, why: Arc<str>, remaining: Duration },
    Danger { of: Subject, remaining: Duration },
    Lost { of: Subject, token: FencingToken, why: LockLost, held: Duration },
    Reconnected { server: Arc<str>, away: Duration },
    ServerChanged { server: Arc<str>, replaced: bool, quarantine: Option<Duration> },
}

/// Which acquisition an event is about.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) lock: Box<str>,
    pub(super) id: LockId,
}

impl Notice {
    pub(super) fn tell(&self, handlers: &Handlers) {
        match self {
            Notice::Contended { of: Subject { lock, id }, holder } => {
                handlers.tell(|handler| handler.contended(&ContendedEvent { lock, id, holder }));
            }
            Notice::Renewed { of: Subject { lock, id }, margin, took } => {
                let event = RenewedEvent { lock, id, margin: *margin, took: *took };
                handlers.tell(|handler| handler.renewed(&event));
            }
            Notice::RenewalFailed { of: Subject { lock, id }, why, remaining } => {
                let event = RenewalFailedEvent { lock, id, why, remaining: *remaining };
                handlers.tell(|handler| handler.renewal_failed(&event));
            }
            Notice::Danger { of: Subject { lock, id }, remaining } => {
                handlers.tell(|handler| handler.danger(&DangerEvent { lock, id, remaining: *remaining }));
            }
            Notice::Lost { of: Subject { lock, id }, token, why, held } => {
                let event = LostEvent { lock, id, token: *token, why, held: *held };
                handlers.tell(|handler| handler.lost(&event));
            }
            Notice::Reconnected { server, away } => {
                handlers.tell(|handler| handler.reconnected(&ReconnectedEvent { server, away: *away }));
            }
            Notice::ServerChanged { server, replaced, quarantine } => {
                let event = ServerChangedEvent { server, replaced: *replaced, quarantine: *quarantine };
                handlers.tell(|handler| handler.server_changed(&event));
            }
        }
    }
}

/// The queue. When it is closed, the thread tells what is left, and ends.
#[derive(Debug)]
pub(super) struct Courier {
    queue: Mutex<Option<Sender<Notice>>>,
}

impl Courier {
    pub(super) fn start(handlers: Arc<Handlers>) -> io::Result<Courier> {
        let (queue, notices) = bounded::<Notice>(QUEUE_LENGTH);
        let run = move || notices.into_iter().for_each(|notice| notice.tell(&handlers));
        threads::spawn("distlock-events", run)?;
        Ok(Courier { queue: Mutex::new(Some(queue)) })
    }

    /// One that nobody reads.
    #[cfg(feature = "testing")]
    pub(super) fn closed() -> Courier {
        Courier { queue: Mutex::new(None) }
    }

    /// False when there is no room.
    pub(super) fn send(&self, notice: Notice) -> bool {
        let queue = self.queue.lock().clone();
        queue.is_some_and(|queue| queue.try_send(notice).is_ok())
    }

    /// Takes nothing more. Nobody waits for the thread: a handler may have blocked it for good.
    pub(super) fn close(&self) {
        let queue = self.queue.lock().take();
        drop(queue);
    }
}
