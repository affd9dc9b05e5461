//! Releasing a lock on one server: with a second request if the first reply is lost, and again
//! until a failover has ended.

use std::{slice, time::Duration};

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose, Yielding,
    requests::{Release, ReleaseReply},
};
use crate::{
    backend::{ReleaseReport, Releases, error::BackendError},
    core::{
        claim::{Claim, Residue},
        key::LockKey,
        kind::{LockKind, is_group},
        lease::Lease,
        quorum::NodeSet,
    },
    lock_info::Released,
    sys::clock::{self, Moment},
};

/// First pause between attempts while the server is not a master. Doubles up to
/// `FAILOVER_PAUSE_MAX`.
pub(super) const FAILOVER_PAUSE_MIN: Duration = Duration::from_millis(20);
pub(super) const FAILOVER_PAUSE_MAX: Duration = Duration::from_millis(200);
/// Maximum number of requests after a release that grant the lock to more waiters. Polls serve the
/// others.
const REPEATED_RELEASES_MAX: u32 = 100;

impl<B: OneServerForEachLock> Releases for B {
    fn release_lease(&self, lease: &Lease, was_held: bool, deadline: Moment) -> ReleaseReport {
        let release = ReleaseAttempts::of_lease(lease, was_held, self.yielding());
        let result = release.through_failover(deadline, |release| {
            release.send_by(self, Purpose::Release, deadline)
        });
        report(lease, result)
    }

    fn release_id(
        &self,
        key: &LockKey,
        id: &[u8],
        was_held: bool,
        deadline: Moment,
    ) -> Result<Released, BackendError> {
        release_any_kind(id, |kind| {
            let release = ReleaseAttempts::new(Release::new(kind, key, id), was_held);
            let result = release.through_failover(deadline, |release| {
                release.send_by(self, Purpose::Release, deadline)
            });
            result.map_err(BackendError::Node)
        })
    }

    fn lease_residue(&self, lease: &Lease) -> Residue {
        lease.residue(NodeSet::single(0))
    }

    fn clean_up_once(
        &self,
        claim: &Claim,
        residue: &Residue,
        deadline: Moment,
    ) -> Result<(), BackendError> {
        let request = Release::of_residue(claim, residue, clock::now());
        let mut release = ReleaseAttempts::new(request, false);
        release.send_by(self, Purpose::CleanUp, deadline).map(drop).map_err(BackendError::Node)
    }
}

/// Releases a lock by an id whose kind is not known: by the id of a mutex first, because only the
/// reply shows that a group has the lock. The name of a group stands for all its members.
pub(crate) fn release_any_kind(
    id: &[u8],
    mut release: impl FnMut(LockKind) -> Result<Released, BackendError>,
) -> Result<Released, BackendError> {
    if is_group(id) {
        return release(LockKind::Write);
    }
    match release(LockKind::Mutex)? {
        Released::OwnedByOther(holder) if holder.held_by().is_group() => {
            // No number of permits: releases all members of the claim.
            release(LockKind::Permits { limit: 0, count: 0 })
        }
        released => Ok(released),
    }
}

/// Releases the locks of several leases. `ask_all` sends requests in one exchange by its deadline,
/// or returns nothing if there is no time for them: first all, then each again whose reply is lost.
pub(crate) fn release_all_on_one_server(
    leases: &[(&Lease, bool)],
    yielding: Option<&Yielding>,
    deadline: Moment,
    mut ask_all: impl FnMut(&[Release<'_>], Moment) -> Vec<ReleaseResult>,
) -> Vec<ReleaseReport> {
    let release = |(lease, was_held)| ReleaseAttempts::of_lease(lease, was_held, yielding);
    let releases: Vec<_> = leases.iter().copied().map(release).collect();
    let requests: Vec<_> = releases.iter().map(|release| release.request).collect();
    let mut results = ask_all(&requests, deadline.halfway()).into_iter();
    let mut ask_again = |request: &Release<'_>, until| {
        // Without time for a reply, a request would only cost its connection.
        let has_time = clock::now() < until;
        let result = has_time.then(|| ask_all(slice::from_ref(request), until).pop()).flatten();
        result.unwrap_or_else(|| Err(NodeError::not_applied(NodeErrorKind::TimedOut)))
    };
    let conclude = |((lease, _), release): (&(&Lease, bool), ReleaseAttempts<'_>)| {
        let mut first = results.next();
        let result = release.through_failover(deadline, |release| {
            release.send(deadline, |request, until| {
                first.take().unwrap_or_else(|| ask_again(request, until))
            })
        });
        report(lease, result)
    };
    leases.iter().zip(releases).map(conclude).collect()
}

fn report(lease: &Lease, result: Result<Released, NodeError>) -> ReleaseReport {
    let (node, now) = (NodeSet::single(0), clock::now());
    let mut residues = Vec::new();
    if result.is_err() {
        residues.push(Residue { in_flight_until: now, ..lease.residue(node) });
    }
    // A request that is still in flight would find the lock free and acquire it again, although it
    // has no holder any more.
    if now < lease.in_flight.broken_until {
        residues.push(lease.residue(node));
    }
    ReleaseReport { result: result.map_err(BackendError::Node), residues }
}

/// Reply to one request of a release.
pub(crate) type ReleaseResult = Result<Exchange<ReleaseReply>, NodeError>;

/// One release, until its outcome is known.
pub(crate) struct ReleaseAttempts<'a> {
    request: Release<'a>,
    /// The lease was valid until this release.
    was_held: bool,
    /// A request may have been carried out, although its reply was lost.
    maybe_applied: bool,
}

impl<'a> ReleaseAttempts<'a> {
    fn new(request: Release<'a>, was_held: bool) -> ReleaseAttempts<'a> {
        ReleaseAttempts { request, was_held, maybe_applied: false }
    }

    fn of_lease(
        lease: &'a Lease,
        was_held: bool,
        yielding: Option<&Yielding>,
    ) -> ReleaseAttempts<'a> {
        let (claim, now) = (&lease.claim, clock::now());
        let pause = |yielding: &Yielding| yielding.on_release(claim.key.lock_key(), now);
        let left_free = yielding.map_or(Duration::ZERO, pause);
        let request = Release {
            keep_ms: lease.residue(NodeSet::single(0)).keep_ms(now),
            left_free_ms: u64::try_from(left_free.as_millis()).unwrap_or(0),
            is_token_in_fence: lease.is_token_in_fence,
            ..Release::of_claim(claim, &lease.queue_entry)
        };
        ReleaseAttempts::new(request, was_held)
    }

    /// Makes an attempt, and more with growing pauses during a failover: until the server's host
    /// name leads to the new master, and that has replicas if it needs them. No connection is in
    /// use during the pauses.
    fn through_failover(
        mut self,
        until: Moment,
        mut attempt: impl FnMut(&mut ReleaseAttempts<'a>) -> Result<Released, NodeError>,
    ) -> Result<Released, NodeError> {
        let mut result = attempt(&mut self);
        let (mut pause, mut is_failover) = (FAILOVER_PAUSE_MIN, false);
        while let Err(error) = &result {
            is_failover |= error.may_be_failover();
            // During a failover, the host name may also lead to no server at all for a while.
            let may_help = is_failover && (error.may_be_failover() || error.is_transient());
            let next = clock::now().saturating_add(pause);
            // An attempt without time for a reply is useless.
            if !may_help || next.saturating_add(pause) >= until {
                break;
            }
            clock::sleep_until(next);
            pause = (pause * 2).min(FAILOVER_PAUSE_MAX);
            let retried = attempt(&mut self);
            // If the last attempt timed out, keep the earlier error, which says more.
            if !matches!(&retried, Err(error) if error.is_timeout()) {
                result = retried;
            }
        }
        result
    }

    fn send_by(
        &mut self,
        backend: &impl OneServerForEachLock,
        purpose: Purpose,
        deadline: Moment,
    ) -> Result<Released, NodeError> {
        self.send(deadline, |request, until| backend.exchange(request.key, request, purpose, until))
    }

    /// Sends the release by `ask`, and once more if its reply is lost.
    ///
    /// If the server replies to a later request that the lock is free, it has applied an earlier
    /// one. If we held the lock until this release, the reply that another client holds the lock
    /// means the same, because a release hands the lock over.
    ///
    /// A release of all members of a group is not repeated once it may have been applied: the
    /// second one would release those that the first one has let in.
    fn send(
        &mut self,
        until: Moment,
        mut ask: impl FnMut(&Release<'a>, Moment) -> ReleaseResult,
    ) -> Result<Released, NodeError> {
        let names_group = is_group(self.request.id);
        let reply = match self.send_once(until.halfway(), &mut ask) {
            Err(failure) if names_group && failure.outcome_unknown => Err(failure),
            // A new connection may lead to the new master.
            Err(failure) if failure.is_transient() || failure.is_not_master() => {
                self.send_once(until, &mut ask)
            }
            result => result,
        };
        let reply = reply?;
        let mut has_more = reply.has_more() && !names_group;
        for _ in 0..REPEATED_RELEASES_MAX {
            if !has_more {
                break;
            }
            // The lock is released. If this fails, polls serve the waiters.
            has_more = self.send_once(until, &mut ask).is_ok_and(|again| again.has_more());
        }
        Ok(match reply {
            ReleaseReply::Released { .. } => Released::Released,
            ReleaseReply::Gone { .. } if self.maybe_applied => Released::Released,
            ReleaseReply::HeldByOther(_) if self.maybe_applied && self.was_held => {
                Released::Released
            }
            ReleaseReply::HeldByOther(holder) => Released::OwnedByOther(holder),
            ReleaseReply::Gone { .. } | ReleaseReply::WrongType | ReleaseReply::Late => {
                Released::Gone
            }
        })
    }

    fn send_once(
        &mut self,
        deadline: Moment,
        ask: &mut impl FnMut(&Release<'a>, Moment) -> ReleaseResult,
    ) -> Result<ReleaseReply, NodeError> {
        let result = ask(&self.request, deadline);
        self.maybe_applied |= matches!(&result, Err(failure) if failure.outcome_unknown);
        result.map(|exchange| exchange.reply)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        backend::redis::{
            ConnectionPool, Endpoint, NodeErrorKind, RedisNode, Replicas, Urgency,
            exchange_over_pool,
        },
        observe::Observer,
    };

    /// The name of a group stands for all its members, and those of a moment later are others.
    ///
    /// Fault: N248
    /// Promise: P6
    #[test]
    fn release_of_a_whole_group_is_not_repeated() {
        let key = LockKey::new("", "x").unwrap();
        let deadline = clock::now().saturating_add(Duration::from_secs(60));
        let requests_for = |id: &[u8], is_lost: bool| {
            let mut attempts = ReleaseAttempts::new(Release::new(LockKind::Write, &key, id), true);
            let mut requests = 0;
            let released = attempts.send(deadline, |_, _| {
                requests += 1;
                if is_lost && requests == 1 {
                    return Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
                }
                let reply = ReleaseReply::Released { has_more: requests < 3 };
                Ok(Exchange { sent: clock::now(), server_us: None, reply })
            });
            (released.is_ok(), requests)
        };
        assert_eq!(requests_for(b"distlock:permits", false), (true, 1));
        assert_eq!(requests_for(b"distlock:permits", true), (false, 1));
        assert_eq!(requests_for(b"one of them", false), (true, 3));
        assert_eq!(requests_for(b"one of them", true), (true, 3));
    }

    /// The first attempt finds all connections in use, the second one finds the lock free. So it
    /// was lost before, and this release did not free it.
    #[test]
    fn release_without_a_connection_counts_as_not_sent() {
        let endpoint = Arc::new(Endpoint::parse("redis://127.0.0.1:1").unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone(), 1, false).unwrap();
        let second = Duration::from_secs(1);
        let none = Duration::ZERO;
        let node = Arc::new(RedisNode::new(endpoint, second, none, none, observer));
        let pool = ConnectionPool::new([node.clone()].into(), 1).unwrap();
        let key = LockKey::new("", "x").unwrap();
        let deadline = clock::now().saturating_add(60 * second);
        let _in_use = pool.get(Urgency::Other, deadline).unwrap();
        for purpose in [Purpose::Release, Purpose::CleanUp] {
            let mut attempts =
                ReleaseAttempts::new(Release::new(LockKind::Mutex, &key, b"id"), true);
            let mut requests = 0;
            let released = attempts.send(deadline, |_, _| {
                requests += 1;
                let now = clock::now();
                if requests > 1 {
                    let reply = ReleaseReply::Gone { has_more: false };
                    return Ok(Exchange { sent: now, server_us: None, reply });
                }
                let late = |_: &mut _| {
                    let replicas = Replicas::default();
                    exchange_over_pool::<Release<'_>>(&node, &pool, replicas, purpose, now, |_| {
                        panic!("sent without a connection")
                    })
                };
                pool.with_reserved(deadline, late).unwrap()
            });
            assert_eq!((released.unwrap(), requests), (Released::Gone, 2), "{purpose:?}");
        }
    }
}
