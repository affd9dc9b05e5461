//! The requests to a server: those of each kind of lock, and those of none. Pure.

use redis::Value;

pub(crate) use super::kinds::{
    acquire::{Acquire, AcquireMode, AcquireReply},
    acquire_all::{AcquireAll, AcquireAllReply},
    adopt::{Adopt, AdoptReply},
    release::{Release, ReleaseReply},
    renew::{Renew, RenewReply, Renewal},
};
use super::{
    fields::write_command,
    script::{Decoded, Request, Script, ScriptRef},
};

/// Checks that the server is reachable.
pub(crate) struct Ping;

impl Request for Ping {
    type Reply = ();

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"PING"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<Decoded<()>> {
        (reply == Value::SimpleString("PONG".into())).then_some(((), None))
    }
}

/// A request to a node of a cluster.
pub(crate) struct InCluster<'a, C> {
    pub(crate) request: &'a C,
    /// Whether the scripts use sharded channels.
    pub(crate) is_sharded: bool,
    /// Whether the node is asked although it does not serve the slot yet. The reply then comes
    /// after the one to `ASKING`, which goes ahead in the same write: it is for one command only.
    pub(crate) is_asking: bool,
}

impl<C: Request> Request for InCluster<'_, C> {
    type Reply = C::Reply;

    fn is_asking(&self) -> bool {
        self.is_asking
    }

    fn script(&self) -> Option<&'static Script> {
        self.request.script()
    }

    fn encode(&self, by: ScriptRef, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        if self.is_asking {
            write_command(out, &[b"ASKING"]);
        }
        let by = ScriptRef { is_sharded: self.is_sharded, ..by };
        self.request.encode(by, nonce, not_after_us, out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<C::Reply>> {
        self.request.decode(nonce, reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::redis::test_util::request_words,
        core::{key::LockKey, kind::LockKind},
    };

    #[test]
    fn request_in_cluster_may_ask_and_may_use_sharded_channels() {
        let key = LockKey::new("lock:", "a").unwrap().in_cluster().unwrap();
        let release = Release::new(LockKind::Mutex, &key, b"me");
        let text = |is_sharded, is_asking| {
            let mut out = Vec::new();
            let request = InCluster { request: &release, is_sharded, is_asking };
            request.encode(ScriptRef::SOURCE, 1, 2, &mut out);
            String::from_utf8(out).unwrap()
        };
        let plain = text(false, false);
        assert_eq!(text(false, true), ["*1\r\n$6\r\nASKING\r\n", &plain].concat());
        assert!(plain.contains("'PUBLISH'") && plain.contains("'NUMSUB'"));
        let sharded = text(true, false);
        assert!(sharded.contains("'SPUBLISH'") && sharded.contains("'SHARDNUMSUB'"));
        assert!(!sharded.contains("'PUBLISH'") && !sharded.contains("'NUMSUB'"));
    }

    #[test]
    fn ping_is_a_command_without_a_script() {
        assert_eq!(request_words(&Ping, ScriptRef::HASH), ["PING"]);
        assert!(Ping.script().is_none());
        assert_eq!(Ping.decode(9, Value::SimpleString("PONG".into())), Some(((), None)));
        assert_eq!(Ping.decode(9, Value::Okay), None);
    }
}
