//! Asking the nodes for a lock, and giving back what a lost vote has won.

use std::time::Duration;

use super::{Acquirer, attempt::Attempt, patience::give_back_until};
use crate::{
    answer::NodeAnswer,
    clock::{self, Moment},
    holder::Holder,
    node::{
        Answer, Failure, Reason, Receipt,
        calls::{Acquire, Acquired, Mode, Release, ReleaseReply},
    },
    redlock::{self, LATE_SLACK, Links, NodeSet, Round, Slip, Trouble, Verdict, Vote, quorum, strongest},
};

/// No ask takes less time than this, however short the lease.
const ASK_MIN: Duration = Duration::from_millis(50);

/// A release on its way to a node, which must not come between what that node is asked next.
pub(super) struct Unsettled {
    pub(super) node: usize,
    /// From then on it is refused where it arrives.
    pub(super) void: Moment,
    /// Of the answer, unless it was lost.
    receipt: Option<Receipt>,
}

impl Unsettled {
    fn is_answered(&self) -> bool {
        self.receipt.as_ref().is_some_and(Receipt::is_settled)
    }

    /// Whether it is over without having released anything. An answer that comes late may be a refusal.
    fn may_be_void(&self, now: Moment) -> bool {
        now >= self.void || self.is_answered() && now.saturating_add(LATE_SLACK) >= self.void
    }
}

/// What the nodes said to an ask.
pub(super) struct Ballot {
    pub(super) verdict: Verdict,
    inner: redlock::Ballot<Acquired>,
    full: bool,
    brief: bool,
}

impl Ballot {
    pub(super) fn slips(&self) -> &[Slip<Acquired>] {
        &self.inner.slips
    }

    pub(super) fn votes(&self) -> &[Option<Vote>] {
        &self.inner.votes
    }

    /// Whether all nodes were asked.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Whether the node with the line was asked for the claim window only.
    pub(super) fn is_brief(&self) -> bool {
        self.brief
    }

    /// What a node said, if it answered.
    pub(super) fn standing(&self, node: usize) -> Option<&Acquired> {
        match self.inner.slips.get(node) {
            Some(Slip::Said(Answer { reply, .. })) => Some(reply),
            _ => None,
        }
    }

    /// When a node was asked, if it answered.
    pub(super) fn asked(&self, node: usize) -> Option<Moment> {
        match self.inner.slips.get(node) {
            Some(Slip::Said(answer)) => Some(answer.sent),
            _ => None,
        }
    }

    /// Whether the lock is ours on this node, whether or not that counts.
    pub(super) fn holds_on(&self, node: usize) -> bool {
        matches!(self.standing(node), Some(Acquired::Held { .. }))
    }

    fn said(&self) -> impl Iterator<Item = &Acquired> {
        (0..self.inner.slips.len()).filter_map(|node| self.standing(node))
    }

    /// The key holds something else than a lock, and where it does not, that is not enough.
    pub(super) fn is_wrong_type(&self) -> bool {
        let nodes = self.inner.slips.len();
        let wrong = self.said().filter(|reply| matches!(reply, Acquired::WrongType)).count();
        wrong > nodes - quorum(nodes)
    }

    fn strongest(&self) -> Option<(usize, &Holder)> {
        strongest(self.said().filter_map(Acquired::holder).map(|holder| (holder, holder)))
    }

    /// Who is in the way: on most of the nodes that told.
    pub(super) fn holder(&self) -> Option<Holder> {
        if let [Slip::Said(answer)] = self.inner.slips.as_slice() {
            return answer.reply.holder().cloned();
        }
        self.strongest().map(|(_, holder)| holder.clone())
    }

    /// Nobody can have a quorum by what was said: contenders have taken the votes from each other.
    pub(super) fn is_split(&self) -> bool {
        let nodes = self.inner.slips.len();
        let silent = nodes - self.said().count();
        nodes > 1 && self.full && self.strongest().is_none_or(|(count, _)| count + silent < quorum(nodes))
    }

    pub(super) fn answers(&self, on: &Acquirer) -> Vec<NodeAnswer> {
        self.inner.answers(&on.redlock, says)
    }

    pub(super) fn into_trouble(self, on: &Acquirer) -> Trouble {
        Trouble::of(&on.redlock, self.inner, says)
    }
}

fn says(reply: &Acquired) -> String {
    match reply {
        Acquired::Held { .. } => "gives it".into(),
        Acquired::Busy { holder, .. } | Acquired::Queued { holder, .. } => format!("held by {holder}"),
        Acquired::WrongType => "its key holds something else than a lock".into(),
        Acquired::Late { .. } => "the request came too late".into(),
    }
}

impl Attempt<'_> {
    /// Asks all nodes, or only the one with the line. What a vote that was not won has won goes back at once, but for the
    /// head of the line.
    pub(super) fn ask(&mut self, mode: Mode, full: bool) -> Result<Ballot, Trouble> {
        let redlock = self.on.redlock.clone();
        let now = clock::now();
        let deadline = now.saturating_add(self.ask_max()).min(self.hard_limit());
        let brief = self.asks_briefly(mode, full);
        if matches!(mode, Mode::Join | Mode::Look) {
            self.in_line = true;
        }
        let mut links = redlock.links(deadline).map_err(Trouble::Alone)?;
        self.give_back_strays(&mut links);
        if matches!(mode, Mode::Join | Mode::Look) {
            self.lined = self.lined.with(NodeSet::only(self.order));
            self.known = self.known.with(NodeSet::only(self.order));
        }
        let to = self.addressees(full)?;
        let waiter = if matches!(mode, Mode::Try) { String::new() } else { self.waiter() };
        let token_min = self.token_min.unwrap_or_else(|| redlock.token_min());
        let (order, claim, heal_ms) = (self.order, self.claim, self.on.heal_ms(self.claim));
        let window_ms = u64::try_from(self.window().as_millis()).unwrap_or(u64::MAX);
        let call = |node| Acquire {
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: if brief && node == order { window_ms } else { claim.ttl_ms() },
            mode: if node == order { mode } else { Mode::Try },
            waiter: if node == order { &waiter } else { "" },
            heal_ms,
            token_min,
        };
        let vote = |node: usize, answer: &Answer<Acquired>| match answer.reply {
            Acquired::Held { .. } if redlock.node(node).quarantined(answer.sent).is_some() => Vote::Unknown,
            Acquired::Held { .. } => Vote::Yes,
            Acquired::Busy { .. } | Acquired::Queued { .. } => Vote::No,
            // Nobody holds it there or stands in line, which keeps nobody from a quorum of the others.
            Acquired::WrongType | Acquired::Late { .. } => Vote::Unknown,
        };
        let ears = if self.several() { NodeSet::only(order) } else { NodeSet::NONE };
        let round = if full { Round { ears, ..Round::new(to, deadline) } } else { Round::all(to, deadline) };
        let inner = redlock.ask(&mut links, round, call, vote);
        let (open, broken) = (inner.open(), inner.broken());
        if !broken.is_empty() {
            self.late_until = self.late_until.max(deadline);
        }
        // Those that were open before may have been asked over another connection now, or not at all.
        self.late_until = self.late_until();
        self.open = (open, deadline);
        let verdict = match inner.verdict() {
            _ if !full => self.verdict_of_the_line(&inner),
            // Nobody passes those who stand in line.
            Verdict::Won if self.several() && inner.votes[order] == Some(Vote::No) => Verdict::Lost,
            verdict => verdict,
        };
        self.whole &= verdict == Verdict::Won;
        let ballot = Ballot { verdict, inner, full, brief };
        let ours: NodeSet = (0..redlock.len()).filter(|node| ballot.holds_on(*node)).collect();
        let taken = ours.with(open).with(broken);
        self.known = self.known.with(taken);
        if self.several() && full && verdict != Verdict::Won {
            self.leading = self.keeps_the_head(mode, &ballot);
            let head = if self.leading { NodeSet::only(order) } else { NodeSet::NONE };
            self.give_back(&mut links, taken.without(head), now, deadline);
            // Where that is confirmed, it came behind what was asked.
            self.open.0 = self.open.0.both(self.known);
        }
        Ok(ballot)
    }

    /// How long an ask may take: a short lease leaves no time for a long wait for an answer.
    pub(super) fn ask_max(&self) -> Duration {
        self.on.redlock.operation_timeout().min((self.claim.ttl / 3).max(ASK_MIN))
    }

    /// Whether the node with the line is asked to keep the lock for the claim window only. Who waits may keep it there
    /// without having it elsewhere, and must not keep it from others for a whole lease by dying.
    fn asks_briefly(&self, mode: Mode, full: bool) -> bool {
        let expects_to_wait = self.leading || self.has_lost();
        self.several() && (!full || (!self.whole && expects_to_wait && self.waits(mode)))
    }

    fn waits(&self, mode: Mode) -> bool {
        mode != Mode::Leave && clock::now() < self.limit
    }

    /// Whom to ask: not those to which something is under way that must not come between.
    fn addressees(&self, full: bool) -> Result<NodeSet, Trouble> {
        let unsettled: NodeSet = self.unsettled.iter().map(|release| release.node).collect();
        let to = if full { self.on.redlock.all() } else { NodeSet::only(self.order) }.without(unsettled);
        if to.is_empty() {
            return Err(Trouble::Alone(Failure { sent: false, reason: Reason::TimedOut }));
        }
        Ok(to)
    }

    /// The node with the line speaks for itself.
    fn verdict_of_the_line(&self, inner: &redlock::Ballot<Acquired>) -> Verdict {
        match inner.votes.get(self.order) {
            Some(Some(Vote::No)) => Verdict::Lost,
            _ => Verdict::Unreachable,
        }
    }

    /// Who waits, and has the lock on the node with the line, keeps it there: that is the head of the line, and whoever
    /// else asks has to give way. Unless it has asked for the whole lease there; or another holds a node that comes
    /// before, for then the line is there; or too few nodes are there for anybody.
    fn keeps_the_head(&self, mode: Mode, ballot: &Ballot) -> bool {
        let before = (0..self.order).any(|node| ballot.standing(node).is_some_and(|reply| reply.holder().is_some()));
        let keeps = ballot.is_brief() && self.waits(mode);
        keeps && ballot.verdict == Verdict::Lost && ballot.holds_on(self.order) && !before
    }

    fn give_back_strays(&mut self, links: &mut Links) {
        let now = clock::now();
        // A node that is far away answers later than is waited for, and every time.
        self.unsettled.iter().for_each(|release| self.on.redlock.hear_owed(links, release.node));
        let void = self.unsettled.iter().filter(|release| release.may_be_void(now)).map(|release| release.node);
        let void: NodeSet = void.collect();
        self.unsettled.retain(|release| now < release.void && !release.is_answered());
        // What was not given back in time may be there still.
        let head = if self.leading { NodeSet::only(self.order) } else { NodeSet::NONE };
        let strays = std::mem::take(&mut self.strays).with(void.both(self.known)).without(head);
        if !strays.is_empty() {
            let timeout = self.on.redlock.operation_timeout();
            self.give_back(links, strays, now, now.saturating_add(timeout));
        }
    }

    /// Releases what was won, and what may have been, behind the request for it. A node that has not confirmed it by the
    /// time that the others take is not asked again before it has, or the release is void: a late one would take away what
    /// a later ask has won.
    fn give_back(&mut self, links: &mut Links, nodes: NodeSet, asked: Moment, deadline: Moment) {
        if nodes.is_empty() {
            return;
        }
        let now = clock::now();
        let wait_until = give_back_until(asked, now, self.hard_limit());
        if now >= wait_until {
            // The caller has no time left; it is taken back in the background.
            self.strays = self.strays.with(nodes);
            return;
        }
        let deadline = deadline.max(wait_until);
        let round = Round { wait_until, ..Round::all(nodes, deadline) };
        let waiter = self.waiter();
        let claim = self.claim;
        let release = |_| Release { key: &claim.key, id: claim.id.as_str().as_bytes(), waiter: &waiter, in_time: true };
        let given = self.on.redlock.ask(links, round, release, |_, _| Vote::Yes);
        for node in nodes.iter() {
            match &given.slips[node] {
                // It was refused and is void; the lock may be ours there still.
                Slip::Said(Answer { reply: ReleaseReply::Late { .. }, .. }) => {}
                Slip::Said(_) => {
                    self.known = self.known.without(NodeSet::only(node));
                    self.lined = self.lined.without(NodeSet::only(node));
                }
                Slip::Failed(failure) if !failure.sent => {}
                _ => {
                    let receipt = given.receipts.iter().find(|(of, _)| *of == node).map(|(_, receipt)| receipt.clone());
                    self.unsettled.push(Unsettled { node, void: deadline.saturating_add(LATE_SLACK), receipt });
                    self.late_until = self.late_until.max(deadline);
                }
            }
        }
    }
}
