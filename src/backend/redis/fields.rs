//! The fields of requests, replies and messages: how they are written and read. Pure.

use std::{str::FromStr, vec};

use redis::Value;

use crate::core::{claim::GrantNotice, holder::Holder};

/// Exclusive maximum of tokens: below it, Lua numbers represent every integer exactly.
const LUA_INTEGER_MAX: u64 = 1 << 53;

/// Exclusive maximum of server clocks. Tokens start at the latest clock of all nodes and must be
/// able to rise. This leaves the last year before 2^53 us, which is room for a million tokens a
/// second.
pub(crate) const CLOCK_MAX: u64 = LUA_INTEGER_MAX - 365 * 86_400_000_000;

/// Parses a time on a server's clock, in microseconds.
pub(crate) fn parse_clock(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|micros| *micros < CLOCK_MAX)
}

/// Parses the reply to `TIME`, as microseconds.
pub(crate) fn parse_time(reply: &Value) -> Option<u64> {
    let Value::Array(parts) = reply else { return None };
    let [seconds, micros] = parts.as_slice() else { return None };
    let number = |value: &Value| redis::from_redis_value_ref::<u64>(value).ok();
    let server_us = number(seconds)?.checked_mul(1_000_000)?.checked_add(number(micros)?)?;
    (server_us < CLOCK_MAX).then_some(server_us)
}

/// Parses an integer that Lua represents exactly.
pub(crate) fn parse_lua_integer(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|number| *number < LUA_INTEGER_MAX)
}

/// Whether the bytes begin like a TLS record. A TLS server answers a plain request with an alert
/// record. No RESP reply begins like that.
pub(crate) fn is_tls(bytes: &[u8]) -> bool {
    matches!(bytes, [0x14..=0x17, 3, ..])
}

/// Whether no RESP reply begins with these bytes. The greeting of a MySQL server begins with three
/// bytes for its length, of which the second is zero.
pub(crate) fn is_foreign(bytes: &[u8]) -> bool {
    const TYPES: &[u8] = b"+-:$*_,#!=(%~>|";
    match bytes {
        [] => false,
        [first, rest @ ..] => !TYPES.contains(first) || rest.first() == Some(&0),
    }
}

pub(crate) fn write_array(out: &mut Vec<u8>, length: usize) {
    write_length(out, b'*', length);
}

/// Appends a command.
pub(crate) fn write_command(out: &mut Vec<u8>, parts: &[&[u8]]) {
    write_array(out, parts.len());
    for part in parts {
        write_bulk(out, &[part]);
    }
}

/// Appends one bulk string, given in pieces.
#[inline]
pub(crate) fn write_bulk(out: &mut Vec<u8>, pieces: &[&[u8]]) {
    write_length(out, b'$', pieces.iter().map(|piece| piece.len()).sum());
    for piece in pieces {
        out.extend_from_slice(piece);
    }
    out.extend_from_slice(b"\r\n");
}

fn write_length(out: &mut Vec<u8>, kind: u8, count: usize) {
    // Fast path: most lengths are short, and a request has a dozen of them.
    match u8::try_from(count) {
        Ok(count @ 0..10) => out.extend_from_slice(&[kind, b'0' + count, b'\r', b'\n']),
        Ok(count @ 10..100) => {
            out.extend_from_slice(&[kind, b'0' + count / 10, b'0' + count % 10, b'\r', b'\n'])
        }
        _ => {
            out.push(kind);
            out.extend_from_slice(itoa::Buffer::new().format(count).as_bytes());
            out.extend_from_slice(b"\r\n");
        }
    }
}

pub(crate) fn write_number(out: &mut Vec<u8>, number: u64) {
    write_bulk(out, &[itoa::Buffer::new().format(number).as_bytes()]);
}

/// Appends a time on the server's clock, with the number of digits that the scripts compare.
pub(crate) fn write_micros(out: &mut Vec<u8>, micros: u64) {
    let mut digits = itoa::Buffer::new();
    let digits = digits.format(micros.min(9_999_999_999_999_999)).as_bytes();
    write_bulk(out, &[&b"0000000000000000"[digits.len()..], digits]);
}

/// Returns a reply that is a single string. It may end in bytes that are not UTF-8.
pub(crate) fn text_reply(reply: &Value) -> Option<&[u8]> {
    match reply {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    }
}

/// Checks the nonce of a reply that is an array, `{'nonce now', element, ...}`. Returns the time on
/// the server's clock and the elements.
pub(crate) fn array_reply(reply: Value, nonce: u64) -> Option<(u64, vec::IntoIter<Value>)> {
    let Value::Array(values) = reply else { return None };
    let mut values = values.into_iter();
    let head = values.next()?;
    let now_us = parse_clock(Fields::check_nonce(text_reply(&head)?, nonce)?.0)?;
    Some((now_us, values))
}

/// The fields of a reply, read one after another.
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Starts at the first field, for a string without a nonce. The reply that contains the string
    /// has one.
    pub(crate) fn new(line: &'a [u8]) -> Fields<'a> {
        Fields(line)
    }

    /// Checks the nonce. Returns the tag and the remaining fields.
    pub(crate) fn check_nonce(line: &'a [u8], nonce: u64) -> Option<(&'a str, Fields<'a>)> {
        let mut fields = Fields(line);
        (fields.number::<u64>()? == nonce).then(|| (fields.next(), fields))
    }

    /// Returns the next field; empty if there is none, or if it is not UTF-8.
    fn next(&mut self) -> &'a str {
        let end = self.0.iter().position(|byte| *byte == b' ').unwrap_or(self.0.len());
        let (field, rest) = self.0.split_at(end);
        self.0 = rest.get(1..).unwrap_or_default();
        std::str::from_utf8(field).unwrap_or_default()
    }

    pub(crate) fn number<N: FromStr>(&mut self) -> Option<N> {
        self.next().parse().ok()
    }

    /// Reads an integer that Lua represents exactly.
    pub(crate) fn lua_integer(&mut self) -> Option<u64> {
        parse_lua_integer(self.next())
    }

    /// Reads a time on the server's clock.
    pub(crate) fn clock(&mut self) -> Option<u64> {
        parse_clock(self.next())
    }

    /// Returns the remaining bytes.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// Reads `pttl token waiters holder`.
    pub(crate) fn holder(&mut self, now_us: u64) -> Option<Holder> {
        let pttl_ms = self.number()?;
        // Report the holder even if the token key contains no valid token.
        let token = self.lua_integer().unwrap_or(0);
        let waiters = self.number()?;
        Some(Holder::from_report(self.rest(), pttl_ms, token, waiters, now_us))
    }
}

/// A value received on the subscription of a manager.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PubSubMessage<'a> {
    /// The server has given the lock to the waiter with this id.
    Grant(&'a str, GrantNotice),
    /// A message that is not a valid grant.
    Invalid,
    /// Not a message, for example the reply to a command.
    NotAMessage,
}

impl<'a> PubSubMessage<'a> {
    pub(crate) fn parse(message: &'a Value) -> PubSubMessage<'a> {
        let Value::Array(parts) = message else { return PubSubMessage::NotAMessage };
        match parts.as_slice() {
            [Value::BulkString(kind), _, Value::BulkString(payload)]
                if kind == b"message" || kind == b"smessage" =>
            {
                parse_grant(payload)
                    .map_or(PubSubMessage::Invalid, |(id, notice)| PubSubMessage::Grant(id, notice))
            }
            _ => PubSubMessage::NotAMessage,
        }
    }
}

/// Reads a message that grants the lock to a waiter: `token granted_at px id`. Returns its id too.
pub(crate) fn parse_grant(payload: &[u8]) -> Option<(&str, GrantNotice)> {
    let mut fields = std::str::from_utf8(payload).ok()?.splitn(4, ' ');
    let mut whole = || parse_lua_integer(fields.next()?).filter(|number| *number > 0);
    let (token, granted_at_us, px_ms) = (whole()?, whole()?, whole()?);
    Some((fields.next()?, GrantNotice { token, granted_at_us, px_ms, server: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Fault: N39
    #[test]
    fn time_reply_is_seconds_and_microseconds() {
        let text = |text: &str| Value::BulkString(text.into());
        let read = |parts: Vec<Value>| parse_time(&Value::Array(parts));
        assert_eq!(read(vec![text("1700000000"), text("42")]), Some(1_700_000_000_000_042));
        for wrong in [
            vec![],
            vec![text("1")],
            vec![text("1"), text("x")],
            vec![text("18446744073709551615"), text("0")],
        ] {
            assert_eq!(read(wrong), None);
        }
        // The last microsecond that leaves enough room for tokens, and the next one.
        assert!(read(vec![text("8975663254"), text("740991")]).is_some());
        assert_eq!(read(vec![text("8975663254"), text("740992")]), None);
        assert_eq!(parse_time(&Value::Okay), None);
    }

    #[test]
    fn is_foreign_accepts_other_protocols_but_no_reply() {
        for begin in [
            &b"HTTP/1.1 400 Bad Request"[..],
            b"\x5b\0\0\0\x0a5.5.5-10.11",
            b"$\0\0\0\x0a8.4",
            b"SSH-2.0",
        ] {
            assert!(is_foreign(begin), "{begin:?}");
        }
        for reply in [&b""[..], b"+", b"-ERR", b":1", b"$-1", b"*2\r\n", b"_\r\n", b"|1", b">2"] {
            assert!(!is_foreign(reply), "{reply:?}");
        }
    }

    #[test]
    fn is_tls_accepts_records_but_no_reply() {
        // An alert, the start of a handshake, and data.
        for record in [
            b"\x15\x03\x01\x00\x02\x02\x46",
            b"\x16\x03\x03\x00\x7a\x02\x00",
            b"\x17\x03\x03\x00\x02\x01\x00",
        ] {
            assert!(is_tls(record));
        }
        for reply in [
            &b""[..],
            b"+OK",
            b"-ERR",
            b":1",
            b"$3",
            b"*2",
            b"%1",
            b">3",
            b"\x15",
            b"\x15\x02",
            b"\x13\x03",
            b"\x18\x03",
        ] {
            assert!(!is_tls(reply), "{reply:?}");
        }
    }

    #[test]
    fn grant_message_is_parsed_or_rejected() {
        let notice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7, server: 0 };
        assert_eq!(parse_grant(b"5 6 7 host|x y"), Some(("host|x y", notice)));
        for bad in
            [&b""[..], b"5 6 7", b"0 6 7 x", b"5 -6 7 x", b"9007199254740992 6 7 x", b"5 6 7 \xff"]
        {
            assert_eq!(parse_grant(bad), None);
        }
    }

    #[test]
    fn bulk_strings_carry_their_length() {
        for length in (0..=120).chain([999, 1_000, 70_000]) {
            let (text, mut out) = ("x".repeat(length), Vec::new());
            write_array(&mut out, 1);
            write_bulk(&mut out, &[&text.as_bytes()[..length / 3], &text.as_bytes()[length / 3..]]);
            assert_eq!(out, format!("*1\r\n${length}\r\n{text}\r\n").into_bytes());
        }
    }

    #[test]
    fn only_pubsub_messages_are_grants() {
        let message = |kind: &str, payload: &str| {
            Value::Array(
                [kind, "channel", payload].map(|text| Value::BulkString(text.into())).into(),
            )
        };
        let notice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7, server: 0 };
        assert_eq!(
            PubSubMessage::parse(&message("message", "5 6 7 me")),
            PubSubMessage::Grant("me", notice)
        );
        assert_eq!(PubSubMessage::parse(&message("message", "hello")), PubSubMessage::Invalid);
        assert_eq!(
            PubSubMessage::parse(&message("subscribe", "5 6 7 me")),
            PubSubMessage::NotAMessage
        );
        assert_eq!(PubSubMessage::parse(&Value::Okay), PubSubMessage::NotAMessage);
    }

    proptest! {
        #[test]
        fn numbers_are_bulk_strings(n: u64) {
            let mut out = Vec::new();
            write_number(&mut out, n);
            prop_assert_eq!(
                redis::parse_redis_value(&out).unwrap(),
                Value::BulkString(n.to_string().into_bytes())
            );
        }
    }
}
