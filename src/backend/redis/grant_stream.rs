//! `RedisGrantStream`: a subscription to a channel of one server, with a check that the server is
//! still there.

use std::{fmt, io, sync::Arc, time::Duration};

use redis::Value;

use super::{
    Connection, NodeError, NodeErrorKind, PubSubMessage, RedisNode, Transport, poll_readable,
    waker, write_command,
};
use crate::{
    backend::{CancelHandle, GrantStream, QueuePlace, Wake},
    core::claim::GrantNotice,
    sys::clock::{self, Moment},
};

/// Maximum silence on a subscription that is being read, before the server is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(2);

pub(crate) struct RedisGrantStream {
    node: Arc<RedisNode>,
    place: QueuePlace,
    connection: Connection,
    /// Ends a read early; `None` until a thread needs that.
    waker: Option<(Wake, Box<dyn Transport>)>,
    /// Time in which the server must reply to a ping.
    timeout: Duration,
    last_message_at: Moment,
    /// When the server was pinged, until something arrives.
    pinged_at: Option<Moment>,
    /// A message that is not a grant has been logged. Further ones are ignored silently.
    garbage_logged: bool,
}

impl RedisGrantStream {
    /// Subscribes to a channel on `node`, whose waiters queue at `place`.
    pub(crate) fn open(
        node: &Arc<RedisNode>,
        place: QueuePlace,
        channel: &str,
        timeout: Duration,
        deadline: Moment,
    ) -> Result<RedisGrantStream, NodeError> {
        let mut connection = node.reserved_connection();
        node.connect(&mut connection, deadline)?;
        connection.send(deadline, |out| write_command(out, &[b"SUBSCRIBE", channel.as_bytes()]))?;
        let reply = connection.receive(deadline)?;
        connection.check_error_reply(&reply)?;
        match &reply {
            Value::Array(parts)
                if parts.first() == Some(&Value::BulkString(b"subscribe".to_vec())) => {}
            _ => {
                return Err(NodeError::protocol("its reply to SUBSCRIBE has an unexpected form"));
            }
        }
        Ok(RedisGrantStream {
            node: node.clone(),
            place,
            connection,
            waker: None,
            timeout,
            last_message_at: clock::now(),
            pinged_at: None,
            garbage_logged: false,
        })
    }

    /// Waits for a value. Pings the server after a long silence, and fails if nothing arrives
    /// within the timeout of that.
    fn receive_value(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        if self.node.is_replaced(&self.connection) {
            let reason = "another server has taken over from this one";
            return Err(NodeError::not_sent(io::Error::new(io::ErrorKind::NotConnected, reason)));
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
            Some(pinged_at) => until = until.min(pinged_at.saturating_add(self.timeout)),
            None if now.duration_since(self.last_message_at) >= PING_INTERVAL => {
                let answer_by = now.saturating_add(self.timeout);
                self.connection.send(answer_by, |out| write_command(out, &[b"PING"]))?;
                self.pinged_at = Some(now);
                until = until.min(answer_by);
            }
            None => until = until.min(self.last_message_at.saturating_add(PING_INTERVAL)),
        }
        self.receive_until(until)
    }

    /// Like [`Connection::receive_until`], but a wakeup ends it early.
    fn receive_until(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        let Some((_, wakeups)) = &mut self.waker else {
            return self.connection.receive_until(until);
        };
        let arrived = self.connection.receive_until(clock::now())?;
        let Some(transport) = self.connection.transport().filter(|_| arrived.is_none()) else {
            return Ok(arrived);
        };
        poll_readable(&[transport, &**wakeups], until, Duration::ZERO);
        // Nothing to read is the usual case.
        let _ = wakeups.read(&mut [0; 64], Duration::ZERO);
        self.connection.receive_until(clock::now())
    }
}

impl fmt::Debug for RedisGrantStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisGrantStream")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

impl GrantStream for RedisGrantStream {
    fn place(&self) -> QueuePlace {
        self.place
    }

    fn label(&self) -> &Arc<str> {
        self.node.label()
    }

    fn is_open(&mut self) -> bool {
        !self.node.is_replaced(&self.connection) && self.connection.is_peer_open()
    }

    fn cancel_handle(&self) -> Result<CancelHandle, NodeError> {
        self.connection.cancel_handle().map_err(NodeError::not_sent)
    }

    fn wake_handle(&mut self) -> Result<Wake, NodeError> {
        let waker = match self.waker.take() {
            Some(waker) => waker,
            None => waker().map_err(NodeError::not_sent)?,
        };
        Ok(self.waker.insert(waker).0.clone())
    }

    fn receive(&mut self, until: Moment) -> Result<Option<(Box<str>, GrantNotice)>, NodeError> {
        let Some(value) = self.receive_value(until)? else { return Ok(None) };
        self.last_message_at = clock::now();
        self.pinged_at = None;
        match PubSubMessage::parse(&value) {
            PubSubMessage::Grant(granted) => {
                let notice = GrantNotice {
                    token: granted.token,
                    granted_at_us: granted.granted_at_us,
                    px_ms: granted.px_ms,
                };
                Ok(Some((granted.id.into(), notice)))
            }
            PubSubMessage::Invalid => {
                if !std::mem::replace(&mut self.garbage_logged, true) {
                    let label = self.label();
                    log_safely!(
                        warn,
                        "ignoring messages from {label} on our channel that are not grants"
                    );
                }
                Ok(None)
            }
            PubSubMessage::NotAMessage => Ok(None),
        }
    }
}
