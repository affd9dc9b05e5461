//! `Count`: the kinds of events that have a counter. `Time`: what is measured.

/// Kinds of events that have a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    ReportsDropped,
}

impl Count {
    pub(super) const ALL: [Count; 13] = [
        Count::Attempted,
        Count::Acquired,
        Count::Contended,
        Count::TimedOut,
        Count::Failed,
        Count::Released,
        Count::Lost,
        Count::Renewals,
        Count::RenewalsFailed,
        Count::RenewalsOverdue,
        Count::Reconnected,
        Count::ServersChanged,
        Count::ReportsDropped,
    ];
}

/// Durations that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Time {
    Wait,
    Hold,
    Renewal,
    Margin,
}
