//! What a server keeps: texts, lists and expiries on its own clock; the few commands that our scripts use, with the
//! server's rules about types and memory.

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
    /// Milliseconds on the server's clock; it lives through this one.
    expires: Option<u64>,
}

/// Survives a restart, if the server writes it down.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys(BTreeMap<Bytes, Entry>);

/// A refusal, as it goes over the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) String);

pub(crate) type Outcome<T> = Result<T, Refused>;

/// The keys at one moment, for one script: its clock stands still.
pub(crate) struct Access<'a> {
    keys: &'a mut Keys,
    pub(crate) now_us: u64,
    /// No memory is left; what would take some is refused, unless the script has written before.
    full: bool,
    wrote: bool,
    touched: BTreeSet<Bytes>,
}

impl Keys {
    pub(crate) fn open(&mut self, now_us: u64, full: bool) -> Access<'_> {
        Access { keys: self, now_us, full, wrote: false, touched: BTreeSet::new() }
    }

    /// The text of a key at a moment, without changing anything.
    pub(crate) fn peek(&self, key: &[u8], now_us: u64) -> Option<&[u8]> {
        match self.0.get(key)? {
            Entry { data: Data::Text(text), expires } if lives(*expires, now_us) => Some(text),
            _ => None,
        }
    }

    /// The keys that are there.
    pub(crate) fn living(&self, now_us: u64) -> impl Iterator<Item = (&[u8], &Data, Option<u64>)> {
        let living = self.0.iter().filter(move |(_, entry)| lives(entry.expires, now_us));
        living.map(|(key, entry)| (key.as_slice(), &entry.data, entry.expires))
    }

    /// Puts something under a key, or takes away what is there.
    pub(crate) fn put(&mut self, key: &[u8], data: Option<Data>) {
        match data {
            Some(data) => self.0.insert(key.to_vec(), Entry { data, expires: None }),
            None => self.0.remove(key),
        };
    }
}

fn lives(expires: Option<u64>, now_us: u64) -> bool {
    expires.is_none_or(|at| now_us / 1000 <= at)
}

fn wrong_type() -> Refused {
    Refused("WRONGTYPE Operation against a key holding the wrong kind of value".into())
}

impl Access<'_> {
    fn now_ms(&self) -> u64 {
        self.now_us / 1000
    }

    fn living(&mut self, key: &[u8]) -> Option<&mut Entry> {
        if self.keys.0.get(key).is_some_and(|entry| !lives(entry.expires, self.now_us)) {
            self.keys.0.remove(key);
        }
        self.keys.0.get_mut(key)
    }

    /// A command that writes; `grows` if it may take memory.
    fn write(&mut self, grows: bool) -> Outcome<()> {
        if grows && self.full && !self.wrote {
            return Err(Refused("OOM command not allowed when used memory > 'maxmemory'.".into()));
        }
        self.wrote = true;
        Ok(())
    }

    pub(crate) fn get(&mut self, key: &[u8]) -> Outcome<Option<Bytes>> {
        match self.living(key) {
            None => Ok(None),
            Some(Entry { data: Data::Text(text), .. }) => Ok(Some(text.clone())),
            Some(_) => Err(wrong_type()),
        }
    }

    /// `SET key value PX ms`
    pub(crate) fn set(&mut self, key: &[u8], value: &[u8], px: u64) -> Outcome<()> {
        self.write(true)?;
        let entry = Entry { data: Data::Text(value.to_vec()), expires: Some(self.now_ms() + px) };
        self.keys.0.insert(key.to_vec(), entry);
        self.touched.insert(key.to_vec());
        Ok(())
    }

    /// `SET key value PX ms GET`
    pub(crate) fn set_get(&mut self, key: &[u8], value: &[u8], px: u64) -> Outcome<Option<Bytes>> {
        if self.full && !self.wrote {
            return self.write(true).map(|()| None);
        }
        let last = self.get(key)?;
        self.set(key, value, px)?;
        Ok(last)
    }

    pub(crate) fn del(&mut self, key: &[u8]) -> Outcome<()> {
        self.write(false)?;
        self.keys.0.remove(key);
        self.touched.insert(key.to_vec());
        Ok(())
    }

    /// True if the key is there.
    pub(crate) fn pexpire(&mut self, key: &[u8], px: u64) -> Outcome<bool> {
        self.write(false)?;
        let expires = self.now_ms() + px;
        Ok(self.living(key).map(|entry| entry.expires = Some(expires)).is_some())
    }

    pub(crate) fn pttl(&mut self, key: &[u8]) -> i64 {
        let now = self.now_ms();
        match self.living(key).map(|entry| entry.expires) {
            None => -2,
            Some(None) => -1,
            Some(Some(at)) => at.saturating_sub(now) as i64,
        }
    }

    fn list(&mut self, key: &[u8]) -> Outcome<Option<&mut VecDeque<Bytes>>> {
        match self.living(key) {
            None => Ok(None),
            Some(Entry { data: Data::List(list), .. }) => Ok(Some(list)),
            Some(_) => Err(wrong_type()),
        }
    }

    pub(crate) fn llen(&mut self, key: &[u8]) -> Outcome<usize> {
        Ok(self.list(key)?.map_or(0, |list| list.len()))
    }

    pub(crate) fn lpos(&mut self, key: &[u8], element: &[u8]) -> Outcome<Option<usize>> {
        Ok(self.list(key)?.and_then(|list| list.iter().position(|one| one == element)))
    }

    pub(crate) fn lrange(&mut self, key: &[u8], count: usize) -> Outcome<Vec<Bytes>> {
        Ok(self.list(key)?.map_or_else(Vec::new, |list| list.iter().take(count).cloned().collect()))
    }

    pub(crate) fn lpop(&mut self, key: &[u8]) -> Outcome<Option<Bytes>> {
        self.write(false)?;
        let popped = self.list(key)?.and_then(VecDeque::pop_front);
        self.drop_if_empty(key);
        Ok(popped)
    }

    pub(crate) fn lrem(&mut self, key: &[u8], element: &[u8]) -> Outcome<()> {
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

    /// The length afterwards.
    pub(crate) fn push(&mut self, key: &[u8], element: &[u8], front: bool) -> Outcome<usize> {
        self.write(true)?;
        if self.list(key)?.is_none() {
            self.keys.0.insert(key.to_vec(), Entry { data: Data::List(VecDeque::new()), expires: None });
        }
        let Some(list) = self.list(key)? else { return Err(wrong_type()) };
        if front {
            list.push_front(element.to_vec())
        } else {
            list.push_back(element.to_vec())
        }
        Ok(list.len())
    }

    /// The keys whose texts were written or deleted.
    pub(crate) fn touched(self) -> BTreeSet<Bytes> {
        self.touched
    }
}
