//! The command that grants permissions, to be pasted into `redis-cli`, or into a shell after
//! `redis-cli`.

use std::env;

use super::permissions::{
    INSPECT_PERMISSIONS, LOCK_PERMISSIONS, NODE_PERMISSIONS, SETTINGS_PERMISSION,
    SHARED_PERMISSIONS,
};
use crate::{
    format,
    urls::{login_of, split_urls},
};

/// The command that gives these permissions to the user.
pub(super) fn grant_command<'a>(
    user: &'a str,
    permissions: impl IntoIterator<Item = &'a str>,
) -> String {
    let words = ["ACL", "SETUSER", user].into_iter().chain(permissions);
    words.map(quote_word).collect::<Vec<_>>().join(" ")
}

/// All permissions that the library and this command use, for a server of which nothing is known.
pub(super) fn all_permissions(lock_pattern: &str) -> Vec<&str> {
    LOCK_PERMISSIONS
        .into_iter()
        .map(|permission| if permission == "~lock:*" { lock_pattern } else { permission })
        .chain(INSPECT_PERMISSIONS)
        .chain(SHARED_PERMISSIONS)
        .chain(NODE_PERMISSIONS)
        .chain([SETTINGS_PERMISSION])
        .collect()
}

/// Quotes a word so that `redis-cli` and shells read it as it is.
fn quote_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-:./+@%,=".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    if word.chars().all(|c| format::is_printable(c) && c != '\'') {
        return format!("'{word}'");
    }
    // Only `redis-cli` understands these escapes.
    let escaped = word.bytes().map(|byte| match byte {
        b'"' | b'\\' => format!("\\{}", char::from(byte)),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

/// The user of each server, in the order in which the library numbers the nodes.
pub(super) fn users(urls: &[String]) -> Vec<String> {
    const DEFAULT_USER: &str = "default";
    let set = |name| env::var(name).ok().filter(|urls: &String| !urls.is_empty());
    let urls = match urls {
        [] => ["DISTLOCK_URL", "REDIS_URL"].into_iter().find_map(set).unwrap_or_default(),
        urls => urls.join(","),
    };
    let user = |url| login_of(url).user.unwrap_or_else(|| DEFAULT_USER.into());
    split_urls(&urls).map(user).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_redis_cli_and_shells() {
        for (word, quoted) in [
            ("+lpos", "+lpos"),
            ("+config|get", "'+config|get'"),
            ("~lock:*", "'~lock:*'"),
            ("&distlock:client:*", "'&distlock:client:*'"),
            ("~a\\*b:*", "'~a\\*b:*'"),
            ("~o'clock:*", "\"~o'clock:*\""),
            ("~\"\\\n:'*", "\"~\\\"\\\\\\x0a:'*\""),
            ("", "''"),
        ] {
            assert_eq!(quote_word(word), quoted);
        }
    }

    #[test]
    fn users_are_read_from_urls() {
        let urls = ["redis://app:x,y@h,redis://:x@h", "redis://h", "unix:///s?user=u&pass=x"];
        assert_eq!(users(&urls.map(str::to_owned)), ["app", "default", "default", "u"]);
        let several = ["redis+cluster://app@h:1,h2", "redis+sentinel://v@h,h2/main/1"];
        assert_eq!(users(&several.map(str::to_owned)), ["app", "v"]);
        let secure = ["rediss://app:x@h", "valkeys://b@h,rediss://h"];
        assert_eq!(users(&secure.map(str::to_owned)), ["app", "b", "default"]);
    }
}
