//! `distlock ls`: lists held locks.

use distlock::LockInfo;

use crate::{
    args::{Ls, Servers},
    connect,
    exit::{Exit, Outcome},
    format::{self, Table},
    holders, json, output,
};

pub(crate) fn run(servers: &Servers, options: &Ls) -> Outcome {
    let locks = connect::manager(servers)?.locks(&options.pattern)?;
    if options.json {
        output::print_json(json::LocksJson::from_infos(&locks))?;
    } else if locks.is_empty() {
        let message = match options.pattern.as_str() {
            "*" => "no locks are held".to_owned(),
            url if url.contains("://") => format!(
                "no held lock matches {}, which is a pattern; name a server with --url",
                format::quote(url)
            ),
            pattern => format!("no held lock matches {}", format::quote(pattern)),
        };
        output::print_message(&message);
    } else {
        output::print(&table(&locks).to_string())?;
    }
    Ok(Exit::Success)
}

fn table(locks: &[LockInfo]) -> Table {
    let mut table = Table::new(&["NAME", "KIND", "HOLDER", ">HELD", ">LEFT", ">WAITING", ">TOKEN"]);
    for lock in locks {
        let holder = lock.holder();
        let doubt = if lock.is_certain() { "" } else { " (not certain)" };
        table.add_row(vec![
            format::escape(lock.name()),
            holders::short_kind(holder.held_by()),
            holders::names(lock) + doubt,
            holder.held_for().map_or_else(|| "-".into(), format::duration),
            holders::time_left(holder, holders::is_kept(lock)),
            lock.waiting().to_string(),
            lock.fencing_token().map_or_else(|| "-".into(), |token| token.to_string()),
        ]);
    }
    table
}
