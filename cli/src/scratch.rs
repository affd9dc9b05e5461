//! `Scratch`: a lock of our own that nobody else knows, and what it leaves behind.

use distlock::RedisMgr;
use redis::RedisError;

/// Its name, and the keys and the channel that could be left of it.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    pub(crate) name: String,
    pub(crate) lock: String,
    pub(crate) queue: String,
    pub(crate) fence: String,
    pub(crate) channel: String,
}

impl Scratch {
    pub(crate) fn new(prefix: &str) -> Scratch {
        let name = format!("distlock-{}", distlock::generate_lock_id().uuid());
        let lock = format!("{prefix}{name}");
        // A prefix with a hash tag of its own keeps it.
        let tag = prefix.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        let tagged = tag.is_some_and(|(tag, _)| !tag.is_empty());
        let key = if tagged { lock.clone() } else { format!("{{{lock}}}") };
        Scratch {
            queue: format!("distlock:queue:{key}"),
            fence: format!("distlock:fence:{key}"),
            channel: format!("distlock:client:{name}"),
            name,
            lock,
        }
    }

    /// Removes what is left on one server. What cannot be removed because the server has gone expires by itself.
    pub(crate) fn clean(&self, node: &RedisMgr) {
        let Ok(mut connection) = node.connection() else { return };
        let keys = [&self.lock, &self.queue, &self.fence];
        let deleted: Result<u64, RedisError> = redis::cmd("DEL").arg(&keys).query(&mut connection);
        if deleted.is_err_and(|error| !error.is_io_error()) {
            // Without the right to delete, the one to expire does.
            for key in keys {
                let _: Result<u64, RedisError> = redis::cmd("PEXPIRE").arg(key).arg(1).query(&mut connection);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_keys_are_those_of_a_lock() {
        let plain = Scratch::new("lock:");
        assert_eq!(plain.fence, format!("distlock:fence:{{lock:{}}}", plain.name));
        let tagged = Scratch::new("{a}:");
        assert_eq!(tagged.fence, format!("distlock:fence:{{a}}:{}", tagged.name));
        assert_ne!(plain.name, tagged.name);
    }
}
