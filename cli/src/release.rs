//! `distlock release`: takes a lock away from the holder that was named or seen, and from nobody else.

use distlock::{RedisMgr, Released};
use serde::Serialize;

use crate::{
    args::{Release, Servers},
    connect,
    exit::{Exit, Failure, Outcome},
    json::Holder,
    output,
    text::{self, quoted},
};

/// What happened, for programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    name: &'a str,
    released: bool,
    /// From whom it was taken.
    was_held_by: Option<Holder<'a>>,
    /// Who holds it, where that is why nothing was released.
    held_by: Option<Holder<'a>>,
}

pub(crate) fn run(servers: &Servers, options: &Release) -> Outcome {
    let mgr = connect::manager(servers)?;
    match &options.whose.if_id {
        Some(id) => {
            let outcome = mgr.force_release_if(&options.name, id)?;
            tell(options, outcome, Holder::by_id(id), &told_by(id), "that identifier does not hold it")
        }
        None => from_whoever_holds_it(&mgr, options),
    }
}

/// By the identifier that was seen: whoever gets the lock in the meantime keeps it.
fn from_whoever_holds_it(mgr: &RedisMgr, options: &Release) -> Outcome {
    let Some(lock) = mgr.lock_info(&options.name)? else {
        return tell(options, Released::Gone, Holder::default(), "", "");
    };
    let holder = lock.holder();
    let mut outcome = mgr.force_release_if(&options.name, holder.id())?;
    // What was left over on a minority of the nodes is nobody's by the word of the others; it is gone all the same.
    if outcome == Released::Gone && !lock.is_certain() {
        let still = mgr.lock_info(&options.name)?.is_some_and(|now| now.holder().id() == holder.id());
        if !still {
            outcome = Released::Released;
        }
    }
    tell(options, outcome, Holder::of(holder), &holder.to_string(), "it changed hands just now")
}

/// What an identifier says, as a sentence has it.
fn told_by(id: &str) -> String {
    match id.parse::<distlock::LockId>() {
        Ok(parts) => format!("{} (pid {}, thread {})", text::clean(parts.host()), parts.pid(), parts.tid()),
        Err(_) => format!("a client that calls itself {}", quoted(id)),
    }
}

fn tell(options: &Release, outcome: Released, was: Holder<'_>, whom: &str, why_not: &str) -> Outcome {
    let name = options.name.as_str();
    let lock = quoted(name);
    let (report, verdict) = match &outcome {
        Released::Released => {
            let report = Report { name, released: true, was_held_by: Some(was), held_by: None };
            (report, Ok(format!("released lock {lock}, was held by {whom}\n")))
        }
        Released::Gone => {
            let report = Report { name, released: false, was_held_by: None, held_by: None };
            (report, Err(format!("nobody holds lock {lock}; nothing was released")))
        }
        Released::OwnedByOther(by) => {
            let report = Report { name, released: false, was_held_by: None, held_by: Some(Holder::of(by)) };
            (report, Err(format!("nothing was released: {why_not}; lock {lock} is held by {by}")))
        }
    };
    if options.json {
        output::print_json(&report)?;
    }
    match verdict {
        Ok(_) if options.json => Ok(Exit::Fine),
        Ok(done) => {
            output::print(&done)?;
            Ok(Exit::Fine)
        }
        Err(why) => Err(Failure::new(Exit::No, why)),
    }
}
