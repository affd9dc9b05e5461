//! `MySqlBackend`: one MySQL or MariaDB server, as one manager uses it.

use std::{collections::HashSet, io, sync::Arc, time::Duration};

use super::{
    acquisition::MySqlAcquisition,
    cleanup::{self, WaitCleaner},
    connection::Connection,
    database::Database,
    inspect,
    loss_watch::LossWatch,
    outcome::{NO_TABLE, bytes, check, is_no_connection, is_released, number, rows},
    renewals::MySqlRenewals,
    session::{Session, SessionSettings},
    sql::{PRUNE_LOCKS_MAX, PRUNE_ROWS_MAX, kill},
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Backend, GrantStream, Inspection, LeaseRenewals, Looks,
        OptionalCalls, ReleaseReport, Releases, RenewSoon, ReportedIds, ReservedPlaces,
        ResidueCleaner,
        error::{BackendError, NodeError, NodeErrorKind},
    },
    core::{
        cancel::CancelToken,
        claim::{Claim, Residue},
        glob,
        holder::Holder,
        key::LockKey,
        lease::Lease,
        quorum::NodeSet,
    },
    error::{Action, LockError, Result},
    lock_info::{LockInfo, Released},
    observe::Observer,
    sys::clock::{self, Moment},
};

/// Pause between looks at a lock whose connection has been ended.
const LOOK_PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct MySqlBackend {
    database: Arc<Database>,
}

impl MySqlBackend {
    pub(crate) fn new(
        settings: SessionSettings,
        prefix: String,
        max_connections: u32,
        operation_timeout: Duration,
        observer: &Arc<Observer>,
    ) -> MySqlBackend {
        let database =
            Database::new(settings, prefix, max_connections, operation_timeout, observer);
        MySqlBackend { database: Arc::new(database) }
    }

    /// Fails if the server says that it cannot keep locks for this client. Succeeds if it does not
    /// say anything.
    pub(crate) fn check_server(&self) -> Result<()> {
        match self.database.with_control(self.database.deadline(), |_, _| Ok(())) {
            Err(NodeError { kind: NodeErrorKind::Ineligible(reason), .. }) => {
                Err(LockError::InvalidConfig {
                    reason: format!("{}: {reason}", self.database.label),
                })
            }
            Err(error) if !error.is_transient() && !error.is_not_master() => {
                Err(self.lock_error(BackendError::Node(error), Action::Connect, None))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub(crate) fn create_table(&self) -> Result<()> {
        self.database
            .execute(&self.database.table.create())
            .map_err(|error| self.lock_error(BackendError::Node(error), Action::CreateTable, None))
    }

    /// Deletes the rows of locks that nobody holds, and that nobody has acquired for `age`. Returns
    /// their number. Goes through the table once, by name, a part at a time.
    pub(crate) fn prune(&self, age: Duration) -> Result<u64> {
        let age_us = u64::try_from(age.as_micros()).unwrap_or(u64::MAX >> 2).min(u64::MAX >> 2);
        let (mut deleted, mut after) = (0, Vec::new());
        let failed = |error| self.lock_error(BackendError::Node(error), Action::Prune, None);
        let database = &self.database;
        loop {
            let part = database.with_control(database.deadline(), |connection, deadline| {
                rows(connection.query(&database.table.list_rows(&after, age_us), deadline)?)
            });
            let part = part.map_err(failed)?;
            let is_unused = |row: &usize| number(&part, *row, 1) == Some(1);
            let names = (0..part.len()).filter(is_unused).filter_map(|row| bytes(&part, row, 0));
            for some in names.collect::<Vec<_>>().chunks(PRUNE_LOCKS_MAX) {
                let unused = database.with_control(database.deadline(), |connection, deadline| {
                    self.delete_unused(connection, some, age_us, deadline)
                });
                deleted += unused.map_err(failed)?;
            }
            match part.len().checked_sub(1).and_then(|last| bytes(&part, last, 0)) {
                Some(last) if part.len() == PRUNE_ROWS_MAX => after = last.to_vec(),
                _ => return Ok(deleted),
            }
        }
    }

    /// Deletes those of these rows that nobody uses meanwhile. Returns their number.
    fn delete_unused(
        &self,
        connection: &mut Connection,
        names: &[&[u8]],
        age_us: u64,
        deadline: Moment,
    ) -> std::result::Result<u64, NodeError> {
        let table = &self.database.table;
        let select = table.select_unused(names.iter().copied(), age_us);
        let found = rows(connection.query(&select, deadline)?)?;
        let names: Vec<_> = found.iter().filter_map(|row| row.first()?.as_deref()).collect();
        let end = if names.is_empty() {
            "COMMIT".to_owned()
        } else {
            table.delete(names.iter().copied())
        };
        check(&connection.query(&end, deadline)?)?;
        Ok(names.len() as u64)
    }

    fn release(
        &self,
        mut session: Box<Session>,
        claim: &Claim,
        was_held: bool,
        deadline: Moment,
    ) -> std::result::Result<Released, NodeError> {
        let release = self.database.table.release(claim.key.lock_key(), claim.id.as_str());
        // Without the usual lease, the server would soon close the idle connection.
        let lease = session.prepare_lease(claim.ttl);
        let statement = [&release, ";", &lease].concat();
        let reply = session.query_after_owed(&statement, deadline);
        match reply.and_then(|reply| is_released(&reply)) {
            Ok(true) => {
                self.database.locks.put(*session);
                Ok(Released::Released)
            }
            Err(error) if error.is_timeout() => Err(error),
            // If the request was sent, it has ended the lock, or the end of the connection does.
            // Otherwise, the server had closed the connection or the transaction before.
            result => {
                let is_sent = matches!(
                    &result,
                    Err(error) if error.outcome_unknown
                        || matches!(error.kind, NodeErrorKind::Refused { .. })
                );
                drop(session);
                if is_sent && was_held {
                    // A server that shuts down would not reply to a look.
                    return Ok(Released::Released);
                }
                self.gone(claim, deadline)
            }
        }
    }

    /// The result of releasing a lock that is not held any more.
    fn gone(&self, claim: &Claim, deadline: Moment) -> std::result::Result<Released, NodeError> {
        Ok(match self.database.holder(&claim.key, deadline)? {
            Some(holder) if holder.id() != claim.id.as_str() => Released::OwnedByOther(holder),
            _ => Released::Gone,
        })
    }

    /// Ends the connection that holds a lock for this id.
    fn end_holder(
        &self,
        key: &LockKey,
        id: &[u8],
        deadline: Moment,
    ) -> std::result::Result<Released, NodeError> {
        self.database.with_control(deadline, |connection, deadline| {
            let mut killed = false;
            loop {
                let name = key.lock_key();
                match inspect::connection_of(&self.database.table, connection, name, id, deadline)?
                {
                    Ok(_) if killed && clock::now() >= deadline => {
                        return Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
                    }
                    Ok(_) if killed => {
                        clock::sleep_until(clock::now().saturating_add(LOOK_PAUSE).min(deadline))
                    }
                    Ok(number) => {
                        let ended = check(&connection.query(&kill(number), deadline)?);
                        // Its holder may have ended it since the look, which has the same effect.
                        if let Err(error) = ended
                            && !is_no_connection(&error)
                        {
                            return Err(error);
                        }
                        killed = true;
                    }
                    Err(_) if killed => return Ok(Released::Released),
                    Err(Some(holder)) => return Ok(Released::OwnedByOther(holder)),
                    Err(None) => return Ok(Released::Gone),
                }
            }
        })
    }

    fn describe(&self, key: &LockKey) -> std::result::Result<Option<LockInfo>, NodeError> {
        self.database.with_control(self.database.deadline(), |connection, deadline| {
            inspect::lookup(&self.database.table, connection, &self.database.prefix, key, deadline)
        })
    }
}

impl Backend for MySqlBackend {
    fn label(&self) -> &Arc<str> {
        &self.database.label
    }

    fn operation_timeout(&self) -> Duration {
        self.database.operation_timeout
    }

    fn locks_max(&self) -> Option<u32> {
        Some(self.database.locks.size())
    }

    fn reserve(
        &self,
        locks: u32,
        deadline: Moment,
        cancel: Option<&CancelToken>,
    ) -> Result<ReservedPlaces, BackendError> {
        self.database.locks.reserve(locks, deadline, cancel).map_err(BackendError::Node)
    }

    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a> {
        Box::new(MySqlAcquisition::new(&self.database, request))
    }

    fn open_stream(
        &self,
        _: &str,
        _: Moment,
    ) -> std::result::Result<Box<dyn GrantStream>, NodeError> {
        // The waiting statements get their grants as replies.
        Err(NodeError::not_applied(io::ErrorKind::Unsupported))
    }

    fn end_waits(&self) {
        self.database.shutdown.cancel();
    }

    fn lease_renewals(self: Arc<Self>, renew_soon: RenewSoon) -> Box<dyn LeaseRenewals + Send> {
        let held = self.database.held.clone();
        let watch = LossWatch::start(Box::new(move |closed| {
            renew_soon(&held.ids_of(&closed.iter().copied().collect::<HashSet<_>>()));
        }));
        match watch {
            Ok(watch) => drop(self.database.watch.set(watch)),
            Err(error) => {
                log_safely!(warn, "only renewals notice lost locks in MySQL: {error}");
            }
        }
        Box::new(MySqlRenewals(self.database.clone()))
    }

    fn on_registered(&self, lease: &Lease) {
        self.database.held.watch(lease.claim.id.as_str(), self.database.watch.get());
    }

    /// The connection that holds the lock commits in one exchange, which is on its way at once.
    fn releases_in_background(&self) -> bool {
        false
    }

    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send> {
        Box::new(WaitCleaner(self.database.clone()))
    }

    fn list(
        &self,
        prefix: &str,
        pattern: &str,
    ) -> std::result::Result<Vec<LockInfo>, BackendError> {
        let listed =
            self.database.with_control(self.database.deadline(), |connection, deadline| {
                let statement = self.database.table.list();
                let matches = |name: &str| glob::matches(pattern.as_bytes(), name.as_bytes());
                inspect::describe(connection, &statement, prefix, matches, deadline)
            });
        listed.map_err(BackendError::Node)
    }

    fn ping(&self) -> std::result::Result<Duration, BackendError> {
        let began = clock::now();
        self.database.execute("SELECT 1")?;
        Ok(clock::now().duration_since(began))
    }

    fn close(&self) {
        self.database.locks.close();
        self.database.control.close();
        self.database.held.close();
    }

    fn lock_error(&self, error: BackendError, action: Action, name: Option<&str>) -> LockError {
        let error = match error {
            BackendError::Node(NodeError {
                outcome_unknown,
                kind: NodeErrorKind::Refused { code, message },
            }) if code == NO_TABLE => {
                let message = format!(
                    "{message}; create it with MySqlMgr::create_table, `distlock mysql-schema`, \
                     or: {}",
                    self.database.table.create()
                );
                let kind = NodeErrorKind::Refused { code, message };
                BackendError::Node(NodeError { outcome_unknown, kind })
            }
            error => error,
        };
        error.into_lock_error(self.database.label.clone(), action, name)
    }
}

impl Releases for MySqlBackend {
    fn release_lease(&self, lease: &Lease, was_held: bool, deadline: Moment) -> ReleaseReport {
        let claim = &lease.claim;
        let result = match self.database.held.take(claim.id.as_str(), deadline) {
            Some(held) => self.release(held, claim, was_held, deadline),
            None => self.gone(claim, deadline),
        };
        ReleaseReport { result: result.map_err(BackendError::Node), residues: Vec::new() }
    }

    fn release_id(
        &self,
        key: &LockKey,
        id: &[u8],
        _: bool,
        deadline: Moment,
    ) -> std::result::Result<Released, BackendError> {
        self.end_holder(key, id, deadline).map_err(BackendError::Node)
    }

    /// Closes the connection, which ends everything.
    fn lease_residue(&self, lease: &Lease) -> Residue {
        self.database.held.discard(lease.claim.id.as_str());
        Residue::new(NodeSet::EMPTY, "", clock::now())
    }

    fn clean_up_once(
        &self,
        claim: &Claim,
        _: &Residue,
        deadline: Moment,
    ) -> std::result::Result<(), BackendError> {
        cleanup::end_waiting_of(&self.database, claim, deadline).map_err(BackendError::Node)
    }
}

impl Looks for MySqlBackend {
    fn reported_ids(
        &self,
        key: &LockKey,
        deadline: Moment,
    ) -> std::result::Result<ReportedIds, BackendError> {
        let holder = self.database.holder(key, deadline)?;
        let ids = |holder: Holder| Inspection::Held(vec![holder.id_bytes().to_vec()]);
        Ok(holder.map_or(Inspection::Free, ids))
    }

    fn lookup(
        &self,
        key: &LockKey,
        _waiters_max: u64,
    ) -> std::result::Result<Inspection<LockInfo>, BackendError> {
        let found = self.describe(key)?;
        Ok(found.map_or(Inspection::Free, Inspection::Held))
    }
}

impl OptionalCalls for MySqlBackend {}
