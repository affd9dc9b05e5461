//! `LockKey`: a validated lock name, and the Redis keys derived from it.

use std::{fmt, sync::Arc};

use super::cluster_slot::{hash_tag, slot_of, tag_of_slot};

/// Maximum length of a lock name in bytes, with its prefix.
pub(crate) const MAX_NAME_BYTES: usize = 1024;

/// Prefix of all auxiliary keys; no lock key may begin with it.
const RESERVED_PREFIX: &str = "distlock:";
pub(crate) const FENCE_KEY: &str = "distlock:fence";

/// A validated name, stored as the full lock key: the prefix, then the name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LockKey {
    /// Shared with the local queue of the lock.
    lock: Arc<str>,
    name_start: u16,
    /// Slot of all keys of the lock, if they are in a Redis Cluster.
    slot: Option<u16>,
}

/// Why a name cannot be used, as a part of a sentence.
#[derive(Debug)]
pub(crate) struct InvalidName(pub(crate) String);

impl LockKey {
    pub(crate) fn new(prefix: &str, name: &str) -> Result<LockKey, InvalidName> {
        if name.is_empty() {
            return Err(InvalidName("the name is empty".into()));
        }
        let bytes = prefix.len().saturating_add(name.len());
        if bytes > MAX_NAME_BYTES {
            return Err(InvalidName(format!(
                "the name has {} bytes, {bytes} with its prefix; the limit is {MAX_NAME_BYTES} \
                 (use a hash of the name)",
                name.len()
            )));
        }
        let lock = [prefix, name].concat();
        if lock.starts_with(RESERVED_PREFIX) {
            return Err(InvalidName(format!(
                "its key would begin with {RESERVED_PREFIX}, which is reserved for queues and \
                 tokens"
            )));
        }
        // At most `MAX_NAME_BYTES`.
        let name_start = prefix.len() as u16;
        Ok(LockKey { lock: lock.into(), name_start, slot: None })
    }

    /// Makes this the key of a lock in a Redis Cluster, where all keys of a lock must be in one
    /// slot.
    pub(crate) fn in_cluster(mut self) -> Result<LockKey, InvalidName> {
        let slot = slot_of(&self.lock);
        if slot_of(&self.queue_key().concat()) != slot {
            return Err(InvalidName(
                "a Redis Cluster cannot keep the lock and its queue in one slot, because the name \
                 contains } but no hash tag; leave out the }, or write a hash tag such as \
                 {orders}:42"
                    .into(),
            ));
        }
        self.slot = Some(slot);
        Ok(self)
    }

    /// Returns the slot of the lock, if it is in a Redis Cluster.
    pub(crate) fn slot(&self) -> Option<u16> {
        self.slot
    }

    pub(crate) fn name(&self) -> &str {
        &self.lock[usize::from(self.name_start)..]
    }

    pub(crate) fn lock_key(&self) -> &str {
        &self.lock
    }

    pub(crate) fn shared_lock_key(&self) -> &Arc<str> {
        &self.lock
    }

    /// The key of the queue: a list, first in, first out.
    pub(crate) fn queue_key(&self) -> [&str; 3] {
        self.auxiliary_key("distlock:queue:{", "distlock:queue::")
    }

    /// The key of the holder's fencing token.
    pub(crate) fn token_key(&self) -> [&str; 3] {
        self.auxiliary_key("distlock:token:{", "distlock:token::")
    }

    /// The key of the members of a group: a sorted set of ids by expiry.
    pub(crate) fn members_key(&self) -> [&str; 3] {
        self.auxiliary_key("distlock:members:{", "distlock:members::")
    }

    /// The key of the fence: a number that is not below the token of any lock that a release freed.
    /// One for all locks of a database, and in a Redis Cluster one for all locks of a slot.
    pub(crate) fn fence_key(&self) -> [&str; 3] {
        match self.slot {
            None => [FENCE_KEY, "", ""],
            Some(slot) => ["distlock:fence:{", tag_of_slot(slot), "}"],
        }
    }

    /// Returns the parts of a key that no lock key can equal, because lock keys never begin with
    /// `distlock:`.
    ///
    /// The braces put all keys of a lock into one cluster slot. A name that contains a hash tag
    /// keeps it and is put behind two colons: the names `{a}` and `a` must not share keys.
    fn auxiliary_key<'a>(&'a self, tagging: &'a str, tagged: &'a str) -> [&'a str; 3] {
        match hash_tag(&self.lock) {
            Some(_) => [tagged, &self.lock, ""],
            None => [tagging, &self.lock, "}"],
        }
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey({:?})", self.lock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(prefix: &str, name: &str) -> [String; 3] {
        let key = LockKey::new(prefix, name).unwrap();
        [key.lock_key().to_owned(), key.queue_key().concat(), key.token_key().concat()]
    }

    #[test]
    fn the_keys_of_a_lock_share_a_hash_tag() {
        assert_eq!(
            keys("lock:", "a"),
            ["lock:a", "distlock:queue:{lock:a}", "distlock:token:{lock:a}"]
        );
        assert_eq!(
            keys("lock:", "{user:1}:cart"),
            [
                "lock:{user:1}:cart",
                "distlock:queue::lock:{user:1}:cart",
                "distlock:token::lock:{user:1}:cart"
            ]
        );
        assert_eq!(keys("", "my_resource")[0], "my_resource");
        assert_eq!(keys("lock:", "{}x")[1], "distlock:queue:{lock:{}x}");
    }

    #[test]
    fn braced_name_shares_no_key() {
        let (bare, braced) = (keys("", "a"), keys("", "{a}"));
        assert!(bare.iter().all(|key| !braced.contains(key)), "{bare:?} and {braced:?}");
    }

    /// Fault: N176
    #[test]
    fn name_whose_keys_differ_in_slot_is_rejected() {
        let known = |name: &str| LockKey::new("lock:", name).unwrap().in_cluster();
        for name in ["a", "{user:1}:cart", "a{b", "{", "a{b}c}", "}{b}"] {
            let key = known(name).unwrap();
            let keys = [key.queue_key(), key.token_key(), key.members_key(), key.fence_key()];
            assert!(
                keys.iter().all(|key| Some(slot_of(&key.concat())) == known(name).unwrap().slot)
            );
            assert!(key.fence_key().concat().starts_with("distlock:fence:{"));
        }
        for name in ["a}b", "{}x", "{}{a}", "}"] {
            assert!(known(name).unwrap_err().0.contains("contains }"), "{name}");
        }
    }

    #[test]
    fn reserved_names_are_rejected() {
        for (prefix, name) in [
            ("", "distlock:fence"),
            ("", "distlock:token:{a}"),
            ("distlock:", "a"),
            ("dist", "lock:x"),
        ] {
            assert!(LockKey::new(prefix, name).is_err());
        }
        assert!(LockKey::new("lock:", "distlock:token:{a}").is_ok());
    }

    #[test]
    fn empty_and_huge_names_are_refused_with_a_reason() {
        for name in [String::new(), "x".repeat(1 << 20)] {
            let error = LockKey::new("lock:", &name).unwrap_err();
            assert!(error.0.len() < 300, "{error:?}");
        }
        assert!(LockKey::new("lock:", &"x".repeat(MAX_NAME_BYTES - 5)).is_ok());
    }

    proptest! {
        /// Fault: F68
        #[test]
        fn different_names_never_share_a_key(
            prefix in "(lock:)?",
            a in "(distlock:(queue|token):)?[{]?[a-c:{}]{1,12}",
            b in "(distlock:(queue|token):)?[{]?[a-c:{}]{1,12}",
        ) {
            prop_assume!(a != b);
            let known = |name: &str| LockKey::new(&prefix, name).is_ok();
            prop_assume!(known(&a) && known(&b));
            for left in keys(&prefix, &a) {
                prop_assert!(!keys(&prefix, &b).contains(&left), "{a:?} and {b:?} share {left}");
            }
        }

        #[test]
        fn any_name_keeps_its_bytes(name in ".{1,40}") {
            let key = LockKey::new("lock:", &name).unwrap();
            prop_assert_eq!(key.name(), name);
        }
    }
}
