//! `Waits`: the threads that wait in the server's queues, so that a shutdown or a cancellation can
//! wake them.

use std::{collections::HashMap, io, sync::Arc};

use super::connection::Connection;
use crate::{
    backend::CancelHandle,
    core::cancel::{CancelRegistration, CancelToken},
    sys::sync::Mutex,
};

#[derive(Debug, Default)]
pub(super) struct Waits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<u64, CancelHandle>,
    last_number: u64,
    is_closed: bool,
}

/// A wait in progress.
#[derive(Debug)]
pub(super) struct Wait<'a> {
    waits: &'a Waits,
    number: u64,
    _cancellation: Option<CancelRegistration>,
}

impl Waits {
    /// Registers a wait on this connection. It ends if `token` is cancelled, and at once if the
    /// manager has been shut down.
    pub(super) fn enter(
        &self,
        connection: &Connection,
        token: Option<&CancelToken>,
    ) -> io::Result<Wait<'_>> {
        let cancellation = match token {
            None => None,
            Some(token) => {
                let cancel = Mutex::new(Some(connection.cancel_handle()?));
                Some(token.on_cancel(Arc::new(move || {
                    let cancel = cancel.lock().take();
                    cancel.into_iter().for_each(CancelHandle::cancel);
                })))
            }
        };
        let cancel = connection.cancel_handle()?;
        let mut state = self.0.lock();
        state.last_number += 1;
        let number = state.last_number;
        let cancelled =
            if state.is_closed { Some(cancel) } else { state.waiting.insert(number, cancel) };
        drop(state);
        if let Some(cancel) = cancelled {
            cancel.cancel();
        }
        Ok(Wait { waits: self, number, _cancellation: cancellation })
    }

    /// Ends all waits, now and later, by closing their connections.
    pub(super) fn end_all(&self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_values().for_each(CancelHandle::cancel);
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let ended = self.waits.0.lock().waiting.remove(&self.number);
        drop(ended);
    }
}
