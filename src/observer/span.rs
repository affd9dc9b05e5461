//! `Wait` and `Hold`: since when a lock is waited for or held; with the feature `tracing`, a span for each.

use std::time::Duration;

use crate::{
    clock::{self, Moment},
    id::LockId,
};

/// A wait under way, on the thread that waits.
#[derive(Debug)]
pub(crate) struct Wait {
    since: Moment,
    #[cfg(feature = "tracing")]
    span: tracing::span::EnteredSpan,
}

impl Wait {
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "only the span names them"))]
    pub(crate) fn begin(lock: &str, id: &LockId) -> Wait {
        Wait {
            since: clock::now(),
            #[cfg(feature = "tracing")]
            span: tracing::info_span!(
                "distlock.wait",
                distlock.lock.name = lock,
                distlock.lock.id = id.as_str(),
                distlock.outcome = tracing::field::Empty
            )
            .entered(),
        }
    }

    /// Returns how long it was.
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "only the span tells it"))]
    pub(crate) fn end(self, outcome: &str) -> Duration {
        #[cfg(feature = "tracing")]
        self.span.record("distlock.outcome", outcome);
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
            span: parking_lot::Mutex::new(Some(tracing::info_span!(
                parent: None,
                "distlock.hold",
                distlock.lock.name = lock,
                distlock.lock.id = id.as_str(),
                distlock.fencing_token = token,
                distlock.outcome = tracing::field::Empty
            ))),
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
            if let Some(span) = span {
                span.record("distlock.outcome", outcome);
            }
        }
    }
}
