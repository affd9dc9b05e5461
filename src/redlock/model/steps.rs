//! What can happen next.

use super::{
    Model,
    world::{Ask, Client, Column, Id, Node, Reply, Seat, Stage, TURNS_MAX, World},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Tick,
    Ask(usize, u8),
    Renew(usize),
    End(usize),
    /// A request of a client reaches a node, and the answer is read at once.
    Arrive(usize, usize),
    /// The answer is read later.
    ArriveSlowly(usize, usize),
    Read(usize, usize),
    /// A client gives up its connection to a node.
    Break(usize, usize),
    /// A request reaches its node after that.
    Stray(usize, usize, usize),
    /// A node comes back without data.
    Restart(usize),
    /// A node's clock runs ahead.
    Jump(usize),
}

impl<const C: usize> stateright::Model for Model<C> {
    /// In a box, which is faster to move around.
    type State = Box<World<C>>;
    type Action = Step;

    fn init_states(&self) -> Vec<Box<World<C>>> {
        let client =
            Client { stage: Stage::Idle, turn: 0, round: 0, last_sent: [None; TURNS_MAX + 1] };
        let node = |node: usize| Node {
            first: self.line && node == 0,
            skew: self.skew[node],
            ahead: 0,
            key: None,
            fence: 0,
            line: Vec::new(),
            votes_from: None,
        };
        let seats = || std::array::from_fn(|_| Seat::default());
        let mut world = World {
            now: 0,
            clients: std::array::from_fn(|_| client.clone()),
            columns: std::array::from_fn(|index| Column { node: node(index), seats: seats() }),
            faults: self.faults,
            token: 0,
            handed_out: 0,
            token_fell: false,
        };
        world.fold();
        vec![Box::new(world)]
    }

    fn actions(&self, world: &Box<World<C>>, steps: &mut Vec<Step>) {
        // Time begins with the first event.
        let begun = world.faults != self.faults
            || world.clients.iter().any(|known| known.turn > 0 || known.is_busy());
        if begun && world.now < self.horizon && world.in_flight() <= self.late_max {
            steps.push(Step::Tick);
        }
        for client in 0..C {
            if self.may_ask(world, client) {
                steps.extend(self.proposals(world).map(|proposal| Step::Ask(client, proposal)));
            }
            if let Stage::Holding { renewals, .. } = world.clients[client].stage {
                steps.push(Step::End(client));
                if renewals > 0 && self.believes(world, client) {
                    steps.push(Step::Renew(client));
                }
            }
            for (node, column) in world.columns.iter().enumerate() {
                let Seat { wire, back, stray, .. } = &column.seats[client];
                if let Some(request) = wire.first() {
                    steps.push(Step::Arrive(client, node));
                    let is_heard =
                        request.turn == world.clients[client].turn && request.ask != Ask::Undo;
                    if self.slow && is_heard && back.is_empty() {
                        steps.push(Step::ArriveSlowly(client, node));
                    }
                }
                if !back.is_empty() {
                    steps.push(Step::Read(client, node));
                }
                if world.faults.breaks > 0 && !(wire.is_empty() && back.is_empty()) {
                    steps.push(Step::Break(client, node));
                }
                steps.extend((0..stray.len()).map(|request| Step::Stray(client, node, request)));
            }
        }
        for (index, Column { node, .. }) in world.columns.iter().enumerate() {
            if world.faults.restarts > 0 && node.votes_from.is_none() {
                steps.push(Step::Restart(index));
            }
            if world.faults.jumps > 0 && node.ahead == 0 {
                steps.push(Step::Jump(index));
            }
        }
    }

    fn next_state(&self, world: &Box<World<C>>, step: Step) -> Option<Box<World<C>>> {
        let mut next = world.clone();
        match step {
            Step::Tick => next.now += 1,
            Step::Ask(client, proposal) => self.ask(&mut next, client, proposal),
            Step::Renew(client) => self.renew(&mut next, client),
            Step::End(client) => self.end(&mut next, client),
            Step::Arrive(client, node) => self.arrive(&mut next, client, node, false),
            Step::ArriveSlowly(client, node) => self.arrive(&mut next, client, node, true),
            Step::Read(client, node) => {
                let reply = next.columns[node].seats[client].back.remove(0);
                self.hear(&mut next, client, node, &reply);
            }
            Step::Break(client, node) => {
                next.faults.breaks -= 1;
                self.hang_up(&mut next, client, node);
            }
            Step::Stray(client, node, request) => {
                let column = &mut next.columns[node];
                let request = column.seats[client].stray.remove(request);
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
        }
        self.tidy(&mut next);
        next.fold();
        Some(next)
    }

    fn properties(&self) -> Vec<stateright::Property<Model<C>>> {
        self.promises()
    }
}

impl<const C: usize> Model<C> {
    pub(super) fn arrive(&self, world: &mut World<C>, client: usize, node: usize, slow: bool) {
        let (column, turn) = (&mut world.columns[node], world.clients[client].turn);
        let request = column.seats[client].wire.remove(0);
        let id = Id { client: client as u8, turn: request.turn };
        let said = self.serve(&mut column.node, id, &request, world.now);
        let Some(said) = said.filter(|_| request.turn == turn) else { return };
        let reply = Reply { to: request, said };
        let back = &mut column.seats[client].back;
        if slow || !back.is_empty() {
            back.push(reply);
        } else {
            self.hear(world, client, node, &reply);
        }
    }
}
