//! What a subscription to grant messages is.

use std::{fmt, sync::Arc};

use super::error::NodeError;
use crate::{core::claim::GrantNotice, sys::clock::Moment};

/// Where a queue is. Only backends look inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePlace(pub(in crate::backend) usize);

/// A subscription to grant messages. One thread at a time reads it.
pub(crate) trait GrantStream: Send + fmt::Debug {
    /// Where a waiter must queue so that its grant arrives here.
    fn place(&self) -> QueuePlace;

    /// The server as named in messages.
    fn label(&self) -> &Arc<str>;

    /// Whether the connection is open, as far as this side knows.
    fn is_open(&mut self) -> bool;

    /// Returns a handle with which another thread ends a read.
    fn cancel_handle(&self) -> Result<CancelHandle, NodeError>;

    /// Returns what ends a read early from another thread, and leaves the connection open.
    fn wake_handle(&mut self) -> Result<WakeFn, NodeError>;

    /// Waits until `until` for an event. Returns `None` if there is none by then, or if the read
    /// was ended early.
    fn receive(&mut self, until: Moment) -> Result<Option<StreamEvent>, NodeError>;
}

/// What arrives on a subscription.
pub(crate) enum StreamEvent {
    /// A grant message for the claim with this id.
    Grant(Box<str>, GrantNotice),
    /// The subscription for locks with such keys has ended or is new: grants may have been missed,
    /// or the server may be unreachable.
    SubscriptionChanged(Box<dyn Fn(&str) -> bool + Send>),
}

/// Ends a read early, from any thread.
pub(crate) type WakeFn = Arc<dyn Fn() + Send + Sync>;

/// Closes a connection from another thread, which wakes the thread that reads from it.
pub(crate) struct CancelHandle(Box<dyn FnOnce() + Send>);

impl CancelHandle {
    pub(crate) fn new(cancel: impl FnOnce() + Send + 'static) -> CancelHandle {
        CancelHandle(Box::new(cancel))
    }

    pub(crate) fn cancel(self) {
        (self.0)();
    }
}

impl fmt::Debug for CancelHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelHandle").finish_non_exhaustive()
    }
}
