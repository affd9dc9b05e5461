//! A model of what one claim leaves on one node over several, checked exhaustively. The claim sends
//! its requests over two connections, so a later one can overtake an earlier one. The other nodes
//! are not modelled: a round can end in any way, before or after the reply of this node.
//!
//! The library's own code decides what is cleaned up: `footprint.rs`, and `InFlight` after a
//! release.

use stateright::Property;

use super::check::{Breakable, assert_holds, assert_violated};
use crate::{backend::redlock::Footprint, core::quorum::NodeSet, sys::clock::Moment};

type Tick = u64;

/// From this many ticks after it was sent, the node ignores a request, unless it ends the claim.
const REQUEST_TTL: Tick = 2;
const NOTHING_LEFT: &str = "after the clean-up and all requests, the node does not have the id";

#[derive(Clone, Debug)]
struct Model {
    horizon: Tick,
    rounds: u8,
    /// Number of connections that may break.
    breaks: u8,
    broken: &'static [Rule],
}

const BOUNDS: Model = Model { horizon: 4, rounds: 3, breaks: 1, broken: &[] };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A confirmed release says nothing about requests over other connections.
    OvertakenIsRemembered,
    /// A release shows that a request has arrived, but not which one.
    ReleasedMayBeAnother,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    Acquire,
    /// Releases the vote of a lost round.
    Undo,
    /// Ends the claim.
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Request {
    kind: Kind,
    sent: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Outcome {
    Pending,
    Held,
    Expired,
    /// The connection broke.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Verdict {
    Granted,
    /// The nodes disagree about the token, for example.
    Undecided,
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Asks again at `from` or later, because an undo may be in flight.
    Idle {
        from: Tick,
    },
    Asking {
        connection: usize,
        sent: Tick,
        outcome: Outcome,
    },
    Undoing {
        connection: usize,
        sent: Tick,
    },
    Holding,
    Releasing {
        connection: usize,
    },
    /// The clean-up releases the lock at `from` or later.
    Left {
        from: Tick,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: Tick,
    /// The node has the id of the claim.
    is_kept: bool,
    /// Requests in flight on each connection, in order.
    connections: [Vec<Request>; 2],
    /// Requests on broken connections.
    orphans: Vec<Request>,
    footprint: Footprint,
    rounds: u8,
    breaks: u8,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Tick,
    Ask(usize),
    /// The round ends.
    Decide(Verdict),
    /// The claim waits no longer for the reply to an undo.
    Abandon,
    /// A request on this connection reaches the node, and its reply comes at once.
    Arrive(usize),
    ArriveOrphaned(usize),
    Break(usize),
    /// The caller gives up, or releases the lock over this connection.
    End(usize),
    CleanUp,
}

fn moment(tick: Tick) -> Moment {
    Moment::from_nanos(tick)
}

fn node() -> NodeSet {
    NodeSet::single(0)
}

fn node_if(condition: bool) -> NodeSet {
    if condition { node() } else { NodeSet::EMPTY }
}

impl State {
    fn send(&mut self, connection: usize, kind: Kind) {
        self.connections[connection].push(Request { kind, sent: self.now });
    }

    /// Executes a request. Returns whether the node had the id before, or None if it has expired.
    fn serve(&mut self, request: Request) -> Option<bool> {
        let had = self.is_kept;
        if request.kind != Kind::Release && self.now >= request.sent + REQUEST_TTL {
            return None;
        }
        self.is_kept = request.kind == Kind::Acquire;
        Some(had)
    }

    /// Handles a reply, or its loss. `had` is what [`serve`](Self::serve) has returned.
    fn on_reply(&mut self, connection: usize, had: Option<bool>, is_lost: bool, model: &Model) {
        match &mut self.phase {
            Phase::Asking { connection: asked, outcome, .. } if *asked == connection => {
                *outcome = match had {
                    _ if is_lost => Outcome::Unknown,
                    Some(_) => Outcome::Held,
                    None => Outcome::Expired,
                };
            }
            Phase::Undoing { connection: asked, sent } if *asked == connection => {
                let sent = *sent;
                if is_lost {
                    return self.await_undo(sent);
                }
                if had.is_some() {
                    self.footprint.forget(0);
                    if model.broken.contains(&Rule::OvertakenIsRemembered) {
                        self.footprint.may_hold = NodeSet::EMPTY;
                    }
                }
                let Footprint { in_flight, may_hold, .. } = &mut self.footprint;
                in_flight.unanswered = in_flight.unanswered.intersection(*may_hold);
                self.phase = Phase::Idle { from: self.now };
            }
            Phase::Releasing { connection: asked } if *asked == connection => {
                let released_on = node_if(had == Some(true) && !is_lost);
                let Footprint { in_flight, may_hold, .. } = self.footprint;
                let now = moment(self.now);
                let (left, until) = in_flight.left_after_release(now, node(), released_on);
                let failed_on = may_hold.intersection(node_if(is_lost));
                let from = if left.is_empty() { self.now } else { until.as_nanos() };
                self.leave(left.union(failed_on), from);
            }
            _ => {}
        }
    }

    fn await_undo(&mut self, sent: Tick) {
        let from = sent + REQUEST_TTL;
        self.footprint.on_pending_release(moment(from));
        self.phase = Phase::Idle { from };
    }

    fn leave(&mut self, nodes: NodeSet, from: Tick) {
        self.phase = if nodes.is_empty() { Phase::Done } else { Phase::Left { from } };
    }

    fn decide(&mut self, verdict: Verdict, model: &Model) {
        let Phase::Asking { connection, sent, outcome } = self.phase else { return };
        let unanswered = node_if(outcome == Outcome::Pending);
        let unknown = node_if(outcome == Outcome::Unknown);
        let footprint = &mut self.footprint;
        let known_before = if model.broken.contains(&Rule::ReleasedMayBeAnother) {
            NodeSet::EMPTY
        } else {
            footprint.may_hold
        };
        footprint.on_round(unanswered, unknown, known_before, moment(sent + REQUEST_TTL));
        let may_be_held = node_if(outcome != Outcome::Expired);
        footprint.may_hold = footprint.may_hold.union(may_be_held);
        self.phase = match verdict {
            Verdict::Granted => Phase::Holding,
            Verdict::Lost if !may_be_held.is_empty() => {
                self.send(connection, Kind::Undo);
                Phase::Undoing { connection, sent: self.now }
            }
            Verdict::Undecided | Verdict::Lost => Phase::Idle { from: self.now },
        };
    }

    fn has_requests(&self) -> bool {
        self.connections.iter().any(|requests| !requests.is_empty()) || !self.orphans.is_empty()
    }
}

impl stateright::Model for Model {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            now: 0,
            is_kept: false,
            connections: Default::default(),
            orphans: Vec::new(),
            footprint: Footprint::new(moment(0)),
            rounds: self.rounds,
            breaks: self.breaks,
            phase: Phase::Idle { from: 0 },
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.now < self.horizon {
            steps.push(Step::Tick);
        }
        let connections = 0..state.connections.len();
        match state.phase {
            Phase::Idle { from } => {
                if state.rounds > 0 && state.now >= from {
                    steps.extend(connections.clone().map(Step::Ask));
                }
                steps.push(Step::End(0));
            }
            Phase::Asking { .. } => {
                let verdicts = [Verdict::Granted, Verdict::Undecided, Verdict::Lost];
                steps.extend(verdicts.map(Step::Decide));
            }
            Phase::Undoing { .. } => steps.push(Step::Abandon),
            Phase::Holding => steps.extend(connections.clone().map(Step::End)),
            Phase::Left { from } if state.now >= from => steps.push(Step::CleanUp),
            Phase::Releasing { .. } | Phase::Left { .. } | Phase::Done => {}
        }
        for connection in connections.filter(|at| !state.connections[*at].is_empty()) {
            steps.push(Step::Arrive(connection));
            if state.breaks > 0 {
                steps.push(Step::Break(connection));
            }
        }
        steps.extend((0..state.orphans.len()).map(Step::ArriveOrphaned));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Tick => next.now += 1,
            Step::Ask(connection) => {
                next.rounds -= 1;
                next.send(connection, Kind::Acquire);
                let (sent, outcome) = (next.now, Outcome::Pending);
                next.phase = Phase::Asking { connection, sent, outcome };
            }
            Step::Decide(verdict) => next.decide(verdict, self),
            Step::Abandon => {
                if let Phase::Undoing { sent, .. } = next.phase {
                    next.await_undo(sent);
                }
            }
            Step::Arrive(connection) => {
                let request = next.connections[connection].remove(0);
                let had = next.serve(request);
                // Nobody waits for the replies to earlier requests.
                if next.connections[connection].is_empty() {
                    next.on_reply(connection, had, false, self);
                }
            }
            Step::ArriveOrphaned(index) => {
                let request = next.orphans.remove(index);
                next.serve(request);
            }
            Step::Break(connection) => {
                next.breaks -= 1;
                next.orphans.extend(std::mem::take(&mut next.connections[connection]));
                next.orphans.sort_unstable();
                next.on_reply(connection, None, true, self);
            }
            Step::End(connection) => match next.phase {
                Phase::Holding => {
                    next.send(connection, Kind::Release);
                    next.phase = Phase::Releasing { connection };
                }
                _ => {
                    let now = moment(next.now);
                    let left = next.footprint.residue(now, node(), NodeSet::EMPTY, String::new);
                    let from = |until: Moment| until.as_nanos().max(next.now);
                    let left = left.map(|left| (left.nodes, from(left.in_flight_until)));
                    let (nodes, from) = left.unwrap_or((NodeSet::EMPTY, next.now));
                    next.leave(nodes, from);
                }
            },
            Step::CleanUp => (next.is_kept, next.phase) = (false, Phase::Done),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Model>> {
        vec![
            Property::always(NOTHING_LEFT, |_, state: &State| {
                state.phase != Phase::Done || state.has_requests() || !state.is_kept
            }),
            Property::sometimes("a request arrives after the release", |_, state: &State| {
                matches!(state.phase, Phase::Left { .. }) && state.is_kept && !state.has_requests()
            }),
            Property::sometimes("nothing is left to clean up", |model, state: &State| {
                state.phase == Phase::Done && state.rounds < model.rounds && !state.is_kept
            }),
        ]
    }
}

impl Breakable for Model {
    type Rule = Rule;

    fn with_broken(&self, broken: &'static [Rule]) -> Model {
        Model { broken, ..self.clone() }
    }
}

#[test]
fn requests_that_overtake_each_other_leave_nothing() {
    assert_holds(BOUNDS, 10_000);
    let without_breaks = Model { breaks: 0, ..BOUNDS };
    assert_violated(&without_breaks, &[Rule::OvertakenIsRemembered], NOTHING_LEFT);
    assert_violated(&without_breaks, &[Rule::ReleasedMayBeAnother], NOTHING_LEFT);
}
