//! The state of everything: nodes, clients, and what is on its way between them.
//!
//! It is kept by columns, a node with what each client knows of it and has under way to it: so
//! nodes that are alike can change places, and a state and its mirror images are explored once.

/// Time on the clients' clocks, and on a node's, which may have run ahead of them.
pub(super) type Tick = u8;

pub(super) const NODES: usize = 3;
/// How often a client takes the lock at most; once more to see whether it still can.
pub(super) const TURNS_MAX: usize = 2;

/// Whose: which client, and its how-manieth lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Id {
    pub(super) client: u8,
    pub(super) turn: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) id: Id,
    /// On the node's clock.
    pub(super) until: Tick,
    /// Given to a waiter who did not ask for it at this moment.
    pub(super) handed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Node {
    /// The node that keeps the line.
    pub(super) first: bool,
    /// By how much its wall clock is wrong; only tokens know of it.
    pub(super) skew: Tick,
    /// How far its clock has run ahead of the clients'.
    pub(super) ahead: Tick,
    pub(super) key: Option<Key>,
    pub(super) fence: u8,
    pub(super) line: Vec<Id>,
    /// From when on it votes again, after it came back without data.
    pub(super) votes_from: Option<Tick>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Ask {
    Acquire {
        proposal: u8,
    },
    Renew,
    /// Takes back an acquisition that came to nothing, before it is asked for again.
    Undo,
    /// The end of a turn.
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Request {
    pub(super) turn: u8,
    pub(super) round: u8,
    pub(super) sent: Tick,
    pub(super) ask: Ask,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Said {
    /// `counts`: not in quarantine.
    Held {
        token: u8,
        counts: bool,
    },
    Busy,
    Late,
    Renewed {
        counts: bool,
    },
    /// Gone, or another's.
    NotYours,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Reply {
    pub(super) to: Request,
    pub(super) said: Said,
}

/// What counts of a node's answers to the question at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Answer {
    Held(u8),
    Busy,
    Unknown,
}

/// What one client knows of one node, and has under way to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Seat {
    pub(super) answer: Option<Answer>,
    /// When the request was sent that the node last said yes to.
    pub(super) vote: Option<Tick>,
    /// What the node says does not count for this lease.
    pub(super) barred: bool,
    pub(super) renewed: bool,
    /// The largest token that the node was asked to store in this round.
    pub(super) proposed: u8,
    /// Until when an undo whose answer was lost may still be carried out.
    pub(super) undo_until: Option<Tick>,
    /// Requests on the open connection, in order.
    pub(super) wire: Vec<Request>,
    /// Answers on the open connection, in order.
    pub(super) back: Vec<Reply>,
    /// Requests on connections that were given up. They may still arrive; nobody hears the
    /// answers.
    pub(super) stray: Vec<Request>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Stage {
    Idle,
    Asking,
    /// A round came to nothing, and what it won is being taken back.
    Between,
    /// It has the lock and a token, and may be wrong about the lock.
    Holding {
        renewals: u8,
        token: u8,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Client {
    pub(super) stage: Stage,
    pub(super) turn: u8,
    pub(super) round: u8,
    /// When it last asked for a key or its renewal, by turn; `None` when nothing of that turn is
    /// left anywhere.
    pub(super) last_sent: [Option<Tick>; TURNS_MAX + 1],
}

impl Client {
    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.stage, Stage::Idle | Stage::Done)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Column<const C: usize> {
    pub(super) node: Node,
    pub(super) seats: [Seat; C],
}

/// How many faults are still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Faults {
    pub(super) restarts: u8,
    pub(super) breaks: u8,
    pub(super) jumps: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct World<const C: usize> {
    pub(super) now: Tick,
    pub(super) clients: [Client; C],
    pub(super) columns: [Column<C>; NODES],
    pub(super) faults: Faults,
    /// The token that was handed out last, and how many have been.
    pub(super) token: u8,
    pub(super) handed_out: u8,
    /// A token was handed out that is not above the one before.
    pub(super) token_fell: bool,
}

impl<const C: usize> World<C> {
    /// How many messages are on open connections.
    pub(super) fn in_flight(&self) -> usize {
        self.columns
            .iter()
            .flat_map(|column| &column.seats)
            .map(|seat| seat.wire.len() + seat.back.len())
            .sum()
    }

    /// Makes almost all mirror images the same: clients are alike, and so are nodes.
    pub(super) fn fold(&mut self) {
        for end in (1..C).rev() {
            for client in 0..end {
                if self.clients[client] > self.clients[client + 1] {
                    self.swap(client);
                }
            }
        }
        self.columns.sort_unstable();
        for client in 1..C {
            if self.clients[client - 1] == self.clients[client] {
                let mut other = self.clone();
                other.swap(client - 1);
                other.columns.sort_unstable();
                if other < *self {
                    *self = other;
                }
            }
        }
    }

    /// Lets a client and the next one change places.
    fn swap(&mut self, client: usize) {
        self.clients.swap(client, client + 1);
        for column in &mut self.columns {
            column.seats.swap(client, client + 1);
            let key = column.node.key.as_mut().map(|key| &mut key.id);
            for id in key.into_iter().chain(&mut column.node.line) {
                if usize::from(id.client) == client {
                    id.client += 1;
                } else if usize::from(id.client) == client + 1 {
                    id.client -= 1;
                }
            }
        }
    }
}
