//! Requests about many locks: finding their keys, then describing them. Pure.

use std::slice;

use redis::Value;

use crate::{
    backend::{
        Inspection,
        redis::{
            fields::{
                Fields, array_reply, parse_lua_integer, text_reply, write_bulk, write_command,
                write_number,
            },
            script::{Decoded, Request, Script, ScriptRef, script, write_version},
        },
    },
    core::{
        holder::Holder,
        key::LockKey,
        kind::{self, HeldBy, claim_of_member},
    },
    lock_info::LockInfo,
    sys::display::truncate_id,
};

pub(crate) static DESCRIBE: Script = script!(16, "describe.lua");

/// Number of keys that the server examines in one step of a scan. A step takes about half a
/// millisecond.
const SCAN_COUNT: &[u8] = b"250";
/// Maximum number of waiters described for one lock of a list, and for all locks of a request
/// together.
const WAITERS_PER_LOCK_MAX: u64 = 100;
const WAITERS_PER_REPLY_MAX: u64 = 1_000;
/// Maximum number of members listed of each lock.
const MEMBERS_LISTED_MAX: u64 = 1_000;
/// Maximum number of members listed of all locks of a request together; otherwise the reply could
/// exceed what a client reads.
const ALL_MEMBERS_LISTED_MAX: u64 = 10_000;

/// Returns the Redis pattern for the keys of locks whose names match `pattern`. Special characters
/// of the prefix are escaped.
pub(crate) fn key_pattern(prefix: &str, pattern: &str) -> String {
    let mut keys = String::with_capacity(prefix.len() + pattern.len());
    for letter in prefix.chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\') {
            keys.push('\\');
        }
        keys.push(letter);
    }
    keys.push_str(pattern);
    keys
}

/// One step of a scan over all keys.
pub(crate) struct Scan<'a> {
    pub(crate) cursor: &'a str,
    pub(crate) pattern: &'a str,
}

/// The keys found by one step of a scan. The same key may be found more than once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ScanReply {
    /// Cursor of the next step; `None` at the end of the scan.
    pub(crate) next_cursor: Option<String>,
    /// Keys that are valid UTF-8. Other keys are not ours.
    pub(crate) keys: Vec<String>,
}

impl Request for Scan<'_> {
    type Reply = ScanReply;

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        let Scan { cursor, pattern } = self;
        let parts: [&[u8]; 8] = [
            b"SCAN",
            cursor.as_bytes(),
            b"MATCH",
            pattern.as_bytes(),
            b"COUNT",
            SCAN_COUNT,
            b"TYPE",
            b"string",
        ];
        write_command(out, &parts);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<Decoded<ScanReply>> {
        let Value::Array(parts) = reply else { return None };
        let [Value::BulkString(cursor), Value::Array(keys)] = parts.as_slice() else { return None };
        let cursor = String::from_utf8(cursor.clone()).ok()?;
        let text = |key: &Value| match key {
            Value::BulkString(key) => String::from_utf8(key.clone()).ok(),
            _ => None,
        };
        let keys = keys.iter().filter_map(text).collect();
        Some((ScanReply { next_cursor: (cursor != "0").then_some(cursor), keys }, None))
    }
}

/// Describes these locks.
pub(crate) struct DescribeLocks<'a> {
    pub(crate) keys: &'a [LockKey],
    /// Maximum number of waiters to list, for each lock and for all locks together.
    pub(crate) waiters_per_lock_max: u64,
    pub(crate) waiters_total_max: u64,
}

/// Description of a lock that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldDescription {
    pub(crate) holder: Holder,
    /// Last fencing token; zero if unknown.
    pub(crate) token: u64,
    /// Ids of the first waiters, in queue order.
    pub(crate) waiters: Vec<String>,
    /// Limit of permits of the first waiter for permits.
    pub(crate) permit_limit: Option<u32>,
    /// The group, if one has the lock.
    pub(crate) group: Option<GroupReport>,
}

/// The members of a group. A claim of several permits is one of `members`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupReport {
    pub(crate) held_by: HeldBy,
    pub(crate) members: Vec<Holder>,
}

impl HeldDescription {
    /// What one server that decides alone says about a lock.
    pub(crate) fn into_lock_info(self, key: &LockKey) -> LockInfo {
        let HeldDescription { holder, token, waiters, permit_limit, group } = self;
        let mut lock = LockInfo::new(key.name(), holder, token, waiters, true);
        lock.set_permit_limit(permit_limit);
        if let Some(GroupReport { held_by, members }) = group {
            lock.set_group(held_by, members);
        }
        lock
    }
}

impl Request for DescribeLocks<'_> {
    type Reply = Vec<Inspection<HeldDescription>>;

    fn script(&self) -> Option<&'static Script> {
        Some(&DESCRIBE)
    }

    fn encode(&self, by: ScriptRef, nonce: u64, _: u64, out: &mut Vec<u8>) {
        DESCRIBE.write_header(by, 4 * self.keys.len(), 5, out);
        for key in self.keys {
            write_bulk(out, &[key.lock_key().as_bytes()]);
            write_bulk(out, &key.queue_key().map(str::as_bytes));
            write_bulk(out, &key.token_key().map(str::as_bytes));
            write_bulk(out, &key.members_key().map(str::as_bytes));
        }
        write_number(out, nonce);
        write_number(out, self.waiters_per_lock_max);
        write_number(out, self.waiters_total_max);
        write_number(out, MEMBERS_LISTED_MAX);
        write_number(out, ALL_MEMBERS_LISTED_MAX);
        write_version(out);
    }

    fn decode(&self, nonce: u64, reply: Value) -> Option<Decoded<Self::Reply>> {
        let (now_us, values) = array_reply(reply, nonce)?;
        let results = values
            .map(|value| self.decode_description(&value, now_us))
            .collect::<Option<Vec<_>>>()?;
        (results.len() == self.keys.len()).then_some((results, Some(now_us)))
    }
}

impl<'a> DescribeLocks<'a> {
    /// For a list of many locks.
    pub(crate) fn in_list(keys: &'a [LockKey]) -> DescribeLocks<'a> {
        let waiters_total_max = WAITERS_PER_REPLY_MAX;
        DescribeLocks { keys, waiters_per_lock_max: WAITERS_PER_LOCK_MAX, waiters_total_max }
    }

    /// For one lock, with at most this many of its waiters.
    pub(crate) fn lookup(key: &'a LockKey, waiters_max: u64) -> DescribeLocks<'a> {
        let (waiters_per_lock_max, waiters_total_max) = (waiters_max, waiters_max);
        DescribeLocks { keys: slice::from_ref(key), waiters_per_lock_max, waiters_total_max }
    }

    fn decode_description(
        &self,
        value: &Value,
        now_us: u64,
    ) -> Option<Inspection<HeldDescription>> {
        let lines = match value {
            Value::Int(0) => return Some(Inspection::Free),
            Value::Int(-1) => return Some(Inspection::WrongType),
            Value::Array(lines) => lines,
            _ => return None,
        };
        let (first, mut entries) = lines.split_first()?;
        let mut group = None;
        if let Some((Value::Array(members), waiters)) = entries.split_last() {
            (group, entries) = (Some(decode_group(members)?), waiters);
        }
        let first = text_reply(first)?;
        let token =
            parse_lua_integer(std::str::from_utf8(first.split(|byte| *byte == b' ').nth(1)?).ok()?)
                .unwrap_or(0);
        let holder = Fields::new(first).holder(now_us)?;
        if entries.len() as u64 > self.waiters_per_lock_max {
            return None;
        }
        let waiters = entries.iter().map(waiter_id).collect::<Option<_>>()?;
        let permit_limit = entries.iter().find_map(|entry| kind::permit_limit(text_reply(entry)?));
        Some(Inspection::Held(HeldDescription { holder, token, waiters, permit_limit, group }))
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

/// Returns the id in a queue entry, which has the form `claim-ms channel id`.
fn waiter_id(entry: &Value) -> Option<String> {
    let entry = String::from_utf8_lossy(text_reply(entry)?);
    let mut fields = entry.splitn(3, ' ');
    let id = fields.nth(2);
    // An entry of another form is returned as it is.
    Some(truncate_id(id.unwrap_or(&entry).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::test_util::{request_words, script_arguments};
    use proptest::prelude::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn key_pattern_escapes_the_prefix() {
        assert_eq!(key_pattern("lock:", "orders:*"), "lock:orders:*");
        assert_eq!(key_pattern("a*b?[c]\\", "*"), "a\\*b\\?\\[c\\]\\\\*");
        assert_eq!(key_pattern("", "x\\*"), "x\\*");
    }

    #[test]
    fn scan_requests_string_keys_of_the_pattern() {
        let scan = Scan { cursor: "17", pattern: "lock:*" };
        assert_eq!(
            request_words(&scan, ScriptRef::HASH).join(" "),
            "SCAN 17 MATCH lock:* COUNT 250 TYPE string"
        );
        assert!(scan.script().is_none());
    }

    #[test]
    fn describe_request_names_all_keys_of_each_lock() {
        let keys = ["a", "b"].map(|name| LockKey::new("lock:", name).unwrap());
        let request = DescribeLocks { keys: &keys, waiters_per_lock_max: 9, waiters_total_max: 15 };
        let names = keys.iter().flat_map(|key| {
            [
                key.lock_key().to_owned(),
                key.queue_key().concat(),
                key.token_key().concat(),
                key.members_key().concat(),
            ]
        });
        let arguments = script_arguments(&request, &names.collect::<Vec<_>>());
        assert_eq!(arguments, ["9", "15", "1000", "10000"]);
    }

    #[test]
    fn scan_reply_returns_next_cursor_until_the_end() {
        let scan = Scan { cursor: "0", pattern: "*" };
        let step = |cursor: &str| {
            Value::Array(vec![text(cursor), Value::Array(vec![text("a"), text("b")])])
        };
        let keys = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(
            scan.decode(0, step("17")),
            Some((ScanReply { next_cursor: Some("17".into()), keys: keys.clone() }, None))
        );
        assert_eq!(scan.decode(0, step("0")), Some((ScanReply { next_cursor: None, keys }, None)));
        let binary =
            Value::Array(vec![text("0"), Value::Array(vec![Value::BulkString(vec![0xff])])]);
        assert_eq!(scan.decode(0, binary).unwrap().0.keys, Vec::<String>::new());
        assert_eq!(scan.decode(0, Value::Okay), None);
    }

    #[test]
    fn describe_reply_lists_holder_and_waiters_in_order() {
        let keys = ["a", "b", "c"].map(|name| LockKey::new("lock:", name).unwrap());
        let request = DescribeLocks { keys: &keys, waiters_per_lock_max: 9, waiters_total_max: 9 };
        let held = Value::Array(vec![
            text("700 41 3 me and you"),
            text("10 ch w 1"),
            text("distlock:permits/5/1,10 ch w2"),
            text("odd"),
        ]);
        let reply = Value::Array(vec![text("7 50"), Value::Int(0), held, Value::Int(-1)]);
        let (results, server_us) = request.decode(7, reply.clone()).unwrap();
        assert_eq!(
            (server_us, &results[0], &results[2]),
            (Some(50), &Inspection::Free, &Inspection::WrongType)
        );
        let Inspection::Held(held_lock) = &results[1] else { panic!("{results:?}") };
        assert_eq!(
            (held_lock.holder.id(), held_lock.holder.waiters(), held_lock.token),
            ("me and you", Some(3), 41)
        );
        assert_eq!(held_lock.waiters, ["w 1", "w2", "odd"]);
        assert_eq!(held_lock.permit_limit, Some(5));
        let as_many = DescribeLocks { waiters_per_lock_max: 3, ..request };
        assert!(as_many.decode(7, reply.clone()).is_some());
        let fewer = DescribeLocks { waiters_per_lock_max: 2, ..request };
        assert_eq!(fewer.decode(7, reply.clone()), None, "more waiters than requested");
        assert_eq!(request.decode(8, reply), None, "the reply to another request");
        assert_eq!(
            request.decode(7, Value::Array(vec![text("7 50"), Value::Int(0)])),
            None,
            "fewer results than locks"
        );
    }

    #[test]
    fn members_of_a_claim_are_counted_together() {
        let keys = ["a", "b"].map(|name| LockKey::new("lock:", name).unwrap());
        let request = DescribeLocks { keys: &keys, waiters_per_lock_max: 1, waiters_total_max: 1 };
        let lines = |lines: &[&str]| Value::Array(lines.iter().map(|line| text(line)).collect());
        let decode = |group| {
            let held = Value::Array(vec![text("6 41 1 distlock:permits"), text("10 ch w"), group]);
            request.decode(7, Value::Array(vec![text("7 50"), Value::Int(0), held]))
        };
        let group = lines(&["distlock:permits 4", "5 me", "5 me#2", "5 you", "6 me#3"]);
        let (found, _) = decode(group).unwrap();
        let Inspection::Held(held) = &found[1] else { panic!("{found:?}") };
        let group = held.group.as_ref().unwrap();
        assert_eq!((&held.waiters[..], held.holder.id()), (&["w".into()][..], "distlock:permits"));
        assert_eq!(group.held_by, HeldBy::Permits { count: Some(4) });
        let count = |at: usize| match group.members[at].held_by() {
            HeldBy::Permits { count } => count,
            _ => None,
        };
        let ids: Vec<_> = group.members.iter().map(Holder::id).collect();
        assert_eq!((ids.as_slice(), count(0), count(1)), (&["me", "you"][..], Some(3), Some(1)));
        for wrong in [lines(&[]), lines(&["me 4"]), lines(&["distlock:read 1", "x me"])] {
            assert_eq!(decode(wrong), None);
        }
    }

    proptest! {
        #[test]
        fn no_reply_panics(
            head in "[0-9 ]{0,12}",
            first in "[0-9a-z -]{0,20}",
            entry in ".{0,20}",
            number: i64,
            cursor in ".{0,5}",
        ) {
            let keys = [LockKey::new("", "x").unwrap()];
            let request =
                DescribeLocks { keys: &keys, waiters_per_lock_max: 1, waiters_total_max: 1 };
            for result in [
                Value::Int(number),
                Value::Nil,
                Value::Array(vec![text(&first), text(&entry)]),
                Value::Array(vec![text("6 41 1 distlock:read"), Value::Array(vec![text(&first)])]),
                Value::Array(vec![]),
            ] {
                request.decode(7, Value::Array(vec![text(&head), result.clone()]));
                request.decode(7, Value::Array(vec![text("7 50"), result]));
            }
            Scan { cursor: "0", pattern: "*" }
                .decode(7, Value::Array(vec![text(&cursor), Value::Array(vec![text(&entry)])]));
        }
    }
}
