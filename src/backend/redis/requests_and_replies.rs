//! The requests to a server: those of each kind of lock, and those of none. Pure.

use redis::Value;

pub(crate) use super::primitive::{
    KindReleaseReply, OfKind, RenewSome,
    group::{Downgrade, DowngradeReply, GroupReport, ListMembers, MemberRenewal, RenewMembers},
    keep::ReleaseOrKeep,
    mutex::{
        Acquire, AcquireMode, AcquireReply, Inspect, Release, ReleaseReply, Renew, RenewReply,
        Renewal,
    },
};
use super::{
    connection::write_command,
    script::{Request, Script, ScriptRef},
};

/// Checks that the server is reachable.
pub(crate) struct Ping;

impl Request for Ping {
    type Reply = ();

    fn script(&self) -> Option<&'static Script> {
        None
    }

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"PING"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<()> {
        (reply == Value::SimpleString("PONG".into())).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::test_util::request_words;

    #[test]
    fn ping_is_a_command_without_a_script() {
        assert_eq!(request_words(&Ping, ScriptRef::Hash), ["PING"]);
        assert!(Ping.script().is_none());
        assert_eq!(Ping.decode(9, Value::SimpleString("PONG".into())), Some(()));
        assert_eq!(Ping.decode(9, Value::Okay), None);
    }
}
