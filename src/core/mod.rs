//! What every lock is made of, whatever keeps it: names, ids, tokens, claims, leases, and what the
//! votes of several nodes amount to. Pure: no file here does I/O, starts a thread, or knows a
//! server.

pub(crate) mod ack;
pub(crate) mod backoff;
pub(crate) mod cancel;
pub(crate) mod claim;
pub(crate) mod clock_sample;
pub(crate) mod cluster_slot;
pub(crate) mod detached;
#[cfg(any(feature = "mysql", feature = "testing"))]
pub(crate) mod glob;
pub(crate) mod holder;
pub(crate) mod id;
pub(crate) mod key;
pub(crate) mod kind;
pub(crate) mod lease;
pub(crate) mod lock_lost;
pub(crate) mod node_reply;
pub(crate) mod pattern;
pub(crate) mod quorum;
pub(crate) mod token;
pub(crate) mod validity;
