//! The script that gives a lock to another client, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::StoreResult,
    call::{Call, is_wrong_type, number, reply_line},
};

impl Call<'_> {
    pub(super) fn adopt(mut self) -> StoreResult<Value> {
        let (nonce, former, id, ttl) = (self.arg(0), self.arg(1), self.arg(2), number(self.arg(3)));
        let (lock, now) = (self.key(0), self.clock());
        if *now > *self.arg(4) {
            return reply_line(&[nonce, b"late", &now]);
        }
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            return reply_line(&[nonce, b"type", &now]);
        }
        let Some(holder) = holder? else { return reply_line(&[nonce, b"gone", &now]) };
        if holder == former || holder == id {
            self.db.pexpire(lock, ttl)?;
            let token = self.next_token(&now, number(self.arg(5)))?;
            self.db.set(lock, id, Some(ttl))?;
            return reply_line(&[nonce, b"held", &now, &token]);
        }
        let description = self.describe(0, &holder, None)?;
        reply_line(&[nonce, b"other", &now, &description])
    }
}
