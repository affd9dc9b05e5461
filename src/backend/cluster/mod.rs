//! A Redis Cluster: each lock is kept by the node of its slot, as a single server would keep it.

mod acquisition;
mod cleanup;
mod cluster_node;
mod grant_stream;
mod list;
mod map;
mod map_request;
mod node_link;
mod redirect_reply;
mod refresh;
mod renewals;
mod router;
mod subscriptions;

use std::{borrow::Cow, cell::RefCell, sync::Arc, time::Duration};

use self::{
    acquisition::{ClusterAcquisition, SlotServer},
    cleanup::ClusterCleaner,
    cluster_node::Part,
    grant_stream::ClusterGrantStream,
    renewals::ClusterRenewals,
    router::{Patience, Router},
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Backend, GrantStream, LeaseRenewals, RenewSoon,
        ResidueCleaner,
        error::{BackendError, NodeError},
        redis::{
            Endpoint, Exchange, OneServerForEachLock, Purpose, RedisSettings, Request, Yielding,
            exchange_over_pool, requests::Ping,
        },
    },
    core::{
        cluster_slot::tag_of_slot,
        key::{InvalidName, LockKey},
    },
    lock_info::LockInfo,
    observe::Observer,
    sys::clock::{self, Moment},
};

/// What the channels of all managers begin with.
const CHANNEL_PREFIX: &str = "distlock:client:";

#[derive(Debug)]
pub(crate) struct ClusterBackend {
    router: Arc<Router>,
    yielding: Option<Yielding>,
}

impl ClusterBackend {
    /// Does not connect.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        settings: RedisSettings,
        observer: Arc<Observer>,
    ) -> ClusterBackend {
        let router = Router::new(endpoint, settings, observer);
        ClusterBackend {
            router: Arc::new(router),
            yielding: Yielding::new(settings.yield_to_others),
        }
    }

    fn router(&self) -> &Router {
        &self.router
    }

    /// Does the same as [`exchange`](OneServerForEachLock::exchange), and returns the node too.
    fn exchange_with_part<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        purpose: Purpose,
        deadline: Moment,
    ) -> Result<(Arc<Part>, Exchange<R::Reply>), NodeError> {
        let patience = Patience { deadline, waits_for_nodes: purpose != Purpose::Claim };
        let replicas = self.router.replicas();
        self.router.follow(slot_of(key)?, patience, |part, is_asking| {
            exchange_over_pool::<R>(
                &part.node,
                &part.pool,
                replicas,
                purpose,
                deadline,
                |connection| self.router.ask_over(part, connection, request, is_asking, deadline),
            )
        })
    }
}

fn slot_of(key: &LockKey) -> Result<u16, NodeError> {
    key.slot().ok_or_else(|| NodeError::not_applied(std::io::ErrorKind::InvalidInput))
}

impl Backend for ClusterBackend {
    fn label(&self) -> &Arc<str> {
        self.router.label()
    }

    fn why_no_connection(&self) -> &'static str {
        "no connection leads to all keys; connect to the nodes of the cluster with a client for \
         clusters"
    }

    fn operation_timeout(&self) -> Duration {
        self.router.operation_timeout
    }

    fn adapt_key(&self, key: LockKey) -> Result<LockKey, InvalidName> {
        key.in_cluster()
    }

    /// The channel is in the slot of the lock.
    fn channel_for<'a>(&self, manager: &'a str, key: &LockKey) -> Cow<'a, str> {
        key.slot().map_or(Cow::Borrowed(manager), |slot| channel_of_slot(manager, slot).into())
    }

    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a> {
        let slot = request.claim.key.slot().unwrap_or(0);
        let server = SlotServer { backend: self, slot, last: RefCell::new(None) };
        Box::new(ClusterAcquisition::on(server, request))
    }

    fn open_stream(&self, channel: &str, _: Moment) -> Result<Box<dyn GrantStream>, NodeError> {
        let stream = ClusterGrantStream::open(&self.router, channel);
        Ok(Box::new(stream.map_err(NodeError::not_applied)?))
    }

    fn acquires_all(&self, keys: &[LockKey]) -> bool {
        keys.windows(2).all(|pair| pair[0].slot() == pair[1].slot())
    }

    fn lease_renewals(self: Arc<Self>, _: RenewSoon) -> Box<dyn LeaseRenewals + Send> {
        Box::new(ClusterRenewals::new(self.router.clone()))
    }

    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send> {
        Box::new(ClusterCleaner::new(self.router.clone()))
    }

    fn list(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, BackendError> {
        self.list_all(prefix, pattern)
    }

    /// The longest time of any node.
    fn ping(&self) -> Result<Duration, BackendError> {
        let deadline = self.operation_deadline();
        let mut longest = Duration::ZERO;
        for part in self.router.masters(deadline)? {
            let began = clock::now();
            let ping = || {
                let mut connections = part.pool.get_to_ask(deadline)?;
                self.router.ask_over(&part, connections.only(), &Ping, false, deadline)
            };
            // A stale connection has been closed.
            ping().or_else(|_| ping())?;
            longest = longest.max(clock::now().duration_since(began));
        }
        Ok(longest)
    }

    fn close(&self) {
        self.router.close();
    }
}

impl OneServerForEachLock for ClusterBackend {
    fn exchange<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        purpose: Purpose,
        deadline: Moment,
    ) -> Result<Exchange<R::Reply>, NodeError> {
        self.exchange_with_part(key, request, purpose, deadline).map(|(_, exchange)| exchange)
    }

    fn yielding(&self) -> Option<&Yielding> {
        self.yielding.as_ref()
    }

    /// Asks once more if the connection was stale.
    fn ask_about<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        deadline: Moment,
    ) -> Result<R::Reply, BackendError> {
        let patience = Patience { deadline, waits_for_nodes: true };
        let ask = || self.router.ask(slot_of(key)?, request, patience);
        let asked = match ask() {
            Err(failure) if failure.is_reply_lost() && clock::now() < deadline => ask(),
            asked => asked,
        };
        asked.map(|(_, exchange)| exchange.reply).map_err(BackendError::Node)
    }
}

/// Returns the channel of a slot, for a manager with the channel `manager`.
fn channel_of_slot(manager: &str, slot: u16) -> String {
    let id = manager.strip_prefix(CHANNEL_PREFIX).unwrap_or(manager);
    format!("{CHANNEL_PREFIX}{{{}}}:{id}", tag_of_slot(slot))
}
