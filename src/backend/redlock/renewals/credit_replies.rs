//! What a node replies to a renewal is credited to the leases, also if the reply comes after the
//! quorum has decided. Such a late reply is read before the next request to its node. So a lock
//! that a distant node has lost is re-acquired there before the next node loses it too.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::{MissingOn, Redlock};
use crate::{
    backend::redis::{
        InFlightRequest, LateReader,
        renewals::renewal_request,
        requests::{Renew, RenewReply},
    },
    core::{lease::Lease, quorum::NodeSet, validity::deadline_from_sent},
    sys::clock::{self, Moment},
};

/// Returns what credits the late reply of `node` to a request for these leases, as they were at
/// `now`. Locks to re-acquire go to `missing`.
pub(super) fn late_reader(
    redlock: Arc<Redlock>,
    leases: Vec<Arc<Lease>>,
    missing: Sender<MissingOn>,
    now: Moment,
    node: usize,
    in_flight: InFlightRequest,
) -> LateReader {
    Box::new(move |reply| {
        let renewals: Vec<_> = leases.iter().map(|lease| renewal_request(lease, now)).collect();
        let Some(late) = in_flight.decode(&Renew(&renewals), reply) else { return };
        let votes = redlock.votes_at(node, late.sent);
        for (lease, reply) in leases.iter().zip(&late.reply) {
            let reply = unless_own(lease, reply);
            credit(lease, node, late.sent, reply, votes);
            if *reply == RenewReply::Gone {
                let _ = missing.send((lease.clone(), NodeSet::single(node)));
            }
        }
    })
}

/// A node that has missed the downgrade of a writer still reports it as the holder: the reader is
/// missing there.
pub(super) fn unless_own<'a>(lease: &Lease, reply: &'a RenewReply) -> &'a RenewReply {
    match reply {
        RenewReply::HeldByOther(id) if id == lease.claim.id.as_str() => &RenewReply::Gone,
        reply => reply,
    }
}

/// Credits what a node that was asked at `sent` replied about a lock to its lease. `votes` says
/// whether its confirmation counts. If a quorum has confirmed the lock, that counts at once: the
/// lease must not end while the reply of a node that other locks need is awaited.
pub(super) fn credit(lease: &Lease, node: usize, sent: Moment, reply: &RenewReply, votes: bool) {
    let mut deadlines = lease.node_deadlines.lock();
    match reply {
        RenewReply::Renewed if votes => {
            deadlines.confirm(node, deadline_from_sent(sent, lease.claim.ttl));
            let valid_until = deadlines.valid_until();
            drop(deadlines);
            if let Some(until) = valid_until {
                lease.extend_deadline(until, clock::now());
            }
        }
        RenewReply::Renewed => {}
        RenewReply::Gone | RenewReply::HeldByOther(_) => deadlines.revoke(node),
    }
}
