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
/// `longest_quarantine`. Changes no node if one of them is unsuitable, or if one has been used and
/// `even_if_used` is false.
pub(crate) fn declare_new(
    endpoints: &[Arc<Endpoint>],
    timeout: Duration,
    longest_quarantine: Duration,
    even_if_used: bool,
) -> Result<()> {
    let expiry_ms = longest_quarantine.as_millis().to_string();
    let mut declarations = Vec::with_capacity(endpoints.len());
    for endpoint in endpoints {
        let failed = failed_at(endpoint);
        let mut connection =
            Connection::unconnected(endpoint.clone(), timeout, Duration::ZERO, true);
        let handshake = connection.connect(clock::now().saturating_add(timeout)).map_err(failed)?;
        let Some(info) = handshake.and_then(|handshake| handshake.server_info) else { continue };
        let refused = |why: &str| {
            let reason = format!("{} cannot be declared new: {why}", endpoint.label);
            Err(LockError::InvalidConfig { reason })
        };
        if !info.is_master || info.promotion_id.is_some() {
            return refused("it is or was a replica; nodes must be independent masters");
        }
        if !even_if_used
            && !info.is_declared_new
            && ask(&mut connection, &[b"GET", FENCE_KEY.as_bytes()], timeout).map_err(failed)?
                != Value::Nil
        {
            return refused(
                "locks have been used or tried there, because it has the key distlock:fence; if \
                 nobody has held one for the longest ttl, pass true to Config::declare_nodes_new",
            );
        }
        declarations.push((endpoint, connection, info.run_id));
    }
    for (endpoint, mut connection, run_id) in declarations {
        let command = [b"SET", NEW_KEY, run_id.as_bytes(), b"PX", expiry_ms.as_bytes()];
        ask(&mut connection, &command, timeout).map_err(failed_at(endpoint))?;
    }
    Ok(())
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
