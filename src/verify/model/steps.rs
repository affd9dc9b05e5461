//! The steps that are possible in a state.

use super::{
    Model,
    world::{
        Client, ClientView, Column, Id, Kind, Node, Phase, Reply, RequestKind, TURNS_MAX, World,
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Tick,
    Acquire(usize, u8),
    Renew(usize),
    /// A writer asks to become a reader.
    Downgrade(usize),
    End(usize),
    /// A request reaches a node, and its reply is read at once.
    Arrive(usize, usize),
    /// A request reaches a node, and its reply is read later.
    ArriveWithLateReply(usize, usize),
    Read(usize, usize),
    /// A client drops its connection to a node.
    Break(usize, usize),
    /// A request on a dropped connection reaches its node.
    ArriveOrphaned(usize, usize, usize),
    /// A node restarts without its data.
    Restart(usize),
    /// A node's clock runs ahead.
    Jump(usize),
    /// A lock with another name is released on a node.
    OtherRelease(usize),
}

impl<const C: usize> stateright::Model for Model<C> {
    /// Boxed, because that is faster to move.
    type State = Box<World<C>>;
    type Action = Step;

    fn init_states(&self) -> Vec<Box<World<C>>> {
        let client = |kind| Client {
            kind,
            has: kind,
            floor: 0,
            phase: Phase::Idle,
            turn: 0,
            round: 0,
            last_sent: [None; TURNS_MAX + 1],
        };
        let node = |node: usize| Node {
            has_queue: self.queue && node == 0,
            skew: self.skew[node],
            ahead: 0,
            key: None,
            members: Vec::new(),
            token: 0,
            fence: 0,
            queue: Vec::new(),
            votes_from: None,
        };
        let views = || std::array::from_fn(|_| ClientView::default());
        let mut world = World {
            now: 0,
            clients: self.kinds.map(client),
            columns: std::array::from_fn(|index| Column { node: node(index), views: views() }),
            faults: self.faults,
            token: 0,
            ended_token: 0,
            token_alone: 0,
            tokens_issued: 0,
            token_did_not_rise: false,
        };
        world.canonicalize();
        vec![Box::new(world)]
    }

    fn actions(&self, world: &Box<World<C>>, steps: &mut Vec<Step>) {
        // Time starts with the first event.
        let begun = world.faults != self.faults
            || world.clients.iter().any(|known| known.turn > 0 || known.is_busy());
        if begun && world.now < self.horizon && world.in_flight() <= self.in_flight_max {
            steps.push(Step::Tick);
        }
        for client in 0..C {
            if self.may_acquire(world, client) {
                steps.extend(self.proposals(world).map(|proposal| Step::Acquire(client, proposal)));
            }
            if let Phase::Holding { renewals, .. } = world.clients[client].phase {
                steps.push(Step::End(client));
                if renewals > 0 && self.is_holding(world, client) {
                    steps.push(Step::Renew(client));
                }
                let is_writer = world.clients[client].has == Kind::Alone;
                if self.downgrades && is_writer && self.is_holding(world, client) {
                    steps.push(Step::Downgrade(client));
                }
            }
            for (node, column) in world.columns.iter().enumerate() {
                let ClientView { requests, replies, orphans, .. } = &column.views[client];
                if let Some(request) = requests.first() {
                    steps.push(Step::Arrive(client, node));
                    let has_reader = request.turn == world.clients[client].turn
                        && request.kind != RequestKind::Undo;
                    if self.late_replies && has_reader && replies.is_empty() {
                        steps.push(Step::ArriveWithLateReply(client, node));
                    }
                }
                if !replies.is_empty() {
                    steps.push(Step::Read(client, node));
                }
                if world.faults.breaks > 0 && !(requests.is_empty() && replies.is_empty()) {
                    steps.push(Step::Break(client, node));
                }
                steps.extend(
                    (0..orphans.len()).map(|request| Step::ArriveOrphaned(client, node, request)),
                );
            }
        }
        for (index, Column { node, .. }) in world.columns.iter().enumerate() {
            if world.faults.restarts > 0 && node.votes_from.is_none() {
                steps.push(Step::Restart(index));
            }
            if world.faults.jumps > 0 && node.ahead == 0 {
                steps.push(Step::Jump(index));
            }
            if world.faults.others > 0 {
                steps.push(Step::OtherRelease(index));
            }
        }
    }

    fn next_state(&self, world: &Box<World<C>>, step: Step) -> Option<Box<World<C>>> {
        let mut next = world.clone();
        match step {
            Step::Tick => next.now += 1,
            Step::Acquire(client, proposal) => self.acquire(&mut next, client, proposal),
            Step::Renew(client) => self.renew(&mut next, client),
            Step::Downgrade(client) => self.downgrade(&mut next, client),
            Step::End(client) => self.end(&mut next, client),
            Step::Arrive(client, node) => self.arrive(&mut next, client, node, false),
            Step::ArriveWithLateReply(client, node) => self.arrive(&mut next, client, node, true),
            Step::Read(client, node) => {
                let reply = next.columns[node].views[client].replies.remove(0);
                self.receive(&mut next, client, node, &reply);
            }
            Step::Break(client, node) => {
                next.faults.breaks -= 1;
                self.disconnect(&mut next, client, node);
            }
            Step::ArriveOrphaned(client, node, request) => {
                let column = &mut next.columns[node];
                let request = column.views[client].orphans.remove(request);
                let id = Id { client: client as u8, turn: request.turn };
                self.serve(&mut column.node, id, &request, world.now);
            }
            Step::Restart(node) => {
                next.faults.restarts -= 1;
                self.restart(&mut next.columns[node].node, world.now);
            }
            Step::Jump(node) => {
                next.faults.jumps -= 1;
                next.columns[node].node.ahead += 1;
            }
            Step::OtherRelease(node) => {
                next.faults.others -= 1;
                let token = self.proposals(world).last().unwrap_or(0);
                let fence = &mut next.columns[node].node.fence;
                *fence = (*fence).max(token);
            }
        }
        self.normalize(&mut next);
        next.canonicalize();
        Some(next)
    }

    fn properties(&self) -> Vec<stateright::Property<Model<C>>> {
        self.all_properties()
    }
}

impl<const C: usize> Model<C> {
    pub(super) fn arrive(
        &self,
        world: &mut World<C>,
        client: usize,
        node: usize,
        late_reply: bool,
    ) {
        let (column, turn) = (&mut world.columns[node], world.clients[client].turn);
        let request = column.views[client].requests.remove(0);
        let id = Id { client: client as u8, turn: request.turn };
        let outcome = self.serve(&mut column.node, id, &request, world.now);
        let Some(outcome) = outcome.filter(|_| request.turn == turn) else { return };
        let reply = Reply { to: request, outcome };
        let replies = &mut column.views[client].replies;
        if late_reply || !replies.is_empty() {
            replies.push(reply);
        } else {
            self.receive(world, client, node, &reply);
        }
    }
}
