//! The SQL of the lock. Pure.
//!
//! Names and ids appear only as hexadecimal literals, and the table only as the configuration gives
//! it, which has been checked. So no text from outside can change a statement.

use std::{fmt, time::Duration};

use super::token::NEXT_TOKEN;

/// Begins the comment by which a waiting statement is recognized in the server's list of processes.
const WAIT_MARK: &str = "distlock wait ";
/// Never reached in practice. The server limits the wait of a caller that has a limit in another
/// way, and one without a limit waits for as long as others hold the lock.
const NO_LIMIT_S: u32 = 31_536_000;
/// Maximum time that a statement waits for the table, for example behind `ALTER TABLE`. A caller
/// that gives up leaves its statement at the server, and these would use up all connections.
const TABLE_WAIT_S: u32 = 1;
/// Longest limit that both servers accept for one statement, about 41 days.
const LIMIT_MAX: Duration = Duration::from_millis(3_600_000_000);
/// A statement limit of zero means none.
const LIMIT_MIN: Duration = Duration::from_millis(1);
/// The lengths of stored ids are multiples of this. Ids that the library makes are shorter, unless
/// the name of their host is very long.
const ID_LENGTHS: usize = 128;
/// Maximum number of rows that `prune` reads at once; otherwise an exchange could take longer than
/// an operation timeout in a large table.
pub(super) const PRUNE_ROWS_MAX: usize = 1_000;
/// Maximum number of rows that `prune` locks and deletes at once. Meanwhile a caller that does not
/// wait cannot get their locks.
pub(super) const PRUNE_LOCKS_MAX: usize = 16;

/// Renews a lease: the server restarts its idle timeout with every request. A query and not a ping,
/// which a proxy may answer itself. Reads whether the server is read-only.
pub(super) const RENEW: &str = "SELECT CONNECTION_ID(),@@global.read_only";
pub(super) const ROLLBACK: &str = "ROLLBACK";

/// The variables of clusters with several primaries.
pub(super) const LIST_CLUSTER_VARIABLES: &str = "SHOW GLOBAL VARIABLES WHERE variable_name IN \
     ('wsrep_on','group_replication_single_primary_mode')";
pub(super) const COUNT_CONNECTIONS: &str = "SHOW GLOBAL STATUS LIKE 'Threads_connected'";
/// Refused without the privilege `PROCESS`, with which a user may list the waiters of others.
pub(super) const NEED_PROCESS: &str = "SELECT trx_id FROM information_schema.INNODB_TRX LIMIT 1";
/// The server's time in microseconds.
pub(super) const READ_TIME: &str = "SELECT CAST(UNIX_TIMESTAMP(NOW(6))*1000000 AS UNSIGNED)";

/// The value of `@@global.read_only` on a server that may be written to, as in statements: a number
/// up to MariaDB 12, then a word. For SQL, each word equals zero. `CONCAT`, which would make a text
/// of both, makes a lock 3 % slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadOnlyOff(&'static str);

impl ReadOnlyOff {
    /// `None` if the server is read-only.
    pub(super) fn of(read_only: Option<&str>) -> Option<ReadOnlyOff> {
        match read_only {
            Some("0") => Some(ReadOnlyOff("0")),
            Some("OFF") => Some(ReadOnlyOff("'OFF'")),
            _ => None,
        }
    }
}

/// The table as it appears in statements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table(String);

impl Table {
    /// `None` if this is not a table name of letters, digits, `_`, `$` and `-`, with the name of a
    /// database before a dot if there is one.
    pub(crate) fn parse(name: &str) -> Option<Table> {
        let is_identifier = |part: &str| {
            (1..=64).contains(&part.len())
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_$-".contains(&byte))
        };
        let parts: Vec<_> = name.split('.').collect();
        (parts.len() <= 2 && parts.iter().copied().all(is_identifier))
            .then(|| Table(format!("`{}`", parts.join("`.`"))))
    }

    /// Creates the table. The name is `VARBINARY` because text columns take `A` and `a` for the
    /// same name.
    pub(crate) fn create(&self) -> String {
        format!(
            "CREATE TABLE IF NOT EXISTS {} (name VARBINARY(1024) NOT NULL PRIMARY KEY, \
             token BIGINT UNSIGNED NOT NULL DEFAULT 0, holder VARBINARY(512) NOT NULL DEFAULT '', \
             conn BIGINT UNSIGNED NOT NULL DEFAULT 0) ENGINE=InnoDB ROW_FORMAT=DYNAMIC",
            self.0
        )
    }

    /// Asks for the engine of the table.
    pub(super) fn engine(&self) -> String {
        let name = self.0.trim_matches('`');
        let (schema, name) =
            name.split_once("`.`").map_or(("DATABASE()".to_owned(), name), |(schema, name)| {
                (format!("x'{}'", Hex(schema.as_bytes())), name)
            });
        format!(
            "SELECT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA={schema} AND \
             TABLE_NAME=x'{}'",
            Hex(name.as_bytes())
        )
    }

    /// Lists the columns: name, type, whether NULL is allowed, and the key.
    pub(super) fn list_columns(&self) -> String {
        format!("SHOW COLUMNS FROM {}", self.0)
    }

    /// Acquires the lock if nobody holds its row, in one request.
    pub(super) fn try_acquire(&self, name: &str, id: &str, off: ReadOnlyOff) -> String {
        let (select, set_holder) = (self.select_row("", name), self.set_holder("", name, id, off));
        format!("BEGIN;{select} NOWAIT;{set_holder}")
    }

    /// Acquires the lock after a wait for its row, in the server's queue. In MariaDB the update
    /// itself waits, so that the lock is ours with the first statement after the wait. MySQL limits
    /// only the time of SELECT statements.
    pub(super) fn await_row(
        &self,
        name: &str,
        id: &str,
        limit: Option<Duration>,
        is_mariadb: bool,
        off: ReadOnlyOff,
    ) -> String {
        let mark = format!("/* {WAIT_MARK}{} {} */ ", Hex(name.as_bytes()), Hex(id.as_bytes()));
        let limit = limit.map(|limit| limit.clamp(LIMIT_MIN, LIMIT_MAX));
        if is_mariadb {
            let limit = limit.map_or(String::new(), |limit| {
                format!("SET STATEMENT max_statement_time={} FOR ", seconds(limit))
            });
            return format!("BEGIN;{limit}{}", self.set_holder(&mark, name, id, off));
        }
        let hint = limit.map_or(String::new(), |limit| {
            format!("/*+ MAX_EXECUTION_TIME({}) */ ", limit.as_millis())
        });
        let select = self.select_row(&(hint + &mark), name);
        format!("BEGIN;{select};{}", self.set_holder("", name, id, off))
    }

    fn select_row(&self, comments: &str, name: &str) -> String {
        let name = Hex(name.as_bytes());
        format!("SELECT {comments}token FROM {} WHERE name=x'{name}' FOR UPDATE", self.0)
    }

    /// Makes the owner of the row its holder, and gives it a token, which is the number of the
    /// result. If a row has a holder already, it is not locked, because the table has been replaced
    /// by one without row locks.
    fn set_holder(&self, comment: &str, name: &str, id: &str, off: ReadOnlyOff) -> String {
        format!(
            "UPDATE {comment}{} SET token={NEXT_TOKEN},holder=x'{}',conn=CONNECTION_ID() \
             WHERE name=x'{}' AND conn=0 AND @@global.read_only={}",
            self.0,
            Hex(&stored_id(id)),
            Hex(name.as_bytes()),
            off.0
        )
    }

    /// Creates the row of a lock that was never held, and reads whether the server is read-only, in
    /// which case it creates none. Not in the transaction that found no row: with that, concurrent
    /// creators would deadlock. The wait is bounded, because an insertion waits for the holder of a
    /// row that has appeared meanwhile.
    pub(super) fn create_row(&self, name: &str, off: ReadOnlyOff) -> String {
        format!(
            "COMMIT;SET SESSION innodb_lock_wait_timeout=1;INSERT IGNORE INTO {} (name) SELECT \
             x'{}' FROM DUAL WHERE @@global.read_only={};SET SESSION \
             innodb_lock_wait_timeout={NO_LIMIT_S};SELECT @@global.read_only",
            self.0,
            Hex(name.as_bytes()),
            off.0
        )
    }

    /// Releases a lock. Only the transaction that holds it can change the row, and only if it does.
    pub(super) fn release(&self, name: &str, id: &str) -> String {
        format!(
            "UPDATE {} SET conn=0 WHERE name=x'{}' AND holder=x'{}' AND conn=CONNECTION_ID();\
             COMMIT",
            self.0,
            Hex(name.as_bytes()),
            Hex(&stored_id(id))
        )
    }

    /// Reads the holder, which has not committed yet: name, token, holder, connection, time.
    pub(super) fn inspect(&self, name: &str) -> String {
        let condition = format!("name=x'{}' AND conn<>0", Hex(name.as_bytes()));
        self.dirty_read(&condition)
    }

    /// Reads all holders.
    pub(super) fn list(&self) -> String {
        self.dirty_read("conn<>0")
    }

    fn dirty_read(&self, condition: &str) -> String {
        format!(
            "ROLLBACK;SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;SELECT name,token,holder,\
             conn,CAST(UNIX_TIMESTAMP(NOW(6))*1000000 AS UNSIGNED) FROM {} WHERE {condition}",
            self.0
        )
    }

    /// Lists up to [`PRUNE_ROWS_MAX`] rows after this name, by name, and whether their locks were
    /// acquired more than `age_us` ago for the last time. Waits for nothing, and locks nothing.
    pub(super) fn list_rows(&self, after: &[u8], age_us: u64) -> String {
        format!(
            "SELECT name,{} FROM {} WHERE name>x'{}' ORDER BY name LIMIT {PRUNE_ROWS_MAX}",
            is_unused(age_us),
            self.0,
            Hex(after)
        )
    }

    /// Locks those of these rows whose locks nobody holds, and that are still unused. By the key:
    /// in a small table, the server would rather read all rows, and lock each for a moment.
    pub(super) fn select_unused<'a>(
        &self,
        names: impl Iterator<Item = &'a [u8]>,
        age_us: u64,
    ) -> String {
        format!(
            "BEGIN;SELECT name FROM {} FORCE INDEX (PRIMARY) WHERE name IN ({}) AND {} FOR UPDATE \
             SKIP LOCKED",
            self.0,
            list(names),
            is_unused(age_us)
        )
    }

    /// Deletes the rows that [`select_unused`](Self::select_unused) has locked. One by one, because
    /// the server reads all rows of a small table for a list of names, and then waits for those
    /// that are held.
    pub(super) fn delete<'a>(&self, names: impl Iterator<Item = &'a [u8]>) -> String {
        let delete = |name| format!("DELETE FROM {} WHERE name=x'{}';", self.0, Hex(name));
        names.map(delete).chain(["COMMIT".to_owned()]).collect()
    }
}

/// The id as a row keeps it: filled up with zeros, so that most ids have the same length. InnoDB
/// changes a row in place only if no value changes its length. Otherwise it moves all waiters to
/// another lock and back, and 100 waiters bring the server to a standstill.
fn stored_id(id: &str) -> Vec<u8> {
    let mut stored = id.as_bytes().to_vec();
    stored.resize(stored.len().next_multiple_of(ID_LENGTHS), 0);
    stored
}

/// The id that a row keeps.
pub(super) fn id_in(stored: &[u8]) -> &[u8] {
    let end = stored.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &stored[..end]
}

/// Whether the lock of a row was acquired more than `age_us` ago. Tokens follow the clock.
fn is_unused(age_us: u64) -> String {
    format!("token+{age_us}<UNIX_TIMESTAMP(NOW(6))*1000000")
}

fn list<'a>(names: impl Iterator<Item = &'a [u8]>) -> String {
    let names: Vec<_> = names.map(|name| format!("x'{}'", Hex(name))).collect();
    names.join(",")
}

/// Settings of a new connection, and what it then reports: its id, the idle timeout as set, the
/// version, whether the server is read-only, the engine of the table, and the variables of clusters
/// with several primaries. What a server may set for all sessions is fixed where it changes what
/// these statements do: `completion_type` adds to `COMMIT`, modes change what literals mean, and
/// `sql_select_limit` hides rows. The time zone is fixed because a local hour can repeat itself,
/// and tokens follow the clock. In a transaction, MariaDB would prefer its own limits for idle
/// transactions to the idle timeout: a shorter one would end locks, and a longer one keep them.
pub(super) fn open_session(table: &Table, lease_seconds: u64, is_mariadb: bool) -> String {
    let no_limits = if is_mariadb {
        "max_statement_time=0,idle_transaction_timeout=0,idle_write_transaction_timeout=0,\
         idle_readonly_transaction_timeout=0"
    } else {
        "max_execution_time=0"
    };
    format!(
        "SET SESSION wait_timeout={lease_seconds},net_read_timeout={lease_seconds},\
         net_write_timeout={lease_seconds},innodb_lock_wait_timeout={NO_LIMIT_S},\
         lock_wait_timeout={TABLE_WAIT_S},autocommit=1,completion_type=0,\
         sql_mode='STRICT_ALL_TABLES',time_zone='+00:00',sql_select_limit={},{no_limits};\
         SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED,READ WRITE;\
         SELECT CONNECTION_ID(),@@session.wait_timeout,@@version,@@global.read_only;\
         {};\
         {LIST_CLUSTER_VARIABLES}",
        u64::MAX,
        table.engine()
    )
}

/// Reads how a server is set up: the id of the connection, the idle timeout as set here, whether
/// the server is read-only, its limit of connections, and when it flushes its log.
pub(super) fn read_state(lease_seconds: u64) -> String {
    format!(
        "SET SESSION wait_timeout={lease_seconds},sql_select_limit={};\
         SELECT CONNECTION_ID(),@@session.wait_timeout,@@global.read_only,\
         @@global.max_connections,@@global.innodb_flush_log_at_trx_commit",
        u64::MAX
    )
}

/// Makes the server close this connection after this time without a request.
pub(super) fn set_idle_seconds(seconds: u64) -> String {
    format!("SET SESSION wait_timeout={seconds}")
}

/// Does the same, and also for a request of which only a part has arrived.
pub(super) fn set_lease_seconds(lease_seconds: u64) -> String {
    format!(
        "SET SESSION wait_timeout={lease_seconds},net_read_timeout={lease_seconds},\
         net_write_timeout={lease_seconds}"
    )
}

/// Lists the connections whose statements contain this id, but for this one.
pub(super) fn list_statements_of(id: &str) -> String {
    format!(
        "SELECT ID FROM information_schema.PROCESSLIST WHERE ID<>CONNECTION_ID() AND \
         INFO LIKE '%{}%'",
        Hex(id.as_bytes())
    )
}

/// Lists the statements that wait for a lock: connection and text.
pub(super) fn list_waiting() -> String {
    // The pattern is in two parts, so that this statement does not list itself.
    let (one, other) = WAIT_MARK.split_at(WAIT_MARK.len() / 2);
    format!(
        "SELECT ID,INFO FROM information_schema.PROCESSLIST WHERE INFO LIKE \
         CONCAT('%/* {one}','{other}%')"
    )
}

pub(super) fn kill(connection: u64) -> String {
    format!("KILL {connection}")
}

/// The lock and the id for which a listed statement waits.
pub(super) fn waiting_for(statement: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let statement = str::from_utf8(statement).ok()?;
    let (_, rest) = statement.split_once(WAIT_MARK)?;
    let mut words = rest.split(' ');
    Some((from_hex(words.next()?)?, from_hex(words.next()?)?))
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    if rest.is_empty() { bytes.collect() } else { None }
}

fn seconds(span: Duration) -> String {
    format!("{}.{:06}", span.as_secs(), span.subsec_micros())
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: ReadOnlyOff = ReadOnlyOff("0");

    fn table() -> Table {
        Table::parse("shop.locks").unwrap()
    }

    #[test]
    fn table_names_need_no_escape() {
        assert_eq!(table().0, "`shop`.`locks`");
        for name in ["", "a.b.c", ".", "a.", "x`;DROP TABLE y", "a b", "\u{e4}", &"x".repeat(65)] {
            assert_eq!(Table::parse(name), None, "{name}");
        }
    }

    #[test]
    fn names_and_ids_cannot_end_their_literals() {
        let (name, id) = ("x' OR 1=1 -- */", "h|'; COMMIT; --");
        for statement in [
            table().try_acquire(name, id, OFF),
            table().await_row(name, id, Some(Duration::from_secs(1)), true, OFF),
            table().create_row(name, OFF),
            table().release(name, id),
            table().inspect(name),
            table().delete([name.as_bytes()].into_iter()),
        ] {
            assert!(!statement.contains("OR 1") && !statement.contains("--"), "{statement}");
        }
    }

    #[test]
    fn limit_of_a_wait_is_never_taken_for_none() {
        let limited =
            |limit, is_mariadb| table().await_row("x", "id", Some(limit), is_mariadb, OFF);
        assert!(limited(Duration::ZERO, true).contains("max_statement_time=0.001000 FOR UPDATE"));
        assert!(limited(Duration::ZERO, false).contains("SELECT /*+ MAX_EXECUTION_TIME(1) */ /*"));
        assert!(limited(Duration::MAX, false).contains("(3600000000)"));
    }

    #[test]
    fn waiter_is_recognized_by_its_statement() {
        for is_mariadb in [true, false] {
            let limit = Some(Duration::from_secs(1));
            let statement = table().await_row("a b", "me|1", limit, is_mariadb, OFF);
            let found = waiting_for(statement.as_bytes()).unwrap();
            assert_eq!(found, (b"a b".to_vec(), b"me|1".to_vec()));
        }
        assert_eq!(waiting_for(list_waiting().as_bytes()), None);
        for other in ["", "SELECT 1", "/* distlock wait 6 6 */", "/* distlock wait zz 61 */"] {
            assert_eq!(waiting_for(other.as_bytes()), None, "{other}");
        }
    }
}
