//! `MemoryBackend`: a server in memory, as one manager uses it.

use std::{sync::Arc, time::Duration};

use super::{grant_stream::MemoryGrantStream, server::Server};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Backend, CleanupLimits, GrantStream, Inspection,
        LeaseRenewals, Releases, RenewSoon, RenewalLimits, RenewalReport, ResidueCleaner,
        error::{BackendError, NodeError},
        redis::{
            ClaimServer, Exchange, OneServerForEachLock, Purpose, RedisAcquisition, Request,
            listing::{DESCRIBE_BATCH_MAX, Listing},
            renewals::{RENEWAL_REQUESTS_MAX, renew_on_one_server, renewal_timeout},
            requests::list::{DescribeLocks, Scan, key_pattern},
            requests::{Acquire, AcquireReply, Ping},
        },
    },
    core::{
        claim::{Claim, Residue},
        clock_sample::ClockSample,
        key::LockKey,
        lease::Lease,
        quorum::NodeSet,
    },
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

#[derive(Clone, Debug)]
pub(crate) struct MemoryBackend {
    server: Arc<Server>,
    label: Arc<str>,
    operation_timeout: Duration,
}

impl MemoryBackend {
    pub(crate) fn new(
        server: Arc<Server>,
        label: Arc<str>,
        operation_timeout: Duration,
    ) -> MemoryBackend {
        MemoryBackend { server, label, operation_timeout }
    }

    fn deadline(&self) -> Moment {
        clock::now().saturating_add(self.operation_timeout)
    }

    fn ask<C: Request>(&self, request: &C) -> Result<Exchange<C::Reply>, NodeError> {
        self.server.exchange(request, self.deadline())
    }

    fn reply_to<C: Request>(&self, request: &C) -> Result<C::Reply, BackendError> {
        self.ask(request).map(|exchange| exchange.reply).map_err(BackendError::Node)
    }

    fn describe(
        &self,
        request: &DescribeLocks<'_>,
    ) -> Result<Vec<Inspection<LockInfo>>, BackendError> {
        let found = self.reply_to(request)?;
        let found = request.keys.iter().zip(found);
        Ok(found.map(|(key, found)| found.map(|held| held.into_lock_info(key))).collect())
    }
}

impl ClaimServer for &MemoryBackend {
    fn acquire(
        &self,
        request: &Acquire<'_>,
        deadline: Moment,
    ) -> Result<Exchange<AcquireReply>, NodeError> {
        self.server.exchange(request, deadline)
    }

    fn clock_sample(&self, _: u64) -> Option<ClockSample> {
        Some(self.server.clock_sample())
    }
}

impl Backend for MemoryBackend {
    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn why_no_connection(&self) -> &'static str {
        "it is in the memory of this process and has no connections; use a real server for \
         commands of your own"
    }

    fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a> {
        Box::new(RedisAcquisition::on(self, self.operation_timeout, request))
    }

    fn open_stream(&self, channel: &str, _: Moment) -> Result<Box<dyn GrantStream>, NodeError> {
        Ok(Box::new(MemoryGrantStream::open(&self.server, &self.label, channel)?))
    }

    fn acquires_all(&self, _: &[LockKey]) -> bool {
        true
    }

    fn lease_renewals(self: Arc<Self>, _: RenewSoon) -> Box<dyn LeaseRenewals + Send> {
        Box::new(MemoryBackend::clone(&self))
    }

    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send> {
        Box::new(MemoryBackend::clone(&self))
    }

    fn list(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, BackendError> {
        let mut listing = Listing::new(prefix);
        let scan = Scan { cursor: "0", pattern: &key_pattern(prefix, pattern) };
        listing.add_keys(self.reply_to(&scan)?.keys)?;
        for batch in listing.take_keys().chunks(DESCRIBE_BATCH_MAX) {
            for found in self.describe(&DescribeLocks::in_list(batch))? {
                listing.add_lock(found)?;
            }
        }
        Ok(listing.into_locks())
    }

    fn ping(&self) -> Result<Duration, BackendError> {
        let began = clock::now();
        self.reply_to(&Ping)?;
        Ok(clock::now().duration_since(began))
    }

    fn close(&self) {}
}

impl OneServerForEachLock for MemoryBackend {
    fn exchange<R: Request>(
        &self,
        _: &LockKey,
        request: &R,
        _: Purpose,
        deadline: Moment,
    ) -> Result<Exchange<R::Reply>, NodeError> {
        self.server.exchange(request, deadline)
    }

    fn ask_about<R: Request>(
        &self,
        _: &LockKey,
        request: &R,
        deadline: Moment,
    ) -> Result<R::Reply, BackendError> {
        let asked = self.server.exchange(request, deadline);
        asked.map(|exchange| exchange.reply).map_err(BackendError::Node)
    }
}

impl LeaseRenewals for MemoryBackend {
    fn renew(&mut self, leases: &[&Arc<Lease>], limits: RenewalLimits<'_>) -> RenewalReport {
        let timeout = renewal_timeout(&limits, self.operation_timeout);
        let deadline = clock::now().saturating_add(timeout).min(limits.stop_by);
        renew_on_one_server(leases, limits.batch_max, deadline, |requests| {
            requests.iter().map(|request| self.server.exchange(request, deadline)).collect()
        })
    }

    fn requests_max(&self) -> usize {
        RENEWAL_REQUESTS_MAX
    }

    fn reset(&mut self) {}
}

impl ResidueCleaner for MemoryBackend {
    fn clean_up(
        &mut self,
        residues: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let mut failure = None;
        let deadline = limits.deadline(self.operation_timeout)?;
        for (claim, residue) in residues {
            match self.clean_up_once(claim, residue, deadline) {
                Ok(()) => residue.nodes = NodeSet::EMPTY,
                Err(error) => failure = Some(error),
            }
        }
        failure
    }

    fn close(&mut self) {}
}
