//! The release of a hold whose period has not ended: the lock stays taken until then. Pure.

use redis::Value;

use super::{
    KindReleaseReply, OfKind,
    group::write_keys,
    mutex::{Release, ReleaseReply, decode_release},
};
use crate::{
    backend::redis::{
        fields::{write_bulk, write_number},
        script::{Request, Script, ScriptRef, script, write_version},
    },
    core::kind::Membership,
};

pub(crate) static KEEP: Script = script!(1024, "shared.lua", "keep.lua", "report.lua");

/// A release that keeps the lock taken for `keep_ms`, or frees it if that is zero.
#[derive(Clone, Copy)]
pub(crate) struct ReleaseOrKeep<'a> {
    pub(crate) release: OfKind<Release<'a>>,
    pub(crate) keep_ms: u64,
}

impl Request for ReleaseOrKeep<'_> {
    type Reply = KindReleaseReply;

    fn server_us(reply: &KindReleaseReply) -> Option<u64> {
        <OfKind<Release<'_>> as Request>::server_us(reply)
    }

    fn script(&self) -> Option<&'static Script> {
        if self.keep_ms == 0 { self.release.script() } else { Some(&KEEP) }
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        if self.keep_ms == 0 {
            return self.release.encode(by, nonce, not_after_us, out);
        }
        let OfKind { kind, request } = &self.release;
        KEEP.write_header(by, 5, 5, out);
        write_keys(out, request.key);
        write_number(out, nonce);
        write_bulk(out, &[request.id]);
        write_bulk(out, &[request.queue_entry.as_bytes()]);
        write_number(out, kind.membership().map_or(1, |Membership { count, .. }| count.into()));
        write_number(out, self.keep_ms);
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<KindReleaseReply> {
        if self.keep_ms == 0 {
            return self.release.decode(nonce, reply);
        }
        let reply: ReleaseReply = decode_release(nonce, &reply)?;
        Some(KindReleaseReply { reply, has_more: false })
    }
}
