//! `Subscriber`: a connection that is subscribed to channels of one server, with a check that the
//! server is still there.

use std::{io, sync::Arc, time::Duration};

use redis::Value;

use super::{connection::Connection, redis_node::RedisNode};
use crate::{
    backend::{
        CancelHandle,
        error::{NodeError, NodeErrorKind},
        redis::fields::write_command,
        transport::Transport,
    },
    sys::clock::{self, Moment},
};

/// Maximum silence on a subscription that is being read, before the server is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Subscriber {
    node: Arc<RedisNode>,
    connection: Connection,
    /// Time in which the server must reply to a ping.
    timeout: Duration,
    last_message_at: Moment,
    /// When the server was pinged, until something arrives.
    pinged_at: Option<Moment>,
}

impl Subscriber {
    /// Uses an established connection to `node`.
    pub(crate) fn over(
        node: Arc<RedisNode>,
        connection: Connection,
        timeout: Duration,
    ) -> Subscriber {
        let last_message_at = clock::now();
        Subscriber { node, connection, timeout, last_message_at, pinged_at: None }
    }

    /// Connects, and subscribes to one channel, and to the sharded channel of the same name, if the
    /// server has such.
    pub(crate) fn to_channel(
        node: &Arc<RedisNode>,
        channel: &str,
        timeout: Duration,
        deadline: Moment,
    ) -> Result<Subscriber, NodeError> {
        let mut connection = node.reserved_connection();
        node.connect(&mut connection, deadline)?;
        let mut subscriber = Subscriber::over(node.clone(), connection, timeout);
        subscriber.connection.send(deadline, |out| {
            write_command(out, &[b"SUBSCRIBE", channel.as_bytes()]);
            write_command(out, &[b"SSUBSCRIBE", channel.as_bytes()]);
        })?;
        let reply = subscriber.connection.receive(deadline)?;
        subscriber.check(&reply)?;
        match &reply {
            Value::Array(parts)
                if parts.first() == Some(&Value::BulkString(b"subscribe".to_vec())) => {}
            _ => {
                return Err(NodeError::protocol("its reply to SUBSCRIBE has an unexpected form"));
            }
        }
        // The second reply is read with the messages. It is an error if the user may not, or if the
        // server is older than Redis 7; then all messages come over the first channel.
        Ok(subscriber)
    }

    pub(crate) fn label(&self) -> &Arc<str> {
        self.node.label()
    }

    /// Sends a command, whose reply is one of the values to receive.
    pub(crate) fn send(&mut self, words: &[&[u8]], deadline: Moment) -> Result<(), NodeError> {
        self.connection.send(deadline, |out| write_command(out, words)).map(drop)
    }

    /// Converts an error reply into an error.
    pub(crate) fn check(&mut self, value: &Value) -> Result<(), NodeError> {
        self.connection.check_error_reply(value)
    }

    /// Whether the connection is open, as far as this side knows, and leads to the current server.
    pub(crate) fn is_open(&mut self) -> bool {
        !self.node.is_replaced(&self.connection) && self.connection.is_peer_open()
    }

    pub(crate) fn cancel_handle(&self) -> Result<CancelHandle, NodeError> {
        self.connection.cancel_handle().map_err(NodeError::not_applied)
    }

    /// Returns the transport to poll, unless the connection is closed.
    pub(crate) fn transport(&self) -> Option<&dyn Transport> {
        self.connection.transport()
    }

    /// Time at which to receive even if nothing has arrived.
    pub(crate) fn check_at(&self) -> Moment {
        match self.pinged_at {
            Some(pinged_at) => pinged_at.saturating_add(self.timeout),
            None => self.last_message_at.saturating_add(PING_INTERVAL),
        }
    }

    /// Waits for a value. Pings the server after a long silence, and fails if nothing arrives
    /// within the timeout of that.
    pub(crate) fn receive(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        let value = self.receive_value(until)?;
        if value.is_some() {
            self.last_message_at = clock::now();
            self.pinged_at = None;
        }
        Ok(value)
    }

    fn receive_value(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        if self.node.is_replaced(&self.connection) {
            let reason = "another server has taken over from this one";
            return Err(NodeError::not_applied(io::Error::new(
                io::ErrorKind::NotConnected,
                reason,
            )));
        }
        let now = clock::now();
        let mut until = until;
        match self.pinged_at {
            Some(pinged_at) if now.duration_since(pinged_at) >= self.timeout => {
                // The reply may have arrived while no thread was reading.
                return match self.connection.receive_until(now)? {
                    None => Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut)),
                    value => Ok(value),
                };
            }
            None if now.duration_since(self.last_message_at) >= PING_INTERVAL => {
                let reply_by = now.saturating_add(self.timeout);
                self.send(&[b"PING"], reply_by)?;
                self.pinged_at = Some(now);
                until = until.min(reply_by);
            }
            _ => until = until.min(self.check_at()),
        }
        self.connection.receive_until(until)
    }
}
