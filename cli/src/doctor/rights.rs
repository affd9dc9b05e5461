//! The least rights, as the ACL of a server names them: the one list, which the README repeats.

/// What taking, waiting for, renewing and releasing locks needs.
pub(crate) const LOCKS: [&str; 21] = [
    "~lock:*",
    "~distlock:*",
    "&distlock:client:*",
    "+eval",
    "+evalsha",
    "+time",
    "+ping",
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

/// What listing locks and showing one needs besides.
pub(crate) const LOOKING: [&str; 2] = ["+scan", "+lrange"];

/// What several nodes need besides: who they are, and whether they forget.
pub(crate) const NODES: [&str; 2] = ["+info", "+config|get"];
