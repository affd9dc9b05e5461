//! Reads the holders and waiters of locks, without waiting for a row.

use std::collections::BTreeMap;

use super::{
    connection::Connection,
    outcome::{Rows, bytes, number, rows},
    sql::{Table, id_in, list_waiting, waiting_for},
};
use crate::{
    backend::error::NodeError,
    core::{holder::Holder, id::LockId, key::LockKey},
    lock_info::LockInfo,
    sys::clock::Moment,
};

/// Maximum number of waiters that are named for a lock.
const WAITERS_MAX: usize = 100;

/// Returns the holder of a lock. Runs the statements `before` first, in the same exchange.
pub(super) fn holder(
    table: &Table,
    connection: &mut Connection,
    before: &str,
    name: &str,
    deadline: Moment,
) -> Result<Option<Holder>, NodeError> {
    let statement = [before, &table.inspect(name)].concat();
    let found = rows(connection.query(&statement, deadline)?)?;
    Ok(holder_in(&found, 0, None))
}

/// Returns the connection that holds a lock for this id.
pub(super) fn connection_of(
    table: &Table,
    connection: &mut Connection,
    name: &str,
    id: &[u8],
    deadline: Moment,
) -> Result<Result<u64, Option<Holder>>, NodeError> {
    let found = rows(connection.query(&table.inspect(name), deadline)?)?;
    Ok(match number(&found, 0, 3) {
        Some(number) if bytes(&found, 0, 2).map(id_in) == Some(id) => Ok(number),
        _ => Err(holder_in(&found, 0, None)),
    })
}

fn holder_in(found: &Rows, row: usize, waiters: Option<u64>) -> Option<Holder> {
    let id = id_in(bytes(found, row, 2)?);
    let (token, now_us) = (number(found, row, 1)?, number(found, row, 4)?);
    Some(Holder::from_row(id, token, waiters, now_us))
}

/// Describes one lock.
pub(super) fn lookup(
    table: &Table,
    connection: &mut Connection,
    prefix: &str,
    key: &LockKey,
    deadline: Moment,
) -> Result<Option<LockInfo>, NodeError> {
    let statement = table.inspect(key.lock_key());
    let found = describe(connection, &statement, prefix, |_| true, deadline)?;
    Ok(found.into_iter().next())
}

/// Describes the locks whose rows a statement returns, and whose names match, by name.
pub(super) fn describe(
    connection: &mut Connection,
    statement: &str,
    prefix: &str,
    matches: impl Fn(&str) -> bool,
    deadline: Moment,
) -> Result<Vec<LockInfo>, NodeError> {
    let held = rows(connection.query(statement, deadline)?)?;
    let mut waiting = waiters(&rows(connection.query(&list_waiting(), deadline)?)?);
    let mut found = Vec::new();
    for row in 0..held.len() {
        let name = bytes(&held, row, 0).and_then(|name| str::from_utf8(name).ok());
        let Some(name) = name.and_then(|name| name.strip_prefix(prefix)) else { continue };
        if !matches(name) {
            continue;
        }
        let key = [prefix, name].concat();
        let mut waiters = waiting.remove(key.as_bytes()).unwrap_or_default();
        let count = u64::try_from(waiters.len()).unwrap_or(u64::MAX);
        let Some(holder) = holder_in(&held, row, Some(count)) else { continue };
        let token = holder.token();
        waiters.truncate(WAITERS_MAX);
        found.push(LockInfo::new(name, holder, token, waiters, true));
    }
    found.sort_by(|one, other| one.name().cmp(other.name()));
    Ok(found)
}

/// The waiters of each lock, those who began first at the front.
fn waiters(listed: &Rows) -> BTreeMap<Vec<u8>, Vec<String>> {
    let mut waiting: BTreeMap<Vec<u8>, Vec<String>> = BTreeMap::new();
    for row in 0..listed.len() {
        if let Some((name, id)) = bytes(listed, row, 1).and_then(waiting_for) {
            waiting.entry(name).or_default().push(String::from_utf8_lossy(&id).into_owned());
        }
    }
    let began = |id: &String| id.parse::<LockId>().ok().map(|id| id.asked_at_ms());
    waiting.values_mut().for_each(|ids| ids.sort_by_key(began));
    waiting
}
