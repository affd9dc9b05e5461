//! Acquires the locks, while signals can end the wait.

use std::{collections::HashSet, io, thread, time::Duration};

use crossbeam_channel::{Receiver, bounded, never, select};
use distlock::{Detached, LockError, LockGuard, LockManager, LockOptions};
use signal_hook::low_level::signal_name;

use super::{held::Held, signals, wait_policy::WaitPolicy, wait_reporter::OuterHolders};
use crate::{
    args::{Acquire, Permits},
    clock,
    exit::{Exit, Failure, Outcome},
    format, output, ranges,
};

/// Time between two attempts to adopt a lock while the server is unreachable.
const ADOPT_PAUSE: Duration = Duration::from_millis(200);

/// How the attempt to acquire the locks ended.
#[derive(Debug)]
pub(super) enum AcquireResult {
    Acquired(Held),
    Failed(LockError),
    /// A signal ended the wait. No lock is held, and the queue entry is removed.
    Interrupted(i32),
}

/// The locks that the command needs.
#[derive(Debug)]
pub(super) enum Request<'a> {
    Alone { names: &'a [String], options: LockOptions },
    Shared { name: &'a str, options: LockOptions },
    Permits { name: &'a str, permits: Permits, options: LockOptions },
    Adopted(&'a Detached),
}

impl<'a> Request<'a> {
    pub(super) fn from_options(
        acquire: &'a Acquire,
        policy: WaitPolicy,
    ) -> Result<Request<'a>, Failure> {
        if acquire.names.len() > 1
            && let Some(option) = option_for_one_name(acquire)
        {
            return Err(Failure::usage(only_one_name(&option, &acquire.names)));
        }
        if let Some(twice) = first_duplicate(&acquire.names) {
            let twice = format::quote(twice);
            return Err(Failure::usage(format!("name {twice} is given twice; leave one out")));
        }
        ranges::check("--ttl", acquire.ttl, &ranges::TTL)?;
        let mut lock_options = LockOptions::new();
        if let Some(wait) = policy.wait {
            lock_options = lock_options.wait(wait);
        }
        if let Some(period) = acquire.at_least {
            ranges::check("--at-least", period, &ranges::TTL)?;
            lock_options = lock_options.hold_at_least(period);
        }
        let options = lock_options;
        Ok(match (acquire.permits, acquire.names.as_slice()) {
            (Some(permits), [name]) => Request::Permits { name, permits, options },
            (None, [name]) if acquire.shared => Request::Shared { name, options },
            (_, names) => Request::Alone { names, options },
        })
    }

    /// The names of the locks.
    pub(super) fn names(&self) -> Vec<&'a str> {
        match self {
            Request::Alone { names, .. } => names.iter().map(String::as_str).collect(),
            Request::Shared { name, .. } | Request::Permits { name, .. } => vec![name],
            Request::Adopted(detached) => vec![detached.name()],
        }
    }

    fn send(&self, mgr: &dyn LockManager) -> Result<Held, LockError> {
        match self {
            Request::Alone { names, options } => match names {
                [name] => mgr.lock_with(name, options).map(Held::One),
                _ => mgr.lock_all_with(&self.names(), options).map(Held::Several),
            },
            Request::Shared { name, options } => {
                mgr.rw_lock(name)?.read_with(options).map(|guard| Held::One(guard.into()))
            }
            Request::Permits { name, permits: Permits { count, limit }, options } => mgr
                .semaphore(name, *limit)?
                .acquire_with(*count, options)
                .map(|guard| Held::One(guard.into())),
            Request::Adopted(detached) => adopt(mgr, detached).map(Held::One),
        }
    }
}

/// Adopts a lock. While the server is unreachable, tries again until the lock must have expired.
fn adopt(mgr: &dyn LockManager, detached: &Detached) -> Result<LockGuard, LockError> {
    let gives_up_at = clock::since_boot().saturating_add(detached.ttl());
    let mut has_reported = false;
    loop {
        let result = mgr.adopt(detached);
        let left = gives_up_at.saturating_sub(clock::since_boot());
        match &result {
            Err(why @ LockError::Unavailable { .. }) if !left.is_zero() => {
                if !std::mem::replace(&mut has_reported, true) {
                    output::print_message(&format!(
                        "could not adopt lock {} yet, and will try for another {}: {}",
                        format::quote(detached.name()),
                        format::duration(left),
                        format::escape(&why.to_string())
                    ));
                }
                let _ = never::<()>().recv_timeout(ADOPT_PAUSE.min(left));
            }
            _ => return result,
        }
    }
}

fn first_duplicate(names: &[String]) -> Option<&str> {
    let mut seen = HashSet::new();
    names.iter().map(String::as_str).find(|name| !seen.insert(*name))
}

/// The option that works with one name only, as it is written on the command line.
fn option_for_one_name(acquire: &Acquire) -> Option<String> {
    match (acquire.shared, acquire.permits, acquire.at_least) {
        (true, ..) => Some("--shared".into()),
        (_, Some(Permits { count: 1, limit }), _) => Some(format!("--permits {limit}")),
        (_, Some(Permits { count, limit }), _) => Some(format!("--permits {count}/{limit}")),
        (.., Some(period)) => Some(format!("--at-least {}", format::duration(period))),
        _ => None,
    }
}

fn only_one_name(option: &str, names: &[String]) -> String {
    let [first, rest] = [&names[..1], &names[1..]].map(|names| names.join(" "));
    let word = option.split(' ').next().unwrap_or(option);
    format!(
        "{word} works with one NAME; leave out the option, or run one distlock under the other: \
         distlock run {option} {first} -- distlock run {rest} -- …"
    )
}

/// Acquires the locks on a thread of its own.
pub(super) fn acquire(
    mgr: &dyn LockManager,
    request: &Request<'_>,
    received: &Receiver<i32>,
    outer: &OuterHolders,
) -> io::Result<AcquireResult> {
    thread::scope(|scope| {
        let (sender, results) = bounded(1);
        // The channel has room for the one result, so sending it never blocks.
        let lock = move || drop(sender.send(request.send(mgr)));
        thread::Builder::new().name("acquire".into()).spawn_scoped(scope, lock)?;
        let result = loop {
            select! {
                recv(results) -> result => break match result {
                    Ok(Ok(held)) => AcquireResult::Acquired(held),
                    Ok(Err(error)) => AcquireResult::Failed(error),
                    Err(_) => AcquireResult::Failed(LockError::Shutdown),
                },
                recv(outer.read_locks) -> lock => if let Ok(lock) = lock {
                    let check = move || outer.check_readers(mgr, &lock);
                    let thread = thread::Builder::new().name("readers".into());
                    // Without a thread, there is no report.
                    let _ = thread.spawn_scoped(scope, check);
                },
                recv(received) -> signal => if let Ok(signal) = signal
                    && signals::is_forwarded(signal)
                {
                    mgr.shutdown();
                    break AcquireResult::Interrupted(signal);
                },
            }
        };
        Ok(result)
    })
}

/// Reports that a signal ended the wait.
pub(super) fn describe_interruption(signal: i32) -> String {
    format!("{} ended the wait", signal_name(signal).unwrap_or("a signal"))
}

/// How the program ends if the locks were not acquired.
pub(super) fn not_acquired(error: LockError, policy: WaitPolicy, quiet: bool) -> Outcome {
    let message = format::escape(&error.to_string());
    let Some(exit) = policy.exit_if_held(&error) else {
        return Err(Failure { message, ..error.into() });
    };
    if !quiet {
        let skipped = if exit == Exit::Success { "skipped: " } else { "" };
        output::print_message(&format!("{skipped}{message}"));
    }
    Ok(exit)
}
