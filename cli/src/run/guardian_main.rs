//! The guardian process: waits for messages of its wrapper, and intervenes if the wrapper is dead
//! or frozen.

use std::{env, thread, time::Duration};

use crossbeam_channel::never;
use distlock::{LockManager, Released};
use nix::sys::signal::SigSet;
use rustix::process::{Pid, Signal};

use super::{
    guardian_stderr::GuardianStderr,
    kill::ProcessGroup,
    message::{GuardianMessage, LockSpec},
    pipe_reader::{MessageReader, Received},
    watchdog::{KillOrder, Watchdog},
};
use crate::{
    args::Servers,
    clock, connect,
    exit::{Exit, Failure, Outcome},
    format,
    manager_config::ManagerConfig,
};

/// Time between two looks at a group that is ending. They are polled, because the guardian is not
/// their parent.
const GROUP_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Delays before the attempts to release the lock. Unless an attempt finds the lock, the next one
/// follows: the wrapper's last request may still reach the server, even after the loss of a packet.
const RELEASE_DELAYS_MS: [u64; 7] = [0, 10, 20, 40, 80, 160, 320];

/// Runs the guardian until its wrapper, whose pid is the first argument, has ended.
pub(super) fn guardian_main(mut arguments: env::ArgsOs) -> Outcome {
    let mut stderr = GuardianStderr::take();
    let pid = arguments.next().unwrap_or_default();
    let wrapper = format!("distlock (pid {})", pid.to_string_lossy());
    // Signals that are meant for the wrapper must not end the guardian. Threads inherit the mask.
    SigSet::all()
        .thread_block()
        .map_err(|error| Failure::new(Exit::CannotRun, error.to_string()))?;
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_name(c"distlock-guard");
    let mut reader = MessageReader::new(std::io::stdin());
    // If the wrapper ends before it requests the lock, there is nothing to release.
    let Received::Message(GuardianMessage::Acquiring(lock)) = reader.next_message(None) else {
        return Ok(Exit::Success);
    };
    let mut watchdog = Watchdog::new(lock.ttl, lock.grace, clock::since_boot());
    let mut locks = vec![*lock];
    loop {
        let received = reader.next_message(watchdog.deadline());
        let now = clock::since_boot();
        match received {
            Received::Message(GuardianMessage::Acquiring(lock)) => locks.push(*lock),
            Received::Message(message) => watchdog.on_message(&message, now),
            Received::Timeout => {
                let order = watchdog.on_frozen(now);
                if order.is_some() {
                    let (ending, locks) = (ending(order), describe(&locks));
                    stderr.report(&format!(
                        "{wrapper} is stopped or gets no CPU time; {ending} under {locks}"
                    ));
                }
                terminate_group(order, watchdog.lock_gone_at(now));
            }
            Received::Closed => break,
        }
    }
    let now = clock::since_boot();
    let order = watchdog.on_dead(now);
    if order.is_some() {
        let then = if locks.iter().any(|lock| lock.is_kept) {
            format!("under {}, which stays taken until it expires", describe(&locks))
        } else {
            format!("and releasing {}", describe(&locks))
        };
        let ending = ending(order);
        stderr.report(&format!("{wrapper} was killed; {ending} {then}"));
    }
    stderr.close();
    terminate_group(order, watchdog.lock_gone_at(now));
    release(&locks)
}

/// What happens to the command, as messages say it.
fn ending(order: Option<KillOrder>) -> &'static str {
    if group(order).is_some_and(ProcessGroup::is_out_of_reach) {
        "waiting for the command, which runs as another user and so cannot be ended,"
    } else {
        "ending the command"
    }
}

fn group(order: Option<KillOrder>) -> Option<ProcessGroup> {
    Pid::from_raw(order?.group).map(ProcessGroup)
}

/// The locks as messages name them.
fn describe(locks: &[LockSpec]) -> String {
    let names: Vec<String> = locks.iter().map(|lock| format::quote(&lock.name)).collect();
    format!("{} {}", if names.len() == 1 { "lock" } else { "locks" }, names.join(", "))
}

/// Ends a group. Returns when nothing of it is left, or at `limit`, when its lock has expired
/// anyway.
fn terminate_group(order: Option<KillOrder>, limit: Duration) {
    let (Some(order), Some(group)) = (order, group(order)) else { return };
    let kill_at = order.kill_at;
    let mut kill_at = Some(kill_at);
    group.send(&[Signal::TERM, Signal::CONT]);
    loop {
        let now = clock::since_boot();
        if kill_at.is_some_and(|at| now >= at) {
            kill_at = None;
            group.send(&[Signal::KILL]);
        }
        if !group.is_alive() || now >= limit {
            return;
        }
        let next = kill_at
            .map_or(GROUP_POLL_INTERVAL, |at| at.saturating_sub(now).min(GROUP_POLL_INTERVAL));
        let _ = never::<()>().recv_timeout(next);
    }
}

/// Releases the locks, which are on the same servers.
fn release(locks: &[LockSpec]) -> Outcome {
    let Some(first) = locks.first().filter(|lock| !lock.is_kept) else { return Ok(Exit::Success) };
    let LockSpec { urls: url, password, prefix, table, timeout, quarantine, tls, .. } =
        first.clone();
    let servers = Servers { url, password_file: None, prefix, table, timeout, quarantine, tls };
    let mut config = connect::config(&servers)?.ttl(first.ttl);
    if let Some(password) = &password {
        config = config.password(password);
    }
    let nodes = config.each_node();
    match config.manager() {
        Ok(mgr) => release_with(&*mgr, locks),
        // One node that cannot be used any more, such as a new replica, must not keep the locks
        // held on the others.
        Err(_) => release_on_each_node(nodes, locks),
    }
}

/// Releases the locks on each node separately, all at the same time.
fn release_on_each_node(nodes: Vec<ManagerConfig>, locks: &[LockSpec]) -> Outcome {
    thread::scope(|scope| {
        let release = |node: ManagerConfig| move || release_with(&*node.manager()?, locks);
        let start = |node| {
            thread::Builder::new().name("node".into()).spawn_scoped(scope, release(node)).ok()
        };
        let threads: Vec<_> = nodes.into_iter().filter_map(start).collect();
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .fold(Ok(Exit::Success), Outcome::and)
    })
}

fn release_with(mgr: &dyn LockManager, locks: &[LockSpec]) -> Outcome {
    let mut outcome = Ok(Exit::Success);
    // In the reverse order of their acquisition.
    let mut left: Vec<&LockSpec> = locks.iter().rev().collect();
    for delay in RELEASE_DELAYS_MS.map(Duration::from_millis) {
        let _ = never::<()>().recv_timeout(delay);
        outcome = Ok(Exit::Success);
        left.retain(|lock| {
            // If the servers do not reply, each further lock would take a timeout.
            if outcome.is_err() {
                return true;
            }
            match mgr.force_release_if(&lock.name, &lock.id) {
                Ok(released) => released != Released::Released,
                Err(error) => {
                    outcome = Err(error.into());
                    true
                }
            }
        });
        if left.is_empty() {
            break;
        }
    }
    outcome
}
