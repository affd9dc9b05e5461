//! The script that acquires several mutexes at once, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::{Bytes, StoreResult},
    call::{Call, RESERVED, is_wrong_type, number, reply_line},
};

impl Call<'_> {
    pub(super) fn acquire_all(self) -> StoreResult<Value> {
        let (nonce, ttl, not_after) = (self.arg(0), number(self.arg(1)), self.arg(2));
        let (repair, token_ttl) = (self.arg(3), number(self.arg(4)));
        let now = self.clock();
        if *now > *not_after {
            return reply_line(&[nonce, b"late", &now]);
        }
        let Call { keys, args, db, channels, used, spent } = self;
        // The keys of each lock, numbered as for the scripts for one.
        let fence = keys.last().cloned().unwrap_or_default();
        let select = |lock: &[Bytes]| [lock, std::slice::from_ref(&fence)].concat();
        let each: Vec<Vec<Bytes>> = keys.chunks_exact(3).map(select).collect();
        let ids = args.get(5..).unwrap_or_default();
        let mut call = Call { keys: &[], args, db, channels, used, spent };
        let mut own = Vec::new();
        for (index, (lock, id)) in each.iter().zip(ids).enumerate() {
            call.keys = lock;
            let index = index.to_string();
            let holder = call.db.get(call.key(0));
            if is_wrong_type(&holder) {
                return reply_line(&[nonce, b"type", &now, index.as_bytes()]);
            }
            let mut holder = holder?;
            if holder.is_none() {
                call.used = RESERVED;
            }
            if holder.is_none() && call.db.llen(call.key(1))? > 0 {
                holder = call.grant_next(false)?;
            }
            own.push(holder.as_ref() == Some(id));
            if let Some(holder) = holder.filter(|holder| holder != id) {
                let mut left = call.db.pttl(call.key(0));
                if left == -1 && repair != b"0" {
                    call.db.pexpire(call.key(0), number(repair))?;
                    left = i64::try_from(number(repair)).unwrap_or(i64::MAX);
                }
                let description = call.describe(0, &holder, Some(left))?;
                return reply_line(&[nonce, b"busy", &now, index.as_bytes(), &description]);
            }
        }
        let mut reply: Vec<Bytes> = vec![nonce.to_vec(), b"held".to_vec(), now.clone()];
        for (lock, is_own) in each.iter().zip(&own) {
            call.keys = lock;
            call.used = if *is_own { 0 } else { RESERVED };
            reply.push(call.next_token(&now, token_ttl)?);
        }
        for ((lock, id), is_own) in each.iter().zip(ids).zip(own) {
            call.keys = lock;
            if !is_own {
                call.db.set(call.key(0), id, Some(ttl))?;
            } else if !u64::try_from(call.db.pttl(call.key(0))).is_ok_and(|left| left >= ttl) {
                call.db.pexpire(call.key(0), ttl)?;
            }
        }
        Ok(Value::BulkString(reply.join(&b' ')))
    }
}
