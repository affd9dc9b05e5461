//! Declares nodes to be new, for an operator who knows that they have forgotten no lock.

use std::{sync::Arc, time::Duration};

use redis::Value;

use super::{connection::Connection, server_info::NEW_KEY, url::Endpoint};
use crate::{
    backend::{
        error::{BackendError, NodeError},
        redis::fields::write_command,
    },
    core::key::FENCE_KEY,
    error::{Action, LockError, Result},
    sys::clock,
};

/// Declares that the present runs of these servers have lost no data. The declaration is kept for
/// `longest_quarantine`. Changes no node if one of them is unsuitable, if all are declared new
/// already, or if one has been used or declared and `even_if_used` is false: another one may be
/// empty because it has lost its data.
pub(crate) fn declare_new(
    endpoints: &[Arc<Endpoint>],
    timeout: Duration,
    longest_quarantine: Duration,
    even_if_used: bool,
) -> Result<()> {
    let expiry_ms = longest_quarantine.as_millis().to_string();
    let mut declarations = Vec::with_capacity(endpoints.len());
    let (mut used, mut undeclared) = (None, None);
    for endpoint in endpoints {
        let failed = failed_at(endpoint);
        let mut connection =
            Connection::unconnected(endpoint.clone(), timeout, Duration::ZERO, true);
        let handshake = connection.connect(clock::now().saturating_add(timeout)).map_err(failed)?;
        let Some(info) = handshake.and_then(|handshake| handshake.server_info) else { continue };
        if !info.is_master || info.promotion_id.is_some() {
            let why = "it is or was a replica; nodes must be independent masters";
            return Err(refused(endpoint, why));
        }
        let fence = [b"GET", FENCE_KEY.as_bytes()];
        if ask(&mut connection, &fence, timeout).map_err(failed)? != Value::Nil {
            used = Some(endpoint);
        }
        if !info.is_declared_new {
            undeclared = Some(endpoint);
        }
        declarations.push((endpoint, connection, info));
    }
    let Some(undeclared) = undeclared else { return Ok(()) };
    let some_are_declared = declarations.iter().any(|(_, _, info)| info.is_declared_new);
    match used {
        _ if even_if_used => {}
        Some(used) => return Err(refused(used, USED)),
        None if some_are_declared => return Err(refused(undeclared, RESTARTED)),
        None => {}
    }
    for (endpoint, mut connection, info) in declarations {
        let command = [b"SET", NEW_KEY, info.run_id.as_bytes(), b"PX", expiry_ms.as_bytes()];
        ask(&mut connection, &command, timeout).map_err(failed_at(endpoint))?;
    }
    Ok(())
}

const USED: &str = "locks have been used or tried there, because it has the key distlock:fence; if \
    nobody has held a lock for the longest ttl, pass true to Config::declare_nodes_new";
const RESTARTED: &str = "other nodes were, so it may have restarted without its data; if nobody \
    has held a lock for the longest ttl, pass true to Config::declare_nodes_new";

fn refused(endpoint: &Endpoint, why: &str) -> LockError {
    let reason = format!("{} cannot be declared new: {why}", endpoint.label);
    LockError::InvalidConfig { reason }
}

fn failed_at(endpoint: &Endpoint) -> impl Fn(NodeError) -> LockError + Copy {
    |error| {
        let server = endpoint.label.clone();
        BackendError::Node(error).into_lock_error(server, Action::Connect, None)
    }
}

fn ask(
    connection: &mut Connection,
    command: &[&[u8]],
    timeout: Duration,
) -> std::result::Result<Value, NodeError> {
    let deadline = clock::now().saturating_add(timeout);
    connection.send(deadline, |out| write_command(out, command))?;
    let reply = connection.receive(deadline)?;
    connection.check_error_reply(&reply)?;
    Ok(reply)
}
