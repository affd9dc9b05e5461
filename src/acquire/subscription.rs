//! `Subscription`: a subscription to a channel on one node, and whether the server is still there.

use std::time::Duration;

use redis::Value;

use crate::{
    clock::{self, Moment},
    node::{Breaker, Connection, Failure, Reason, RedisNode, write_command},
};

/// How long the line may be silent while somebody listens before the server is asked whether it is still there.
const PING_EVERY: Duration = Duration::from_secs(2);
#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) node: usize,
    connection: Connection,
    pub(super) opened_at: Moment,
    heard_at: Moment,
    /// When the server was asked whether it is there, while it has not answered.
    asked_at: Option<Moment>,
    /// Something that is no grant has come over it, which is told once.
    pub(super) garbled: bool,
}

impl Subscription {
    /// Subscribes to a channel on a node, of this index.
    pub(super) fn open(
        index: usize,
        node: &RedisNode,
        channel: &str,
        deadline: Moment,
    ) -> Result<(Subscription, Breaker), Failure> {
        let mut connection = node.reserved();
        node.connect(&mut connection, deadline)?;
        connection.send(deadline, |out| write_command(out, &[b"SUBSCRIBE", channel.as_bytes()]))?;
        let answer = connection.receive(deadline)?;
        connection.refuse_errors(&answer)?;
        match &answer {
            Value::Array(parts) if parts.first() == Some(&Value::BulkString(b"subscribe".to_vec())) => {}
            _ => {
                return Err(Failure::unclear(Reason::Garbled("its answer to SUBSCRIBE has an unexpected form".into())));
            }
        }
        let breaker = connection.breaker().map_err(|error| Failure::unclear(error.into()))?;
        let now = clock::now();
        Ok((
            Subscription { node: index, connection, opened_at: now, heard_at: now, asked_at: None, garbled: false },
            breaker,
        ))
    }

    /// Whether nothing came over it that raises a doubt.
    pub(super) fn is_whole(&self) -> bool {
        self.connection.is_whole()
    }

    /// Waits for a message, and makes sure of the server when it has been silent for long.
    pub(super) fn hear(&mut self, now: Moment, until: Moment, patience: Duration) -> Result<Option<Value>, Failure> {
        let mut until = until;
        match self.asked_at {
            Some(asked) if now.after(asked) >= patience => {
                // The answer may have come while nobody read.
                let message = self.connection.receive_until(now)?;
                return match message {
                    Some(_) => Ok(self.heard(message)),
                    None => Err(Failure::unclear(Reason::TimedOut)),
                };
            }
            Some(asked) => until = until.min(asked.saturating_add(patience)),
            None if now.after(self.heard_at) >= PING_EVERY => {
                self.connection.send(now.saturating_add(patience), |out| write_command(out, &[b"PING"]))?;
                self.asked_at = Some(now);
                until = until.min(now.saturating_add(patience));
            }
            None => until = until.min(self.heard_at.saturating_add(PING_EVERY)),
        }
        let message = self.connection.receive_until(until)?;
        Ok(self.heard(message))
    }

    fn heard(&mut self, message: Option<Value>) -> Option<Value> {
        if message.is_some() {
            self.heard_at = clock::now();
            self.asked_at = None;
        }
        message
    }
}
