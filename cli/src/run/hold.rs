//! `distlock lock`: holds locks until a signal arrives, or leaves one to `distlock adopt`.

use crossbeam_channel::{Receiver, select};
use distlock::{Detached, LockManager, Released};

use super::{
    acquire::{AcquireResult, Request, acquire, describe_interruption, not_acquired},
    expiry::Expiry,
    held::{Held, ReleaseResult},
    signals::{SignalListener, is_forwarded},
    system_failure, to_u8,
    wait_policy::WaitPolicy,
    wait_reporter::with_reporters,
};
use crate::{
    args::{Lock, Servers},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    format,
    json::{AcquiredJson, AcquiredLockJson},
    output,
    quarantine_option::QuarantineOption,
};

pub(crate) fn hold(servers: &Servers, options: &Lock) -> Outcome {
    let (policy, request) = plan(options)?;
    let config = connect::config(servers)?;
    if options.detach && !config.is_one_redis() {
        return Err(Failure::usage(
            "--detach works with one Redis or Valkey server, or a cluster, only",
        ));
    }
    QuarantineOption::from_args(servers)?
        .check_ttl(config.each_node().len(), options.acquire.ttl)?;
    let (config, outer) =
        with_reporters(config, policy, options.acquire.verbose, options.acquire.quiet);
    let signals = SignalListener::start().map_err(system_failure)?;
    let config = config.ttl(options.acquire.ttl).for_names(options.acquire.names.len());
    let mgr = config.manager()?;
    let started = clock::now();
    let acquired = acquire(&*mgr, &request, &signals.received, &outer);
    let held = match acquired.map_err(system_failure)? {
        AcquireResult::Acquired(held) => held,
        AcquireResult::Interrupted(signal) if options.json => {
            return Err(Failure::new(Exit::Signal(to_u8(signal)), describe_interruption(signal)));
        }
        AcquireResult::Interrupted(signal) => {
            if options.acquire.verbose {
                output::print_message(&describe_interruption(signal));
            }
            return Ok(Exit::Signal(to_u8(signal)));
        }
        AcquireResult::Failed(error) if options.json => {
            let exit = policy.exit_if_held(&error);
            let failure = Failure::from(error);
            return Err(Failure { exit: exit.unwrap_or(failure.exit), ..failure });
        }
        AcquireResult::Failed(error) => return not_acquired(error, policy, options.acquire.quiet),
    };
    let expiry = Expiry::new(options.acquire.ttl, options.acquire.at_least);
    if options.acquire.verbose {
        held.report_acquired(clock::now().duration_since(started));
    }
    let mut locks: Vec<AcquiredLockJson> = held
        .locks()
        .iter()
        .map(|lock| AcquiredLockJson {
            name: lock.name.to_owned(),
            id: lock.id.to_string(),
            token: lock.token.as_u64(),
            detached: None,
        })
        .collect();
    let held = match held {
        Held::One(guard) if options.detach => Err(guard.detach()?),
        held => Ok(held),
    };
    if let Err(detached) = &held {
        locks.iter_mut().for_each(|lock| lock.detached = Some(detached.to_string()));
    }
    let text = if options.json {
        output::to_json(AcquiredJson { locks })?
    } else {
        let lines = locks.into_iter().map(|AcquiredLockJson { name, token, detached, .. }| {
            // Not escaped, because it is for distlock and not for people.
            detached.unwrap_or_else(|| format!("{token} {}", format::escape(&name))) + "\n"
        });
        lines.collect::<String>()
    };
    match held {
        Ok(held) => {
            output::print(&text)?;
            Ok(hold_until_signal(held, &signals.received, expiry, options.acquire.verbose))
        }
        Err(detached) => print_detached(&*mgr, &detached, &text),
    }
}

/// Prints what the successor needs. Releases the lock if that fails, because nobody can adopt it.
fn print_detached(mgr: &dyn LockManager, detached: &Detached, text: &str) -> Outcome {
    let Err(error) = output::write(text) else { return Ok(Exit::Success) };
    let (name, ttl) = (format::quote(detached.name()), format::duration(detached.ttl()));
    let then = match mgr.force_release_if(detached.name(), detached.id().as_str()) {
        Ok(Released::Released) => format!("lock {name} was released"),
        Ok(other) => format!("lock {name} was not released: {other}"),
        Err(error) => {
            format!("lock {name} stays held until it expires, after {ttl} at the latest: {error}")
        }
    };
    Err(Failure::new(Exit::CannotRun, output::cannot_write(&error) + "; " + &then))
}

/// Checks the options, and what they mean together.
fn plan(options: &Lock) -> Result<(WaitPolicy, Request<'_>), Failure> {
    let policy = WaitPolicy::from_options(&options.acquire)?;
    if options.detach && options.acquire.names.len() > 1 {
        return Err(Failure::usage(
            "--detach works with one NAME; run distlock lock --detach once for each",
        ));
    }
    if options.detach && options.acquire.at_least.is_some() {
        return Err(Failure::usage(
            "--detach works without --at-least, because adopt releases the lock; leave out one of \
             the two",
        ));
    }
    Ok((policy, Request::from_options(&options.acquire, policy)?))
}

/// Holds the locks, which have been printed. What happens to them from now on is reported on
/// standard error only, because there is one JSON document.
fn hold_until_signal(held: Held, signals: &Receiver<i32>, expiry: Expiry, verbose: bool) -> Exit {
    let lost = |lock: &str, why: &str| {
        output::print_message(&format!("{lock} was lost: {}", format::escape(why)));
        Exit::Lost
    };
    loop {
        select! {
            recv(held.lost()) -> _ => {
                let (lock, why) = held.loss();
                return lost(&lock, &why.to_string());
            }
            recv(signals) -> signal => if signal.is_ok_and(is_forwarded) {
                break;
            },
        }
    }
    let any = held.any();
    match held.release(expiry, verbose) {
        ReleaseResult::Released => Exit::Success,
        ReleaseResult::Lost(why) => lost(&any, &why),
        ReleaseResult::Failed(exit) => exit,
    }
}
