//! What a script is, and the requests that run scripts. Pure.

use std::sync::OnceLock;

use redis::Value;

use super::fields::{write_array, write_bulk, write_number};
use crate::backend::error::{NodeError, NodeErrorKind};

/// A script: its source, and the hash by which servers identify it.
#[derive(Debug)]
pub(crate) struct Script {
    /// Bit of this script in a set of scripts.
    pub(crate) mask: u32,
    source: &'static str,
    hash: OnceLock<String>,
    /// The same script for a cluster with sharded channels.
    sharded: OnceLock<&'static Script>,
}

/// A script whose source is these files of `lua/`. No other script may have the same mask.
macro_rules! script {
    ($mask:literal, $($file:literal),+) => {
        Script::new($mask, concat!($(include_str!(
            concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/redis/lua/", $file)
        )),+))
    };
}
pub(super) use script;

/// Last argument of every script. A later version that changes what is stored increases it.
const PROTOCOL_VERSION: &[u8] = b"1";

/// Appends the last argument of a request.
pub(super) fn write_version(out: &mut Vec<u8>) {
    write_bulk(out, &[PROTOCOL_VERSION]);
}

/// How a request identifies its script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScriptRef {
    /// By its full source, which also loads the script on a server that does not know its hash.
    pub(crate) is_source: bool,
    /// It is [`Script::sharded`].
    pub(crate) is_sharded: bool,
}

impl ScriptRef {
    pub(crate) const HASH: ScriptRef = ScriptRef { is_source: false, is_sharded: false };
    pub(crate) const SOURCE: ScriptRef = ScriptRef { is_source: true, is_sharded: false };
}

/// A reply, and the time on the server's clock in microseconds, if the reply contains it.
pub(crate) type Decoded<R> = (R, Option<u64>);

/// A request to a server, and the decoding of its reply.
///
/// Every request of a script carries a nonce, and its reply begins with the same nonce. So the
/// reply to another request is never accepted.
pub(crate) trait Request {
    type Reply;

    /// Script that the request runs; `None` for a plain command.
    fn script(&self) -> Option<&'static Script> {
        None
    }

    /// Appends the request to `out`. `not_after_us` is what the server's clock will show when the
    /// caller stops waiting.
    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>);

    /// Decodes the reply to the request with this nonce. Returns `None` if the reply is malformed
    /// or belongs to another request.
    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<Self::Reply>>;

    /// Whether the reply grants a lock.
    fn is_grant(_: &Self::Reply) -> bool {
        false
    }

    /// Whether `ASKING` goes ahead of the request, so that its reply is the second one.
    fn is_asking(&self) -> bool {
        false
    }
}

impl Script {
    pub(super) const fn new(mask: u32, source: &'static str) -> Script {
        Script { mask, source, hash: OnceLock::new(), sharded: OnceLock::new() }
    }

    /// Returns the same script for servers of a cluster that has sharded channels. No connection
    /// uses both, so they have the same mask.
    pub(crate) fn sharded(&'static self) -> &'static Script {
        self.sharded.get_or_init(|| {
            let source = self.source.replace("'PUBLISH'", "'SPUBLISH'");
            let source = source.replace("'NUMSUB'", "'SHARDNUMSUB'");
            // Once for each script and process.
            Box::leak(Box::new(Script::new(self.mask, source.leak())))
        })
    }

    pub(crate) fn hash(&self) -> &str {
        self.hash.get_or_init(|| redis::Script::new(self.source).get_hash().to_owned())
    }

    #[cfg(feature = "testing")]
    pub(crate) fn text(&self) -> &'static str {
        self.source
    }

    /// Appends the head of a request. Exactly `keys` keys, `args` arguments and the protocol
    /// version must follow.
    pub(super) fn write_header(
        &'static self,
        by: ScriptRef,
        keys: usize,
        args: usize,
        out: &mut Vec<u8>,
    ) {
        write_array(out, 4 + keys + args);
        let script = if by.is_sharded { self.sharded() } else { self };
        let (command, script): (&[u8], _) =
            if by.is_source { (b"EVAL", script.source) } else { (b"EVALSHA", script.hash()) };
        write_bulk(out, &[command]);
        write_bulk(out, &[script.as_bytes()]);
        write_number(out, keys as u64);
    }

    /// Returns the permission that the user lacks for this script, such as `+get`. The server's
    /// message does not name it, but has the line number. If the script passed on the error of a
    /// protected call, there is no line number, so all protected calls are candidates.
    pub(crate) fn missing_permission(&self, message: &str) -> Option<String> {
        const LINE: &str = "@user_script:";
        if !message.contains("executing the script can") {
            return None;
        }
        let digits = |rest: &str| {
            rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok())
        };
        let number =
            message.split_once(LINE).map(|(_, rest)| digits(rest.trim_start()).unwrap_or(0));
        let lines = self.source.lines().zip(1_usize..);
        let denied: Vec<&str> = match number {
            Some(number) => lines
                .filter(|(_, line)| *line == number)
                .flat_map(|(line, _)| called_commands(line, "call('"))
                .collect(),
            // A look at locks works without LREM and without members, and a hand-over without
            // PEXPIRE.
            None => lines
                .flat_map(|(line, _)| called_commands(line, "pcall('"))
                .filter(|command| !["LREM", "ZCOUNT", "ZRANGEBYSCORE", "PEXPIRE"].contains(command))
                .collect(),
        };
        let mut permissions: Vec<String> = Vec::new();
        // The scripts work without the permissions for these.
        let optional = ["PUBLISH", "SPUBLISH", "PUBSUB"];
        for command in denied.into_iter().filter(|command| !optional.contains(command)) {
            let permission = format!("+{}", command.to_ascii_lowercase());
            if !permissions.contains(&permission) {
                permissions.push(permission);
            }
        }
        (!permissions.is_empty()).then(|| permissions.join(" or "))
    }
}

/// Appends the permission that the user lacks to an error, if the server does not name it.
pub(crate) fn name_missing_permission(mut error: NodeError, script: Option<&Script>) -> NodeError {
    if let (NodeErrorKind::Refused { message, .. }, Some(script)) = (&mut error.kind, script)
        && let Some(permission) = script.missing_permission(message)
    {
        // What follows is the hash of the script and a line in it.
        message.truncate(message.find(" script: ").unwrap_or(message.len()));
        message.push_str(&format!("; the user needs {permission}"));
    }
    error
}

/// Returns the commands that a line of a script calls with `how`, which is `call('` or `pcall('`.
fn called_commands<'a>(line: &'a str, how: &'a str) -> impl Iterator<Item = &'a str> {
    line.match_indices(how).filter_map(move |(at, _)| line[at + how.len()..].split('\'').next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::requests::{
        acquire_all::ACQUIRE_ALL,
        adopt::ADOPT,
        group,
        list::DESCRIBE,
        mutex::{ACQUIRE, RELEASE},
        release::KEEP,
        renew::RENEW,
    };

    #[test]
    fn scripts_have_distinct_hashes_and_masks() {
        let scripts = [
            &ACQUIRE,
            &RELEASE,
            &RENEW,
            &DESCRIBE,
            &group::ACQUIRE,
            &group::RELEASE,
            &KEEP,
            &ADOPT,
            &ACQUIRE_ALL,
        ];
        for (at, script) in scripts.iter().enumerate() {
            assert!(
                script.hash().len() == 40
                    && script.hash().bytes().all(|byte| byte.is_ascii_hexdigit())
            );
            assert!(
                scripts[..at]
                    .iter()
                    .all(|other| other.hash() != script.hash() && other.mask & script.mask == 0)
            );
        }
    }

    /// Fault: F76
    #[test]
    fn missing_permission_is_found_by_line_or_pcall() {
        let denied = "The user executing the script can't run this command or subcommand";
        let at = |script: &Script, call: &str| {
            let line = script.source.lines().position(|line| line.contains(call)).unwrap() + 1;
            script.missing_permission(&format!("{denied} script: 81f6, on @user_script:{line}."))
        };
        assert_eq!(at(&ACQUIRE, "call('RPUSH'").as_deref(), Some("+rpush"));
        assert_eq!(at(&RENEW, "call('PEXPIRE'").as_deref(), Some("+pexpire"));
        assert_eq!(ACQUIRE.missing_permission(denied).as_deref(), Some("+get"));
        assert_eq!(DESCRIBE.missing_permission(denied).as_deref(), Some("+get or +llen"));
        for nonsense in
            ["", "no", &format!("{denied} @user_script:99999999999999999999999"), "@user_script:12"]
        {
            assert_eq!(ACQUIRE.missing_permission(nonsense), None, "{nonsense}");
        }
    }
}
