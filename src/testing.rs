//! For tests: a server in memory.

/// What servers in memory consist of, for the simulator.
#[doc(hidden)]
pub mod servers {
    pub use crate::backend::memory::{
        scripts::{Channels, Script},
        store::{Access, Bytes, CommandError, Data, Keys, StoreResult},
    };
}
