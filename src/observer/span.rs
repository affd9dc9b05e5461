//! `Wait` and `Hold`: since when a lock is waited for or held; with the feature `tracing`, a span for each.

use std::time::Duration;

#[cfg(feature = "tracing")]
use crate::say::shielded;
use crate::{
    clock::{self, Moment},
    id::LockId,
};

/// A wait under way, on the thread that waits.
#[derive(Debug)]
pub(crate) struct Wait {
    since: Moment,
    /// `None` where the subscriber panicked.
    #[cfg(feature = "tracing")]
    span: Option<tracing::span::EnteredSpan>,
}

impl Wait {
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "only the span names them"))]
    pub(crate) fn begin(lock: &str, id: &LockId) -> Wait {
        Wait {
            since: clock::now(),
            #[cfg(feature = "tracing")]
            span: made(|| {
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
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "only the span tells it"))]
    pub(crate) fn end(self, outcome: &str) -> Duration {
        #[cfg(feature = "tracing")]
        shielded(|| {
            if let Some(span) = self.span {
                span.record("distlock.outcome", outcome);
            }
        });
        clock::now().after(self.since)
    }
}

/// Since when a lock is held.
#[derive(Debug)]
pub(crate) struct Hold {
    since: Moment,
    /// Closed by the holder's thread: no code of a subscriber's is to run on one that others depend on.
    #[cfg(feature = "tracing")]
    span: parking_lot::Mutex<Option<tracing::Span>>,
}

impl Hold {
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "only the span names them"))]
    pub(crate) fn begin(lock: &str, id: &LockId, token: u64) -> Hold {
        Hold {
            since: clock::now(),
            #[cfg(feature = "tracing")]
            span: parking_lot::Mutex::new(made(|| {
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
    pub(crate) fn since(since: Moment) -> Hold {
        Hold {
            since,
            #[cfg(feature = "tracing")]
            span: parking_lot::Mutex::new(None),
        }
    }

    /// For how long, at `now`.
    pub(crate) fn held(&self, now: Moment) -> Duration {
        now.after(self.since)
    }

    /// On the holder's thread.
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "only the span tells it"))]
    pub(crate) fn end(&self, outcome: &str) {
        #[cfg(feature = "tracing")]
        {
            let span = self.span.lock().take();
            shielded(|| {
                if let Some(span) = span {
                    span.record("distlock.outcome", outcome);
                }
            });
        }
    }
}

/// Of a guard that was never dropped, on whatever thread lets the lease go.
#[cfg(feature = "tracing")]
impl Drop for Hold {
    fn drop(&mut self) {
        shielded(|| drop(self.span.get_mut().take()));
    }
}

/// A span, unless the subscriber, which is code of the user's, panics.
#[cfg(feature = "tracing")]
fn made<T>(make: impl FnOnce() -> T) -> Option<T> {
    let mut span = None;
    shielded(|| span = Some(make()));
    span
}
