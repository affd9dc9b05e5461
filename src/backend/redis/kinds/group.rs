//! Groups: read locks and permits, which several clients hold together, and write locks, which one
//! client holds alone. A write lock is on the server what a mutex is; but its scripts know groups,
//! and grant the lock to them. The scripts, and the requests to a server. Pure.

use redis::Value;

use super::mutex::write_lock_keys;
use crate::{
    backend::redis::{
        fields::{Fields, array_reply, text_reply, write_bulk, write_number},
        script::{Request, Script, ScriptRef, script, write_version},
    },
    core::{
        holder::Holder,
        key::LockKey,
        kind::{HeldBy, claim_of_member},
    },
};

pub(crate) static ACQUIRE: Script = script!(
    32,
    "shared.lua",
    "token.lua",
    "group/acquire_alone.lua",
    "notify.lua",
    "group/members.lua",
    "group/grant.lua",
    "group/acquire.lua",
    "report.lua"
);
pub(crate) static RELEASE: Script = script!(
    64,
    "shared.lua",
    "free.lua",
    "group/release_alone.lua",
    "token.lua",
    "notify.lua",
    "group/members.lua",
    "group/grant.lua",
    "group/release.lua",
    "report.lua"
);
pub(crate) static LIST: Script = script!(512, "group/list.lua");

/// Maximum number of members that a list contains of each lock.
const MEMBERS_LISTED_MAX: u64 = 1_000;
/// Maximum number of members that a list contains of all locks together; otherwise the reply could
/// exceed what a client reads.
const ALL_MEMBERS_LISTED_MAX: u64 = 10_000;

pub(super) fn write_keys(out: &mut Vec<u8>, key: &LockKey) {
    write_lock_keys(out, key);
    write_bulk(out, &key.fence_key().map(str::as_bytes));
    write_bulk(out, &key.members_key().map(str::as_bytes));
}

/// Lists the members of these groups.
pub(crate) struct ListMembers<'a>(pub(crate) &'a [&'a LockKey]);

/// The members of one group. A claim of several permits is one of `members`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupReport {
    pub(crate) held_by: HeldBy,
    pub(crate) members: Vec<Holder>,
}

impl Request for ListMembers<'_> {
    type Reply = Vec<Option<GroupReport>>;

    fn script(&self) -> Option<&'static Script> {
        Some(&LIST)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, _: u64, out: &mut Vec<u8>) {
        LIST.write_header(by, 2 * self.0.len(), 3, out);
        for key in self.0 {
            write_bulk(out, &[key.lock_key().as_bytes()]);
            write_bulk(out, &key.members_key().map(str::as_bytes));
        }
        write_number(out, nonce);
        write_number(out, MEMBERS_LISTED_MAX);
        write_number(out, ALL_MEMBERS_LISTED_MAX);
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Self::Reply> {
        let (_, values) = array_reply(reply, nonce)?;
        let groups = values.map(|value| match value {
            Value::Int(0) => Some(None),
            Value::Array(lines) => decode_group(&lines).map(Some),
            _ => None,
        });
        let groups = groups.collect::<Option<Vec<_>>>()?;
        (groups.len() == self.0.len()).then_some(groups)
    }
}

fn decode_group(lines: &[Value]) -> Option<GroupReport> {
    let (first, lines) = lines.split_first()?;
    let (held_by, _) = HeldBy::split(text_reply(first)?);
    if !held_by.is_group() || lines.len() as u64 > MEMBERS_LISTED_MAX {
        return None;
    }
    let mut members: Vec<(&[u8], i64, u64)> = Vec::new();
    for line in lines {
        let mut fields = Fields::new(text_reply(line)?);
        let left_ms = fields.number()?;
        let id = claim_of_member(fields.rest());
        // All members of a claim have the same expiry, so they are close together.
        match members.iter_mut().rev().find(|(other, ..)| *other == id) {
            Some((_, _, count)) => *count += 1,
            None => members.push((id, left_ms, 1)),
        }
    }
    let as_holder = |(id, left_ms, count): (&[u8], i64, u64)| {
        let held_by = match held_by {
            HeldBy::Permits { .. } => HeldBy::Permits { count: Some(count) },
            HeldBy::Readers { .. } | HeldBy::One => HeldBy::Readers { count: Some(1) },
        };
        Holder::from_member(id, left_ms, held_by)
    };
    Some(GroupReport { held_by, members: members.into_iter().map(as_holder).collect() })
}

#[cfg(test)]
mod tests;
