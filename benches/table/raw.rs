//! The same work without the library: one `redis::Connection`, and commands that were made ready beforehand.

use std::time::Duration;

use redis::{Cmd, ConnectionLike, IntoConnectionInfo, Value, io::tcp::TcpSettings};

use crate::{
    Result,
    measure::{Times, now},
};

const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

pub(crate) struct Raw {
    connection: redis::Connection,
    release: String,
}

/// The two commands that take and release a lock, as they go over the wire.
pub(crate) struct Pair {
    take: Vec<u8>,
    release: Vec<u8>,
}

impl Raw {
    pub(crate) fn connect(url: &str) -> Result<Raw> {
        let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let mut connection = redis::Client::open(info)?.get_connection()?;
        let release = redis::cmd("SCRIPT").arg("LOAD").arg(COMPARE_AND_DELETE).query(&mut connection)?;
        Ok(Raw { connection, release })
    }

    /// Prepares a lock and its release under an identifier of the kind that the library uses.
    pub(crate) fn pair(&self, key: &str) -> Pair {
        let id = distlock::generate_lock_id();
        let packed = |command: &Cmd| command.get_packed_command();
        Pair {
            take: packed(redis::cmd("SET").arg(key).arg(id.as_str()).arg("NX").arg("PX").arg(10_000)),
            release: packed(redis::cmd("EVALSHA").arg(&self.release).arg(1).arg(key).arg(id.as_str())),
        }
    }

    /// Takes and releases a lock; how long each took.
    pub(crate) fn run(&mut self, pair: &Pair) -> Result<(Duration, Duration)> {
        let started = now();
        let taken = self.connection.req_packed_command(&pair.take)?;
        let between = now();
        let released = self.connection.req_packed_command(&pair.release)?;
        let ended = now();
        match (taken, released) {
            (Value::Okay, Value::Int(1)) => Ok((between - started, ended - between)),
            other => Err(format!("the raw lock was answered with {other:?}").into()),
        }
    }

    /// So many pairs one after another; how long that took.
    pub(crate) fn run_pairs(&mut self, count: usize) -> Result<Duration> {
        let pairs: Vec<Pair> = (0..count).map(|_| self.pair("lock:raw")).collect();
        let started = now();
        for pair in &pairs {
            self.run(pair)?;
        }
        Ok(now() - started)
    }

    /// One round trip.
    pub(crate) fn ping(&mut self) -> Result<Duration> {
        let started = now();
        match self.connection.req_packed_command(b"*1\r\n$4\r\nPING\r\n")? {
            Value::SimpleString(_) => Ok(now() - started),
            other => Err(format!("PING was answered with {other:?}").into()),
        }
    }

    pub(crate) fn pings(&mut self, count: usize, times: &mut Times) -> Result<()> {
        for _ in 0..count {
            times.add(self.ping()?);
        }
        Ok(())
    }

    /// Sends one batch of commands and reads their answers.
    pub(crate) fn batch(&mut self, commands: impl Iterator<Item = Cmd>) -> Result<()> {
        let mut batch = redis::pipe();
        for command in commands {
            batch.add_command(command).ignore();
        }
        Ok(batch.exec(&mut self.connection)?)
    }
}
