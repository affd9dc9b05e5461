//! One call of a script, and what scripts for several kinds of locks share.

use redis::Value;

use super::super::store::{Access, Bytes, CommandError, StoreResult};

pub(super) const TOKEN_EXTRA_MS: u64 = 3_600_000;
pub(super) const QUEUE_MS: u64 = 60_000;
/// In place of the time left, if that was not read.
pub(super) const NOT_READ: i64 = -3;
pub(super) const TOKEN_MAX: &[u8] = b"9007199254740991";
pub(super) const RESERVED: u64 = 9_999;

/// The channels of a server.
pub trait Channels {
    /// Publishes a message. Returns the number of subscribers that it was sent to.
    fn publish(&mut self, channel: &[u8], payload: &[u8]) -> usize;

    /// Returns the number of subscribers of a channel.
    fn subscribers(&self, channel: &[u8]) -> usize;
}

/// One call of a script.
pub(super) struct Call<'a> {
    pub(super) keys: &'a [Bytes],
    pub(super) args: &'a [Bytes],
    pub(super) db: Access<'a>,
    pub(super) channels: &'a mut dyn Channels,
    /// Number of tokens after the one in the token key that may have been used.
    pub(super) used: u64,
    /// The last token that was used, if it is known.
    pub(super) spent: &'a [u8],
}

/// A string that consists of these fields.
pub(super) fn line(fields: &[&[u8]]) -> Bytes {
    fields.join(&b' ')
}

pub(super) fn reply_line(fields: &[&[u8]]) -> StoreResult<Value> {
    Ok(Value::BulkString(line(fields)))
}

pub(super) fn number(bytes: &[u8]) -> u64 {
    std::str::from_utf8(bytes).ok().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

pub(super) fn count(bytes: &[u8]) -> usize {
    usize::try_from(number(bytes)).unwrap_or(usize::MAX)
}

pub(super) fn is_digits(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit)
}

/// Whether a value is a token of this library.
pub(super) fn is_token(bytes: &[u8]) -> bool {
    bytes.len() == 16 && bytes < TOKEN_MAX && is_digits(bytes)
}

fn token_above(last: &[u8], from: &[u8], n: u64) -> Bytes {
    if n == 0 && last < from || !is_token(last) || number(last) + n < number(from) {
        return from.to_vec();
    }
    token_after(last, n + 1)
}

fn token_after(token: &[u8], n: u64) -> Bytes {
    format!("{:016}", number(token).saturating_add(n)).into_bytes()
}

/// The protocol version in the value of the fence; version 1 writes none.
pub(super) fn version_of(fence: &[u8]) -> Option<&[u8]> {
    let version = fence.strip_prefix(b"v")?.split(|byte| *byte == b' ').next()?;
    (is_digits(version) && fence.contains(&b' ')).then_some(version)
}

/// The value of a lock key, as far as replies contain it.
pub(super) fn cut(holder: &[u8]) -> &[u8] {
    &holder[..holder.len().min(512)]
}

pub(super) fn is_wrong_type<T>(outcome: &StoreResult<T>) -> bool {
    matches!(outcome, Err(error) if error.0.contains("WRONGTYPE"))
}

/// Treats a key of the wrong type as missing.
pub(super) fn unless_wrong_type<T: Default>(outcome: StoreResult<T>) -> StoreResult<T> {
    if is_wrong_type(&outcome) { Ok(T::default()) } else { outcome }
}

impl<'a> Call<'a> {
    /// The key at this position; empty if it is missing, which no request of the library has.
    pub(super) fn key(&self, at: usize) -> &'a [u8] {
        self.keys.get(at).map_or(&[], Vec::as_slice)
    }

    pub(super) fn arg(&self, at: usize) -> &'a [u8] {
        self.args.get(at).map_or(&[], Vec::as_slice)
    }

    pub(super) fn clock(&self) -> Bytes {
        format!("{:016}", self.db.now_us).into_bytes()
    }

    pub(super) fn next_token(&mut self, from: &[u8], px: u64) -> StoreResult<Bytes> {
        let (key, fence) = (self.key(2), self.key(3));
        let mut from = token_above(self.spent, from, 0);
        if let Some(fence) = self.db.get(fence)?.filter(|fence| *fence >= from) {
            if version_of(&fence)
                .is_some_and(|version| self.args.last().is_none_or(|own| own != version))
            {
                return Err(CommandError("ERR another version of the protocol".into()));
            }
            from = token_above(&fence, &from, 0);
        }
        let last = self.db.set_get(key, &from, Some(px))?;
        let Some(last) = last else { return Ok(from) };
        let token = token_above(&last, &from, self.used);
        if token != from {
            self.db.set(key, &token, Some(px))?;
        }
        Ok(token)
    }

    /// Whether the time is the next token in a usual hand-over, which reads the fence only once in
    /// ten seconds.
    pub(super) fn rises_without_fence(&mut self, now: &[u8]) -> bool {
        let is_usual = |last: &[u8]| last < now && last.get(..9) == now.get(..9);
        self.spent < now && matches!(self.db.get(self.key(2)), Ok(Some(last)) if is_usual(&last))
    }

    /// Deletes a lock that nobody waits for, and its token, which raises the fence.
    pub(super) fn free_lock(&mut self) -> StoreResult<()> {
        let (lock, key, fence) = (self.key(0), self.key(2), self.key(3));
        let Ok(Some(mut token)) = self.db.get(key) else { return self.db.del(&[lock]) };
        if is_token(&token) {
            token = token_after(&token, self.used).max(self.spent.to_vec());
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

    /// Acquires a lock that is free and has neither queue nor token, and raises the fence to its
    /// token, the time. Returns whether it did.
    pub(super) fn acquire_and_raise_fence(
        &mut self,
        now: &[u8],
        ttl: u64,
        token_ttl: u64,
    ) -> StoreResult<bool> {
        let (lock, queue, key, fence) = (self.key(0), self.key(1), self.key(2), self.key(3));
        if self.db.exists(&[lock, queue, key]) {
            return Ok(false);
        }
        let last = self.db.set_get(fence, now, None)?;
        if let Some(last) = last.filter(|last| **last >= *now) {
            self.db.set(fence, &last, None)?;
            return Ok(false);
        }
        self.db.set(key, now, Some(token_ttl))?;
        self.db.set(lock, self.arg(1), Some(ttl))?;
        Ok(true)
    }

    /// Deletes a lock of which the holder has sent the token, if nobody waits and this raises the
    /// fence; the token is empty if the fence has it. Returns whether it did.
    pub(super) fn free_with_token(&mut self, token: &[u8]) -> StoreResult<bool> {
        let (lock, queue, key, fence) = (self.key(0), self.key(1), self.key(2), self.key(3));
        if !matches!(self.db.llen(queue), Ok(0)) {
            return Ok(false);
        }
        // Has no effect, but a server that is out of memory permits `set` after it.
        self.db.lpop(queue)?;
        if token.is_empty() {
            self.db.del(&[lock, key])?;
            return Ok(true);
        }
        match self.db.get(fence) {
            Ok(last) if last.as_deref().is_none_or(|last| last < token) => {
                self.db.set(fence, token, None)?;
                self.db.del(&[lock, key])?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Describes the holder of the lock whose keys begin at `first`: `pttl token waiters holder`.
    pub(super) fn describe(
        &mut self,
        first: usize,
        holder: &[u8],
        left: Option<i64>,
    ) -> StoreResult<Bytes> {
        let (lock, queue, key) = (self.key(first), self.key(first + 1), self.key(first + 2));
        let token = unless_wrong_type(self.db.get(key))?.filter(|token| is_digits(token));
        let waiters = unless_wrong_type(self.db.llen(queue))?;
        let left = left.unwrap_or_else(|| self.db.pttl(lock)).to_string();
        let token = token.as_deref().unwrap_or(b"0");
        Ok(line(&[left.as_bytes(), token, waiters.to_string().as_bytes(), cut(holder)]))
    }

    /// Returns the time left of the holder of a mutex, whose key gets an expiry if it has none.
    pub(super) fn time_left(&mut self) -> StoreResult<i64> {
        let (lock, repair) = (self.key(0), number(self.arg(4)));
        let left = self.db.pttl(lock);
        if left != -1 || repair == 0 {
            return Ok(left);
        }
        self.db.pexpire(lock, repair)?;
        Ok(i64::try_from(repair).unwrap_or(i64::MAX))
    }

    /// Adds the queue entry of an acquire, unless it is in the queue. `is_start` checks the first
    /// word of the entry, before the channel. Without `left`, reads it for the head of the queue.
    /// With `is_heard`, does not ask whether the channel has a subscriber.
    pub(super) fn enqueue(
        &mut self,
        holder: &[u8],
        left: Option<i64>,
        is_heard: bool,
        is_start: impl Fn(&[u8]) -> bool,
    ) -> StoreResult<Value> {
        let (nonce, mode, entry, queue) = (self.arg(0), self.arg(5), self.arg(6), self.key(1));
        let position = if mode == b"look" { self.db.lpos(queue, entry)? } else { None };
        let (position, mut state) = match position {
            Some(position) => (position, 0),
            None => (self.db.push(queue, entry, false)?.saturating_sub(1), 1),
        };
        let left = match left {
            Some(left) => left,
            None if position == 0 => self.time_left()?,
            None => NOT_READ,
        };
        let mut parts = entry.splitn(3, |byte| *byte == b' ');
        let channel = parts.next().filter(|start| is_start(start)).and_then(|_| parts.next());
        if !is_heard && self.channels.subscribers(channel.unwrap_or_default()) == 0 {
            state += 2;
        }
        if left != NOT_READ {
            self.db.pexpire(queue, QUEUE_MS)?;
        }
        let numbers = format!("{left} {position} {state}");
        reply_line(&[nonce, b"queued", &self.clock(), numbers.as_bytes(), cut(holder)])
    }

    pub(super) fn header(&self) -> Value {
        Value::BulkString(line(&[self.arg(0), &self.clock()]))
    }
}
