//! The scripts in `src/backend/redis/lua`, translated to Rust line by line. The simulator compares
//! them with a real server (`tests/sim/differential.rs`).

mod acquire_all;
mod adopt;
mod call;
mod group;
mod members;
mod queue_entry;
mod release_and_keep;

use std::mem;

use redis::Value;

pub use self::call::Channels;
use self::{
    call::{
        Call, QUEUE_MS, RESERVED, TOKEN_EXTRA_MS, count, cut, is_digits, is_token, is_wrong_type,
        line, number, reply_line, unless_wrong_type,
    },
    group::GroupCall,
};

use super::store::{Access, Bytes, CommandError, StoreResult};
use crate::{
    backend::redis::{
        requests::{
            acquire_all::ACQUIRE_ALL, adopt::ADOPT, group as group_kind, list, mutex,
            release::KEEP, renew::RENEW,
        },
        script,
    },
    core::kind::is_group,
};

/// A script of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Asks for a lock.
    Acquire,
    /// Releases a lock.
    Release,
    /// Renews locks.
    Renew,
    /// Describes locks.
    Describe,
    /// Asks for a read lock, a write lock, or permits.
    AcquireGroup,
    /// Releases one of these.
    ReleaseGroup,
    /// Releases a lock that stays taken for a while.
    Keep,
    /// Gives a lock to a successor.
    Adopt,
    /// Asks for several locks at once.
    AcquireAll,
}

impl Script {
    /// All scripts.
    pub const ALL: [Script; 9] = [
        Script::Acquire,
        Script::Release,
        Script::Renew,
        Script::Describe,
        Script::AcquireGroup,
        Script::ReleaseGroup,
        Script::Keep,
        Script::Adopt,
        Script::AcquireAll,
    ];

    fn sent(self) -> &'static script::Script {
        match self {
            Script::Acquire => &mutex::ACQUIRE,
            Script::Release => &mutex::RELEASE,
            Script::Renew => &RENEW,
            Script::Describe => &list::DESCRIBE,
            Script::AcquireGroup => &group_kind::ACQUIRE,
            Script::ReleaseGroup => &group_kind::RELEASE,
            Script::Keep => &KEEP,
            Script::Adopt => &ADOPT,
            Script::AcquireAll => &ACQUIRE_ALL,
        }
    }

    /// Returns the Lua text.
    pub fn text(self) -> &'static str {
        self.sent().text()
    }

    /// Returns the script that a server would run for this hash.
    pub fn by_hash(hash: &[u8]) -> Option<Script> {
        Script::ALL.into_iter().find(|script| script.sent().hash().as_bytes() == hash)
    }

    /// Runs the script. `rest` is what follows its text or hash in a request.
    ///
    /// # Errors
    ///
    /// The error that the server would reply.
    pub fn run(
        self,
        rest: &[Bytes],
        db: Access<'_>,
        channels: &mut dyn Channels,
    ) -> Result<Value, CommandError> {
        let count = rest.first().and_then(|count| std::str::from_utf8(count).ok()?.parse().ok());
        let Some((keys, args)) = count.and_then(|count| rest.get(1..)?.split_at_checked(count))
        else {
            let text = "ERR Number of keys can't be greater than number of args";
            return Err(CommandError(text.into()));
        };
        let call = Call { keys, args, db, channels, used: 0, spent: b"" };
        match self {
            Script::Acquire => call.acquire(),
            Script::Release => call.release(),
            Script::Renew => call.renew(),
            Script::Describe => call.describe_locks(),
            Script::AcquireGroup => GroupCall::new(call).acquire(),
            Script::ReleaseGroup => GroupCall::new(call).release(),
            Script::Keep => call.keep(),
            Script::Adopt => call.adopt(),
            Script::AcquireAll => call.acquire_all(),
        }
    }
}

impl Call<'_> {
    /// Grants the lock to the first waiter that has a subscriber. The usual hand-over, which reads
    /// less, concerns the first waiter only.
    fn grant_next(&mut self, mut is_usual: bool) -> StoreResult<Option<Bytes>> {
        let (lock, queue) = (self.key(0), self.key(1));
        let now = self.clock();
        while let Some(waiter) = unless_wrong_type(self.db.lpop(queue))? {
            let is_usual = mem::take(&mut is_usual);
            let mut parts = waiter.splitn(3, |byte| *byte == b' ');
            if let (Some(px), Some(channel), Some(id)) = (parts.next(), parts.next(), parts.next())
                && is_digits(px)
                && !px.starts_with(b"0")
                && px.len() < 16
                && !channel.is_empty()
                && !id.is_empty()
                && self.channels.subscribers(channel) > 0
            {
                let token_px = number(px).saturating_add(TOKEN_EXTRA_MS);
                let is_usual = is_usual && self.rises_without_fence(&now);
                let token = match is_usual {
                    true => self.db.set(self.key(2), &now, Some(token_px)).map(|()| now.clone()),
                    false => self.next_token(&now, token_px),
                };
                let Ok(token) = token else {
                    return self.put_back(&waiter);
                };
                if self.channels.publish(channel, &line(&[&token, &now, px, id])) > 0 {
                    self.db.set(lock, id, Some(number(px)))?;
                    if !is_usual && self.spent.get(..9) != now.get(..9) {
                        self.db.pexpire(queue, QUEUE_MS)?;
                    }
                    return Ok(Some(id.to_vec()));
                }
            } else if let Some(channel) = queue_entry::channel_in_group(&waiter)
                && self.channels.subscribers(channel) > 0
            {
                return self.put_back(&waiter);
            }
        }
        Ok(None)
    }

    fn put_back(&mut self, waiter: &[u8]) -> StoreResult<Option<Bytes>> {
        if self.db.push(self.key(1), waiter, true)? == 1 {
            self.db.pexpire(self.key(1), QUEUE_MS)?;
        }
        Ok(None)
    }

    fn acquire(mut self) -> StoreResult<Value> {
        let is_short = self.args.len() == 7;
        let (nonce, id, ttl, not_after) =
            (self.arg(0), self.arg(1), number(self.arg(2)), self.arg(3));
        let [mode, entry, token_min]: [&[u8]; 3] =
            if is_short { [b"try", b"", b""] } else { [5, 6, 7].map(|at| self.arg(at)) };
        let is_heard = mode == b"join-heard";
        let mode = if is_heard { b"join" } else { mode };
        let token_ttl = number(self.arg(if is_short { 5 } else { 8 }));
        let (lock, queue, token_key) = (self.key(0), self.key(1), self.key(2));
        let now = self.clock();
        if *now > *not_after {
            return reply_line(&[nonce, b"late", &now]);
        }
        let token_from = token_min.max(&now);
        if is_short && self.acquire_and_raise_fence(&now, ttl, token_ttl)? {
            return reply_line(&[nonce, b"fenced", &now]);
        }
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            if mode == b"leave" {
                self.db.lrem(queue, entry)?;
            }
            return reply_line(&[nonce, b"type", &now]);
        }
        let mut holder = holder?;
        if mode == b"join"
            && let Some(holder) = holder.as_ref().filter(|holder| *holder != id)
        {
            return self.enqueue(holder, None, is_heard, is_digits);
        }
        if holder.is_none() {
            self.used = RESERVED;
        }
        if holder.is_none() && self.db.llen(queue)? > 0 {
            holder = self.grant_next(false)?;
        }
        let Some(holder) = holder else {
            if mode == b"look" || mode == b"leave" {
                self.db.lrem(queue, entry)?;
            }
            let token = self.next_token(token_from, token_ttl)?;
            self.db.set(lock, id, Some(ttl))?;
            return reply_line(&[nonce, b"held", &now, &token]);
        };
        if holder == id {
            let token = self.db.get(token_key)?;
            if !u64::try_from(self.db.pttl(lock)).is_ok_and(|left| left >= ttl) {
                self.db.pexpire(lock, ttl)?;
                self.db.pexpire(token_key, token_ttl)?;
            }
            let token = match token.filter(|token| is_token(token)) {
                None => self.next_token(token_from, token_ttl)?,
                Some(token) if *token < *token_min => {
                    self.db.set(token_key, token_min, Some(token_ttl))?;
                    token_min.to_vec()
                }
                Some(token) => token,
            };
            return reply_line(&[nonce, b"held", &now, &token]);
        }
        let left = self.time_left()?;
        if mode == b"join" || mode == b"look" {
            return self.enqueue(&holder, Some(left), false, is_digits);
        }
        if mode == b"leave" {
            self.db.lrem(queue, entry)?;
        }
        let description = self.describe(0, &holder, Some(left))?;
        reply_line(&[nonce, b"busy", &now, &description])
    }

    fn release(mut self) -> StoreResult<Value> {
        let (nonce, id) = (self.arg(0), self.arg(1));
        let (lock, queue, now) = (self.key(0), self.key(1), self.clock());
        let is_usual = self.args.len() == 4;
        let (entry, not_after): (&[u8], &[u8]) =
            if is_usual { (b"", b"") } else { (self.arg(2), self.arg(3)) };
        if !not_after.is_empty() && *now > *not_after {
            return reply_line(&[nonce, b"late", &now]);
        }
        if !entry.is_empty() {
            unless_wrong_type(self.db.lrem(queue, entry))?;
        }
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            return reply_line(&[nonce, b"type"]);
        }
        let holder = holder?;
        let is_usual = is_usual && holder.as_deref() == Some(id);
        if is_usual && self.free_with_token(self.arg(2))? {
            return reply_line(&[nonce, b"released"]);
        }
        if is_usual {
            self.spent = self.arg(2);
        } else if holder.is_none()
            || self.args.len() == 5 && entry.is_empty() && not_after.is_empty()
        {
            self.used = RESERVED;
        }
        let tag: &[u8] = match holder {
            None => b"gone",
            Some(holder) if holder == id || cut(&holder) == id => b"released",
            Some(holder) => {
                let description = self.describe(0, &holder, None)?;
                return reply_line(&[nonce, b"other", &now, &description]);
            }
        };
        if self.grant_next(is_usual)?.is_none() {
            self.free_lock()?;
        }
        reply_line(&[nonce, tag])
    }

    fn describe_locks(mut self) -> StoreResult<Value> {
        let mut reply = vec![self.header()];
        let (each, mut left) = (count(self.arg(1)), count(self.arg(2)));
        let (members_each, mut members_left) = (count(self.arg(3)), count(self.arg(4)));
        for first in (0..self.keys.len()).step_by(4) {
            let (lock, queue) = (self.key(first), self.key(first + 1));
            let holder = self.db.get(lock);
            reply.push(match holder {
                _ if is_wrong_type(&holder) => Value::Int(-1),
                Err(error) => return Err(error),
                Ok(None) => Value::Int(0),
                Ok(Some(holder)) => {
                    let mut parts = vec![self.describe(first, &holder, None)?];
                    let listed = unless_wrong_type(self.db.llen(queue))?.min(each).min(left);
                    left -= listed;
                    if listed > 0 {
                        parts.extend(self.db.lrange(queue, listed)?);
                    }
                    parts.iter_mut().skip(1).for_each(|entry| entry.truncate(1024));
                    let mut parts: Vec<_> = parts.into_iter().map(Value::BulkString).collect();
                    if is_group(&holder) {
                        let members = self.key(first + 3);
                        let left = &mut members_left;
                        parts.push(self.describe_group(&holder, members, members_each, left));
                    }
                    Value::Array(parts)
                }
            });
        }
        Ok(Value::Array(reply))
    }
}
