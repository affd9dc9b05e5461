//! Several mutexes at once, all or none. Pure.

use redis::Value;

use super::mutex::{token_ttl_ms, write_lock_keys};
use crate::{
    backend::redis::{
        fields::{Fields, text_reply, write_bulk, write_micros, write_number},
        script::{Decoded, Request, Script, ScriptRef, script, write_version},
    },
    core::{claim::Claim, holder::Holder},
};

pub(crate) static ACQUIRE_ALL: Script = script!(
    4096,
    "mutex/acquire_all.lua",
    "each.lua",
    "prelude.lua",
    "token.lua",
    "notify.lua",
    "mutex/grant.lua",
    "mutex/acquire_all_contended.lua",
    "report.lua"
);

/// Claims of mutexes with the same ttl, whose keys one server keeps with one fence.
pub(crate) struct AcquireAll<'a> {
    pub(crate) claims: &'a [Claim],
    /// TTL to set if the key of another holder has lost its TTL; 0 to leave the key alone.
    pub(crate) repair_ttl_ms: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AcquireAllReply {
    /// All are held, with these tokens.
    Held {
        tokens: Vec<u64>,
    },
    /// The lock with this index is not free, and none was acquired.
    Busy {
        index: usize,
        holder: Box<Holder>,
    },
    WrongType {
        index: usize,
    },
    /// The request arrived after its `not_after`. Nothing was done.
    Late,
}

impl Request for AcquireAll<'_> {
    type Reply = AcquireAllReply;

    fn is_grant(reply: &AcquireAllReply) -> bool {
        matches!(reply, AcquireAllReply::Held { .. })
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&ACQUIRE_ALL)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let count = self.claims.len();
        ACQUIRE_ALL.write_header(by, 3 * count + 1, count + 5, out);
        self.claims.iter().for_each(|claim| write_lock_keys(out, &claim.key));
        let first = self.claims.first();
        write_bulk(out, &first.map_or([""; 3], |claim| claim.key.fence_key()).map(str::as_bytes));
        let ttl_ms = first.map_or(0, Claim::ttl_ms);
        write_number(out, nonce);
        write_number(out, ttl_ms);
        write_micros(out, not_after_us);
        write_number(out, self.repair_ttl_ms);
        write_number(out, token_ttl_ms(ttl_ms));
        self.claims.iter().for_each(|claim| write_bulk(out, &[claim.id.as_str().as_bytes()]));
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<AcquireAllReply>> {
        let line = text_reply(&reply)?;
        let (tag, mut rest) = Fields::check_nonce(line, nonce)?;
        let now_us = rest.clock()?;
        let index = |rest: &mut Fields<'_>| {
            rest.number::<usize>().filter(|index| *index < self.claims.len())
        };
        let reply = match tag {
            "held" => {
                let token = |_| rest.lua_integer().filter(|token| *token > 0);
                let tokens = self.claims.iter().map(token).collect::<Option<_>>()?;
                AcquireAllReply::Held { tokens }
            }
            "busy" => {
                let index = index(&mut rest)?;
                let holder = Box::new(rest.holder(now_us)?);
                AcquireAllReply::Busy { index, holder }
            }
            "type" => AcquireAllReply::WrongType { index: index(&mut rest)? },
            "late" => AcquireAllReply::Late,
            _ => return None,
        };
        Some((reply, Some(now_us)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        backend::redis::test_util::request_words,
        core::{id::generate_lock_id, key::LockKey, kind::LockKind},
    };

    fn claims() -> Vec<Claim> {
        let claim = |name| {
            let (key, id) = (LockKey::new("lock:", name).unwrap(), generate_lock_id());
            Claim { key, id, ttl: Duration::from_secs(9), kind: LockKind::Mutex, token: 0 }
        };
        ["a", "b"].map(claim).into()
    }

    #[test]
    fn request_has_the_keys_of_each_lock_and_one_fence() {
        let claims = claims();
        let request = AcquireAll { claims: &claims, repair_ttl_ms: 60_000 };
        let words = request_words(&request, ScriptRef::HASH);
        assert_eq!(words[2], "7");
        assert_eq!(words[3..5], ["lock:a", "distlock:queue:{lock:a}"]);
        assert_eq!(words[8..10], ["distlock:token:{lock:b}", "distlock:fence"]);
        let ids = claims.iter().map(|claim| claim.id.as_str());
        assert_eq!(words[11], "9000");
        assert_eq!(words[13..15], ["60000", "3609000"]);
        assert!(words[15..17].iter().zip(ids).all(|(word, id)| word == id), "{words:?}");
        assert_eq!((&*words[17], words.len()), ("1", 18));
    }

    #[test]
    fn replies_are_read_or_rejected() {
        let claims = claims();
        let request = AcquireAll { claims: &claims, repair_ttl_ms: 0 };
        let decode = |text: &str| Some(request.decode(7, Value::BulkString(text.into()))?.0);
        let now = "1700000000000000";
        assert_eq!(
            decode(&format!("7 held {now} {now} 1700000000000005")),
            Some(AcquireAllReply::Held {
                tokens: vec![1_700_000_000_000_000, 1_700_000_000_000_005],
            })
        );
        match decode(&format!("7 busy {now} 1 500 {now} 2 somebody else")) {
            Some(AcquireAllReply::Busy { index: 1, holder, .. }) => {
                assert_eq!((holder.id(), holder.waiters()), ("somebody else", Some(2)));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(
            decode(&format!("7 type {now} 0")),
            Some(AcquireAllReply::WrongType { index: 0 })
        );
        for wrong in [
            format!("8 held {now} {now} {now}"),
            format!("7 held {now} {now}"),
            format!("7 busy {now} 2 500 {now} 2 somebody"),
            format!("7 type {now}"),
            format!("7 odd {now}"),
        ] {
            assert_eq!(decode(&wrong), None, "{wrong}");
        }
    }
}
