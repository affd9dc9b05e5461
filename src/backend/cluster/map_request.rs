//! Asking one node of a cluster for the map.

use std::io;

use redis::Value;

use super::map::SlotMap;
use crate::{
    backend::{
        discovery::ServerName,
        error::{NodeError, NodeErrorKind},
        redis::{RedisNode, Request, ScriptRef, exchange, script::Script, write_command},
    },
    sys::clock::Moment,
};

/// Asks a node for its map, and whether it has sharded channels.
pub(super) fn map_of(
    name: &ServerName,
    node: &RedisNode,
    deadline: Moment,
) -> Result<(SlotMap, bool), NodeError> {
    let mut connection = node.reserved_connection();
    let asked = exchange(node, &mut connection, &ClusterSlots { asked: name }, deadline);
    let map = asked.map_err(explain)?.reply;
    if map.masters().is_empty() {
        return Err(NodeError::not_sent(io::Error::other(
            "CLUSTERDOWN it knows no node that serves a slot",
        )));
    }
    let is_sharded = match exchange(node, &mut connection, &ShardedSubscribers, deadline) {
        Ok(_) => true,
        // Servers before Redis 7 do not know it. Others may forbid it, which says nothing.
        Err(NodeError { kind: NodeErrorKind::Refused { code, .. }, .. }) => code == "NOPERM",
        Err(failure) => return Err(failure),
    };
    Ok((map, is_sharded))
}

/// Says what to do if the server does not belong to a cluster.
fn explain(failure: NodeError) -> NodeError {
    match failure.kind {
        NodeErrorKind::Refused { message, .. } if message.contains("cluster support disabled") => {
            let reason = "it is a single server and not a node of a Redis Cluster; write redis:// \
                          instead of redis+cluster://";
            NodeError { outcome_unknown: false, kind: NodeErrorKind::Ineligible(reason.to_owned()) }
        }
        kind => NodeError { outcome_unknown: false, kind },
    }
}

/// Asks for the map.
struct ClusterSlots<'a> {
    asked: &'a ServerName,
}

impl Request for ClusterSlots<'_> {
    type Reply = SlotMap;

    fn script(&self) -> Option<&'static Script> {
        None
    }

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"CLUSTER", b"SLOTS"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<SlotMap> {
        SlotMap::parse(&reply, self.asked)
    }
}

/// Asks for the subscribers of no sharded channel. Only servers that have such channels reply.
struct ShardedSubscribers;

impl Request for ShardedSubscribers {
    type Reply = ();

    fn script(&self) -> Option<&'static Script> {
        None
    }

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"PUBSUB", b"SHARDNUMSUB"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<()> {
        matches!(reply, Value::Array(_)).then_some(())
    }
}
