//! What one Redis server says: connections with deadlines, the scripts, and every server state mapped to an answer
//! or a [`Failure`] that tells whether the request may have been carried out.

mod connection;
mod endpoint;
mod failure;
mod pool;
mod reading;
mod redis;
mod resolve;
pub(crate) mod script;
mod socket;
mod wire;

pub(crate) use self::{
    connection::{Breaker, Connection, write_command},
    endpoint::Endpoint,
    failure::{Failure, Reason},
    pool::Pooled,
    reading::{DRIFT, Reading},
    redis::{Answer, RedisNode},
    wire::GrantNews,
};
