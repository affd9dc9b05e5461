//! The script that gives a lock to its successor, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::StoreResult,
    call::{Call, RESERVED, TOKEN_EXTRA_MS, count, is_token, is_wrong_type, number, reply_line},
    group::member,
};
use crate::core::kind::is_group;

impl Call<'_> {
    pub(super) fn adopt(mut self) -> StoreResult<Value> {
        let (nonce, former, id) = (self.arg(0), self.arg(1), self.arg(2));
        let (ttl, needed) = (number(self.arg(3)), count(self.arg(4)));
        let (lock, members, now) = (self.key(0), self.key(4), self.clock());
        let (now_ms, token_ttl) = (self.db.now_us / 1000, ttl + TOKEN_EXTRA_MS);
        if *now > *self.arg(5) {
            return reply_line(&[nonce, b"late", &now]);
        }
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            return reply_line(&[nonce, b"type", &now]);
        }
        let Some(holder) = holder? else { return reply_line(&[nonce, b"gone", &now]) };
        if holder == id {
            if !u64::try_from(self.db.pttl(lock)).is_ok_and(|left| left >= ttl) {
                self.db.pexpire(lock, ttl)?;
            }
            let token = match self.db.get(self.key(2))? {
                Some(token) if is_token(&token) => token,
                _ => self.next_token(&now, token_ttl)?,
            };
            return reply_line(&[nonce, b"held", &now, &token]);
        }
        if holder == former {
            self.db.pexpire(lock, ttl)?;
            self.used = RESERVED;
            let token = self.next_token(&now, token_ttl)?;
            self.db.set(lock, id, Some(ttl))?;
            return reply_line(&[nonce, b"held", &now, &token]);
        }
        if !is_group(&holder) {
            let description = self.describe(0, &holder, None)?;
            return reply_line(&[nonce, b"other", &now, &description]);
        }
        let pruned = self.db.zremrangebyscore(members, now_ms);
        if is_wrong_type(&pruned) {
            return reply_line(&[nonce, b"gone", &now]);
        }
        pruned?;
        for at in 1..=needed {
            if self.db.zscore(members, &member(former, at))?.is_none()
                && self.db.zscore(members, &member(id, at))?.is_none()
            {
                return reply_line(&[nonce, b"gone", &now]);
            }
        }
        let token = self.next_token(&now, token_ttl)?;
        for at in 1..=needed {
            self.db.zrem(members, &member(former, at))?;
            self.db.zadd_gt(members, vec![(member(id, at), now_ms + 1 + ttl)])?;
        }
        if let Some((_, last)) = self.db.zlast(members)? {
            self.db.pexpire_at(lock, last)?;
            self.db.pexpire_at(members, last)?;
        }
        reply_line(&[nonce, b"held", &now, &token])
    }
}
