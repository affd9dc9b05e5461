//! A mutex: one holder at a time. Its scripts, and the requests to a server and their replies, one
//! type each. Pure.

use redis::Value;

use crate::{
    backend::redis::{
        fields::{Fields, text_reply, write_bulk, write_micros, write_number},
        script::{Request, Script, ScriptRef, script, write_version},
    },
    core::{holder::Holder, key::LockKey},
};

pub(crate) static ACQUIRE: Script = script!(
    1,
    "mutex/acquire.lua",
    "shared.lua",
    "token.lua",
    "notify.lua",
    "mutex/grant.lua",
    "mutex/acquire_contended.lua",
    "report.lua"
);
pub(crate) static RELEASE: Script = script!(
    2,
    "mutex/release.lua",
    "mutex/hand_over.lua",
    "shared.lua",
    "free.lua",
    "token.lua",
    "notify.lua",
    "mutex/grant.lua",
    "mutex/release_contended.lua",
    "report.lua"
);

/// How much longer than its lock a token key is kept. If a lock expires, nothing raises the fence
/// to its token. notify.lua has the same value for grants.
const TOKEN_EXTRA_MS: u64 = 3_600_000;

/// How an acquire uses the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AcquireMode {
    /// Does not enter the queue.
    Try,
    /// Enters the queue, with the first request. The script calls this `join`.
    Enqueue,
    /// Stays in the queue, or enters it again. The script calls this `look`.
    Poll,
    /// Leaves the queue, with the last request.
    Leave,
}

pub(crate) struct Acquire<'a> {
    pub(crate) key: &'a LockKey,
    pub(crate) id: &'a str,
    pub(crate) ttl_ms: u64,
    pub(crate) mode: AcquireMode,
    pub(crate) queue_entry: &'a str,
    /// TTL to set if the current holder's key has lost its TTL; 0 to leave the key alone.
    pub(crate) repair_ttl_ms: u64,
    /// Minimum fencing token. If the server's next token would be smaller, it uses this one.
    pub(crate) token_min: u64,
    /// `token_min` is not below the token that the server gave this claim last. Then a member of a
    /// group needs no larger one, although later members have got larger ones since.
    pub(crate) is_token_decided: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AcquireReply {
    Held {
        now_us: u64,
        token: u64,
    },
    Busy {
        now_us: u64,
        holder: Holder,
    },
    Queued {
        now_us: u64,
        holder: Holder,
        position: u64,
        newly_queued: bool,
        no_subscriber: bool,
    },
    WrongType,
    /// The request arrived after its `not_after`. Nothing was done.
    Late {
        now_us: u64,
    },
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

impl Acquire<'_> {
    /// Appends the arguments that requests of all kinds begin with.
    pub(super) fn write_head(&self, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        write_number(out, nonce);
        write_bulk(out, &[self.id.as_bytes()]);
        write_number(out, self.ttl_ms);
        let mode: &[u8] = match self.mode {
            AcquireMode::Try => b"try",
            AcquireMode::Enqueue => b"join",
            AcquireMode::Poll => b"look",
            AcquireMode::Leave => b"leave",
        };
        write_bulk(out, &[mode]);
        write_bulk(out, &[self.queue_entry.as_bytes()]);
        write_micros(out, not_after_us);
        write_number(out, self.repair_ttl_ms);
    }
}

impl Request for Acquire<'_> {
    type Reply = AcquireReply;

    fn server_us(reply: &AcquireReply) -> Option<u64> {
        match *reply {
            AcquireReply::Held { now_us, .. }
            | AcquireReply::Busy { now_us, .. }
            | AcquireReply::Queued { now_us, .. }
            | AcquireReply::Late { now_us } => Some(now_us),
            AcquireReply::WrongType => None,
        }
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&ACQUIRE)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        ACQUIRE.write_header(by, 4, 9, out);
        write_lock_keys(out, self.key);
        write_bulk(out, &self.key.fence_key().map(str::as_bytes));
        self.write_head(nonce, not_after_us, out);
        write_micros(out, self.token_min);
        write_number(out, token_ttl_ms(self.ttl_ms));
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<AcquireReply> {
        let line = text_reply(&reply)?;
        let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
        let now_us = rest.clock()?;
        Some(match tag {
            "held" => {
                AcquireReply::Held { now_us, token: rest.lua_integer().filter(|token| *token > 0)? }
            }
            "busy" => AcquireReply::Busy { now_us, holder: rest.holder(now_us)? },
            "queued" => {
                let (pttl_ms, position, state) =
                    (rest.number()?, rest.number()?, rest.number::<u8>()?);
                let (newly_queued, no_subscriber) = (state & 1 != 0, state & 2 != 0);
                let holder = Holder::from_report(rest.rest(), pttl_ms, 0, 0, now_us);
                AcquireReply::Queued { now_us, holder, position, newly_queued, no_subscriber }
            }
            "type" => AcquireReply::WrongType,
            "late" => AcquireReply::Late { now_us },
            _ => return None,
        })
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Release<'a> {
    pub(crate) key: &'a LockKey,
    /// Bytes, because a forced release names a foreign holder, whose id may be any bytes.
    pub(crate) id: &'a [u8],
    /// Queue entry to remove, or empty.
    pub(crate) queue_entry: &'a str,
    /// Whether the server rejects the request if it arrives after the caller's deadline. Otherwise
    /// it is carried out whenever it arrives.
    pub(crate) expires: bool,
    /// For how many milliseconds to leave the lock free before the next waiter gets it.
    pub(crate) left_free_ms: u64,
    /// Fencing token of the hold, or 0 if it is not known. The script then reads it.
    pub(crate) token: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReleaseReply {
    Released,
    Gone,
    HeldByOther(Holder),
    WrongType,
    /// The request arrived after its `not_after`. Nothing was done.
    Late {
        now_us: u64,
    },
}

impl Release<'_> {
    /// Appends the arguments that requests of all kinds begin with.
    pub(super) fn write_head(&self, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        write_number(out, nonce);
        write_bulk(out, &[self.id]);
        write_bulk(out, &[self.queue_entry.as_bytes()]);
        if self.expires { write_micros(out, not_after_us) } else { write_bulk(out, &[]) }
    }
}

impl Request for Release<'_> {
    type Reply = ReleaseReply;

    fn server_us(reply: &ReleaseReply) -> Option<u64> {
        match *reply {
            ReleaseReply::Late { now_us } => Some(now_us),
            _ => None,
        }
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&RELEASE)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let is_left_free = self.left_free_ms > 0;
        let is_usual =
            self.token > 0 && !is_left_free && self.queue_entry.is_empty() && !self.expires;
        let count = if is_usual { 3 } else { 4 + usize::from(is_left_free) };
        RELEASE.write_header(by, 4, count, out);
        write_lock_keys(out, self.key);
        write_bulk(out, &self.key.fence_key().map(str::as_bytes));
        if is_usual {
            write_number(out, nonce);
            write_bulk(out, &[self.id]);
            write_micros(out, self.token);
        } else {
            self.write_head(nonce, not_after_us, out);
        }
        if is_left_free {
            write_number(out, self.left_free_ms);
        }
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<ReleaseReply> {
        decode_release(nonce, &reply)
    }
}

/// Decodes the reply to a release of any kind.
pub(super) fn decode_release(nonce: u64, reply: &Value) -> Option<ReleaseReply> {
    let line = text_reply(reply)?;
    let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
    Some(match tag {
        "released" => ReleaseReply::Released,
        "gone" => ReleaseReply::Gone,
        "other" => {
            let now_us = rest.clock()?;
            ReleaseReply::HeldByOther(rest.holder(now_us)?)
        }
        "type" => ReleaseReply::WrongType,
        "late" => ReleaseReply::Late { now_us: rest.clock()? },
        _ => return None,
    })
}

pub(super) fn write_lock_keys(out: &mut Vec<u8>, key: &LockKey) {
    write_bulk(out, &[key.lock_key().as_bytes()]);
    write_bulk(out, &key.queue_key().map(str::as_bytes));
    write_bulk(out, &key.token_key().map(str::as_bytes));
}

/// TTL of a token key whose lock has this TTL.
pub(super) fn token_ttl_ms(ttl_ms: u64) -> u64 {
    ttl_ms.saturating_add(TOKEN_EXTRA_MS)
}

#[cfg(test)]
mod tests;
