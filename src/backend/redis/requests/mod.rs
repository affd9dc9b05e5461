//! The requests to a server, and their replies. `mutex.rs` and `group.rs` have the scripts of each
//! kind of lock; `lua/` has the parts that scripts of several kinds share. Pure.

pub(crate) mod acquire;
pub(crate) mod acquire_all;
pub(crate) mod adopt;
pub(crate) mod group;
pub(crate) mod list;
pub(crate) mod mutex;
pub(crate) mod release;
pub(crate) mod renew;

#[cfg(test)]
mod tests;

use redis::Value;

pub(crate) use self::{
    acquire::{Acquire, AcquireMode, AcquireReply},
    acquire_all::{AcquireAll, AcquireAllReply},
    adopt::{Adopt, AdoptReply},
    release::{Release, ReleaseReply},
    renew::{LeaseToRenew, Renew, RenewReply},
};
use crate::backend::redis::{
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
