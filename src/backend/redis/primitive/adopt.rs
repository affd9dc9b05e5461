//! Giving the lock of one holder to another client. Pure.

use redis::Value;

use super::mutex::{token_ttl_ms, write_lock_keys};
use crate::{
    backend::redis::{
        fields::{Fields, text_reply, write_bulk, write_micros, write_number},
        script::{Request, Script, ScriptRef, script, write_version},
    },
    core::{claim::Claim, holder::Holder, id::LockId},
};

pub(crate) static ADOPT: Script =
    script!(2048, "shared.lua", "token.lua", "mutex/adopt.lua", "report.lua");

/// Gives the lock with the id `former` to this claim.
pub(crate) struct Adopt<'a> {
    pub(crate) claim: &'a Claim,
    pub(crate) former: &'a LockId,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AdoptReply {
    Held(u64),
    Gone,
    HeldByOther(Box<Holder>),
    /// The request arrived after its `not_after`. Nothing was done.
    Expired,
}

impl Request for Adopt<'_> {
    type Reply = (u64, AdoptReply);

    fn server_us(reply: &Self::Reply) -> Option<u64> {
        Some(reply.0)
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&ADOPT)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let Claim { key, id, .. } = self.claim;
        ADOPT.write_header(by, 4, 6, out);
        write_lock_keys(out, key);
        write_bulk(out, &key.fence_key().map(str::as_bytes));
        write_number(out, nonce);
        write_bulk(out, &[self.former.as_str().as_bytes()]);
        write_bulk(out, &[id.as_str().as_bytes()]);
        write_number(out, self.claim.ttl_ms());
        write_micros(out, not_after_us);
        write_number(out, token_ttl_ms(self.claim.ttl_ms()));
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Self::Reply> {
        let line = text_reply(&reply)?;
        let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
        let now_us = rest.clock()?;
        let reply = match tag {
            "held" => AdoptReply::Held(rest.lua_integer().filter(|token| *token > 0)?),
            // A key of another type is not a lock, so the lock is gone.
            "gone" | "type" => AdoptReply::Gone,
            "other" => AdoptReply::HeldByOther(Box::new(rest.holder(now_us)?)),
            "late" => AdoptReply::Expired,
            _ => return None,
        };
        Some((now_us, reply))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::redis::test_util::script_arguments,
        core::{id::generate_lock_id, key::LockKey, kind::LockKind},
    };
    use std::time::Duration;

    #[test]
    fn replies_of_an_adoption_are_decoded() {
        let (former, id) = (generate_lock_id(), generate_lock_id());
        let key = LockKey::new("lock:", "x").unwrap();
        let claim =
            Claim { key, id: id.clone(), ttl: Duration::from_secs(10), kind: LockKind::Mutex };
        let request = Adopt { claim: &claim, former: &former };
        let keys = "lock:x distlock:queue:{lock:x} distlock:token:{lock:x} distlock:fence";
        let keys: Vec<String> = keys.split(' ').map(str::to_owned).collect();
        let words = script_arguments(&request, &keys);
        assert_eq!(words[..3], [former.to_string(), id.to_string(), "10000".into()]);
        let decode = |text: &str| {
            let now = "0000000000000077";
            request.decode(9, Value::BulkString(text.replace("NOW", now).into_bytes()))
        };
        assert_eq!(decode("9 held NOW 5"), Some((77, AdoptReply::Held(5))));
        assert_eq!(decode("9 gone NOW"), Some((77, AdoptReply::Gone)));
        assert_eq!(decode("9 type NOW"), Some((77, AdoptReply::Gone)));
        assert_eq!(decode("9 late NOW"), Some((77, AdoptReply::Expired)));
        assert!(matches!(decode("9 other NOW 500 3 0 me"), Some((77, AdoptReply::HeldByOther(_)))));
        for nonsense in ["8 gone NOW", "9 held NOW 0", "9 held NOW", "9 gone", "9 what NOW", ""] {
            assert_eq!(decode(nonsense), None, "{nonsense}");
        }
    }
}
