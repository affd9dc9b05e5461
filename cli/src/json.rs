//! Locks and holders as programs read them: field names that stay, `null` for what is not known.

use std::time::Duration;

use distlock::{LockId, LockInfo, NodeAnswer, Vote, QueuedWaiter};
use serde::Serialize;

use crate::text;

/// A lock that is held.
#[derive(Debug, Serialize)]
pub(crate) struct Lock<'a> {
    name: &'a str,
    holder: Holder<'a>,
    /// On the server's clock.
    held_ms: Option<u64>,
    /// `null` for a key without an expiry.
    ttl_ms: Option<u64>,
    waiting: u64,
    /// The next one first; of a long line only the beginning.
    waiters: Vec<&'a str>,
    /// Below 2⁵³, so that it is exact wherever numbers are floating.
    token: Option<u64>,
    /// Whether a quorum of the nodes agrees.
    certain: bool,
    /// Only where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<Node<'a>>,
}

/// Who holds a lock; all but the identifier is `null` for clients of other kinds.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Holder<'a> {
    id: &'a str,
    host: Option<String>,
    pid: Option<u32>,
    tid: Option<u64>,
    /// RFC 3339, on this machine's clock.
    since: Option<String>,
}

/// What one of several nodes said.
#[derive(Debug, Serialize)]
struct Node<'a> {
    node: &'a str,
    vote: &'static str,
    says: &'a str,
}

impl<'a> Lock<'a> {
    pub(crate) fn of(lock: &'a LockInfo) -> Lock<'a> {
        let holder = lock.holder();
        Lock {
            name: lock.name(),
            holder: Holder::of(holder),
            held_ms: holder.held_for().map(millis),
            ttl_ms: holder.ttl_left().map(millis),
            waiting: lock.waiting(),
            waiters: lock.waiters().iter().map(QueuedWaiter::id).collect(),
            token: lock.fencing_token().map(|token| token.as_u64()),
            certain: lock.is_certain(),
            nodes: holder.nodes().iter().map(Node::of).collect(),
        }
    }
}

impl<'a> Holder<'a> {
    pub(crate) fn of(holder: &'a distlock::Holder) -> Holder<'a> {
        Holder {
            id: holder.id(),
            host: holder.host().map(str::to_owned),
            pid: holder.pid(),
            tid: holder.tid(),
            since: holder.since().and_then(text::moment),
        }
    }

    /// As far as an identifier tells.
    pub(crate) fn by_id(id: &'a str) -> Holder<'a> {
        match id.parse::<LockId>() {
            Ok(parts) => Holder {
                id,
                host: Some(parts.host().to_owned()),
                pid: Some(parts.pid()),
                tid: Some(parts.tid()),
                since: None,
            },
            Err(_) => Holder { id, ..Holder::default() },
        }
    }
}

impl<'a> Node<'a> {
    fn of(answer: &'a NodeAnswer) -> Node<'a> {
        let vote = match answer.vote {
            Vote::Yes => "yes",
            Vote::No => "no",
            _ => "unknown",
        };
        Node { node: &answer.node, vote, says: &answer.message }
    }
}

pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
