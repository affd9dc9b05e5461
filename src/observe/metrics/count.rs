//! `Count`: the kinds of events that have a counter.

/// Kinds of events that have a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Attempted,
    Acquired,
    Contended,
    TimedOut,
    Failed,
    Released,
    Lost,
    Renewals,
    RenewalsFailed,
    RenewalsOverdue,
    Reconnected,
    ServersChanged,
    EventsDropped,
}

impl Count {
    pub(super) const VARIANTS: usize = Count::EventsDropped as usize + 1;
}
