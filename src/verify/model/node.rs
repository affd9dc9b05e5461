//! What a node does with a request: the scripts, as far as they matter here.

use super::{
    Model, Rule,
    world::{Id, Key, Node, Outcome, Request, RequestKind, Tick},
};

impl<const C: usize> Model<C> {
    /// Executes a request. Returns None if no client waits for the reply.
    pub(super) fn serve(
        &self,
        node: &mut Node,
        id: Id,
        request: &Request,
        now: Tick,
    ) -> Option<Outcome> {
        let time = now + node.ahead;
        if self.has_expired(node, request, now) {
            return matches!(request.kind, RequestKind::Acquire { .. }).then_some(Outcome::Expired);
        }
        let sent = if self.breaks(Rule::SentAfterQuarantine) { now } else { request.sent };
        let counts = !node.is_quarantined(sent) || self.breaks(Rule::Quarantine);
        match request.kind {
            RequestKind::Acquire { proposal } => {
                if node.key.is_none() && !self.grant_next(node, now) {
                    node.queue.retain(|waiting| *waiting != id);
                    node.token = self.next_token(node, now).max(proposal);
                    node.key = Some(Key { id, until: time + self.ttl, by_grant: false });
                } else if !is_of(node, id) {
                    if node.has_queue && !node.queue.contains(&id) {
                        node.queue.push(id);
                    }
                    return Some(Outcome::Busy);
                }
                node.key = Some(Key { id, until: time + self.ttl, by_grant: false });
                node.token = node.token.max(proposal);
                Some(Outcome::Held { token: node.token, counts })
            }
            RequestKind::Renew if is_of(node, id) => {
                node.key = Some(Key { id, until: time + self.ttl, by_grant: false });
                Some(Outcome::Renewed { counts })
            }
            RequestKind::Renew => Some(Outcome::NotHeld),
            RequestKind::Undo => {
                self.release(node, id, now);
                None
            }
            RequestKind::Release => {
                node.queue.retain(|waiting| *waiting != id);
                self.release(node, id, now);
                None
            }
        }
    }

    /// Whether a request is refused because it was sent too long ago.
    pub(super) fn has_expired(&self, node: &Node, request: &Request, now: Tick) -> bool {
        let expires = match request.kind {
            RequestKind::Acquire { .. } => !self.breaks(Rule::ExpiredAcquiresRefused),
            RequestKind::Undo => !self.breaks(Rule::ExpiredUndosRefused),
            RequestKind::Renew => self.renewals_expire,
            RequestKind::Release => false,
        };
        expires && now + node.ahead > request.sent + self.request_ttl
    }

    fn release(&self, node: &mut Node, id: Id, now: Tick) {
        if is_of(node, id) || self.breaks(Rule::OwnerCheck) {
            node.key = None;
        }
        if node.key.is_none() && !self.grant_next(node, now) {
            if !self.breaks(Rule::ReleaseRaisesFence) {
                node.fence = node.fence.max(node.token);
            }
            node.token = 0;
        }
    }

    /// Grants a free key to the first waiter in the queue.
    fn grant_next(&self, node: &mut Node, now: Tick) -> bool {
        let has_waiter = !node.queue.is_empty();
        if has_waiter {
            let id = node.queue.remove(0);
            node.token = self.next_token(node, now);
            node.key =
                Some(Key { id, until: now + node.ahead + self.claim_window, by_grant: true });
        }
        has_waiter
    }

    fn next_token(&self, node: &Node, now: Tick) -> u8 {
        let clock =
            if self.breaks(Rule::ClockInTokens) { 0 } else { wall(now + node.ahead, node.skew) };
        clock.max(node.token + 1).max(node.fence + 1)
    }

    /// Lets keys expire and quarantines end.
    pub(super) fn age(&self, node: &mut Node, now: Tick) {
        let time = now + node.ahead;
        if node.key.as_ref().is_some_and(|key| time >= key.until) {
            node.key = None;
        }
        if node.votes_from.is_some_and(|from| time > from + self.request_ttl) {
            node.votes_from = None;
        }
    }

    /// Restarts the node without its data.
    pub(super) fn restart(&self, node: &mut Node, now: Tick) {
        node.key = None;
        (node.token, node.fence) = (0, 0);
        node.queue.clear();
        node.votes_from = Some(now + node.ahead + self.ttl);
    }
}

impl Node {
    /// Whether keys that the node has lost may not have expired yet.
    pub(super) fn is_quarantined(&self, now: Tick) -> bool {
        self.votes_from.is_some_and(|from| now + self.ahead < from)
    }
}

pub(super) fn is_of(node: &Node, id: Id) -> bool {
    node.key.as_ref().is_some_and(|key| key.id == id)
}

/// Wall clocks are finer than ticks, as in reality, so that many tokens do not run ahead of them.
pub(super) const WALL_PER_TICK: u8 = 4;

/// The wall clock of a node. Never zero, because stored tokens start at zero.
pub(super) fn wall(time: Tick, skew: Tick) -> u8 {
    time * WALL_PER_TICK + skew + 1
}
