//! The first exchange of a connection.

use redis::Value;

use super::Connection;
use crate::{
    backend::{
        error::{NodeError, NodeErrorKind},
        redis::{
            fields::{parse_time, write_command},
            node::{
                server_info::{INFO_COMMANDS, ServerInfo, ServerInfoReader},
                url::Endpoint,
            },
        },
    },
    core::clock_sample::ClockSample,
    sys::clock::{self, Moment},
};

/// Result of the handshake of a new connection.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub(crate) clock_sample: ClockSample,
    /// `None` if it is not required, and the server does not report it.
    pub(crate) server_info: Option<ServerInfo>,
}

/// Authenticates, selects the database and reads the server's clock, in one round trip.
pub(super) fn handshake(
    connection: &mut Connection,
    endpoint: &Endpoint,
    requires_server_info: bool,
    deadline: Moment,
) -> Result<Handshake, NodeError> {
    let mut steps: Vec<Vec<&[u8]>> = Vec::new();
    let (user, password) = (endpoint.user.as_deref(), endpoint.password.as_deref());
    // A user may have no password. Do not send the name `default`: every connection starts as
    // that user, and servers before Redis 6 do not know the name.
    if password.is_some() || user.is_some_and(|user| user != "default") {
        let mut auth: Vec<&[u8]> = vec![b"AUTH"];
        auth.extend(user.map(str::as_bytes));
        auth.push(password.unwrap_or_default().as_bytes());
        steps.push(auth);
    }
    let db = endpoint.db.to_string();
    if endpoint.db != 0 {
        steps.push(vec![b"SELECT", db.as_bytes()]);
    }
    // Only nodes that vote can be declared new, which is what the last of these commands reads.
    let wanted = if requires_server_info { INFO_COMMANDS.len() } else { INFO_COMMANDS.len() - 1 };
    steps.extend(INFO_COMMANDS[..wanted].iter().map(|command| command.to_vec()));
    steps.push(vec![b"TIME"]);
    let sent = connection.send(deadline, |out| {
        steps.iter().for_each(|step| write_command(out, step));
    })?;
    let mut reply = Value::Nil;
    let mut reader = ServerInfoReader::default();
    for step in &steps {
        reply = connection.receive(deadline)?;
        if reader.read_reply(step, &reply) {
            continue;
        }
        let checked = connection.check_error_reply(&reply).map_err(|error| match &error.kind {
            // A server with too many clients sends this error in place of the first reply,
            // whatever the command.
            _ if error.is_max_clients() => error,
            // Replace the message: a server that does not know AUTH quotes its arguments, and
            // the password is one of them.
            NodeErrorKind::Refused { code, .. }
                if step.first() == Some(&&b"AUTH"[..]) && code == "ERR" =>
            {
                NodeError::refused(
                    code.clone(),
                    "in reply to AUTH; check the user in the URL, and the password there or in \
                     Config::password; if the server has no password, remove it"
                        .into(),
                )
            }
            _ => error,
        });
        match checked {
            // This user may not read it, or the server has no such command.
            Err(error) if !requires_server_info && is_info(step) && error.is_command_refused() => {}
            checked => checked?,
        }
    }
    let received = clock::now();
    let server_us = parse_time(&reply)
        .ok_or_else(|| NodeError::protocol("its reply to TIME is not a valid time"))?;
    let clock_sample = ClockSample::new(sent, received, server_us);
    let server_info = reader.server_info(received);
    if requires_server_info && server_info.is_none() {
        return Err(NodeError::protocol("its reply to INFO lacks a required field"));
    }
    Ok(Handshake { clock_sample, server_info })
}

fn is_info(step: &[&[u8]]) -> bool {
    step.first() == Some(&&b"INFO"[..])
}
