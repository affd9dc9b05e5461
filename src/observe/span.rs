//! `WaitSpan` and `HoldSpan`: measure how long a lock is waited for and held. With the feature
//! `tracing`, each also has a tracing span.

use std::time::Duration;

#[cfg(feature = "tracing")]
use crate::sys::logging::catch_panic;
use crate::{
    core::id::LockId,
    sys::clock::{self, Moment},
};

/// A wait in progress, owned by the waiting thread.
#[derive(Debug)]
pub(crate) struct WaitSpan {
    since: Moment,
    /// `None` if the subscriber panicked.
    #[cfg(feature = "tracing")]
    span: Option<tracing::span::EnteredSpan>,
}

impl WaitSpan {
    pub(crate) fn begin(lock: &str, id: &LockId) -> WaitSpan {
        let _ = (lock, id);
        WaitSpan {
            since: clock::now(),
            #[cfg(feature = "tracing")]
            span: new_span(|| {
                tracing::info_span!(
                    "distlock.wait",
                    distlock.lock.name = lock,
                    distlock.lock.id = id.as_str(),
                    distlock.outcome = tracing::field::Empty
                )
                .entered()
            }),
        }
    }

    /// Ends the wait. Returns how long it took.
    pub(crate) fn end(self, outcome: &str) -> Duration {
        let _ = outcome;
        #[cfg(feature = "tracing")]
        catch_panic(|| {
            if let Some(span) = self.span {
                span.record("distlock.outcome", outcome);
            }
        });
        clock::now().duration_since(self.since)
    }
}

/// A hold in progress. Owned by the holder, because the subscriber's code must not run on a thread
/// that other locks depend on.
#[derive(Debug)]
pub(crate) struct HoldSpan {
    #[cfg(feature = "tracing")]
    span: Option<tracing::Span>,
}

impl HoldSpan {
    pub(crate) fn begin(lock: &str, id: &LockId, token: u64) -> HoldSpan {
        let _ = (lock, id, token);
        HoldSpan {
            #[cfg(feature = "tracing")]
            span: new_span(|| {
                tracing::info_span!(
                    parent: None,
                    "distlock.hold",
                    distlock.lock.name = lock,
                    distlock.lock.id = id.as_str(),
                    distlock.fencing_token = token,
                    distlock.outcome = tracing::field::Empty
                )
            }),
        }
    }

    /// Ends the span.
    pub(crate) fn end(self, outcome: &str) {
        let _ = outcome;
        #[cfg(feature = "tracing")]
        catch_panic(|| {
            if let Some(span) = &self.span {
                span.record("distlock.outcome", outcome);
            }
        });
    }
}

#[cfg(feature = "tracing")]
impl Drop for HoldSpan {
    fn drop(&mut self) {
        catch_panic(|| drop(self.span.take()));
    }
}

/// Creates a span. Returns `None` if the subscriber, which is user code, panics.
#[cfg(feature = "tracing")]
fn new_span<T>(make: impl FnOnce() -> T) -> Option<T> {
    let mut span = None;
    catch_panic(|| span = Some(make()));
    span
}
