//! Locks that pass to a successor: the holder detaches its lock, and another client adopts it, as
//! `lua/adopt.lua` does.

use super::{
    Model, Rule, World,
    client::{Pass, Phase, enter, send},
    server::{Owner, Reply, RequestKind, member_until, next_token},
};

impl Model {
    pub(super) fn may_pass(&self, world: &World, client: usize, pass: Pass) -> bool {
        let known = &world.clients[client];
        let is_quiet = known.request.is_none();
        self.passing
            && match pass {
                Pass::Detach => {
                    let renews =
                        known.request.is_some_and(|request| request.kind == RequestKind::Renew);
                    known.held_as(world.now).is_some()
                        && known.detached.is_none()
                        && (is_quiet || renews)
                }
                Pass::Adopt(former) => {
                    let passed = world.clients[usize::from(former)].detached;
                    let is_first = known.phase == Phase::Idle && passed == Some(known.kind);
                    let is_next = known.phase == Phase::Adopting
                        && known.former == Some(former)
                        && known.polls > 0;
                    is_first || is_next && is_quiet && known.grant.is_none()
                }
                Pass::Serve => known.phase == Phase::Adopting && !is_quiet,
                Pass::Read => known.phase == Phase::Adopting && known.grant.is_some(),
                Pass::Abandon => known.phase == Phase::Adopting && is_quiet,
                Pass::CleanUp => {
                    world.faults.clean_ups > 0
                        && known.phase == Phase::Done
                        && known.detached.is_some()
                        && is_quiet
                }
            }
    }

    pub(super) fn pass(&self, world: &mut World, client: usize, pass: Pass) {
        let now = world.now;
        match pass {
            Pass::Detach => {
                let known = &mut world.clients[client];
                known.detached = known.held_as(now);
                if !self.breaks(Rule::DetachEndsLease) {
                    known.phase = Phase::Done;
                }
            }
            Pass::Adopt(former) => {
                let floor = world.largest_token();
                let known = &mut world.clients[client];
                if known.phase == Phase::Adopting {
                    known.polls -= 1;
                }
                (known.phase, known.former, known.floor) = (Phase::Adopting, Some(former), floor);
                send(world, client, RequestKind::Adopt(former));
            }
            Pass::Serve => {
                let Some(request) = world.clients[client].request.take() else { return };
                match self.serve(world, client as u8, request.kind) {
                    Reply::Held(token) => {
                        world.clients[client].grant = Some((token, request.sent));
                    }
                    _ => world.clients[client].phase = Phase::Done,
                }
            }
            Pass::Read => {
                let Some((token, sent)) = world.clients[client].grant.take() else { return };
                let from = if self.breaks(Rule::AdoptionCountsFromSent) { now } else { sent };
                enter(world, client, from + self.ttl, token);
            }
            Pass::Abandon => {
                world.clients[client].phase = Phase::Done;
                send(world, client, RequestKind::Release);
            }
            Pass::CleanUp => {
                world.faults.clean_ups -= 1;
                send(world, client, RequestKind::Release);
            }
        }
    }

    /// Gives the lock of a former holder to its successor, under another id.
    pub(super) fn adopt(&self, world: &mut World, id: u8, former: u8) -> Reply {
        let until = world.now + self.ttl;
        let new_id = if self.breaks(Rule::AdoptionChangesId) { former } else { id };
        let is_checked = !self.breaks(Rule::AdoptionChecksHolder);
        match &mut world.server.lock {
            Some((Owner::Alone(holder), expiry))
                if *holder == former || *holder == id || !is_checked =>
            {
                *holder = new_id;
                if !self.breaks(Rule::AdoptionSetsExpiry) {
                    *expiry = until;
                }
            }
            _ => {
                let is_member = |id: u8| member_until(world, id, world.now).is_some();
                if !is_member(former) && !is_member(id) {
                    return Reply::Gone;
                }
                if !self.breaks(Rule::AdoptionReplacesMember) {
                    world.server.members.retain(|member| member.id != former);
                }
                self.add_member(world, new_id, self.kind_of(id), self.ttl);
            }
        }
        let is_new = !self.breaks(Rule::AdoptionGetsToken);
        Reply::Held(if is_new { next_token(world) } else { world.server.token })
    }
}
