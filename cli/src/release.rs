//! `distlock release`: releases a lock for the holder that was named or found, but for no other.

use distlock::{LockManager, Released};
use serde::Serialize;

use crate::{
    args::{Release, Servers},
    connect,
    exit::{Exit, Failure, Outcome},
    format::{self, quote},
    json::HolderJson,
    output,
};

/// The result as JSON.
#[derive(Debug, Serialize)]
struct ReleaseReport<'a> {
    name: &'a str,
    released: bool,
    /// The holder that lost the lock.
    former_holder: Option<HolderJson<'a>>,
    /// The current holder, if that is why nothing was released.
    holder: Option<HolderJson<'a>>,
}

pub(crate) fn run(servers: &Servers, options: &Release) -> Outcome {
    let mgr = connect::manager(servers)?;
    match &options.target.if_id {
        Some(id) => {
            let outcome = mgr.force_release_if(&options.name, id)?;
            report_outcome(
                options,
                outcome,
                HolderJson::from_id(id),
                &describe_id(id),
                "the holder has another id",
            )
        }
        None => release_current_holder(&*mgr, options),
    }
}

/// Releases by the id that was found, so that a client that acquires the lock meanwhile keeps it.
fn release_current_holder(mgr: &dyn LockManager, options: &Release) -> Outcome {
    let Some(lock) = mgr.lock_info(&options.name)? else {
        return report_outcome(options, Released::Gone, HolderJson::default(), "", "");
    };
    let holder = lock.holder();
    let mut outcome = mgr.force_release_if(&options.name, holder.id())?;
    // Votes left over on a minority of the nodes count as no lock, so the release of one reports
    // `Gone`.
    if outcome == Released::Gone && !lock.is_certain() {
        let still =
            mgr.lock_info(&options.name)?.is_some_and(|now| now.holder().id() == holder.id());
        if !still {
            outcome = Released::Released;
        }
    }
    report_outcome(
        options,
        outcome,
        HolderJson::from_holder(holder),
        &describe_id(holder.id()),
        "the lock changed hands in the meantime",
    )
}

/// What an id says about its holder, for a message.
fn describe_id(id: &str) -> String {
    match id.parse::<distlock::LockId>() {
        Ok(parts) => format!(
            "{} (pid {}, thread {})",
            format::escape(parts.host()),
            parts.pid(),
            parts.tid()
        ),
        Err(_) => format!("a client that calls itself {}", quote(id)),
    }
}

fn report_outcome(
    options: &Release,
    outcome: Released,
    was: HolderJson<'_>,
    whom: &str,
    why_not: &str,
) -> Outcome {
    let name = options.name.as_str();
    let lock = quote(name);
    let (report, verdict) = match &outcome {
        Released::Released => {
            let report =
                ReleaseReport { name, released: true, former_holder: Some(was), holder: None };
            (report, Ok(format!("released lock {lock}, which was held by {whom}\n")))
        }
        Released::Gone => {
            let report = ReleaseReport { name, released: false, former_holder: None, holder: None };
            (report, Err(format!("nothing was released: lock {lock} is not held")))
        }
        Released::OwnedByOther(by) => {
            let report = ReleaseReport {
                name,
                released: false,
                former_holder: None,
                holder: Some(HolderJson::from_holder(by)),
            };
            (report, Err(format!("nothing was released: {why_not}; lock {lock} is held by {by}")))
        }
        // A later version of the library may report more.
        other => {
            let report = ReleaseReport { name, released: false, former_holder: None, holder: None };
            (report, Err(format!("nothing was released: lock {lock}: {other:?}")))
        }
    };
    if options.json {
        output::print_json(&report)?;
    }
    match verdict {
        Ok(_) if options.json => Ok(Exit::Success),
        Ok(done) => {
            output::print(&done)?;
            Ok(Exit::Success)
        }
        Err(why) => Err(Failure::new(Exit::No, why)),
    }
}
