//! What N independent nodes decide together (Redlock). One node is the quorum of one, by the same path.

mod ballot;
mod farewell;
mod greeter;
mod inspect;
#[cfg(test)]
mod model;
mod pool;
mod quorum;
mod release;
mod scatter;
mod strongest;
mod survey;
mod trouble;

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;

pub(crate) use self::{
    ballot::{Ballot, Slip, Unheard},
    pool::{Links, Pooled},
    quorum::{AtomicNodeSet, NodeSet, Verdict, Vote, Votes, quorum, token as agreed_token},
    release::{Ending, Leaving, past_a_failover},
    scatter::Round,
    strongest::strongest,
    survey::Look,
    trouble::Trouble,
};
use self::{farewell::Farewell, pool::ConnectionPool, scatter::scatter};
use crate::{
    clock::{self, Moment},
    error::{Action, LockError},
    node::{Answer, Call, Endpoint, Failure, Reason, RedisNode, Roster, calls::Ping},
    observer::Observer,
};

/// Several nodes are asked for a token this much above their clocks, so that all of them give the same one at once.
const TOKEN_AHEAD_US: u64 = 10_000;
/// Added to the moment from which a node refuses a late request, which is only known within a round trip.
pub(crate) const LATE_SLACK: Duration = Duration::from_millis(100);

/// The nodes, and the connections to them.
pub(crate) struct Redlock {
    nodes: Arc<[Arc<RedisNode>]>,
    pool: ConnectionPool,
    farewell: Farewell,
    label: Arc<str>,
    operation_timeout: Duration,
    observer: Arc<Observer>,
}

impl Redlock {
    /// Connects to nothing. `None` when the pool gets no thread.
    pub(crate) fn new(
        endpoints: &[Arc<Endpoint>],
        pool_size: u32,
        operation_timeout: Duration,
        spin_max: Duration,
        quarantine: Duration,
        observer: Arc<Observer>,
    ) -> Option<Redlock> {
        let labels = || endpoints.iter().map(|endpoint| endpoint.label.clone());
        let roster = Arc::new(Mutex::new(Roster::new(labels(), quarantine)));
        let node = |(index, endpoint): (usize, &Arc<Endpoint>)| {
            // With several answers under way a thread that spins takes the core from whoever is to send them.
            let spin_max = if endpoints.len() > 1 { Duration::ZERO } else { spin_max };
            let node = RedisNode::new(endpoint.clone(), operation_timeout, spin_max, observer.clone());
            Arc::new(if endpoints.len() > 1 { node.among(index, roster.clone()) } else { node })
        };
        let nodes: Arc<[_]> = endpoints.iter().enumerate().map(node).collect();
        let pool = ConnectionPool::new(nodes.clone(), pool_size)?;
        Some(Redlock { nodes, pool, farewell: Farewell::new(), label: label(endpoints), operation_timeout, observer })
    }

    /// Connects to the nodes, to refuse those that cannot be nodes; one that is away is looked at when it comes back.
    pub(crate) fn introduce(&self) -> Result<(), LockError> {
        let deadline = clock::now().saturating_add(self.operation_timeout);
        let links = self.links(deadline);
        let mut links = links.map_err(|failure| self.error(Trouble::Alone(failure), Action::Connect, None))?;
        let ballot = self.ask(&mut links, Round::all(self.all(), deadline), |_| Ping, |_, _| Vote::Yes);
        for (node, slip) in self.nodes.iter().zip(&ballot.slips) {
            match slip {
                Slip::Failed(Failure { reason: Reason::Unfit(why), .. }) => {
                    return Err(LockError::InvalidConfig {
                        reason: format!("{} cannot be a node: {why}", node.label()),
                    });
                }
                Slip::Failed(failure) => say!(warn, "node {} is away: {}", node.label(), failure.reason),
                _ => {}
            }
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn needed(&self) -> usize {
        quorum(self.nodes.len())
    }

    pub(crate) fn all(&self) -> NodeSet {
        NodeSet::first(self.nodes.len())
    }

    pub(crate) fn node(&self, index: usize) -> &Arc<RedisNode> {
        &self.nodes[index]
    }

    pub(crate) fn nodes(&self) -> &[Arc<RedisNode>] {
        &self.nodes
    }

    /// The node on which to wait in line: the first that is well, so that all clients prefer the same one.
    pub(crate) fn preferred(&self) -> usize {
        self.nodes.iter().position(|node| node.is_well()).unwrap_or(0)
    }

    /// Whether it is time to see if a node before this one is well again.
    pub(crate) fn may_be_back(&self, node: usize) -> bool {
        let now = clock::now();
        self.nodes[..node].iter().any(|node| !node.is_well() && !node.rests(now))
    }

    /// Whether the line is better moved from this node: to one that everybody prefers, or away from one that keeps failing.
    pub(crate) fn should_leave(&self, node: usize) -> bool {
        self.len() > 1 && (self.preferred() < node || (self.nodes[node].is_ill() && self.preferred() != node))
    }

    /// The nodes as sentences call them.
    pub(crate) fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// Whom to tell what happens.
    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    pub(crate) fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    /// Connections for one caller.
    pub(crate) fn links(&self, deadline: Moment) -> Result<Pooled, Failure> {
        self.pool.get(deadline)
    }

    /// Connections outside the pool, for a thread that must never wait for users of the pool.
    pub(crate) fn reserved(&self) -> Links {
        Links(self.nodes.iter().map(|node| node.reserved()).collect())
    }

    /// Ends the pool.
    pub(crate) fn close(&self) {
        self.pool.close();
    }

    /// Asks nodes, and counts.
    pub(crate) fn ask<C: Call>(
        &self,
        links: &mut Links,
        round: Round<'_>,
        call: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Answer<C::Reply>) -> Vote,
    ) -> Ballot<C::Reply> {
        scatter(&self.nodes, &mut links.0, round, call, vote)
    }

    /// Reads what has come from this node of the answers that nobody waits for, which settles their receipts.
    pub(crate) fn hear_owed(&self, links: &mut Links, node: usize) {
        let (_, heard) = links.0[node].owes_since(clock::now());
        if heard {
            self.nodes[node].answered();
        }
    }

    /// What token to ask several nodes for. A node that stands alone gives the one it has.
    pub(crate) fn token_min(&self) -> u64 {
        if self.nodes.len() == 1 {
            return 0;
        }
        let now = clock::now();
        let clocks = self.nodes.iter().filter_map(|node| node.reading());
        clocks.map(|reading| reading.server_us_at(now)).max().map_or(0, |latest| latest.saturating_add(TOKEN_AHEAD_US))
    }

    /// Why it did not work, as the user sees it.
    pub(crate) fn error(&self, trouble: Trouble, action: Action, name: Option<&str>) -> LockError {
        let name = name.map(str::to_owned);
        let server = self.label.clone();
        let passing = trouble.is_passing();
        let failure = match trouble {
            Trouble::Alone(failure) => failure,
            Trouble::Several { answers, .. } => {
                return LockError::NoQuorum { action, name, needed: self.needed(), answers };
            }
        };
        match failure.reason {
            Reason::PoolExhausted => LockError::PoolExhausted { action, name, server, pool_size: self.pool.size() },
            Reason::Refused { code, message } if !passing => LockError::Refused { action, name, server, code, message },
            Reason::Closed => LockError::Shutdown,
            reason => LockError::Unavailable { action, name, server, cause: Box::new(reason) },
        }
    }
}

impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redlock").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

/// The nodes as sentences call them.
pub(crate) fn label(endpoints: &[Arc<Endpoint>]) -> Arc<str> {
    match endpoints {
        [one] => one.label.clone(),
        several => several.iter().map(|endpoint| &*endpoint.label).collect::<Vec<_>>().join(", ").into(),
    }
}
