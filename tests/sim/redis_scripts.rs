//! The scripts in `src/backend/redis/lua`, translated to Rust line by line. `differential.rs`
//! compares them with a real server.

use super::store::{Access, Bytes, CommandError, StoreResult};

const TOKEN_EXTRA_MS: u64 = 3_600_000;
const QUEUE_MS: u64 = 60_000;
const TOKEN_MAX: &[u8] = b"9007199254740991";

/// A reply before it is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// A simple string, such as `+OK`.
    Status(String),
    Text(String),
    Bulk(Bytes),
    Int(i64),
    Array(Vec<Reply>),
    Error(String),
}

/// A defect to build into the servers, to show that the simulator detects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// A release deletes the key of any holder.
    ReleaseWithoutOwner,
    /// An acquire takes the lock although it is held.
    AcquireStealsLock,
    /// A request is executed although it has expired.
    ExecutesExpired,
    /// Tokens count from one, and the count is lost with the data.
    TokensLostWithData,
    /// A release forgets the token of the lock.
    FenceNotRaised,
    /// The same token may be issued twice.
    TokensRepeat,
    /// A renewal succeeds although another client holds the lock.
    RenewsAnyHolder,
    /// A renewal reports that the lock is gone, although it is held.
    RenewsNobody,
    /// Keys expire a tenth of their lifetime too early.
    ExpiresEarly,
}

/// One call of a script.
pub(crate) struct Call<'a, 'k> {
    pub(crate) keys: &'a [Bytes],
    pub(crate) args: &'a [Bytes],
    pub(crate) db: Access<'k>,
    /// Publishes a message on a channel; returns the number of subscribers that it was sent to.
    pub(crate) publish: &'a mut dyn FnMut(&[u8], &[u8]) -> usize,
    /// The number of subscribers of a channel.
    pub(crate) subscribers: &'a dyn Fn(&[u8]) -> usize,
    pub(crate) flaw: Option<Flaw>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Acquire,
    Release,
    Renew,
    Inspect,
    Describe,
}

impl Script {
    pub(crate) const ALL: [Script; 5] =
        [Script::Acquire, Script::Release, Script::Renew, Script::Inspect, Script::Describe];

    pub(crate) fn text(self) -> &'static str {
        match self {
            Script::Acquire => concat!(
                include_str!("../../src/backend/redis/lua/shared.lua"),
                include_str!("../../src/backend/redis/lua/token.lua"),
                include_str!("../../src/backend/redis/lua/acquire.lua"),
                include_str!("../../src/backend/redis/lua/queue.lua"),
                include_str!("../../src/backend/redis/lua/acquire_contended.lua"),
                include_str!("../../src/backend/redis/lua/report.lua")
            ),
            Script::Release => concat!(
                include_str!("../../src/backend/redis/lua/shared.lua"),
                include_str!("../../src/backend/redis/lua/release.lua"),
                include_str!("../../src/backend/redis/lua/token.lua"),
                include_str!("../../src/backend/redis/lua/queue.lua"),
                include_str!("../../src/backend/redis/lua/release_contended.lua"),
                include_str!("../../src/backend/redis/lua/report.lua")
            ),
            Script::Renew => include_str!("../../src/backend/redis/lua/renew.lua"),
            Script::Inspect => concat!(
                include_str!("../../src/backend/redis/lua/shared.lua"),
                include_str!("../../src/backend/redis/lua/inspect.lua"),
                include_str!("../../src/backend/redis/lua/report.lua")
            ),
            Script::Describe => include_str!("../../src/backend/redis/lua/describe.lua"),
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn number(bytes: &[u8]) -> Option<f64> {
    text(bytes).trim().parse().ok()
}

fn millis(bytes: &[u8]) -> u64 {
    number(bytes).unwrap_or(0.0) as u64
}

fn digits(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit)
}

fn starts_with_digit(bytes: &[u8]) -> bool {
    bytes.first().is_some_and(u8::is_ascii_digit)
}

/// Whether a value is a token of this library.
fn is_token(bytes: &[u8]) -> bool {
    bytes.len() == 16 && bytes < TOKEN_MAX && digits(bytes)
}

/// The protocol version in the value of the fence; version 1 writes none.
fn version_of(fence: &[u8]) -> Option<Bytes> {
    let rest = fence.strip_prefix(b"v")?;
    let end = rest.iter().position(|byte| *byte == b' ')?;
    digits(&rest[..end]).then(|| rest[..end].to_vec())
}

fn reply_text(text: String) -> StoreResult<Reply> {
    Ok(Reply::Text(text))
}

fn is_wrong_type(error: &CommandError) -> bool {
    error.0.contains("WRONGTYPE")
}

/// Treats a key of the wrong type as missing.
fn unless_wrong_type<T: Default>(outcome: StoreResult<T>) -> StoreResult<T> {
    match outcome {
        Err(error) if is_wrong_type(&error) => Ok(T::default()),
        outcome => outcome,
    }
}

impl Call<'_, '_> {
    pub(crate) fn run(mut self, script: Script) -> (Reply, std::collections::BTreeSet<Bytes>) {
        let outcome = match script {
            Script::Acquire => self.acquire(),
            Script::Release => self.release(),
            Script::Renew => self.renew(),
            Script::Inspect => self.inspect(),
            Script::Describe => self.describe_locks(),
        };
        let reply = outcome.unwrap_or_else(|CommandError(why)| Reply::Error(why));
        (reply, self.db.changed_keys())
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn clock(&self) -> Bytes {
        format!("{:016}", self.db.now_us).into_bytes()
    }

    fn px(&self, px: &[u8]) -> u64 {
        let px = millis(px);
        if self.has(Flaw::ExpiresEarly) { px - px / 10 } else { px }
    }

    fn token_above(&self, last: &[u8], from: &[u8]) -> Bytes {
        if last < from || !is_token(last) {
            return from.to_vec();
        }
        let step = if self.has(Flaw::TokensRepeat) { 0.0 } else { 1.0 };
        format!("{:016.0}", number(last).unwrap_or(0.0) + step).into_bytes()
    }

    fn next_token(&mut self, from: &[u8], px: u64) -> StoreResult<Bytes> {
        let [key, fence] = [2, 3].map(|at| self.keys[at].clone());
        if self.has(Flaw::TokensLostWithData) {
            let last = self.db.get(&fence)?.and_then(|last| number(&last)).unwrap_or(0.0);
            let token = format!("{:.0}", last + 1.0).into_bytes();
            self.db.set(&fence, &token, px)?;
            self.db.set(&key, &token, px)?;
            return Ok(token);
        }
        let mut from = from.to_vec();
        if let Some(fence) = self.db.get(&fence)?.filter(|fence| *fence >= from) {
            if version_of(&fence).is_some_and(|version| self.args.last() != Some(&version)) {
                return Err(CommandError("ERR another version of the protocol".into()));
            }
            from = self.token_above(&fence, &from);
        }
        let last = self.db.set_get(&key, &from, px)?;
        let Some(last) = last.filter(|last| *last >= from) else { return Ok(from) };
        let token = self.token_above(&last, &from);
        if token != from {
            self.db.set(&key, &token, px)?;
        }
        Ok(token)
    }

    /// Deletes a lock that nobody waits for, and its token, which raises the fence.
    fn free_lock(&mut self) -> StoreResult<()> {
        let [lock, key, fence] = [0, 2, 3].map(|at| self.keys[at].clone());
        let Ok(Some(token)) = self.db.get(&key) else { return self.db.del(&[&lock]) };
        if is_token(&token) && !self.has(Flaw::FenceNotRaised) {
            let Ok(last) = self.db.set_get_forever(&fence, &token) else {
                return self.db.del(&[&lock]);
            };
            if let Some(last) = last.filter(|last| *last >= token) {
                let is_newer = last.strip_prefix(b"v").is_some_and(starts_with_digit);
                if is_newer || is_token(&last) {
                    self.db.set_forever(&fence, &last)?;
                }
                if is_newer {
                    return self.db.del(&[&lock]);
                }
            }
        }
        self.db.del(&[&lock, &key])
    }

    fn grant_next(&mut self) -> StoreResult<Option<Bytes>> {
        let (lock, queue) = (self.keys[0].clone(), self.keys[1].clone());
        let now = self.clock();
        while let Some(waiter) = unless_wrong_type(self.db.lpop(&queue))? {
            let mut parts = waiter.splitn(3, |byte| *byte == b' ');
            if let (Some(px), Some(channel), Some(id)) = (parts.next(), parts.next(), parts.next())
                && digits(px)
                && px[0] != b'0'
                && px.len() < 16
                && !channel.is_empty()
                && !id.is_empty()
            {
                let Ok(token) = self.next_token(&now, millis(px) + TOKEN_EXTRA_MS) else {
                    self.db.push(&queue, &waiter, true)?;
                    return Ok(None);
                };
                let payload = [&token[..], b" ", &now, b" ", px, b" ", id].concat();
                let receivers = (self.publish)(channel, &payload);
                if receivers > 0 {
                    let px = self.px(px);
                    self.db.set(&lock, id, px)?;
                    return Ok(Some(id.to_vec()));
                }
            }
        }
        Ok(None)
    }

    fn describe(&mut self, holder: &[u8], left: Option<i64>) -> StoreResult<String> {
        let [lock, queue, token] = [0, 1, 2].map(|at| self.keys[at].clone());
        let token = unless_wrong_type(self.db.get(&token))?.filter(|token| digits(token));
        let token = token.map_or("0".into(), |token| text(&token));
        let waiters = unless_wrong_type(self.db.llen(&queue))?;
        let left = left.unwrap_or_else(|| self.db.pttl(&lock));
        Ok(format!("{left} {token} {waiters} {}", text(&holder[..holder.len().min(512)])))
    }

    fn acquire(&mut self) -> StoreResult<Reply> {
        let [nonce, id, ttl, mode, entry, not_after, heal, token_min, token_ttl] =
            [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|at| self.args[at].clone());
        let [lock, queue, token_key] = [0, 1, 2].map(|at| self.keys[at].clone());
        let token_px = millis(&token_ttl);
        let (nonce, now) = (text(&nonce), self.clock());
        let (mode, px) = (text(&mode), self.px(&ttl));
        let now_text = text(&now);
        if now > not_after && !self.has(Flaw::ExecutesExpired) {
            return reply_text(format!("{nonce} late {now_text}"));
        }
        let token_from = if now > token_min { now.clone() } else { token_min.clone() };
        let holder = match self.db.get(&lock) {
            Err(error) if is_wrong_type(&error) => {
                if mode == "leave" {
                    self.db.lrem(&queue, &entry)?;
                }
                return reply_text(format!("{nonce} type {now_text}"));
            }
            other => other?,
        };
        let holder = holder.filter(|_| !self.has(Flaw::AcquireStealsLock));
        let holder = match holder {
            Some(holder) => holder,
            None => {
                let granted = if self.db.llen(&queue)? > 0 { self.grant_next()? } else { None };
                match granted {
                    Some(holder) => holder,
                    None => {
                        if mode == "look" || mode == "leave" {
                            self.db.lrem(&queue, &entry)?;
                        }
                        let token = self.next_token(&token_from, token_px)?;
                        self.db.set(&lock, &id, px)?;
                        return reply_text(format!("{nonce} held {now_text} {}", text(&token)));
                    }
                }
            }
        };
        if holder == id {
            let token = self.db.get(&token_key)?;
            if self.db.pttl(&lock) < px as i64 {
                self.db.pexpire(&lock, px)?;
                self.db.pexpire(&token_key, token_px)?;
            }
            let token = match token.filter(|token| is_token(token)) {
                None => self.next_token(&token_from, token_px)?,
                Some(token) if token < token_min => {
                    self.db.set(&token_key, &token_min, token_px)?;
                    token_min
                }
                Some(token) => token,
            };
            return reply_text(format!("{nonce} held {now_text} {}", text(&token)));
        }
        let mut left = self.db.pttl(&lock);
        if left == -1 && heal != b"0" {
            let px = self.px(&heal);
            self.db.pexpire(&lock, px)?;
            left = millis(&heal) as i64;
        }
        if mode == "join" || mode == "look" {
            let position = if mode == "look" { self.db.lpos(&queue, &entry)? } else { None };
            let (position, state) = match position {
                Some(position) => (position, 0),
                None => (self.db.push(&queue, &entry, false)? - 1, 1),
            };
            let mut parts = entry.splitn(3, |byte| *byte == b' ');
            let channel =
                parts.next().filter(|px| digits(px)).and_then(|_| parts.next()).unwrap_or_default();
            let state = if (self.subscribers)(channel) == 0 { state + 2 } else { state };
            self.db.pexpire(&queue, QUEUE_MS)?;
            let holder = text(&holder[..holder.len().min(512)]);
            return reply_text(format!(
                "{nonce} queued {now_text} {left} {position} {state} {holder}"
            ));
        }
        if mode == "leave" {
            self.db.lrem(&queue, &entry)?;
        }
        let description = self.describe(&holder, Some(left))?;
        reply_text(format!("{nonce} busy {now_text} {description}"))
    }

    fn release(&mut self) -> StoreResult<Reply> {
        let [nonce, id, entry, not_after] = [0, 1, 2, 3].map(|at| self.args[at].clone());
        let [lock, queue] = [0, 1].map(|at| self.keys[at].clone());
        let (nonce, now) = (text(&nonce), self.clock());
        if !not_after.is_empty() && now > not_after && !self.has(Flaw::ExecutesExpired) {
            return reply_text(format!("{nonce} late {}", text(&now)));
        }
        if !entry.is_empty() {
            unless_wrong_type(self.db.lrem(&queue, &entry))?;
        }
        let holder = match self.db.get(&lock) {
            Err(error) if is_wrong_type(&error) => return reply_text(format!("{nonce} type")),
            other => other?,
        };
        let Some(holder) = holder else {
            if self.grant_next()?.is_none() {
                self.free_lock()?;
            }
            return reply_text(format!("{nonce} gone"));
        };
        if holder == id
            || holder[..holder.len().min(512)] == id
            || self.has(Flaw::ReleaseWithoutOwner)
        {
            if self.grant_next()?.is_none() {
                self.free_lock()?;
            }
            return reply_text(format!("{nonce} released"));
        }
        let description = self.describe(&holder, None)?;
        reply_text(format!("{nonce} other {} {description}", text(&now)))
    }

    fn header(&self) -> Reply {
        Reply::Text(format!("{} {}", text(&self.args[0]), text(&self.clock())))
    }

    fn renew(&mut self) -> StoreResult<Reply> {
        let mut reply = vec![self.header()];
        let (locks, tokens) = self.keys.split_at(self.args.len() - 2 - self.keys.len());
        let token_ttls = &self.args[2 * locks.len() + 1..];
        for (at, key) in locks.iter().enumerate() {
            let (id, ttl) = (&self.args[2 * at + 1], &self.args[2 * at + 2]);
            let px = self.px(ttl);
            reply.push(match self.db.get(key) {
                Err(error) if is_wrong_type(&error) => Reply::Int(-1),
                Err(error) => return Err(error),
                Ok(None) => Reply::Int(0),
                Ok(Some(_)) if self.has(Flaw::RenewsAnyHolder) => Reply::Int(1),
                Ok(Some(_)) if self.has(Flaw::RenewsNobody) => Reply::Int(0),
                Ok(Some(holder)) if holder == *id => Reply::Int(self.db.pexpire(key, px)?.into()),
                Ok(Some(holder)) => Reply::Bulk(holder[..holder.len().min(512)].to_vec()),
            });
        }
        for (key, ttl) in tokens.iter().zip(token_ttls) {
            if let Ok(Some(_)) = self.db.get(key) {
                self.db.pexpire(key, millis(ttl))?;
            }
        }
        Ok(Reply::Array(reply))
    }

    fn inspect(&mut self) -> StoreResult<Reply> {
        let (nonce, lock) = (text(&self.args[0]), self.keys[0].clone());
        match self.db.get(&lock) {
            Err(error) if is_wrong_type(&error) => reply_text(format!("{nonce} type")),
            Err(error) => Err(error),
            Ok(None) => reply_text(format!("{nonce} free")),
            Ok(Some(holder)) => {
                let description = self.describe(&holder, None)?;
                reply_text(format!("{nonce} busy {} {description}", text(&self.clock())))
            }
        }
    }

    fn describe_locks(&mut self) -> StoreResult<Reply> {
        let mut reply = vec![self.header()];
        let (each, mut left) = (millis(&self.args[1]) as usize, millis(&self.args[2]) as usize);
        for keys in self.keys.chunks_exact(3) {
            let holder = match self.db.get(&keys[0]) {
                Err(_) => {
                    reply.push(Reply::Int(-1));
                    continue;
                }
                Ok(None) => {
                    reply.push(Reply::Int(0));
                    continue;
                }
                Ok(Some(holder)) => holder,
            };
            let waiters = self.db.llen(&keys[1]).unwrap_or(0);
            let token = self.db.get(&keys[2]).ok().flatten().filter(|token| digits(token));
            let token = token.map_or("0".into(), |token| text(&token));
            let holder = text(&holder[..holder.len().min(512)]);
            let mut description =
                vec![Reply::Text(format!("{} {token} {waiters} {holder}", self.db.pttl(&keys[0])))];
            let count = waiters.min(each).min(left);
            left -= count;
            let entries = if count > 0 { self.db.lrange(&keys[1], count)? } else { Vec::new() };
            for entry in entries {
                description.push(Reply::Bulk(entry[..entry.len().min(1024)].to_vec()));
            }
            reply.push(Reply::Array(description));
        }
        Ok(Reply::Array(reply))
    }
}

impl Reply {
    pub(crate) fn encode(&self, out: &mut Bytes) {
        match self {
            Reply::Status(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
            Reply::Text(text) => bulk(out, text.as_bytes()),
            Reply::Bulk(bytes) => bulk(out, bytes),
            Reply::Int(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
            Reply::Array(items) => {
                out.extend_from_slice(format!("*{}\r\n", items.len()).as_bytes());
                items.iter().for_each(|item| item.encode(out));
            }
            Reply::Error(why) => out.extend_from_slice(format!("-{why}\r\n").as_bytes()),
        }
    }
}

fn bulk(out: &mut Bytes, bytes: &[u8]) {
    out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}
