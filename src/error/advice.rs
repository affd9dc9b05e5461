//! What to do about errors of servers.

/// What to do about an error of the server, if known.
pub(super) fn advice(code: &str, message: &str) -> Option<&'static str> {
    // The first text is from Redis, the second from Valkey.
    if message.contains("one of the keys") || message.contains("permissions to access a key") {
        return Some(
            "grant the permissions listed in the README, here access to the keys of the prefix \
             and to distlock:*",
        );
    }
    // A permission that is missing inside a script is reported as a plain ERR. Most servers do not
    // name it.
    let is_in_script = message.contains("executing the script can");
    if is_in_script && !message.contains("; the user needs +") {
        return Some(
            "grant the permissions listed in the README; read-write locks and semaphores also \
             need +lindex +pexpireat +zadd +zcount +zmscore +zrange +zrangebyscore +zrem \
             +zremrangebyscore +zscore",
        );
    }
    if is_in_script
        || code == "NOPERM"
        || message.contains("NOPERM")
        || message.contains("ACL failure")
    {
        return Some("grant the permissions listed in the README");
    }
    if ["nknown command", "Unknown Redis command", "Unknown Redict command"]
        .iter()
        .any(|text| message.contains(text))
    {
        return Some(
            "use Redis 6.2 or newer, or any Valkey, and do not rename the commands listed in the \
             README",
        );
    }
    match code {
        "DENIED" => Some(
            "set a password on the server, or turn off its protected-mode if only trusted clients \
             can reach it",
        ),
        "NOAUTH" => Some("put a password into the URL"),
        "WRONGPASS" => Some("check the user and the password in the URL"),
        "READONLY" => Some("the server is a replica; connect to its master"),
        "OOM" => Some("free memory, or raise maxmemory"),
        "MISCONF" => Some("fix the server's persistence"),
        "NOREPLICAS" => Some("restore its replicas"),
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => Some(
            "the server is a node of a Redis Cluster; write redis+cluster://host,host as the URL",
        ),
        _ => None,
    }
}
