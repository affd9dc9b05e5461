//! `distlock show`: shows one lock.

use std::{
    fmt::Write as _,
    time::{Duration, UNIX_EPOCH},
};

use distlock::{HeldBy, Holder, LockInfo, QueuedWaiter};

use crate::{
    args::{Servers, Show},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    format::{self, Table},
    holders, json, output,
};

pub(crate) fn run(servers: &Servers, options: &Show) -> Outcome {
    let lock = connect::manager(servers)?.lock_info(&options.name)?;
    if options.json {
        output::print_json(json::ShownJson::from_info(lock.as_ref()))?;
    }
    match lock {
        None => Err(Failure::new(
            Exit::No,
            format!("lock {} is not held", format::quote(&options.name)),
        )),
        Some(_) if options.json => Ok(Exit::Success),
        Some(lock) => {
            output::print(&format_lock(&lock))?;
            Ok(Exit::Success)
        }
    }
}

pub(crate) fn format_lock(lock: &LockInfo) -> String {
    let holder = lock.holder();
    let mut facts = Table::new(&["lock", &format::escape(lock.name())]);
    let mut fact = |what: &str, is: String| facts.add_row(vec![what.to_owned(), is]);
    let doubt = if lock.is_certain() { "" } else { " (not certain, see the nodes)" };
    if lock.members().is_empty() {
        fact("kind", holders::long_kind(lock));
        fact("holder", format::holder_name(holder) + doubt);
        if let Some(tid) = holder.tid() {
            fact("thread", tid.to_string());
        }
        fact("id", format::escape(holder.id()));
    } else {
        fact("kind", holders::long_kind(lock) + doubt);
    }
    if let Some(held) = holder.held_for() {
        let since = holder
            .since()
            .and_then(format::rfc3339)
            .map_or_else(String::new, |since| format!(", since {since}"));
        fact("held", format::duration(held) + &since);
    }
    match holder.ttl_left() {
        Some(left) if holders::is_kept(lock) => fact("kept", kept_until(holder, left)),
        Some(left) => fact("left", format::duration(left) + " unless renewed"),
        None if holder.never_expires() => fact("left", "no expiry".into()),
        None => {}
    }
    if let Some(token) = lock.fencing_token() {
        fact("token", token.to_string());
    }
    fact("waiting", lock.waiting().to_string());
    let mut page = facts.to_string();
    // Writing to a string cannot fail.
    if !lock.members().is_empty() {
        let _ = write!(page, "\n{}", members_table(lock));
    }
    if !lock.waiters().is_empty() {
        let mut queue = Table::new(&[">", "WAITER", "REQUESTED", "ID"]);
        for (position, waiter) in lock.waiters().iter().enumerate() {
            queue.add_row(waiter_row(position + 1, waiter));
        }
        let _ = write!(page, "\n{queue}");
        let listed = u64::try_from(lock.waiters().len()).unwrap_or(u64::MAX);
        if lock.waiting() > listed {
            let _ = writeln!(page, "and {} more", lock.waiting() - listed);
        }
    }
    if !holder.nodes().is_empty() {
        let mut nodes = Table::new(&["NODE", "REPLY"]);
        for reply in holder.nodes() {
            nodes.add_row(vec![format::escape(&reply.node), format::escape(&reply.message)]);
        }
        let _ = write!(page, "\n{nodes}");
    }
    page
}

/// Until when a lock stays taken that its holder has released.
fn kept_until(holder: &Holder, left: Duration) -> String {
    let until = clock::wall_clock().checked_add(left).and_then(format::rfc3339);
    let until = until.map_or_else(String::new, |until| format!("until {until}, "));
    let others = if holder.held_by() == HeldBy::One { "its holder has" } else { "all have" };
    format!("{until}for another {}; {others} released it", format::duration(left))
}

/// The readers, or the holders of permits.
fn members_table(lock: &LockInfo) -> String {
    let mut table = Table::new(&["HOLDER", ">PERMITS", ">LEFT", "ID"]);
    for member in lock.members() {
        table.add_row(vec![
            format::holder_name(member),
            holders::permits(member).map_or_else(|| "-".into(), |permits| permits.to_string()),
            holders::time_left(member, member.is_kept()),
            format::escape(member.id()),
        ]);
    }
    let mut text = table.to_string();
    let listed: u64 = lock.members().iter().filter_map(|one| holders::count(one.held_by())).sum();
    let more = holders::count(lock.holder().held_by()).unwrap_or(0).saturating_sub(listed);
    if more > 0 {
        let _ = writeln!(text, "and {more} more");
    }
    text
}

fn waiter_row(position: usize, waiter: &QueuedWaiter) -> Vec<String> {
    let (holder, requested_at) = match waiter.lock_id() {
        Some(id) => {
            let time = UNIX_EPOCH.checked_add(Duration::from_millis(id.asked_at_ms()));
            let time = time.and_then(format::rfc3339);
            (
                format!("{}/{}", format::escape(id.host()), id.pid()),
                time.unwrap_or_else(|| "-".into()),
            )
        }
        None => ("-".into(), "-".into()),
    };
    vec![position.to_string(), holder, requested_at, format::escape(waiter.id())]
}
