//! `distlock ls`: the locks that are held.

use distlock::LockInfo;

use crate::{
    args::{Ls, Servers},
    connect,
    exit::{Exit, Outcome},
    json, output,
    text::{self, Table},
};

pub(crate) fn run(servers: &Servers, options: &Ls) -> Outcome {
    let locks = connect::manager(servers)?.locks(&options.pattern)?;
    if options.json {
        output::print_json(&locks.iter().map(json::Lock::of).collect::<Vec<_>>())?;
    } else if locks.is_empty() {
        let which = match options.pattern.as_str() {
            "*" => "no lock".to_owned(),
            pattern => format!("no lock that matches {}", text::quoted(pattern)),
        };
        output::say(&format!("{which} is held"));
    } else {
        output::print(&table(&locks).to_string())?;
    }
    Ok(Exit::Fine)
}

fn table(locks: &[LockInfo]) -> Table {
    let mut table = Table::new(&["NAME", "HOLDER", ">HELD", ">LEFT", ">WAITING", ">TOKEN"]);
    for lock in locks {
        let holder = lock.holder();
        let doubt = if lock.is_certain() { "" } else { " (not certain)" };
        table.row(vec![
            text::clean(lock.name()),
            text::who(holder) + doubt,
            holder.held_for().map_or_else(|| "-".into(), text::span),
            holder.ttl_left().map_or_else(|| "no expiry".into(), text::span),
            lock.waiting().to_string(),
            lock.fencing_token().map_or_else(|| "-".into(), |token| token.to_string()),
        ]);
    }
    table
}
