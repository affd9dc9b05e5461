//! `MySqlAcquisition`: one claim: first without waiting, then in the server's queue for the row.

use std::{iter, sync::Arc, time::Duration};

use super::{
    cleanup,
    database::Database,
    inspect,
    outcome::{
        NO_TRANSACTION, RowResult, check, check_created, has_holder, is_renewed, is_table_locked,
        refusal, row_result, unexpected,
    },
    packet::StatementResult,
    session::Session,
    sql::{RENEW, ROLLBACK},
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Answer, Asking, CancelHandle, Contention, NextStep,
        QueuePlace, ReservedPlaces,
        checkout_queue::Place,
        error::{BackendError, NodeError, NodeErrorKind},
    },
    core::{
        cancel::CancelRegistration,
        claim::{Grant, GrantNotice, Residue},
        holder::Holder,
        validity::request_timeout,
    },
    sys::{
        clock::{self, Moment},
        sync::Mutex,
    },
};

/// Number of times that one call asks again after the server has rolled its transaction back or
/// found no holder of a busy row, and number of times that it creates an absent row: `prune` may
/// have locked the row, and then deleted it.
const UNDECIDED_MAX: u32 = 5;
/// Growth of the pause before each repeat of a request that found a busy row without a holder. A
/// holder that releases its lock is in this state until its commit is on the disk.
const UNDECIDED_PAUSE: Duration = Duration::from_millis(1);
/// Time after which a waiter looks for the holder. Most waits for a busy lock are shorter, and a
/// look for each would delay every hand-over.
const LOOK_AFTER: Duration = Duration::from_millis(10);
/// Divisor of the claim window: the part of it that a look may take. Meanwhile the lock may be
/// granted, and is lost if the window ends before we read that.
const LOOK_DIVISOR: u32 = 8;
/// Divisor of the claim window: the part of it that a wait may use up. After a longer wait, the
/// lease is renewed before it is returned.
const LONG_WAIT_DIVISOR: u32 = 4;

pub(super) struct MySqlAcquisition<'a> {
    database: &'a Database,
    request: AcquireRequest<'a>,
    /// Kept until the end, also when a session fails: of the places that a call has reserved, each
    /// is for one of its locks.
    place: Option<Arc<Place>>,
    /// Ready for the next request; `None` before the first one, and after a failure.
    session: Option<Session>,
    waiting: Option<Waiting>,
    /// The row was busy, so the next request waits for it.
    was_busy: bool,
    /// Number of requests in a row that found the row busy without a holder, or were rolled back.
    undecided: u32,
    /// Number of requests that found no row.
    absent: u32,
    /// A connection was given up while its statement waited at the server.
    left_waiting: bool,
}

/// A session whose statement waits in the server's queue.
struct Waiting {
    session: Session,
    sent: Moment,
    /// What closes the connection at a shutdown or a cancellation.
    ends: Vec<CancelRegistration>,
}

impl<'a> MySqlAcquisition<'a> {
    pub(super) fn new(database: &'a Database, request: AcquireRequest<'a>) -> MySqlAcquisition<'a> {
        MySqlAcquisition {
            database,
            request,
            place: None,
            session: None,
            waiting: None,
            was_busy: false,
            undecided: 0,
            absent: 0,
            left_waiting: false,
        }
    }

    fn try_ask(&mut self, asking: Asking) -> Result<Answer, NodeError> {
        let claim = self.request.claim;
        let (name, id) = (claim.key.lock_key(), claim.id.as_str());
        if let Some(mut waiting) = self.waiting.take() {
            let reply = waiting.session.connection.receive(self.give_up_at())?;
            return self.end_wait(waiting, reply);
        }
        let mut session = match self.session.take() {
            Some(session) => session,
            None => {
                let place = self.place()?;
                // From now on, because the wait for the place can be long.
                self.database.locks.get(place, self.deadline())?
            }
        };
        if self.left_waiting {
            // It would get the lock before us.
            cleanup::end_waiting(&mut session.connection, id, self.deadline())?;
            self.left_waiting = false;
        }
        if asking != Asking::Last && (self.was_busy || session.has_just_waited_for(name)) {
            return self.await_row(session);
        }
        let table = &self.database.table;
        let statement =
            session.prepare_lease(claim.ttl) + &table.try_acquire(name, id, session.read_only_off);
        let sent = clock::now();
        let reply = session.connection.query(&statement, self.deadline()).inspect_err(|error| {
            // Its update may wait: another client can have created and locked a row that was absent
            // a moment before.
            self.left_waiting = error.is_timeout();
        })?;
        match row_result(&reply) {
            RowResult::Acquired(token) => {
                self.granted(session, sent, claim.ttl, token).map(Answer::Granted)
            }
            other => self.not_granted(session, other, asking),
        }
    }

    /// Returns the place of this acquisition. All may be in use by locks, so a caller that does not
    /// wait fails at once.
    fn place(&mut self) -> Result<Arc<Place>, NodeError> {
        if let Some(place) = &self.place {
            return Ok(place.clone());
        }
        let AcquireRequest { places, wait_deadline, cancel, .. } = self.request;
        let place = match places.and_then(ReservedPlaces::take) {
            Some(place) => Arc::new(place),
            None => self.database.locks.enter(wait_deadline, cancel)?,
        };
        Ok(self.place.insert(place).clone())
    }

    /// Waits in the server's queue. If the wait is long, reports the holder, and the next call goes
    /// on waiting. The server keeps the lock for the claim window only; otherwise a client that is
    /// frozen or cut off, and gets its turn, would keep it for a whole ttl.
    fn await_row(&mut self, mut session: Session) -> Result<Answer, NodeError> {
        let AcquireRequest { claim, wait_deadline, cancel, .. } = self.request;
        let (name, id) = (claim.key.lock_key(), claim.id.as_str());
        let now = clock::now();
        let limit = (wait_deadline != Moment::NEVER).then(|| wait_deadline.duration_since(now));
        let table = &self.database.table;
        let is_mariadb = session.connection.is_mariadb();
        let statement = session.prepare_wait(self.request.claim_window)
            + &table.await_row(name, id, limit, is_mariadb, session.read_only_off);
        // The wait has no limit, so the system must close the connection soon if the path breaks.
        session.bear_silence(Duration::ZERO);
        let end = session.connection.cancel_handle().map_err(NodeError::not_applied)?;
        let end = Mutex::new(Some(end));
        let end = Arc::new(move || {
            let end = end.lock().take();
            end.into_iter().for_each(CancelHandle::cancel);
        });
        let tokens = iter::once(&self.database.shutdown).chain(cancel);
        let ends = tokens.map(|token| token.on_cancel(end.clone())).collect();
        let sent = clock::now();
        session.connection.send(&statement, self.deadline())?;
        self.left_waiting = true;
        let mut waiting = Waiting { session, sent, ends };
        match waiting.session.connection.receive(clock::now().saturating_add(LOOK_AFTER)) {
            Ok(reply) => self.end_wait(waiting, reply),
            Err(error) if error.is_timeout() => {
                // Another connection, because this one waits. The wait goes on without the holder.
                let limit = self.request.claim_window / LOOK_DIVISOR;
                let until = self.deadline().min(clock::now().saturating_add(limit));
                let holder = self.database.holder(&claim.key, until).ok().flatten();
                self.waiting = Some(waiting);
                let next = NextStep::AskAgainAt(clock::now());
                Ok(Answer::Contended(Contention { holder, next }))
            }
            Err(error) => Err(error),
        }
    }

    /// Handles the reply to a statement that waited. The grant may have lain unread, so the lease
    /// counts from that request, and is confirmed later, or if that request is long past, from one
    /// more.
    fn end_wait(
        &mut self,
        waiting: Waiting,
        reply: Vec<StatementResult>,
    ) -> Result<Answer, NodeError> {
        let AcquireRequest { claim, claim_window, .. } = self.request;
        let Waiting { mut session, sent, ends } = waiting;
        self.left_waiting = false;
        // An administrator may end a long wait now and then.
        if clock::now().duration_since(sent) > LOOK_AFTER {
            (self.undecided, self.absent) = (0, 0);
        }
        drop(ends);
        match row_result(&reply) {
            RowResult::Acquired(token) => {
                session.note_wait_for(claim.key.lock_key());
                let now = clock::now();
                if now.duration_since(sent) <= claim_window / LONG_WAIT_DIVISOR {
                    let grant = self.granted(session, sent, claim_window, token)?;
                    return Ok(Answer::Granted(Grant { provisional: true, ..grant }));
                }
                let lease = session.prepare_lease(claim.ttl);
                self.renew(&mut session, &lease)?;
                self.granted(session, now, claim.ttl, token).map(Answer::Granted)
            }
            RowResult::Unchanged if is_within_limit(&mut self.absent) => {
                // Fails if the server is read-only. Otherwise a request that does not wait finds
                // the reason: creating the row could wait for the holder of a new one.
                self.renew(&mut session, "")?;
                self.was_busy = false;
                session.forget_wait();
                self.session = Some(session);
                Ok(Answer::Undecided)
            }
            other => self.not_granted(session, other, Asking::Try),
        }
    }

    /// Sends these settings and a renewal. Fails if the server is read-only, or does not keep the
    /// transaction.
    fn renew(&self, session: &mut Session, settings: &str) -> Result<(), NodeError> {
        let renewal = settings.to_owned() + RENEW;
        let reply = session.connection.query(&renewal, self.deadline())?;
        let is_kept = is_renewed(&reply, session.connection.id())?;
        if is_kept { Ok(()) } else { Err(unexpected(NO_TRANSACTION)) }
    }

    /// Keeps a lock that the server keeps for `lease` after the request that was sent at `sent`.
    fn granted(
        &self,
        mut session: Session,
        sent: Moment,
        lease: Duration,
        token: u64,
    ) -> Result<Grant, NodeError> {
        let claim = self.request.claim;
        let grant = Grant::of_one_server(token, sent, lease, clock::now());
        if grant.deadline() <= clock::now() {
            // Without the session, the server rolls back.
            return Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
        }
        session.bear_silence(claim.ttl);
        self.database.held.insert(claim.id.as_str(), session);
        Ok(grant)
    }

    fn not_granted(
        &mut self,
        mut session: Session,
        result: RowResult,
        asking: Asking,
    ) -> Result<Answer, NodeError> {
        let AcquireRequest { claim, .. } = self.request;
        let (name, deadline) = (claim.key.lock_key(), self.deadline());
        let holder = match result {
            RowResult::Busy => {
                self.was_busy = true;
                if asking != Asking::Last && clock::now() < self.request.wait_deadline {
                    // The wait begins at once, and its first statement ends this transaction.
                    self.session = Some(session);
                    let next = NextStep::AskAgainAt(clock::now());
                    return Ok(Answer::Contended(Contention { holder: None, next }));
                }
                // Without the usual lease, the server would soon close the idle connection.
                let lease = session.prepare_lease(claim.ttl);
                let (table, connection) = (&self.database.table, &mut session.connection);
                let holder = inspect::holder(table, connection, &lease, name, deadline);
                if holder.as_ref().is_err_and(is_table_locked) {
                    return Ok(self.contended(session, None, asking));
                }
                let holder = holder?;
                if holder.is_none()
                    && asking == Asking::Last
                    && is_within_limit(&mut self.undecided)
                {
                    // It has been released meanwhile, or not been marked yet.
                    let pause = UNDECIDED_PAUSE.saturating_mul(self.undecided);
                    clock::sleep_until(clock::now().saturating_add(pause).min(deadline));
                    self.session = Some(session);
                    return Ok(Answer::Undecided);
                }
                holder
            }
            RowResult::Unchanged if is_within_limit(&mut self.absent) => {
                // Usually the row does not exist yet.
                let create = self.database.table.create_row(name, session.read_only_off);
                let reply = session.connection.query(&create, deadline)?;
                check_created(&reply)?;
                // After an error, the server skips the statement that sets the usual limit again.
                self.session = check(&reply).is_ok().then_some(session);
                return Ok(Answer::Undecided);
            }
            RowResult::Interrupted(_) if is_within_limit(&mut self.undecided) => {
                session.connection.query(ROLLBACK, deadline)?;
                self.session = Some(session);
                return Ok(Answer::Undecided);
            }
            RowResult::Interrupted(error) => return Err(refusal(&error)),
            RowResult::Unchanged => return Err(has_holder()),
            RowResult::Acquired(_) => {
                return Err(unexpected("it does not keep the rows of locks"));
            }
            RowResult::Failed(error) => return Err(error),
        };
        Ok(self.contended(session, holder, asking))
    }

    fn contended(&mut self, session: Session, holder: Option<Holder>, asking: Asking) -> Answer {
        let now = clock::now();
        let next = if asking == Asking::Last || now >= self.request.wait_deadline {
            self.database.locks.put(session);
            NextStep::GiveUp
        } else {
            self.session = Some(session);
            NextStep::AskAgainAt(now)
        };
        Answer::Contended(Contention { holder, next })
    }

    fn timeout(&self) -> Duration {
        request_timeout(self.database.operation_timeout, self.request.claim.ttl)
    }

    /// Latest end of a wait, which the server ends on its own earlier.
    fn give_up_at(&self) -> Moment {
        let limit = self.request.wait_deadline.saturating_add(self.timeout());
        self.deadline().max(limit)
    }

    /// Deadline of a request that does not wait.
    fn deadline(&self) -> Moment {
        clock::now().saturating_add(self.timeout()).min(self.request.call_deadline)
    }
}

/// Counts a request without a result. Returns whether it is repeated.
fn is_within_limit(count: &mut u32) -> bool {
    *count += 1;
    *count <= UNDECIDED_MAX
}

impl Acquisition for MySqlAcquisition<'_> {
    fn ask(&mut self, asking: Asking, _: Option<QueuePlace>) -> Answer {
        self.try_ask(asking).unwrap_or_else(|error| {
            self.database.close_idle_if_read_only(&error);
            Answer::Failed(BackendError::Node(error))
        })
    }

    fn on_grant_message(&mut self, _: GrantNotice) -> Option<Grant> {
        None
    }

    /// The server keeps one place in its queue for each thread.
    fn must_ask_itself(&self) -> bool {
        true
    }

    fn residue(&self) -> Option<Residue> {
        self.left_waiting.then(cleanup::waiting_statement)
    }
}
