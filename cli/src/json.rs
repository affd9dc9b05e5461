//! Locks and holders as JSON. Field names are stable; `null` stands for "not known".

use std::time::Duration;

use distlock::{LockId, LockInfo, NodeAnswer, QueuedWaiter, Vote};
use serde::Serialize;

use crate::format;

/// A held lock.
#[derive(Debug, Serialize)]
pub(crate) struct LockJson<'a> {
    name: &'a str,
    holder: HolderJson<'a>,
    /// By the server's clock.
    held_ms: Option<u64>,
    /// Time left; `null` for a key without an expiry.
    ttl_ms: Option<u64>,
    waiting: u64,
    /// In queue order; of a long queue only the beginning.
    waiters: Vec<&'a str>,
    /// Below 2⁵³, so that languages whose numbers are floating-point read it exactly.
    token: Option<u64>,
    /// Whether a quorum of the nodes agrees on the holder.
    certain: bool,
    /// Present only if there are several nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<NodeJson<'a>>,
}

/// A holder. For clients that are not distlock, only `id` is known.
#[derive(Debug, Default, Serialize)]
pub(crate) struct HolderJson<'a> {
    id: &'a str,
    host: Option<String>,
    pid: Option<u32>,
    tid: Option<u64>,
    /// RFC 3339, by this machine's clock.
    since: Option<String>,
}

/// The reply of one of several nodes.
#[derive(Debug, Serialize)]
struct NodeJson<'a> {
    node: &'a str,
    vote: &'static str,
    says: &'a str,
}

impl<'a> LockJson<'a> {
    pub(crate) fn from_info(lock: &'a LockInfo) -> LockJson<'a> {
        let holder = lock.holder();
        LockJson {
            name: lock.name(),
            holder: HolderJson::from_holder(holder),
            held_ms: holder.held_for().map(millis),
            ttl_ms: holder.ttl_left().map(millis),
            waiting: lock.waiting(),
            waiters: lock.waiters().iter().map(QueuedWaiter::id).collect(),
            token: lock.fencing_token().map(|token| token.as_u64()),
            certain: lock.is_certain(),
            nodes: holder.nodes().iter().map(NodeJson::from_answer).collect(),
        }
    }
}

impl<'a> HolderJson<'a> {
    pub(crate) fn from_holder(holder: &'a distlock::Holder) -> HolderJson<'a> {
        HolderJson {
            id: holder.id(),
            host: holder.host().map(str::to_owned),
            pid: holder.pid(),
            tid: holder.tid(),
            since: holder.since().and_then(format::rfc3339),
        }
    }

    /// What the id alone says about its holder.
    pub(crate) fn from_id(id: &'a str) -> HolderJson<'a> {
        match id.parse::<LockId>() {
            Ok(parts) => HolderJson {
                id,
                host: Some(parts.host().to_owned()),
                pid: Some(parts.pid()),
                tid: Some(parts.tid()),
                since: None,
            },
            Err(_) => HolderJson { id, ..HolderJson::default() },
        }
    }
}

impl<'a> NodeJson<'a> {
    fn from_answer(answer: &'a NodeAnswer) -> NodeJson<'a> {
        let vote = match answer.vote {
            Vote::Yes => "yes",
            Vote::No => "no",
            _ => "unknown",
        };
        NodeJson { node: &answer.node, vote, says: &answer.message }
    }
}

pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
