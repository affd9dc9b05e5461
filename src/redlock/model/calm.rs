//! Whether everything ends well once nothing goes wrong any more.

use super::{
    Model, Rule,
    world::{Faults, Id, NODES, Stage, TURNS_MAX, World},
};

impl<const C: usize> Model<C> {
    /// Whatever has happened, each client gets the lock once more: when no message is lost or late
    /// any more, and even if a node other than the first is gone for good, and all clients ask
    /// whenever they can, each node being reached by another one first.
    pub(super) fn ends_well(&self, world: &World<C>) -> bool {
        (0..=NODES).filter(|gone| *gone == NODES || !world.columns[*gone].node.first).all(|gone| {
            let faults = Faults { restarts: 0, breaks: 0, jumps: 0 };
            let calm = Model {
                turns: TURNS_MAX as u8 + 1,
                rounds: u8::MAX,
                broken: &[] as &[Rule],
                ..self.clone()
            };
            calm.everybody_holds(World { faults, ..world.clone() }, gone)
        })
    }

    fn everybody_holds(&self, mut world: World<C>, gone: usize) -> bool {
        let mut waiting: Vec<usize> = (0..C).collect();
        for column in &mut world.columns {
            column.seats.iter_mut().for_each(|seat| seat.stray.clear());
        }
        for client in world.clients.iter_mut().filter(|client| client.stage == Stage::Done) {
            client.stage = Stage::Idle;
        }
        for _ in 0..self.ttl * (C as u8 + 3) {
            // Who waits in line is woken, but looks all the same at a slow pace.
            let looks = world.now.is_multiple_of(self.ttl);
            for client in 0..C {
                match world.clients[client].stage {
                    Stage::Holding { .. } => {
                        if self.believes(&world, client) {
                            waiting.retain(|other| *other != client);
                        }
                        self.end(&mut world, client);
                    }
                    Stage::Idle if !waiting.contains(&client) => {}
                    _ if self.may_ask(&world, client)
                        && (looks || !waits_in_line(&world, client)) =>
                    {
                        let proposal = self.proposals(&world).next().unwrap_or(0);
                        self.ask(&mut world, client, proposal);
                    }
                    _ => {}
                }
            }
            for _ in 0..8 {
                for node in 0..NODES {
                    for turn in 0..C {
                        let client = (node + turn + usize::from(world.now)) % C;
                        self.deliver(&mut world, client, node, node == gone);
                    }
                }
            }
            world.now += 1;
            self.tidy(&mut world);
            if waiting.is_empty() {
                return true;
            }
        }
        false
    }

    /// Delivers one message, or tells the client that the node is gone.
    fn deliver(&self, world: &mut World<C>, client: usize, node: usize, gone: bool) {
        let seat = &mut world.columns[node].seats[client];
        if gone && !seat.wire.is_empty() {
            self.hang_up(world, client, node);
            world.columns[node].seats[client].stray.clear();
        } else if !seat.back.is_empty() {
            let reply = seat.back.remove(0);
            self.hear(world, client, node, &reply);
        } else if !seat.wire.is_empty() {
            self.arrive(world, client, node, false);
        }
    }
}

/// Whether it has a place in the line, and has not been woken by being handed the key.
fn waits_in_line<const C: usize>(world: &World<C>, client: usize) -> bool {
    let id = Id { client: client as u8, turn: world.clients[client].turn };
    world.columns.iter().any(|column| column.node.line.contains(&id))
}
