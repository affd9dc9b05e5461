//! One Redis server: how it is found, connections to it with deadlines, and what is known of it.
//! Every failure becomes a [`NodeError`], which states whether the request may have been carried
//! out.
//!
//! [`NodeError`]: crate::backend::error::NodeError

mod connect;
mod connection;
mod declare_new;
#[cfg(feature = "tls")]
mod examine_certificates;
mod exchange;
mod framed_socket;
mod heard_subscription;
mod pool;
mod quarantine;
mod redis_node;
pub(crate) mod sentinel;
mod server_info;
mod subscriber;
mod unread_replies;
mod url;

#[cfg(feature = "tls")]
pub(crate) use self::examine_certificates::certificates;
#[cfg(test)]
pub(crate) use self::server_info::{INFO_COMMANDS, ServerInfoReader};
pub(crate) use self::{
    connect::{BackgroundConnects, Connected, connect},
    connection::Connection,
    declare_new::declare_new,
    exchange::{ExchangeLimits, exchange, exchange_all, exchange_within},
    heard_subscription::HeardSubscription,
    pool::{ConnectionPool, PooledConnections},
    quarantine::Voters,
    redis_node::{Exchange, InFlightRequest, NodeConnections, RedisNode},
    server_info::Info,
    subscriber::Subscriber,
    unread_replies::LateReader,
    url::Endpoint,
};
