//! One Redis server: connections with deadlines, the scripts, and their requests and replies. Every
//! failure becomes a [`NodeError`], which states whether the request may have been carried out.

mod ack;
mod connection;
mod dns;
mod error;
mod fields;
mod framed_socket;
mod health;
pub(crate) mod list;
mod membership;
mod redis_node;
pub(crate) mod requests_and_replies;
mod script;
mod server_info;
mod socket;
#[cfg(test)]
mod test_util;
mod url;

pub(crate) use self::{
    ack::Ack,
    connection::{CancelHandle, Connection, write_command},
    error::{NodeError, NodeErrorKind},
    fields::PubSubMessage,
    membership::Membership,
    redis_node::{Exchange, InFlightRequest, RedisNode},
    script::{Request, ScriptRef},
    socket::Socket,
    url::Endpoint,
};
#[cfg(test)]
pub(crate) use self::{
    ack::AckTracker,
    fields::{GrantMessage, parse_time},
    server_info::{INFO_COMMANDS, ServerInfoReader},
};
