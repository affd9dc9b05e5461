//! `MySqlRenewals`: renews leases, each over the connection that holds it.

use std::{sync::Arc, time::Duration};

use super::{
    database::Database,
    outcome::{NO_TRANSACTION, is_renewed, unexpected},
    session::Session,
    sql::RENEW,
};
use crate::{
    backend::{
        LeaseRenewals, Renewal, RenewalLimits, RenewalReport,
        error::{BackendError, NodeError, NodeErrorKind},
        transport::{Transport, poll_readable},
    },
    core::{
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
        validity::deadline_from_sent,
    },
    sys::{
        clock::{self, Moment},
        display::Quoted,
    },
};

pub(super) struct MySqlRenewals(pub(super) Arc<Database>);

/// A renewal that was sent.
struct Pending {
    index: usize,
    session: Box<Session>,
    sent: Moment,
}

impl LeaseRenewals for MySqlRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport {
        let (held, watch) = (&self.0.held, self.0.watch.get());
        let timeout = (limits.least_left / 2).min(self.0.operation_timeout);
        let deadline = clock::now().saturating_add(timeout).min(limits.stop_by);
        let unconfirmed = |lease: &&Arc<Lease>| Renewal::Unconfirmed { until: lease.deadline() };
        let mut renewals: Vec<_> = leases.iter().map(unconfirmed).collect();
        let mut pending = Vec::new();
        for (index, lease) in leases.iter().enumerate() {
            match held.check_out(lease.claim.id.as_str()) {
                Some(session) => match send(session, lease) {
                    Ok((session, sent)) => pending.push(Pending { index, session, sent }),
                    Err(error) => renewals[index] = self.lose(lease, Some(&error)),
                },
                // Released meanwhile, or lost.
                None if lease.ended().is_some() => {}
                None => renewals[index] = self.lose(lease, None),
            }
        }
        let mut check_at = Some(clock::now());
        while let Some(next) = check_at
            && !pending.is_empty()
            && clock::now() < deadline
        {
            let transports: Vec<&dyn Transport> =
                pending.iter().filter_map(|one| one.session.connection.transport()).collect();
            let ready = poll_readable(&transports, next.min(deadline), Duration::ZERO);
            let mut ready = ready.into_iter();
            for mut one in std::mem::take(&mut pending) {
                // A closed connection is not among those that were polled.
                let is_open = one.session.connection.transport().is_some();
                if is_open && !ready.next().unwrap_or(true) {
                    pending.push(one);
                    continue;
                }
                let lease = leases[one.index];
                match receive(&mut one) {
                    Ok(Some(())) => {
                        let until = deadline_from_sent(one.sent, lease.claim.ttl);
                        let until = until.max(lease.deadline());
                        renewals[one.index] = Renewal::Confirmed { until, sent: one.sent };
                        held.put_back(lease.claim.id.as_str(), Some(one.session), watch);
                    }
                    Ok(None) => pending.push(one),
                    Err(error) => renewals[one.index] = self.lose(lease, Some(&error)),
                }
            }
            let now = clock::now();
            if now >= next {
                check_at = (limits.check)(now);
            }
        }
        let timed_out = !pending.is_empty();
        for one in pending {
            // The reply may still come. The next renewal reads it.
            held.put_back(leases[one.index].claim.id.as_str(), Some(one.session), watch);
        }
        let error = || NodeError::outcome_unknown(NodeErrorKind::TimedOut);
        let failure = timed_out.then(|| BackendError::Node(error()));
        RenewalReport { renewals, failure, too_few: None, refusal: None, timed_out: false }
    }

    fn reset(&mut self) {
        self.0.held.discard_renewing();
    }
}

impl MySqlRenewals {
    /// Ends a lease whose connection does not keep the lock any more. At once, because the replies
    /// for other leases can take a while.
    fn lose(&self, lease: &Lease, why: Option<&NodeError>) -> Renewal {
        let is_news = lease.end(LeaseEnd::Lost(LockLost::ConnectionLost));
        self.0.held.put_back(lease.claim.id.as_str(), None, None);
        if let Some(error) = why {
            self.0.close_idle_if_read_only(error);
            if is_news {
                log_safely!(
                    warn,
                    "could not renew lock {} at {}: {}; it is lost, so acquire it again",
                    Quoted(lease.claim.key.name()),
                    self.0.label,
                    error.kind
                );
            }
        }
        Renewal::Lost { why: LockLost::ConnectionLost, leaves_residue: false }
    }
}

/// Sends a renewal, unless the last one has no reply yet.
fn send(mut session: Box<Session>, lease: &Lease) -> Result<(Box<Session>, Moment), NodeError> {
    if let Some(sent) = session.renewal_sent {
        return Ok((session, sent));
    }
    // After a wait, the server keeps the lock only for the claim window.
    let renewal = session.prepare_lease(lease.claim.ttl) + RENEW;
    let sent = clock::now();
    // The request is smaller than any socket's buffer, which is empty.
    session.connection.send(&renewal, sent)?;
    session.renewal_sent = Some(sent);
    Ok((session, sent))
}

/// Reads a reply, if it has arrived. Fails if it does not confirm the lease.
fn receive(one: &mut Pending) -> Result<Option<()>, NodeError> {
    let connection = &mut one.session.connection;
    let id = connection.id();
    let Some(reply) = connection.try_receive()? else { return Ok(None) };
    one.session.renewal_sent = None;
    if is_renewed(&reply, id)? { Ok(Some(())) } else { Err(unexpected(NO_TRANSACTION)) }
}
