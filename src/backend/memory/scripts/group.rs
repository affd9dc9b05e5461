//! The scripts in `src/backend/redis/lua/group` for one lock, translated to Rust line by line.

use redis::Value;

use super::{
    super::store::{Bytes, StoreResult},
    call::{
        Call, QUEUE_MS, RESERVED, TOKEN_EXTRA_MS, count, cut, is_token, is_wrong_type, line,
        number, reply_line, unless_wrong_type,
    },
    queue_entry::Entry,
};
use crate::core::kind::is_group;

const DEAD_MAX: usize = 1000;
const GRANTS_MAX: usize = 100;
const MEMBERS_ADDED_MAX: usize = 1000;

/// One call of a script that knows groups.
pub(super) struct GroupCall<'a> {
    call: Call<'a>,
    holder: Option<Bytes>,
    /// `None` until counted; `Some(None)` if the members were lost.
    size: Option<Option<usize>>,
    added: Vec<(Bytes, u64)>,
    latest: u64,
    is_new: bool,
}

/// The member of a claim with this number.
pub(super) fn member(id: &[u8], at: usize) -> Bytes {
    if at == 1 { id.to_vec() } else { [id, format!("#{at}").as_bytes()].concat() }
}

impl<'a> GroupCall<'a> {
    pub(super) fn new(call: Call<'a>) -> GroupCall<'a> {
        let added = Vec::new();
        GroupCall { call, holder: None, size: None, added, latest: 0, is_new: false }
    }

    fn now_ms(&self) -> u64 {
        self.call.db.now_us / 1000
    }

    fn is_held_by_group(&self) -> bool {
        self.holder.as_deref().is_some_and(is_group)
    }

    fn members(&self) -> &'a [u8] {
        self.call.key(4)
    }

    fn fits(&mut self, group: Option<&[u8]>, limit: usize, count: usize) -> StoreResult<bool> {
        let Some(holder) = &self.holder else { return Ok(true) };
        if Some(holder.as_slice()) != group {
            return Ok(false);
        }
        let size = match self.size {
            Some(size) => size,
            None => {
                let (key, now) = (self.members(), self.now_ms());
                let alive = unless_wrong_type(self.call.db.zcount_above(key, now))?;
                (alive > 0).then_some(alive)
            }
        };
        self.size = Some(size);
        Ok(size.is_some_and(|size| limit == 0 || size + count <= limit))
    }

    fn is_member(&mut self, id: &[u8]) -> StoreResult<bool> {
        let (members, now) = (self.members(), self.now_ms());
        let expires = unless_wrong_type(self.call.db.zscore(members, id))?;
        Ok(expires.is_some_and(|expires| expires > now))
    }

    /// Whether the waiter of an entry is dead, or is a member by now.
    fn is_useless(&mut self, entry: &Entry<'_>) -> StoreResult<bool> {
        let may_be_member =
            entry.group.is_some() && self.holder.as_deref() == entry.group && !self.is_new;
        Ok(may_be_member && self.is_member(entry.id)?
            || self.call.channels.subscribers(entry.channel) == 0)
    }

    fn add_member(&mut self, group: &[u8], id: &[u8], count: usize, px: u64) {
        let expires = self.now_ms() + 1 + px;
        if self.holder.is_none() {
            (self.holder, self.is_new, self.size) = (Some(group.to_vec()), true, Some(Some(0)));
        }
        self.added.extend((1..=count).map(|at| (member(id, at), expires)));
        self.latest = self.latest.max(expires);
        if let Some(Some(size)) = &mut self.size {
            *size += count;
        }
    }

    fn set_expiry(&mut self, last: u64) -> StoreResult<()> {
        let (lock, members) = (self.call.key(0), self.members());
        self.call.db.pexpire_at(lock, last)?;
        self.call.db.pexpire_at(members, last)
    }

    fn write_members(&mut self) -> StoreResult<()> {
        let (added, latest) = (std::mem::take(&mut self.added), std::mem::take(&mut self.latest));
        if added.is_empty() {
            return Ok(());
        }
        let (lock, members, now) = (self.call.key(0), self.members(), self.now_ms());
        if std::mem::take(&mut self.is_new) {
            self.call.db.del(&[members])?;
            let group = self.holder.clone().unwrap_or_default();
            self.call.db.set_until(lock, &group, latest)?;
        } else {
            self.call.db.zremrangebyscore(members, now)?;
        }
        self.call.db.zadd_gt(members, added)?;
        match self.call.db.zlast(members)? {
            Some((_, last)) if last <= latest => self.set_expiry(last),
            _ => Ok(()),
        }
    }

    fn reported_holder(&mut self) -> StoreResult<Bytes> {
        let holder = self.holder.clone().unwrap_or_default();
        if !is_group(&holder) {
            return Ok(holder);
        }
        let (key, now) = (self.members(), self.now_ms());
        let alive = unless_wrong_type(self.call.db.zcount_above(key, now))?.to_string();
        let last = unless_wrong_type(self.call.db.zlast(key))?.map_or(Bytes::new(), |(id, _)| id);
        Ok(line(&[&holder, alive.as_bytes(), &last]))
    }

    /// Returns the caller's token, and whether there may be more to grant.
    fn grant_next(
        &mut self,
        own: &[u8],
        own_px: u64,
        own_from: &[u8],
    ) -> StoreResult<(Option<Bytes>, bool)> {
        let (lock, queue, now) = (self.call.key(0), self.call.key(1), self.call.clock());
        let (mut own_token, mut more, mut granted) = (None, false, 0);
        for _ in 0..DEAD_MAX {
            let Some(head) = unless_wrong_type(self.call.db.lrange(queue, 1))?.pop() else { break };
            let is_own = !own.is_empty() && head == own;
            let entry = match Entry::parse(&head) {
                Some(entry) if !is_own && self.is_useless(&entry)? => None,
                entry => entry,
            };
            let Some(Entry { px, channel, id, group, limit, count }) = entry else {
                self.call.db.lpop(queue)?;
                continue;
            };
            if !self.fits(group, limit, count)? {
                break;
            }
            more = granted == GRANTS_MAX || self.added.len() >= MEMBERS_ADDED_MAX;
            if more {
                break;
            }
            let (px, from) = if is_own { (own_px, own_from) } else { (px, now.as_slice()) };
            self.call.db.lpop(queue)?;
            let Ok(token) = self.call.next_token(from, px.saturating_add(TOKEN_EXTRA_MS)) else {
                if self.call.db.push(queue, &head, true)? == 1 {
                    self.call.db.pexpire(queue, QUEUE_MS)?;
                }
                break;
            };
            let receivers = if is_own {
                own_token = Some(token);
                1
            } else {
                let px = px.to_string();
                self.call.channels.publish(channel, &line(&[&token, &now, px.as_bytes(), id]))
            };
            if receivers == 0 {
                continue;
            }
            granted += 1;
            match group {
                Some(group) => self.add_member(group, id, count, px),
                None => {
                    self.call.db.set(lock, id, Some(px))?;
                    self.holder = Some(id.to_vec());
                    break;
                }
            }
        }
        self.write_members()?;
        Ok((own_token, more))
    }

    fn held(&self, token: &[u8]) -> StoreResult<Value> {
        reply_line(&[self.call.arg(0), b"held", &self.call.clock(), token])
    }

    /// The token of a claim that has the lock already.
    fn token_again(&mut self, token_min: &[u8], from: &[u8], px: u64) -> StoreResult<Bytes> {
        let key = self.call.key(2);
        match self.call.db.get(key)?.filter(|token| is_token(token)) {
            None => self.call.next_token(from, px),
            Some(token) if *token < *token_min => {
                self.call.db.set(key, token_min, Some(px))?;
                Ok(token_min.to_vec())
            }
            Some(token) => Ok(token),
        }
    }

    pub(super) fn acquire(mut self) -> StoreResult<Value> {
        let call = &self.call;
        let (nonce, id, ttl, mode, entry) =
            (call.arg(0), call.arg(1), number(call.arg(2)), call.arg(5), call.arg(6));
        let (not_after, repair) = (call.arg(3), number(call.arg(4)));
        let group = Some(call.arg(7)).filter(|group| !group.is_empty());
        let (limit, needed) = (count(call.arg(8)), count(call.arg(9)));
        let (token_min, is_token_decided) = (call.arg(10), call.arg(11) == b"1");
        let (lock, queue, members) = (call.key(0), call.key(1), self.members());
        let (now, now_ms, token_ttl) = (call.clock(), self.now_ms(), ttl + TOKEN_EXTRA_MS);
        let from = token_min.max(&now).to_vec();
        let is_queued = mode == b"look" || mode == b"leave";
        if *now > *not_after {
            return reply_line(&[nonce, b"late", &now]);
        }
        let holder = self.call.db.get(lock);
        if is_wrong_type(&holder) {
            if mode == b"leave" {
                self.call.db.lrem(queue, entry)?;
            }
            return reply_line(&[nonce, b"type", &now]);
        }
        self.holder = holder?;
        if self.holder.is_none() {
            self.call.used = RESERVED;
        }
        if let Some(group) = group.filter(|group| self.holder.as_deref() == Some(*group))
            && let Some(expires) = unless_wrong_type(self.call.db.zscore(members, id))?
            && expires > now_ms
        {
            unless_wrong_type(self.call.db.lrem(queue, entry))?;
            let token = if number(token_min) == 0 {
                self.call.next_token(&now, token_ttl)?
            } else {
                let token = self.token_again(token_min, &from, token_ttl)?;
                if is_token_decided { token_min.to_vec() } else { token }
            };
            if expires < now_ms + ttl {
                self.add_member(group, id, needed, ttl);
                self.write_members()?;
            }
            self.grant_next(b"", 0, b"")?;
            return self.held(&token);
        }
        if let Some(group) = group.filter(|_| self.holder.as_deref() == Some(id)) {
            self.call.db.pexpire(lock, ttl)?;
            let token = self.token_again(token_min, &from, token_ttl)?;
            self.holder = None;
            self.add_member(group, id, needed, ttl);
            self.write_members()?;
            self.grant_next(b"", 0, b"")?;
            return self.held(&token);
        }
        if mode == b"downgrade" && (self.holder.is_none() || self.is_held_by_group()) {
            return reply_line(&[nonce, b"type", &now]);
        }
        let mut waiting = self.call.db.llen(queue)?;
        if waiting > 0 && (self.holder.is_none() || self.is_held_by_group()) {
            let own = if is_queued { entry } else { b"" };
            if let (Some(token), _) = self.grant_next(own, ttl, &from)? {
                return self.held(&token);
            }
            waiting = self.call.db.llen(queue)?;
        }
        if (waiting == 0 || self.holder.is_none()) && self.fits(group, limit, needed)? {
            if is_queued {
                self.call.db.lrem(queue, entry)?;
            }
            let token = self.call.next_token(&from, token_ttl)?;
            match group {
                Some(group) => {
                    self.add_member(group, id, needed, ttl);
                    self.write_members()?;
                }
                None => self.call.db.set(lock, id, Some(ttl))?,
            }
            return self.held(&token);
        }
        if self.holder.as_deref() == Some(id) {
            if !u64::try_from(self.call.db.pttl(lock)).is_ok_and(|left| left >= ttl) {
                self.call.db.pexpire(lock, ttl)?;
                self.call.db.pexpire(self.call.key(2), token_ttl)?;
            }
            let token = self.token_again(token_min, &from, token_ttl)?;
            return self.held(&token);
        }
        let time_left = |at: u64| i64::try_from(at.saturating_sub(now_ms)).unwrap_or(i64::MAX);
        let mut left = self.call.db.pttl(lock);
        if left == -1 && repair != 0 {
            let last = if self.is_held_by_group() {
                unless_wrong_type(self.call.db.zlast(members))?.map(|(_, last)| last)
            } else {
                None
            };
            let repaired = repair.max(last.map_or(0, |last| last.saturating_sub(now_ms)));
            self.call.db.pexpire(lock, repaired)?;
            left = i64::try_from(repaired).unwrap_or(i64::MAX);
        }
        if group.is_some() && self.holder.as_deref() == group && limit > 0 {
            let alive = unless_wrong_type(self.call.db.zrange_above(members, now_ms, 1))?;
            left = alive.first().map_or(left, |(_, expires)| time_left(*expires));
        }
        if mode == b"join" || mode == b"look" {
            let reported = self.reported_holder()?;
            return self.call.enqueue(&reported, Some(left), false, |start| !start.is_empty());
        }
        if mode == b"leave" && self.call.db.lrem(queue, entry)? > 0 && self.is_held_by_group() {
            self.grant_next(b"", 0, b"")?;
        }
        let reported = self.reported_holder()?;
        let description = self.call.describe(0, &reported, Some(left))?;
        reply_line(&[nonce, b"busy", &now, &description])
    }

    fn remove_members(&mut self, id: &[u8], count: usize) -> StoreResult<bool> {
        let (key, now) = (self.members(), self.now_ms());
        let pruned = self.call.db.zremrangebyscore(key, now);
        if is_wrong_type(&pruned) {
            return Ok(false);
        }
        pruned?;
        let (mut id, mut was_there) = (id.to_vec(), self.call.db.zrem(key, id)?);
        if !was_there && count == 0 {
            id = [b"kept ", &*id].concat();
            was_there = self.call.db.zrem(key, &id)?;
        }
        let mut at = 2;
        while was_there && (at <= count || count == 0) {
            if !self.call.db.zrem(key, &member(&id, at))? && count == 0 {
                break;
            }
            at += 1;
        }
        Ok(was_there)
    }

    pub(super) fn release(mut self) -> StoreResult<Value> {
        let call = &self.call;
        let (nonce, id, entry, not_after) = (call.arg(0), call.arg(1), call.arg(2), call.arg(3));
        let (needed, now) = (count(call.arg(4)), call.clock());
        let is_alone = call.arg(4) == b"-1";
        let (lock, queue, members) = (call.key(0), call.key(1), self.members());
        if !not_after.is_empty() && *now > *not_after {
            return reply_line(&[nonce, b"late", &now]);
        }
        if !entry.is_empty() {
            unless_wrong_type(self.call.db.lrem(queue, entry))?;
        }
        let holder = self.call.db.get(lock);
        if is_wrong_type(&holder) {
            return reply_line(&[nonce, b"type"]);
        }
        self.holder = holder?;
        let mut tag: &[u8] = b"gone";
        if self.holder.as_ref().is_some_and(|holder| holder == id || cut(holder) == id) {
            (tag, self.holder) = (b"released", None);
        } else if !is_alone && self.is_held_by_group() && self.remove_members(id, needed)? {
            tag = b"released";
            match self.call.db.zlast(members)? {
                Some((_, last)) => self.set_expiry(last)?,
                None => self.holder = None,
            }
        }
        if self.holder.is_none() || self.is_held_by_group() {
            let (_, more) = self.grant_next(b"", 0, b"")?;
            if self.holder.is_none() {
                self.call.free_lock()?;
            }
            return if more {
                reply_line(&[nonce, tag, b"more"])
            } else {
                reply_line(&[nonce, tag])
            };
        }
        let holder = self.holder.take().unwrap_or_default();
        let description = self.call.describe(0, &holder, None)?;
        reply_line(&[nonce, b"other", &now, &description])
    }
}
