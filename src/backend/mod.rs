//! Where locks are kept: one Redis server, or several that decide together.

pub(crate) mod redis;
pub(crate) mod redlock;
