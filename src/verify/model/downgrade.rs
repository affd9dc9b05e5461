//! How a writer becomes a reader: a quorum of the nodes must confirm it.

use super::{
    Model, Rule,
    client::send,
    world::{ClientView, Kind, Phase, RequestKind, Response, Tick, World},
};
use crate::core::quorum::Verdict;

impl<const C: usize> Model<C> {
    /// Ends the lease of the writer, and asks all nodes to keep the lock for a reader.
    pub(super) fn downgrade(&self, world: &mut World<C>, client: usize) {
        let known = &mut world.clients[client];
        let Phase::Holding { renewals, token } = known.phase else { return };
        known.phase = Phase::Downgrading { renewals, token, retries: 1 };
        known.has = Kind::Read;
        self.ask_to_downgrade(world, client);
        if self.breaks(Rule::DowngradeIsConfirmed) {
            let now = world.now;
            world.columns.iter_mut().for_each(|column| column.views[client].vote = Some(now));
            self.hold_as_reader(world, client);
        }
    }

    fn ask_to_downgrade(&self, world: &mut World<C>, client: usize) {
        for column in &mut world.columns {
            let view = &mut column.views[client];
            view.response = None;
            send(&mut world.clients[client], view, world.now, RequestKind::Downgrade);
        }
    }

    pub(super) fn on_downgraded(
        &self,
        view: &mut ClientView,
        phase: Phase,
        confirmed: Tick,
        counts: bool,
    ) {
        if let Phase::Downgrading { token, .. } = phase {
            view.response = Some(if counts { Response::Held(token) } else { Response::Unknown });
            if counts {
                view.vote = view.vote.max(Some(confirmed));
            }
        }
    }

    pub(super) fn decide_downgrade(&self, world: &mut World<C>, client: usize, verdict: Verdict) {
        match (verdict, &mut world.clients[client].phase) {
            (Verdict::Pending, _) => {}
            (Verdict::Granted, _) => {
                // The lease of the reader counts only what nodes have confirmed to the reader.
                for column in &mut world.columns {
                    let view = &mut column.views[client];
                    if !matches!(view.response, Some(Response::Held(_))) {
                        view.vote = None;
                    }
                }
                self.hold_as_reader(world, client);
            }
            (_, Phase::Downgrading { retries, .. }) if *retries > 0 => {
                *retries -= 1;
                self.ask_to_downgrade(world, client);
            }
            _ => self.end(world, client),
        }
    }

    fn hold_as_reader(&self, world: &mut World<C>, client: usize) {
        let known = &mut world.clients[client];
        let Phase::Downgrading { renewals, token, .. } = known.phase else { return };
        known.phase = Phase::Holding { renewals, token };
        world.columns.iter_mut().for_each(|column| column.views[client].response = None);
        if !self.is_holding(world, client) {
            self.end(world, client);
        }
    }

    /// Whether this client relies on nobody else having the lock.
    pub(super) fn is_alone(&self, world: &World<C>, client: usize) -> bool {
        let known = &world.clients[client];
        let is_downgrading = matches!(known.phase, Phase::Downgrading { .. });
        known.has == Kind::Alone || is_downgrading && self.breaks(Rule::DowngradeEndsWriting)
    }
}
