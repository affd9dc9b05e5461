//! How a server is asked for many locks at once: their names, then what is known about them. Pure.

use redis::Value;

use super::{
    connection::write_command,
    script::{By, Call, SURVEY, Script},
    wire::{Fields, bulk, clock, exact, line, number},
};
use crate::{holder::Holder, key::LockKey, text::shortened};

/// Keys that a server looks at in one step of a scan: it takes half a millisecond or so.
const SCAN_STEP: &[u8] = b"250";

/// A pattern of Redis for the keys of locks whose names match `pattern`: the prefix stands for itself.
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

/// One step through all keys.
pub(crate) struct Scan<'a> {
    pub(crate) cursor: &'a str,
    pub(crate) pattern: &'a str,
}

/// Where the next step begins, and the keys that this one has found. It may have found a key before.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Scanned {
    /// `None` when all have been looked at.
    pub(crate) next: Option<String>,
    /// A key that is no text is no key of ours.
    pub(crate) keys: Vec<String>,
}

impl Call for Scan<'_> {
    type Reply = Scanned;

    fn script(&self) -> Option<&'static Script> {
        None
    }

    fn encode(&self, _: By, _: u64, _: u64, out: &mut Vec<u8>) {
        let Scan { cursor, pattern } = self;
        let parts: [&[u8]; 8] =
            [b"SCAN", cursor.as_bytes(), b"MATCH", pattern.as_bytes(), b"COUNT", SCAN_STEP, b"TYPE", b"string"];
        write_command(out, &parts);
    }

    fn read(&self, _: u64, reply: Value) -> Option<Scanned> {
        let Value::Array(parts) = reply else { return None };
        let [Value::BulkString(cursor), Value::Array(keys)] = parts.as_slice() else { return None };
        let cursor = String::from_utf8(cursor.clone()).ok()?;
        let text = |key: &Value| match key {
            Value::BulkString(key) => String::from_utf8(key.clone()).ok(),
            _ => None,
        };
        Some(Scanned { next: (cursor != "0").then_some(cursor), keys: keys.iter().filter_map(text).collect() })
    }
}

/// What is known about these locks.
pub(crate) struct Survey<'a> {
    pub(crate) keys: &'a [LockKey],
    /// How many waiters to tell of each lock, and of all locks together.
    pub(crate) waiters_each: u64,
    pub(crate) waiters_total: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Surveyed {
    Free,
    WrongType,
    Held(Standing),
}

/// A lock that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) holder: Holder,
    /// The last one given; zero when it is not known.
    pub(crate) token: u64,
    /// The identifiers of the first ones in line, in order.
    pub(crate) waiters: Vec<String>,
}

impl Call for Survey<'_> {
    type Reply = (u64, Vec<Surveyed>);

    fn server_us(reply: &Self::Reply) -> Option<u64> {
        Some(reply.0)
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&SURVEY)
    }

    fn encode(&self, by: By, nonce: u64, _: u64, out: &mut Vec<u8>) {
        SURVEY.begin(by, 3 * self.keys.len(), 3, out);
        for key in self.keys {
            bulk(out, &[key.lock().as_bytes()]);
            bulk(out, &key.queue().map(str::as_bytes));
            bulk(out, &key.fence().map(str::as_bytes));
        }
        number(out, nonce);
        number(out, self.waiters_each);
        number(out, self.waiters_total);
    }

    fn read(&self, nonce: u64, reply: Value) -> Option<Self::Reply> {
        let Value::Array(values) = reply else { return None };
        let mut values = values.into_iter();
        let head = values.next()?;
        let now_us = clock(Fields::open(line(&head)?, nonce)?.0)?;
        let answers = values.map(|value| self.answer(&value, now_us)).collect::<Option<Vec<_>>>()?;
        (answers.len() == self.keys.len()).then_some((now_us, answers))
    }
}

impl Survey<'_> {
    fn answer(&self, value: &Value, now_us: u64) -> Option<Surveyed> {
        let lines = match value {
            Value::Int(0) => return Some(Surveyed::Free),
            Value::Int(-1) => return Some(Surveyed::WrongType),
            Value::Array(lines) => lines,
            _ => return None,
        };
        let (first, entries) = lines.split_first()?;
        let first = line(first)?;
        let token = exact(std::str::from_utf8(first.split(|byte| *byte == b' ').nth(1)?).ok()?).unwrap_or(0);
        let holder = Fields::of(first).holder(now_us)?;
        if entries.len() as u64 > self.waiters_each {
            return None;
        }
        let waiters = entries.iter().map(waiter).collect::<Option<_>>()?;
        Some(Surveyed::Held(Standing { holder, token, waiters }))
    }
}

/// The identifier in an entry of the line: `claim-ms channel identifier`.
fn waiter(entry: &Value) -> Option<String> {
    let entry = String::from_utf8_lossy(line(entry)?);
    let mut fields = entry.splitn(3, ' ');
    let id = fields.nth(2);
    // What is not ours is told as it is.
    Some(shortened(id.unwrap_or(&entry).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::{
        super::asked::{asked, words},
        *,
    };
    use proptest::prelude::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn the_prefix_is_no_pattern() {
        assert_eq!(key_pattern("lock:", "orders:*"), "lock:orders:*");
        assert_eq!(key_pattern("a*b?[c]\\", "*"), "a\\*b\\?\\[c\\]\\\\*");
        assert_eq!(key_pattern("", "x\\*"), "x\\*");
    }

    #[test]
    fn a_scan_asks_for_keys_that_may_be_locks() {
        let scan = Scan { cursor: "17", pattern: "lock:*" };
        assert_eq!(words(&scan, By::Hash).join(" "), "SCAN 17 MATCH lock:* COUNT 250 TYPE string");
        assert!(scan.script().is_none());
    }

    #[test]
    fn a_survey_asks_for_all_that_belongs_to_each_lock() {
        let keys = ["a", "b"].map(|name| LockKey::new("lock:", name).unwrap());
        let survey = Survey { keys: &keys, waiters_each: 9, waiters_total: 15 };
        let names = keys.iter().flat_map(|key| [key.lock().to_owned(), key.queue().concat(), key.fence().concat()]);
        assert_eq!(asked(&survey, &names.collect::<Vec<_>>()), ["9", "15"]);
    }

    #[test]
    fn steps_of_a_scan_lead_to_the_next_until_the_last() {
        let scan = Scan { cursor: "0", pattern: "*" };
        let step = |cursor: &str| Value::Array(vec![text(cursor), Value::Array(vec![text("a"), text("b")])]);
        let keys = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(scan.read(0, step("17")), Some(Scanned { next: Some("17".into()), keys: keys.clone() }));
        assert_eq!(scan.read(0, step("0")), Some(Scanned { next: None, keys }));
        let binary = Value::Array(vec![text("0"), Value::Array(vec![Value::BulkString(vec![0xff])])]);
        assert_eq!(scan.read(0, binary).unwrap().keys, Vec::<String>::new());
        assert_eq!(scan.read(0, Value::Okay), None);
    }

    #[test]
    fn holders_and_waiters_come_back_in_order() {
        let keys = ["a", "b", "c"].map(|name| LockKey::new("lock:", name).unwrap());
        let survey = Survey { keys: &keys, waiters_each: 9, waiters_total: 9 };
        let held = Value::Array(vec![text("700 41 3 me and you"), text("10 ch w 1"), text("10 ch w2"), text("odd")]);
        let reply = Value::Array(vec![text("7 50"), Value::Int(0), held, Value::Int(-1)]);
        let (now_us, answers) = survey.read(7, reply.clone()).unwrap();
        assert_eq!((now_us, &answers[0], &answers[2]), (50, &Surveyed::Free, &Surveyed::WrongType));
        assert_eq!(Survey::server_us(&(now_us, answers.clone())), Some(50));
        let Surveyed::Held(standing) = &answers[1] else { panic!("{answers:?}") };
        assert_eq!((standing.holder.id(), standing.holder.waiters(), standing.token), ("me and you", Some(3), 41));
        assert_eq!(standing.waiters, ["w 1", "w2", "odd"]);
        let as_many = Survey { waiters_each: 3, ..survey };
        assert!(as_many.read(7, reply.clone()).is_some());
        let fewer = Survey { waiters_each: 2, ..survey };
        assert_eq!(fewer.read(7, reply.clone()), None, "more waiters than were asked for");
        assert_eq!(survey.read(8, reply), None, "an answer to another question");
        assert_eq!(survey.read(7, Value::Array(vec![text("7 50"), Value::Int(0)])), None, "too few answers");
    }

    proptest! {
        #[test]
        fn no_reply_panics(
            head in "[0-9 ]{0,12}", first in "[0-9a-z -]{0,20}", entry in ".{0,20}", number: i64, cursor in ".{0,5}",
        ) {
            let keys = [LockKey::new("", "x").unwrap()];
            let survey = Survey { keys: &keys, waiters_each: 1, waiters_total: 1 };
            for answer in [Value::Int(number), Value::Nil, Value::Array(vec![text(&first), text(&entry)]), Value::Array(vec![])] {
                survey.read(7, Value::Array(vec![text(&head), answer.clone()]));
                survey.read(7, Value::Array(vec![text("7 50"), answer]));
            }
            Scan { cursor: "0", pattern: "*" }.read(7, Value::Array(vec![text(&cursor), Value::Array(vec![text(&entry)])]));
        }
    }
}
