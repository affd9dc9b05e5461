//! Renewals of locks of all kinds, in batches. Pure.

use std::time::Duration;

use redis::Value;

use super::mutex::token_ttl_ms;
use crate::{
    backend::redis::{
        fields::{array_reply, write_bulk, write_number},
        script::{Decoded, Request, Script, ScriptRef, script, write_version},
    },
    core::key::LockKey,
};

pub(crate) static RENEW: Script = script!(4, "renew.lua");

/// One lock of a batch of renewals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseToRenew<'a> {
    pub(crate) key: &'a LockKey,
    pub(crate) id: &'a str,
    /// Number of the members of a group that the claim has; 0 if it has the lock alone.
    pub(crate) count: u32,
    pub(crate) ttl_ms: u64,
    /// A later request may have a longer ttl, and arrive earlier.
    pub(crate) never_shorten: bool,
    /// Whether the server must extend the TTL of the token key.
    pub(crate) refresh_token: bool,
}

impl LeaseToRenew<'_> {
    /// The ttl that it asks for. The lease may have got another one since.
    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

pub(crate) struct Renew<'a>(pub(crate) &'a [LeaseToRenew<'a>]);

/// Result for one lock of a batch of renewals.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RenewReply {
    Renewed,
    Gone,
    HeldByOther(String),
}

impl Request for Renew<'_> {
    type Reply = Vec<RenewReply>;

    fn script(&self) -> Option<&'static Script> {
        Some(&RENEW)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        let keys = |renewal: &LeaseToRenew<'_>| {
            1 + usize::from(renewal.count > 0) + usize::from(renewal.refresh_token)
        };
        RENEW.write_header(by, self.0.iter().map(keys).sum(), 2 + 2 * self.0.len(), out);
        for LeaseToRenew { key, count, refresh_token, .. } in self.0 {
            write_bulk(out, &[key.lock_key().as_bytes()]);
            if *count > 0 {
                write_bulk(out, &key.members_key().map(str::as_bytes));
            }
            if *refresh_token {
                write_bulk(out, &key.token_key().map(str::as_bytes));
            }
        }
        write_number(out, nonce);
        write_number(out, not_after_us);
        for renewal in self.0 {
            let LeaseToRenew { id, count, ttl_ms, never_shorten, refresh_token, .. } = *renewal;
            write_bulk(out, &[id.as_bytes()]);
            let sign = if never_shorten { "-" } else { "" };
            if count > 0 || refresh_token {
                let token_ttl_ms = if refresh_token { token_ttl_ms(ttl_ms) } else { 0 };
                let more = format!("+{sign}{ttl_ms} {count} {token_ttl_ms}");
                write_bulk(out, &[more.as_bytes()]);
            } else {
                let mut digits = itoa::Buffer::new();
                write_bulk(out, &[sign.as_bytes(), digits.format(ttl_ms).as_bytes()]);
            }
        }
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<Self::Reply>> {
        let (now_us, values) = array_reply(reply, nonce)?;
        let mut results = Vec::with_capacity(self.0.len());
        for value in values {
            results.push(match value {
                Value::Int(1) => RenewReply::Renewed,
                // A key of another type is not a lock, so the lock is gone.
                Value::Int(0 | -1) => RenewReply::Gone,
                Value::BulkString(id) => {
                    RenewReply::HeldByOther(String::from_utf8_lossy(&id).into_owned())
                }
                _ => return None,
            });
        }
        (results.len() == self.0.len()).then_some((results, Some(now_us)))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::backend::redis::test_util::script_arguments;

    pub(crate) fn renewal(key: &LockKey) -> LeaseToRenew<'_> {
        LeaseToRenew {
            key,
            id: "i",
            count: 0,
            ttl_ms: 1,
            never_shorten: false,
            refresh_token: false,
        }
    }

    #[test]
    fn renewal_has_only_the_keys_that_it_needs() {
        let names = ["a", "b", "c", "d"].map(|name| LockKey::new("", name).unwrap());
        let [a, b, c, d] = names.each_ref().map(renewal);
        let renewals = [
            a,
            LeaseToRenew { id: "j", count: 3, ttl_ms: 2, ..b },
            LeaseToRenew { never_shorten: true, refresh_token: true, ..c },
            LeaseToRenew { count: 1, refresh_token: true, ..d },
        ];
        let keys = ["a", "b", "distlock:members:{b}", "c", "distlock:token:{c}"];
        let keys = [&keys[..], &["d", "distlock:members:{d}", "distlock:token:{d}"]].concat();
        let keys: Vec<_> = keys.into_iter().map(str::to_owned).collect();
        let expected = [
            &["7"][..],
            &["i", "1"],
            &["j", "+2 3 0"],
            &["i", "+-1 0 3600001"],
            &["i", "+1 1 3600001"],
        ];
        assert_eq!(script_arguments(&Renew(&renewals), &keys), expected.concat());
    }

    #[test]
    fn renew_reply_needs_one_result_per_lock() {
        let key = LockKey::new("", "a").unwrap();
        let renewals = [renewal(&key); 2];
        let text = |line: &str| Value::BulkString(line.as_bytes().to_vec());
        let decode = |nonce, results: Vec<Value>| {
            let reply = Value::Array([vec![text("1 3")], results].concat());
            Renew(&renewals).decode(nonce, reply)
        };
        assert_eq!(
            decode(1, vec![Value::Int(1), text("somebody")]),
            Some((vec![RenewReply::Renewed, RenewReply::HeldByOther("somebody".into())], Some(3)))
        );
        // A key that is gone, and a key that has another type.
        let gone = decode(1, vec![Value::Int(0), Value::Int(-1)]);
        assert_eq!(gone, Some((vec![RenewReply::Gone, RenewReply::Gone], Some(3))));
        assert_eq!(decode(1, vec![Value::Int(1)]), None);
        assert_eq!(decode(1, vec![Value::Int(1), Value::Int(2)]), None);
        assert_eq!(decode(2, vec![Value::Int(1), Value::Int(1)]), None);
    }
}
