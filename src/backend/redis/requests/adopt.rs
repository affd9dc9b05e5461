//! A lock that passes from one holder to its successor. Pure.

use redis::Value;

use super::group::write_keys;
use crate::{
    backend::redis::{
        fields::{Fields, text_reply, write_bulk, write_micros, write_number},
        script::{Decoded, Request, Script, ScriptRef, script, write_version},
    },
    core::{claim::Claim, holder::Holder, kind::Membership},
};

pub(crate) static ADOPT: Script =
    script!(2048, "prelude.lua", "token.lua", "adopt.lua", "report.lua");

/// Gives the lock of the holder `former` to this claim.
pub(crate) struct Adopt<'a> {
    pub(crate) former: &'a str,
    pub(crate) claim: &'a Claim,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AdoptReply {
    Held {
        token: u64,
    },
    Gone,
    HeldByOther(Box<Holder>),
    /// The request arrived after its `not_after`. Nothing was done.
    Late,
}

impl Request for Adopt<'_> {
    type Reply = AdoptReply;

    fn is_grant(reply: &AdoptReply) -> bool {
        matches!(reply, AdoptReply::Held { .. })
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&ADOPT)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let Adopt { former, claim } = self;
        ADOPT.write_header(by, 5, 6, out);
        write_keys(out, &claim.key);
        write_number(out, nonce);
        write_bulk(out, &[former.as_bytes()]);
        write_bulk(out, &[claim.id.as_str().as_bytes()]);
        write_number(out, claim.ttl_ms());
        let membership = claim.kind.membership();
        write_number(out, membership.map_or(1, |Membership { count, .. }| count.into()));
        write_micros(out, not_after_us);
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<AdoptReply>> {
        let line = text_reply(&reply)?;
        let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
        let now_us = rest.clock()?;
        let reply = match tag {
            "held" => {
                let token = rest.lua_integer().filter(|token| *token > 0)?;
                AdoptReply::Held { token }
            }
            "gone" | "type" => AdoptReply::Gone,
            "other" => AdoptReply::HeldByOther(Box::new(rest.holder(now_us)?)),
            "late" => AdoptReply::Late,
            _ => return None,
        };
        Some((reply, Some(now_us)))
    }
}
