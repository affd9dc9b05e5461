//! What a client does: it acquires, collects votes, holds, renews and releases. `downgrade.rs`
//! turns writers into readers.

use super::{
    Model, Rule,
    node::wall,
    world::{
        Client, ClientView, Kind, NODES, Outcome, Phase, Reply, Request, RequestKind, Response,
        Tick, World,
    },
};
use crate::{
    core::{
        node_reply::Vote,
        quorum::{NodeDeadlines, Verdict, agreed_token, quorum, verdict},
    },
    sys::clock::Moment,
};

/// How much earlier than the key a lease ends: as much as a node's clock can run ahead within a
/// ttl.
const MARGIN: Tick = 1;

fn moment(tick: Tick) -> Moment {
    Moment::from_nanos(tick.into())
}

impl<const C: usize> Model<C> {
    fn deadline(&self, sent: Tick) -> Moment {
        let margin = if self.breaks(Rule::Margin) { 0 } else { MARGIN };
        moment(sent + self.ttl - margin)
    }

    pub(super) fn has_lapsed(&self, vote: Tick, now: Tick) -> bool {
        self.deadline(vote) <= moment(now)
    }

    /// Whether a quorum keeps the lock for this client, as far as it knows.
    fn is_valid(&self, world: &World<C>, client: usize) -> bool {
        let mut votes = NodeDeadlines::new(NODES);
        for (node, column) in world.columns.iter().enumerate() {
            let view = &column.views[client];
            if view.excluded {
                votes.exclude(node);
            }
            match view.vote {
                Some(sent) => votes.confirm(node, self.deadline(sent)),
                None => votes.revoke(node),
            }
        }
        if world.clients[client].has == Kind::Read && self.breaks(Rule::ReadersNeedQuorum) {
            return world.columns.iter().any(|column| column.views[client].vote.is_some());
        }
        votes.valid_until().is_some_and(|validity| moment(world.now) < validity)
    }

    pub(super) fn is_holding(&self, world: &World<C>, client: usize) -> bool {
        world.clients[client].phase.token().is_some() && self.is_valid(world, client)
    }

    pub(super) fn may_acquire(&self, world: &World<C>, client: usize) -> bool {
        let askable =
            world.columns.iter().filter(|column| column.views[client].undo_until.is_none());
        matches!(world.clients[client].phase, Phase::Idle | Phase::Retrying)
            && askable.count() >= quorum(NODES)
    }

    /// Sends an acquire to all nodes.
    pub(super) fn acquire(&self, world: &mut World<C>, client: usize, proposal: u8) {
        let ended_token = world.ended_token;
        let known = &mut world.clients[client];
        (known.phase, known.has) = (Phase::Acquiring, known.kind);
        if known.kind == Kind::Read {
            known.floor = ended_token;
        }
        let is_decided = self.breaks(Rule::DecidedForMembersOnly);
        for column in &mut world.columns {
            let view = &mut column.views[client];
            if view.undo_until.is_some() {
                view.response = Some(Response::Unknown);
                continue;
            }
            (view.response, view.proposed) = (None, proposal);
            let request = RequestKind::Acquire { proposal, is_decided };
            send(&mut world.clients[client], view, world.now, request);
        }
    }

    /// The tokens that a client may propose first. It knows the clock of at least one node, which
    /// may be the slowest.
    pub(super) fn proposals(&self, world: &World<C>) -> impl Iterator<Item = u8> {
        let clocks = world.columns.iter().map(|column| wall(world.now, column.node.skew));
        let (slowest, fastest) = (clocks.clone().min(), clocks.max());
        let (least, most) = match self.proposal_lead {
            Some(lead) => (slowest.unwrap_or(0), fastest.unwrap_or(0) + lead),
            None => (0, 0),
        };
        [Some(least), (most > least).then_some(most)].into_iter().flatten()
    }

    pub(super) fn renew(&self, world: &mut World<C>, client: usize) {
        if let Phase::Holding { renewals, .. } = &mut world.clients[client].phase {
            *renewals -= 1;
        }
        for column in world.columns.iter_mut().filter(|column| !column.views[client].excluded) {
            send(
                &mut world.clients[client],
                &mut column.views[client],
                world.now,
                RequestKind::Renew,
            );
        }
    }

    /// Acquires the lock again on a node that does not keep it, while a quorum does.
    fn reacquire(&self, world: &mut World<C>, client: usize, node: usize) {
        let (valid, known) = (self.is_valid(world, client), &mut world.clients[client]);
        let view = &mut world.columns[node].views[client];
        if let Phase::Holding { token, .. } = known.phase
            && valid
            && !view.excluded
        {
            view.proposed = token;
            let request = RequestKind::Acquire { proposal: token, is_decided: false };
            send(known, view, world.now, request);
        }
    }

    pub(super) fn receive(&self, world: &mut World<C>, client: usize, node: usize, reply: &Reply) {
        let (now, turn, round) =
            (world.now, world.clients[client].turn, world.clients[client].round);
        // A writer that has become a reader has a new lease.
        if reply.to.turn != turn || reply.to.of != world.clients[client].has {
            return;
        }
        let phase = world.clients[client].phase;
        if matches!(phase, Phase::Holding { .. }) && !self.is_holding(world, client) {
            // Lost is final, whatever the reply says.
            return self.end(world, client);
        }
        let view = &mut world.columns[node].views[client];
        let confirmed = if self.breaks(Rule::DeadlineFromSent) { now } else { reply.to.sent };
        // Votes of a round do not count any more once that round was undone.
        let void = reply.to.round != round && !self.breaks(Rule::UndoneIsVoid);
        match reply.outcome {
            Outcome::Held { token, counts } if phase != Phase::Retrying && !void => {
                if phase == Phase::Acquiring {
                    view.response =
                        Some(if counts { Response::Held(token) } else { Response::Unknown });
                }
                if counts {
                    view.vote = view.vote.max(Some(confirmed));
                }
            }
            Outcome::Busy if phase != Phase::Retrying && !void => {
                view.vote = None;
                if phase == Phase::Acquiring {
                    view.response = Some(Response::Busy);
                }
            }
            Outcome::Expired if phase == Phase::Acquiring && !void => {
                view.response = Some(Response::Unknown)
            }
            Outcome::Renewed { counts: true } => {
                view.vote = view.vote.max(Some(confirmed));
                view.renewed = true;
            }
            Outcome::Downgraded { counts } => self.on_downgraded(view, phase, confirmed, counts),
            Outcome::NotHeld if matches!(phase, Phase::Downgrading { .. }) => {
                view.vote = None;
                view.response = Some(Response::Busy);
            }
            Outcome::NotHeld => {
                view.vote = None;
                self.reacquire(world, client, node);
            }
            _ => {}
        }
        self.decide(world, client);
    }

    /// Drops the connection to a node. The outcome of unanswered requests is unknown, and they may
    /// still be executed.
    pub(super) fn disconnect(&self, world: &mut World<C>, client: usize, node: usize) {
        let phase = world.clients[client].phase;
        let view = &mut world.columns[node].views[client];
        for request in view.requests.iter().chain(view.replies.iter().map(|reply| &reply.to)) {
            if request.turn != world.clients[client].turn {
                continue;
            }
            match request.kind {
                RequestKind::Acquire { .. } if phase == Phase::Acquiring => {
                    view.response = Some(Response::Unknown)
                }
                RequestKind::Downgrade if matches!(phase, Phase::Downgrading { .. }) => {
                    view.response = Some(Response::Unknown)
                }
                RequestKind::Undo if !self.breaks(Rule::UndosAwaited) => {
                    view.undo_until = view.undo_until.max(Some(request.sent + self.request_ttl));
                }
                RequestKind::Renew if self.breaks(Rule::UnknownIsNotYes) => {
                    view.vote = view.vote.max(Some(request.sent))
                }
                _ => {}
            }
        }
        view.replies.clear();
        view.orphans.append(&mut view.requests);
        view.orphans.iter_mut().for_each(|request| request.round = 0);
        view.orphans.sort_unstable();
        self.exclude(view, phase);
        self.decide(world, client);
    }

    /// A holder ignores a node on which one of its own undos may still be executed.
    fn exclude(&self, view: &mut ClientView, phase: Phase) {
        if phase.token().is_some() && view.undo_until.take().is_some() {
            view.excluded = !self.breaks(Rule::UndosExcludeRenewals);
        }
    }

    fn decide(&self, world: &mut World<C>, client: usize) {
        let phase = world.clients[client].phase;
        if matches!(phase, Phase::Holding { .. }) && !self.is_holding(world, client) {
            return self.end(world, client);
        }
        let responses = world.columns.each_ref().map(|column| column.views[client].response);
        let votes = responses.map(|response| {
            response.map(|response| match response {
                Response::Held(_) => Vote::Yes,
                Response::Busy => Vote::No,
                Response::Unknown => Vote::Unknown,
            })
        });
        let verdict = verdict(votes.into_iter());
        match phase {
            Phase::Acquiring => {}
            Phase::Downgrading { .. } => return self.decide_downgrade(world, client, verdict),
            _ => return,
        }
        let stored: Vec<u64> = responses
            .iter()
            .filter_map(|response| {
                if let Some(Response::Held(token)) = response {
                    Some(u64::from(*token))
                } else {
                    None
                }
            })
            .collect();
        let is_enough = world.clients[client].has == Kind::Read
            && self.breaks(Rule::ReadersNeedQuorum)
            && !stored.is_empty();
        match verdict {
            _ if is_enough => self.start_holding(world, client, stored[0] as u8),
            Verdict::Pending => {}
            Verdict::Rejected | Verdict::NoQuorum => self.undo_round(world, client),
            Verdict::Granted => match agreed_token(&stored, NODES) {
                Ok(token) => self.start_holding(world, client, token as u8),
                Err(highest) if self.breaks(Rule::SecondPhase) => {
                    self.start_holding(world, client, highest as u8)
                }
                Err(highest) => self.propose(world, client, highest as u8),
            },
        }
    }

    /// Asks the nodes that voted yes to store the highest token.
    fn propose(&self, world: &mut World<C>, client: usize, highest: u8) {
        for column in &mut world.columns {
            let view = &mut column.views[client];
            if matches!(view.response, Some(Response::Held(token)) if token < highest)
                && view.proposed < highest
            {
                view.proposed = highest;
                let request = RequestKind::Acquire { proposal: highest, is_decided: true };
                send(&mut world.clients[client], view, world.now, request);
            }
        }
    }

    fn start_holding(&self, world: &mut World<C>, client: usize, token: u8) {
        if !self.is_valid(world, client) {
            return self.undo_round(world, client);
        }
        let phase = Phase::Holding { renewals: self.renewals, token };
        world.clients[client].phase = phase;
        for column in &mut world.columns {
            let view = &mut column.views[client];
            (view.response, view.proposed) = (None, 0);
            self.exclude(view, phase);
        }
        let known = &mut world.clients[client];
        let floor = match known.has {
            Kind::Alone => world.token,
            Kind::Read => std::mem::take(&mut known.floor).max(world.token_alone),
        };
        world.token_did_not_rise |= token <= floor && world.tokens_issued > 0;
        world.token = world.token.max(token);
        if known.has == Kind::Alone && self.has_readers() {
            world.token_alone = token;
        }
        world.tokens_issued += 1;
    }

    /// Undoes the votes of a failed round, except that of the queue node, and prepares another
    /// round if one is left.
    fn undo_round(&self, world: &mut World<C>, client: usize) {
        if world.clients[client].round + 1 >= self.rounds {
            return self.end(world, client);
        }
        for column in &mut world.columns {
            let view = &mut column.views[client];
            let kept = column.node.has_queue && matches!(view.response, Some(Response::Held(_)));
            if !kept {
                if view.response != Some(Response::Busy) {
                    send(&mut world.clients[client], view, world.now, RequestKind::Undo);
                }
                view.vote = None;
            }
            (view.response, view.proposed) = (None, 0);
        }
        world.clients[client].round += 1;
        world.clients[client].phase = Phase::Retrying;
    }

    /// Ends a turn, by choice or because the lock is lost, and releases the lock on all nodes.
    pub(super) fn end(&self, world: &mut World<C>, client: usize) {
        if let Some(token) = world.clients[client].phase.token().filter(|_| self.has_readers()) {
            world.ended_token = world.ended_token.max(token);
        }
        for column in &mut world.columns {
            let view = &mut column.views[client];
            send(&mut world.clients[client], view, world.now, RequestKind::Release);
            view.replies.clear();
            let ClientView { requests, orphans, .. } = std::mem::take(view);
            *view = ClientView { requests, orphans, ..ClientView::default() };
        }
        let client = &mut world.clients[client];
        client.turn += 1;
        (client.round, client.has, client.floor) = (0, client.kind, 0);
        client.phase = if client.turn < self.turns { Phase::Idle } else { Phase::Done };
    }
}

pub(super) fn send(client: &mut Client, view: &mut ClientView, now: Tick, kind: RequestKind) {
    if !matches!(kind, RequestKind::Undo | RequestKind::Release) {
        client.last_sent[usize::from(client.turn)] = Some(now);
    }
    let (round, sent) = match kind {
        RequestKind::Acquire { .. } => (client.round, now),
        RequestKind::Renew | RequestKind::Downgrade | RequestKind::Undo => (0, now),
        RequestKind::Release => (0, 0),
    };
    view.requests.push(Request { turn: client.turn, round, sent, kind, of: client.has });
}
