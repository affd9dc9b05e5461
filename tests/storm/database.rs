//! The MariaDB of a storm: what it says about the locks, and how their connections are killed.

use std::{net::SocketAddr, time::Duration};

use distlock::{MySqlConfig, MySqlMgr};

use crate::{
    Outcome,
    args::Target,
    history::Said,
    support::{
        MySqlServer,
        mysql::{self, Conn, OptsBuilder, prelude::Queryable},
    },
    worker::name_of,
};

/// The holders, also of transactions that are open, and how long each connection has been idle.
const HOLDERS: &str = "
    SELECT distlock.name, TRIM(TRAILING x'00' FROM holder), conn, IF(command = 'Sleep', time_ms, 0)
    FROM distlock JOIN information_schema.processlist ON id = conn
    WHERE conn <> 0";
/// The connections of workers.
const CONNECTIONS: &str = "
    SELECT id, COALESCE(info, '') FROM information_schema.processlist
    WHERE user = 'root' AND id <> CONNECTION_ID()";

pub(crate) struct Database {
    pub(crate) server: MySqlServer,
}

struct Holder {
    id: String,
    connection: u64,
    idle_ms: f64,
}

impl Database {
    pub(crate) fn start() -> Outcome<Database> {
        let server = MySqlServer::start();
        MySqlMgr::new(MySqlConfig::new(server.url()))?.create_table()?;
        Ok(Database { server })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    pub(crate) fn holder(&self, lock: u32) -> Option<String> {
        Some(find_holder(&mut self.connect(), lock).ok()??.id)
    }

    /// Kills the connection of a lock's holder.
    pub(crate) fn kill_holder(&self, lock: u32) -> Outcome {
        let mut connection = self.connect();
        if let Some(holder) = find_holder(&mut connection, lock)? {
            kill(&mut connection, holder.connection);
        }
        Ok(())
    }

    /// Kills all connections, also those that wait for a lock or are idle.
    pub(crate) fn kill_connections(&self) -> Outcome {
        let mut connection = self.connect();
        for (id, _) in connection.query::<(u64, String), _>(CONNECTIONS)? {
            // The poller's connection is among them; it opens another one.
            kill(&mut connection, id);
        }
        Ok(())
    }

    /// Whether the lock was just renewed by a holder that has had it for at least `age`.
    pub(crate) fn is_held_since(&self, lock: u32, age: Duration) -> Outcome<bool> {
        let mut connection = self.connect();
        let Some(holder) = find_holder(&mut connection, lock)? else { return Ok(false) };
        // A token is the time of the grant.
        let name = name_of(lock);
        let held_us: Option<f64> = connection.exec_first(
            "SELECT UNIX_TIMESTAMP(NOW(6)) * 1000000 - token FROM distlock WHERE name = ?",
            (name,),
        )?;
        let is_old = held_us.is_some_and(|held| held > age.as_micros() as f64);
        Ok(is_old && holder.idle_ms < Target::Database.ttl().as_millis() as f64 / 10.0)
    }

    /// Holders and connections that are left.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mut connection = self.connect();
        let holders = "SELECT CONCAT('the holder ', holder, ' of ', name) FROM distlock \
                       WHERE conn <> 0";
        let held: Vec<String> = connection.query(holders).unwrap_or_default();
        let open: Vec<(u64, String)> = connection.query(CONNECTIONS).unwrap_or_default();
        let open = open.into_iter().map(|(id, info)| format!("connection {id} ({info:?})"));
        held.into_iter().chain(open).collect()
    }

    fn connect(&self) -> Conn {
        let mut connection = self.server.connect();
        connection.query_drop(READ_UNCOMMITTED).expect("every server knows this setting");
        connection
    }
}

const READ_UNCOMMITTED: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED";

/// Opens a connection for [`ask`].
pub(crate) fn connect(url: &str, timeout: Duration) -> mysql::Result<Conn> {
    let options = OptsBuilder::from_opts(mysql::Opts::from_url(url)?)
        .prefer_socket(false)
        .tcp_connect_timeout(Some(timeout))
        .read_timeout(Some(timeout))
        .write_timeout(Some(timeout))
        .init(vec![READ_UNCOMMITTED]);
    Conn::new(options)
}

/// Returns the holder and the remaining lifetime of each lock.
pub(crate) fn ask(connection: &mut Conn, locks: u32) -> mysql::Result<Vec<Said>> {
    let holders = holders(connection)?;
    let ttl = Target::Database.ttl().as_millis() as f64;
    let said = |lock| {
        let holder = holders.iter().find(|(name, _)| *name == name_of(lock));
        holder.map_or(Said::Free, |(_, holder)| Said::Kept {
            id: holder.id.clone(),
            left_ms: (ttl - holder.idle_ms).max(0.0) as u64,
        })
    };
    Ok((1..=locks).map(said).collect())
}

fn holders(connection: &mut Conn) -> mysql::Result<Vec<(String, Holder)>> {
    connection.query_map(HOLDERS, |(name, id, connection, idle_ms)| {
        (name, Holder { id, connection, idle_ms })
    })
}

fn find_holder(connection: &mut Conn, lock: u32) -> mysql::Result<Option<Holder>> {
    let mut holders = holders(connection)?.into_iter();
    Ok(holders.find(|(name, _)| *name == name_of(lock)).map(|(_, holder)| holder))
}

fn kill(connection: &mut Conn, id: u64) {
    // Fails if the connection has ended meanwhile.
    let _ = connection.query_drop(format!("KILL {id}"));
}
