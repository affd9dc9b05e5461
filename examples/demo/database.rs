//! The MySQL or MariaDB of a demo, which keeps the lock and what it protects.

use std::sync::Mutex;

use distlock::{FencingToken, MySqlConfig, MySqlMgr};
use distlock_test_support::{
    MySqlServer,
    mysql::{Conn, prelude::Queryable},
};

use crate::common::Result;

const TABLE: &str = "distlock_demo";

pub(crate) struct Database {
    url: String,
    mgr: MySqlMgr,
    /// Ends when this is dropped.
    private: Option<MySqlServer>,
}

impl Database {
    /// Whether this is the URL of a database.
    pub(crate) fn is_url(url: &str) -> bool {
        url.starts_with("mysql:") || url.starts_with("mariadb:")
    }

    /// Uses the server of this URL, else starts a private one.
    pub(crate) fn find_or_start(url: Option<String>) -> Result<Database> {
        let private = if url.is_none() { Some(MySqlServer::start()) } else { None };
        let url = url.or_else(|| Some(private.as_ref()?.url())).unwrap_or_default();
        let mgr = MySqlMgr::new(MySqlConfig::new(&url))?;
        mgr.create_table()?;
        Ok(Database { url, mgr, private })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn mgr(&self) -> &MySqlMgr {
        &self.mgr
    }

    /// Which server this is, to be printed after "Server: ".
    pub(crate) fn description(&self) -> String {
        match &self.private {
            Some(_) => format!("a private MariaDB on {}", self.mgr.server()),
            None => format!("{} (from the command line or the environment)", self.mgr.server()),
        }
    }
}

/// A row with a number. It rejects a token that is smaller than one it has seen.
pub(crate) struct Row {
    connection: Mutex<Conn>,
    key: String,
}

impl Row {
    pub(crate) fn new(url: &str, key: &str) -> Result<Row> {
        let mut connection = Conn::new(&*url.replacen("mariadb:", "mysql:", 1))?;
        connection.query_drop(format!(
            "CREATE TABLE IF NOT EXISTS {TABLE} (name VARCHAR(200) PRIMARY KEY, \
             token BIGINT UNSIGNED NOT NULL DEFAULT 0, value BIGINT UNSIGNED NOT NULL DEFAULT 0)"
        ))?;
        connection.exec_drop(format!("INSERT IGNORE INTO {TABLE} (name) VALUES (?)"), (key,))?;
        Ok(Row { connection: Mutex::new(connection), key: key.to_owned() })
    }

    /// Shows the token, and writes the value if there is one. Returns the value, or `None` if the
    /// row has seen a larger token.
    pub(crate) fn call(&self, token: FencingToken, value: Option<u64>) -> Result<Option<u64>> {
        let mut connection = self.connection.lock().map_err(|_| "a thread panicked")?;
        let mut change = connection.start_transaction(Default::default())?;
        let current: Option<(u64, u64)> = change.exec_first(
            format!("SELECT token, value FROM {TABLE} WHERE name = ? FOR UPDATE"),
            (&self.key,),
        )?;
        let (seen, current) = current.ok_or("the row of the resource is missing")?;
        if token.as_u64() < seen {
            return Ok(None);
        }
        let value = value.unwrap_or(current);
        change.exec_drop(
            format!("UPDATE {TABLE} SET token = ?, value = ? WHERE name = ?"),
            (token.as_u64(), value, &self.key),
        )?;
        change.commit()?;
        Ok(Some(value))
    }

    pub(crate) fn remove(&self) -> Result {
        let mut connection = self.connection.lock().map_err(|_| "a thread panicked")?;
        Ok(connection.exec_drop(format!("DELETE FROM {TABLE} WHERE name = ?"), (&self.key,))?)
    }
}
