//! One Redis server: connections with deadlines, the scripts, and their requests and replies. Every
//! failure becomes a [`NodeError`], which states whether the request may have been carried out.

pub(crate) mod acquire_all;
mod acquisition;
pub(crate) mod adopt;
mod backend;
mod background_connect;
mod cleanup;
mod connection;
mod declare_new;
#[cfg(feature = "tls")]
mod examine_certificates;
mod exchange;
mod fields;
mod framed_socket;
mod grant_stream;
pub(crate) mod group_requests;
mod health;
pub(crate) mod inspect;
pub(crate) mod kinds;
pub(crate) mod list_requests;
pub(crate) mod listing;
mod one_server;
mod one_server_methods;
mod pool;
mod redis_node;
mod release;
mod release_turns;
pub(crate) mod renewals;
pub(crate) mod replicas;
pub(crate) mod requests_and_replies;
pub(crate) mod script;
pub(crate) mod sentinel;
mod server_info;
mod subscriber;
#[cfg(test)]
mod test_util;
mod url;
mod voters;
mod yielding;

#[cfg(feature = "testing")]
pub(crate) use self::acquisition::PLACE;
#[cfg(feature = "tls")]
pub(crate) use self::examine_certificates::certificates;
#[cfg(any(test, feature = "testing"))]
pub(crate) use self::fields::parse_grant;
pub(crate) use self::{
    acquire_all::acquire_all_on_one_server,
    acquisition::{ClaimServer, RedisAcquisition},
    adopt::adopt_on_one_server,
    backend::{RedisBackend, RedisSettings},
    background_connect::{BackgroundConnects, Connected},
    cleanup::{CHECK_INTERVAL, PIPELINE_MAX, RedisCleaner},
    connection::Connection,
    declare_new::declare_new,
    exchange::{ExchangeLimits, connect, exchange, exchange_all, exchange_within},
    fields::{PubSubMessage, write_command},
    framed_socket::LateReader,
    grant_stream::RedisGrantStream,
    group_requests::downgrade_on_one_server,
    inspect::{lookup_on_one_server, reported_ids_on_one_server},
    one_server::{OneServerForEachLock, Purpose, exchange_over_pool},
    one_server_methods::one_server_methods,
    pool::{ConnectionPool, PooledConnections},
    redis_node::{Exchange, InFlightRequest, NodeConnections, RedisNode},
    release::{clean_up_on_one_server, release_id_on_one_server, release_on_one_server},
    release_turns::ReleaseTurns,
    replicas::Replicas,
    script::{Request, ScriptRef},
    server_info::Info,
    subscriber::Subscriber,
    url::Endpoint,
    voters::Voters,
    yielding::Yielding,
};
#[cfg(test)]
pub(crate) use self::{
    fields::parse_time,
    server_info::{INFO_COMMANDS, ServerInfoReader},
};
pub(crate) use super::{
    checkout_queue::Urgency,
    error::{NodeError, NodeErrorKind},
    transport::{Transport, poll_readable, waker},
};
