//! Which rights a user lacks, found by trying each of them in a way that changes nothing.
//!
//! `ACL DRYRUN` would need rights of its own, which the users in question do not have.

use redis::{RedisError, Value};

use super::{
    facts::Rights,
    rights::{LOCKS, LOOKING},
};
use crate::scratch::Scratch;

/// Tries everything over one connection, which is not good for anything else afterwards. Fails when the connection does.
pub(super) fn rights(
    scratch: &Scratch,
    pattern: &str,
    mut ask: impl FnMut(&[&str]) -> Result<Value, RedisError>,
) -> Result<Rights, RedisError> {
    let mut rights = Rights::default();
    let mut allowed = |right: &'static str, words: &[&str]| match ask(words) {
        Err(error) if error.is_io_error() => Err(error),
        Err(error) if error.code() == Some("NOPERM") => {
            let is_lock = words.get(1).is_some_and(|word| *word == scratch.lock);
            let missing = named(right, is_lock, pattern, error.detail().unwrap_or_default());
            if !rights.missing.contains(&missing) {
                rights.missing.push(missing);
            }
            Ok(false)
        }
        // What else can be wrong is looked at after the rights.
        Err(_) => Ok(false),
        Ok(reply) => Ok(reply != Value::Nil),
    };
    // Pushing to what is no list fails, and tells whether it was allowed; elsewhere it would leave a list behind.
    let no_list = allowed("+set", &["SET", &scratch.queue, "-", "NX", "PX", "5000"])?;
    let mut untried = Vec::new();
    for right in LOCKS.into_iter().chain(LOOKING) {
        let words = harmless(right, scratch);
        if words.is_empty() {
            continue;
        }
        if matches!(right, "+rpush" | "+lpush") && !no_list {
            untried.push(right);
        } else {
            allowed(right, &words)?;
        }
    }
    if no_list {
        allowed("+del", &["DEL", &scratch.queue])?;
    }
    // After this the connection hears messages only.
    allowed("+subscribe", &["SUBSCRIBE", &scratch.channel])?;
    // A key or channel that is missing is missed by several commands; those of the list come in its order.
    let place = |right: &String| LOCKS.iter().chain(&LOOKING).position(|listed| listed == right).unwrap_or(0);
    rights.missing.sort_by_key(place);
    rights.untried = untried;
    Ok(rights)
}

/// A command by which a right is tried, changing nothing; none for those of keys and channels, which several commands
/// need, and for the one that has to come last.
fn harmless<'a>(right: &str, scratch: &'a Scratch) -> Vec<&'a str> {
    const NO_SCRIPT: &str = "0000000000000000000000000000000000000000";
    let (lock, queue) = (scratch.lock.as_str(), scratch.queue.as_str());
    match right {
        "+eval" => vec!["EVAL", "return 1", "0"],
        "+evalsha" => vec!["EVALSHA", NO_SCRIPT, "0"],
        "+time" => vec!["TIME"],
        "+ping" => vec!["PING"],
        "+get" => vec!["GET", lock],
        // Only what is there is set, and it is not there.
        "+set" => vec!["SET", lock, "-", "XX", "PX", "1"],
        "+del" => vec!["DEL", lock],
        "+pttl" => vec!["PTTL", lock],
        "+pexpire" => vec!["PEXPIRE", lock, "1"],
        "+rpush" => vec!["RPUSH", queue, "-"],
        "+lpush" => vec!["LPUSH", queue, "-"],
        "+lpop" => vec!["LPOP", &scratch.fence],
        "+lpos" => vec!["LPOS", &scratch.fence, "-"],
        "+lrem" => vec!["LREM", &scratch.fence, "0", "-"],
        "+llen" => vec!["LLEN", &scratch.fence],
        "+lrange" => vec!["LRANGE", &scratch.fence, "0", "0"],
        "+publish" => vec!["PUBLISH", &scratch.channel, "-"],
        "+pubsub|numsub" => vec!["PUBSUB", "NUMSUB", &scratch.channel],
        "+scan" => vec!["SCAN", "0", "COUNT", "1"],
        _ => vec![],
    }
}

/// The right that a refusal is about. Servers look at the command first, then at its keys, then at its channels.
fn named(right: &str, is_lock: bool, pattern: &str, detail: &str) -> String {
    if detail.contains("to run the") {
        right.to_owned()
    } else if detail.contains("channel") {
        "&distlock:client:*".into()
    } else if detail.contains("key") {
        if is_lock { pattern.to_owned() } else { "~distlock:*".into() }
    } else {
        right.to_owned()
    }
}

/// The keys of all locks, as an ACL names them: the prefix stands for itself.
pub(super) fn key_pattern(prefix: &str) -> String {
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

    /// As Redis 6.2, 7.0 and later have it.
    #[test]
    fn refusals_name_what_is_missing() {
        for (detail, is_lock, right) in [
            ("this user has no permissions to run the 'lpos' command or its subcommand", false, "+lpos"),
            ("this user has no permissions to run the 'lpos' command", false, "+lpos"),
            ("User app has no permissions to run the 'lpos' command", false, "+lpos"),
            ("this user has no permissions to access one of the keys used as arguments", true, "~lock:*"),
            ("No permissions to access a key", false, "~distlock:*"),
            ("No permissions to access a channel", false, "&distlock:client:*"),
        ] {
            assert_eq!(named("+lpos", is_lock, "~lock:*", detail), right, "{detail}");
        }
        assert_eq!(key_pattern("a*b:"), "~a\\*b:*");
    }

    /// A right that is added to the list is tried, or learnt from what others are refused for.
    #[test]
    fn all_of_the_list_is_tried() {
        let scratch = Scratch::new("lock:");
        let untried = LOCKS.into_iter().chain(LOOKING).filter(|right| harmless(right, &scratch).is_empty());
        assert_eq!(untried.collect::<Vec<_>>(), ["~lock:*", "~distlock:*", "&distlock:client:*", "+subscribe"]);
        for right in LOCKS.into_iter().chain(LOOKING).filter(|right| !harmless(right, &scratch).is_empty()) {
            let words = right.trim_start_matches('+').to_uppercase();
            assert!(
                words.split('|').eq(harmless(right, &scratch).into_iter().take(words.split('|').count())),
                "{right}"
            );
        }
    }
}
