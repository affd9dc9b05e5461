//! What a node does with a request: the scripts, as far as they matter here.

use super::{
    Model, Rule,
    world::{Id, Key, Kind, Node, Outcome, Request, RequestKind, Tick},
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
            RequestKind::Acquire { proposal, is_decided } if request.of == Kind::Read => {
                let stored = self.acquire_shared(node, id, proposal, is_decided, now);
                Some(stored.map_or(Outcome::Busy, |token| Outcome::Held { token, counts }))
            }
            RequestKind::Acquire { .. } if self.has_other_readers(node) => Some(Outcome::Busy),
            RequestKind::Acquire { proposal, .. } => {
                if node.key.is_none() && !self.grant_next(node, now) {
                    node.queue.retain(|waiting| *waiting != id);
                    node.token = self.next_token(node, now).max(proposal);
                    node.key = Some(Key { id, until: time + self.ttl, by_grant: false });
                } else if !is_alone(node, id) {
                    if node.has_queue && !node.queue.contains(&id) {
                        node.queue.push(id);
                    }
                    return Some(Outcome::Busy);
                }
                node.key = Some(Key { id, until: time + self.ttl, by_grant: false });
                node.token = node.token.max(proposal);
                Some(Outcome::Held { token: node.token, counts })
            }
            RequestKind::Renew if request.of == Kind::Read => {
                let is_renewed = is_member(node, id);
                if is_renewed {
                    self.add_member(node, id, now);
                }
                Some(if is_renewed { Outcome::Renewed { counts } } else { Outcome::NotHeld })
            }
            RequestKind::Renew if is_alone(node, id) => {
                node.key = Some(Key { id, until: time + self.ttl, by_grant: false });
                Some(Outcome::Renewed { counts })
            }
            RequestKind::Renew => Some(Outcome::NotHeld),
            RequestKind::Downgrade => {
                let is_repeated = is_member(node, id);
                if is_alone(node, id) {
                    node.key = None;
                    self.add_member(node, id, now);
                } else if !is_repeated {
                    return Some(Outcome::NotHeld);
                } else if !self.breaks(Rule::RepeatedDowngradeExtends) {
                    self.add_member(node, id, now);
                }
                Some(Outcome::Downgraded { counts })
            }
            RequestKind::Undo => {
                self.release(node, id, request.of, now);
                None
            }
            RequestKind::Release => {
                node.queue.retain(|waiting| *waiting != id);
                self.release(node, id, request.of, now);
                None
            }
        }
    }

    /// Whether readers keep the lock from a writer.
    fn has_other_readers(&self, node: &Node) -> bool {
        !node.members.is_empty() && !self.breaks(Rule::ReadersExcludeWriters)
    }

    /// Acquires the lock for a reader. Returns the token to report, or None if the lock is held
    /// alone. Models of readers have no queue.
    fn acquire_shared(
        &self,
        node: &mut Node,
        id: Id,
        proposal: u8,
        is_decided: bool,
        now: Tick,
    ) -> Option<u8> {
        // A node that has missed the downgrade of this writer has its key.
        let is_known = is_of(node, id);
        if is_alone(node, id) {
            node.key = None;
        }
        if node.key.is_some() && !self.breaks(Rule::WritersExcludeReaders) {
            return None;
        }
        self.add_member(node, id, now);
        let minted = if is_known { node.token } else { self.next_token(node, now) };
        node.token = minted.max(proposal);
        let applies = is_known || self.breaks(Rule::DecidedForMembersOnly);
        Some(if is_decided && applies { proposal } else { node.token })
    }

    /// Adds a reader, or extends its time.
    fn add_member(&self, node: &mut Node, id: Id, now: Tick) {
        let until = now + node.ahead + self.ttl;
        node.members.retain(|member| member.id != id);
        node.members.push(Key { id, until, by_grant: false });
        node.members.sort_unstable();
    }

    /// Whether a request is refused because it was sent too long ago.
    pub(super) fn has_expired(&self, node: &Node, request: &Request, now: Tick) -> bool {
        let expires = match request.kind {
            RequestKind::Acquire { .. } => !self.breaks(Rule::ExpiredAcquiresRefused),
            RequestKind::Undo => !self.breaks(Rule::ExpiredUndosRefused),
            RequestKind::Renew | RequestKind::Downgrade => self.renewals_expire,
            RequestKind::Release => false,
        };
        expires && now + node.ahead > request.sent + self.request_ttl
    }

    fn release(&self, node: &mut Node, id: Id, of: Kind, now: Tick) {
        if is_alone(node, id) || self.breaks(Rule::OwnerCheck) {
            node.key = None;
        }
        // The release of a writer leaves the reader that it has become.
        if of == Kind::Read && is_member(node, id) {
            let leaves_others = !self.breaks(Rule::ReaderLeavesOthers);
            node.members.retain(|member| leaves_others && member.id != id);
        }
        let is_free = node.key.is_none() && node.members.is_empty();
        if is_free && !self.grant_next(node, now) {
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
        node.members.retain(|member| time < member.until);
        if node.votes_from.is_some_and(|from| time > from + self.request_ttl) {
            node.votes_from = None;
        }
    }

    /// Restarts the node without its data.
    pub(super) fn restart(&self, node: &mut Node, now: Tick) {
        node.key = None;
        node.members.clear();
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

/// Whether the node keeps the lock for this client, alone or as a reader.
pub(super) fn is_of(node: &Node, id: Id) -> bool {
    is_alone(node, id) || is_member(node, id)
}

fn is_alone(node: &Node, id: Id) -> bool {
    node.key.as_ref().is_some_and(|key| key.id == id)
}

fn is_member(node: &Node, id: Id) -> bool {
    node.members.iter().any(|member| member.id == id)
}

/// Wall clocks are finer than ticks, as in reality, so that many tokens do not run ahead of them.
pub(super) const WALL_PER_TICK: u8 = 4;

/// The wall clock of a node. Never zero, because stored tokens start at zero.
pub(super) fn wall(time: Tick, skew: Tick) -> u8 {
    time * WALL_PER_TICK + skew + 1
}
