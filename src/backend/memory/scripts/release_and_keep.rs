//! The script that keeps a lock taken after its release, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::StoreResult,
    call::{Call, count, is_wrong_type, number, reply_line, unless_wrong_type},
    group::member,
};

impl Call<'_> {
    pub(super) fn keep(mut self) -> StoreResult<Value> {
        let (nonce, id, entry) = (self.arg(0), self.arg(1), self.arg(2));
        let (needed, keep) = (count(self.arg(3)), number(self.arg(4)));
        let (lock, queue, members) = (self.key(0), self.key(1), self.key(4));
        if !entry.is_empty() {
            unless_wrong_type(self.db.lrem(queue, entry))?;
        }
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            return reply_line(&[nonce, b"type"]);
        }
        let kept = [b"distlock:kept ", id].concat();
        let mut holder = holder?;
        if holder.as_deref() == Some(id) {
            self.db.pexpire(lock, keep)?;
            self.db.set(lock, &kept, Some(keep))?;
            holder = Some(kept.clone());
        }
        let (now, now_ms) = (self.clock(), self.db.now_us / 1000);
        match holder {
            Some(holder) if holder == kept => reply_line(&[nonce, b"released", &now]),
            Some(holder) if holder == b"distlock:permits" => {
                let pruned = self.db.zremrangebyscore(members, now_ms);
                if is_wrong_type(&pruned) {
                    return reply_line(&[nonce, b"gone"]);
                }
                pruned?;
                let mut found = false;
                for at in 1..=needed {
                    let member = member(id, at);
                    let kept = [b"kept ", &*member].concat();
                    if self.db.zrem(members, &member)? {
                        self.db.zadd(members, vec![(kept, now_ms + 1 + keep)])?;
                        found = true;
                    } else {
                        found |= self.db.zscore(members, &kept)?.is_some();
                    }
                }
                let Some((_, last)) = self.db.zlast(members)?.filter(|_| found) else {
                    return reply_line(&[nonce, b"gone"]);
                };
                self.db.pexpire_at(lock, last)?;
                self.db.pexpire_at(members, last)?;
                reply_line(&[nonce, b"released", &now])
            }
            None => reply_line(&[nonce, b"gone"]),
            Some(holder) if holder == b"distlock:read" => reply_line(&[nonce, b"gone"]),
            Some(holder) => {
                let description = self.describe(0, &holder, None)?;
                reply_line(&[nonce, b"other", &now, &description])
            }
        }
    }
}
