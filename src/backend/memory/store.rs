//! The data of a server in memory: strings and lists with expiries on the server's clock. Has the
//! few commands that the scripts use, with a real server's rules about types and memory.

use std::collections::{BTreeMap, VecDeque};

/// A key, a value or an argument, as a server stores it.
pub type Bytes = Vec<u8>;

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// A string.
    Text(Bytes),
    /// A list.
    List(VecDeque<Bytes>),
    /// A sorted set: members with whole numbers as scores.
    Sorted(BTreeMap<Bytes, u64>),
}

#[derive(Clone, Debug)]
struct Entry {
    data: Data,
    /// Milliseconds on the server's clock; the key still exists in this millisecond.
    expires: Option<u64>,
}

/// The keys of a server.
#[derive(Clone, Debug, Default)]
pub struct Keys(BTreeMap<Bytes, Entry>);

/// An error reply of a command, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError(pub String);

/// What a command returns.
pub type StoreResult<T> = Result<T, CommandError>;

/// The keys while one script runs. The clock does not advance meanwhile.
#[derive(Debug)]
pub struct Access<'a> {
    keys: &'a mut Keys,
    pub(crate) now_us: u64,
    /// Out of memory. Refuses commands that may need memory, unless the script has already
    /// written.
    full: bool,
    has_written: bool,
}

impl Keys {
    /// Begins a script at this time on the server's clock; `full` if the server is out of memory.
    pub fn open(&mut self, now_us: u64, full: bool) -> Access<'_> {
        Access { keys: self, now_us, full, has_written: false }
    }

    /// Returns the string under a key. Changes nothing.
    pub fn peek(&self, key: &[u8], now_us: u64) -> Option<&[u8]> {
        match self.0.get(key)? {
            Entry { data: Data::Text(text), expires } if is_live(*expires, now_us) => Some(text),
            _ => None,
        }
    }

    /// Returns the keys that have not expired, with the millisecond in which they do.
    pub fn live_entries(&self, now_us: u64) -> impl Iterator<Item = (&[u8], &Data, Option<u64>)> {
        let live = self.0.iter().filter(move |(_, entry)| is_live(entry.expires, now_us));
        live.map(|(key, entry)| (key.as_slice(), &entry.data, entry.expires))
    }

    /// Sets a key that expires in this millisecond, or never, or deletes it.
    pub fn put(&mut self, key: &[u8], data: Option<Data>, expires: Option<u64>) {
        match data {
            Some(data) => self.0.insert(key.to_vec(), Entry { data, expires }),
            None => self.0.remove(key),
        };
    }
}

fn is_live(expires: Option<u64>, now_us: u64) -> bool {
    expires.is_none_or(|at| now_us / 1000 <= at)
}

fn wrong_type() -> CommandError {
    CommandError("WRONGTYPE Operation against a key holding the wrong kind of value".into())
}

impl Access<'_> {
    fn now_ms(&self) -> u64 {
        self.now_us / 1000
    }

    fn live_entry(&mut self, key: &[u8]) -> Option<&mut Entry> {
        if self.keys.0.get(key).is_some_and(|entry| !is_live(entry.expires, self.now_us)) {
            self.keys.0.remove(key);
        }
        self.keys.0.get_mut(key)
    }

    /// Begins a command that writes; `grows` if it may need memory.
    fn write(&mut self, grows: bool) -> StoreResult<()> {
        if grows && self.full && !self.has_written {
            return Err(CommandError(
                "OOM command not allowed when used memory > 'maxmemory'.".into(),
            ));
        }
        self.has_written = true;
        Ok(())
    }

    /// `EXISTS key ...`, as whether any of them exists.
    pub(super) fn exists(&mut self, keys: &[&[u8]]) -> bool {
        keys.iter().any(|key| self.live_entry(key).is_some())
    }

    /// `GET key`
    pub(super) fn get(&mut self, key: &[u8]) -> StoreResult<Option<Bytes>> {
        match self.live_entry(key) {
            None => Ok(None),
            Some(Entry { data: Data::Text(text), .. }) => Ok(Some(text.clone())),
            Some(_) => Err(wrong_type()),
        }
    }

    /// `SET key value`, with `PX px` unless that is `None`.
    ///
    /// # Errors
    ///
    /// If the server is out of memory.
    pub fn set(&mut self, key: &[u8], value: &[u8], px: Option<u64>) -> StoreResult<()> {
        self.write(true)?;
        let expires = px.map(|px| self.now_ms().saturating_add(px));
        self.keys.put(key, Some(Data::Text(value.to_vec())), expires);
        Ok(())
    }

    /// `SET key value GET`, with `PX px` unless that is `None`.
    pub(super) fn set_get(
        &mut self,
        key: &[u8],
        value: &[u8],
        px: Option<u64>,
    ) -> StoreResult<Option<Bytes>> {
        if self.full && !self.has_written {
            return self.write(true).map(|()| None);
        }
        let last = self.get(key)?;
        self.set(key, value, px)?;
        Ok(last)
    }

    /// `DEL key …`
    pub(super) fn del(&mut self, keys: &[&[u8]]) -> StoreResult<()> {
        self.write(false)?;
        for key in keys {
            self.keys.0.remove(*key);
        }
        Ok(())
    }

    /// `PEXPIRE key px`; returns whether the key exists.
    pub(super) fn pexpire(&mut self, key: &[u8], px: u64) -> StoreResult<bool> {
        self.write(false)?;
        let expires = self.now_ms().saturating_add(px);
        Ok(self.live_entry(key).map(|entry| entry.expires = Some(expires)).is_some())
    }

    /// `SET key value PXAT at`
    pub(super) fn set_until(&mut self, key: &[u8], value: &[u8], at: u64) -> StoreResult<()> {
        self.write(true)?;
        self.keys.put(key, Some(Data::Text(value.to_vec())), Some(at));
        Ok(())
    }

    /// `PEXPIREAT key at`
    pub(super) fn pexpire_at(&mut self, key: &[u8], at: u64) -> StoreResult<()> {
        self.write(false)?;
        if let Some(entry) = self.live_entry(key) {
            entry.expires = Some(at);
        }
        Ok(())
    }

    /// `PTTL key`
    pub(super) fn pttl(&mut self, key: &[u8]) -> i64 {
        let now = self.now_ms();
        match self.live_entry(key).map(|entry| entry.expires) {
            None => -2,
            Some(None) => -1,
            Some(Some(at)) => i64::try_from(at.saturating_sub(now)).unwrap_or(i64::MAX),
        }
    }

    fn list(&mut self, key: &[u8]) -> StoreResult<Option<&mut VecDeque<Bytes>>> {
        match self.live_entry(key) {
            None => Ok(None),
            Some(Entry { data: Data::List(list), .. }) => Ok(Some(list)),
            Some(_) => Err(wrong_type()),
        }
    }

    /// `LLEN key`
    pub(super) fn llen(&mut self, key: &[u8]) -> StoreResult<usize> {
        Ok(self.list(key)?.map_or(0, |list| list.len()))
    }

    /// `LPOS key element`
    pub(super) fn lpos(&mut self, key: &[u8], element: &[u8]) -> StoreResult<Option<usize>> {
        Ok(self.list(key)?.and_then(|list| list.iter().position(|one| one == element)))
    }

    /// `LRANGE key 0 count-1`
    pub(super) fn lrange(&mut self, key: &[u8], count: usize) -> StoreResult<Vec<Bytes>> {
        Ok(self.list(key)?.map_or_else(Vec::new, |list| list.iter().take(count).cloned().collect()))
    }

    /// `LPOP key`
    pub(super) fn lpop(&mut self, key: &[u8]) -> StoreResult<Option<Bytes>> {
        self.write(false)?;
        let popped = self.list(key)?.and_then(VecDeque::pop_front);
        self.drop_if_empty(key);
        Ok(popped)
    }

    /// `LREM key 0 element`; returns how many there were.
    pub(super) fn lrem(&mut self, key: &[u8], element: &[u8]) -> StoreResult<usize> {
        self.write(false)?;
        let Some(list) = self.list(key)? else { return Ok(0) };
        let before = list.len();
        list.retain(|one| one != element);
        let removed = before - list.len();
        self.drop_if_empty(key);
        Ok(removed)
    }

    fn drop_if_empty(&mut self, key: &[u8]) {
        if matches!(self.list(key), Ok(Some(list)) if list.is_empty()) {
            self.keys.0.remove(key);
        }
    }

    /// `LPUSH key element` (`front`) or `RPUSH key element`; returns the new length.
    pub(super) fn push(&mut self, key: &[u8], element: &[u8], front: bool) -> StoreResult<usize> {
        self.write(true)?;
        if self.list(key)?.is_none() {
            self.keys.put(key, Some(Data::List(VecDeque::new())), None);
        }
        let Some(list) = self.list(key)? else { return Err(wrong_type()) };
        if front {
            list.push_front(element.to_vec())
        } else {
            list.push_back(element.to_vec())
        }
        Ok(list.len())
    }

    fn sorted(&mut self, key: &[u8]) -> StoreResult<Option<&mut BTreeMap<Bytes, u64>>> {
        match self.live_entry(key) {
            None => Ok(None),
            Some(Entry { data: Data::Sorted(set), .. }) => Ok(Some(set)),
            Some(_) => Err(wrong_type()),
        }
    }

    /// `ZADD key score member …`
    pub(super) fn zadd(&mut self, key: &[u8], members: Vec<(Bytes, u64)>) -> StoreResult<()> {
        self.write(true)?;
        if self.sorted(key)?.is_none() {
            self.keys.put(key, Some(Data::Sorted(BTreeMap::new())), None);
        }
        if let Some(set) = self.sorted(key)? {
            set.extend(members);
        }
        Ok(())
    }

    /// `ZADD key GT score member …`
    pub(super) fn zadd_gt(&mut self, key: &[u8], members: Vec<(Bytes, u64)>) -> StoreResult<()> {
        let mut larger = BTreeMap::new();
        for (member, score) in members {
            let before = larger.get(&member).copied().or(self.zscore(key, &member)?);
            if before.is_none_or(|before| before < score) {
                larger.insert(member, score);
            }
        }
        self.zadd(key, larger.into_iter().collect())
    }

    /// `ZSCORE key member`
    pub(super) fn zscore(&mut self, key: &[u8], member: &[u8]) -> StoreResult<Option<u64>> {
        Ok(self.sorted(key)?.and_then(|set| set.get(member).copied()))
    }

    /// `ZCOUNT key (score +inf`
    pub(super) fn zcount_above(&mut self, key: &[u8], score: u64) -> StoreResult<usize> {
        let set = self.sorted(key)?;
        Ok(set.map_or(0, |set| set.values().filter(|other| **other > score).count()))
    }

    /// `ZRANGEBYSCORE key (score +inf WITHSCORES LIMIT 0 most`
    pub(super) fn zrange_above(
        &mut self,
        key: &[u8],
        score: u64,
        most: usize,
    ) -> StoreResult<Vec<(Bytes, u64)>> {
        let Some(set) = self.sorted(key)? else { return Ok(Vec::new()) };
        let mut above: Vec<_> =
            set.iter().filter(|(_, other)| **other > score).map(|(id, at)| (*at, id)).collect();
        above.sort();
        Ok(above.into_iter().take(most).map(|(at, id)| (id.clone(), at)).collect())
    }

    /// `ZRANGE key -1 -1 WITHSCORES`
    pub(super) fn zlast(&mut self, key: &[u8]) -> StoreResult<Option<(Bytes, u64)>> {
        let Some(set) = self.sorted(key)? else { return Ok(None) };
        let last = set.iter().map(|(member, score)| (*score, member)).max();
        Ok(last.map(|(score, member)| (member.clone(), score)))
    }

    /// `ZREM key member`; returns whether it was there.
    pub(super) fn zrem(&mut self, key: &[u8], member: &[u8]) -> StoreResult<bool> {
        self.write(false)?;
        let removed = self.sorted(key)?.is_some_and(|set| set.remove(member).is_some());
        self.drop_if_no_members(key);
        Ok(removed)
    }

    /// `ZREMRANGEBYSCORE key -inf score`
    pub(super) fn zremrangebyscore(&mut self, key: &[u8], score: u64) -> StoreResult<()> {
        self.write(false)?;
        if let Some(set) = self.sorted(key)? {
            set.retain(|_, other| *other > score);
        }
        self.drop_if_no_members(key);
        Ok(())
    }

    fn drop_if_no_members(&mut self, key: &[u8]) {
        if matches!(self.sorted(key), Ok(Some(set)) if set.is_empty()) {
            self.keys.0.remove(key);
        }
    }
}
