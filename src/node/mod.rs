//! What one Redis server says: connections with deadlines, the scripts, and every server state mapped to an answer
//! or a [`Failure`] that tells whether the request may have been carried out.

#[cfg(test)]
mod asked;
pub(crate) mod calls;
mod connection;
mod door;
mod endpoint;
mod failure;
mod identity;
mod link;
mod reading;
mod receipt;
mod redis;
mod resolve;
mod roster;
mod script;
mod socket;
pub(crate) mod survey;
mod wire;

pub(crate) use self::{
    connection::{Breaker, Connection, write_command},
    endpoint::Endpoint,
    failure::{Failure, Reason},
    reading::{DRIFT, Reading},
    receipt::Receipt,
    redis::{Answer, Pending, RedisNode},
    roster::Roster,
    script::{By, Call},
    socket::Socket,
    wire::Heard,
};
#[cfg(test)]
pub(crate) use self::{
    identity::{Facts, QUESTIONS},
    receipt::Receipts,
    wire::GrantNews,
};
