//! What a client does: asks, counts, holds, renews, lets go.

use super::{
    Model, Rule,
    node::wall,
    world::{Answer, Ask, Client, NODES, Reply, Request, Said, Seat, Stage, Tick, World},
};
use crate::{
    clock::Moment,
    redlock::quorum::{NodeDeadlines, Verdict, Vote, agreed_token, quorum, verdict},
};

/// How much earlier than the key belief ends: by how much a node's clock may run ahead within a
/// time to live.
const MARGIN: Tick = 1;

fn moment(tick: Tick) -> Moment {
    Moment::from_nanos(tick.into())
}

impl<const C: usize> Model<C> {
    fn deadline(&self, sent: Tick) -> Moment {
        let margin = if self.breaks(Rule::Margin) { 0 } else { MARGIN };
        moment(sent + self.ttl - margin)
    }

    pub(super) fn is_over(&self, vote: Tick, now: Tick) -> bool {
        self.deadline(vote) <= moment(now)
    }

    /// Whether a quorum keeps the lock for this client, as far as it knows.
    fn is_valid(&self, world: &World<C>, client: usize) -> bool {
        let mut votes = NodeDeadlines::new(NODES);
        for (node, column) in world.columns.iter().enumerate() {
            let seat = &column.seats[client];
            if seat.barred {
                votes.exclude(node);
            }
            match seat.vote {
                Some(sent) => votes.confirm(node, self.deadline(sent)),
                None => votes.revoke(node),
            }
        }
        votes.valid_until().is_some_and(|validity| moment(world.now) < validity)
    }

    pub(super) fn believes(&self, world: &World<C>, client: usize) -> bool {
        matches!(world.clients[client].stage, Stage::Holding { .. }) && self.is_valid(world, client)
    }

    pub(super) fn may_ask(&self, world: &World<C>, client: usize) -> bool {
        let askable =
            world.columns.iter().filter(|column| column.seats[client].undo_until.is_none());
        matches!(world.clients[client].stage, Stage::Idle | Stage::Between)
            && askable.count() >= quorum(NODES)
    }

    /// Asks all nodes at once.
    pub(super) fn ask(&self, world: &mut World<C>, client: usize, proposal: u8) {
        world.clients[client].stage = Stage::Asking;
        for column in &mut world.columns {
            let seat = &mut column.seats[client];
            if seat.undo_until.is_some() {
                seat.answer = Some(Answer::Unknown);
                continue;
            }
            (seat.answer, seat.proposed) = (None, proposal);
            send(&mut world.clients[client], seat, world.now, Ask::Acquire { proposal });
        }
    }

    /// What tokens a client may propose at first: it knows at least one node's clock, perhaps the
    /// slowest.
    pub(super) fn proposals(&self, world: &World<C>) -> impl Iterator<Item = u8> {
        let clocks = world.columns.iter().map(|column| wall(world.now, column.node.skew));
        let (slowest, fastest) = (clocks.clone().min(), clocks.max());
        let (least, most) = match self.lead {
            Some(lead) => (slowest.unwrap_or(0), fastest.unwrap_or(0) + lead),
            None => (0, 0),
        };
        [Some(least), (most > least).then_some(most)].into_iter().flatten()
    }

    pub(super) fn renew(&self, world: &mut World<C>, client: usize) {
        if let Stage::Holding { renewals, .. } = &mut world.clients[client].stage {
            *renewals -= 1;
        }
        for column in world.columns.iter_mut().filter(|column| !column.seats[client].barred) {
            send(&mut world.clients[client], &mut column.seats[client], world.now, Ask::Renew);
        }
    }

    /// Takes the lock anew on a node that does not keep it, while a quorum does.
    fn mend(&self, world: &mut World<C>, client: usize, node: usize) {
        let (valid, known) = (self.is_valid(world, client), &mut world.clients[client]);
        let seat = &mut world.columns[node].seats[client];
        if let Stage::Holding { token, .. } = known.stage
            && valid
            && !seat.barred
        {
            seat.proposed = token;
            send(known, seat, world.now, Ask::Acquire { proposal: token });
        }
    }

    pub(super) fn hear(&self, world: &mut World<C>, client: usize, node: usize, reply: &Reply) {
        let (now, turn, round) =
            (world.now, world.clients[client].turn, world.clients[client].round);
        if reply.to.turn != turn {
            return;
        }
        let stage = world.clients[client].stage;
        if matches!(stage, Stage::Holding { .. }) && !self.believes(world, client) {
            // Lost is final, whatever this says.
            return self.end(world, client);
        }
        let seat = &mut world.columns[node].seats[client];
        let confirmed = if self.breaks(Rule::DeadlineFromSent) { now } else { reply.to.sent };
        // What a round won is void once that round has taken it back.
        let void = reply.to.round != round && !self.breaks(Rule::UndoneIsVoid);
        match reply.said {
            Said::Held { token, counts } if stage != Stage::Between && !void => {
                if stage == Stage::Asking {
                    seat.answer = Some(if counts { Answer::Held(token) } else { Answer::Unknown });
                }
                if counts {
                    seat.vote = seat.vote.max(Some(confirmed));
                }
            }
            Said::Busy if stage != Stage::Between && !void => {
                seat.vote = None;
                if stage == Stage::Asking {
                    seat.answer = Some(Answer::Busy);
                }
            }
            Said::Late if stage == Stage::Asking && !void => seat.answer = Some(Answer::Unknown),
            Said::Renewed { counts: true } => {
                seat.vote = seat.vote.max(Some(confirmed));
                seat.renewed = true;
            }
            Said::NotYours => {
                seat.vote = None;
                self.mend(world, client, node);
            }
            _ => {}
        }
        self.decide(world, client);
    }

    /// Gives up the connection to a node: what it has not answered is unknown, and may yet be
    /// carried out.
    pub(super) fn hang_up(&self, world: &mut World<C>, client: usize, node: usize) {
        let stage = world.clients[client].stage;
        let seat = &mut world.columns[node].seats[client];
        for request in seat.wire.iter().chain(seat.back.iter().map(|reply| &reply.to)) {
            if request.turn != world.clients[client].turn {
                continue;
            }
            match request.ask {
                Ask::Acquire { .. } if stage == Stage::Asking => {
                    seat.answer = Some(Answer::Unknown)
                }
                Ask::Undo if !self.breaks(Rule::UndosWaitedFor) => {
                    seat.undo_until = seat.undo_until.max(Some(request.sent + self.patience));
                }
                Ask::Renew if self.breaks(Rule::UnknownIsNoYes) => {
                    seat.vote = seat.vote.max(Some(request.sent))
                }
                _ => {}
            }
        }
        seat.back.clear();
        seat.stray.append(&mut seat.wire);
        seat.stray.iter_mut().for_each(|request| request.round = 0);
        seat.stray.sort_unstable();
        self.bar(seat, stage);
        self.decide(world, client);
    }

    /// What a node says to a holder does not count if an undo of its own may still be on its way
    /// there.
    fn bar(&self, seat: &mut Seat, stage: Stage) {
        if matches!(stage, Stage::Holding { .. }) && seat.undo_until.take().is_some() {
            seat.barred = !self.breaks(Rule::UndosBarRenewals);
        }
    }

    fn decide(&self, world: &mut World<C>, client: usize) {
        match world.clients[client].stage {
            Stage::Asking => {}
            Stage::Holding { .. } if !self.believes(world, client) => {
                return self.end(world, client);
            }
            _ => return,
        }
        let answers = world.columns.each_ref().map(|column| column.seats[client].answer);
        let votes = answers.map(|answer| {
            answer.map(|answer| match answer {
                Answer::Held(_) => Vote::Yes,
                Answer::Busy => Vote::No,
                Answer::Unknown => Vote::Unknown,
            })
        });
        let stored: Vec<u64> = answers
            .iter()
            .filter_map(|answer| {
                if let Some(Answer::Held(token)) = answer { Some(u64::from(*token)) } else { None }
            })
            .collect();
        match verdict(votes.into_iter()) {
            Verdict::Pending => {}
            Verdict::Rejected | Verdict::NoQuorum => self.come_to_nothing(world, client),
            Verdict::Granted => match agreed_token(&stored, NODES) {
                Ok(token) => self.take(world, client, token as u8),
                Err(highest) if self.breaks(Rule::SecondPhase) => {
                    self.take(world, client, highest as u8)
                }
                Err(highest) => self.propose(world, client, highest as u8),
            },
        }
    }

    /// Has the nodes that said yes store the highest token.
    fn propose(&self, world: &mut World<C>, client: usize, highest: u8) {
        for column in &mut world.columns {
            let seat = &mut column.seats[client];
            if matches!(seat.answer, Some(Answer::Held(token)) if token < highest)
                && seat.proposed < highest
            {
                seat.proposed = highest;
                send(
                    &mut world.clients[client],
                    seat,
                    world.now,
                    Ask::Acquire { proposal: highest },
                );
            }
        }
    }

    fn take(&self, world: &mut World<C>, client: usize, token: u8) {
        if !self.is_valid(world, client) {
            return self.come_to_nothing(world, client);
        }
        let stage = Stage::Holding { renewals: self.renewals, token };
        world.clients[client].stage = stage;
        for column in &mut world.columns {
            let seat = &mut column.seats[client];
            (seat.answer, seat.proposed) = (None, 0);
            self.bar(seat, stage);
        }
        world.token_fell |= token <= world.token && world.handed_out > 0;
        world.token = world.token.max(token);
        world.handed_out += 1;
    }

    /// Takes back what a round may have won, but for the head of the line, and gets ready for
    /// another, if there is one.
    fn come_to_nothing(&self, world: &mut World<C>, client: usize) {
        if world.clients[client].round + 1 >= self.rounds {
            return self.end(world, client);
        }
        for column in &mut world.columns {
            let seat = &mut column.seats[client];
            let kept = column.node.first && matches!(seat.answer, Some(Answer::Held(_)));
            if !kept {
                if seat.answer != Some(Answer::Busy) {
                    send(&mut world.clients[client], seat, world.now, Ask::Undo);
                }
                seat.vote = None;
            }
            (seat.answer, seat.proposed) = (None, 0);
        }
        world.clients[client].round += 1;
        world.clients[client].stage = Stage::Between;
    }

    /// The end of a turn, by choice or because the lock is lost: released everywhere.
    pub(super) fn end(&self, world: &mut World<C>, client: usize) {
        for column in &mut world.columns {
            let seat = &mut column.seats[client];
            send(&mut world.clients[client], seat, world.now, Ask::Release);
            seat.back.clear();
            let Seat { wire, stray, .. } = std::mem::take(seat);
            *seat = Seat { wire, stray, ..Seat::default() };
        }
        let client = &mut world.clients[client];
        client.turn += 1;
        client.round = 0;
        client.stage = if client.turn < self.turns { Stage::Idle } else { Stage::Done };
    }
}

fn send(client: &mut Client, seat: &mut Seat, now: Tick, ask: Ask) {
    if matches!(ask, Ask::Acquire { .. } | Ask::Renew) {
        client.last_sent[usize::from(client.turn)] = Some(now);
    }
    let (round, sent) = match ask {
        Ask::Acquire { .. } => (client.round, now),
        Ask::Renew | Ask::Undo => (0, now),
        Ask::Release => (0, 0),
    };
    seat.wire.push(Request { turn: client.turn, round, sent, ask });
}
