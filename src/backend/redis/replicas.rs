//! `Replicas`: how many replicas must have a lock before it counts as held.
//!
//! A master replies before its replicas have the lock, so a failover can lose it. `WAIT` returns
//! once enough replicas have everything that this connection has written before.

use std::time::Duration;

use redis::Value;

use super::{
    Connection, Exchange, ExchangeLimits, NodeError, NodeErrorKind, RedisNode, Request, ScriptRef,
    exchange_within, fields::write_command, script::Decoded,
};
use crate::sys::clock::Moment;

/// A requirement; the default requires nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Replicas {
    /// Number of replicas that must have the lock.
    pub(crate) count: u32,
    /// How long to wait for them.
    pub(crate) within: Duration,
}

impl Replicas {
    pub(crate) fn are_required(self) -> bool {
        self.count > 0
    }

    /// Waits until enough replicas have what was written over this connection. Never connects: on a
    /// new connection, all replicas count as having it.
    pub(crate) fn confirm(
        self,
        node: &RedisNode,
        connection: &mut Connection,
        deadline: Moment,
    ) -> Result<(), NodeError> {
        let check = &mut |_| Some(Moment::NEVER);
        self.confirm_within(
            node,
            connection,
            &mut ExchangeLimits { deadline, connect_by: deadline, check },
        )
    }

    fn confirm_within(
        self,
        node: &RedisNode,
        connection: &mut Connection,
        limits: &mut ExchangeLimits<'_>,
    ) -> Result<(), NodeError> {
        if !self.are_required() {
            return Ok(());
        }
        let count = exchange_within(node, connection, &Wait(self), limits)
            .map_err(|failure| NodeError::outcome_unknown(failure.kind))?;
        self.check(count.reply)
    }

    /// Does the same for what [`exchange_all`](super::exchange_all) has written. What was granted
    /// fails if too few replicas have it.
    pub(crate) fn confirm_all<T>(
        self,
        node: &RedisNode,
        connection: &mut Connection,
        results: &mut [Result<Exchange<T>, NodeError>],
        limits: &mut ExchangeLimits<'_>,
    ) {
        if !results.iter().any(Result::is_ok) {
            return;
        }
        // Otherwise a replica that was cut off long ago could be promoted.
        if let Err(error) = self.confirm_within(node, connection, limits) {
            results.iter_mut().filter(|result| result.is_ok()).for_each(|result| {
                *result = Err(error.clone());
            });
        }
    }

    /// Checks how many replicas have it.
    fn check(self, count: u32) -> Result<(), NodeError> {
        if count >= self.count {
            return Ok(());
        }
        let Replicas { count: needed, within } = self;
        let kind = NodeErrorKind::NotReplicated { count, needed, within };
        Err(NodeError::outcome_unknown(kind))
    }
}

/// Asks how many replicas have what was written over this connection.
struct Wait(Replicas);

impl Request for Wait {
    type Reply = u32;

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        // Zero would wait forever.
        let within_ms = self.0.within.as_millis().max(1).to_string();
        write_command(out, &[b"WAIT", self.0.count.to_string().as_bytes(), within_ms.as_bytes()]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<Decoded<u32>> {
        let Value::Int(count) = reply else { return None };
        Some((u32::try_from(count).ok()?, None))
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, sync::Arc};

    use super::*;
    use crate::{
        backend::redis::{Endpoint, test_util::request_words},
        observe::Observer,
        sys::clock,
    };

    /// On a new connection, a server replies that all replicas have what it wrote: nothing.
    ///
    /// Fault: N168
    #[test]
    fn new_connection_confirms_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let endpoint = Arc::new(Endpoint::parse(&format!("unix://{}", path.display())).unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone(), 1, false).unwrap();
        let (second, zero) = (Duration::from_secs(1), Duration::ZERO);
        let node = RedisNode::new(endpoint, second, zero, zero, observer);
        let replicas = Replicas { count: 1, within: second };
        let deadline = clock::now().saturating_add(second);
        let error = replicas.confirm(&node, &mut node.pooled_connection(), deadline).unwrap_err();
        assert!(error.outcome_unknown, "the lock may have been acquired");
        assert!(listener.accept().is_err(), "it has connected");
    }

    #[test]
    fn wait_is_bounded_and_its_count_is_checked() {
        let two = |within| Replicas { count: 2, within };
        for (within, ms) in [(Duration::ZERO, "1"), (Duration::from_millis(50), "50")] {
            assert_eq!(request_words(&Wait(two(within)), ScriptRef::HASH), ["WAIT", "2", ms]);
        }
        let wait = Wait(two(Duration::from_millis(50)));
        assert_eq!(wait.decode(1, Value::Int(1)), Some((1, None)));
        for nonsense in [Value::Int(-1), Value::Int(i64::MAX), Value::Okay] {
            assert_eq!(wait.decode(1, nonsense), None);
        }
        assert!(wait.0.check(2).is_ok() && wait.0.check(3).is_ok());
        let error = wait.0.check(1).unwrap_err();
        assert!(error.outcome_unknown && error.is_transient());
        assert_eq!(
            error.kind.to_string(),
            "only 1 of 2 replicas had the lock within 50ms (Config::replicas)"
        );
    }
}
