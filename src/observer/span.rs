//! `Wait` and `Hold`: since when a lock is waited for or held; with the feature `tracing`, a span
//! for each.

use std::time::Duration;

#[cfg(feature = "tracing")]
use crate::logging::catch_panic;
use crate::{
    clock::{self, Moment},
    id::LockId,
};

/// A wait under way, on the thread that waits.
#[derive(Debug)]
pub(crate) struct WaitSpan {
    since: Moment,
    /// `None` where the subscriber panicked.
    #[cfg(feature = "tracing")]
    span: Option<tracing::span::EnteredSpan>,
}

impl WaitSpan {
    #[cfg_attr(
        not(feature = "tracing"),
        expect(unused_variables, reason = "only the span names them")
    )]
    pub(crate) fn begin(lock: &str, id: &LockId) -> WaitSpan {
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

    /// Returns how long it was.
    #[cfg_attr(
        not(feature = "tracing"),
        expect(unused_variables, reason = "only the span tells it")
    )]
    pub(crate) fn end(self, outcome: &str) -> Duration {
        #[cfg(feature = "tracing")]
        catch_panic(|| {
            if let Some(span) = self.span {
                span.record("distlock.outcome", outcome);
            }
        });
        clock::now().duration_since(self.since)
    }
}

/// Since when a lock is held.
#[derive(Debug)]
pub(crate) struct HoldSpan {
    since: Moment,
    /// Closed by the holder's thread: no code of a subscriber's is to run on one that others
    /// depend on.
    #[cfg(feature = "tracing")]
    span: parking_lot::Mutex<Option<tracing::Span>>,
}

impl HoldSpan {
    #[cfg_attr(
        not(feature = "tracing"),
        expect(unused_variables, reason = "only the span names them")
    )]
    pub(crate) fn begin(lock: &str, id: &LockId, token: u64) -> HoldSpan {
        HoldSpan {
            since: clock::now(),
            #[cfg(feature = "tracing")]
            span: parking_lot::Mutex::new(new_span(|| {
                tracing::info_span!(
                    parent: None,
                    "distlock.hold",
                    distlock.lock.name = lock,
                    distlock.lock.id = id.as_str(),
                    distlock.fencing_token = token,
                    distlock.outcome = tracing::field::Empty
                )
            })),
        }
    }

    #[cfg(test)]
    pub(crate) fn starting_at(since: Moment) -> HoldSpan {
        HoldSpan {
            since,
            #[cfg(feature = "tracing")]
            span: parking_lot::Mutex::new(None),
        }
    }

    /// For how long, at `now`.
    pub(crate) fn held(&self, now: Moment) -> Duration {
        now.duration_since(self.since)
    }

    /// On the holder's thread.
    #[cfg_attr(
        not(feature = "tracing"),
        expect(unused_variables, reason = "only the span tells it")
    )]
    pub(crate) fn end(&self, outcome: &str) {
        #[cfg(feature = "tracing")]
        {
            let span = self.span.lock().take();
            catch_panic(|| {
                if let Some(span) = span {
                    span.record("distlock.outcome", outcome);
                }
            });
        }
    }
}

/// Of a guard that was never dropped, on whatever thread lets the lease go.
#[cfg(feature = "tracing")]
impl Drop for HoldSpan {
    fn drop(&mut self) {
        catch_panic(|| drop(self.span.get_mut().take()));
    }
}

/// A span, unless the subscriber, which is code of the user's, panics.
#[cfg(feature = "tracing")]
fn new_span<T>(make: impl FnOnce() -> T) -> Option<T> {
    let mut span = None;
    catch_panic(|| span = Some(make()));
    span
}
