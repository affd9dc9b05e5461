//! What the scripts in `src/node/lua` do, once more in Rust, line by line; held to them by `differential.rs`.

use super::store::{Access, Bytes, Outcome, Refused};

const FENCE_MS: u64 = 86_400_000;
const QUEUE_MS: u64 = 60_000;

/// An answer before it is written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// As `+OK` is.
    Status(String),
    Line(String),
    Bulk(Bytes),
    Int(i64),
    Nil,
    Array(Vec<Reply>),
    Error(String),
}

/// A rule that a server is to break, to see whether it is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Release deletes whoever's key it is.
    ReleaseWithoutOwner,
    /// Acquire takes the lock from whoever has it.
    AcquireTaken,
    /// A request that comes too late is carried out.
    LateIsCarriedOut,
    /// Tokens are a counter that is lost with the data.
    TokensFromOne,
    /// A token may be the same once more.
    TokensRepeat,
    /// A renewal answers yes whoever has the lock.
    RenewsAnybody,
    /// A renewal finds nobody.
    RenewsNobody,
    /// Keys live for nine tenths of their time.
    ExpiresEarly,
}

/// One call of a script.
pub(crate) struct Call<'a, 'k> {
    pub(crate) keys: &'a [Bytes],
    pub(crate) args: &'a [Bytes],
    pub(crate) on: Access<'k>,
    /// Tells a channel; how many heard it.
    pub(crate) publish: &'a mut dyn FnMut(&[u8], &[u8]) -> usize,
    /// How many listen on a channel.
    pub(crate) listeners: &'a dyn Fn(&[u8]) -> usize,
    pub(crate) flaw: Option<Flaw>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Acquire,
    Release,
    Renew,
    Inspect,
    Survey,
}

impl Script {
    pub(crate) const ALL: [Script; 5] =
        [Script::Acquire, Script::Release, Script::Renew, Script::Inspect, Script::Survey];

    pub(crate) fn text(self) -> &'static str {
        match self {
            Script::Acquire => {
                concat!(include_str!("../../src/node/lua/shared.lua"), include_str!("../../src/node/lua/acquire.lua"))
            }
            Script::Release => {
                concat!(include_str!("../../src/node/lua/shared.lua"), include_str!("../../src/node/lua/release.lua"))
            }
            Script::Renew => include_str!("../../src/node/lua/renew.lua"),
            Script::Inspect => {
                concat!(include_str!("../../src/node/lua/shared.lua"), include_str!("../../src/node/lua/inspect.lua"))
            }
            Script::Survey => include_str!("../../src/node/lua/describe.lua"),
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

fn line(text: String) -> Outcome<Reply> {
    Ok(Reply::Line(text))
}

fn is_wrong_type(refused: &Refused) -> bool {
    refused.0.contains("WRONGTYPE")
}

/// Nothing, where there is something else than a line.
fn unless_wrong_type<T: Default>(outcome: Outcome<T>) -> Outcome<T> {
    match outcome {
        Err(refused) if is_wrong_type(&refused) => Ok(T::default()),
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
            Script::Survey => self.survey(),
        };
        let reply = outcome.unwrap_or_else(|Refused(why)| Reply::Error(why));
        (reply, self.on.touched())
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn clock(&self) -> Bytes {
        format!("{:016}", self.on.now_us).into_bytes()
    }

    fn px(&self, px: &[u8]) -> u64 {
        let px = millis(px);
        if self.is(Flaw::ExpiresEarly) { px - px / 10 } else { px }
    }

    fn next_token(&mut self, now: &[u8]) -> Outcome<Bytes> {
        let fence = self.keys[2].clone();
        if self.is(Flaw::TokensFromOne) {
            let last = self.on.get(&fence)?.and_then(|last| number(&last)).unwrap_or(0.0);
            let token = format!("{:.0}", last + 1.0).into_bytes();
            self.on.set(&fence, &token, FENCE_MS)?;
            return Ok(token);
        }
        let last = self.on.set_get(&fence, now, FENCE_MS)?;
        let Some(last) = last else { return Ok(now.to_vec()) };
        if last.len() == 16 && last.as_slice() < now {
            return Ok(now.to_vec());
        }
        let Some(last) = number(&last) else { return Ok(now.to_vec()) };
        if last < number(now).unwrap_or(0.0) {
            return Ok(now.to_vec());
        }
        let step = if self.is(Flaw::TokensRepeat) { 0.0 } else { 1.0 };
        let token = format!("{:.0}", last + step).into_bytes();
        self.on.set(&fence, &token, FENCE_MS)?;
        Ok(token)
    }

    fn grant_next(&mut self) -> Outcome<Option<Bytes>> {
        let (lock, queue) = (self.keys[0].clone(), self.keys[1].clone());
        let now = self.clock();
        while let Some(waiter) = unless_wrong_type(self.on.lpop(&queue))? {
            let mut parts = waiter.splitn(3, |byte| *byte == b' ');
            if let (Some(px), Some(channel), Some(id)) = (parts.next(), parts.next(), parts.next())
                && digits(px)
                && px[0] != b'0'
                && px.len() < 16
                && !channel.is_empty()
                && !id.is_empty()
            {
                let Ok(token) = self.next_token(&now) else {
                    self.on.push(&queue, &waiter, true)?;
                    return Ok(None);
                };
                let payload = [&token[..], b" ", &now, b" ", px, b" ", id].concat();
                let heard = (self.publish)(channel, &payload);
                if heard > 0 {
                    let px = self.px(px);
                    self.on.set(&lock, id, px)?;
                    return Ok(Some(id.to_vec()));
                }
            }
        }
        Ok(None)
    }

    fn describe(&mut self, holder: &[u8], left: Option<i64>) -> Outcome<String> {
        let [lock, queue, fence] = [0, 1, 2].map(|at| self.keys[at].clone());
        let token = unless_wrong_type(self.on.get(&fence))?.filter(|token| digits(token));
        let token = token.map_or("0".into(), |token| text(&token));
        let waiters = unless_wrong_type(self.on.llen(&queue))?;
        let left = left.unwrap_or_else(|| self.on.pttl(&lock));
        Ok(format!("{left} {token} {waiters} {}", text(&holder[..holder.len().min(512)])))
    }

    fn acquire(&mut self) -> Outcome<Reply> {
        let [nonce, id, ttl, mode, entry, not_after, heal, token_min] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|at| self.args[at].clone());
        let [lock, queue, fence] = [0, 1, 2].map(|at| self.keys[at].clone());
        let (nonce, now) = (text(&nonce), self.clock());
        let (mode, px) = (text(&mode), self.px(&ttl));
        let now_text = text(&now);
        if now > not_after && !self.is(Flaw::LateIsCarriedOut) {
            return line(format!("{nonce} late {now_text}"));
        }
        let token_from = if now > token_min { now.clone() } else { token_min.clone() };
        let holder = match self.on.get(&lock) {
            Err(refused) if is_wrong_type(&refused) => {
                if mode == "leave" {
                    self.on.lrem(&queue, &entry)?;
                }
                return line(format!("{nonce} type {now_text}"));
            }
            other => other?,
        };
        let holder = holder.filter(|_| !self.is(Flaw::AcquireTaken));
        let holder = match holder {
            Some(holder) => holder,
            None => {
                let granted = if self.on.llen(&queue)? > 0 { self.grant_next()? } else { None };
                match granted {
                    Some(holder) => holder,
                    None => {
                        if mode == "look" || mode == "leave" {
                            self.on.lrem(&queue, &entry)?;
                        }
                        let token = self.next_token(&token_from)?;
                        self.on.set(&lock, &id, px)?;
                        return line(format!("{nonce} held {now_text} {}", text(&token)));
                    }
                }
            }
        };
        if holder == id {
            if self.on.pttl(&lock) < px as i64 {
                self.on.pexpire(&lock, px)?;
            }
            let token = self.on.get(&fence)?.filter(|token| digits(token));
            let token = match token {
                None => self.next_token(&token_from)?,
                Some(token) if number(&token) < number(&token_min) => self.next_token(&token_min)?,
                Some(token) => token,
            };
            return line(format!("{nonce} held {now_text} {}", text(&token)));
        }
        let mut left = self.on.pttl(&lock);
        if left == -1 && heal != b"0" {
            let px = self.px(&heal);
            self.on.pexpire(&lock, px)?;
            left = millis(&heal) as i64;
        }
        if mode == "join" || mode == "look" {
            let place = if mode == "look" { self.on.lpos(&queue, &entry)? } else { None };
            let (place, state) = match place {
                Some(place) => (place, 0),
                None => (self.on.push(&queue, &entry, false)? - 1, 1),
            };
            let mut parts = entry.splitn(3, |byte| *byte == b' ');
            let channel = parts.next().filter(|px| digits(px)).and_then(|_| parts.next()).unwrap_or_default();
            let state = if (self.listeners)(channel) == 0 { state + 2 } else { state };
            self.on.pexpire(&queue, QUEUE_MS)?;
            let holder = text(&holder[..holder.len().min(512)]);
            return line(format!("{nonce} queued {now_text} {left} {place} {state} {holder}"));
        }
        if mode == "leave" {
            self.on.lrem(&queue, &entry)?;
        }
        let said = self.describe(&holder, Some(left))?;
        line(format!("{nonce} busy {now_text} {said}"))
    }

    fn release(&mut self) -> Outcome<Reply> {
        let [nonce, id, entry, not_after] = [0, 1, 2, 3].map(|at| self.args[at].clone());
        let [lock, queue] = [0, 1].map(|at| self.keys[at].clone());
        let (nonce, now) = (text(&nonce), self.clock());
        if !not_after.is_empty() && now > not_after && !self.is(Flaw::LateIsCarriedOut) {
            return line(format!("{nonce} late {}", text(&now)));
        }
        if !entry.is_empty() {
            unless_wrong_type(self.on.lrem(&queue, &entry))?;
        }
        let holder = match self.on.get(&lock) {
            Err(refused) if is_wrong_type(&refused) => return line(format!("{nonce} type")),
            other => other?,
        };
        let Some(holder) = holder else {
            self.grant_next()?;
            return line(format!("{nonce} gone"));
        };
        if holder == id || holder[..holder.len().min(512)] == id || self.is(Flaw::ReleaseWithoutOwner) {
            if self.grant_next()?.is_none() {
                self.on.del(&lock)?;
            }
            return line(format!("{nonce} released"));
        }
        let said = self.describe(&holder, None)?;
        line(format!("{nonce} other {} {said}", text(&now)))
    }

    fn head(&self) -> Reply {
        Reply::Line(format!("{} {}", text(&self.args[0]), text(&self.clock())))
    }

    fn renew(&mut self) -> Outcome<Reply> {
        let mut reply = vec![self.head()];
        let (locks, fences) = self.keys.split_at((self.args.len() - 1) / 2);
        for (at, key) in locks.iter().enumerate() {
            let (id, ttl) = (&self.args[2 * at + 1], &self.args[2 * at + 2]);
            let px = self.px(ttl);
            reply.push(match self.on.get(key) {
                Err(refused) if is_wrong_type(&refused) => Reply::Int(-1),
                Err(refused) => return Err(refused),
                Ok(None) => Reply::Int(0),
                Ok(Some(_)) if self.is(Flaw::RenewsAnybody) => Reply::Int(1),
                Ok(Some(_)) if self.is(Flaw::RenewsNobody) => Reply::Int(0),
                Ok(Some(holder)) if holder == *id => Reply::Int(self.on.pexpire(key, px)?.into()),
                Ok(Some(holder)) => Reply::Bulk(holder[..holder.len().min(512)].to_vec()),
            });
        }
        for fence in fences {
            if let Ok(Some(_)) = self.on.get(fence) {
                self.on.pexpire(fence, FENCE_MS)?;
            }
        }
        Ok(Reply::Array(reply))
    }

    fn inspect(&mut self) -> Outcome<Reply> {
        let (nonce, lock) = (text(&self.args[0]), self.keys[0].clone());
        match self.on.get(&lock) {
            Err(refused) if is_wrong_type(&refused) => line(format!("{nonce} type")),
            Err(refused) => Err(refused),
            Ok(None) => line(format!("{nonce} free")),
            Ok(Some(holder)) => {
                let said = self.describe(&holder, None)?;
                line(format!("{nonce} busy {} {said}", text(&self.clock())))
            }
        }
    }

    fn survey(&mut self) -> Outcome<Reply> {
        let mut reply = vec![self.head()];
        let (each, mut left) = (millis(&self.args[1]) as usize, millis(&self.args[2]) as usize);
        for keys in self.keys.chunks_exact(3) {
            let holder = match self.on.get(&keys[0]) {
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
            let waiters = self.on.llen(&keys[1]).unwrap_or(0);
            let token = self.on.get(&keys[2]).ok().flatten().filter(|token| digits(token));
            let token = token.map_or("0".into(), |token| text(&token));
            let holder = text(&holder[..holder.len().min(512)]);
            let mut answer = vec![Reply::Line(format!("{} {token} {waiters} {holder}", self.on.pttl(&keys[0])))];
            let told = waiters.min(each).min(left);
            left -= told;
            let entries = if told > 0 { self.on.lrange(&keys[1], told)? } else { Vec::new() };
            for entry in entries {
                answer.push(Reply::Bulk(entry[..entry.len().min(1024)].to_vec()));
            }
            reply.push(Reply::Array(answer));
        }
        Ok(Reply::Array(reply))
    }
}

impl Reply {
    pub(crate) fn encode(&self, out: &mut Bytes) {
        match self {
            Reply::Status(text) => out.extend_from_slice(format!("+{text}\r\n").as_bytes()),
            Reply::Line(text) => bulk(out, text.as_bytes()),
            Reply::Bulk(bytes) => bulk(out, bytes),
            Reply::Nil => out.extend_from_slice(b"$-1\r\n"),
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
