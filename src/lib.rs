//! Locks that hold across processes and machines, kept in Redis, for programs that block.

#![forbid(unsafe_code)]

mod acquire;
mod clock;
mod config;
mod error;
mod grant;
mod guard;
mod holder;
mod id;
mod key;
mod lease;
mod manager;
mod node;
mod reentrant;
mod renewer;

pub use crate::{
    config::{Config, LockOptions},
    error::{Action, LockError, LockLost, Result},
    grant::FencingToken,
    guard::{LockGuard, Released},
    holder::Holder,
    id::{LockId, ParseLockIdError, generate_lock_id},
    manager::{PooledConnection, RedisMgr},
    reentrant::ReentrantGuard,
};
