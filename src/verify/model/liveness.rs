//! Checks that every client gets the lock once there are no more faults.

use super::{
    Model, Rule,
    world::{Faults, Id, NODES, Phase, TURNS_MAX, World},
};

impl<const C: usize> Model<C> {
    /// Whether every client can get the lock once more, whatever has happened. From now on no
    /// message is lost or late. One node other than the queue node may stay down. All clients
    /// acquire whenever they can, and each node is reached by another client first.
    pub(super) fn is_live(&self, world: &World<C>) -> bool {
        (0..=NODES).filter(|down| *down == NODES || !world.columns[*down].node.has_queue).all(
            |down| {
                let faults = Faults { restarts: 0, breaks: 0, jumps: 0, others: 0 };
                let fault_free = Model {
                    turns: TURNS_MAX as u8 + 1,
                    rounds: u8::MAX,
                    broken: &[] as &[Rule],
                    ..self.clone()
                };
                fault_free.all_clients_hold(World { faults, ..world.clone() }, down)
            },
        )
    }

    fn all_clients_hold(&self, mut world: World<C>, down: usize) -> bool {
        let mut without_lock: Vec<usize> = (0..C).collect();
        for column in &mut world.columns {
            column.views.iter_mut().for_each(|view| view.orphans.clear());
        }
        for client in world.clients.iter_mut().filter(|client| client.phase == Phase::Done) {
            client.phase = Phase::Idle;
        }
        for _ in 0..self.ttl * (C as u8 + 3) {
            // A queued client is woken by a grant, but also polls at long intervals.
            let polls = world.now.is_multiple_of(self.ttl);
            for client in 0..C {
                match world.clients[client].phase {
                    Phase::Holding { .. } => {
                        if self.is_holding(&world, client) {
                            without_lock.retain(|other| *other != client);
                        }
                        self.end(&mut world, client);
                    }
                    Phase::Idle if !without_lock.contains(&client) => {}
                    _ if self.may_acquire(&world, client)
                        && (polls || !is_queued(&world, client)) =>
                    {
                        let proposal = self.proposals(&world).next().unwrap_or(0);
                        self.acquire(&mut world, client, proposal);
                    }
                    _ => {}
                }
            }
            for _ in 0..8 {
                for node in 0..NODES {
                    for turn in 0..C {
                        let client = (node + turn + usize::from(world.now)) % C;
                        self.deliver(&mut world, client, node, node == down);
                    }
                }
            }
            world.now += 1;
            self.normalize(&mut world);
            if without_lock.is_empty() {
                return true;
            }
        }
        false
    }

    /// Delivers one message, or drops the connection if the node is down.
    fn deliver(&self, world: &mut World<C>, client: usize, node: usize, down: bool) {
        let view = &mut world.columns[node].views[client];
        if down && !view.requests.is_empty() {
            self.disconnect(world, client, node);
            world.columns[node].views[client].orphans.clear();
        } else if !view.replies.is_empty() {
            let reply = view.replies.remove(0);
            self.receive(world, client, node, &reply);
        } else if !view.requests.is_empty() {
            self.arrive(world, client, node, false);
        }
    }
}

/// Whether the client is in the queue and has not been granted the key.
fn is_queued<const C: usize>(world: &World<C>, client: usize) -> bool {
    let id = Id { client: client as u8, turn: world.clients[client].turn };
    world.columns.iter().any(|column| column.node.queue.contains(&id))
}
