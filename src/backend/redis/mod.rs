//! One Redis server: connections with deadlines, the scripts, and their requests and replies. Every
//! failure becomes a [`NodeError`], which states whether the request may have been carried out.

mod acquisition;
mod checkout_queue;
mod connection;
mod discovery;
mod exchange;
mod fields;
mod framed_socket;
mod grant_stream;
mod health;
pub(crate) mod list;
mod membership;
mod pool;
mod redis_node;
pub(crate) mod requests_and_replies;
pub(crate) mod script;
mod server_info;
#[cfg(test)]
mod test_util;
mod transport;
mod url;

pub(crate) use self::{
    acquisition::RedisAcquisition,
    checkout_queue::Urgency,
    connection::{Connection, write_command},
    exchange::exchange,
    fields::PubSubMessage,
    grant_stream::RedisGrantStream,
    membership::Membership,
    pool::{ConnectionPool, NodeConnections, PooledConnections},
    redis_node::{Exchange, InFlightRequest, RedisNode},
    script::{Request, ScriptRef},
    transport::{Transport, Wake, poll_readable, waker},
    url::Endpoint,
};
#[cfg(test)]
pub(crate) use self::{
    fields::{GrantMessage, parse_time},
    server_info::{INFO_COMMANDS, ServerInfoReader},
};
pub(crate) use super::error::{NodeError, NodeErrorKind};
