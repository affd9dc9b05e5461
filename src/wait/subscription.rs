//! `Subscription`: a subscription to a channel on one node, with a check that the server is still
//! there.

use std::time::Duration;

use redis::Value;

use crate::{
    backend::redis::{
        CancelHandle, Connection, NodeError, NodeErrorKind, RedisNode, write_command,
    },
    sys::clock::{self, Moment},
};

/// Maximum silence on a subscription that is being read, before the server is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) node: usize,
    connection: Connection,
    pub(super) opened_at: Moment,
    last_message_at: Moment,
    /// When the server was pinged, until something arrives.
    pinged_at: Option<Moment>,
    /// A message that is not a grant has been logged. Further ones are ignored silently.
    pub(super) garbage_logged: bool,
}

impl Subscription {
    /// Subscribes to a channel on the node with this index.
    pub(super) fn open(
        index: usize,
        node: &RedisNode,
        channel: &str,
        deadline: Moment,
    ) -> Result<(Subscription, CancelHandle), NodeError> {
        let mut connection = node.reserved_connection();
        node.connect(&mut connection, deadline)?;
        connection.send(deadline, |out| write_command(out, &[b"SUBSCRIBE", channel.as_bytes()]))?;
        let reply = connection.receive(deadline)?;
        connection.check_error_reply(&reply)?;
        match &reply {
            Value::Array(parts)
                if parts.first() == Some(&Value::BulkString(b"subscribe".to_vec())) => {}
            _ => {
                return Err(NodeError::outcome_unknown(NodeErrorKind::Protocol(
                    "its reply to SUBSCRIBE has an unexpected form".into(),
                )));
            }
        }
        let cancel_handle =
            connection.cancel_handle().map_err(|error| NodeError::outcome_unknown(error.into()))?;
        let now = clock::now();
        Ok((
            Subscription {
                node: index,
                connection,
                opened_at: now,
                last_message_at: now,
                pinged_at: None,
                garbage_logged: false,
            },
            cancel_handle,
        ))
    }

    /// Whether the connection is open, as far as this side knows.
    pub(super) fn is_open(&self) -> bool {
        self.connection.is_peer_open()
    }

    /// Waits for a message until `until`. Pings the server after a long silence, and fails if
    /// nothing arrives within `timeout` of that.
    pub(super) fn receive(
        &mut self,
        now: Moment,
        until: Moment,
        timeout: Duration,
    ) -> Result<Option<Value>, NodeError> {
        let mut until = until;
        match self.pinged_at {
            Some(pinged_at) if now.duration_since(pinged_at) >= timeout => {
                // The reply may have arrived while no thread was reading.
                let message = self.connection.receive_until(now)?;
                return match message {
                    Some(_) => Ok(self.on_message(message)),
                    None => Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut)),
                };
            }
            Some(pinged_at) => until = until.min(pinged_at.saturating_add(timeout)),
            None if now.duration_since(self.last_message_at) >= PING_INTERVAL => {
                self.connection
                    .send(now.saturating_add(timeout), |out| write_command(out, &[b"PING"]))?;
                self.pinged_at = Some(now);
                until = until.min(now.saturating_add(timeout));
            }
            None => until = until.min(self.last_message_at.saturating_add(PING_INTERVAL)),
        }
        let message = self.connection.receive_until(until)?;
        Ok(self.on_message(message))
    }

    fn on_message(&mut self, message: Option<Value>) -> Option<Value> {
        if message.is_some() {
            self.last_message_at = clock::now();
            self.pinged_at = None;
        }
        message
    }
}

/// Share of the remaining time that the next node gets to accept a subscription, after `tried` of
/// `nodes` have failed. The first node is the one that all clients prefer; it may be far away, so
/// it gets half. If it does not reply, the others need the rest.
pub(crate) fn subscribe_budget(left: Duration, tried: usize, nodes: usize) -> Duration {
    let shares = if tried == 0 { nodes.min(2) } else { nodes.saturating_sub(tried).max(1) };
    left / u32::try_from(shares).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: N116
    #[test]
    fn subscribe_budget_gives_first_node_half_of_the_time() {
        let shares = |nodes| {
            let mut left = 24;
            let next = |tried| {
                let share = subscribe_budget(Duration::from_secs(left), tried, nodes).as_secs();
                left -= share;
                share
            };
            (0..nodes).map(next).collect::<Vec<_>>()
        };
        assert_eq!(shares(1), [24]);
        assert_eq!(shares(2), [12, 12]);
        assert_eq!(shares(3), [12, 6, 6]);
        assert_eq!(shares(5), [12, 3, 3, 3, 3]);
        // A node that refuses at once leaves its time to the next.
        assert_eq!(subscribe_budget(Duration::from_secs(24), 2, 3), Duration::from_secs(24));
    }
}
