//! `RedisNode`: one server, asked over pooled connections or over one that the caller brings.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use redis::Value;

use super::{
    connection::{Connection, write_command},
    endpoint::Endpoint,
    failure::{Failure, Reason},
    pool::{ConnectionPool, Pooled},
    reading::Reading,
    script::{By, Call},
};
use crate::{
    clock::{self, Moment},
    error::{Action, LockError},
};

/// An answer, and the moment before its request was sent, from which every validity is counted.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    pub(crate) sent: Moment,
    pub(crate) reply: T,
}

#[derive(Debug)]
pub(crate) struct RedisNode {
    endpoint: Arc<Endpoint>,
    pool: ConnectionPool,
    operation_timeout: Duration,
    /// The last exchange that told the server's time, on whatever connection.
    reading: Mutex<Option<Reading>>,
}

impl RedisNode {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        pool_size: u32,
        operation_timeout: Duration,
        spin_max: Duration,
    ) -> Option<RedisNode> {
        let pool = ConnectionPool::new(endpoint.clone(), pool_size, operation_timeout, spin_max)?;
        Some(RedisNode { endpoint, pool, operation_timeout, reading: Mutex::new(None) })
    }

    pub(crate) fn label(&self) -> &Arc<str> {
        &self.endpoint.label
    }

    pub(crate) fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    /// A connection outside the pool, for a thread that must never wait for users of the pool.
    pub(crate) fn reserved(&self) -> Connection {
        Connection::unconnected(self.endpoint.clone(), self.operation_timeout, Duration::ZERO)
    }

    pub(crate) fn pooled(&self, deadline: Moment) -> Result<Pooled, Failure> {
        self.pool.get(deadline)
    }

    /// Ends the pool.
    pub(crate) fn close(&self) {
        self.pool.close();
    }

    /// The last reading of the server's clock.
    pub(crate) fn reading(&self) -> Option<Reading> {
        *self.reading.lock()
    }

    pub(crate) fn note(&self, reading: Reading) {
        let mut last = self.reading.lock();
        if last.is_none_or(|last| reading.is_newer_than(&last)) {
            *last = Some(reading);
        }
    }

    /// Asks over a pooled connection.
    pub(crate) fn ask<C: Call>(&self, call: &C, deadline: Moment) -> Result<Answer<C::Reply>, Failure> {
        self.ask_on(&mut *self.pool.get(deadline)?, call, deadline)
    }

    /// Asks over the given connection, connecting it if need be.
    pub(crate) fn ask_on<C: Call>(
        &self,
        connection: &mut Connection,
        call: &C,
        deadline: Moment,
    ) -> Result<Answer<C::Reply>, Failure> {
        let mut by = By::Hash;
        loop {
            let pending = self.send(connection, call, by, deadline)?;
            let reply = connection.receive(deadline)?;
            match self.settle(connection, call, pending, reply) {
                Err(failure) if by == By::Hash && failure.is_unknown_script() => by = By::Text,
                result => return result,
            }
        }
    }

    /// The first half of an exchange.
    pub(crate) fn send<C: Call>(
        &self,
        connection: &mut Connection,
        call: &C,
        by: By,
        deadline: Moment,
    ) -> Result<Pending, Failure> {
        self.connect(connection, deadline)?;
        let not_after_us = self.reading().map_or(0, |reading| reading.server_us_at(deadline));
        let nonce = connection.next_nonce();
        let sent = connection.send(deadline, |out| call.encode(by, nonce, not_after_us, out))?;
        Ok(Pending { nonce, sent })
    }

    pub(crate) fn connect(&self, connection: &mut Connection, deadline: Moment) -> Result<(), Failure> {
        if let Some(reading) = connection.connect(deadline)? {
            // A new connection may lead to another server with another clock.
            *self.reading.lock() = Some(reading);
        }
        Ok(())
    }

    /// The second half of an exchange: makes sense of what came back.
    pub(crate) fn settle<C: Call>(
        &self,
        connection: &mut Connection,
        call: &C,
        pending: Pending,
        reply: Value,
    ) -> Result<Answer<C::Reply>, Failure> {
        connection.refuse_errors(&reply)?;
        match call.read(pending.nonce, reply) {
            Some(reply) => {
                if let Some(server_us) = C::server_us(&reply) {
                    self.note(Reading::new(pending.sent, clock::now(), server_us));
                }
                Ok(Answer { sent: pending.sent, reply })
            }
            None => {
                connection.poison();
                Err(Failure::unclear(Reason::Garbled("its reply has an unexpected form".into())))
            }
        }
    }

    /// How long the server takes to answer.
    pub(crate) fn ping(&self, deadline: Moment) -> Result<Duration, Failure> {
        let mut connection = self.pool.get(deadline)?;
        self.connect(&mut connection, deadline)?;
        let sent = connection.send(deadline, |out| write_command(out, &[b"PING"]))?;
        let answer = connection.receive(deadline)?;
        connection.refuse_errors(&answer)?;
        if answer != Value::SimpleString("PONG".into()) {
            connection.poison();
            return Err(Failure::unclear(Reason::Garbled("its answer to PING is not a pong".into())));
        }
        Ok(clock::now().after(sent))
    }

    /// A failure as the user sees it.
    pub(crate) fn error(&self, failure: Failure, action: Action, name: Option<&str>) -> LockError {
        let name = name.map(str::to_owned);
        let server = self.label().clone();
        match failure.reason {
            Reason::PoolExhausted => LockError::PoolExhausted { action, name, server, pool_size: self.pool.size() },
            Reason::Refused { code, message } if !failure.is_passing() => {
                LockError::Refused { action, name, server, code, message }
            }
            reason => LockError::Unavailable { action, name, server, cause: Box::new(reason) },
        }
    }
}

/// A request that has been sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    nonce: u64,
    pub(crate) sent: Moment,
}
