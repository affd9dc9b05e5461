//! What replies mean: granted, busy, or why not. Pure.

use std::io;

use super::{
    packet::{ServerError, StatementResult},
    sql::ReadOnlyOff,
};
use crate::backend::error::{NodeError, NodeErrorKind};

/// The code under which a read-only server appears in errors, as with Redis.
pub(super) const READ_ONLY: &str = "READONLY";
/// There is no such table, as in errors.
pub(super) const NO_TABLE: &str = "1146";
pub(super) const NO_TRANSACTION: &str = "it does not keep the transaction of a lock";
/// A wait for a row or a table has reached its limit.
const LOCK_WAIT: u16 = 1205;
/// There is no connection of this number.
const NO_CONNECTION: u16 = 1094;

/// Result of a request for the row of a lock.
#[derive(Debug)]
pub(super) enum RowResult {
    /// The row is ours, with this token.
    Acquired(u64),
    /// Another transaction has the row, or had it until the limit of the wait.
    Busy,
    /// The update has changed nothing: there is no such row, or it has a holder, or the server is
    /// read-only.
    Unchanged,
    /// The server has rolled the transaction back, or somebody has ended the statement. Asking
    /// again may help.
    Interrupted(ServerError),
    Failed(NodeError),
}

/// Judges the reply to a request for a row, which ends with its update.
pub(super) fn row_result(reply: &[StatementResult]) -> RowResult {
    match reply.last() {
        Some(StatementResult::Refused(error)) => match error.code {
            // Limits of the wait: of statements in MariaDB and MySQL, and of row locks.
            LOCK_WAIT | 1969 | 3024 | 3572 => RowResult::Busy,
            1213 | 1317 => RowResult::Interrupted(error.clone()),
            _ => RowResult::Failed(refusal(error)),
        },
        Some(&StatementResult::Done { affected_rows, last_insert_id, in_transaction: true }) => {
            if affected_rows == 1 {
                RowResult::Acquired(last_insert_id)
            } else {
                RowResult::Unchanged
            }
        }
        _ => RowResult::Failed(unexpected(NO_TRANSACTION)),
    }
}

/// Why a row that we have locked has a holder. Nobody else can have set it.
pub(super) fn has_holder() -> NodeError {
    let why = "the table of the locks does not lock rows, or another program has changed the row \
               of this lock; see that its engine is InnoDB, that name is its primary key, and \
               that conn is 0 where no lock is held";
    NodeError::not_applied(NodeErrorKind::Ineligible(why.into()))
}

/// Judges the reply to the creation of a row. A row that another client has created meanwhile, and
/// holds, makes the insertion time out. Fails if the server is read-only.
pub(super) fn check_created(reply: &[StatementResult]) -> Result<(), NodeError> {
    match reply.last() {
        Some(StatementResult::Refused(ServerError { code: LOCK_WAIT | 1213, .. })) => Ok(()),
        Some(StatementResult::Rows { rows, .. }) if ReadOnlyOff::of(text(rows, 0, 0)).is_none() => {
            Err(read_only())
        }
        _ => check(reply),
    }
}

/// Whether the reply to a release confirms it: it was still held, and the transaction has ended.
pub(super) fn is_released(reply: &[StatementResult]) -> Result<bool, NodeError> {
    check(reply)?;
    match reply {
        [
            StatementResult::Done { affected_rows, in_transaction: was_open, .. },
            StatementResult::Done { in_transaction: still_open, .. },
            ..,
        ] => Ok(*affected_rows == 1 && *was_open && !*still_open),
        _ => Err(unexpected("it replied to a release with something else")),
    }
}

/// Judges the reply to a renewal on the connection with this id. Fails if the server is read-only.
pub(super) fn is_renewed(reply: &[StatementResult], connection: u64) -> Result<bool, NodeError> {
    check(reply)?;
    match reply {
        [.., StatementResult::Rows { rows, in_transaction }] => {
            let is_kept = *in_transaction && number(rows, 0, 0) == Some(connection);
            let is_read_only = ReadOnlyOff::of(text(rows, 0, 1)).is_none();
            if is_kept && is_read_only { Err(read_only()) } else { Ok(is_kept) }
        }
        _ => Err(unexpected("it replied to a renewal with something else")),
    }
}

/// Whether a statement found the whole table locked, for example by `ALTER TABLE`.
pub(super) fn is_table_locked(error: &NodeError) -> bool {
    let NodeErrorKind::Refused { code, .. } = &error.kind else { return false };
    *code == LOCK_WAIT.to_string()
}

/// Whether there was no connection of this number to end.
pub(super) fn is_no_connection(error: &NodeError) -> bool {
    let NodeErrorKind::Refused { code, .. } = &error.kind else { return false };
    *code == NO_CONNECTION.to_string()
}

/// The server is read-only, so locks belong to another one, or soon will.
pub(super) fn read_only() -> NodeError {
    let (code, message) = (READ_ONLY.into(), "the server is read-only".into());
    NodeError::not_applied(NodeErrorKind::Refused { code, message })
}

/// Kind of cluster, if each of its members keeps row locks of its own. From a list of variables.
pub(super) fn cluster_in(variables: &Rows) -> Option<&'static str> {
    (0..variables.len()).find_map(|row| match (text(variables, row, 0), text(variables, row, 1)) {
        (Some("wsrep_on"), Some("ON" | "1")) => Some("Galera"),
        (Some("group_replication_single_primary_mode"), Some("OFF" | "0")) => {
            Some("group replication with several primaries")
        }
        _ => None,
    })
}

/// The columns that a table of locks must have, and the beginning of their types.
const COLUMNS: [(&str, &str); 4] = [
    ("name", "varbinary(1024)"),
    ("token", "bigint"),
    ("holder", "varbinary(512)"),
    ("conn", "bigint"),
];

/// Why a table with these columns and this engine cannot keep locks. The definition of the table
/// would show the same, but the server writes it as its modes say.
pub(super) fn misfit(columns: &Rows, engine: &str) -> Option<String> {
    for (name, needed) in COLUMNS {
        let Some(row) = (0..columns.len()).find(|row| text(columns, *row, 0) == Some(name)) else {
            return Some(format!("it has no column {name}"));
        };
        let column_type = text(columns, row, 1).unwrap_or_default();
        if !column_type.starts_with(needed) {
            return Some(format!("its column {name} is {column_type} instead of {needed}"));
        }
    }
    let is_in_key = |row: &usize| text(columns, *row, 3) == Some("PRI");
    let mut key = (0..columns.len()).filter(is_in_key).map(|row| text(columns, row, 0));
    if (key.next(), key.next()) != (Some(Some("name")), None) {
        return Some("its primary key is not the column name".into());
    }
    (!engine.eq_ignore_ascii_case("InnoDB"))
        .then(|| "its engine is not InnoDB, and only InnoDB locks rows".into())
}

/// Fails if a statement was refused.
pub(super) fn check(reply: &[StatementResult]) -> Result<(), NodeError> {
    match reply.last() {
        Some(StatementResult::Refused(error)) => Err(refusal(error)),
        Some(_) => Ok(()),
        None => Err(unexpected("its reply is empty")),
    }
}

/// The rows of the last statement that has any.
pub(super) fn rows(reply: Vec<StatementResult>) -> Result<Rows, NodeError> {
    check(&reply)?;
    let rows = reply.into_iter().rev().find_map(|result| match result {
        StatementResult::Rows { rows, .. } => Some(rows),
        _ => None,
    });
    rows.ok_or_else(|| unexpected("it replied to a query without rows"))
}

pub(super) type Rows = Vec<Vec<Option<Vec<u8>>>>;

pub(super) fn bytes(rows: &Rows, row: usize, column: usize) -> Option<&[u8]> {
    rows.get(row)?.get(column)?.as_deref()
}

pub(super) fn text(rows: &Rows, row: usize, column: usize) -> Option<&str> {
    str::from_utf8(bytes(rows, row, column)?).ok()
}

pub(super) fn number(rows: &Rows, row: usize, column: usize) -> Option<u64> {
    text(rows, row, column)?.parse().ok()
}

pub(super) fn unexpected(what: &str) -> NodeError {
    NodeError { outcome_unknown: true, kind: NodeErrorKind::Protocol(what.into()) }
}

/// Converts an error of the server. A refused statement has changed nothing, and what came before
/// it in its transaction is rolled back with the connection.
pub(super) fn refusal(error: &ServerError) -> NodeError {
    // The server is shutting down, or somebody has ended the connection, which is closed now.
    if matches!(error.code, 1053 | 1927 | 3169 | 4031) {
        let reason = format!("it closed the connection: {} {}", error.code, error.message);
        let error = io::Error::new(io::ErrorKind::ConnectionAborted, reason);
        return NodeError::outcome_unknown(error.into());
    }
    let code = match error.code {
        // A server that was started read-only, or became a replica.
        1290 | 1792 | 1836 => READ_ONLY.into(),
        code => code.to_string(),
    };
    let advice = match error.code {
        1044 | 1045 if error.message.contains("user ''@") => {
            "; name a user in the URL: mysql://user@host/database; if it names one, drop the \
             anonymous user of the server, which comes first"
        }
        1044 => "; grant the user access to the database, or name another one in the URL",
        1045 | 1698 => "; check the user, its password and its host in the server's list",
        1226 if !error.message.contains("max_user_connections") => "; raise this limit of the user",
        1040 | 1203 | 1226 => "; lower max_connections here or raise the server's limit",
        1049 => "; create the database, or name another one in the URL",
        1054 => "; the table has other columns, so drop it and create it as documented",
        1665 => "; set binlog_format to MIXED or ROW",
        LOCK_WAIT => "; the table is locked, for example by ALTER TABLE or SET GLOBAL read_only",
        1142 if error.message.starts_with("CREATE ") => {
            "; grant the user CREATE, or create the table as another user"
        }
        1142 | 1143 => "; grant the user SELECT, INSERT, UPDATE and DELETE on the table",
        1095 => "; to end the connection of another user, grant this one CONNECTION ADMIN or SUPER",
        1820 | 1862 => "; set a new password for the user",
        3118 | 4151 => "; unlock the account of the user",
        _ => "",
    };
    let message = format!("{}{advice}", error.message);
    NodeError::not_applied(NodeErrorKind::Refused { code, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(affected_rows: u64, last_insert_id: u64, in_transaction: bool) -> StatementResult {
        StatementResult::Done { affected_rows, last_insert_id, in_transaction }
    }

    fn found(values: &[&str], in_transaction: bool) -> StatementResult {
        let row: Vec<_> = values.iter().map(|value| Some(value.as_bytes().to_vec())).collect();
        let rows = if row.is_empty() { Vec::new() } else { vec![row] };
        StatementResult::Rows { rows, in_transaction }
    }

    fn refused(code: u16) -> StatementResult {
        StatementResult::Refused(ServerError { code, message: "no".into() })
    }

    fn begun() -> StatementResult {
        done(0, 0, true)
    }

    #[test]
    fn token_is_taken_from_a_row_that_is_ours() {
        for reply in [
            vec![begun(), done(1, 7, true)],
            // The connection's lease was set first.
            vec![done(0, 0, false), begun(), done(1, 7, true)],
            // After a look at the row, or a wait for it.
            vec![begun(), found(&["5"], true), done(1, 7, true)],
        ] {
            let result = row_result(&reply);
            assert!(matches!(result, RowResult::Acquired(7)), "{reply:?}: {result:?}");
        }
    }

    #[test]
    fn row_without_a_transaction_is_not_a_lock() {
        for reply in [
            vec![done(0, 0, false), done(1, 7, false)],
            vec![begun(), found(&["5"], true)],
            Vec::new(),
        ] {
            let result = row_result(&reply);
            assert!(matches!(result, RowResult::Failed(_)), "{reply:?}: {result:?}");
        }
    }

    #[test]
    fn errors_of_a_row_are_told_apart() {
        let result = |code| row_result(&[begun(), refused(code)]);
        for limit in [1205, 1969, 3024, 3572] {
            assert!(matches!(result(limit), RowResult::Busy), "{limit}");
        }
        assert!(matches!(result(1213), RowResult::Interrupted(_)));
        assert!(matches!(result(1146), RowResult::Failed(_)));
        assert!(matches!(row_result(&[begun(), done(0, 0, true)]), RowResult::Unchanged));
        assert!(
            check_created(&[refused(1205)]).is_ok() && check_created(&[refused(1142)]).is_err()
        );
        let created = |read_only| check_created(&[done(0, 0, false), found(&[read_only], false)]);
        assert!(created("0").is_ok() && created("OFF").is_ok());
        assert!(created("1").unwrap_err().is_not_master());
    }

    #[test]
    fn release_counts_only_if_the_lock_was_held() {
        for (reply, expected) in [
            ([done(1, 0, true), done(0, 0, false)], true),
            ([done(0, 0, true), done(0, 0, false)], false),
            ([done(1, 0, false), done(0, 0, false)], false),
            ([done(1, 0, true), done(0, 0, true)], false),
        ] {
            assert_eq!(is_released(&reply).unwrap(), expected, "{reply:?}");
        }
        assert!(is_released(&[refused(1290)]).is_err() && is_released(&[]).is_err());
    }

    #[test]
    fn renewal_counts_only_in_its_transaction() {
        assert!(is_renewed(&[found(&["42", "0"], true)], 42).unwrap());
        assert!(!is_renewed(&[found(&["42", "0"], false)], 42).unwrap());
        assert!(!is_renewed(&[found(&["43", "0"], true)], 42).unwrap());
        for read_only in ["1", "ON", "NO_LOCK"] {
            let error = is_renewed(&[found(&["42", read_only], true)], 42).unwrap_err();
            assert!(error.is_not_master(), "{read_only}: {error:?}");
        }
        assert!(is_renewed(&[found(&["42", "OFF"], true)], 42).unwrap());
        assert!(!is_renewed(&[found(&[], true)], 42).unwrap());
        assert!(is_renewed(&[refused(1927)], 42).is_err() && is_renewed(&[], 42).is_err());
    }

    #[test]
    fn clusters_with_several_primaries_are_recognized() {
        let variable = |name: &str, value: &str| {
            cluster_in(&vec![[name, value].map(|text| Some(text.as_bytes().to_vec())).to_vec()])
        };
        assert_eq!(variable("wsrep_on", "ON"), Some("Galera"));
        assert_eq!(variable("wsrep_on", "OFF"), None);
        let single_primary = "group_replication_single_primary_mode";
        assert!(variable(single_primary, "OFF").is_some_and(|kind| kind.contains("several")));
        assert_eq!(variable(single_primary, "ON"), None);
        assert_eq!(cluster_in(&Vec::new()), None);
    }

    #[test]
    fn table_that_cannot_keep_locks_is_described() {
        let columns = |changed: &str, column_type: &str| -> Rows {
            let types = [
                ("name", "varbinary(1024)"),
                ("token", "bigint(20) unsigned"),
                ("holder", "varbinary(512)"),
                ("conn", "bigint unsigned"),
            ];
            let row = |(name, usual): (&str, &str)| {
                let column_type = if name == changed { column_type } else { usual };
                let key = if name == "name" { "PRI" } else { "" };
                [name, column_type, "NO", key].map(|text| Some(text.into())).to_vec()
            };
            types.map(row).to_vec()
        };
        assert_eq!(misfit(&columns("", ""), "InnoDB"), None);
        let with_key = |row: usize, key: &str| {
            let mut columns = columns("", "");
            columns[row][3] = Some(key.into());
            columns
        };
        for (columns, engine, reason) in [
            (columns("name", "varchar(255)"), "InnoDB", "varchar(255) instead of varbinary"),
            (columns("conn", "int"), "InnoDB", "its column conn is int instead of bigint"),
            (columns("", "")[..3].to_vec(), "InnoDB", "it has no column conn"),
            (columns("", ""), "MyISAM", "not InnoDB"),
            (with_key(3, "PRI"), "InnoDB", "primary key"),
            (with_key(0, ""), "InnoDB", "primary key"),
        ] {
            let found = misfit(&columns, engine);
            assert!(found.as_ref().is_some_and(|found| found.contains(reason)), "{found:?}");
        }
    }

    #[test]
    fn refusals_say_what_to_do() {
        let shown = |code| refusal(&ServerError { code, message: "no".into() }).kind.to_string();
        assert_eq!(shown(1290), "it replied READONLY no");
        assert!(shown(1045).contains("check the user"), "{}", shown(1045));
        assert!(shown(1142).contains("grant the user"), "{}", shown(1142));
        let error = |code| refusal(&ServerError { code, message: String::new() });
        assert!(error(1836).is_not_master());
        for code in [1040, 1203, 1053, 1927] {
            assert!(error(code).is_transient(), "{code}");
        }
        let limit = |of: &str| {
            let message = format!("User 'app' has exceeded the '{of}' resource (current value: 5)");
            refusal(&ServerError { code: 1226, message })
        };
        assert!(limit("max_user_connections").is_max_clients());
        assert!(!limit("max_queries_per_hour").is_transient());
        assert!(is_table_locked(&error(1205)) && !is_table_locked(&error(1146)));
    }
}
