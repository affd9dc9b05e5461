//! Forgetting what makes no difference any more, so that states that are as good as equal are
//! equal.

use super::{
    Model, Rule,
    node::is_of,
    world::{Ask, Client, Column, Id, Node, Request, Seat, Stage, Tick, World},
};

impl<const C: usize> Model<C> {
    /// What time does, and what then makes no difference any more.
    pub(super) fn tidy(&self, world: &mut World<C>) {
        for Column { node, seats } in &mut world.columns {
            self.age(node, world.now);
            for (client, seat) in seats.iter_mut().enumerate() {
                if seat.vote.is_some_and(|vote| self.is_over(vote, world.now)) {
                    seat.vote = None;
                }
                if seat.undo_until.is_some_and(|until| until < world.now) {
                    seat.undo_until = None;
                }
                if !self.breaks(Rule::OwnerCheck) {
                    self.drop_idle(&world.clients[client], client as u8, node, seat, world.now);
                }
            }
        }
        for (client, known) in world.clients.iter_mut().enumerate() {
            let current = known.is_busy().then_some(known.turn);
            for (turn, sent) in (0..).zip(&mut known.last_sent).filter(|(_, sent)| sent.is_some()) {
                let id = Id { client: client as u8, turn };
                let asks = |request: &Request| request.turn == turn && request.ask != Ask::Release;
                let remains = |column: &Column<C>| {
                    let seat = &column.seats[client];
                    is_of(&column.node, id)
                        || seat.wire.iter().any(asks)
                        || seat.stray.iter().any(asks)
                };
                if current != Some(turn) && !world.columns.iter().any(remains) {
                    *sent = None;
                }
            }
        }
    }

    /// Drops requests that can do nothing, whenever they arrive.
    fn drop_idle(&self, known: &Client, client: u8, node: &Node, seat: &mut Seat, now: Tick) {
        if seat.wire.is_empty() && seat.stray.is_empty() {
            return;
        }
        seat.stray.retain(|request| !self.is_late(node, request, now));
        if node.first {
            // A release of nothing may still wake the first in line.
            return;
        }
        let acquires = |requests: &[Request], turn: u8| {
            requests
                .iter()
                .any(|other| other.turn == turn && matches!(other.ask, Ask::Acquire { .. }))
        };
        while let Some(&Request { turn, ask: Ask::Release, .. }) = seat.wire.first()
            && !is_of(node, Id { client, turn })
            && !acquires(&seat.stray, turn)
        {
            seat.wire.remove(0);
        }
        let may_ask = matches!(known.stage, Stage::Asking | Stage::Between).then_some(known.turn);
        let may_matter: Vec<bool> = seat
            .stray
            .iter()
            .map(|request| {
                let turn = request.turn;
                is_of(node, Id { client, turn })
                    || may_ask == Some(turn)
                    || acquires(&seat.stray, turn)
                    || acquires(&seat.wire, turn)
            })
            .collect();
        let mut may_matter = may_matter.into_iter();
        seat.stray.retain(|_| may_matter.next() == Some(true));
    }
}
