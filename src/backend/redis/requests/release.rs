//! The request that releases a lock of any kind, or keeps it taken until its period has ended.
//! Pure.

use redis::Value;

use super::{
    group::{self, write_keys},
    mutex::{self, write_lock_keys},
};
use crate::{
    backend::redis::{
        fields::{Fields, text_reply, write_bulk, write_micros, write_number},
        script::{Decoded, Request, Script, ScriptRef, script, write_version},
    },
    core::{
        claim::{Claim, Residue},
        holder::Holder,
        key::LockKey,
        kind::{LockKind, Membership},
    },
    sys::clock::Moment,
};

pub(crate) static KEEP: Script = script!(1024, "prelude.lua", "release_and_keep.lua", "report.lua");

#[derive(Clone, Copy, Debug)]
pub(crate) struct Release<'a> {
    pub(crate) kind: LockKind,
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
    /// The fence has risen to the token already.
    pub(crate) is_token_in_fence: bool,
    /// For how many milliseconds the lock stays taken, because its period has not ended; 0 frees
    /// it.
    pub(crate) keep_ms: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReleaseReply {
    Released {
        has_more: bool,
    },
    Gone {
        has_more: bool,
    },
    HeldByOther(Holder),
    WrongType,
    /// The request arrived after its `not_after`. Nothing was done.
    Late,
}

impl ReleaseReply {
    /// Whether the same request again serves more waiters.
    pub(crate) fn has_more(&self) -> bool {
        matches!(
            self,
            ReleaseReply::Released { has_more: true } | ReleaseReply::Gone { has_more: true }
        )
    }
}

impl<'a> Release<'a> {
    /// A release that frees a lock, of whose holder nothing else is known.
    pub(crate) fn new(kind: LockKind, key: &'a LockKey, id: &'a [u8]) -> Release<'a> {
        Release {
            kind,
            key,
            id,
            queue_entry: "",
            expires: false,
            left_free_ms: 0,
            token: 0,
            is_token_in_fence: false,
            keep_ms: 0,
        }
    }

    /// The release of the lock of a claim, and of its queue entry unless that is empty.
    pub(crate) fn of_claim(claim: &'a Claim, queue_entry: &'a str) -> Release<'a> {
        let id = claim.id.as_str().as_bytes();
        Release { queue_entry, token: claim.token, ..Release::new(claim.kind, &claim.key, id) }
    }

    /// The release of what a claim has left.
    pub(crate) fn of_residue(claim: &'a Claim, residue: &'a Residue, now: Moment) -> Release<'a> {
        let keep_ms = residue.keep_ms(now);
        Release { keep_ms, ..Release::of_claim(claim, &residue.queue_entry) }
    }

    fn write_mutex(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let is_left_free = self.left_free_ms > 0;
        let is_usual =
            self.token > 0 && !is_left_free && self.queue_entry.is_empty() && !self.expires;
        let count = if is_usual { 3 } else { 4 + usize::from(is_left_free) };
        mutex::RELEASE.write_header(by, 4, count, out);
        write_lock_keys(out, self.key);
        write_bulk(out, &self.key.fence_key().map(str::as_bytes));
        if is_usual {
            write_number(out, nonce);
            write_bulk(out, &[self.id]);
            if self.is_token_in_fence {
                write_bulk(out, &[]);
            } else {
                write_micros(out, self.token);
            }
        } else {
            self.write_head(nonce, not_after_us, out);
        }
        if is_left_free {
            write_number(out, self.left_free_ms);
        }
    }

    fn write_head(&self, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        write_number(out, nonce);
        write_bulk(out, &[self.id]);
        write_bulk(out, &[self.queue_entry.as_bytes()]);
        if self.expires { write_micros(out, not_after_us) } else { write_bulk(out, &[]) }
    }
}

impl Request for Release<'_> {
    type Reply = ReleaseReply;

    fn script(&self) -> Option<&'static Script> {
        Some(if self.keep_ms > 0 {
            &KEEP
        } else if self.kind == LockKind::Mutex {
            &mutex::RELEASE
        } else {
            &group::RELEASE
        })
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let count = self.kind.membership().map(|Membership { count, .. }| count);
        if self.keep_ms > 0 {
            KEEP.write_header(by, 5, 5, out);
            write_keys(out, self.key);
            write_number(out, nonce);
            write_bulk(out, &[self.id]);
            write_bulk(out, &[self.queue_entry.as_bytes()]);
            write_number(out, count.unwrap_or(1).into());
            write_number(out, self.keep_ms);
        } else if self.kind == LockKind::Mutex {
            self.write_mutex(by, nonce, not_after_us, out);
        } else {
            group::RELEASE.write_header(by, 5, 5, out);
            write_keys(out, self.key);
            self.write_head(nonce, not_after_us, out);
            match count {
                Some(count) => write_number(out, count.into()),
                None => write_bulk(out, &[b"-1"]),
            }
        }
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<ReleaseReply>> {
        let line = text_reply(&reply)?;
        let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
        let has_more = line.ends_with(b" more");
        Some(match tag {
            "released" => (ReleaseReply::Released { has_more }, None),
            "gone" => (ReleaseReply::Gone { has_more }, None),
            "other" => {
                let now_us = rest.clock()?;
                // No time to rely on: the script may not have read the clock.
                (ReleaseReply::HeldByOther(rest.holder(now_us)?), None)
            }
            "type" => (ReleaseReply::WrongType, None),
            "late" => (ReleaseReply::Late, Some(rest.clock()?)),
            _ => return None,
        })
    }
}
