//! Waiting for a grant: the waiting threads share one subscription, and one of them reads it for
//! all.

mod handle;
mod listener;
#[cfg(all(test, loom))]
mod loom_tests;
mod registry;

pub(crate) use self::{handle::WaitHandle, listener::GrantListener, registry::Wake};
