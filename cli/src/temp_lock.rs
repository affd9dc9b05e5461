//! `TempLock`: a lock with a name that no other client uses, and the keys it may leave behind.

use distlock::RedisMgr;
use redis::RedisError;

/// The lock's name, and its keys and channel on the servers.
#[derive(Clone, Debug)]
pub(crate) struct TempLock {
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) queue_key: String,
    pub(crate) token_key: String,
    pub(crate) channel: String,
}

impl TempLock {
    pub(crate) fn new(prefix: &str) -> TempLock {
        let name = format!("distlock-{}", distlock::generate_lock_id().uuid());
        let lock = format!("{prefix}{name}");
        // A prefix that contains a hash tag keeps it.
        let tag = prefix.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        let tagged = tag.is_some_and(|(tag, _)| !tag.is_empty());
        let key = if tagged { lock.clone() } else { format!("{{{lock}}}") };
        TempLock {
            queue_key: format!("distlock:queue:{key}"),
            token_key: format!("distlock:token:{key}"),
            channel: format!("distlock:client:{name}"),
            name,
            key: lock,
        }
    }

    /// Deletes the lock's keys on one server. If the server is unreachable, they expire there.
    pub(crate) fn delete_keys(&self, node: &RedisMgr) {
        let Ok(mut connection) = node.connection() else { return };
        let keys = [&self.key, &self.queue_key, &self.token_key];
        let deleted: Result<u64, RedisError> = redis::cmd("DEL").arg(&keys).query(&mut connection);
        if deleted.is_err_and(|error| !error.is_io_error()) {
            // A user may lack the permission to delete, but have the one to set an expiry.
            for key in keys {
                let _: Result<u64, RedisError> =
                    redis::cmd("PEXPIRE").arg(key).arg(1).query(&mut connection);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_those_of_library() {
        let plain = TempLock::new("lock:");
        assert_eq!(plain.token_key, format!("distlock:token:{{lock:{}}}", plain.name));
        let tagged = TempLock::new("{a}:");
        assert_eq!(tagged.token_key, format!("distlock:token:{{a}}:{}", tagged.name));
        assert_ne!(plain.name, tagged.name);
    }
}
