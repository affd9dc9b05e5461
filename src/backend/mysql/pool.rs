//! `SessionPool`: the sessions of a manager, up to a limit, with a queue for the callers that have
//! to wait for one.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::session::{Session, SessionSettings};
use crate::{
    backend::{
        checkout_queue::{CheckoutQueue, NoPlace, Place, ReservedPlaces, Urgency},
        error::{NodeError, NodeErrorKind},
        health::{ConnectOutcome, HealthChange, NodeHealth},
    },
    core::cancel::CancelToken,
    observe::Observer,
    sys::{
        clock::{self, Moment},
        sync::Mutex,
    },
};

#[derive(Debug)]
pub(super) struct SessionPool {
    settings: Arc<SessionSettings>,
    observer: Arc<Observer>,
    health: Arc<NodeHealth>,
    operation_timeout: Duration,
    size: u32,
    queue: Arc<CheckoutQueue>,
    /// The turn of a call that gathers several places.
    several: Arc<CheckoutQueue>,
    /// The most recently used one is the last. `None` once closed.
    idle: Mutex<Option<VecDeque<Session>>>,
}

impl SessionPool {
    pub(super) fn new(
        settings: Arc<SessionSettings>,
        observer: Arc<Observer>,
        health: Arc<NodeHealth>,
        operation_timeout: Duration,
        size: u32,
    ) -> SessionPool {
        SessionPool {
            settings,
            observer,
            health,
            operation_timeout,
            size,
            queue: Arc::new(CheckoutQueue::new(size)),
            several: Arc::new(CheckoutQueue::new(1)),
            idle: Mutex::new(Some(VecDeque::new())),
        }
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Waits for a place until `place_by`, or until `cancel` is cancelled.
    pub(super) fn enter(
        &self,
        place_by: Moment,
        cancel: Option<&CancelToken>,
    ) -> Result<Arc<Place>, NodeError> {
        let place = self.queue.enter_unless(Urgency::Other, place_by, cancel);
        place.map(Arc::new).map_err(|reason| self.no_place(reason))
    }

    /// Waits for places for this many locks, in the same way.
    pub(super) fn reserve(
        &self,
        locks: u32,
        place_by: Moment,
        cancel: Option<&CancelToken>,
    ) -> Result<ReservedPlaces, NodeError> {
        let reserved = self.queue.enter_many(&self.several, locks, place_by, cancel);
        reserved.map_err(|reason| self.no_place(reason))
    }

    fn no_place(&self, reason: NoPlace) -> NodeError {
        let kind = match reason {
            NoPlace::Closed => NodeErrorKind::Closed,
            NoPlace::TimedOut => NodeErrorKind::PoolExhausted { pool_size: self.size },
        };
        NodeError::not_applied(kind)
    }

    /// Returns a session for a place. Opens one if none is idle.
    pub(super) fn get(&self, place: Arc<Place>, deadline: Moment) -> Result<Session, NodeError> {
        let mut session = loop {
            let Some(mut idle) = self.take_idle()? else {
                break self.observer.shield(|| self.open(deadline))?;
            };
            // The server has closed those that were idle for too long.
            if idle.connection.is_idle() {
                break idle;
            }
        };
        session.place = Some(place);
        Ok(session)
    }

    /// Records whether a session can be opened. No user code runs meanwhile.
    fn open(&self, deadline: Moment) -> Result<Session, NodeError> {
        let begun = clock::now();
        let connecting = self.health.begin_connect(begun);
        let opened = Session::open(&self.settings, deadline);
        let is_hurried = deadline.duration_since(begun) < self.operation_timeout / 2;
        let outcome = ConnectOutcome::of(&opened, is_hurried);
        self.report(connecting.end(clock::now(), outcome, None), opened.as_ref().err());
        opened
    }

    fn report(&self, change: Option<HealthChange>, failure: Option<&NodeError>) {
        if let Some(change) = change {
            change.report(&self.observer, &self.settings.endpoint.label, true, failure);
        }
    }

    /// Opens one more session, which no pool keeps, for what is left to do after a shutdown.
    pub(super) fn open_after_close(&self, deadline: Moment) -> Result<Session, NodeError> {
        Session::open(&self.settings, deadline)
    }

    fn take_idle(&self) -> Result<Option<Session>, NodeError> {
        match &mut *self.idle.lock() {
            Some(idle) => Ok(idle.pop_back()),
            None => Err(NodeError::not_applied(NodeErrorKind::Closed)),
        }
    }

    /// Takes back a session without a transaction.
    pub(super) fn put(&self, mut session: Session) {
        if !session.connection.is_idle() {
            return;
        }
        let now = clock::now();
        self.report(self.health.record_reply(now, now), None);
        let place = session.place.take();
        let oldest = self.idle.lock().as_mut().and_then(|idle| {
            idle.push_back(session);
            if idle.len() > 1 { idle.pop_front() } else { None }
        });
        drop(place);
        // After a burst of locks, the sessions that nobody needs are closed one by one.
        if let Some(mut oldest) = oldest
            && oldest.connection.is_idle()
            && let Some(idle) = &mut *self.idle.lock()
        {
            idle.push_front(oldest);
        }
    }

    /// Closes the sessions that nobody uses.
    pub(super) fn close_idle(&self) {
        let idle = self.idle.lock().as_mut().map(std::mem::take);
        for session in idle.into_iter().flatten() {
            session.connection.quit();
        }
    }

    /// Closes what is idle, and ends all waiting for a place.
    pub(super) fn close(&self) {
        self.queue.close();
        self.several.close();
        let idle = self.idle.lock().take();
        for session in idle.into_iter().flatten() {
            session.connection.quit();
        }
    }
}
