//! A model of the protocol over several nodes, checked exhaustively: every order of events, up to a
//! number of ticks and faults. Run it with `cargo test --lib verify::model`; it takes about a
//! minute.
//!
//! Clients are mutexes, or readers and writers: `readers.rs` has the bounds for those. `groups.rs`
//! is a model of its own, of groups on one server, and `leftovers.rs` one of what a claim leaves on
//! a node.
//!
//! Nodes, clients and the messages between them are modelled. Verdicts, tokens, votes and deadlines
//! are computed by the library's own code in `quorum.rs`. Each rule of the protocol can be broken,
//! which shows that the check detects it.

mod check;
mod client;
mod downgrade;
mod groups;
mod leftovers;
mod liveness;
mod node;
mod normalize;
mod properties;
mod readers;
mod steps;
mod world;

use stateright::Property;

use self::{
    node::is_of,
    world::{Column, Faults, Id, Kind, NODES, Phase, Tick, World},
};
use crate::core::quorum::quorum;

/// What is explored: how long, how many requests, and which faults.
#[derive(Clone, Debug)]
struct Model<const C: usize> {
    kinds: [Kind; C],
    /// Whether those that have the lock alone may become readers.
    downgrades: bool,
    /// Last tick of the exploration.
    horizon: Tick,
    ttl: Tick,
    /// How long a waiter keeps a key that was granted to it.
    claim_window: Tick,
    /// How long after it was sent a request may be executed.
    request_ttl: Tick,
    /// Maximum number of turns of each client, of rounds in each turn, and of renewals in each
    /// turn.
    turns: u8,
    rounds: u8,
    renewals: u8,
    /// Whether expired renewals are refused, as other requests are. The real scripts execute them,
    /// because they can only keep others waiting for one more ttl.
    renewals_expire: bool,
    faults: Faults,
    /// Maximum number of messages in flight while time passes, without those on dropped
    /// connections.
    in_flight_max: usize,
    /// Whether a reply may be read later than it is sent.
    late_replies: bool,
    /// Whether the first node has a queue.
    queue: bool,
    /// Errors of the nodes' wall clocks, in units of those clocks.
    skew: [u8; NODES],
    /// How far the first proposal of a client may be ahead of the fastest node's clock. None if
    /// clients propose no token.
    proposal_lead: Option<u8>,
    /// The tick at which faults end, and from which every client must get the lock.
    liveness_from: Option<Tick>,
    broken: &'static [Rule],
}

/// The rules of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A node that restarted without its data does not vote before every key that it may have lost
    /// has expired.
    Quarantine,
    /// A reply does not count if its request was sent before the end of the node's quarantine.
    SentAfterQuarantine,
    /// A token is issued only after a quorum has stored it.
    SecondPhase,
    /// A release raises the fence of the node to the token of the lock, and only then forgets it.
    ReleaseRaisesFence,
    /// A token is not smaller than the clock of the node that issues it.
    ClockInTokens,
    /// A deadline counts from when the request was sent.
    DeadlineFromSent,
    /// A lease ends before its key, by as much as a node's clock can run ahead.
    Margin,
    /// A renewal without a reply extends nothing.
    UnknownIsNotYes,
    /// Only the holder can release.
    OwnerCheck,
    /// An acquire is not executed later than `request_ttl` after it was sent.
    ExpiredAcquiresRefused,
    /// An undo is not executed later than `request_ttl` after it was sent.
    ExpiredUndosRefused,
    /// Votes of a round do not count once the round was undone.
    UndoneIsVoid,
    /// A node receives no acquire while an undo without a reply may still be executed there.
    UndosAwaited,
    /// A node's renewals do not count while an undo without a reply may still be executed there.
    /// The node may still have the key of an earlier round, but not for long.
    UndosExcludeRenewals,
    /// A node that keeps the lock for readers grants it to no writer.
    ReadersExcludeWriters,
    /// A node that keeps the lock for a writer grants it to no reader.
    WritersExcludeReaders,
    /// A reader has the lock once a quorum keeps it.
    ReadersNeedQuorum,
    /// The release of a reader leaves the other readers.
    ReaderLeavesOthers,
    /// A node reports a token that is decided to a reader only that it keeps the lock for already.
    DecidedForMembersOnly,
    /// A writer relies on no more than a reader does from the moment at which it asks to become
    /// one.
    DowngradeEndsWriting,
    /// The lease of a writer that becomes a reader counts only what nodes have confirmed.
    DowngradeIsConfirmed,
    /// A node that is asked again to turn a writer into a reader keeps the reader for a whole ttl
    /// again.
    RepeatedDowngradeExtends,
}

type ModelProperty<const C: usize> = Property<Model<C>>;

const EXCLUSIVE: &str = "no two clients hold the lock at once, unless both are readers";
const QUORUM_KEYS: &str = "a valid lease has its key on a quorum";
const RISING: &str = "tokens rise";
const BOUNDED: &str = "no key outlives its limit";
const LIVE: &str = "every client gets the lock in the end";

impl<const C: usize> Model<C> {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken.contains(&rule)
    }

    /// What must always hold, and what must happen somewhere, because otherwise the exploration
    /// would show little.
    fn all_properties(&self) -> Vec<ModelProperty<C>> {
        let mut properties = vec![
            ModelProperty::<C>::always(EXCLUSIVE, |model, world| model.is_exclusive(world)),
            ModelProperty::<C>::always(QUORUM_KEYS, |model, world| model.has_quorum_keys(world)),
            ModelProperty::<C>::always(RISING, |_, world| !world.token_did_not_rise),
            ModelProperty::<C>::always(BOUNDED, |model, world| model.is_bounded(world)),
            ModelProperty::<C>::sometimes("a lock is acquired", |_, world| world.tokens_issued > 0),
        ];
        if usize::from(self.turns) * C > 1 {
            properties.push(ModelProperty::<C>::sometimes(
                "a lock is acquired after another",
                |_, world| world.tokens_issued > 1,
            ));
        }
        if self.horizon >= self.ttl {
            properties.push(ModelProperty::<C>::sometimes("a lock is lost", |model, world| {
                model.has_lost(world)
            }));
        }
        if self.kinds.iter().filter(|kind| **kind == Kind::Read).count() > 1 {
            properties.push(ModelProperty::<C>::sometimes("readers share", |model, world| {
                model.holders(world).count() > 1
            }));
        }
        if self.downgrades {
            properties
                .push(ModelProperty::<C>::sometimes("a writer became a reader", |model, world| {
                    model.holders(world).any(|client| has_downgraded(world, client))
                }));
        }
        if self.renewals > 0 {
            properties.push(ModelProperty::<C>::sometimes("a lock is renewed", |model, world| {
                model.has_renewed(world)
            }));
            properties.push(ModelProperty::<C>::sometimes(
                "a lock is reacquired on a node",
                |model, world| model.has_reacquired(world),
            ));
        }
        if self.faults.restarts > 0 && self.horizon >= self.ttl {
            properties.push(ModelProperty::<C>::sometimes(
                "a node votes after its quarantine",
                |_, world| world.columns.iter().any(|column| votes_again(column, world.now)),
            ));
        }
        if self.liveness_from.is_some() {
            properties.push(ModelProperty::<C>::always(LIVE, |model, world| {
                model.liveness_from != Some(world.now) || model.is_live(world)
            }));
        }
        properties
    }

    fn has_readers(&self) -> bool {
        self.downgrades || self.kinds.contains(&Kind::Read)
    }

    fn holders(&self, world: &World<C>) -> impl Iterator<Item = usize> {
        (0..C).filter(|client| self.is_holding(world, *client))
    }

    fn is_exclusive(&self, world: &World<C>) -> bool {
        self.holders(world).count() <= 1
            || !self.holders(world).any(|client| self.is_alone(world, client))
    }

    /// Each client with a valid lease has votes from a quorum of nodes that have its key, or have
    /// lost it and do not vote.
    fn has_quorum_keys(&self, world: &World<C>) -> bool {
        self.holders(world).all(|client| {
            let id = Id { client: client as u8, turn: world.clients[client].turn };
            let counts = |column: &&Column<C>| {
                let Column { node, views } = column;
                views[client].vote.is_some()
                    && !views[client].excluded
                    && (is_of(node, id) || node.is_quarantined(world.now))
            };
            world.columns.iter().filter(counts).count() >= quorum(NODES)
        })
    }

    /// Each key expires within a ttl after the last request for it could be executed.
    fn is_bounded(&self, world: &World<C>) -> bool {
        // A writer asks at most twice to become a reader.
        let extensions = self.renewals + if self.downgrades { 2 } else { 0 };
        let late = if self.renewals_expire { 0 } else { extensions * self.ttl };
        let nodes = world.columns.iter().map(|column| &column.node);
        nodes.flat_map(|node| node.key.iter().chain(&node.members)).all(|key| {
            let sent =
                world.clients[usize::from(key.id.client)].last_sent[usize::from(key.id.turn)];
            key.by_grant
                || sent.is_some_and(|sent| key.until <= sent + self.request_ttl + self.ttl + late)
        })
    }

    /// A client holds a lock that it has lost.
    fn has_lost(&self, world: &World<C>) -> bool {
        let holds = |client: &usize| matches!(world.clients[*client].phase, Phase::Holding { .. });
        (0..C).filter(holds).any(|client| !self.is_holding(world, client))
    }

    /// A client's lease is valid because a quorum renewed it.
    fn has_renewed(&self, world: &World<C>) -> bool {
        self.holders(world).any(|client| {
            let renewed = |column: &&Column<C>| {
                column.views[client].vote.is_some() && column.views[client].renewed
            };
            world.columns.iter().filter(renewed).count() >= quorum(NODES)
        })
    }

    /// A client's lease is valid, and a node that had lost its key has it again.
    fn has_reacquired(&self, world: &World<C>) -> bool {
        self.holders(world).any(|client| {
            world.columns.iter().any(|column| {
                column.views[client].vote.is_some() && column.views[client].proposed > 0
            })
        })
    }
}

fn has_downgraded<const C: usize>(world: &World<C>, client: usize) -> bool {
    let known = &world.clients[client];
    known.kind != known.has && matches!(known.phase, Phase::Holding { .. })
}

fn votes_again<const C: usize>(column: &Column<C>, now: Tick) -> bool {
    let Column { node, views } = column;
    node.votes_from.is_some()
        && !node.is_quarantined(now)
        && views.iter().any(|view| view.vote == Some(now))
}
