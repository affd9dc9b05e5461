//! The minimum ACL permissions. The README repeats this list, and a test compares the two.

/// Permissions for acquiring, waiting for, renewing and releasing locks.
pub(crate) const LOCK_PERMISSIONS: [&str; 22] = [
    "~lock:*",
    "~distlock:*",
    "&distlock:client:*",
    "+eval",
    "+evalsha",
    "+time",
    "+ping",
    "+exists",
    "+get",
    "+set",
    "+del",
    "+pttl",
    "+pexpire",
    "+rpush",
    "+lpop",
    "+lpush",
    "+lpos",
    "+lrem",
    "+llen",
    "+publish",
    "+pubsub|numsub",
    "+subscribe",
];

/// Further permissions from Redis 7 on. Without them, a hand-over costs the server more.
pub(crate) const HAND_OVER_PERMISSIONS: [&str; 2] = ["+spublish", "+ssubscribe"];

/// Further permissions for listing and showing locks.
pub(crate) const INSPECT_PERMISSIONS: [&str; 2] = ["+scan", "+lrange"];

/// Further permissions for read-write locks and semaphores.
pub(crate) const SHARED_PERMISSIONS: [&str; 10] = [
    "+lindex",
    "+pexpireat",
    "+zadd",
    "+zcount",
    "+zmscore",
    "+zrange",
    "+zrangebyscore",
    "+zrem",
    "+zremrangebyscore",
    "+zscore",
];

/// Further permissions over several nodes, to identify a server and find out when it started.
pub(crate) const NODE_PERMISSIONS: [&str; 1] = ["+info"];

/// A permission that only `distlock doctor` needs, to check settings of the server.
#[allow(dead_code, reason = "not used by every test that includes this file")]
pub(crate) const SETTINGS_PERMISSION: &str = "+config|get";
