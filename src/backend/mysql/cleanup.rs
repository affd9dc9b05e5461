//! Cleaning up: ends statements that wait for a lock although their callers have given up.
//!
//! Everything else ends with its connection: the server rolls back the transaction of a connection
//! that is closed, at the latest when the lease has expired. But a waiting statement does not read
//! from its connection. It would get the lock when it is its turn, and keep it until the server
//! notices.

use std::sync::Arc;

use super::{
    connection::Connection,
    database::Database,
    outcome::{check, number, rows},
    sql::{kill, list_statements_of},
};
use crate::{
    backend::{
        CleanupLimits, ResidueCleaner,
        error::{BackendError, NodeError, NodeErrorKind},
    },
    core::{
        claim::{Claim, Residue},
        quorum::NodeSet,
    },
    sys::clock::{self, Moment},
};

/// The residue of a claim whose statement may still wait at the server.
pub(super) fn waiting_statement() -> Residue {
    Residue::new(NodeSet::single(0), "", clock::now())
}

/// Ends the statement that waits under this id, and its connection. No other statement contains the
/// id, because the claim has not been granted.
pub(super) fn end_waiting(
    connection: &mut Connection,
    id: &str,
    deadline: Moment,
) -> Result<(), NodeError> {
    let listed = rows(connection.query(&list_statements_of(id), deadline)?)?;
    for number in (0..listed.len()).filter_map(|row| number(&listed, row, 0)) {
        // Fails if it has ended meanwhile.
        let _ = check(&connection.query(&kill(number), deadline)?);
    }
    Ok(())
}

/// Ends the statement of a claim that its caller has given up.
pub(super) fn end_waiting_of(
    database: &Database,
    claim: &Claim,
    deadline: Moment,
) -> Result<(), NodeError> {
    let id = claim.id.as_str();
    let result = database
        .with_control(deadline, |connection, deadline| end_waiting(connection, id, deadline));
    match result {
        // A shutdown, which made the caller give up, can close the pool before this thread comes
        // here.
        Err(NodeError { kind: NodeErrorKind::Closed, .. }) => {
            let mut session = database.control.open_after_close(deadline)?;
            end_waiting(&mut session.connection, id, deadline)
        }
        result => result,
    }
}

pub(super) struct WaitCleaner(pub(super) Arc<Database>);

impl ResidueCleaner for WaitCleaner {
    fn clean_up(
        &mut self,
        residues: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let mut failure = None;
        for (claim, residue) in residues {
            let Some(deadline) = limits.deadline(self.0.operation_timeout) else { break };
            match end_waiting_of(&self.0, claim, deadline) {
                Ok(()) => residue.nodes = NodeSet::EMPTY,
                Err(error) => failure = Some(BackendError::Node(error)),
            }
        }
        failure
    }

    fn close(&mut self) {}
}
