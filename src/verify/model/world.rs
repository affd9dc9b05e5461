//! The state: nodes, clients, and the messages between them.
//!
//! It is stored in columns: a node, with what each client knows of it and has in flight to it. So
//! equal nodes can be swapped, and a state and its mirror images are explored only once.

/// Time on the clients' clocks, or on a node's clock, which may have run ahead of them.
pub(super) type Tick = u8;

pub(super) const NODES: usize = 3;
/// Maximum number of turns of a client. One more is played to check that the client can still
/// acquire the lock.
pub(super) const TURNS_MAX: usize = 2;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    /// The lock for itself alone, as a mutex or a writer.
    Alone,
    /// The lock together with other readers.
    Read,
}

/// A lock identifier: a client and the number of its turn.
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
    /// Granted to a waiter, rather than in reply to its request.
    pub(super) by_grant: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Node {
    /// Whether the queue is on this node.
    pub(super) has_queue: bool,
    /// Error of the node's wall clock, which only affects tokens.
    pub(super) skew: Tick,
    /// How far the node's clock has run ahead of the clients' clocks.
    pub(super) ahead: Tick,
    /// Of the client that has the lock alone.
    pub(super) key: Option<Key>,
    /// Of the readers that have the lock, sorted; empty while there is a `key`.
    pub(super) members: Vec<Key>,
    /// Token of the lock, until its release; zero if there is none.
    pub(super) token: u8,
    /// At least the tokens of all locks that were released, also those of other names.
    pub(super) fence: u8,
    pub(super) queue: Vec<Id>,
    /// When the node votes again after it restarted without its data.
    pub(super) votes_from: Option<Tick>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum RequestKind {
    Acquire {
        proposal: u8,
        /// For a reader: the node is known to have stored a token that is at most `proposal`.
        is_decided: bool,
    },
    Renew,
    /// Turns a writer into a reader.
    Downgrade,
    /// Undoes an acquire of a failed round before the next round.
    Undo,
    /// Ends a turn.
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Request {
    pub(super) turn: u8,
    pub(super) round: u8,
    pub(super) sent: Tick,
    pub(super) kind: RequestKind,
    /// What its client has, or asks for.
    pub(super) of: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Outcome {
    /// `counts` is false in quarantine.
    Held {
        token: u8,
        counts: bool,
    },
    Busy,
    Expired,
    Renewed {
        counts: bool,
    },
    Downgraded {
        counts: bool,
    },
    /// The key is gone, or has another holder.
    NotHeld,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Reply {
    pub(super) to: Request,
    pub(super) outcome: Outcome,
}

/// A node's reply to the current acquire, as far as it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Response {
    Held(u8),
    Busy,
    Unknown,
}

/// What one client knows of one node, and has in flight to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClientView {
    pub(super) response: Option<Response>,
    /// When the last request was sent that the node confirmed.
    pub(super) vote: Option<Tick>,
    /// Replies of this node do not count for this lease.
    pub(super) excluded: bool,
    pub(super) renewed: bool,
    /// The largest token that the node was asked to store in this round.
    pub(super) proposed: u8,
    /// Until when an undo without a reply may still be executed.
    pub(super) undo_until: Option<Tick>,
    /// Requests on the open connection, in order.
    pub(super) requests: Vec<Request>,
    /// Replies on the open connection, in order.
    pub(super) replies: Vec<Reply>,
    /// Requests on dropped connections. They may still arrive, but nobody reads their replies.
    pub(super) orphans: Vec<Request>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Phase {
    Idle,
    Acquiring,
    /// A round has failed, and its votes are being undone.
    Retrying,
    /// Has the lock and a token, but may have lost the lock without knowing it.
    Holding {
        renewals: u8,
        token: u8,
    },
    /// A writer that has asked to become a reader, and asks again if it has `retries` left.
    Downgrading {
        renewals: u8,
        token: u8,
        retries: u8,
    },
    Done,
}

impl Phase {
    /// The token of a client that has the lock, as far as it knows.
    pub(super) fn token(self) -> Option<u8> {
        match self {
            Phase::Holding { token, .. } | Phase::Downgrading { token, .. } => Some(token),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Client {
    pub(super) kind: Kind,
    /// What it has now, or asks for: `Kind::Read` once a writer asks to become a reader.
    pub(super) has: Kind,
    /// For a reader, the largest token of the holds that had ended when it asked.
    pub(super) floor: u8,
    pub(super) phase: Phase,
    pub(super) turn: u8,
    pub(super) round: u8,
    /// When the last acquire or renewal was sent, by turn. None once nothing of that turn is left
    /// anywhere.
    pub(super) last_sent: [Option<Tick>; TURNS_MAX + 1],
}

impl Client {
    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Done)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Column<const C: usize> {
    pub(super) node: Node,
    pub(super) views: [ClientView; C],
}

/// Numbers of faults that may still occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Faults {
    pub(super) restarts: u8,
    pub(super) breaks: u8,
    pub(super) jumps: u8,
    /// Releases of locks with other names, which raise the fence of a node.
    pub(super) others: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct World<const C: usize> {
    pub(super) now: Tick,
    pub(super) clients: [Client; C],
    pub(super) columns: [Column<C>; NODES],
    pub(super) faults: Faults,
    /// Last token that was issued, and number of tokens issued.
    pub(super) token: u8,
    /// If there are readers, the largest token of a hold that has ended, and of a lock that was
    /// held alone.
    pub(super) ended_token: u8,
    pub(super) token_alone: u8,
    pub(super) tokens_issued: u8,
    /// Whether a token was issued that is not larger than the one before.
    pub(super) token_did_not_rise: bool,
}

impl<const C: usize> World<C> {
    /// Number of messages on open connections.
    pub(super) fn in_flight(&self) -> usize {
        self.columns
            .iter()
            .flat_map(|column| &column.views)
            .map(|view| view.requests.len() + view.replies.len())
            .sum()
    }

    /// Makes almost all mirror images equal: clients of a kind are alike, and so are nodes.
    pub(super) fn canonicalize(&mut self) {
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

    /// Swaps a client with the next one.
    fn swap(&mut self, client: usize) {
        self.clients.swap(client, client + 1);
        for column in &mut self.columns {
            column.views.swap(client, client + 1);
            let Node { key, members, queue, .. } = &mut column.node;
            let ids = key.iter_mut().chain(&mut *members).map(|key| &mut key.id);
            for id in ids.chain(queue) {
                if usize::from(id.client) == client {
                    id.client += 1;
                } else if usize::from(id.client) == client + 1 {
                    id.client -= 1;
                }
            }
            members.sort_unstable();
        }
    }
}
