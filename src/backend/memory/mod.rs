//! A server in memory.

pub(crate) mod scripts;
pub(crate) mod store;
