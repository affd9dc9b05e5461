//! The kinds of locks: for each, the scripts that work on its keys, the requests that run them, and
//! their replies. [`OfKind`] chooses between them. Pure. `lua/` has the parts that scripts of
//! several kinds share.

pub(crate) mod acquire_all;
pub(crate) mod adopt;
pub(crate) mod group;
pub(crate) mod keep;
pub(crate) mod mutex;
pub(crate) mod renew;

use redis::Value;

use self::mutex::{Acquire, AcquireReply, Release, ReleaseReply};
use super::{
    fields::text_reply,
    script::{Request, Script, ScriptRef},
};
use crate::core::kind::LockKind;

/// A request about a lock of this kind.
#[derive(Clone, Copy)]
pub(crate) struct OfKind<R> {
    pub(crate) kind: LockKind,
    pub(crate) request: R,
}

impl Request for OfKind<Acquire<'_>> {
    type Reply = AcquireReply;

    fn server_us(reply: &AcquireReply) -> Option<u64> {
        Acquire::server_us(reply)
    }

    fn script(&self) -> Option<&'static Script> {
        match self.kind {
            LockKind::Mutex => self.request.script(),
            LockKind::Read | LockKind::Write | LockKind::Permits { .. } => Some(&group::ACQUIRE),
        }
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        match self.kind {
            LockKind::Mutex => self.request.encode(by, nonce, not_after_us, out),
            kind @ (LockKind::Read | LockKind::Write | LockKind::Permits { .. }) => {
                group::write_acquire(&self.request, kind, by, nonce, not_after_us, out)
            }
        }
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<AcquireReply> {
        self.request.decode(nonce, reply)
    }
}

/// Reply to a release of any kind.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KindReleaseReply {
    pub(crate) reply: ReleaseReply,
    /// The same request again serves more waiters.
    pub(crate) has_more: bool,
}

impl Request for OfKind<Release<'_>> {
    type Reply = KindReleaseReply;

    fn server_us(reply: &KindReleaseReply) -> Option<u64> {
        Release::server_us(&reply.reply)
    }

    fn script(&self) -> Option<&'static Script> {
        match self.kind {
            LockKind::Mutex => self.request.script(),
            LockKind::Read | LockKind::Write | LockKind::Permits { .. } => Some(&group::RELEASE),
        }
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        match self.kind {
            LockKind::Mutex => self.request.encode(by, nonce, not_after_us, out),
            kind @ (LockKind::Read | LockKind::Write | LockKind::Permits { .. }) => {
                group::write_release(&self.request, kind, by, nonce, not_after_us, out)
            }
        }
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<KindReleaseReply> {
        let has_more = text_reply(&reply)?.ends_with(b" more");
        let reply = self.request.decode(nonce, reply)?;
        let has_more = has_more && matches!(reply, ReleaseReply::Released | ReleaseReply::Gone);
        Some(KindReleaseReply { reply, has_more })
    }
}
