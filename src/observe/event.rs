//! `HandleEvent`, the trait for handlers of lock events, and one type for each event.

use std::{fmt, time::Duration};

use crate::{
    core::{holder::Holder, id::LockId, lock_lost::LockLost, token::FencingToken},
    error::LockError,
};

/// Handles the events of a manager's locks. All methods do nothing by default.
///
/// Set a handler with [`Config::event_handler`](crate::Config::event_handler). A handler that
/// panics or blocks never causes the loss of a lock:
///
/// * `attempted`, `acquired`, `released`, `detached`, `timed_out` and `failed` are called on the
///   thread that locks or unlocks, in order, while no request of that thread is in flight. Time
///   spent in them delays the caller. A lock is already being renewed when `acquired` is called.
/// * All other methods are called one after the other on a thread of their own, `distlock-outbox`,
///   slightly later. That thread also calls the logger for the library's own threads, and the
///   metrics recorder. Its queue holds 1,024 calls. Further ones are dropped, and counted in
///   [`Metrics::reports_dropped`](crate::Metrics::reports_dropped). Events of the two groups may
///   arrive out of order: `contended` can come after `acquired` of the same identifier. Like all
///   threads of this library, this thread blocks signals. A handler that raises a signal must send
///   it to the process, not to the thread.
///
/// A panic is caught, and the first one is logged (unless the program aborts on panics).
///
/// The events of one acquisition begin with `attempted` and end with `timed_out`, `failed` or
/// `acquired`. `acquired` is followed by one `released`, `detached` or `lost`, unless the guard is
/// leaked. All of these carry the same identifier, with one exception: if another thread of the
/// process hands the lock over ([`Config::local_handover`](crate::Config::local_handover)),
/// `acquired` and the events after it carry the identifier that the server knows, which is that of
/// the former holder. Such holds differ in their fencing tokens.
///
/// To test a handler, create events with their `new`, which the feature `testing` adds.
///
/// A handler should not own a [`RedisMgr`](crate::RedisMgr): that would keep the manager alive
/// forever.
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
/// let config = Config::new("redis://127.0.0.1").event_handler(Arc::new(Print));
/// # let _ = config;
/// ```
#[expect(unused_variables, reason = "the methods name their parameter for readers")]
pub trait HandleEvent: Send + Sync + fmt::Debug {
    /// A thread asks for a lock.
    fn attempted(&self, event: &AttemptedEvent<'_>) {}

    /// Another client holds the lock. Called at most once for each acquisition, when the holder is
    /// first seen. A thread that waits behind others of its manager sees it only when it asks the
    /// servers itself, or gets the lock from one of them.
    fn contended(&self, event: &ContendedEvent<'_>) {}

    /// The servers cannot be asked for a lock, and its acquisition goes on trying. Called at its
    /// second failure in a row, once for each outage.
    fn retrying(&self, event: &RetryingEvent<'_>) {}

    /// A lock was acquired.
    fn acquired(&self, event: &AcquiredEvent<'_>) {}

    /// A lease was renewed.
    fn renewed(&self, event: &RenewedEvent<'_>) {}

    /// A renewal was not confirmed. It is retried while the lease is valid.
    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {}

    /// A renewal is overdue: half of the lease's validity has passed since the last confirmation,
    /// although a renewal was due before. Called at most once between two confirmations.
    fn renewal_overdue(&self, event: &RenewalOverdueEvent<'_>) {}

    /// A held lock was lost.
    fn lost(&self, event: &LostEvent<'_>) {}

    /// A lock was released by its holder.
    fn released(&self, event: &ReleasedEvent<'_>) {}

    /// A lock was left to a successor: [`LockGuard::detach`](crate::LockGuard::detach).
    fn detached(&self, event: &DetachedEvent<'_>) {}

    /// Another client held the lock while the caller waited, or at the moment of the call if the
    /// caller did not wait. A call for several locks that does not wait ends like this for all of
    /// them, if one of them is held; the event of the others has no holder. A call that waits ends
    /// like this for the lock it waited for, and has released those that it got before.
    fn timed_out(&self, event: &TimedOutEvent<'_>) {}

    /// Acquisition failed for a reason other than contention.
    fn failed(&self, event: &FailedEvent<'_>) {}

    /// A server cannot be reached. Called once per outage, and then `reconnected` when it has
    /// ended. Over several nodes, an outage is noticed within a third of
    /// [`Config::ttl`](crate::Config::ttl) plus one operation timeout, whether or not a lock is
    /// held. A single server is contacted only for a lock. In a database, the outage is noticed and
    /// ends when a lock needs a new connection.
    fn unreachable(&self, event: &UnreachableEvent<'_>) {}

    /// A connection to a server that was unreachable, or whose connection had broken, was
    /// established again. Called once per outage, for the first new connection.
    fn reconnected(&self, event: &ReconnectedEvent<'_>) {}

    /// One of several nodes was restarted or replaced, or may have lost its locks. A single server
    /// is checked for this only with a [quarantine](crate::Config::quarantine), and also when a
    /// manager first connects to it.
    fn server_changed(&self, event: &ServerChangedEvent<'_>) {}
}

macro_rules! event {
    ($(#[$about:meta])* $name:ident of lock { $($fields:tt)* }) => {
        event! {
            $(#[$about])*
            $name {
                /// The name of the lock, without its prefix.
                lock: &'a str,
                /// The identifier of the acquisition.
                id: &'a LockId,
                $($fields)*
            }
        }
    };
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$about])*
        ///
        /// See [`HandleEvent`].
        #[derive(Clone, Copy, Debug)]
        pub struct $name<'a> {
            $(pub(crate) $field: $type,)*
        }

        impl<'a> $name<'a> {
            /// Creates an event, for tests. With the feature `testing`.
            #[cfg(feature = "testing")]
            pub fn new($($field: $type,)*) -> $name<'a> {
                $name { $($field,)* }
            }

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
    /// A thread asks for a lock.
    AttemptedEvent of lock {
        /// The maximum wait; `None` if there is no limit.
        wait: Option<Duration>,
    }
}

event! {
    /// Another client holds the lock.
    ContendedEvent of lock {
        /// The holder.
        holder: &'a Holder,
    }
}

event! {
    /// The servers cannot be asked for a lock, and its acquisition goes on trying.
    RetryingEvent of lock {
        /// The server or the servers, as shown in errors.
        server: &'a str,
        /// The reason, as a phrase without a full stop.
        why: &'a str,
        /// The time after which the acquisition fails, if the servers stay away.
        gives_up_in: Duration,
    }
}

event! {
    /// A lock was acquired.
    AcquiredEvent of lock {
        /// The fencing token of the acquisition.
        token: FencingToken,
        /// The time from the call to the acquisition.
        waited: Duration,
        /// True if another client held the lock.
        contended: bool,
    }
}

event! {
    /// A lease was renewed.
    RenewedEvent of lock {
        /// The validity that was left when the confirmation arrived. If the renewal confirms the
        /// grant of a lock that was waited for, that is what was left of the claim window.
        margin: Duration,
        /// The time from the request to its confirmation.
        took: Duration,
    }
}

event! {
    /// A renewal was not confirmed.
    RenewalFailedEvent of lock {
        /// The reason, as a phrase without a full stop.
        why: &'a str,
        /// The time left until the lease expires.
        remaining: Duration,
    }
}

event! {
    /// A renewal is overdue: half of the lease's validity has passed without a confirmation.
    RenewalOverdueEvent of lock {
        /// The time left until the lease expires.
        remaining: Duration,
    }
}

event! {
    /// A held lock was lost.
    LostEvent of lock {
        /// The fencing token of the acquisition.
        token: FencingToken,
        /// The reason.
        why: &'a LockLost,
        /// The time from the acquisition until the loss was noticed.
        held: Duration,
    }
}

event! {
    /// A lock was released by its holder.
    ReleasedEvent of lock {
        /// The fencing token of the acquisition.
        token: FencingToken,
        /// The time from the acquisition to the release.
        held: Duration,
        /// True if the server confirmed the release. Otherwise it is retried in the background, or
        /// the lock expires.
        confirmed: bool,
    }
}

event! {
    /// A lock was left to a successor.
    DetachedEvent of lock {
        /// The fencing token of the acquisition.
        token: FencingToken,
        /// The time from the acquisition until the lock was detached.
        held: Duration,
    }
}

event! {
    /// The wait ended while another client held the lock.
    TimedOutEvent of lock {
        /// The duration of the call.
        waited: Duration,
        /// The holder, if known.
        holder: Option<&'a Holder>,
    }
}

event! {
    /// Acquisition failed for a reason other than contention.
    FailedEvent of lock {
        /// The duration of the call.
        waited: Duration,
        /// The error that the call returns.
        error: &'a LockError,
    }
}

event! {
    /// A server cannot be reached.
    UnreachableEvent {
        /// The server address, as shown in errors.
        server: &'a str,
        /// The reason, as a phrase without a full stop.
        why: &'a str,
    }
}

event! {
    /// A connection to a server was established again.
    ReconnectedEvent {
        /// The server address, as shown in errors.
        server: &'a str,
        /// The time since the server was first found unreachable.
        away: Duration,
    }
}

event! {
    /// A node was restarted or replaced, or may have lost its locks.
    ServerChangedEvent {
        /// The server address, as shown in errors.
        server: &'a str,
        /// True if the node runs another server process than before: it was restarted or replaced.
        replaced: bool,
        /// The time for which the node does not vote, because it may have lost locks; `None` if it
        /// votes.
        quarantine: Option<Duration>,
    }
}
