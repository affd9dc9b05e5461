//! What the server does with a request, as the scripts in `lua/group/` do.

use super::{Kind, Model, Rule, Tick, World};

/// What the lock key contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    Alone(u8),
    /// A group of this kind, whose count does not matter.
    Group(Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Member {
    pub(super) id: u8,
    pub(super) permits: u8,
    pub(super) until: Tick,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Server {
    pub(super) lock: Option<(Owner, Tick)>,
    /// Sorted by id.
    pub(super) members: Vec<Member>,
    pub(super) queue: Vec<u8>,
    /// The last token.
    pub(super) token: u8,
}

/// How an acquire treats the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mode {
    Join,
    Look,
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RequestKind {
    Acquire(Mode),
    Renew,
    Downgrade,
    Release,
    /// Of the lock of this client.
    Adopt(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Reply {
    Held(u8),
    Queued,
    Busy,
    Renewed,
    Gone,
    Released,
}

impl Model {
    pub(super) fn serve(&self, world: &mut World, id: u8, request: RequestKind) -> Reply {
        let reply = match request {
            RequestKind::Acquire(mode) => self.acquire(world, id, mode),
            RequestKind::Renew => return self.renew(world, id),
            RequestKind::Adopt(former) => return self.adopt(world, id, former),
            RequestKind::Downgrade => self.downgrade(world, id),
            RequestKind::Release => self.release(world, id),
        };
        if reply == Reply::Gone {
            // It has no effect. Where a lock has expired, the waiters find that out by polling.
            return reply;
        }
        // The caller was alive, as far as the server can know.
        let mut waiting = world.server.queue.iter().copied();
        let alive = waiting.find(|waiter| *waiter == id || is_alive(world, *waiter));
        world.has_forgotten |= alive.is_some_and(|first| {
            // As it should be, whatever is broken.
            Model { broken: &[], ..self.clone() }.fits(world, self.kind_of(first))
        });
        reply
    }

    fn acquire(&self, world: &mut World, id: u8, mode: Mode) -> Reply {
        let (kind, now) = (self.kind_of(id), world.now);
        let own = (mode != Mode::Join).then_some(id);
        if let Some(until) = member_until(world, id, now) {
            world.server.queue.retain(|waiting| *waiting != id);
            let token = if self.breaks(Rule::RepeatedRequestGetsToken) {
                world.server.token
            } else {
                next_token(world)
            };
            if until < now + self.ttl {
                self.add_member(world, id, kind, self.ttl);
            }
            self.grant_next(world, None);
            return Reply::Held(token);
        }
        let has_waiters = !world.server.queue.is_empty();
        if has_waiters
            && !matches!(world.server.lock, Some((Owner::Alone(_), _)))
            && let Some(token) = self.grant_next(world, own)
        {
            return Reply::Held(token);
        }
        let is_turn = world.server.queue.is_empty()
            || world.server.lock.is_none()
            || self.breaks(Rule::WaitersComeFirst);
        if is_turn && self.fits(world, kind) {
            let ahead = world.server.queue.iter().take_while(|waiting| **waiting != id);
            world.has_passed |= ahead.copied().any(|waiting| is_alive(world, waiting));
            world.server.queue.retain(|waiting| *waiting != id);
            self.give(world, id, kind, self.ttl);
            return Reply::Held(world.server.token);
        }
        if let Some((Owner::Alone(holder), until)) = &mut world.server.lock
            && *holder == id
        {
            *until = (*until).max(now + self.ttl);
            return Reply::Held(world.server.token);
        }
        let is_queued = world.server.queue.contains(&id);
        if mode != Mode::Leave {
            if !is_queued {
                world.server.queue.push(id);
            }
            return Reply::Queued;
        }
        world.server.queue.retain(|waiting| *waiting != id);
        if is_queued
            && matches!(world.server.lock, Some((Owner::Group(_), _)))
            && !self.breaks(Rule::LeavingAdvances)
        {
            self.grant_next(world, None);
        }
        Reply::Busy
    }

    fn renew(&self, world: &mut World, id: u8) -> Reply {
        let now = world.now;
        if let Some((Owner::Alone(holder), until)) = &mut world.server.lock
            && *holder == id
        {
            *until = (*until).max(now + self.ttl);
        } else if member_until(world, id, now).is_some() {
            let permits = self.kind_of(id);
            let kind = if permits == Kind::Write { Kind::Read } else { permits };
            self.add_member(world, id, kind, self.ttl);
        } else {
            return Reply::Gone;
        }
        Reply::Renewed
    }

    fn downgrade(&self, world: &mut World, id: u8) -> Reply {
        if !matches!(world.server.lock, Some((Owner::Alone(holder), _)) if holder == id) {
            let is_member = member_until(world, id, world.now).is_some();
            return if is_member { Reply::Renewed } else { Reply::Gone };
        }
        world.server.lock = None;
        if self.breaks(Rule::DowngradeHasNoGap) {
            self.grant_next(world, None);
        }
        if self.fits(world, Kind::Read) {
            self.add_member(world, id, Kind::Read, self.ttl);
        }
        self.grant_next(world, None);
        Reply::Renewed
    }

    fn release(&self, world: &mut World, id: u8) -> Reply {
        let now = world.now;
        world.server.queue.retain(|waiting| *waiting != id);
        let is_member = member_until(world, id, now).is_some();
        match world.server.lock {
            Some((Owner::Alone(holder), _)) if holder == id => world.server.lock = None,
            Some(_) if self.breaks(Rule::ReleaseChecksHolder) => world.server.lock = None,
            Some((Owner::Group(group), _)) if is_member => {
                world.server.members.retain(|member| member.id != id && now < member.until);
                let last = world.server.members.iter().map(|member| member.until).max();
                world.server.lock = last.map(|last| (Owner::Group(group), last));
            }
            _ => {}
        }
        if !matches!(world.server.lock, Some((Owner::Alone(_), _))) {
            self.grant_next(world, None);
        }
        Reply::Released
    }

    /// Grants what is free to the first waiters, as long as they fit. Returns the token of `own`,
    /// which needs no message.
    fn grant_next(&self, world: &mut World, own: Option<u8>) -> Option<u8> {
        let mut own_token = None;
        while let Some(head) = world.server.queue.first().copied() {
            if Some(head) != own && !is_alive(world, head) {
                if self.breaks(Rule::DeadAreRemoved) {
                    break;
                }
                world.server.queue.remove(0);
                continue;
            }
            let kind = self.kind_of(head);
            if !self.fits(world, kind) {
                break;
            }
            world.server.queue.remove(0);
            let time = if Some(head) == own { self.ttl } else { self.claim_window };
            self.give(world, head, kind, time);
            let token = world.server.token;
            if Some(head) == own {
                own_token = Some(token);
            } else {
                world.clients[usize::from(head)].grant = Some((token, world.now));
            }
        }
        own_token
    }

    fn fits(&self, world: &World, kind: Kind) -> bool {
        let group = match world.server.lock {
            None => return true,
            Some((Owner::Alone(_), _)) => return false,
            Some((Owner::Group(group), _)) => group,
        };
        let counts = |until: Tick| world.now < until || self.breaks(Rule::ExpiredDoNotCount);
        let members = world.server.members.iter().filter(|member| counts(member.until));
        let size: u8 = members.map(|member| member.permits).sum();
        let is_known = size > 0 || self.breaks(Rule::LostMembersExclude);
        let has_place = match kind {
            Kind::Permits { limit, count } => {
                size + count <= limit || self.breaks(Rule::MembersAreCounted)
            }
            _ => true,
        };
        group.is_shared_with(kind) && is_known && has_place
    }

    fn give(&self, world: &mut World, id: u8, kind: Kind, time: Tick) {
        next_token(world);
        if kind == Kind::Write {
            world.server.lock = Some((Owner::Alone(id), world.now + time));
        } else {
            self.add_member(world, id, kind, time);
        }
    }

    pub(super) fn add_member(&self, world: &mut World, id: u8, kind: Kind, time: Tick) {
        let until = world.now + time;
        if world.server.lock.is_none() {
            world.server.members.clear();
        }
        let before = world.server.members.iter().find(|member| member.id == id);
        let until = before.map_or(until, |member| until.max(member.until));
        let members = &mut world.server.members;
        members.retain(|member| member.id != id);
        members.push(Member { id, permits: kind.permits(), until });
        members.sort_unstable_by_key(|member| member.id);
        let last = members.iter().map(|member| member.until).max().unwrap_or(until);
        let last = if self.breaks(Rule::LastMemberSetsExpiry) { until } else { last };
        // Lost members may expire later than those that are known.
        let last = match world.server.lock {
            Some((_, kept)) if !self.breaks(Rule::LastMemberSetsExpiry) => kept.max(last),
            _ => last,
        };
        world.server.lock = Some((Owner::Group(kind), last));
    }

    pub(super) fn kind_of(&self, id: u8) -> Kind {
        self.kinds[usize::from(id)]
    }

    /// Lets keys and members expire.
    pub(super) fn age(&self, world: &mut World) {
        let (now, server) = (world.now, &mut world.server);
        if server.lock.is_some_and(|(_, until)| until <= now) {
            server.lock = None;
        }
        match server.lock {
            Some((Owner::Group(_), _)) if self.breaks(Rule::ExpiredDoNotCount) => {}
            Some((Owner::Group(_), _)) => server.members.retain(|member| now < member.until),
            _ => server.members.clear(),
        }
    }
}

pub(super) fn next_token(world: &mut World) -> u8 {
    world.server.token += 1;
    world.server.token
}

/// When this member of the group expires, if it has not.
pub(super) fn member_until(world: &World, id: u8, now: Tick) -> Option<Tick> {
    let is_group = matches!(world.server.lock, Some((Owner::Group(_), _)));
    let member = world.server.members.iter().find(|member| member.id == id && now < member.until);
    member.filter(|_| is_group).map(|member| member.until)
}

/// Whether a waiter would receive a message.
fn is_alive(world: &World, id: u8) -> bool {
    world.clients[usize::from(id)].has_subscription()
}
