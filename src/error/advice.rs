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
        // Every server knows TIME; a sentinel and some proxies do not.
        if message.to_ascii_uppercase().contains("TIME") {
            return Some(
                "this looks like a sentinel or a proxy: for a sentinel, write \
                 redis+sentinel://host:port/master with the name of the master; behind a proxy, \
                 connect to the server itself; if it is neither, do not rename TIME",
            );
        }
        return Some(
            "use Redis 6.2 or newer, or any Valkey, and do not rename the commands listed in the \
             README",
        );
    }
    if code == "ERR" && message.contains("DB index") {
        return Some("write a smaller database number after the host in the URL");
    }
    match code {
        "DENIED" => Some(
            "set a password on the server, or turn off its protected-mode if only trusted clients \
             can reach it",
        ),
        "NOAUTH" => Some("put a password into the URL or Config::password"),
        "WRONGPASS" => Some(
            "check the user in the URL, and the password there or in Config::password; without a \
             user, write redis://:password@host",
        ),
        // As MySQL and MariaDB say it; a replica of Redis is "read only".
        "READONLY" if message.contains("read-only") || message.contains("READ ONLY") => {
            Some("connect to the primary; if this is the primary, turn read_only off")
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_only_servers_of_both_kinds_get_their_advice() {
        let redis = advice("READONLY", "You can't write against a read only replica.").unwrap();
        assert!(redis.contains("connect to its master"), "{redis}");
        for mysql in ["the server is read-only", "in a READ ONLY transaction."] {
            let advice = advice("READONLY", mysql).unwrap();
            assert!(advice.contains("turn read_only off"), "{advice}");
        }
    }

    #[test]
    fn server_without_time_is_a_sentinel_or_a_proxy() {
        let sentinel = advice("ERR", "unknown command 'TIME', with args beginning with: ").unwrap();
        assert!(sentinel.contains("redis+sentinel://"), "{sentinel}");
        let old = advice("ERR", "unknown command `LPOS`, with args beginning with: ").unwrap();
        assert!(old.contains("Redis 6.2"), "{old}");
    }

    #[test]
    fn database_that_does_not_exist_is_one_of_the_url() {
        let advice = advice("ERR", "DB index is out of range").unwrap();
        assert!(advice.contains("database number"), "{advice}");
    }
}
