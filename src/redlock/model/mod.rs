//! An exhaustive check of what a quorum of nodes promises: every order of events, up to a number of
//! ticks and faults.
//!
//! Nodes, clients and the messages between them are modelled; verdicts, tokens, votes and deadlines
//! are counted by the code that counts them in earnest. Each rule of the protocol can be broken, to
//! see that the check would notice.

mod calm;
mod checks;
mod client;
mod node;
mod steps;
mod tidy;
mod world;

use stateright::Property;

use self::{
    node::is_of,
    world::{Column, Faults, Id, NODES, Stage, Tick, World},
};
use super::quorum::quorum;

/// What is explored: how long, how much, and which faults.
#[derive(Clone, Debug)]
struct Model<const C: usize> {
    /// Time ends here.
    horizon: Tick,
    ttl: Tick,
    /// For how long a waiter that was handed the key has it.
    claim: Tick,
    /// For how long a request may be carried out after it was sent.
    patience: Tick,
    /// How often each client takes the lock, how often it asks for it each time, and how often it
    /// renews it.
    turns: u8,
    rounds: u8,
    renewals: u8,
    /// Renewals are refused when they are late, like what else is asked for. They are not in
    /// earnest: a late one can do no more than to keep others waiting for another time to
    /// live.
    renewals_expire: bool,
    faults: Faults,
    /// How many messages may be under way while time passes, not counting those on connections
    /// that were given up.
    late_max: usize,
    /// Answers may be read later than they are given.
    slow: bool,
    /// The first node keeps a line.
    line: bool,
    /// By how much the nodes' wall clocks are wrong, in units of those clocks.
    skew: [u8; NODES],
    /// How far the first proposal of a client may lie ahead of the fastest node's clock; `None`:
    /// it proposes nothing.
    lead: Option<u8>,
    /// When faults end, and it is checked that everybody gets the lock in the end.
    calm_from: Option<Tick>,
    broken: &'static [Rule],
}

/// What the promises rest on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A node that came back empty does not vote before every key that it may have lost has
    /// expired.
    Quarantine,
    /// Nor does what it was asked before that count, when it answers after it.
    AskedAfterQuarantine,
    /// A token is handed out when a quorum has stored it.
    SecondPhase,
    /// A token is not below the clock of the node that gives it.
    ClockInTokens,
    /// A deadline is counted from when the request was sent.
    DeadlineFromSent,
    /// Belief ends before the key, by as much as a node's clock may run ahead.
    Margin,
    /// A renewal whose answer is unknown moves nothing.
    UnknownIsNoYes,
    /// Who releases must hold.
    OwnerCheck,
    /// An acquire does nothing after `patience`.
    LateAcquiresRefused,
    /// Nor does an undo.
    LateUndosRefused,
    /// What a round has won does not count after that round has taken it back.
    UndoneIsVoid,
    /// A node is not asked again while an undo whose answer was lost may still be carried out
    /// there.
    UndosWaitedFor,
    /// Nor is it asked for a renewal: the key of an earlier round may still stand there, but not
    /// for long.
    UndosBarRenewals,
}

type Promise<const C: usize> = Property<Model<C>>;

const ALONE: &str = "no two clients believe at once";
const BACKED: &str = "belief is backed by keys";
const RISING: &str = "tokens rise";
const BOUNDED: &str = "no key outlives its time";
const CALM: &str = "everybody gets the lock in the end";

impl<const C: usize> Model<C> {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken.contains(&rule)
    }

    /// What must always hold, and what must happen somewhere, or else the exploration shows little.
    fn promises(&self) -> Vec<Promise<C>> {
        let mut promises = vec![
            Promise::<C>::always(ALONE, |model, world| model.believers(world) <= 1),
            Promise::<C>::always(BACKED, |model, world| model.is_backed(world)),
            Promise::<C>::always(RISING, |_, world| !world.token_fell),
            Promise::<C>::always(BOUNDED, |model, world| model.is_bounded(world)),
            Promise::<C>::sometimes("a lock is taken", |_, world| world.handed_out > 0),
        ];
        if usize::from(self.turns) * C > 1 {
            promises.push(Promise::<C>::sometimes("a lock is taken after another", |_, world| {
                world.handed_out > 1
            }));
        }
        if self.horizon >= self.ttl {
            promises.push(Promise::<C>::sometimes("a lock is lost", |model, world| {
                model.has_lost(world)
            }));
        }
        if self.renewals > 0 {
            promises.push(Promise::<C>::sometimes("a lock is renewed", |model, world| {
                model.has_renewed(world)
            }));
            promises.push(Promise::<C>::sometimes("a lock is taken anew", |model, world| {
                model.has_mended(world)
            }));
        }
        if self.faults.restarts > 0 && self.horizon >= self.ttl {
            promises
                .push(Promise::<C>::sometimes("a node votes after its quarantine", |_, world| {
                    world.columns.iter().any(|column| votes_again(column, world.now))
                }));
        }
        if self.calm_from.is_some() {
            promises.push(Promise::<C>::always(CALM, |model, world| {
                model.calm_from != Some(world.now) || model.ends_well(world)
            }));
        }
        promises
    }

    fn believers(&self, world: &World<C>) -> usize {
        (0..C).filter(|client| self.believes(world, *client)).count()
    }

    /// Every believer's key stands on a quorum of the nodes, counting those that have forgotten it
    /// and do not vote.
    fn is_backed(&self, world: &World<C>) -> bool {
        (0..C).filter(|client| self.believes(world, *client)).all(|client| {
            let id = Id { client: client as u8, turn: world.clients[client].turn };
            let stands = |column: &&Column<C>| {
                let Column { node, seats } = column;
                seats[client].vote.is_some()
                    && !seats[client].barred
                    && (is_of(node, id) || node.is_quarantined(world.now))
            };
            world.columns.iter().filter(stands).count() >= quorum(NODES)
        })
    }

    /// No key stands for longer than a time to live after the last request for it had to arrive.
    fn is_bounded(&self, world: &World<C>) -> bool {
        let late = if self.renewals_expire { 0 } else { self.renewals * self.ttl };
        world.columns.iter().filter_map(|column| column.node.key.as_ref()).all(|key| {
            let sent =
                world.clients[usize::from(key.id.client)].last_sent[usize::from(key.id.turn)];
            key.handed
                || sent.is_some_and(|sent| key.until <= sent + self.patience + self.ttl + late)
        })
    }

    /// Somebody has to find out that it has lost the lock.
    fn has_lost(&self, world: &World<C>) -> bool {
        let holds = |client: &usize| matches!(world.clients[*client].stage, Stage::Holding { .. });
        (0..C).filter(holds).any(|client| !self.believes(world, client))
    }

    /// Somebody believes because a quorum has renewed.
    fn has_renewed(&self, world: &World<C>) -> bool {
        (0..C).filter(|client| self.believes(world, *client)).any(|client| {
            let renewed = |column: &&Column<C>| {
                column.seats[client].vote.is_some() && column.seats[client].renewed
            };
            world.columns.iter().filter(renewed).count() >= quorum(NODES)
        })
    }

    /// Somebody believes, and a node that did not keep the lock does so now.
    fn has_mended(&self, world: &World<C>) -> bool {
        (0..C).filter(|client| self.believes(world, *client)).any(|client| {
            world.columns.iter().any(|column| {
                column.seats[client].vote.is_some() && column.seats[client].proposed > 0
            })
        })
    }
}

fn votes_again<const C: usize>(column: &Column<C>, now: Tick) -> bool {
    let Column { node, seats } = column;
    node.votes_from.is_some()
        && !node.is_quarantined(now)
        && seats.iter().any(|seat| seat.vote == Some(now))
}
