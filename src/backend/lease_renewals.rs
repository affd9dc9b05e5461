//! `LeaseRenewals`: what renews the leases of a manager, and what its requests achieve.

use std::{sync::Arc, time::Duration};

#[cfg(doc)]
use super::Backend;
use super::error::BackendError;
use crate::{
    core::{claim::Residue, lease::Lease, lock_lost::LockLost},
    sys::clock::Moment,
};

/// Renews leases, over connections of its own, which open when they are first used.
pub(crate) trait LeaseRenewals {
    /// Asks once for all these leases, in one exchange with each server. Records in the leases what
    /// the servers reply. May extend their deadlines, but does not shorten them.
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport;

    /// Whether the server of this lease, one of several with different locks, failed when it was
    /// last asked. Leases of the other servers then come first.
    fn is_at_failing_server(&self, _lease: &Lease) -> bool {
        false
    }

    /// Maximum number of requests that one call of [`renew`](Self::renew) sends to a server.
    fn requests_max(&self) -> usize {
        1
    }

    /// Repairs one of the leases that the last renewals left: valid, although a server does not
    /// keep its lock. Returns what the request may have left without a reply, or `None` if there is
    /// nothing to repair.
    fn repair(&mut self, _limits: RenewalLimits<'_>) -> Option<Vec<LeaseResidue>> {
        None
    }

    /// Asks the servers whether they are reachable, and still those that may keep locks. Called at
    /// intervals of [`Backend::probe_interval`].
    fn probe(&mut self, _limits: RenewalLimits<'_>) {}

    /// Closes the connections, after a panic: replies in flight on them cannot be matched to
    /// requests any more.
    fn reset(&mut self);
}

/// Has the leases of these claims renewed at once.
pub(crate) type RenewSoon = Arc<dyn Fn(&[Box<str>]) + Send + Sync>;

/// How long the exchanges of one call may take.
pub(crate) struct RenewalLimits<'a> {
    /// Time left until the first of the leases ends.
    pub(crate) least_left: Duration,
    /// Time by which every exchange must have ended: the deadline of a shutdown.
    pub(crate) stop_by: Moment,
    /// Maximum number of leases in one request.
    pub(crate) batch_max: usize,
    /// Called while replies are outstanding. Returns when to call it next, or `None` to end the
    /// exchange.
    pub(crate) check: &'a mut dyn FnMut(Moment) -> Option<Moment>,
}

/// Result of one exchange that renews leases, in one request or several.
pub(crate) struct RenewalReport {
    /// One for each lease, in their order.
    pub(crate) renewals: Vec<Renewal>,
    /// Why the servers did not confirm the requests as a whole.
    pub(crate) failure: Option<BackendError>,
    /// If they did: why too few of them confirmed some of the leases.
    pub(crate) too_few: Option<BackendError>,
    /// A refusal that a single lock may have caused: smaller requests may succeed.
    pub(crate) refusal: Option<String>,
    /// The request was sent, and no reply came in time: smaller requests may succeed.
    pub(crate) timed_out: bool,
}

impl RenewalReport {
    /// Before any reply.
    pub(crate) fn unconfirmed(leases: &[&Arc<Lease>]) -> RenewalReport {
        let unconfirmed = |lease: &&Arc<Lease>| Renewal::Unconfirmed { until: lease.deadline() };
        RenewalReport {
            renewals: leases.iter().map(unconfirmed).collect(),
            failure: None,
            too_few: None,
            refusal: None,
            timed_out: false,
        }
    }
}

/// What a renewal request achieved for one lease.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// The lease is valid until `until`; the request was sent at `sent`.
    Confirmed { until: Moment, sent: Moment },
    /// Not confirmed by this request. As far as the servers have confirmed, the lease is valid
    /// until `until`.
    Unconfirmed { until: Moment },
    /// The servers do not keep the lock any more.
    Lost {
        why: LockLost,
        /// A server may still keep it, or a request in flight may acquire it again.
        leaves_residue: bool,
    },
}

/// What a request that repaired a lease may have left: to be cleaned up when it cannot be in flight
/// any more, unless the lease is valid then.
#[derive(Debug)]
pub(crate) struct LeaseResidue {
    pub(crate) lease: Arc<Lease>,
    pub(crate) residue: Residue,
}
