//! `Link`: the subscriptions at one node of a cluster.

use std::{collections::VecDeque, sync::Arc};

use redis::Value;

use super::cluster_node::Part;
use crate::{
    backend::redis::{PubSubMessage, Subscriber},
    core::{claim::GrantNotice, cluster_slot::slot_of},
    sys::clock::Moment,
};

/// The connection to one node.
pub(super) struct Link {
    pub(super) part: Arc<Part>,
    pub(super) state: LinkState,
    /// Consecutive failures.
    pub(super) failures: u32,
}

pub(super) enum LinkState {
    Connecting,
    Up {
        subscriber: Box<Subscriber>,
        /// Slots whose subscription has not been confirmed, in the order of the requests.
        asked: VecDeque<u16>,
    },
    /// The connection failed. The time is that of the next attempt.
    Waiting(Moment),
}

/// What a node sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    Grant(Box<str>, GrantNotice),
    Subscribed(u16),
    Unsubscribed(u16),
    /// The error that replies to a command.
    Refusal,
    Other,
}

impl Received {
    pub(super) fn parse(value: &Value, number: u64) -> Received {
        match PubSubMessage::parse(value) {
            PubSubMessage::Grant(id, notice) => {
                let notice = GrantNotice { server: number, ..notice };
                return Received::Grant(id.into(), notice);
            }
            PubSubMessage::Invalid => return Received::Other,
            PubSubMessage::NotAMessage => {}
        }
        let parts = match value {
            Value::Array(parts) => parts,
            Value::ServerError(_) => return Received::Refusal,
            _ => return Received::Other,
        };
        let [Value::BulkString(kind), Value::BulkString(channel), ..] = &parts[..] else {
            return Received::Other;
        };
        let slot = slot_of(&String::from_utf8_lossy(channel));
        match kind.as_slice() {
            b"ssubscribe" | b"subscribe" => Received::Subscribed(slot),
            b"sunsubscribe" | b"unsubscribe" => Received::Unsubscribed(slot),
            _ => Received::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_subscription_are_told_apart() {
        let value = |text: &str| {
            let words = text.split('/').map(|word| Value::BulkString(word.into()));
            Value::Array(words.collect())
        };
        let is = |text: &str, expected: Received| {
            assert_eq!(Received::parse(&value(text), 3), expected, "{text}");
        };
        let slot = slot_of("7");
        is("ssubscribe/distlock:client:{7}:x/1", Received::Subscribed(slot));
        is("subscribe/distlock:client:{7}:x/1", Received::Subscribed(slot));
        is("sunsubscribe/distlock:client:{7}:x/0", Received::Unsubscribed(slot));
        is("pong/", Received::Other);
        is("smessage/c/nonsense", Received::Other);
        let notice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7, server: 3 };
        is("smessage/c/5 6 7 me", Received::Grant("me".into(), notice));
        assert_eq!(Received::parse(&Value::Nil, 3), Received::Other);
    }
}
