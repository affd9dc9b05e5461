//! Exchanges with one server: connects if necessary, sends requests, receives their replies.

use std::{mem, sync::Arc, time::Duration};

use redis::Value;

use super::{
    connect::{BackgroundConnects, connect},
    connection::Connection,
    redis_node::{Exchange, RedisNode},
};
use crate::{
    backend::{
        error::{NodeError, NodeErrorKind},
        redis::script::{Request, ScriptRef},
        transport::poll_readable,
    },
    sys::clock::{self, Moment},
};

/// Sends a request and waits for its reply until `deadline`. Connects if necessary. If the server
/// does not know the script, sends its source.
pub(crate) fn exchange<C: Request>(
    node: &RedisNode,
    connection: &mut Connection,
    request: &C,
    deadline: Moment,
) -> Result<Exchange<C::Reply>, NodeError> {
    connect(node, connection, deadline)?;
    exchange_over(node, connection, request, deadline, |connection| connection.receive(deadline))
}

/// When an exchange ends that must not hold up its thread.
pub(crate) struct ExchangeLimits<'a> {
    pub(crate) deadline: Moment,
    /// Time at which a connection attempt ends. A connection that is ready only after the exchange
    /// is left to the next one.
    pub(crate) connect_by: Moment,
    /// Called while waiting. Returns when to call it next, or `None` to end the exchange.
    pub(crate) check: &'a mut dyn FnMut(Moment) -> Option<Moment>,
}

/// Like [`exchange`], but only over the socket that is open, and ends when the limits say so.
pub(crate) fn exchange_within<C: Request>(
    node: &RedisNode,
    connection: &mut Connection,
    request: &C,
    limits: &mut ExchangeLimits<'_>,
) -> Result<Exchange<C::Reply>, NodeError> {
    let deadline = limits.deadline;
    exchange_over(node, connection, request, deadline, |connection| {
        receive_within(connection, limits)
    })
}

/// Sends several requests in one write, and then reads their replies. Sends those again whose
/// script the server does not know. Connects on another thread, and only at the beginning. Returns
/// a result for each request.
pub(crate) fn exchange_all<C: Request>(
    node: &Arc<RedisNode>,
    connection: &mut Connection,
    requests: &[C],
    limits: &mut ExchangeLimits<'_>,
) -> Vec<Result<Exchange<C::Reply>, NodeError>> {
    if let Err(failure) = connect_within(node, connection, limits) {
        return requests.iter().map(|_| Err(failure.clone())).collect();
    }
    let all: Vec<&C> = requests.iter().collect();
    let mut results = exchange_some(node, connection, &all, limits);
    loop {
        let is_unknown =
            |at: &usize| results[*at].as_ref().is_err_and(NodeError::is_unknown_script);
        let unknown: Vec<usize> = (0..results.len()).filter(is_unknown).collect();
        if unknown.is_empty() {
            return results;
        }
        // The server has lost its scripts, for example by a restart. It learns one each time.
        let again: Vec<&C> = unknown.iter().map(|at| all[*at]).collect();
        for (at, result) in unknown.into_iter().zip(exchange_some(node, connection, &again, limits))
        {
            results[at] = result;
        }
    }
}

fn exchange_some<C: Request>(
    node: &RedisNode,
    connection: &mut Connection,
    requests: &[&C],
    limits: &mut ExchangeLimits<'_>,
) -> Vec<Result<Exchange<C::Reply>, NodeError>> {
    // The first reply ensures that the server has the script.
    let is_known = requests.iter().all(|request| node.knows_script(*request));
    let (first, rest) = requests.split_at(usize::from(!is_known));
    let first = first.iter().map(|request| exchange_within(node, connection, *request, limits));
    let mut results: Vec<_> = first.collect();
    match node.send_all(connection, rest, limits.deadline) {
        Ok(sent) => {
            // An error reply may close the socket, so the others are read first.
            let mut receive = |request| {
                receive_reply(connection, request, |connection| receive_within(connection, limits))
            };
            let replies: Vec<_> = rest.iter().map(|request| receive(*request)).collect();
            for ((request, sent), reply) in rest.iter().zip(sent).zip(replies) {
                results
                    .push(reply.and_then(|reply| node.decode(connection, *request, sent, reply)));
            }
        }
        Err(failure) => results.extend(rest.iter().map(|_| Err(failure.clone()))),
    }
    results
}

/// Reads the reply to a request with `receive`, after the one to `ASKING` if that was sent ahead.
fn receive_reply<C: Request>(
    connection: &mut Connection,
    request: &C,
    mut receive: impl FnMut(&mut Connection) -> Result<Value, NodeError>,
) -> Result<Value, NodeError> {
    if request.is_asking() {
        // If `ASKING` is refused, the node redirects the request.
        receive(connection)?;
    }
    receive(connection)
}

/// Reads one reply. If it does not arrive in time, or is not awaited any more, the connection is
/// closed: the next exchange must not wait for it.
fn receive_within(
    connection: &mut Connection,
    limits: &mut ExchangeLimits<'_>,
) -> Result<Value, NodeError> {
    loop {
        let Some(next) = (limits.check)(clock::now()) else {
            connection.poison();
            return Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
        };
        if next >= limits.deadline {
            return connection.receive(limits.deadline);
        }
        if let Some(value) = connection.receive_until(next)? {
            return Ok(value);
        }
    }
}

/// Connects on another thread, if necessary, until the limits say so.
fn connect_within(
    node: &Arc<RedisNode>,
    connection: &mut Connection,
    limits: &mut ExchangeLimits<'_>,
) -> Result<(), NodeError> {
    node.drop_if_replaced(connection);
    if connection.is_ready() {
        return Ok(());
    }
    if let Some(spare) = node.take_spare() {
        *connection = spare;
        node.drop_if_replaced(connection);
        if connection.is_ready() {
            return Ok(());
        }
    }
    let mut connects = BackgroundConnects::new().map_err(NodeError::not_applied)?;
    let unconnected = connection.clone_unconnected();
    let attempt = mem::replace(connection, unconnected);
    if connects.connect(0, node.clone(), attempt, limits.connect_by).is_err() {
        // No thread can be spawned.
        return node.connect(connection, limits.deadline);
    }
    loop {
        if let Some(connected) = connects.take_connected().pop() {
            *connection = connected.connection;
            return connected.outcome;
        }
        let now = clock::now();
        match (limits.check)(now) {
            Some(next) if now < limits.deadline => {
                let until = next.min(limits.deadline);
                poll_readable(&[&*connects.wakeups], until, Duration::ZERO);
            }
            _ => return Err(NodeError::not_applied(NodeErrorKind::TimedOut)),
        }
    }
}

/// Sends a request over an established connection, and decodes what `receive` returns.
fn exchange_over<C: Request>(
    node: &RedisNode,
    connection: &mut Connection,
    request: &C,
    deadline: Moment,
    mut receive: impl FnMut(&mut Connection) -> Result<Value, NodeError>,
) -> Result<Exchange<C::Reply>, NodeError> {
    let mut script_ref = ScriptRef::HASH;
    loop {
        let in_flight = node.send(connection, request, script_ref, deadline)?;
        let value = receive_reply(connection, request, &mut receive)?;
        match (node.decode(connection, request, in_flight, value), script_ref) {
            (Err(failure), ScriptRef::HASH) if failure.is_unknown_script() => {
                script_ref = ScriptRef::SOURCE;
            }
            (Err(failure), _) if failure.is_unknown_script() => {
                connection.poison();
                return Err(NodeError::protocol("it does not know a script that it was just sent"));
            }
            (result, _) => return result,
        }
    }
}
