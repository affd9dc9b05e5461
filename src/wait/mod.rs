//! Waiting for a grant: the waiting threads share one subscription, and one of them reads it for
//! all.

#[cfg(all(test, loom))]
mod checks;
mod handle;
mod listener;
mod registry;

pub(crate) use self::{handle::WaitHandle, listener::GrantListener, registry::Wake};
