//! The script that renews many locks, and what describes groups, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::{Bytes, StoreResult},
    call::{Call, count, cut, is_wrong_type, line, number},
    group::member,
};
use crate::core::kind::is_group;

const MEMBERS_MAX: usize = 1000;

impl Call<'_> {
    pub(super) fn renew(mut self) -> StoreResult<Value> {
        let mut reply = vec![self.header()];
        let is_late = number(&self.clock()) > number(self.arg(1));
        let mut keys = self.keys.iter();
        let mut next_key = || keys.next().map_or(&[][..], Vec::as_slice);
        for args in self.args.get(2..).unwrap_or_default().chunks_exact(2) {
            let [id, ttl] = args else { continue };
            let mut parts = ttl.strip_prefix(b"+").unwrap_or(ttl).split(|byte| *byte == b' ');
            let mut next_part = || parts.next().unwrap_or(b"0");
            let (ttl, needed, token_ttl) = (next_part(), next_part(), next_part());
            let (needed, token_ttl) = (count(needed), number(token_ttl));
            let lock = next_key();
            let members = if needed > 0 { next_key() } else { &[] };
            let token = if token_ttl > 0 { next_key() } else { &[] };
            let may_shorten = !is_late && !ttl.starts_with(b"-");
            let ttl = number(ttl.strip_prefix(b"-").unwrap_or(ttl));
            let holder = self.db.get(lock);
            let result = match holder {
                _ if is_wrong_type(&holder) => Value::Int(-1),
                Err(error) => return Err(error),
                Ok(None) => Value::Int(0),
                Ok(Some(holder)) if needed == 0 && holder == *id => {
                    let left = u64::try_from(self.db.pttl(lock)).unwrap_or(0);
                    let ttl = if may_shorten { ttl } else { ttl.max(left) };
                    Value::Int(self.db.pexpire(lock, ttl)?.into())
                }
                Ok(Some(holder)) if needed > 0 && is_group(&holder) => {
                    Value::Int(self.renew_members(lock, members, id, needed, ttl)?)
                }
                Ok(Some(holder)) => Value::BulkString(cut(&holder).to_vec()),
            };
            if result == Value::Int(1) && token_ttl > 0 && matches!(self.db.get(token), Ok(Some(_)))
            {
                self.db.pexpire(token, token_ttl)?;
            }
            reply.push(result);
        }
        Ok(Value::Array(reply))
    }

    fn renew_members(
        &mut self,
        lock: &[u8],
        members: &[u8],
        id: &[u8],
        needed: usize,
        ttl: u64,
    ) -> StoreResult<i64> {
        let now = self.db.now_us / 1000;
        let pruned = self.db.zremrangebyscore(members, now);
        if is_wrong_type(&pruned) {
            return Ok(-1);
        }
        pruned?;
        let expires = now + 1 + ttl;
        let renewed = self.extend(members, id, needed, expires)?;
        if let Some((_, last)) = self.db.zlast(members)?
            && last <= expires
        {
            self.db.pexpire_at(lock, last)?;
            self.db.pexpire_at(members, last)?;
        }
        Ok(renewed.into())
    }

    fn extend(&mut self, key: &[u8], id: &[u8], count: usize, expires: u64) -> StoreResult<bool> {
        let members: Vec<(Bytes, u64)> = (1..=count).map(|at| (member(id, at), expires)).collect();
        let mut all = true;
        for some in members.chunks(MEMBERS_MAX) {
            let mut found = Vec::new();
            for (member, _) in some {
                let score = self.db.zscore(key, member)?;
                found.extend(score.map(|score| (member.clone(), score.max(expires))));
            }
            if found.len() == some.len() {
                self.db.zadd(key, found)?;
            } else {
                all = false;
            }
        }
        Ok(all)
    }

    /// The members of a group, at most `each`, and not more than are `left`.
    pub(super) fn describe_group(
        &mut self,
        group: &[u8],
        key: &[u8],
        each: usize,
        left: &mut usize,
    ) -> Value {
        let now = self.db.now_us / 1000;
        let size = self.db.zcount_above(key, now).unwrap_or(0).to_string();
        let mut lines = vec![line(&[group, size.as_bytes()])];
        let found = self.db.zrange_above(key, now, each.min(*left)).unwrap_or_default();
        *left -= found.len();
        for (member, expires) in found {
            lines.push(line(&[(expires - now).to_string().as_bytes(), &member]));
        }
        Value::Array(lines.into_iter().map(Value::BulkString).collect())
    }
}
