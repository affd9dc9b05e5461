//! `RedisGrantStream`: a subscription to a channel of one server.

use std::{fmt, sync::Arc, time::Duration};

use redis::Value;

use super::{NodeError, PubSubMessage, RedisNode, Subscriber, Transport, poll_readable, waker};
use crate::{
    backend::{CancelHandle, GrantStream, QueuePlace, StreamEvent, WakeFn},
    sys::clock::{self, Moment},
};

pub(crate) struct RedisGrantStream {
    subscriber: Subscriber,
    place: QueuePlace,
    /// Ends a read early; `None` until a thread needs that.
    waker: Option<(WakeFn, Box<dyn Transport>)>,
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
        let subscriber = Subscriber::to_channel(node, channel, timeout, deadline)?;
        Ok(RedisGrantStream { subscriber, place, waker: None, garbage_logged: false })
    }

    /// Waits for a value. A wakeup ends that early.
    fn receive_value(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        let Some((_, wakeups)) = &mut self.waker else { return self.subscriber.receive(until) };
        let arrived = self.subscriber.receive(clock::now())?;
        let until = until.min(self.subscriber.check_at());
        let Some(transport) = self.subscriber.transport().filter(|_| arrived.is_none()) else {
            return Ok(arrived);
        };
        poll_readable(&[transport, &**wakeups], until, Duration::ZERO);
        // Nothing to read is the usual case.
        let _ = wakeups.read(&mut [0; 64], Duration::ZERO);
        self.subscriber.receive(clock::now())
    }
}

impl fmt::Debug for RedisGrantStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisGrantStream")
            .field("subscriber", &self.subscriber)
            .finish_non_exhaustive()
    }
}

impl GrantStream for RedisGrantStream {
    fn place(&self) -> QueuePlace {
        self.place
    }

    fn label(&self) -> &Arc<str> {
        self.subscriber.label()
    }

    fn is_open(&mut self) -> bool {
        self.subscriber.is_open()
    }

    fn cancel_handle(&self) -> Result<CancelHandle, NodeError> {
        self.subscriber.cancel_handle()
    }

    fn wake_handle(&mut self) -> Result<WakeFn, NodeError> {
        let waker = match self.waker.take() {
            Some(waker) => waker,
            None => waker().map_err(NodeError::not_applied)?,
        };
        Ok(self.waker.insert(waker).0.clone())
    }

    fn receive(&mut self, until: Moment) -> Result<Option<StreamEvent>, NodeError> {
        let Some(value) = self.receive_value(until)? else { return Ok(None) };
        match PubSubMessage::parse(&value) {
            PubSubMessage::Grant(id, notice) => Ok(Some(StreamEvent::Grant(id.into(), notice))),
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
            PubSubMessage::NotAMessage => {
                if let Value::ServerError(error) = &value {
                    let label = self.label();
                    log_safely!(debug, "no sharded channel at {label}: {}", error.code());
                }
                Ok(None)
            }
        }
    }
}
