//! What a node does with a request: the scripts, as far as they matter here.

use super::{
    Model, Rule,
    world::{Ask, Id, Key, Node, Request, Said, Tick},
};

impl<const C: usize> Model<C> {
    /// Carries a request out. `None`: nobody waits for the answer.
    pub(super) fn serve(
        &self,
        node: &mut Node,
        id: Id,
        request: &Request,
        now: Tick,
    ) -> Option<Said> {
        let time = now + node.ahead;
        if self.is_late(node, request, now) {
            return matches!(request.ask, Ask::Acquire { .. }).then_some(Said::Late);
        }
        let asked = if self.breaks(Rule::AskedAfterQuarantine) { now } else { request.sent };
        let counts = !node.is_quarantined(asked) || self.breaks(Rule::Quarantine);
        match request.ask {
            Ask::Acquire { proposal } => {
                if node.key.is_none() && !self.hand_over(node, now) {
                    node.line.retain(|waiting| *waiting != id);
                    node.fence = self.next_token(node, now).max(proposal);
                    node.key = Some(Key { id, until: time + self.ttl, handed: false });
                } else if !is_of(node, id) {
                    if node.first && !node.line.contains(&id) {
                        node.line.push(id);
                    }
                    return Some(Said::Busy);
                }
                node.key = Some(Key { id, until: time + self.ttl, handed: false });
                node.fence = node.fence.max(proposal);
                Some(Said::Held { token: node.fence, counts })
            }
            Ask::Renew if is_of(node, id) => {
                node.key = Some(Key { id, until: time + self.ttl, handed: false });
                Some(Said::Renewed { counts })
            }
            Ask::Renew => Some(Said::NotYours),
            Ask::Undo => {
                self.release(node, id, now);
                None
            }
            Ask::Release => {
                node.line.retain(|waiting| *waiting != id);
                self.release(node, id, now);
                None
            }
        }
    }

    /// Whether a request is refused because it was sent too long ago.
    pub(super) fn is_late(&self, node: &Node, request: &Request, now: Tick) -> bool {
        let expires = match request.ask {
            Ask::Acquire { .. } => !self.breaks(Rule::LateAcquiresRefused),
            Ask::Undo => !self.breaks(Rule::LateUndosRefused),
            Ask::Renew => self.renewals_expire,
            Ask::Release => false,
        };
        expires && now + node.ahead > request.sent + self.patience
    }

    fn release(&self, node: &mut Node, id: Id, now: Tick) {
        if is_of(node, id) || self.breaks(Rule::OwnerCheck) {
            node.key = None;
        }
        if node.key.is_none() {
            self.hand_over(node, now);
        }
    }

    /// Gives a free key to the first in line.
    fn hand_over(&self, node: &mut Node, now: Tick) -> bool {
        let waits = !node.line.is_empty();
        if waits {
            let id = node.line.remove(0);
            node.fence = self.next_token(node, now);
            node.key = Some(Key { id, until: now + node.ahead + self.claim, handed: true });
        }
        waits
    }

    fn next_token(&self, node: &Node, now: Tick) -> u8 {
        let clock =
            if self.breaks(Rule::ClockInTokens) { 0 } else { wall(now + node.ahead, node.skew) };
        clock.max(node.fence + 1)
    }

    /// What time does to a node.
    pub(super) fn age(&self, node: &mut Node, now: Tick) {
        let time = now + node.ahead;
        if node.key.as_ref().is_some_and(|key| time >= key.until) {
            node.key = None;
        }
        if node.votes_from.is_some_and(|from| time > from + self.patience) {
            node.votes_from = None;
        }
    }

    /// Comes back without data.
    pub(super) fn restart(&self, node: &mut Node, now: Tick) {
        node.key = None;
        node.fence = 0;
        node.line.clear();
        node.votes_from = Some(now + node.ahead + self.ttl);
    }
}

impl Node {
    /// Whether keys that it has forgotten may not have expired at this moment.
    pub(super) fn is_quarantined(&self, now: Tick) -> bool {
        self.votes_from.is_some_and(|from| now + self.ahead < from)
    }
}

pub(super) fn is_of(node: &Node, id: Id) -> bool {
    node.key.as_ref().is_some_and(|key| key.id == id)
}

/// Wall clocks are finer than what happens, as in earnest: tokens do not run ahead of them by being
/// many.
pub(super) const WALL_PER_TICK: u8 = 4;

/// A wall clock; it does not begin at the time at which fences do.
pub(super) fn wall(time: Tick, skew: Tick) -> u8 {
    time * WALL_PER_TICK + skew + 1
}
