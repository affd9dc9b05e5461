//! The lock in a database without the library: the statements alone, on a connection of the crate
//! `mysql`.

use std::time::Duration;

use crate::{
    Result,
    measure::now,
    support::mysql::{Conn, OptsBuilder, prelude::Queryable},
};

/// The name of the row.
const ROW: &str = "raw";

pub(crate) struct Raw {
    connection: Conn,
    acquire: String,
    acquire_and_update: String,
}

impl Raw {
    /// Connects, and creates the row. The library's table must exist.
    pub(crate) fn connect(url: &str) -> Result<Raw> {
        let options = OptsBuilder::from_opts(crate::support::mysql::Opts::from_url(url)?)
            .prefer_socket(false)
            .init(vec!["SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"]);
        let mut connection = Conn::new(options)?;
        connection.query_drop(format!("INSERT IGNORE INTO distlock (name) VALUES ('{ROW}')"))?;
        let acquire = format!("BEGIN;SELECT token FROM distlock WHERE name='{ROW}' FOR UPDATE");
        let acquire_and_update =
            format!("{acquire};UPDATE distlock SET token=token+1 WHERE name='{ROW}'");
        Ok(Raw { connection, acquire, acquire_and_update })
    }

    /// Waits for the row.
    pub(crate) fn acquire(&mut self) -> Result<()> {
        run(&mut self.connection, &self.acquire)
    }

    pub(crate) fn release(&mut self) -> Result<()> {
        Ok(self.connection.query_drop("COMMIT")?)
    }

    /// Acquires and releases the row, and changes it in between if `updates` is set. Returns how
    /// long each took.
    pub(crate) fn run(&mut self, updates: bool) -> Result<(Duration, Duration)> {
        let started = now();
        if updates {
            run(&mut self.connection, &self.acquire_and_update)?;
        } else {
            self.acquire()?;
        }
        let locked = now();
        self.release()?;
        Ok((locked - started, now() - locked))
    }

    /// Waits for the row until the server ends the statement. Returns how long that took.
    pub(crate) fn wait_in_vain(&mut self, limit: Duration) -> Result<Duration> {
        let limited = format!(
            "BEGIN;SET STATEMENT max_statement_time={} FOR SELECT token FROM distlock \
             WHERE name='ours' FOR UPDATE",
            limit.as_secs_f64()
        );
        let started = now();
        let result = run(&mut self.connection, &limited);
        let took = now() - started;
        self.connection.query_drop("ROLLBACK")?;
        match result {
            Err(_) => Ok(took),
            Ok(()) => Err("the raw statement did not wait".into()),
        }
    }

    /// Measures the smallest query.
    pub(crate) fn select_1(&mut self) -> Result<Duration> {
        let started = now();
        self.connection.query_drop("SELECT 1")?;
        Ok(now() - started)
    }

    /// Kills the connection of a lock's holder.
    pub(crate) fn kill_holder(&mut self, name: &str) -> Result<()> {
        self.connection.query_drop("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")?;
        let found = format!("SELECT conn FROM distlock WHERE name='{name}' AND conn<>0");
        let id: u64 = self.connection.query_first(found)?.ok_or("the lock is not held")?;
        Ok(self.connection.query_drop(format!("KILL {id}"))?)
    }
}

/// Runs statements and reads all of their results. `query_drop` would ignore an error of any but
/// the first.
fn run(connection: &mut Conn, statements: &str) -> Result<()> {
    let mut results = connection.query_iter(statements)?;
    while let Some(rows) = results.iter() {
        for row in rows {
            row?;
        }
    }
    Ok(())
}
