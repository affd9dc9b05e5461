//! A model of groups on one server, checked exhaustively: writers that can become readers, readers,
//! and holders of permits. Each has one turn. Leases expire, requests and grant messages are late,
//! replies are lost, and waiters leave the queue or die. Holders may leave the lock to a successor.
//!
//! Bounds: one to three ticks, a ttl of two, and at most one renewal of each client, one poll, and
//! one fault.
//!
//! `server.rs` follows the scripts in `lua/group/`. Each rule of theirs can be broken, which shows
//! that the check detects it.

mod client;
mod passing;
mod server;

use stateright::Property;

use self::{
    client::{Client, Phase, Step},
    server::Server,
};
use super::check::{Breakable, assert_holds, assert_violated};

type Tick = u8;

const CLIENTS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Write,
    Read,
    Permits { limit: u8, count: u8 },
}

impl Kind {
    /// Whether both can have the lock at the same time, if there are enough permits.
    fn is_shared_with(self, other: Kind) -> bool {
        matches!(
            (self, other),
            (Kind::Read, Kind::Read) | (Kind::Permits { .. }, Kind::Permits { .. })
        )
    }

    fn permits(self) -> u8 {
        if let Kind::Permits { count, .. } = self { count } else { 1 }
    }
}

/// The rules of the scripts and of the clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// Nobody passes a waiter that is alive.
    WaitersComeFirst,
    /// Members are counted before one is added.
    MembersAreCounted,
    /// A member does not count once it has expired.
    ExpiredDoNotCount,
    /// The lock key expires with the member that expires last.
    LastMemberSetsExpiry,
    /// Nobody joins a group whose members are lost.
    LostMembersExclude,
    /// A release ends the caller's own hold only.
    ReleaseChecksHolder,
    /// A member that asks again gets a new token.
    RepeatedRequestGetsToken,
    /// A waiter that leaves the queue lets those behind it in.
    LeavingAdvances,
    /// A dead waiter at the head of the queue is removed.
    DeadAreRemoved,
    /// A downgrade leaves no moment in which the lock is free.
    DowngradeHasNoGap,
    /// The time of a grant counts from the grant, not from when its message is read.
    GrantCountsFromGrant,
    /// A holder that has detached its lock does not have it any more.
    DetachEndsLease,
    /// An adopted lock has the id of the successor. So what its former holder sent arrives without
    /// effect, and nobody else can adopt it.
    AdoptionChangesId,
    /// A successor replaces the former member of a group.
    AdoptionReplacesMember,
    /// A lock is adopted only if the former holder has it.
    AdoptionChecksHolder,
    /// An adopted lock is kept for a whole ttl.
    AdoptionSetsExpiry,
    /// A successor gets a new token.
    AdoptionGetsToken,
    /// The lease of a successor counts from when its request was sent.
    AdoptionCountsFromSent,
}

#[derive(Clone, Debug)]
struct Model {
    kinds: [Kind; CLIENTS],
    horizon: Tick,
    ttl: Tick,
    /// How long a waiter keeps the lock that was granted to it, unless it renews it.
    claim_window: Tick,
    /// Maximum number of polls and of renewals of each client.
    polls: u8,
    renewals: u8,
    /// Whether waiters may leave the queue.
    give_up: bool,
    /// Whether holders may leave the lock to a successor.
    passing: bool,
    /// Faults that may occur.
    faults: Faults,
    broken: &'static [Rule],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Faults {
    deaths: u8,
    lost_replies: u8,
    lost_members: u8,
    /// Late releases under the id of a former holder.
    clean_ups: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    now: Tick,
    server: Server,
    clients: [Client; CLIENTS],
    faults: Faults,
    /// Whether a token was not larger than one that had been used when it was requested, or equal
    /// to that of another client.
    token_did_not_rise: bool,
    /// Whether a client was granted the lock before one that was alive and ahead in the queue.
    has_passed: bool,
    /// Whether a request was served that left a waiter, although it was the first that was alive,
    /// and fitted.
    has_forgotten: bool,
}

impl World {
    fn has_adopter(&self, is_like: impl Fn(&Client) -> bool) -> bool {
        self.clients.iter().any(|client| client.former.is_some() && is_like(client))
    }

    fn holder_count(&self, is_counted: fn(Kind) -> bool) -> usize {
        let held = self.clients.iter().filter_map(|client| client.held_as(self.now));
        held.filter(|kind| is_counted(*kind)).count()
    }
}

const EXCLUSIVE: &str = "nobody holds beside a writer, and no more permits than the limit";
const RISING: &str = "tokens rise";
const ORDERED: &str = "nobody passes a waiter";
const REMEMBERED: &str = "no request leaves a waiter that fits";
const LIVE: &str = "every waiter is served in the end";

impl Model {
    fn breaks(&self, rule: Rule) -> bool {
        self.broken.contains(&rule)
    }

    fn is_exclusive(&self, world: &World) -> bool {
        let holders = || world.clients.iter().filter_map(|client| client.held_as(world.now));
        let pairs_fit = holders()
            .enumerate()
            .all(|(index, one)| holders().skip(index + 1).all(|other| one.is_shared_with(other)));
        let limits = holders().filter_map(|kind| match kind {
            Kind::Permits { limit, .. } => Some(limit),
            _ => None,
        });
        let held: u8 = holders().map(Kind::permits).sum();
        pairs_fit && limits.max().is_none_or(|limit| held <= limit)
    }

    /// Whether all waiters get the lock from here on, if nothing fails any more, waiters poll, and
    /// holders release what they have.
    fn is_live(&self, world: &World) -> bool {
        let fault_free = Model { broken: &[], ..self.clone() };
        let mut world = world.clone();
        for _ in 0..self.ttl * 2 + 2 * CLIENTS as u8 {
            for client in 0..CLIENTS {
                let steps = [
                    Step::Arrive(client),
                    Step::ReadGrant(client),
                    Step::Release(client),
                    Step::Arrive(client),
                    Step::Poll(client),
                    Step::Arrive(client),
                ];
                for step in steps {
                    if fault_free.is_possible(&world, step) {
                        fault_free.play(&mut world, step);
                    }
                }
            }
            fault_free.play(&mut world, Step::Tick);
        }
        world.clients.iter().all(|client| client.phase != Phase::Waiting)
    }
}

impl stateright::Model for Model {
    type State = Box<World>;
    type Action = Step;

    fn init_states(&self) -> Vec<Box<World>> {
        vec![Box::new(World {
            now: 0,
            server: Server::default(),
            clients: self.kinds.map(|kind| Client::new(kind, self.polls, self.renewals)),
            faults: self.faults,
            token_did_not_rise: false,
            has_passed: false,
            has_forgotten: false,
        })]
    }

    fn actions(&self, world: &Box<World>, steps: &mut Vec<Step>) {
        let all = (0..CLIENTS).flat_map(Step::of_client).chain([Step::Tick, Step::LoseMembers]);
        steps.extend(all.filter(|step| self.is_possible(world, *step)));
    }

    fn next_state(&self, world: &Box<World>, step: Step) -> Option<Box<World>> {
        let mut next = world.clone();
        self.play(&mut next, step);
        next.normalize();
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Model>> {
        let mut properties = vec![
            Property::<Model>::always(EXCLUSIVE, |model, world| model.is_exclusive(world)),
            Property::<Model>::always(RISING, |_, world| !world.token_did_not_rise),
            Property::<Model>::always(ORDERED, |_, world| !world.has_passed),
            Property::<Model>::always(REMEMBERED, |_, world| !world.has_forgotten),
            Property::<Model>::always(LIVE, |model, world| {
                world.now < model.horizon || model.is_live(world)
            }),
            Property::<Model>::sometimes("a message grants the lock", |_, world| {
                world.clients.iter().any(|client| client.grant.is_some())
            }),
        ];
        if self.passing {
            properties.extend([
                Property::<Model>::sometimes("a lock is adopted", |_, world| {
                    world.has_adopter(|client| client.held_as(world.now).is_some())
                }),
                Property::<Model>::sometimes("an adoption is refused", |_, world| {
                    world.has_adopter(|client| client.phase == Phase::Done && client.token == 0)
                }),
            ]);
        }
        if self.kinds.iter().filter(|kind| **kind == Kind::Read).count() > 1 {
            properties.push(Property::<Model>::sometimes("two readers hold", |_, world| {
                world.holder_count(|kind| kind == Kind::Read) > 1
            }));
        }
        if self.kinds.contains(&Kind::Write) {
            properties.push(Property::<Model>::sometimes(
                "a writer became a reader",
                |_, world| {
                    world.clients.iter().any(|client| {
                        client.kind == Kind::Write && client.held_as(world.now) == Some(Kind::Read)
                    })
                },
            ));
        } else if self.kinds != [THE_ONLY_ONE; CLIENTS] {
            properties.push(Property::<Model>::sometimes("two have permits", |_, world| {
                world.holder_count(|_| true) > 1
            }));
        }
        properties
    }
}

const NO_FAULTS: Faults = Faults { deaths: 0, lost_replies: 0, lost_members: 0, clean_ups: 0 };

const READERS: Model = Model {
    kinds: [Kind::Write, Kind::Read, Kind::Read],
    horizon: 3,
    ttl: 2,
    claim_window: 1,
    polls: 0,
    renewals: 0,
    give_up: false,
    passing: false,
    faults: NO_FAULTS,
    broken: &[],
};

const WRITERS: Model = Model { kinds: [Kind::Write, Kind::Write, Kind::Read], ..READERS };

const ONE_OF_TWO: Kind = Kind::Permits { limit: 2, count: 1 };
const PERMITS: Model = Model { kinds: [ONE_OF_TWO; CLIENTS], ..READERS };

const DEATH: Faults = Faults { deaths: 1, ..NO_FAULTS };
const LOST_REPLY: Model =
    Model { horizon: 1, polls: 1, faults: Faults { lost_replies: 1, ..NO_FAULTS }, ..READERS };
/// Two of the three may adopt what one of them has detached.
const PASSED_ON: Model =
    Model { kinds: [Kind::Write; CLIENTS], horizon: 2, passing: true, ..READERS };
const THE_ONLY_ONE: Kind = Kind::Permits { limit: 1, count: 1 };
const CLEAN_UP: Faults = Faults { clean_ups: 1, ..NO_FAULTS };
const LOST_MEMBERS: Model = Model { faults: Faults { lost_members: 1, ..NO_FAULTS }, ..PERMITS };

impl Breakable for Model {
    type Rule = Rule;

    fn with_broken(&self, broken: &'static [Rule]) -> Model {
        Model { broken, ..self.clone() }
    }
}

#[test]
fn readers_and_a_writer_break_no_property() {
    assert_holds(READERS, 50_000);
    assert_holds(Model { horizon: 2, renewals: 1, ..READERS }, 80_000);
}

#[test]
fn two_writers_and_a_reader_break_no_property() {
    assert_holds(WRITERS, 60_000);
}

#[test]
fn members_that_give_up_or_fail_break_no_property() {
    let readers = Model { horizon: 2, ..READERS };
    assert_holds(Model { give_up: true, ..readers.clone() }, 70_000);
    assert_holds(Model { faults: DEATH, ..readers }, 50_000);
    assert_holds(LOST_REPLY, 40_000);
}

#[test]
fn permits_break_no_property() {
    assert_holds(PERMITS, 20_000);
    assert_holds(LOST_MEMBERS, 10_000);
    // The third needs all permits. The limit of the first is higher.
    let two = Kind::Permits { limit: 2, count: 2 };
    let three = Kind::Permits { limit: 3, count: 1 };
    assert_holds(Model { kinds: [three, ONE_OF_TWO, two], ..PERMITS }, 20_000);
}

#[test]
fn each_rule_of_readers_and_writers_is_needed() {
    assert_violated(&READERS, &[Rule::WaitersComeFirst], ORDERED);
    assert_violated(&READERS, &[Rule::ReleaseChecksHolder], EXCLUSIVE);
    assert_violated(&READERS, &[Rule::GrantCountsFromGrant], EXCLUSIVE);
    assert_violated(&WRITERS, &[Rule::DowngradeHasNoGap], EXCLUSIVE);
    // The reader that the downgrade admits has a shorter time.
    assert_violated(&WRITERS, &[Rule::LastMemberSetsExpiry], EXCLUSIVE);
    let leaves = Model { give_up: true, ..READERS };
    assert_violated(&leaves, &[Rule::LeavingAdvances], REMEMBERED);
    assert_violated(&Model { faults: DEATH, ..READERS }, &[Rule::DeadAreRemoved], REMEMBERED);
    assert_violated(&LOST_REPLY, &[Rule::RepeatedRequestGetsToken], RISING);
}

#[test]
fn each_rule_of_permits_is_needed() {
    assert_violated(&PERMITS, &[Rule::MembersAreCounted], EXCLUSIVE);
    assert_violated(&PERMITS, &[Rule::ExpiredDoNotCount], REMEMBERED);
    assert_violated(&LOST_MEMBERS, &[Rule::LostMembersExclude], EXCLUSIVE);
}

#[test]
fn locks_that_pass_on_break_no_property() {
    assert_holds(PASSED_ON, 40_000);
    assert_holds(Model { kinds: READERS.kinds, ..PASSED_ON }, 40_000);
    assert_holds(Model { kinds: [THE_ONLY_ONE; CLIENTS], ..PASSED_ON }, 20_000);
}

#[test]
fn late_requests_around_an_adoption_break_no_property() {
    let short = Model { horizon: 1, ..PASSED_ON };
    assert_holds(Model { renewals: 1, ..short.clone() }, 30_000);
    assert_holds(Model { polls: 1, faults: LOST_REPLY.faults, ..short.clone() }, 60_000);
    assert_holds(Model { faults: CLEAN_UP, ..short.clone() }, 40_000);
    let readers = Model { kinds: READERS.kinds, faults: CLEAN_UP, ..short };
    assert_holds(readers.clone(), 40_000);
    assert_violated(&readers, &[Rule::AdoptionChangesId], EXCLUSIVE);
}

#[test]
fn each_rule_of_adoptions_is_needed() {
    assert_violated(&PASSED_ON, &[Rule::DetachEndsLease], EXCLUSIVE);
    assert_violated(&PASSED_ON, &[Rule::AdoptionChangesId], EXCLUSIVE);
    assert_violated(&PASSED_ON, &[Rule::AdoptionChecksHolder], EXCLUSIVE);
    assert_violated(&PASSED_ON, &[Rule::AdoptionSetsExpiry], EXCLUSIVE);
    assert_violated(&PASSED_ON, &[Rule::AdoptionCountsFromSent], EXCLUSIVE);
    assert_violated(&PASSED_ON, &[Rule::AdoptionGetsToken], RISING);
    let permits = Model { kinds: [THE_ONLY_ONE; CLIENTS], ..PASSED_ON };
    assert_violated(&permits, &[Rule::AdoptionReplacesMember], EXCLUSIVE);
}
