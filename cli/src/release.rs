//! `distlock release`: releases a lock for the holder that was named or found, but for no other.

mod members;

use distlock::{LockError, LockInfo, LockManager, Released};
use serde::Serialize;

use crate::{
    args::{Release, Servers},
    connect,
    exit::{Exit, Failure, Outcome},
    format::{self, quote},
    holders,
    json::HolderJson,
    output,
};

/// The result as JSON.
#[derive(Debug, Default, Serialize)]
struct ReleaseReport<'a> {
    name: &'a str,
    released: bool,
    /// The holder that lost the lock.
    former_holder: Option<HolderJson<'a>>,
    /// All holders that lost the lock.
    former_holders: Vec<HolderJson<'a>>,
    /// Number of readers, or of permits in use, that the lock still has.
    remaining: Option<u64>,
    /// The current holder, if that is why nothing was released.
    holder: Option<HolderJson<'a>>,
}

pub(crate) fn run(servers: &Servers, options: &Release) -> Outcome {
    let mgr = connect::manager(servers)?;
    match &options.target.if_id {
        Some(id) => {
            let mut outcome = mgr.force_release_if(&options.name, id)?;
            let mut now = None;
            match outcome {
                // The lock is released, also if this fails.
                Released::Released => now = mgr.lock_info(&options.name).ok().flatten(),
                // Also if others share the lock, or the key holds something else.
                Released::Gone => {
                    let lock = mgr.lock_info(&options.name).map_err(not_released)?;
                    if let Some(lock) = lock.filter(|lock| lock.holder().id() != id) {
                        outcome = Released::OwnedByOther(lock.holder().clone());
                    }
                }
                _ => {}
            }
            report_outcome(
                options,
                outcome,
                now,
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
    let Some(lock) = mgr.lock_info(&options.name).map_err(not_released)? else {
        return report_outcome(options, Released::Gone, None, HolderJson::default(), "", "");
    };
    if !lock.members().is_empty() {
        return members::release_members(mgr, options, &lock);
    }
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
        None,
        HolderJson::from_holder(holder),
        &describe_id(holder.id()),
        "the lock changed hands in the meantime",
    )
}

/// The failure to find the holder, as what it means for the user.
fn not_released(error: LockError) -> Failure {
    let failure = Failure::from(error);
    let message = failure.message.replacen("could not inspect lock", "could not release lock", 1);
    Failure { message, ..failure }
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
    now: Option<LockInfo>,
    was: HolderJson<'_>,
    whom: &str,
    why_not: &str,
) -> Outcome {
    let name = options.name.as_str();
    let lock = quote(name);
    let (report, verdict) = match &outcome {
        Released::Released => {
            let held_by = now.map(|now| now.holder().held_by());
            let rest = held_by.and_then(holders::hold_now);
            let report = ReleaseReport {
                name,
                released: true,
                former_holder: Some(was.clone()),
                former_holders: vec![was],
                remaining: rest.as_ref().and_then(|_| holders::count(held_by?)),
                holder: None,
            };
            let rest = rest.map_or_else(String::new, |rest| format!("; {rest}"));
            (report, Ok(format!("released lock {lock}, which was held by {whom}{rest}\n")))
        }
        Released::Gone => {
            let report = ReleaseReport { name, ..ReleaseReport::default() };
            (report, Err(format!("nothing was released: lock {lock} is not held")))
        }
        Released::OwnedByOther(by) => {
            let report = ReleaseReport {
                name,
                holder: Some(HolderJson::from_holder(by)),
                ..ReleaseReport::default()
            };
            (report, Err(format!("nothing was released: {why_not}; lock {lock} is held by {by}")))
        }
        // A later version of the library may report more.
        other => {
            let report = ReleaseReport { name, ..ReleaseReport::default() };
            (report, Err(format!("nothing was released: lock {lock}: {other}")))
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
