//! The request that acquires a lock of any kind. Pure.

use redis::Value;

use super::{
    group::{self, write_keys},
    mutex::{self, token_ttl_ms, write_lock_keys},
};
use crate::{
    backend::redis::{
        fields::{Fields, text_reply, write_bulk, write_micros, write_number},
        script::{Decoded, Request, Script, ScriptRef, write_version},
    },
    core::{
        claim::whole_ms,
        holder::Holder,
        key::LockKey,
        kind::{LockKind, Membership},
        lease::Lease,
    },
};

/// How an acquire uses the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AcquireMode {
    /// Does not enter the queue.
    Try,
    /// Enters the queue, with the first request. The script calls this `join`.
    Enqueue,
    /// As `Enqueue`, but does not report whether the channel of the entry has a subscriber, because
    /// that is known. Only of a mutex.
    EnqueueHeard,
    /// Stays in the queue, or enters it again. The script calls this `look`.
    Poll,
    /// Leaves the queue, with the last request.
    Leave,
    /// Turns the writer with this id into a reader. Only for a read lock.
    Downgrade,
}

#[derive(Clone, Copy)]
pub(crate) struct Acquire<'a> {
    pub(crate) kind: LockKind,
    pub(crate) key: &'a LockKey,
    pub(crate) id: &'a str,
    pub(crate) ttl_ms: u64,
    pub(crate) mode: AcquireMode,
    pub(crate) queue_entry: &'a str,
    /// TTL to set if the current holder's key has lost its TTL; 0 to leave the key alone.
    pub(crate) repair_ttl_ms: u64,
    /// Minimum fencing token. If the server's next token would be smaller, it uses this one. `None`
    /// if the server decides alone.
    pub(crate) token_min: Option<u64>,
    /// `token_min` is not below the token that the server gave this claim last. Then a member of a
    /// group needs no larger one, although later members have got larger ones since.
    pub(crate) is_token_decided: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AcquireReply {
    Held {
        token: u64,
        /// The fence has risen to the token already.
        is_token_in_fence: bool,
    },
    Busy {
        holder: Holder,
    },
    Queued {
        holder: Holder,
        position: u64,
        newly_queued: bool,
        no_subscriber: bool,
    },
    /// The key is not a lock. To a downgrade also: the writer has lost its lock.
    WrongType,
    /// The request arrived after its `not_after`. Nothing was done.
    Late,
}

impl AcquireReply {
    /// Returns the current holder, if the lock was not granted.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        match self {
            AcquireReply::Busy { holder, .. } | AcquireReply::Queued { holder, .. } => Some(holder),
            _ => None,
        }
    }

    pub(crate) fn token(&self) -> Option<u64> {
        match *self {
            AcquireReply::Held { token, .. } => Some(token),
            _ => None,
        }
    }
}

impl<'a> Acquire<'a> {
    /// Turns the writer that has this lease into a reader with the same token.
    pub(crate) fn downgrade(writer: &'a Lease) -> Acquire<'a> {
        let claim = &writer.claim;
        Acquire {
            kind: LockKind::Read,
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: whole_ms(writer.ttl()),
            mode: AcquireMode::Downgrade,
            queue_entry: "",
            repair_ttl_ms: 0,
            token_min: Some(writer.token().0),
            is_token_decided: true,
        }
    }

    /// Whether the request leaves out what only waiters, and servers that must agree, need. The
    /// script sees that by the number of arguments.
    fn is_short(&self) -> bool {
        let is_mutex = self.kind == LockKind::Mutex;
        is_mutex && self.mode == AcquireMode::Try && self.token_min.is_none()
    }

    /// Appends the arguments that requests of all kinds begin with.
    fn write_head(&self, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        write_number(out, nonce);
        write_bulk(out, &[self.id.as_bytes()]);
        write_number(out, self.ttl_ms);
        write_micros(out, not_after_us);
        write_number(out, self.repair_ttl_ms);
    }

    fn write_mode(&self, out: &mut Vec<u8>) {
        let mode: &[u8] = match self.mode {
            AcquireMode::Try => b"try",
            AcquireMode::Enqueue => b"join",
            AcquireMode::EnqueueHeard => b"join-heard",
            AcquireMode::Poll => b"look",
            AcquireMode::Leave => b"leave",
            AcquireMode::Downgrade => b"downgrade",
        };
        write_bulk(out, &[mode]);
        write_bulk(out, &[self.queue_entry.as_bytes()]);
    }
}

impl Request for Acquire<'_> {
    type Reply = AcquireReply;

    fn is_grant(reply: &AcquireReply) -> bool {
        matches!(reply, AcquireReply::Held { .. })
    }

    fn script(&self) -> Option<&'static Script> {
        Some(if self.kind == LockKind::Mutex { &mutex::ACQUIRE } else { &group::ACQUIRE })
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        if self.kind == LockKind::Mutex {
            let count = if self.is_short() { 6 } else { 9 };
            mutex::ACQUIRE.write_header(by, 4, count, out);
            write_lock_keys(out, self.key);
            write_bulk(out, &self.key.fence_key().map(str::as_bytes));
            self.write_head(nonce, not_after_us, out);
            if !self.is_short() {
                self.write_mode(out);
                write_micros(out, self.token_min.unwrap_or(0));
            }
            write_number(out, token_ttl_ms(self.ttl_ms));
        } else {
            group::ACQUIRE.write_header(by, 5, 12, out);
            write_keys(out, self.key);
            self.write_head(nonce, not_after_us, out);
            self.write_mode(out);
            let Membership { group, limit, count } =
                self.kind.membership().unwrap_or(Membership { group: "", limit: 0, count: 1 });
            write_bulk(out, &[group.as_bytes()]);
            write_number(out, limit.into());
            write_number(out, count.into());
            write_micros(out, self.token_min.unwrap_or(0));
            write_number(out, self.is_token_decided.into());
        }
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<AcquireReply>> {
        let line = text_reply(&reply)?;
        let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
        let now_us = rest.clock()?;
        let reply = match tag {
            "held" => {
                let token = rest.lua_integer().filter(|token| *token > 0)?;
                AcquireReply::Held { token, is_token_in_fence: false }
            }
            "fenced" if now_us > 0 && self.is_short() => {
                AcquireReply::Held { token: now_us, is_token_in_fence: true }
            }
            "busy" => AcquireReply::Busy { holder: rest.holder(now_us)? },
            "queued" => {
                let (pttl_ms, position, state) =
                    (rest.number()?, rest.number()?, rest.number::<u8>()?);
                let (newly_queued, no_subscriber) = (state & 1 != 0, state & 2 != 0);
                let holder = Holder::from_report(rest.rest(), pttl_ms, 0, 0, now_us);
                AcquireReply::Queued { holder, position, newly_queued, no_subscriber }
            }
            "type" => AcquireReply::WrongType,
            "late" => AcquireReply::Late,
            _ => return None,
        };
        Some((reply, Some(now_us)))
    }
}
