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
mod expiry;
mod grace_period;
mod guardian_handle;
mod guardian_main;
mod guardian_stderr;
mod held;
mod hold;
mod kill;
mod message;
mod pipe_reader;
mod renewals;
mod signals;
mod supervise;
mod terminal;
mod tty_signal;
mod wait_policy;
mod wait_reporter;
mod watchdog;

use std::{
    env, io, os::unix::process::CommandExt as _, process::Command, sync::Arc, time::Duration,
};

use crossbeam_channel::Receiver;

pub(crate) use self::hold::hold;
use self::{
    acquire::{AcquireResult, Request, acquire, describe_interruption, not_acquired},
    exec_gate::ExecGate,
    expiry::Expiry,
    guardian_handle::GuardianHandle,
    held::{Held, ReleaseResult},
    message::{GuardianMessage, LockSpec},
    renewals::{RenewalChange, RenewalHandler},
    signals::SignalListener,
    supervise::{CommandResult, Supervisor, SupervisorOptions},
    terminal::{SigttouBlocked, Terminal},
    tty_signal::{SignalOrigin, exit_by_signal},
    wait_policy::WaitPolicy,
    wait_reporter::with_reporters,
};
use crate::{
    args::{Adopt, Run, Servers, Work},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    format,
    manager_config::ManagerConfig,
    output,
    quarantine_option::QuarantineOption,
    stderr_writer,
};

/// Maximum time that the start of a command waits until the message about its lock is written.
const START_FLUSH_TIMEOUT: Duration = Duration::from_millis(100);

/// A command, and the locks that it runs under.
struct Job<'a> {
    servers: &'a Servers,
    request: Request<'a>,
    policy: WaitPolicy,
    ttl: Duration,
    /// Time for which the lock stays taken, even if the command ends earlier.
    at_least: Option<Duration>,
    work: &'a Work,
    verbose: bool,
    quiet: bool,
}

/// Runs a command under locks that it acquires.
pub(crate) fn run(servers: &Servers, options: &Run) -> Outcome {
    let Run { acquire, work } = options;
    let policy = WaitPolicy::from_options(acquire)?;
    let request = Request::from_options(acquire, policy)?;
    let job = Job {
        servers,
        request,
        policy,
        ttl: acquire.ttl,
        at_least: acquire.at_least,
        work,
        verbose: acquire.verbose,
        quiet: acquire.quiet,
    };
    job.run()
}

/// Runs a command under a lock that another process has detached.
pub(crate) fn adopt(servers: &Servers, options: &Adopt) -> Outcome {
    let Adopt { verbose, detached, work } = options;
    let job = Job {
        servers,
        request: Request::Adopted(detached),
        policy: WaitPolicy::NO_WAIT,
        ttl: detached.ttl(),
        at_least: None,
        work,
        verbose: *verbose,
        quiet: false,
    };
    job.run()
}

impl Job<'_> {
    fn run(self) -> Outcome {
        if self.work.max_hold.is_some_and(|limit| limit.is_zero()) {
            return Err(Failure::usage(
                "--max-hold is zero, which leaves the command no time; raise it or leave it out",
            ));
        }
        let (config, password) = self.build_config()?;
        let (config, outer) = with_reporters(config, self.policy, self.verbose, self.quiet);
        let signals = SignalListener::start().map_err(system_failure)?;
        let sigttou_blocked =
            SigttouBlocked::block().map_err(|error| system_failure(error.into()))?;
        adopt_orphans();
        let names = self.request.names();
        let mut guardian = GuardianHandle::start(&names).map_err(system_failure)?;
        let (handler, renewals) = RenewalHandler::new();
        let config = config.event_handler(Arc::new(handler));
        let reporter = guardian.acquire_reporter(self.lock_spec(password));
        let mgr = config.event_handler(Arc::new(reporter)).manager()?;
        let started = clock::now();
        let acquired = acquire(&*mgr, &self.request, &signals.received, &outer);
        let held = match acquired.map_err(system_failure)? {
            AcquireResult::Acquired(held) => held,
            AcquireResult::Interrupted(signal) => {
                drop(guardian);
                if self.verbose {
                    output::print_message(&describe_interruption(signal));
                    // The signal may end this process next.
                    stderr_writer::flush(stderr_writer::EXIT_FLUSH_TIMEOUT);
                }
                return Ok(exit_by_signal(
                    Exit::Signal(to_u8(signal)),
                    SignalOrigin::of_received(Terminal::open().as_ref()),
                ));
            }
            AcquireResult::Failed(error) => return not_acquired(error, self.policy, self.quiet),
        };
        let expiry = Expiry::new(self.ttl, self.at_least);
        if self.verbose {
            held.report_acquired(clock::now().duration_since(started));
            // So that the messages usually come before the command's output.
            stderr_writer::flush(START_FLUSH_TIMEOUT);
        }
        let result =
            self.run_under_lock(&held, &signals, &sigttou_blocked, &mut guardian, &renewals);
        let exit = result.as_ref().map_or(Exit::CannotRun, |result| result.exit);
        let exit = self.release_lock(held, expiry, exit);
        drop(guardian);
        // Before a signal ends this process: the manager tries again to release what is left.
        drop(mgr);
        result.map(|result| exit_by_signal(exit, result.signal_origin))
    }

    /// Builds the configuration. The password is returned too, because its file may be a pipe,
    /// which can be read only once.
    fn build_config(&self) -> Result<(ManagerConfig, Option<String>), Failure> {
        let password =
            self.servers.password_file.as_deref().map(connect::read_password).transpose()?;
        let mut config = connect::config(&Servers { password_file: None, ..self.servers.clone() })?;
        QuarantineOption::from_args(self.servers)?.check_ttl(config.each_node().len(), self.ttl)?;
        config = config.ttl(self.ttl);
        config = config.for_names(self.request.names().len());
        if let Some(password) = &password {
            config = config.password(password);
        }
        Ok((config, password))
    }

    /// What the guardian must know about the locks, except for their names and ids.
    fn lock_spec(&self, password: Option<String>) -> LockSpec {
        let servers = self.servers;
        LockSpec {
            urls: servers.url.clone(),
            password,
            prefix: servers.prefix.clone(),
            table: servers.table.clone(),
            timeout: servers.timeout,
            quarantine: servers.quarantine,
            tls: servers.tls.clone(),
            name: String::new(),
            id: String::new(),
            ttl: self.ttl,
            grace: self.work.grace,
            is_kept: self.at_least.is_some(),
        }
    }

    /// Runs the command, and returns when nothing of its process group is left.
    fn run_under_lock(
        &self,
        held: &Held,
        signals: &SignalListener,
        sigttou_blocked: &SigttouBlocked,
        guardian: &mut GuardianHandle,
        renewals: &Receiver<RenewalChange>,
    ) -> Result<CommandResult, Failure> {
        let mut terminal = Terminal::open();
        if terminal.as_ref().is_some_and(Terminal::is_foreground) {
            signals.reset_ttin().map_err(system_failure)?;
        }
        let start = || ExecGate::start(&self.work.command_words(), &held.environment());
        let gate = sigttou_blocked
            .unblocked_during(start)
            .map_err(io::Error::from)
            .and_then(|gate| gate)
            .map_err(system_failure)?;
        let held_until = clock::since_boot().saturating_add(held.remaining());
        guardian.send(&GuardianMessage::Started(gate.pid.as_raw_nonzero().get(), held_until));
        // A signal that arrived before the command could receive it ends the wait, as an earlier
        // one would have.
        if let Some(signal) = signals.pending_termination() {
            gate.abort();
            return Ok(CommandResult {
                exit: Exit::Signal(to_u8(signal)),
                signal_origin: SignalOrigin::of_received(terminal.as_ref()),
            });
        }
        // The wrapper may have been stopped for long. If that happens after this check, the
        // guardian kills the gate.
        if !held.is_held() {
            let (lock, why) = held.loss();
            let why = format::escape(&why.to_string());
            output::print_message(&format!(
                "{lock} was lost before the command could start: {why}"
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
            held,
            &signals.received,
            guardian,
            terminal,
            SupervisorOptions {
                ttl: self.ttl,
                grace: self.work.grace,
                max_hold: self.work.max_hold,
                quiet: self.quiet,
            },
            renewals,
        )
        .run())
    }

    /// Releases the lock, and finds out whether it was held to the end.
    fn release_lock(&self, held: Held, expiry: Expiry, exit: Exit) -> Exit {
        let lost = |lock: &str, why: &str| {
            output::print_message(&format!(
                "{lock} was lost while the command ran: {}",
                format::escape(why)
            ));
            Exit::Lost
        };
        if exit == Exit::Lost {
            // The loss has been reported. Dropping the guards deletes what is left, if the servers
            // are reachable.
            drop(held);
            return exit;
        }
        if !held.is_held() {
            let (lock, why) = held.loss();
            return lost(&lock, &why.to_string());
        }
        // The result of a release does not say which of several locks it is about.
        let any = held.any();
        match held.release(expiry, self.verbose) {
            ReleaseResult::Lost(why) => lost(&any, &why),
            // The command has ended, so its exit code says more.
            ReleaseResult::Released | ReleaseResult::Failed(_) => exit,
        }
    }
}

/// Runs this process as a gate or a guardian, if that is what its arguments ask for.
pub(crate) fn internal_step(mut arguments: env::ArgsOs) -> Option<Outcome> {
    match arguments.nth(1)?.to_str()? {
        exec_gate::GATE_ARG => Some(exec_gate::gate_main(arguments)),
        guardian_handle::GUARDIAN_ARG => Some(guardian_main::guardian_main(arguments)),
        _ => None,
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

fn to_u8(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(u8::MAX)
}

/// For `fuzz`: whether these options can be combined.
#[cfg(test)]
pub(crate) fn has_wait_policy(options: &Run) -> bool {
    WaitPolicy::from_options(&options.acquire).is_ok()
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
