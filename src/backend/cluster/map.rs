//! `SlotMap`: which node of a cluster serves each slot. Pure.

use std::{collections::BTreeSet, sync::Arc};

use redis::Value;

use crate::{backend::discovery::ServerName, core::cluster_slot::SLOTS};

/// Maximum number of nodes of a cluster: what Redis recommends. Otherwise servers could report
/// nodes without end.
pub(super) const NODES_MAX: usize = 1_000;

/// The node of each slot that a node serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotMap(Vec<Option<Arc<ServerName>>>);

impl SlotMap {
    /// A map in which no slot is served.
    pub(super) fn unserved() -> SlotMap {
        SlotMap(vec![None; usize::from(SLOTS)])
    }

    /// Reads the reply of the node `asked` to `CLUSTER SLOTS`.
    pub(super) fn parse(reply: &Value, asked: &ServerName) -> Option<SlotMap> {
        let Value::Array(ranges) = reply else { return None };
        let mut map = SlotMap::unserved();
        for range in ranges {
            let Value::Array(parts) = range else { return None };
            let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &parts[..] else {
                return None;
            };
            let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
            if first > last || last >= usize::from(SLOTS) {
                return None;
            }
            // The node does not know the address of the master.
            let Some(node) = address(master, asked)? else { continue };
            map.0[first..=last].fill(Some(Arc::new(node)));
        }
        (map.masters().len() <= NODES_MAX).then_some(map)
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&ServerName> {
        self.0.get(usize::from(slot))?.as_deref()
    }

    /// Records that a node serves the slot. Returns whether that is new.
    pub(super) fn set_owner(&mut self, slot: u16, node: ServerName) -> bool {
        let is_new = self.owner(slot) != Some(&node);
        match self.0.get_mut(usize::from(slot)) {
            Some(owner) if is_new => *owner = Some(Arc::new(node)),
            _ => return false,
        }
        true
    }

    /// Returns the nodes that serve at least one slot.
    pub(super) fn masters(&self) -> BTreeSet<&ServerName> {
        self.0.iter().flatten().map(|node| &**node).collect()
    }
}

/// Reads an address of `CLUSTER SLOTS`. The inner `None` stands for one that the node does not
/// know. Without a host, it is that of the node itself.
#[expect(clippy::option_option, reason = "the outer one says that the reply is malformed")]
fn address(parts: &[Value], asked: &ServerName) -> Option<Option<ServerName>> {
    let [host, Value::Int(port), ..] = parts else { return None };
    let port = u16::try_from(*port).ok()?;
    let host = match host {
        Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
        Value::Nil => String::new(),
        _ => return None,
    };
    Some(match host.as_str() {
        "?" => None,
        "" => Some(ServerName { host: asked.host.clone(), port }),
        _ => Some(ServerName { host, port }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(host: &str, port: u16) -> ServerName {
        ServerName { host: host.into(), port }
    }

    fn range(first: i64, last: i64, host: Value, port: i64) -> Value {
        let master = Value::Array(vec![host, Value::Int(port), Value::BulkString("id".into())]);
        Value::Array(vec![Value::Int(first), Value::Int(last), master.clone(), master])
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    #[test]
    fn slots_are_served_by_the_first_node_of_their_range() {
        let reply = Value::Array(vec![
            range(0, 99, text("a"), 1),
            range(100, 100, text(""), 2),
            range(200, 300, Value::Nil, 3),
            range(400, 500, text("?"), 4),
            range(16_000, 16_383, text("a"), 1),
        ]);
        let mut map = SlotMap::parse(&reply, &name("asked", 9)).unwrap();
        assert_eq!(map.owner(0), Some(&name("a", 1)));
        assert_eq!(map.owner(100), Some(&name("asked", 2)));
        assert_eq!(map.owner(300), Some(&name("asked", 3)));
        assert_eq!((map.owner(101), map.owner(400), map.owner(SLOTS)), (None, None, None));
        assert_eq!(map.owner(16_383), Some(&name("a", 1)));
        assert!(!map.set_owner(0, name("a", 1)));
        assert!(map.set_owner(100, name("b", 5)));
        assert_eq!(map.owner(100), Some(&name("b", 5)));
        let masters: Vec<_> = map.masters().into_iter().cloned().collect();
        assert_eq!(masters, [name("a", 1), name("asked", 3), name("b", 5)]);
    }

    #[test]
    fn malformed_reply_is_rejected() {
        let parse = |reply: Value| SlotMap::parse(&reply, &name("asked", 9));
        assert_eq!(parse(Value::Nil), None);
        for bad in [
            range(5, 4, text("a"), 1),
            range(0, 16_384, text("a"), 1),
            range(-1, 4, text("a"), 1),
            range(0, 4, text("a"), 70_000),
            range(0, 4, Value::Int(3), 1),
            Value::Array(vec![Value::Int(1)]),
            Value::Int(1),
        ] {
            assert_eq!(parse(Value::Array(vec![bad])), None);
        }
        assert_eq!(parse(Value::Array(Vec::new())), Some(SlotMap::unserved()));
    }

    #[test]
    fn number_of_nodes_is_bounded() {
        let parse = |nodes| {
            let ranges = (0..nodes).map(|at| range(at, at, text("h"), at + 1)).collect();
            SlotMap::parse(&Value::Array(ranges), &name("asked", 9))
        };
        let most = NODES_MAX as i64;
        assert_eq!(parse(most).unwrap().masters().len(), NODES_MAX);
        assert_eq!(parse(most + 1), None);
    }

    proptest! {
        #[test]
        fn any_range_is_read_without_a_panic(first: i64, last: i64, port: i64, host in ".{0,5}") {
            let reply = Value::Array(vec![range(first, last, text(&host), port)]);
            SlotMap::parse(&reply, &name("asked", 9));
        }
    }
}
