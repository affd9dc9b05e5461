//! `distlock show`: shows one lock.

use std::{
    fmt::Write as _,
    time::{Duration, UNIX_EPOCH},
};

use distlock::{LockInfo, QueuedWaiter};

use crate::{
    args::{Servers, Show},
    connect,
    exit::{Exit, Failure, Outcome},
    format::{self, Table},
    json, output,
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

fn format_lock(lock: &LockInfo) -> String {
    let holder = lock.holder();
    let mut facts = Table::new(&["lock", &format::escape(lock.name())]);
    let mut fact = |what: &str, is: String| facts.add_row(vec![what.to_owned(), is]);
    fact(
        "holder",
        format::holder_name(holder)
            + if lock.is_certain() { "" } else { " (not certain, see the nodes)" },
    );
    if let Some(tid) = holder.tid() {
        fact("thread", tid.to_string());
    }
    fact("id", format::escape(holder.id()));
    if let Some(held) = holder.held_for() {
        let since = holder
            .since()
            .and_then(format::rfc3339)
            .map_or_else(String::new, |since| format!(", since {since}"));
        fact("held", format::duration(held) + &since);
    }
    match holder.ttl_left() {
        Some(left) => fact("left", format::duration(left) + " unless renewed"),
        None if holder.never_expires() => fact("left", "no expiry".into()),
        None => {}
    }
    if let Some(token) = lock.fencing_token() {
        fact("token", token.to_string());
    }
    fact("waiting", lock.waiting().to_string());
    let mut page = facts.to_string();
    if !lock.waiters().is_empty() {
        let mut queue = Table::new(&[">", "WAITER", "REQUESTED", "ID"]);
        for (position, waiter) in lock.waiters().iter().enumerate() {
            queue.add_row(waiter_row(position + 1, waiter));
        }
        // Writing to a string cannot fail.
        let _ = write!(page, "\n{queue}");
        let listed = u64::try_from(lock.waiters().len()).unwrap_or(u64::MAX);
        if lock.waiting() > listed {
            let _ = writeln!(page, "and {} more", lock.waiting() - listed);
        }
    }
    if !holder.nodes().is_empty() {
        let mut nodes = Table::new(&["NODE", "REPLY"]);
        for answer in holder.nodes() {
            nodes.add_row(vec![format::escape(&answer.node), format::escape(&answer.message)]);
        }
        let _ = write!(page, "\n{nodes}");
    }
    page
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
