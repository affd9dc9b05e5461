//! The data of a simulated server: strings and lists with expiries on the server's clock. Has the
//! few commands that the library's scripts use, with the server's rules about types and memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(crate) type Bytes = Vec<u8>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    Text(Bytes),
    List(VecDeque<Bytes>),
}

#[derive(Clone, Debug)]
struct Entry {
    data: Data,
    /// Milliseconds on the server's clock; the key still exists in this millisecond.
    expires: Option<u64>,
}

/// The keys of a server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys(BTreeMap<Bytes, Entry>);

/// An error reply of a command, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommandError(pub(crate) String);

pub(crate) type StoreResult<T> = Result<T, CommandError>;

/// The keys while one script runs. The clock does not advance meanwhile.
pub(crate) struct Access<'a> {
    keys: &'a mut Keys,
    pub(crate) now_us: u64,
    /// Out of memory. Refuses commands that may need memory, unless the script has already
    /// written.
    full: bool,
    has_written: bool,
    changed_keys: BTreeSet<Bytes>,
}

impl Keys {
    pub(crate) fn open(&mut self, now_us: u64, full: bool) -> Access<'_> {
        Access { keys: self, now_us, full, has_written: false, changed_keys: BTreeSet::new() }
    }

    /// The string under a key. Changes nothing.
    pub(crate) fn peek(&self, key: &[u8], now_us: u64) -> Option<&[u8]> {
        match self.0.get(key)? {
            Entry { data: Data::Text(text), expires } if is_live(*expires, now_us) => Some(text),
            _ => None,
        }
    }

    /// The keys that have not expired.
    pub(crate) fn live_entries(
        &self,
        now_us: u64,
    ) -> impl Iterator<Item = (&[u8], &Data, Option<u64>)> {
        let live = self.0.iter().filter(move |(_, entry)| is_live(entry.expires, now_us));
        live.map(|(key, entry)| (key.as_slice(), &entry.data, entry.expires))
    }

    /// Sets a key without an expiry, or deletes it.
    pub(crate) fn put(&mut self, key: &[u8], data: Option<Data>) {
        match data {
            Some(data) => self.0.insert(key.to_vec(), Entry { data, expires: None }),
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

    pub(crate) fn get(&mut self, key: &[u8]) -> StoreResult<Option<Bytes>> {
        match self.live_entry(key) {
            None => Ok(None),
            Some(Entry { data: Data::Text(text), .. }) => Ok(Some(text.clone())),
            Some(_) => Err(wrong_type()),
        }
    }

    /// `SET key value PX ms`
    pub(crate) fn set(&mut self, key: &[u8], value: &[u8], px: u64) -> StoreResult<()> {
        let expires = self.now_ms() + px;
        self.set_until(key, value, Some(expires))
    }

    /// `SET key value`
    pub(crate) fn set_forever(&mut self, key: &[u8], value: &[u8]) -> StoreResult<()> {
        self.set_until(key, value, None)
    }

    fn set_until(&mut self, key: &[u8], value: &[u8], expires: Option<u64>) -> StoreResult<()> {
        self.write(true)?;
        self.keys.0.insert(key.to_vec(), Entry { data: Data::Text(value.to_vec()), expires });
        self.changed_keys.insert(key.to_vec());
        Ok(())
    }

    /// `SET key value PX ms GET`
    pub(crate) fn set_get(
        &mut self,
        key: &[u8],
        value: &[u8],
        px: u64,
    ) -> StoreResult<Option<Bytes>> {
        let expires = self.now_ms() + px;
        self.set_get_until(key, value, Some(expires))
    }

    /// `SET key value GET`
    pub(crate) fn set_get_forever(
        &mut self,
        key: &[u8],
        value: &[u8],
    ) -> StoreResult<Option<Bytes>> {
        self.set_get_until(key, value, None)
    }

    fn set_get_until(
        &mut self,
        key: &[u8],
        value: &[u8],
        expires: Option<u64>,
    ) -> StoreResult<Option<Bytes>> {
        if self.full && !self.has_written {
            return self.write(true).map(|()| None);
        }
        let last = self.get(key)?;
        self.set_until(key, value, expires)?;
        Ok(last)
    }

    pub(crate) fn del(&mut self, keys: &[&[u8]]) -> StoreResult<()> {
        self.write(false)?;
        for key in keys {
            self.keys.0.remove(*key);
            self.changed_keys.insert((*key).to_vec());
        }
        Ok(())
    }

    /// `PEXPIRE key ms`; returns whether the key exists.
    pub(crate) fn pexpire(&mut self, key: &[u8], px: u64) -> StoreResult<bool> {
        self.write(false)?;
        let expires = self.now_ms() + px;
        Ok(self.live_entry(key).map(|entry| entry.expires = Some(expires)).is_some())
    }

    pub(crate) fn pttl(&mut self, key: &[u8]) -> i64 {
        let now = self.now_ms();
        match self.live_entry(key).map(|entry| entry.expires) {
            None => -2,
            Some(None) => -1,
            Some(Some(at)) => at.saturating_sub(now) as i64,
        }
    }

    fn list(&mut self, key: &[u8]) -> StoreResult<Option<&mut VecDeque<Bytes>>> {
        match self.live_entry(key) {
            None => Ok(None),
            Some(Entry { data: Data::List(list), .. }) => Ok(Some(list)),
            Some(_) => Err(wrong_type()),
        }
    }

    pub(crate) fn llen(&mut self, key: &[u8]) -> StoreResult<usize> {
        Ok(self.list(key)?.map_or(0, |list| list.len()))
    }

    pub(crate) fn lpos(&mut self, key: &[u8], element: &[u8]) -> StoreResult<Option<usize>> {
        Ok(self.list(key)?.and_then(|list| list.iter().position(|one| one == element)))
    }

    pub(crate) fn lrange(&mut self, key: &[u8], count: usize) -> StoreResult<Vec<Bytes>> {
        Ok(self.list(key)?.map_or_else(Vec::new, |list| list.iter().take(count).cloned().collect()))
    }

    pub(crate) fn lpop(&mut self, key: &[u8]) -> StoreResult<Option<Bytes>> {
        self.write(false)?;
        let popped = self.list(key)?.and_then(VecDeque::pop_front);
        self.drop_if_empty(key);
        Ok(popped)
    }

    pub(crate) fn lrem(&mut self, key: &[u8], element: &[u8]) -> StoreResult<()> {
        self.write(false)?;
        if let Some(list) = self.list(key)? {
            list.retain(|one| one != element);
        }
        self.drop_if_empty(key);
        Ok(())
    }

    fn drop_if_empty(&mut self, key: &[u8]) {
        if matches!(self.list(key), Ok(Some(list)) if list.is_empty()) {
            self.keys.0.remove(key);
        }
    }

    /// `LPUSH` (`front`) or `RPUSH`; returns the new length.
    pub(crate) fn push(&mut self, key: &[u8], element: &[u8], front: bool) -> StoreResult<usize> {
        self.write(true)?;
        if self.list(key)?.is_none() {
            self.keys
                .0
                .insert(key.to_vec(), Entry { data: Data::List(VecDeque::new()), expires: None });
        }
        let Some(list) = self.list(key)? else { return Err(wrong_type()) };
        if front {
            list.push_front(element.to_vec())
        } else {
            list.push_back(element.to_vec())
        }
        Ok(list.len())
    }

    /// The string keys that were written or deleted.
    pub(crate) fn changed_keys(self) -> BTreeSet<Bytes> {
        self.changed_keys
    }
}
