//! The scripts in `src/backend/redis/lua`, translated to Rust line by line. The simulator compares
//! them with a real server (`tests/sim/differential.rs`).

use redis::Value;

use super::store::{Access, Bytes, CommandError, StoreResult};
use crate::backend::redis::{list, primitive::mutex, script};

const TOKEN_EXTRA_MS: u64 = 3_600_000;
const QUEUE_MS: u64 = 60_000;
const TOKEN_MAX: &[u8] = b"9007199254740991";

/// A script of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Asks for a lock.
    Acquire,
    /// Releases a lock.
    Release,
    /// Renews locks.
    Renew,
    /// Reports the holder of a lock.
    Inspect,
    /// Describes locks.
    Describe,
}

/// The channels of a server.
pub trait Channels {
    /// Publishes a message. Returns the number of subscribers that it was sent to.
    fn publish(&mut self, channel: &[u8], payload: &[u8]) -> usize;

    /// Returns the number of subscribers of a channel.
    fn subscribers(&self, channel: &[u8]) -> usize;
}

impl Script {
    /// All scripts.
    pub const ALL: [Script; 5] =
        [Script::Acquire, Script::Release, Script::Renew, Script::Inspect, Script::Describe];

    fn sent(self) -> &'static script::Script {
        match self {
            Script::Acquire => &mutex::ACQUIRE,
            Script::Release => &mutex::RELEASE,
            Script::Renew => &mutex::RENEW,
            Script::Inspect => &mutex::INSPECT,
            Script::Describe => &list::DESCRIBE,
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
        let call = Call { keys, args, db, channels };
        match self {
            Script::Acquire => call.acquire(),
            Script::Release => call.release(),
            Script::Renew => call.renew(),
            Script::Inspect => call.inspect(),
            Script::Describe => call.describe_locks(),
        }
    }
}

/// One call of a script.
struct Call<'a> {
    keys: &'a [Bytes],
    args: &'a [Bytes],
    db: Access<'a>,
    channels: &'a mut dyn Channels,
}

/// A string that consists of these fields.
fn line(fields: &[&[u8]]) -> Bytes {
    fields.join(&b' ')
}

fn reply_line(fields: &[&[u8]]) -> StoreResult<Value> {
    Ok(Value::BulkString(line(fields)))
}

fn number(bytes: &[u8]) -> u64 {
    std::str::from_utf8(bytes).ok().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

fn count(bytes: &[u8]) -> usize {
    usize::try_from(number(bytes)).unwrap_or(usize::MAX)
}

fn is_digits(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit)
}

/// Whether a value is a token of this library.
fn is_token(bytes: &[u8]) -> bool {
    bytes.len() == 16 && bytes < TOKEN_MAX && is_digits(bytes)
}

fn token_above(last: &[u8], from: &[u8]) -> Bytes {
    if last < from || !is_token(last) {
        return from.to_vec();
    }
    format!("{:016}", number(last).saturating_add(1)).into_bytes()
}

/// The protocol version in the value of the fence; version 1 writes none.
fn version_of(fence: &[u8]) -> Option<&[u8]> {
    let version = fence.strip_prefix(b"v")?.split(|byte| *byte == b' ').next()?;
    (is_digits(version) && fence.contains(&b' ')).then_some(version)
}

/// The value of a lock key, as far as replies contain it.
fn cut(holder: &[u8]) -> &[u8] {
    &holder[..holder.len().min(512)]
}

fn is_wrong_type<T>(outcome: &StoreResult<T>) -> bool {
    matches!(outcome, Err(error) if error.0.contains("WRONGTYPE"))
}

/// Treats a key of the wrong type as missing.
fn unless_wrong_type<T: Default>(outcome: StoreResult<T>) -> StoreResult<T> {
    if is_wrong_type(&outcome) { Ok(T::default()) } else { outcome }
}

impl<'a> Call<'a> {
    /// The key at this position; empty if it is missing, which no request of the library has.
    fn key(&self, at: usize) -> &'a [u8] {
        self.keys.get(at).map_or(&[], Vec::as_slice)
    }

    fn arg(&self, at: usize) -> &'a [u8] {
        self.args.get(at).map_or(&[], Vec::as_slice)
    }

    fn clock(&self) -> Bytes {
        format!("{:016}", self.db.now_us).into_bytes()
    }

    fn next_token(&mut self, from: &[u8], px: u64) -> StoreResult<Bytes> {
        let (key, fence) = (self.key(2), self.key(3));
        let mut from = from.to_vec();
        if let Some(fence) = self.db.get(fence)?.filter(|fence| *fence >= from) {
            if version_of(&fence)
                .is_some_and(|version| self.args.last().is_none_or(|own| own != version))
            {
                return Err(CommandError("ERR another version of the protocol".into()));
            }
            from = token_above(&fence, &from);
        }
        let last = self.db.set_get(key, &from, Some(px))?;
        let Some(last) = last.filter(|last| *last >= from) else { return Ok(from) };
        let token = token_above(&last, &from);
        if token != from {
            self.db.set(key, &token, Some(px))?;
        }
        Ok(token)
    }

    /// Deletes a lock that nobody waits for, and its token, which raises the fence.
    fn free_lock(&mut self) -> StoreResult<()> {
        let (lock, key, fence) = (self.key(0), self.key(2), self.key(3));
        let Ok(Some(token)) = self.db.get(key) else { return self.db.del(&[lock]) };
        if is_token(&token) {
            let Ok(last) = self.db.set_get(fence, &token, None) else {
                return self.db.del(&[lock]);
            };
            if let Some(last) = last.filter(|last| *last >= token) {
                let is_newer = matches!(*last, [b'v', b'0'..=b'9', ..]);
                if is_newer || is_token(&last) {
                    self.db.set(fence, &last, None)?;
                }
                if is_newer {
                    return self.db.del(&[lock]);
                }
            }
        }
        self.db.del(&[lock, key])
    }

    fn grant_next(&mut self) -> StoreResult<Option<Bytes>> {
        let (lock, queue) = (self.key(0), self.key(1));
        let now = self.clock();
        while let Some(waiter) = unless_wrong_type(self.db.lpop(queue))? {
            let mut parts = waiter.splitn(3, |byte| *byte == b' ');
            if let (Some(px), Some(channel), Some(id)) = (parts.next(), parts.next(), parts.next())
                && is_digits(px)
                && !px.starts_with(b"0")
                && px.len() < 16
                && !channel.is_empty()
                && !id.is_empty()
            {
                let token_px = number(px).saturating_add(TOKEN_EXTRA_MS);
                let Ok(token) = self.next_token(&now, token_px) else {
                    self.db.push(queue, &waiter, true)?;
                    return Ok(None);
                };
                if self.channels.publish(channel, &line(&[&token, &now, px, id])) > 0 {
                    self.db.set(lock, id, Some(number(px)))?;
                    return Ok(Some(id.to_vec()));
                }
            }
        }
        Ok(None)
    }

    /// Describes the holder of the lock whose keys begin at `first`: `pttl token waiters holder`.
    fn describe(&mut self, first: usize, holder: &[u8], left: Option<i64>) -> StoreResult<Bytes> {
        let (lock, queue, key) = (self.key(first), self.key(first + 1), self.key(first + 2));
        let token = unless_wrong_type(self.db.get(key))?.filter(|token| is_digits(token));
        let waiters = unless_wrong_type(self.db.llen(queue))?;
        let left = left.unwrap_or_else(|| self.db.pttl(lock)).to_string();
        let token = token.as_deref().unwrap_or(b"0");
        Ok(line(&[left.as_bytes(), token, waiters.to_string().as_bytes(), cut(holder)]))
    }

    fn acquire(mut self) -> StoreResult<Value> {
        let (nonce, id, ttl, mode, entry) =
            (self.arg(0), self.arg(1), number(self.arg(2)), self.arg(3), self.arg(4));
        let (not_after, repair, token_min) = (self.arg(5), self.arg(6), self.arg(7));
        let token_ttl = number(self.arg(8));
        let (lock, queue, token_key) = (self.key(0), self.key(1), self.key(2));
        let now = self.clock();
        if *now > *not_after {
            return reply_line(&[nonce, b"late", &now]);
        }
        let token_from = token_min.max(&now);
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            if mode == b"leave" {
                self.db.lrem(queue, entry)?;
            }
            return reply_line(&[nonce, b"type", &now]);
        }
        let mut holder = holder?;
        if holder.is_none() && self.db.llen(queue)? > 0 {
            holder = self.grant_next()?;
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
        let mut left = self.db.pttl(lock);
        if left == -1 && repair != b"0" {
            self.db.pexpire(lock, number(repair))?;
            left = i64::try_from(number(repair)).unwrap_or(i64::MAX);
        }
        if mode == b"join" || mode == b"look" {
            return self.enqueue(&holder, left);
        }
        if mode == b"leave" {
            self.db.lrem(queue, entry)?;
        }
        let description = self.describe(0, &holder, Some(left))?;
        reply_line(&[nonce, b"busy", &now, &description])
    }

    /// Adds the queue entry of an acquire, unless it is in the queue.
    fn enqueue(&mut self, holder: &[u8], left: i64) -> StoreResult<Value> {
        let (nonce, mode, entry, queue) = (self.arg(0), self.arg(3), self.arg(4), self.key(1));
        let position = if mode == b"look" { self.db.lpos(queue, entry)? } else { None };
        let (position, mut state) = match position {
            Some(position) => (position, 0),
            None => (self.db.push(queue, entry, false)?.saturating_sub(1), 1),
        };
        let mut parts = entry.splitn(3, |byte| *byte == b' ');
        let channel = parts.next().filter(|px| is_digits(px)).and_then(|_| parts.next());
        if self.channels.subscribers(channel.unwrap_or_default()) == 0 {
            state += 2;
        }
        self.db.pexpire(queue, QUEUE_MS)?;
        let numbers = format!("{left} {position} {state}");
        reply_line(&[nonce, b"queued", &self.clock(), numbers.as_bytes(), cut(holder)])
    }

    fn release(mut self) -> StoreResult<Value> {
        let (nonce, id, entry, not_after) = (self.arg(0), self.arg(1), self.arg(2), self.arg(3));
        let (lock, queue, now) = (self.key(0), self.key(1), self.clock());
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
        let tag: &[u8] = match holder? {
            None => b"gone",
            Some(holder) if holder == id || cut(&holder) == id => b"released",
            Some(holder) => {
                let description = self.describe(0, &holder, None)?;
                return reply_line(&[nonce, b"other", &now, &description]);
            }
        };
        if self.grant_next()?.is_none() {
            self.free_lock()?;
        }
        reply_line(&[nonce, tag])
    }

    fn header(&self) -> Value {
        Value::BulkString(line(&[self.arg(0), &self.clock()]))
    }

    fn renew(mut self) -> StoreResult<Value> {
        let mut reply = vec![self.header()];
        // Arguments are the nonce, id and ttl of each lock, the ttl of each token, the version.
        let locks = self.args.len().checked_sub(self.keys.len().saturating_add(2));
        let Some((locks, tokens)) = locks.and_then(|locks| self.keys.split_at_checked(locks))
        else {
            return Err(CommandError("ERR wrong number of arguments".into()));
        };
        for (key, pair) in locks.iter().zip(self.args[1..].chunks_exact(2)) {
            let (id, ttl) = (&pair[0], number(&pair[1]));
            let holder = self.db.get(key);
            reply.push(match holder {
                _ if is_wrong_type(&holder) => Value::Int(-1),
                Err(error) => return Err(error),
                Ok(None) => Value::Int(0),
                Ok(Some(holder)) if holder == *id => Value::Int(self.db.pexpire(key, ttl)?.into()),
                Ok(Some(holder)) => Value::BulkString(cut(&holder).to_vec()),
            });
        }
        for (key, ttl) in tokens.iter().zip(&self.args[1 + 2 * locks.len()..]) {
            if let Ok(Some(_)) = self.db.get(key) {
                self.db.pexpire(key, number(ttl))?;
            }
        }
        Ok(Value::Array(reply))
    }

    fn inspect(mut self) -> StoreResult<Value> {
        let (nonce, lock) = (self.arg(0), self.key(0));
        let holder = self.db.get(lock);
        if is_wrong_type(&holder) {
            return reply_line(&[nonce, b"type"]);
        }
        let Some(holder) = holder? else { return reply_line(&[nonce, b"free"]) };
        let description = self.describe(0, &holder, None)?;
        reply_line(&[nonce, b"busy", &self.clock(), &description])
    }

    fn describe_locks(mut self) -> StoreResult<Value> {
        let mut reply = vec![self.header()];
        let (each, mut left) = (count(self.arg(1)), count(self.arg(2)));
        for first in (0..self.keys.len()).step_by(3) {
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
                    Value::Array(parts.into_iter().map(Value::BulkString).collect())
                }
            });
        }
        Ok(Value::Array(reply))
    }
}
