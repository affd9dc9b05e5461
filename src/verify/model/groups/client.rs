//! What a client does: it asks, waits, holds, renews, turns into a reader, and releases.

use super::{
    CLIENTS, Kind, Model, Rule, Tick, World,
    server::{Mode, Reply, RequestKind},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Idle,
    /// Has asked, and is or soon will be in the queue.
    Waiting,
    /// Has the lock until that time, unless it renews it, and may have lost it without knowing.
    Holding {
        until: Tick,
        as_reader: bool,
    },
    /// Has asked for a lock that its holder has detached.
    Adopting,
    Done,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) sent: Tick,
    pub(super) kind: RequestKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Client {
    pub(super) kind: Kind,
    pub(super) phase: Phase,
    /// The request that has not been served yet.
    pub(super) request: Option<Request>,
    /// Token and time of a grant whose message has not been read. Of an adoption whose reply has
    /// not been read, the time at which it was sent.
    pub(super) grant: Option<(u8, Tick)>,
    pub(super) polls: u8,
    pub(super) renewals: u8,
    /// The token it has or had; zero if it never had one.
    pub(super) token: u8,
    /// The largest token that a client had when this one asked; zero if it does not wait.
    pub(super) floor: u8,
    /// What it has left to a successor.
    pub(super) detached: Option<Kind>,
    /// The client whose lock it adopts.
    pub(super) former: Option<u8>,
}

impl Client {
    pub(super) fn new(kind: Kind, polls: u8, renewals: u8) -> Client {
        Client {
            kind,
            phase: Phase::Idle,
            request: None,
            grant: None,
            polls,
            renewals,
            token: 0,
            floor: 0,
            detached: None,
            former: None,
        }
    }

    /// How it holds the lock, as far as it knows.
    pub(super) fn held_as(&self, now: Tick) -> Option<Kind> {
        match self.phase {
            Phase::Holding { until, as_reader } if now < until => {
                Some(if as_reader { Kind::Read } else { self.kind })
            }
            _ => None,
        }
    }

    /// Before it asks, it subscribes.
    pub(super) fn has_subscription(&self) -> bool {
        self.phase == Phase::Waiting
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Tick,
    /// The server loses the members of a group, but not the lock.
    LoseMembers,
    Ask(usize),
    /// A waiter asks again.
    Poll(usize),
    GiveUp(usize),
    ReadGrant(usize),
    Renew(usize),
    Downgrade(usize),
    Release(usize),
    Die(usize),
    /// A request is served, and its reply is read.
    Arrive(usize),
    /// A request is served, and its reply is lost.
    ArriveUnanswered(usize),
    Pass(usize, Pass),
}

/// Steps by which a lock passes to a successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Ends the lease, and leaves the lock on the server to a successor. A renewal may still be on
    /// its way.
    Detach,
    /// Asks for the lock that this client has detached, or asks again. Several clients may try.
    Adopt(u8),
    /// A request to adopt is served, and its reply is read later.
    Serve,
    Read,
    /// Releases what an adoption without a reply may have obtained.
    Abandon,
    /// Releases the lock under the id of its former holder, because a request was lost earlier.
    CleanUp,
}

impl Pass {
    pub(super) fn all() -> impl Iterator<Item = Pass> {
        let adoptions = (0..CLIENTS as u8).map(Pass::Adopt);
        [Pass::Detach, Pass::Serve, Pass::Read, Pass::Abandon, Pass::CleanUp]
            .into_iter()
            .chain(adoptions)
    }
}

impl Step {
    pub(super) fn of_client(client: usize) -> impl Iterator<Item = Step> {
        [
            Step::Ask(client),
            Step::Poll(client),
            Step::GiveUp(client),
            Step::ReadGrant(client),
            Step::Renew(client),
            Step::Downgrade(client),
            Step::Release(client),
            Step::Die(client),
            Step::Arrive(client),
            Step::ArriveUnanswered(client),
        ]
        .into_iter()
        .chain(Pass::all().map(move |pass| Step::Pass(client, pass)))
    }
}

impl Model {
    pub(super) fn is_possible(&self, world: &World, step: Step) -> bool {
        let is_quiet = |client: usize| world.clients[client].request.is_none();
        let is_waiting = |client: usize| world.clients[client].phase == Phase::Waiting;
        let holds = |client: usize| world.clients[client].held_as(world.now).is_some();
        match step {
            // Time starts with the first request.
            Step::Tick => {
                let has_begun = world.clients.iter().any(|client| client.phase != Phase::Idle);
                has_begun && world.now < self.horizon
            }
            Step::LoseMembers => world.faults.lost_members > 0 && !world.server.members.is_empty(),
            Step::Ask(client) => world.clients[client].phase == Phase::Idle,
            Step::Poll(client) => {
                // At the end of the exploration, it polls as often as it must.
                let may_poll = world.clients[client].polls > 0 || world.now >= self.horizon;
                is_waiting(client) && is_quiet(client) && may_poll
            }
            Step::GiveUp(client) => self.give_up && is_waiting(client) && is_quiet(client),
            Step::ReadGrant(client) => is_waiting(client) && world.clients[client].grant.is_some(),
            Step::Renew(client) => {
                holds(client) && is_quiet(client) && world.clients[client].renewals > 0
            }
            Step::Downgrade(client) => {
                world.clients[client].held_as(world.now) == Some(Kind::Write) && is_quiet(client)
            }
            // Also of a lock that it has lost: it may not know that.
            Step::Release(client) => {
                matches!(world.clients[client].phase, Phase::Holding { .. }) && is_quiet(client)
            }
            Step::Die(client) => {
                let can_die =
                    !matches!(world.clients[client].phase, Phase::Idle | Phase::Done | Phase::Dead);
                world.faults.deaths > 0 && can_die
            }
            Step::Arrive(client) => !is_quiet(client),
            Step::ArriveUnanswered(client) => world.faults.lost_replies > 0 && !is_quiet(client),
            Step::Pass(client, pass) => self.may_pass(world, client, pass),
        }
    }

    pub(super) fn play(&self, world: &mut World, step: Step) {
        let now = world.now;
        match step {
            Step::Tick => {
                world.now += 1;
                self.age(world);
            }
            Step::LoseMembers => {
                world.faults.lost_members -= 1;
                world.server.members.clear();
            }
            Step::Ask(client) => {
                let floor = world.largest_token();
                let known = &mut world.clients[client];
                (known.phase, known.floor) = (Phase::Waiting, floor);
                send(world, client, RequestKind::Acquire(Mode::Join));
            }
            Step::Poll(client) => {
                let polls = &mut world.clients[client].polls;
                *polls = polls.saturating_sub(1);
                send(world, client, RequestKind::Acquire(Mode::Look));
            }
            Step::GiveUp(client) => send(world, client, RequestKind::Acquire(Mode::Leave)),
            Step::ReadGrant(client) => {
                let from_arrival = self.breaks(Rule::GrantCountsFromGrant);
                if let Some((token, granted)) = world.clients[client].grant.take() {
                    let from = if from_arrival { now } else { granted };
                    if now < from + self.claim_window {
                        enter(world, client, from + self.claim_window, token);
                    }
                }
            }
            Step::Renew(client) => {
                world.clients[client].renewals -= 1;
                send(world, client, RequestKind::Renew);
            }
            Step::Downgrade(client) => {
                // From now on it relies on no more than a reader does.
                if let Phase::Holding { as_reader, .. } = &mut world.clients[client].phase {
                    *as_reader = true;
                }
                send(world, client, RequestKind::Downgrade);
            }
            Step::Release(client) => {
                world.clients[client].phase = Phase::Done;
                send(world, client, RequestKind::Release);
            }
            Step::Die(client) => {
                world.faults.deaths -= 1;
                world.clients[client].phase = Phase::Dead;
                world.clients[client].grant = None;
            }
            Step::Arrive(client) => self.arrive(world, client, true),
            Step::ArriveUnanswered(client) => {
                world.faults.lost_replies -= 1;
                self.arrive(world, client, false);
            }
            Step::Pass(client, pass) => self.pass(world, client, pass),
        }
    }

    fn arrive(&self, world: &mut World, client: usize, is_answered: bool) {
        let Some(request) = world.clients[client].request.take() else { return };
        let reply = self.serve(world, client as u8, request.kind);
        let deadline = request.sent + self.ttl;
        let now = world.now;
        let known = &mut world.clients[client];
        match (&mut known.phase, reply) {
            _ if !is_answered => {}
            (Phase::Waiting, Reply::Held(token)) => {
                known.grant = None;
                // A lease that has ended by now is released, as one that has ended later is.
                enter(world, client, deadline, token);
            }
            (Phase::Adopting, Reply::Held(token)) => enter(world, client, deadline, token),
            (Phase::Adopting, Reply::Gone) => known.phase = Phase::Done,
            (Phase::Waiting, Reply::Busy) => known.phase = Phase::Done,
            (Phase::Holding { until, .. }, Reply::Renewed) if now < *until => {
                *until = deadline.max(*until);
            }
            (Phase::Holding { until, .. }, Reply::Gone) => *until = now,
            _ => {}
        }
    }
}

pub(super) fn send(world: &mut World, client: usize, kind: RequestKind) {
    world.clients[client].request = Some(Request { sent: world.now, kind });
}

pub(super) fn enter(world: &mut World, client: usize, until: Tick, token: u8) {
    let is_repeated =
        (0..CLIENTS).any(|other| other != client && world.clients[other].token == token);
    let known = &mut world.clients[client];
    known.phase = Phase::Holding { until, as_reader: false };
    known.token = token;
    let floor = std::mem::take(&mut known.floor);
    world.token_did_not_rise |= is_repeated || token <= floor;
}

impl World {
    /// The largest token that a client has or had.
    pub(super) fn largest_token(&self) -> u8 {
        self.clients.iter().map(|client| client.token).max().unwrap_or(0)
    }

    /// Makes states equal that cannot differ in what follows.
    pub(super) fn normalize(&mut self) {
        let now = self.now;
        for client in &mut self.clients {
            if !matches!(client.phase, Phase::Idle | Phase::Waiting | Phase::Adopting) {
                (client.grant, client.polls, client.floor) = (None, 0, 0);
            }
            match &mut client.phase {
                Phase::Done | Phase::Dead => client.renewals = 0,
                Phase::Holding { until, .. } if *until <= now => (*until, client.renewals) = (0, 0),
                _ => {}
            }
        }
        // Only the order of tokens matters.
        let mut ranks = vec![0, self.server.token];
        for client in &self.clients {
            ranks.extend([client.token, client.floor, client.grant.map_or(0, |grant| grant.0)]);
        }
        ranks.sort_unstable();
        ranks.dedup();
        let rank = |token: &mut u8| *token = ranks.partition_point(|other| other < token) as u8;
        rank(&mut self.server.token);
        for client in &mut self.clients {
            [&mut client.token, &mut client.floor].into_iter().for_each(rank);
            client.grant.iter_mut().for_each(|grant| rank(&mut grant.0));
        }
    }
}
