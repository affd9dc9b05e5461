//! `Input`: what can be changed at random, and mostly still looks like what it was.

use std::fmt::Debug;

use fastrand::Rng;
use redis::Value;

/// No input grows beyond this.
const LENGTH_MAX: usize = 4096;

/// Where numbers end, in several ways, and what separates fields.
const PIECES: [&[u8]; 24] = [
    b"0",
    b"-1",
    b"1",
    b"9007199254740991",
    b"9007199254740992",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"99999999999999999999999999",
    b"-9223372036854775808",
    b"1e3",
    b"+7",
    b" ",
    b"  ",
    b"\r\n",
    b"\n",
    b"\0",
    b"\x1b[31m",
    b"\xff",
    "\u{202e}é".as_bytes(),
    b"|",
    b"{",
    b"}",
    b"distlock:",
];

pub(super) trait Input: Clone + Debug {
    /// One change; `other` is another input to take from.
    fn change(&mut self, dice: &mut Rng, other: &Self);
}

impl Input for Vec<u8> {
    fn change(&mut self, dice: &mut Rng, other: &Vec<u8>) {
        let at = dice.usize(..=self.len());
        let end = at + dice.usize(..=(self.len() - at).min(16));
        match dice.u8(..8) {
            0 if at < self.len() => self[at] ^= 1 << dice.u8(..8),
            1 if at < self.len() => self[at] = dice.u8(..),
            2 => drop(self.drain(at..end)),
            3 => {
                let again = self[at..end].to_vec();
                self.splice(at..at, again);
            }
            4 => {
                let piece = PIECES[dice.usize(..PIECES.len())];
                self.splice(at..end, piece.iter().copied());
            }
            5 => {
                // A number, as a whole.
                let is_digit = |byte: &u8| byte.is_ascii_digit();
                if let Some(begin) = self[at..].iter().position(is_digit).map(|begin| at + begin) {
                    let length = self[begin..].iter().take_while(|byte| is_digit(byte)).count();
                    let piece = PIECES[dice.usize(..12)];
                    self.splice(begin..begin + length, piece.iter().copied());
                }
            }
            6 => {
                let from = dice.usize(..=other.len());
                let to = from + dice.usize(..=other.len() - from);
                self.splice(at..end, other[from..to].iter().copied());
            }
            _ => self.truncate(at),
        }
        self.truncate(LENGTH_MAX);
    }
}

impl Input for Value {
    fn change(&mut self, dice: &mut Rng, other: &Value) {
        match self {
            _ if dice.u8(..16) == 0 => *self = part(other, dice),
            Value::BulkString(text) => {
                let donor = match part(other, dice) {
                    Value::BulkString(text) => text,
                    _ => Vec::new(),
                };
                text.change(dice, &donor);
            }
            Value::Int(number) => {
                let numbers = [0, 1, -1, 2, -2, i64::MAX, i64::MIN, number.wrapping_add(1), number.wrapping_neg()];
                *number = numbers[dice.usize(..numbers.len())];
            }
            Value::Array(values) if !values.is_empty() && dice.u8(..4) > 0 => {
                let at = dice.usize(..values.len());
                values[at].change(dice, other);
            }
            Value::Array(values) if values.len() < 64 => {
                let at = dice.usize(..=values.len());
                match dice.u8(..3) {
                    0 => values.insert(at, part(other, dice)),
                    1 => values.truncate(at),
                    _ => values.reverse(),
                }
            }
            _ => *self = part(other, dice),
        }
    }
}

/// A value, or one that is part of it.
fn part(value: &Value, dice: &mut Rng) -> Value {
    let kinds = [Value::Nil, Value::Okay, Value::Boolean(true), Value::Double(1.5), Value::SimpleString("PONG".into())];
    match value {
        Value::Array(values) if !values.is_empty() && dice.bool() => part(&values[dice.usize(..values.len())], dice),
        _ if dice.u8(..8) == 0 => kinds[dice.usize(..kinds.len())].clone(),
        value => value.clone(),
    }
}
