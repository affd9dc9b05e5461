//! The checks of a MySQL or MariaDB server: pure functions from facts to findings.

use distlock::{MySqlServerInfo, MySqlTableState};

use super::finding::Finding;
use crate::format;

/// Part of the server's connections in use, in percent, from which the limit is close.
const CONNECTIONS_PERCENT_MAX: u64 = 80;

/// Runs all checks of a server that has accepted the user. `statement` creates the table.
pub(super) fn check_server(info: &MySqlServerInfo, statement: &str) -> [Finding; 8] {
    [
        check_version(info),
        check_proxy(info),
        check_cluster(info),
        check_role(info),
        check_table(info, statement),
        check_connections(info),
        check_durability(info),
        check_process(info),
    ]
}

/// Reports why the server did not accept the connection. The message has advice already.
pub(super) fn check_refusal(code: &str, message: &str) -> Finding {
    let says = |message: &str| format!("refused: {} {}", format::escape(code), message);
    match message.rsplit_once("; ") {
        Some((why, advice)) => Finding::problem("login", says(&format::escape(why)))
            .advice(format::with_option_names(&format::escape(advice))),
        None => Finding::problem("login", says(&format::escape(message)))
            .advice("fix what the server reports"),
    }
}

fn check_version(info: &MySqlServerInfo) -> Finding {
    let version = format::escape(&info.version);
    if info.too_old.is_some() {
        Finding::problem("version", format!("{version} is too old"))
            .advice("use MariaDB 10.6, MySQL 8.0, or later")
    } else {
        Finding::ok("version", version)
    }
}

fn check_proxy(info: &MySqlServerInfo) -> Finding {
    let problem = |says: &str| {
        Finding::problem("proxy", says).advice(
            "connect to the server itself, or let the proxy give each client its own \
                     connection, with all settings of the session",
        )
    };
    if info.shares_connections {
        problem(
            "a proxy between here and the server shares its connections among clients, so they \
             cannot hold locks",
        )
    } else if !info.keeps_wait_timeout {
        problem(
            "a proxy between here and the server ignores SET SESSION wait_timeout, so a lock would \
             outlast its holder",
        )
    } else {
        Finding::ok("proxy", "none that shares connections or ignores SET SESSION wait_timeout")
    }
}

fn check_cluster(info: &MySqlServerInfo) -> Finding {
    match &info.cluster {
        Some(cluster) => Finding::problem(
            "cluster",
            format!("{cluster}: each member keeps locks of its own, so two clients can hold one"),
        )
        .advice("keep locks on a server with a single primary, or in Redis"),
        None => Finding::ok("cluster", "no members that keep locks of their own"),
    }
}

fn check_role(info: &MySqlServerInfo) -> Finding {
    if info.read_only {
        Finding::problem("role", "read-only, so it keeps no locks")
            .advice("connect to the primary; if this is the primary, turn read_only off")
    } else {
        Finding::ok("role", "accepts writes")
    }
}

fn check_table(info: &MySqlServerInfo, statement: &str) -> Finding {
    match &info.table {
        MySqlTableState::Usable => Finding::ok("table", "exists, with the right columns"),
        MySqlTableState::Missing => Finding::problem("table", "the table of the locks is missing")
            .advice("run this in the mysql client, or: distlock mysql-schema | mysql DATABASE")
            .command(format!("{statement};")),
        MySqlTableState::Unfit(why) => {
            Finding::problem("table", format!("it cannot keep locks: {}", format::escape(why)))
                .advice(
                    "while no lock is held, drop it and run distlock mysql-schema, or name \
                         another table by --table",
                )
        }
        MySqlTableState::Hidden(why) => Finding::problem("table", format::escape(why))
            .advice("grant the user SELECT, INSERT, UPDATE and DELETE on the table"),
        // `MySqlTableState` is non-exhaustive.
        _ => Finding::unknown("table", "this version of the command does not know its state"),
    }
}

/// Each lock that is held or waited for has a connection.
fn check_connections(info: &MySqlServerInfo) -> Finding {
    let (used, limit) = (info.connections, info.max_connections);
    let says =
        format!("{used} of {limit} connections in use; a lock needs one, and so does a waiter");
    if used.saturating_mul(100) < limit.saturating_mul(CONNECTIONS_PERCENT_MAX) {
        Finding::ok("connections", says)
    } else {
        Finding::warning("connections", says)
            .advice("raise max_connections of the server, or use fewer locks at a time")
    }
}

/// A release is a commit, which other data usually needs on disk.
fn check_durability(info: &MySqlServerInfo) -> Finding {
    let setting = format!("innodb_flush_log_at_trx_commit is {}", info.flush_log_at_commit);
    Finding::ok(
        "durability",
        match info.flush_log_at_commit {
            1 => format!("each release waits for the disk ({setting}); locks alone need only 2"),
            _ => format!("releases do not wait for the disk ({setting}), which locks do not need"),
        },
    )
}

fn check_process(info: &MySqlServerInfo) -> Finding {
    if info.lists_all_waiters {
        Finding::ok("permissions", "may list the waiters of all users (PROCESS)")
    } else {
        Finding::warning(
            "permissions",
            "ls and show do not see waiters of other users of the server",
        )
        .advice("grant PROCESS to this user, if others use the same locks")
    }
}

#[cfg(test)]
mod tests {
    use super::{super::finding::Level, *};

    fn fit() -> MySqlServerInfo {
        let mut info = MySqlServerInfo::default();
        info.keeps_wait_timeout = true;
        info.lists_all_waiters = true;
        info.table = MySqlTableState::Usable;
        (info.connections, info.max_connections) = (79, 100);
        info
    }

    /// The findings that are not `ok`.
    fn bad(change: impl FnOnce(&mut MySqlServerInfo)) -> Vec<(&'static str, Level)> {
        let mut info = fit();
        change(&mut info);
        let findings = check_server(&info, "CREATE TABLE x");
        let bad = findings.iter().filter(|finding| finding.level != Level::Ok);
        bad.inspect(|finding| assert!(finding.advice.is_some(), "{finding:?}"))
            .map(|finding| (finding.check, finding.level))
            .collect()
    }

    #[test]
    fn fit_mysql_server_has_no_bad_finding() {
        assert_eq!(bad(|_| {}), []);
    }

    #[test]
    fn each_fault_of_a_mysql_server_has_its_finding() {
        use Level::{Problem, Warning};
        assert_eq!(bad(|info| info.too_old = Some("old".into())), [("version", Problem)]);
        assert_eq!(bad(|info| info.shares_connections = true), [("proxy", Problem)]);
        assert_eq!(bad(|info| info.keeps_wait_timeout = false), [("proxy", Problem)]);
        assert_eq!(bad(|info| info.cluster = Some("Galera".into())), [("cluster", Problem)]);
        assert_eq!(bad(|info| info.read_only = true), [("role", Problem)]);
        for table in [
            MySqlTableState::Missing,
            MySqlTableState::Unfit("why".into()),
            MySqlTableState::Hidden("why".into()),
        ] {
            assert_eq!(bad(|info| info.table = table), [("table", Problem)]);
        }
        assert_eq!(bad(|info| info.connections = 80), [("connections", Warning)]);
        assert_eq!(bad(|info| info.lists_all_waiters = false), [("permissions", Warning)]);
    }

    #[test]
    fn refusal_of_mysql_server_is_split_into_message_and_advice() {
        let finding = check_refusal("1045", "Access denied; check the user");
        assert_eq!(finding.message, "refused: 1045 Access denied");
        assert_eq!(finding.advice.as_deref(), Some("check the user"));
        assert!(check_refusal("1", "no").advice.is_some());
    }
}
