//! Asking the nodes of a cluster for the map.

use std::{io, sync::Arc};

use redis::Value;

use super::map::SlotMap;
use crate::{
    backend::{
        discovery::ServerName,
        error::{NodeError, NodeErrorKind},
        redis::{Decoded, RedisNode, Request, ScriptRef, exchange, write_command},
    },
    sys::clock::{self, Moment},
};

/// Asks these nodes for the map, from the last to the first, until one knows it. Calls `on_failure`
/// for those that do not. Also returns whether the nodes have sharded channels.
pub(super) fn ask_for_map(
    mut nodes: Vec<(ServerName, Arc<RedisNode>)>,
    deadline: Moment,
    on_failure: impl Fn(&ServerName),
) -> Result<(SlotMap, bool), NodeError> {
    let mut failure = NodeError::not_applied(NodeErrorKind::TimedOut);
    while let Some((name, node)) = nodes.pop() {
        let now = clock::now();
        let left = deadline.duration_since(now);
        if left.is_zero() {
            break;
        }
        // Otherwise the first one, if it hangs, could use up all the time.
        let share = left / u32::try_from(nodes.len() + 1).unwrap_or(u32::MAX);
        match map_of(&name, &node, now.saturating_add(share)) {
            Ok(found) => return Ok(found),
            Err(error) => {
                on_failure(&name);
                failure = error;
            }
        }
    }
    Err(failure)
}

/// Asks a node for its map, and whether it has sharded channels.
fn map_of(
    name: &ServerName,
    node: &RedisNode,
    deadline: Moment,
) -> Result<(SlotMap, bool), NodeError> {
    let mut connection = node.reserved_connection();
    let asked = exchange(node, &mut connection, &ClusterSlots { asked: name }, deadline);
    let map = asked.map_err(explain)?.reply;
    if map.masters().is_empty() {
        return Err(NodeError::not_applied(io::Error::other(
            "CLUSTERDOWN it knows no node that serves a slot",
        )));
    }
    let is_sharded = match exchange(node, &mut connection, &ShardedSubscribers, deadline) {
        Ok(_) => true,
        Err(NodeError { kind: NodeErrorKind::Refused { code, message }, .. }) => {
            is_known_but_forbidden(&code, &message)
        }
        Err(failure) => return Err(failure),
    };
    Ok((map, is_sharded))
}

/// Whether the server knows sharded channels, but may not be asked for them. Servers before Redis 7
/// also forbid subcommands that they do not know, without naming them.
fn is_known_but_forbidden(code: &str, message: &str) -> bool {
    code == "NOPERM" && message.contains("shardnumsub")
}

/// Says what to do if the server does not belong to a cluster.
fn explain(failure: NodeError) -> NodeError {
    match failure.kind {
        NodeErrorKind::Refused { message, .. } if message.contains("cluster support disabled") => {
            let reason = "it is a single server and not a node of a Redis Cluster; write redis:// \
                          instead of redis+cluster://";
            NodeError::not_applied(NodeErrorKind::Ineligible(reason.to_owned()))
        }
        kind => NodeError::not_applied(kind),
    }
}

/// Asks for the map.
struct ClusterSlots<'a> {
    asked: &'a ServerName,
}

impl Request for ClusterSlots<'_> {
    type Reply = SlotMap;

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"CLUSTER", b"SLOTS"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<Decoded<SlotMap>> {
        Some((SlotMap::parse(&reply, self.asked)?, None))
    }
}

/// Asks for the subscribers of no sharded channel. Only servers that have such channels reply.
struct ShardedSubscribers;

impl Request for ShardedSubscribers {
    type Reply = ();

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"PUBSUB", b"SHARDNUMSUB"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<Decoded<()>> {
        matches!(reply, Value::Array(_)).then_some(((), None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of Redis 6.2, 7.0 and Valkey 9.1, if the subcommand is forbidden; and of Redis 6.2
    /// if it is allowed.
    ///
    /// Fault: F76
    #[test]
    fn forbidden_request_shows_whether_channels_are_sharded() {
        for (code, message, expected) in [
            (
                "NOPERM",
                "this user has no permissions to run the 'pubsub' command or its subcommand",
                false,
            ),
            (
                "NOPERM",
                "this user has no permissions to run the 'pubsub|shardnumsub' command",
                true,
            ),
            ("NOPERM", "User app has no permissions to run the 'pubsub|shardnumsub' command", true),
            ("ERR", "Unknown subcommand or wrong number of arguments for 'SHARDNUMSUB'", false),
        ] {
            assert_eq!(is_known_but_forbidden(code, message), expected, "{message}");
        }
    }
}
