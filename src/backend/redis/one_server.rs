//! What the backends in which each lock is kept by one server have in common.

use super::{
    Connection, ConnectionPool, Exchange, NodeConnections, NodeError, NodeErrorKind, RedisNode,
    Replicas, Request, Urgency, Yielding, connect,
};
use crate::{
    backend::{Backend, error::BackendError},
    core::key::LockKey,
    sys::clock::{self, Moment},
};

/// What a request that changes a lock is for. This decides which connection it may use, and what
/// is required of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Asks for a lock.
    Claim,
    /// Asks for a lock that another manager has detached.
    Adopt,
    Downgrade,
    Release,
    /// Releases what a claim has left.
    CleanUp,
}

/// A backend in which each lock is kept by one server.
pub(crate) trait OneServerForEachLock: Backend {
    /// Sends a request to the server that keeps this lock, and waits for its reply until
    /// `deadline`.
    fn exchange<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        purpose: Purpose,
        deadline: Moment,
    ) -> Result<Exchange<R::Reply>, NodeError>;

    /// Sends a request that changes nothing to the server that keeps this lock.
    fn ask_about<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        deadline: Moment,
    ) -> Result<R::Reply, BackendError>;

    /// Decides when a release leaves its lock free for other clients.
    fn yielding(&self) -> Option<&Yielding> {
        None
    }
}

/// Sends a request by `ask` over a connection of `pool`.
pub(crate) fn exchange_over_pool<R: Request>(
    node: &RedisNode,
    pool: &ConnectionPool,
    replicas: Replicas,
    purpose: Purpose,
    deadline: Moment,
    ask: impl FnOnce(&mut Connection) -> Result<Exchange<R::Reply>, NodeError>,
) -> Result<Exchange<R::Reply>, NodeError> {
    let send = |connections: &mut NodeConnections| {
        let connection = connections.only();
        match purpose {
            Purpose::Claim | Purpose::Adopt => {
                ask_for_lock::<R>(node, connection, replicas, deadline, ask)
            }
            Purpose::Downgrade => {
                let downgraded = ask(connection)?;
                replicas.confirm(node, connection, deadline)?;
                Ok(downgraded)
            }
            Purpose::Release | Purpose::CleanUp => ask(connection),
        }
    };
    let no_turn = || Err(NodeError::not_applied(NodeErrorKind::TimedOut));
    match purpose {
        Purpose::Claim | Purpose::Adopt => send(&mut *pool.get_to_ask(deadline)?),
        Purpose::Downgrade => send(&mut *pool.get(Urgency::Release, deadline)?),
        Purpose::Release => pool.with_connections(deadline, send).unwrap_or_else(no_turn),
        Purpose::CleanUp => pool.with_reserved(deadline, send).unwrap_or_else(no_turn),
    }
}

/// Asks a server that decides alone, unless it is in quarantine. A lock is held once enough
/// replicas have it.
fn ask_for_lock<R: Request>(
    node: &RedisNode,
    connection: &mut Connection,
    replicas: Replicas,
    deadline: Moment,
    ask: impl FnOnce(&mut Connection) -> Result<Exchange<R::Reply>, NodeError>,
) -> Result<Exchange<R::Reply>, NodeError> {
    let quarantined = |left| NodeErrorKind::Quarantined { left, votes: false };
    if node.has_quarantine {
        connect(node, connection, deadline)?;
        if let Some(left) = node.quarantine_left(clock::now()) {
            return Err(NodeError::not_applied(quarantined(left)));
        }
    }
    let exchange = ask(connection)?;
    if R::is_grant(&exchange.reply) {
        // The request may have opened another connection, to a new master.
        if let Some(left) = node.quarantine_left(exchange.sent) {
            return Err(NodeError::outcome_unknown(quarantined(left)));
        }
        replicas.confirm(node, connection, deadline)?;
    }
    Ok(exchange)
}

/// Asks, and once more if `is_lost` says so of the result: the first request gets half of the time,
/// so that the second has the other half. Also returns the time until which a request whose reply
/// was lost may take effect.
pub(super) fn ask_twice<T>(
    deadline: Moment,
    mut ask: impl FnMut(Moment) -> Result<T, NodeError>,
    is_lost: impl Fn(&Result<T, NodeError>) -> bool,
) -> (Result<T, NodeError>, Option<Moment>) {
    let mut broken_until = None;
    let mut ask_until = |until| {
        let result = ask(until);
        if result.as_ref().is_err_and(|failure| failure.outcome_unknown) {
            broken_until = Some(until);
        }
        result
    };
    let mut result = ask_until(deadline.halfway());
    if is_lost(&result) {
        result = ask_until(deadline);
    }
    (result, broken_until)
}
