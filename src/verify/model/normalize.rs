//! Forgets what makes no difference any more, so that equivalent states become equal.

use super::{
    Model, Rule,
    node::is_of,
    world::{Client, ClientView, Column, Id, Node, Phase, Request, RequestKind, Tick, World},
};

impl<const C: usize> Model<C> {
    /// Lets time take effect, and forgets what makes no difference any more.
    pub(super) fn normalize(&self, world: &mut World<C>) {
        for Column { node, views } in &mut world.columns {
            self.age(node, world.now);
            for (client, view) in views.iter_mut().enumerate() {
                if view.vote.is_some_and(|vote| self.has_lapsed(vote, world.now)) {
                    view.vote = None;
                }
                if view.undo_until.is_some_and(|until| until < world.now) {
                    view.undo_until = None;
                }
                if !self.breaks(Rule::OwnerCheck) {
                    self.drop_ineffective(
                        &world.clients[client],
                        client as u8,
                        node,
                        view,
                        world.now,
                    );
                }
            }
        }
        for (client, known) in world.clients.iter_mut().enumerate() {
            let current = known.is_busy().then_some(known.turn);
            for (turn, sent) in (0..).zip(&mut known.last_sent).filter(|(_, sent)| sent.is_some()) {
                let id = Id { client: client as u8, turn };
                let matters = |request: &Request| {
                    request.turn == turn && request.kind != RequestKind::Release
                };
                let remains = |column: &Column<C>| {
                    let view = &column.views[client];
                    is_of(&column.node, id)
                        || view.requests.iter().any(matters)
                        || view.orphans.iter().any(matters)
                };
                if current != Some(turn) && !world.columns.iter().any(remains) {
                    *sent = None;
                }
            }
        }
    }

    /// Drops requests that have no effect, whenever they arrive.
    fn drop_ineffective(
        &self,
        known: &Client,
        client: u8,
        node: &Node,
        view: &mut ClientView,
        now: Tick,
    ) {
        if view.requests.is_empty() && view.orphans.is_empty() {
            return;
        }
        view.orphans.retain(|request| !self.has_expired(node, request, now));
        if node.has_queue {
            // Even a release of nothing can grant the lock to the first waiter.
            return;
        }
        let acquires = |requests: &[Request], turn: u8| {
            requests.iter().any(|other| {
                other.turn == turn && matches!(other.kind, RequestKind::Acquire { .. })
            })
        };
        while let Some(&Request { turn, kind: RequestKind::Release, .. }) = view.requests.first()
            && !is_of(node, Id { client, turn })
            && !acquires(&view.orphans, turn)
        {
            view.requests.remove(0);
        }
        let current =
            matches!(known.phase, Phase::Acquiring | Phase::Retrying).then_some(known.turn);
        let may_matter: Vec<bool> = view
            .orphans
            .iter()
            .map(|request| {
                let turn = request.turn;
                is_of(node, Id { client, turn })
                    || current == Some(turn)
                    || acquires(&view.orphans, turn)
                    || acquires(&view.requests, turn)
            })
            .collect();
        let mut may_matter = may_matter.into_iter();
        view.orphans.retain(|_| may_matter.next() == Some(true));
    }
}
