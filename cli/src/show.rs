//! `distlock show`: everything about one lock.

use std::{
    fmt::Write as _,
    time::{Duration, UNIX_EPOCH},
};

use distlock::{LockInfo, QueuedWaiter};

use crate::{
    args::{Servers, Show},
    connect,
    exit::{Exit, Failure, Outcome},
    json, output,
    text::{self, Table},
};

pub(crate) fn run(servers: &Servers, options: &Show) -> Outcome {
    let lock = connect::manager(servers)?.lock_info(&options.name)?;
    if options.json {
        output::print_json(&lock.as_ref().map(json::Lock::of))?;
    }
    match lock {
        None => Err(Failure::new(Exit::No, format!("nobody holds lock {}", text::quoted(&options.name)))),
        Some(_) if options.json => Ok(Exit::Fine),
        Some(lock) => {
            output::print(&page(&lock))?;
            Ok(Exit::Fine)
        }
    }
}

fn page(lock: &LockInfo) -> String {
    let holder = lock.holder();
    let mut facts = Table::new(&["lock", &text::clean(lock.name())]);
    let mut fact = |what: &str, is: String| facts.row(vec![what.to_owned(), is]);
    fact("holder", text::who(holder) + if lock.is_certain() { "" } else { " (not certain: see the nodes)" });
    if let Some(tid) = holder.tid() {
        fact("thread", tid.to_string());
    }
    fact("id", text::clean(holder.id()));
    if let Some(held) = holder.held_for() {
        let since = holder.since().and_then(text::moment).map_or_else(String::new, |since| format!(", since {since}"));
        fact("held", text::span(held) + &since);
    }
    fact("left", holder.ttl_left().map_or_else(|| "no expiry".into(), |left| text::span(left) + " unless renewed"));
    if let Some(token) = lock.fencing_token() {
        fact("token", token.to_string());
    }
    fact("waiting", lock.waiting().to_string());
    let mut page = facts.to_string();
    if !lock.waiters().is_empty() {
        let mut line = Table::new(&[">", "WAITER", "ASKED", "ID"]);
        for (place, waiter) in lock.waiters().iter().enumerate() {
            line.row(row(place + 1, waiter));
        }
        // Writing to a string cannot fail.
        let _ = write!(page, "\n{line}");
        let told = u64::try_from(lock.waiters().len()).unwrap_or(u64::MAX);
        if lock.waiting() > told {
            let _ = writeln!(page, "and {} more", lock.waiting() - told);
        }
    }
    if !holder.nodes().is_empty() {
        let mut nodes = Table::new(&["NODE", "SAYS"]);
        for answer in holder.nodes() {
            nodes.row(vec![text::clean(&answer.node), text::clean(&answer.message)]);
        }
        let _ = write!(page, "\n{nodes}");
    }
    page
}

fn row(place: usize, waiter: &QueuedWaiter) -> Vec<String> {
    let (who, asked) = match waiter.lock_id() {
        Some(id) => {
            let asked = UNIX_EPOCH.checked_add(Duration::from_millis(id.asked_at_ms()));
            let asked = asked.and_then(text::moment);
            (format!("{}/{}", text::clean(id.host()), id.pid()), asked.unwrap_or_else(|| "-".into()))
        }
        None => ("-".into(), "-".into()),
    };
    vec![place.to_string(), who, asked, text::clean(waiter.id())]
}
