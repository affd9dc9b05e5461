//! The kinds of locks: for each, the scripts that work on its keys, the requests that run them, and
//! their replies. Pure. `lua/` has the parts that scripts of several kinds share.

pub(crate) mod mutex;
