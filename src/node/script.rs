//! The script table: the texts, and how a server is told which one is meant. Pure.

use std::sync::LazyLock;

use redis::Value;

use super::wire::{array, bulk, number};

/// One script: its text, and the hash by which the server knows it.
#[derive(Debug)]
pub(crate) struct Script {
    /// Stands for it in a set of scripts.
    pub(crate) bit: u8,
    text: &'static str,
    hash: LazyLock<String>,
}

macro_rules! script {
    ($bit:literal, $($file:literal),+) => {
        Script {
            bit: $bit,
            text: concat!($(include_str!(concat!("lua/", $file))),+),
            hash: LazyLock::new(|| hash(concat!($(include_str!(concat!("lua/", $file))),+))),
        }
    };
}

fn hash(text: &str) -> String {
    redis::Script::new(text).get_hash().to_owned()
}

pub(super) static ACQUIRE: Script = script!(1, "shared.lua", "acquire.lua");
pub(super) static RELEASE: Script = script!(2, "shared.lua", "release.lua");
pub(super) static RENEW: Script = script!(4, "renew.lua");
pub(super) static SURVEY: Script = script!(16, "survey.lua");
pub(super) static INSPECT: Script = script!(8, "shared.lua", "inspect.lua");

/// How a server is told which script is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Hash,
    /// Also teaches the script to a server that does not know its hash.
    Text,
}

/// A question to a server, and how to make sense of its answer.
///
/// Every request carries a nonce and every reply begins with it, so that a reply which belongs to another request is
/// never taken for an answer.
pub(crate) trait Call {
    type Reply;

    /// The script that answers, where it takes one.
    fn script(&self) -> Option<&'static Script>;

    /// `not_after_us` is what the server's clock will show when the caller stops waiting for the answer.
    fn encode(&self, by: By, nonce: u64, not_after_us: u64, out: &mut Vec<u8>);

    /// Makes sense of the reply to the request with this nonce; `None` is for anything else.
    fn read(&self, nonce: u64, reply: Value) -> Option<Self::Reply>;

    /// The server's time, where the reply tells.
    fn server_us(_: &Self::Reply) -> Option<u64> {
        None
    }
}

impl Script {
    /// The beginning of a request: as many keys and then arguments have to follow.
    pub(super) fn begin(&self, by: By, keys: usize, args: usize, out: &mut Vec<u8>) {
        array(out, 3 + keys + args);
        match by {
            By::Hash => {
                bulk(out, &[b"EVALSHA"]);
                bulk(out, &[self.hash.as_bytes()]);
            }
            By::Text => {
                bulk(out, &[b"EVAL"]);
                bulk(out, &[self.text.as_bytes()]);
            }
        }
        number(out, keys as u64);
    }

    #[cfg(test)]
    pub(super) fn hash(&self) -> &str {
        &self.hash
    }
}
