//! A server in memory: what the scripts do on a Redis server happens here in the caller's process.
//! Requests, replies and what follows from them are those of one Redis server.

mod backend;
mod grant_stream;
pub(crate) mod scripts;
mod server;
pub(crate) mod store;

pub(crate) use self::{backend::MemoryBackend, server::Server};
