//! What happens to locks, told to whoever wants to know: `HandleEvent`, and one type for each event.

use std::{fmt, time::Duration};

use crate::{
    error::{LockError, LockLost},
    holder::Holder,
    id::LockId,
    token::FencingToken,
};

/// Hears of what happens to the locks of a manager. All methods do nothing unless they are overridden.
///
/// A handler is set with [`Config::events`](crate::Config::events). One that panics or blocks costs no lock that is held:
///
/// * `attempted`, `acquired`, `released`, `timed_out` and `failed` are called by the thread that locks or unlocks, in
///   the order in which that happens, while it has nothing under way. What they take, the caller waits. A lock is
///   renewed already when `acquired` is called.
/// * All others are called by a thread of their own, `distlock-events`, one after the other and a little later. It
///   has a queue of 1,024 events; what does not fit is dropped, and counted in
///   [`Metrics::events_dropped`](crate::Metrics::events_dropped). The order between the two kinds is not kept:
///   `contended` can come after `acquired` of the same identifier. Like all threads of this library it blocks signals: one
///   that a handler raises has to be sent to the process, not to the thread.
///
/// A panic is caught and the first one is logged (unless the program aborts on panics). Each acquisition has one
/// identifier, which is in all of its events. It begins with `attempted` and ends with one of `timed_out`, `failed`, or
/// `acquired`; the last is followed by one `released` or one `lost`, unless its guard is leaked.
///
/// A handler should not own a [`RedisMgr`](crate::RedisMgr): that would keep the manager alive for ever.
///
/// ```
/// use std::sync::Arc;
/// use distlock::{AcquiredEvent, Config, HandleEvent, LostEvent};
///
/// #[derive(Debug)]
/// struct Print;
///
/// impl HandleEvent for Print {
///     fn acquired(&self, event: &AcquiredEvent<'_>) {
///         println!("{} after {:?}", event.lock(), event.waited());
///     }
///
///     fn lost(&self, event: &LostEvent<'_>) {
///         eprintln!("{} is lost: {}", event.lock(), event.why());
///     }
/// }
///
/// let config = Config::new("redis://127.0.0.1").events(Arc::new(Print));
/// # let _ = config;
/// ```
pub trait HandleEvent: Send + Sync + fmt::Debug {
    /// Somebody asks for a lock.
    fn attempted(&self, event: &AttemptedEvent<'_>) {
        let _ = event;
    }

    /// Somebody else holds the lock that is asked for. Told once for each acquisition, when it is first seen.
    fn contended(&self, event: &ContendedEvent<'_>) {
        let _ = event;
    }

    /// A lock has been taken.
    fn acquired(&self, event: &AcquiredEvent<'_>) {
        let _ = event;
    }

    /// A lease has been renewed.
    fn renewed(&self, event: &RenewedEvent<'_>) {
        let _ = event;
    }

    /// A renewal was not confirmed; it is tried again while the lease lasts.
    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        let _ = event;
    }

    /// Half of the time for which a lock may be believed in has passed since the last confirmation, and the renewal that
    /// was due before has not been confirmed. Told once between two confirmations.
    fn danger(&self, event: &DangerEvent<'_>) {
        let _ = event;
    }

    /// A lock that was held is lost.
    fn lost(&self, event: &LostEvent<'_>) {
        let _ = event;
    }

    /// A lock has been given up by its holder.
    fn released(&self, event: &ReleasedEvent<'_>) {
        let _ = event;
    }

    /// Somebody else held the lock for as long as the caller wanted to wait; for callers who do not wait, right now.
    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        let _ = event;
    }

    /// A lock could not be had for another reason than that somebody else held it.
    fn failed(&self, event: &FailedEvent<'_>) {
        let _ = event;
    }

    /// A server that could not be reached, or whose connection broke, has been connected to again. Told once, by the
    /// first connection that is made.
    fn reconnected(&self, event: &ReconnectedEvent<'_>) {
        let _ = event;
    }

    /// One of several nodes is not the server that it was, or may have forgotten its locks. A single server is not asked
    /// who it is, and never told of here.
    fn server_changed(&self, event: &ServerChangedEvent<'_>) {
        let _ = event;
    }
}

macro_rules! event {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$about])*
        ///
        /// See [`HandleEvent`].
        #[derive(Clone, Copy, Debug)]
        pub struct $name<'a> {
            $(pub(crate) $field: $type,)*
        }

        impl<'a> $name<'a> {
            $(
                $(#[$field_about])*
                pub fn $field(&self) -> $type {
                    self.$field
                }
            )*
        }
    };
}

event! {
    /// Somebody asks for a lock.
    AttemptedEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it is asked for.
        id: &'a LockId,
        /// For how long the caller wants to wait; `None` without a limit.
        wait: Option<Duration>,
    }
}

event! {
    /// Somebody else holds the lock.
    ContendedEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it is asked for.
        id: &'a LockId,
        /// Who holds it.
        holder: &'a Holder,
    }
}

event! {
    /// A lock has been taken.
    AcquiredEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it is held.
        id: &'a LockId,
        /// The token of this acquisition.
        token: FencingToken,
        /// From the call until it was ours.
        waited: Duration,
        /// Whether somebody else stood in the way.
        contended: bool,
    }
}

event! {
    /// A lease has been renewed.
    RenewedEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it is held.
        id: &'a LockId,
        /// How much longer the holder could have believed in the lock when the confirmation came: how close it was.
        margin: Duration,
        /// From sending the request to the confirmation.
        took: Duration,
    }
}

event! {
    /// A renewal was not confirmed.
    RenewalFailedEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it is held.
        id: &'a LockId,
        /// Why, as part of a sentence.
        why: &'a str,
        /// For how much longer the holder may believe in the lock.
        remaining: Duration,
    }
}

event! {
    /// Half of the validity has passed without a confirmation.
    DangerEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it is held.
        id: &'a LockId,
        /// For how much longer the holder may believe in the lock.
        remaining: Duration,
    }
}

event! {
    /// A lock that was held is lost.
    LostEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it was held.
        id: &'a LockId,
        /// The token of the acquisition.
        token: FencingToken,
        /// Why.
        why: &'a LockLost,
        /// From when it was ours until the loss was noticed.
        held: Duration,
    }
}

event! {
    /// A lock has been given up by its holder.
    ReleasedEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it was held.
        id: &'a LockId,
        /// The token of the acquisition.
        token: FencingToken,
        /// From when it was ours until it was given up.
        held: Duration,
        /// Whether the server has confirmed it; else it is released in the background, or left to expire.
        confirmed: bool,
    }
}

event! {
    /// The caller did not want to wait any longer for a lock that somebody else held.
    TimedOutEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it was asked for.
        id: &'a LockId,
        /// From the call until its end.
        waited: Duration,
        /// Who held it, as far as that is known.
        holder: Option<&'a Holder>,
    }
}

event! {
    /// A lock could not be had for another reason than that somebody else held it.
    FailedEvent {
        /// The name of the lock, without its prefix.
        lock: &'a str,
        /// Under which identifier it was asked for.
        id: &'a LockId,
        /// From the call until its end.
        waited: Duration,
        /// What the caller is told.
        error: &'a LockError,
    }
}

event! {
    /// A server is connected to again.
    ReconnectedEvent {
        /// The server, as errors call it.
        server: &'a str,
        /// How long ago it was noticed that it was not there.
        away: Duration,
    }
}

event! {
    /// A node is not the server that it was, or may have forgotten its locks.
    ServerChangedEvent {
        /// The server, as errors call it.
        server: &'a str,
        /// It is another run than this manager has seen there before: restarted, or another server.
        replaced: bool,
        /// For how long it does not vote, since it may have forgotten what it granted; `None` when it does.
        quarantine: Option<Duration>,
    }
}
