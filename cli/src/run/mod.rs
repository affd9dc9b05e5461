//! `distlock run`: runs a command under a lock. The command never outlives its lock, and the lock
//! does not outlive the command, whichever of the processes involved is killed, stopped or slow.
//!
//! Three processes take part besides the command's own children:
//!
//! - The *wrapper* is the process that the user starts. It holds the lock and supervises the
//!   command.
//! - The *gate* leads a process group of its own and becomes the command.
//! - The *guardian* ends that group and releases the lock if the wrapper is killed or stopped.

mod acquire;
mod exec_gate;
mod grace_period;
mod guardian_handle;
mod guardian_main;
mod hold;
mod kill;
mod last_renewal_error;
mod message;
mod pipe_reader;
mod signals;
mod supervise;
mod terminal;
mod tty_signal;
mod wait_policy;
mod watchdog;

use std::{
    env, io, os::unix::process::CommandExt as _, process::Command, sync::Arc, time::Duration,
};

use distlock::{LockGuard, LockLost, LockOptions, Released};

pub(crate) use self::hold::hold;
use self::{
    acquire::{AcquireResult, Request, WaitReporter, acquire},
    exec_gate::ExecGate,
    guardian_handle::GuardianHandle,
    last_renewal_error::LastRenewalError,
    message::{GuardianMessage, LockSpec},
    signals::SignalListener,
    supervise::{CommandResult, Supervisor},
    terminal::{SigttouBlocked, Terminal},
    tty_signal::{SignalOrigin, exit_by_signal},
    wait_policy::WaitPolicy,
};
use crate::{
    args::{Run, Servers},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    format,
    manager_config::ManagerConfig,
    output,
    quarantine_option::QuarantineOption,
    ranges, stderr_writer,
};

/// Maximum time that the start of a command waits until the message about its lock is written.
const START_FLUSH_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) fn run(servers: &Servers, options: &Run) -> Outcome {
    let wait_policy = WaitPolicy::from_options(options)?;
    ranges::check("--ttl", options.ttl, &ranges::TTL)?;
    let (config, password) = build_config(servers, options, wait_policy)?;
    let signals = SignalListener::start().map_err(system_failure)?;
    let sigttou_blocked = SigttouBlocked::block().map_err(|error| system_failure(error.into()))?;
    adopt_orphans();
    let mut guardian = GuardianHandle::start(&options.name).map_err(system_failure)?;
    let last_renewal_error = LastRenewalError::default();
    let config = config.event_handler(Arc::new(last_renewal_error.clone()));
    let reporter = guardian.acquire_reporter(lock_spec(servers, options, password));
    let mgr = config.event_handler(Arc::new(reporter)).manager()?;
    let mut lock_options = LockOptions::new();
    if let Some(wait) = wait_policy.wait {
        lock_options = lock_options.wait(wait);
    }
    if let Some(period) = options.at_least {
        lock_options = lock_options.hold_at_least(period);
    }
    let started = clock::now();
    let request = Request {
        name: &options.name,
        shared: options.shared,
        permits: options.permits,
        options: lock_options,
    };
    let guard = match acquire(&*mgr, &request, &signals.received).map_err(system_failure)? {
        AcquireResult::Acquired(guard) => guard,
        AcquireResult::Interrupted(signal) => {
            drop(guardian);
            return Ok(exit_by_signal(
                Exit::Signal(to_u8(signal)),
                SignalOrigin::of_received(Terminal::open().as_ref()),
            ));
        }
        AcquireResult::Failed(error) => {
            let message = format::escape(&error.to_string());
            let Some(exit) = wait_policy.exit_if_held(&error) else {
                return Err(Failure { message, ..error.into() });
            };
            if !options.quiet {
                let skipped = if exit == Exit::Success { "skipped: " } else { "" };
                output::print_message(&format!("{skipped}{message}"));
            }
            return Ok(exit);
        }
    };
    if options.verbose {
        let (token, waited) =
            (guard.fencing_token(), format::duration(clock::now().duration_since(started)));
        output::print_message(&format!(
            "acquired lock {} with token {token} after {waited}",
            quoted_name(options)
        ));
        // So that the message usually comes before the command's output.
        stderr_writer::flush(START_FLUSH_TIMEOUT);
    }
    let result = run_under_lock(
        options,
        &guard,
        &signals,
        &sigttou_blocked,
        &mut guardian,
        &last_renewal_error,
    );
    let exit =
        release_lock(options, guard, result.as_ref().map_or(Exit::CannotRun, |result| result.exit));
    drop(guardian);
    result.map(|result| exit_by_signal(exit, result.signal_origin))
}

/// Runs this process as a gate or a guardian, if that is what its arguments ask for.
pub(crate) fn internal_step(mut arguments: env::ArgsOs) -> Option<Outcome> {
    match arguments.nth(1)?.to_str()? {
        exec_gate::GATE_ARG => Some(exec_gate::gate_main(arguments)),
        guardian_handle::GUARDIAN_ARG => Some(guardian_main::guardian_main()),
        _ => None,
    }
}

/// Builds the configuration. The password is returned too, because its file may be a pipe, which
/// can be read only once.
fn build_config(
    servers: &Servers,
    options: &Run,
    wait_policy: WaitPolicy,
) -> Result<(ManagerConfig, Option<String>), Failure> {
    let password = servers.password_file.as_deref().map(connect::read_password).transpose()?;
    let mut config = connect::config(&Servers { password_file: None, ..servers.clone() })?;
    QuarantineOption::from_args(servers)?.check_ttl(config.each_node().len(), options.ttl)?;
    config = config.ttl(options.ttl);
    if let Some(password) = &password {
        config = config.password(password);
    }
    if options.verbose && wait_policy.wait != Some(Duration::ZERO) {
        config = config.event_handler(Arc::new(WaitReporter));
    }
    Ok((config, password))
}

/// What the guardian must know about the lock, except for its id.
fn lock_spec(servers: &Servers, options: &Run, password: Option<String>) -> LockSpec {
    LockSpec {
        urls: servers.url.clone(),
        password,
        prefix: servers.prefix.clone(),
        table: servers.table.clone(),
        timeout: servers.timeout,
        quarantine: servers.quarantine,
        tls: servers.tls.clone(),
        name: options.name.clone(),
        id: String::new(),
        ttl: options.ttl,
        grace: options.grace,
        is_kept: options.at_least.is_some(),
    }
}

/// Runs the command, and returns when nothing of its process group is left.
fn run_under_lock(
    options: &Run,
    guard: &LockGuard,
    signals: &SignalListener,
    sigttou_blocked: &SigttouBlocked,
    guardian: &mut GuardianHandle,
    last_renewal_error: &LastRenewalError,
) -> Result<CommandResult, Failure> {
    let environment = [
        ("DISTLOCK_NAME", options.name.clone()),
        ("DISTLOCK_ID", guard.id().to_string()),
        ("DISTLOCK_TOKEN", guard.fencing_token().to_string()),
    ];
    let mut terminal = Terminal::open();
    if terminal.as_ref().is_some_and(Terminal::is_foreground) {
        signals.reset_ttin().map_err(system_failure)?;
    }
    let start = || ExecGate::start(&options.command_words(), &environment);
    let gate = sigttou_blocked
        .unblocked_during(start)
        .map_err(io::Error::from)
        .and_then(|gate| gate)
        .map_err(system_failure)?;
    let held_until = clock::since_boot().saturating_add(guard.remaining());
    guardian.send(&GuardianMessage::Started(gate.pid.as_raw_nonzero().get(), held_until));
    // A signal that arrived before the command could receive it ends the wait, as an earlier one
    // would have.
    if let Some(signal) = signals.pending_termination() {
        gate.abort();
        return Ok(CommandResult {
            exit: Exit::Signal(to_u8(signal)),
            signal_origin: SignalOrigin::of_received(terminal.as_ref()),
        });
    }
    // The wrapper may have been stopped for long. If that happens after this check, the guardian
    // kills the gate.
    if !guard.is_held() {
        let why = guard.lost().try_recv().unwrap_or(LockLost::Expired);
        let why = format::escape(&why.to_string());
        output::print_message(&format!(
            "lock {} was lost before the command could start: {why}",
            quoted_name(options)
        ));
        gate.abort();
        return Ok(CommandResult { exit: Exit::Lost, signal_origin: SignalOrigin::NotTty });
    }
    if let Some(terminal) = &mut terminal {
        signals.catch_terminal_stop().map_err(system_failure)?;
        if terminal.should_give_at_start() {
            terminal.give_to(gate.group());
        }
    }
    let pid = gate.pid;
    gate.open();
    Ok(Supervisor::new(
        pid,
        guard,
        &signals.received,
        guardian,
        terminal,
        options,
        last_renewal_error,
    )
    .run())
}

/// Releases the lock, and finds out whether it was held to the end.
fn release_lock(options: &Run, guard: LockGuard, exit: Exit) -> Exit {
    let name = quoted_name(options);
    let lost = |why: String| {
        output::print_message(&format!(
            "lock {name} was lost while the command ran: {}",
            format::escape(&why)
        ));
        Exit::Lost
    };
    if exit == Exit::Lost {
        // The loss has been reported. Dropping the guard deletes what is left, if the servers are
        // reachable.
        drop(guard);
        return exit;
    }
    if !guard.is_held() {
        return lost(guard.lost().try_recv().unwrap_or(LockLost::Expired).to_string());
    }
    match guard.release() {
        Ok(Released::Released) => {
            if options.verbose {
                output::print_message(&format!("released lock {name}"));
            }
            exit
        }
        Ok(Released::Gone) => lost("it no longer exists on the server".into()),
        Ok(Released::OwnedByOther(holder)) => lost(format!("it is now held by {holder}")),
        // A later version of the library may report more.
        Ok(other) => lost(format!("{other:?}")),
        Err(error) => {
            output::print_message(&format!(
                "could not release lock {name}, which stays held until it expires, after {} at the \
                 latest: {}",
                format::duration(options.ttl),
                format::escape(&error.to_string())
            ));
            exit
        }
    }
}

/// Makes this process the parent of orphaned descendants, so that it learns when they end and can
/// reap them.
fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        log::debug!("cannot become the parent of orphans: {error}");
    }
}

/// Runs this program in another process, under `name` in process lists.
fn own_executable(name: &str) -> Command {
    // This link stays valid if the file is replaced by another version, which might not understand
    // our messages.
    #[cfg(target_os = "linux")]
    let program = "/proc/self/exe";
    #[cfg(not(target_os = "linux"))]
    let program = env::current_exe().unwrap_or_else(|_| "distlock".into());
    let mut command = Command::new(program);
    command.arg0(name);
    command
}

fn system_failure(error: io::Error) -> Failure {
    Failure::new(Exit::CannotRun, format!("cannot start the command: {error}"))
}

fn quoted_name(options: &Run) -> String {
    format!("\"{}\"", format::escape(&options.name))
}

fn to_u8(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(u8::MAX)
}

/// For `fuzz`: whether these options can be combined.
#[cfg(test)]
pub(crate) fn has_wait_policy(options: &Run) -> bool {
    WaitPolicy::from_options(options).is_ok()
}

/// For `fuzz`: whether a guardian can parse this.
#[cfg(test)]
pub(crate) fn is_guardian_message(line: &str) -> bool {
    GuardianMessage::parse(line).is_some()
}

/// For `fuzz`: parses the text as what the system says about a process.
#[cfg(test)]
pub(crate) fn parse_process_info(text: &str) -> u64 {
    crate::proc_stat::fuzz_parse(text) | signals::parse_ignored(text)
}
