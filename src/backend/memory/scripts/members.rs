//! The scripts in `src/backend/redis/lua/group` for many locks, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::{Bytes, CommandError, StoreResult},
    call::{Call, count, cut, is_wrong_type, line, number},
    group::member,
};
use crate::core::kind::is_group;

const MEMBERS_MAX: usize = 1000;

impl Call<'_> {
    pub(super) fn renew_members(mut self) -> StoreResult<Value> {
        let mut reply = vec![self.header()];
        let now = self.db.now_us / 1000;
        if self.args.len() < 2 + self.keys.len() / 3 * 4 {
            return Err(CommandError("ERR wrong number of arguments".into()));
        }
        for (keys, args) in self.keys.chunks_exact(3).zip(self.args[1..].chunks_exact(4)) {
            let [lock, members, token] = keys else { continue };
            let [id, needed, ttl, token_ttl] = args else { continue };
            let holder = self.db.get(lock);
            if is_wrong_type(&holder) {
                reply.push(Value::Int(-1));
                continue;
            }
            reply.push(match holder? {
                None => Value::Int(0),
                Some(holder) if !is_group(&holder) => Value::BulkString(cut(&holder).to_vec()),
                Some(_) => {
                    let pruned = self.db.zremrangebyscore(members, now);
                    if is_wrong_type(&pruned) {
                        Value::Int(-1)
                    } else {
                        pruned?;
                        let expires = now + 1 + number(ttl);
                        let renewed = self.extend(members, id, count(needed), expires)?;
                        if let Some((_, last)) = self.db.zlast(members)?
                            && last <= expires
                        {
                            self.db.pexpire_at(lock, last)?;
                            self.db.pexpire_at(members, last)?;
                        }
                        if number(token_ttl) > 0 && matches!(self.db.get(token), Ok(Some(_))) {
                            self.db.pexpire(token, number(token_ttl))?;
                        }
                        Value::Int(renewed.into())
                    }
                }
            });
        }
        Ok(Value::Array(reply))
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

    pub(super) fn list_members(mut self) -> StoreResult<Value> {
        let mut reply = vec![self.header()];
        let (now, each) = (self.db.now_us / 1000, count(self.arg(1)));
        let mut left = count(self.arg(2));
        for keys in self.keys.chunks_exact(2) {
            let Ok(Some(group)) = self.db.get(&keys[0]) else {
                reply.push(Value::Int(0));
                continue;
            };
            if !is_group(&group) {
                reply.push(Value::Int(0));
                continue;
            }
            let size = self.db.zcount_above(&keys[1], now).unwrap_or(0).to_string();
            let mut lines = vec![line(&[&group, size.as_bytes()])];
            let found = self.db.zrange_above(&keys[1], now, each.min(left)).unwrap_or_default();
            left = left.saturating_sub(found.len());
            for (member, expires) in found {
                lines.push(line(&[(expires - now).to_string().as_bytes(), &member]));
            }
            reply.push(Value::Array(lines.into_iter().map(Value::BulkString).collect()));
        }
        Ok(Value::Array(reply))
    }
}
