//! The same work without the library: one `redis::Connection` and prepared commands.

use std::time::Duration;

use redis::{Cmd, ConnectionLike, IntoConnectionInfo, Value, io::tcp::TcpSettings};

use crate::{
    Result,
    measure::{Times, now, pause},
};

const POLL_PAUSE: Duration = Duration::from_millis(1);

const COMPARE_AND_DELETE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return \
                                  redis.call('DEL', KEYS[1]) else return 0 end";

pub(crate) struct Raw {
    connection: redis::Connection,
    release: String,
}

/// The two commands that acquire and release a lock, encoded.
pub(crate) struct Pair {
    acquire: Vec<u8>,
    release: Vec<u8>,
}

impl Raw {
    pub(crate) fn connect(url: &str) -> Result<Raw> {
        let info =
            url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let mut connection = redis::Client::open(info)?.get_connection()?;
        let release =
            redis::cmd("SCRIPT").arg("LOAD").arg(COMPARE_AND_DELETE).query(&mut connection)?;
        Ok(Raw { connection, release })
    }

    /// Prepares a lock and its release, with an id like those of the library.
    pub(crate) fn pair(&self, key: &str) -> Pair {
        let id = distlock::generate_lock_id();
        let packed = |command: &Cmd| command.get_packed_command();
        Pair {
            acquire: packed(
                redis::cmd("SET").arg(key).arg(id.as_str()).arg("NX").arg("PX").arg(10_000),
            ),
            release: packed(
                redis::cmd("EVALSHA").arg(&self.release).arg(1).arg(key).arg(id.as_str()),
            ),
        }
    }

    /// Acquires and releases a lock. Returns how long each took.
    pub(crate) fn run(&mut self, pair: &Pair) -> Result<(Duration, Duration)> {
        let started = now();
        let acquired = self.connection.req_packed_command(&pair.acquire)?;
        let locked = now();
        let released = self.connection.req_packed_command(&pair.release)?;
        let ended = now();
        match (acquired, released) {
            (Value::Okay, Value::Int(1)) => Ok((locked - started, ended - locked)),
            other => Err(format!("unexpected replies to the raw commands: {other:?}").into()),
        }
    }

    /// Acquires the lock of a pair by asking again each millisecond.
    pub(crate) fn poll(&mut self, pair: &Pair) -> Result<()> {
        while self.connection.req_packed_command(&pair.acquire)? != Value::Okay {
            pause(POLL_PAUSE);
        }
        Ok(())
    }

    pub(crate) fn release(&mut self, pair: &Pair) -> Result<()> {
        match self.connection.req_packed_command(&pair.release)? {
            Value::Int(1) => Ok(()),
            other => Err(format!("unexpected reply to the raw release: {other:?}").into()),
        }
    }

    /// Runs pairs one after another. Returns how long all of them took.
    pub(crate) fn run_pairs(&mut self, count: usize) -> Result<Duration> {
        let pairs: Vec<Pair> = (0..count).map(|_| self.pair("lock:raw")).collect();
        let started = now();
        for pair in &pairs {
            self.run(pair)?;
        }
        Ok(now() - started)
    }

    /// Measures one round trip.
    pub(crate) fn ping(&mut self) -> Result<Duration> {
        let started = now();
        match self.connection.req_packed_command(b"*1\r\n$4\r\nPING\r\n")? {
            Value::SimpleString(_) => Ok(now() - started),
            other => Err(format!("unexpected reply to PING: {other:?}").into()),
        }
    }

    pub(crate) fn pings(&mut self, count: usize, times: &mut Times) -> Result<()> {
        for _ in 0..count {
            times.add(self.ping()?);
        }
        Ok(())
    }

    /// Sends a batch of commands and reads the replies.
    pub(crate) fn batch(&mut self, commands: impl Iterator<Item = Cmd>) -> Result<()> {
        let mut batch = redis::pipe();
        for command in commands {
            batch.add_command(command).ignore();
        }
        Ok(batch.exec(&mut self.connection)?)
    }
}
