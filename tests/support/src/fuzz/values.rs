//! Random changes of server replies, as a whole or in part.

use fastrand::Rng;
use redis::Value;

use super::Input;

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
                let numbers = [
                    0,
                    1,
                    -1,
                    2,
                    -2,
                    i64::MAX,
                    i64::MIN,
                    number.wrapping_add(1),
                    number.wrapping_neg(),
                ];
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

/// A copy of the value or of a part of it, or sometimes a value of another kind.
fn part(value: &Value, dice: &mut Rng) -> Value {
    let kinds = [
        Value::Nil,
        Value::Okay,
        Value::Boolean(true),
        Value::Double(1.5),
        Value::SimpleString("PONG".into()),
    ];
    match value {
        Value::Array(values) if !values.is_empty() && dice.bool() => {
            part(&values[dice.usize(..values.len())], dice)
        }
        _ if dice.u8(..8) == 0 => kinds[dice.usize(..kinds.len())].clone(),
        value => value.clone(),
    }
}
