//! Finds out which permissions the user lacks, by a command for each that changes nothing.
//!
//! `ACL DRYRUN` is no help, because it needs a permission that such users do not have.

use redis::{RedisError, Value};

use super::{
    facts::Permissions,
    permissions::{
        HAND_OVER_PERMISSIONS, INSPECT_PERMISSIONS, LOCK_PERMISSIONS, SHARED_PERMISSIONS,
    },
};
use crate::temp_lock::TempLock;

/// The permissions for keys and channels that do not depend on the prefix.
const OWN_KEYS: &str = "~distlock:*";
const CHANNELS: &str = "&distlock:client:*";
/// Stands for the permission to run a command that locks do not need.
const NOT_NEEDED: &str = "";

/// Tests all permissions over one connection, which cannot be used for anything else afterwards.
/// Fails if the connection fails.
pub(super) fn probe_permissions(
    temp_lock: &TempLock,
    pattern: &str,
    mut query: impl FnMut(&[&str]) -> Result<Value, RedisError>,
) -> Result<Permissions, RedisError> {
    let mut permissions = Permissions::default();
    // Keys and channels are only checked by commands that the user may run.
    let mut unreached = vec![pattern, OWN_KEYS, CHANNELS];
    let mut is_allowed = |permission: &'static str, words: &[&str]| {
        let reply = query(words);
        let accessed = match words.get(1) {
            Some(word) if *word == temp_lock.key => Some(pattern),
            Some(word) if *word == temp_lock.channel => Some(CHANNELS),
            Some(word)
                if [&temp_lock.queue_key, &temp_lock.token_key].contains(&&(*word).into()) =>
            {
                Some(OWN_KEYS)
            }
            _ => None,
        };
        match reply {
            Err(error) if error.is_io_error() => return Err(error),
            Err(error) if error.code() == Some("NOPERM") => {
                let detail = error.detail().unwrap_or_default();
                let missing = missing_permission(permission, accessed, detail);
                unreached.retain(|pattern| *pattern != missing);
                if missing != NOT_NEEDED
                    && !permissions.missing.iter().any(|known| known == missing)
                {
                    permissions.missing.push(missing.to_owned());
                }
                return Ok(false);
            }
            _ => unreached.retain(|pattern| Some(*pattern) != accessed),
        }
        // Other errors come from the command's effect, after its permissions were checked.
        Ok(reply.is_ok_and(|reply| reply != Value::Nil))
    };
    // With a string under the queue's key, a push fails after its permissions were checked.
    // Otherwise it would leave a list behind.
    let has_string = is_allowed("+set", &["SET", &temp_lock.queue_key, "-", "NX", "PX", "5000"])?;
    let mut untested = Vec::new();
    for permission in listed_permissions() {
        let words = probe_command(permission, temp_lock);
        if words.is_empty() {
            continue;
        }
        if matches!(permission, "+rpush" | "+lpush") && !has_string {
            untested.push(permission.to_owned());
        } else {
            is_allowed(permission, &words)?;
        }
    }
    if has_string {
        is_allowed("+del", &["DEL", &temp_lock.queue_key])?;
    }
    // Other commands, which locks do not need, may also show whether the user has access to keys.
    for key in [temp_lock.key.as_str(), &temp_lock.token_key] {
        for command in ["GET", "PTTL", "LLEN", "DEL", "EXISTS", "TYPE"] {
            is_allowed(NOT_NEEDED, &[command, key])?;
        }
    }
    // Last, because the connection can then only receive messages.
    is_allowed("+subscribe", &["SUBSCRIBE", &temp_lock.channel])?;
    is_allowed("+ssubscribe", &["SSUBSCRIBE", &temp_lock.channel])?;
    // Several commands may miss the same key or channel. Sorting restores the order of the list.
    let position = |permission: &String| {
        listed_permissions().position(|listed| listed == permission).unwrap_or(0)
    };
    permissions.missing.sort_by_key(position);
    permissions.untested =
        untested.into_iter().chain(unreached.into_iter().map(str::to_owned)).collect();
    Ok(permissions)
}

/// All permissions that are tested here, in the order in which they are reported.
fn listed_permissions() -> impl Iterator<Item = &'static str> {
    LOCK_PERMISSIONS
        .into_iter()
        .chain(HAND_OVER_PERMISSIONS)
        .chain(INSPECT_PERMISSIONS)
        .chain(SHARED_PERMISSIONS)
}

/// A command that needs this permission and changes nothing. Empty for keys and channels, which
/// several commands need, and for `+subscribe` and `+ssubscribe`, which must come last.
fn probe_command<'a>(permission: &str, temp_lock: &'a TempLock) -> Vec<&'a str> {
    const NO_SCRIPT: &str = "0000000000000000000000000000000000000000";
    let (lock, queue) = (temp_lock.key.as_str(), temp_lock.queue_key.as_str());
    let token = temp_lock.token_key.as_str();
    match permission {
        "+eval" => vec!["EVAL", "return 1", "0"],
        "+evalsha" => vec!["EVALSHA", NO_SCRIPT, "0"],
        "+time" => vec!["TIME"],
        "+ping" => vec!["PING"],
        "+exists" => vec!["EXISTS", lock],
        "+get" => vec!["GET", lock],
        // `XX` sets only a key that exists, and this one does not.
        "+set" => vec!["SET", lock, "-", "XX", "PX", "1"],
        "+del" => vec!["DEL", lock],
        "+pttl" => vec!["PTTL", lock],
        "+pexpire" => vec!["PEXPIRE", lock, "1"],
        "+rpush" => vec!["RPUSH", queue, "-"],
        "+lpush" => vec!["LPUSH", queue, "-"],
        "+lpop" => vec!["LPOP", token],
        "+lpos" => vec!["LPOS", token, "-"],
        "+lrem" => vec!["LREM", token, "0", "-"],
        "+llen" => vec!["LLEN", token],
        "+lrange" => vec!["LRANGE", token, "0", "0"],
        "+publish" => vec!["PUBLISH", &temp_lock.channel, "-"],
        "+spublish" => vec!["SPUBLISH", &temp_lock.channel, "-"],
        "+pubsub|numsub" => vec!["PUBSUB", "NUMSUB", &temp_lock.channel],
        "+scan" => vec!["SCAN", "0", "COUNT", "1"],
        "+lindex" => vec!["LINDEX", token, "0"],
        "+pexpireat" => vec!["PEXPIREAT", lock, "1"],
        // `XX` changes only a member that exists.
        "+zadd" => vec!["ZADD", token, "XX", "0", "-"],
        "+zcount" => vec!["ZCOUNT", token, "0", "0"],
        "+zmscore" => vec!["ZMSCORE", token, "-"],
        "+zrange" => vec!["ZRANGE", token, "0", "0"],
        "+zrangebyscore" => vec!["ZRANGEBYSCORE", token, "0", "0"],
        "+zrem" => vec!["ZREM", token, "-"],
        "+zremrangebyscore" => vec!["ZREMRANGEBYSCORE", token, "0", "0"],
        "+zscore" => vec!["ZSCORE", token, "-"],
        _ => vec![],
    }
}

/// The permission that a refusal is about. Servers check the command first, then its keys, then its
/// channels.
fn missing_permission<'a>(permission: &'a str, accessed: Option<&'a str>, detail: &str) -> &'a str {
    match accessed {
        Some(pattern)
            if !detail.contains("to run the")
                && (detail.contains("channel") || detail.contains("key")) =>
        {
            pattern
        }
        _ => permission,
    }
}

/// The ACL pattern for the keys of all locks, with special characters of the prefix escaped.
pub(super) fn lock_key_pattern(prefix: &str) -> String {
    let mut pattern = String::from("~");
    for letter in prefix.chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern.push('*');
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of Redis 6.2, 7.0 and later.
    #[test]
    fn refusal_names_missing_permission() {
        for (detail, accessed, permission) in [
            (
                "this user has no permissions to run the 'lpos' command or its subcommand",
                OWN_KEYS,
                "+lpos",
            ),
            ("this user has no permissions to run the 'lpos' command", OWN_KEYS, "+lpos"),
            ("User app has no permissions to run the 'lpos' command", OWN_KEYS, "+lpos"),
            (
                "this user has no permissions to access one of the keys used as arguments",
                "~lock:*",
                "~lock:*",
            ),
            ("No permissions to access a key", OWN_KEYS, "~distlock:*"),
            ("No permissions to access a channel", CHANNELS, "&distlock:client:*"),
        ] {
            assert_eq!(missing_permission("+lpos", Some(accessed), detail), permission, "{detail}");
        }
        assert_eq!(lock_key_pattern("a*b:"), "~a\\*b:*");
    }

    /// Every listed permission has a command, or is learnt from the refusal of another's.
    #[test]
    fn every_listed_permission_is_tested() {
        let temp_lock = TempLock::new("lock:");
        let untested = listed_permissions()
            .filter(|permission| probe_command(permission, &temp_lock).is_empty());
        assert_eq!(
            untested.collect::<Vec<_>>(),
            ["~lock:*", "~distlock:*", "&distlock:client:*", "+subscribe", "+ssubscribe"]
        );
        for permission in listed_permissions()
            .filter(|permission| !probe_command(permission, &temp_lock).is_empty())
        {
            let words = permission.trim_start_matches('+').to_uppercase();
            assert!(
                words.split('|').eq(probe_command(permission, &temp_lock)
                    .into_iter()
                    .take(words.split('|').count())),
                "{permission}"
            );
        }
    }
}
