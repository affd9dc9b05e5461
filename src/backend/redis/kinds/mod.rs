//! The kinds of locks: the scripts that work on their keys, the requests that run them, and their
//! replies. Pure. `lua/` has the parts that scripts of several kinds share.

pub(crate) mod acquire;
pub(crate) mod acquire_all;
pub(crate) mod adopt;
pub(crate) mod group;
pub(crate) mod mutex;
pub(crate) mod release;
pub(crate) mod renew;

#[cfg(test)]
mod tests;
