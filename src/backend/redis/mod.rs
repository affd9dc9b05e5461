//! Locks on one Redis server: the scripts, their requests and replies, and what acquires, renews
//! and releases with them.

mod acquire_all;
mod acquisition;
mod adopt;
mod backend;
mod cleanup;
mod downgrade;
mod fields;
mod grant_stream;
mod inspect;
pub(crate) mod listing;
pub(crate) mod node;
mod one_server;
mod optional_calls;
mod release;
mod release_turns;
pub(crate) mod renewals;
pub(crate) mod replicas;
pub(crate) mod requests;
pub(crate) mod script;
#[cfg(test)]
mod test_util;
mod yielding;

#[cfg(feature = "testing")]
pub(crate) use self::acquisition::PLACE;
#[cfg(any(test, feature = "testing"))]
pub(crate) use self::fields::parse_grant;
#[cfg(feature = "tls")]
pub(crate) use self::node::certificates;
pub(crate) use self::{
    acquisition::{ClaimServer, RedisAcquisition},
    backend::{RedisBackend, RedisSettings},
    cleanup::{CHECK_INTERVAL, PIPELINE_MAX, RedisCleaner},
    fields::{PubSubMessage, write_command},
    grant_stream::RedisGrantStream,
    node::{
        BackgroundConnects, Connected, Connection, ConnectionPool, Endpoint, Exchange,
        ExchangeLimits, HeardSubscription, InFlightRequest, Info, LateReader, NodeConnections,
        PooledConnections, RedisNode, Subscriber, Voters, connect, declare_new, exchange,
        exchange_all, exchange_within,
    },
    one_server::{OneServerForEachLock, Purpose, exchange_over_pool},
    release::release_any_kind,
    release_turns::ReleaseTurns,
    replicas::Replicas,
    script::{Decoded, Request, ScriptRef},
    yielding::Yielding,
};
#[cfg(test)]
pub(crate) use self::{
    fields::parse_time,
    node::{INFO_COMMANDS, ServerInfoReader},
};
pub(crate) use super::{
    checkout_queue::Urgency,
    error::{NodeError, NodeErrorKind},
    transport::{Transport, poll_readable, waker},
};
