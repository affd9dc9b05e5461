//! What the commands print with `--json`. `docs/command.schema.json` describes it, and
//! `docs/command.md` has the rule for changes. `null` stands for "not known".

use std::time::Duration;

use distlock::{HeldBy, Holder, LockId, LockInfo, NodeReply, QueuedWaiter, Vote};
use serde::Serialize;

use crate::{
    exit::{Exit, Failure},
    format, holders,
};

/// The version of the format. Raise it if a field is removed or renamed, or changes its meaning.
const VERSION: u32 = 1;

/// The output of one command.
#[derive(Debug, Serialize)]
pub(crate) struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    content: T,
}

impl<T> Versioned<T> {
    pub(crate) fn new(content: T) -> Versioned<T> {
        Versioned { version: VERSION, content }
    }
}

/// The output of any command that fails.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorJson {
    error: ErrorDetail,
}

#[derive(Debug, Serialize)]
struct ErrorDetail {
    /// A stable name for the exit code.
    kind: &'static str,
    exit_code: u8,
    message: String,
}

impl ErrorJson {
    pub(crate) fn new(failure: &Failure) -> ErrorJson {
        let kind = match failure.exit {
            Exit::Usage => "usage",
            Exit::Unavailable => "unavailable",
            // The others are what the user has asked for instead, as `lock` allows: even success.
            Exit::NotAcquired | Exit::Code(_) | Exit::Success => "held",
            Exit::Lost => "lost",
            _ => "failed",
        };
        let message = format::with_option_names(&failure.message);
        ErrorJson { error: ErrorDetail { kind, exit_code: failure.exit.code(), message } }
    }
}

/// The output of `ls`.
#[derive(Debug, Serialize)]
pub(crate) struct LocksJson<'a> {
    locks: Vec<LockJson<'a>>,
}

impl<'a> LocksJson<'a> {
    pub(crate) fn from_infos(locks: &'a [LockInfo]) -> LocksJson<'a> {
        LocksJson { locks: locks.iter().map(LockJson::from_info).collect() }
    }
}

/// The output of `lock`.
#[derive(Debug, Serialize)]
pub(crate) struct AcquiredJson {
    pub(crate) locks: Vec<AcquiredLockJson>,
}

#[derive(Debug, Serialize)]
pub(crate) struct AcquiredLockJson {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) token: u64,
    /// The argument of `adopt`; `null` unless the lock was detached.
    pub(crate) detached: Option<String>,
}

/// The output of `show`.
#[derive(Debug, Serialize)]
pub(crate) struct ShownJson<'a> {
    /// `null` if the lock is not held.
    lock: Option<LockJson<'a>>,
}

impl<'a> ShownJson<'a> {
    pub(crate) fn from_info(lock: Option<&'a LockInfo>) -> ShownJson<'a> {
        ShownJson { lock: lock.map(LockJson::from_info) }
    }
}

/// A held lock.
#[derive(Debug, Serialize)]
struct LockJson<'a> {
    name: &'a str,
    /// A name for how the lock is held.
    kind: &'static str,
    /// Number of readers or of permits in use.
    count: Option<u64>,
    /// Limit of permits, if a waiter for permits is known.
    limit: Option<u32>,
    holder: HolderJson<'a>,
    /// Empty if one client has the lock alone. Of a large group only the beginning.
    members: Vec<MemberJson<'a>>,
    /// Whether all holders have released the lock, which stays taken until it expires.
    kept: bool,
    /// By the server's clock.
    held_ms: Option<u64>,
    /// `null` for a key without an expiry.
    remaining_ms: Option<u64>,
    waiting: u64,
    /// In queue order; of a long queue only the beginning.
    waiters: Vec<&'a str>,
    /// Below 2⁵³, so that languages whose numbers are floating-point read it exactly.
    token: Option<u64>,
    /// Whether a quorum of the nodes agrees on the holder.
    certain: bool,
    /// Empty if there is a single server.
    nodes: Vec<NodeJson<'a>>,
}

/// A holder. For clients that are not distlock, only `id` is known.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct HolderJson<'a> {
    id: &'a str,
    host: Option<String>,
    pid: Option<u32>,
    tid: Option<u64>,
    /// RFC 3339, by this machine's clock.
    since: Option<String>,
}

/// A reader, or a holder of permits.
#[derive(Debug, Serialize)]
struct MemberJson<'a> {
    id: &'a str,
    host: Option<&'a str>,
    pid: Option<u32>,
    tid: Option<u64>,
    /// `null` for a reader.
    permits: Option<u64>,
    remaining_ms: Option<u64>,
    kept: bool,
}

/// The reply of one of several nodes.
#[derive(Debug, Serialize)]
struct NodeJson<'a> {
    server: &'a str,
    vote: &'static str,
    message: &'a str,
}

impl<'a> LockJson<'a> {
    fn from_info(lock: &'a LockInfo) -> LockJson<'a> {
        let holder = lock.holder();
        LockJson {
            name: lock.name(),
            kind: match holder.held_by() {
                HeldBy::Readers { .. } => "readers",
                HeldBy::Permits { .. } => "permits",
                _ => "alone",
            },
            count: holders::count(holder.held_by()),
            limit: lock.permit_limit(),
            members: lock.members().iter().map(MemberJson::from_member).collect(),
            kept: holders::is_kept(lock),
            holder: HolderJson::from_holder(holder),
            held_ms: holder.held_for().map(millis),
            remaining_ms: holder.ttl_left().map(millis),
            waiting: lock.waiting(),
            waiters: lock.waiters().iter().map(QueuedWaiter::id).collect(),
            token: lock.fencing_token().map(|token| token.as_u64()),
            certain: lock.is_certain(),
            nodes: holder.nodes().iter().map(NodeJson::from_reply).collect(),
        }
    }
}

impl<'a> MemberJson<'a> {
    fn from_member(member: &'a Holder) -> MemberJson<'a> {
        MemberJson {
            id: member.id(),
            host: member.host(),
            pid: member.pid(),
            tid: member.tid(),
            permits: holders::permits(member),
            remaining_ms: member.ttl_left().map(millis),
            kept: member.is_kept(),
        }
    }
}

impl<'a> HolderJson<'a> {
    pub(crate) fn from_holder(holder: &'a Holder) -> HolderJson<'a> {
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
    fn from_reply(reply: &'a NodeReply) -> NodeJson<'a> {
        let vote = match reply.vote {
            Vote::Yes => "yes",
            Vote::No => "no",
            _ => "unknown",
        };
        NodeJson { server: &reply.node, vote, message: &reply.message }
    }
}

pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
