//! `distlock run`: a command under a lock. Whatever happens to anybody in this, the command does not outlive its lock, and
//! the lock does not outlive the command.
//!
//! The command leads a process group of its own. A *guardian*, a second process of this program, ends that group and
//! gives the lock up if this one is killed.

mod acquire;
mod course;
mod ear;
mod gate;
mod guardian;
mod keyed;
mod notice;
mod plan;
mod process;
mod signals;
mod supervise;
mod terminal;
mod trouble;
mod vigil;
mod watch;
mod word;

use std::{env, io, os::unix::process::CommandExt as _, process::Command, sync::Arc, time::Duration};

use distlock::{Config, LockGuard, LockLost, LockOptions, RedisMgr, Released};

use self::{
    acquire::{Asked, Telling, ask},
    gate::Gate,
    guardian::Guardian,
    keyed::{Keyed, leave},
    plan::Plan,
    signals::Hearing,
    supervise::{Ending, Supervisor},
    terminal::{Terminal, Unstoppable},
    trouble::Trouble,
    word::{Lock, Word},
};
use crate::{
    args::{Run, Servers},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    output,
    quarantine::Quarantine,
    text, voice,
};

/// For how long a command waits until somebody has read that it has its lock.
const FIRST_WORDS: Duration = Duration::from_millis(100);

pub(crate) fn run(servers: &Servers, options: &Run) -> Outcome {
    let plan = Plan::of(options)?;
    let (config, password) = config(servers, options, plan)?;
    let hearing = Hearing::start().map_err(no_system)?;
    let unstoppable = Unstoppable::begin().map_err(|error| no_system(error.into()))?;
    adopt_orphans();
    let mut guardian = Guardian::start(&options.name).map_err(no_system)?;
    let trouble = Trouble::default();
    let config = config.event_handler(Arc::new(trouble.clone()));
    let mgr = RedisMgr::new(config.event_handler(Arc::new(guardian.asking(lock(servers, options, password)))))?;
    let mut lock_options = LockOptions::new();
    if let Some(wait) = plan.wait {
        lock_options = lock_options.wait(wait);
    }
    let begun = clock::now();
    let guard = match ask(&mgr, &options.name, &lock_options, &hearing.heard).map_err(no_system)? {
        Asked::Got(guard) => guard,
        Asked::Ended(signal) => {
            drop(guardian);
            return Ok(leave(Exit::Signal(number(signal)), Keyed::heard_at(Terminal::open().as_ref())));
        }
        Asked::Not(error) if plan.skips(&error) => {
            output::say(&format!("skipped: {}", text::clean(&error.to_string())));
            return Ok(Exit::Fine);
        }
        Asked::Not(error) => return Err(Failure { message: text::clean(&error.to_string()), ..error.into() }),
    };
    if options.verbose {
        let (token, waited) = (guard.fencing_token(), text::span(clock::now().duration_since(begun)));
        output::say(&format!("has lock {} with token {token} after {waited}", quoted(options)));
        // Before the command's own words, if somebody reads.
        voice::await_written(FIRST_WORDS);
    }
    let ending = hold(options, &guard, &hearing, &unstoppable, &mut guardian, &trouble);
    let exit = release(options, guard, ending.as_ref().map_or(Exit::CannotRun, |ending| ending.exit));
    drop(guardian);
    ending.map(|ending| leave(exit, ending.keyed))
}

/// The steps that this program takes in processes of their own.
pub(crate) fn step(mut arguments: env::ArgsOs) -> Option<Outcome> {
    match arguments.nth(1)?.to_str()? {
        gate::STEP => Some(gate::step(arguments)),
        guardian::STEP => Some(watch::step()),
        _ => None,
    }
}

/// The password is read once: its file may be a pipe.
fn config(servers: &Servers, options: &Run, plan: Plan) -> Result<(Config, Option<String>), Failure> {
    let password = servers.password_file.as_deref().map(connect::read_password).transpose()?;
    let mut config = connect::config(&Servers { password_file: None, ..servers.clone() })?;
    Quarantine::of(servers)?.admit(&config, options.ttl)?;
    config = config.ttl(options.ttl);
    if let Some(password) = &password {
        config = config.password(password);
    }
    if options.verbose && plan.wait != Some(Duration::ZERO) {
        config = config.event_handler(Arc::new(Telling));
    }
    Ok((config, password))
}

/// What the guardian has to know of the lock, but for its identifier.
fn lock(servers: &Servers, options: &Run, password: Option<String>) -> Lock {
    Lock {
        urls: servers.url.clone(),
        password,
        prefix: servers.prefix.clone(),
        timeout: servers.timeout,
        quarantine: servers.quarantine,
        name: options.name.clone(),
        id: String::new(),
        ttl: options.ttl,
        grace: options.grace,
    }
}

/// Runs the command, and returns when nothing of its process group is left.
fn hold(
    options: &Run,
    guard: &LockGuard,
    hearing: &Hearing,
    unstoppable: &Unstoppable,
    guardian: &mut Guardian,
    trouble: &Trouble,
) -> Result<Ending, Failure> {
    let environment = [
        ("DISTLOCK_NAME", options.name.clone()),
        ("DISTLOCK_ID", guard.id().to_string()),
        ("DISTLOCK_TOKEN", guard.fencing_token().to_string()),
    ];
    let mut terminal = Terminal::open();
    if terminal.as_ref().is_some_and(Terminal::is_ours) {
        hearing.let_reads_stop().map_err(no_system)?;
    }
    let start = || Gate::start(&options.command, &environment);
    let gate = unstoppable.except_for(start).map_err(io::Error::from).and_then(|gate| gate).map_err(no_system)?;
    let held_until = clock::since_boot().saturating_add(guard.remaining());
    guardian.tell(&Word::Group(gate.pid.as_raw_nonzero().get(), held_until));
    // A signal that came before the command could have been sent it ends the wait as if it had come a moment sooner.
    if let Some(signal) = hearing.end_of_wait() {
        gate.close();
        return Ok(Ending { exit: Exit::Signal(number(signal)), keyed: Keyed::heard_at(terminal.as_ref()) });
    }
    // We may have been kept from running for long. If that happens from now on, the guardian does not let it begin.
    if !guard.is_held() {
        let why = guard.lost().try_recv().unwrap_or(LockLost::Expired);
        let why = text::clean(&why.to_string());
        output::say(&format!("lock {} was lost before the command could begin: {why}", quoted(options)));
        gate.close();
        return Ok(Ending { exit: Exit::Lost, keyed: Keyed::Nobody });
    }
    if let Some(terminal) = &mut terminal {
        hearing.hear_stops().map_err(no_system)?;
        if terminal.is_the_commands() {
            terminal.give_to(gate.group());
        }
    }
    let pid = gate.pid;
    gate.open();
    Ok(Supervisor::new(pid, guard, &hearing.heard, guardian, terminal, options, trouble).run())
}

/// Gives the lock up. Only now can it be known that it was there to the end.
fn release(options: &Run, guard: LockGuard, exit: Exit) -> Exit {
    let name = quoted(options);
    let lost = |why: String| {
        output::say(&format!("lock {name} was lost while the command ran: {}", text::clean(&why)));
        Exit::Lost
    };
    if exit == Exit::Lost {
        // Told already. What is still there is given up here, as far as the servers answer.
        drop(guard);
        return exit;
    }
    if !guard.is_held() {
        return lost(guard.lost().try_recv().unwrap_or(LockLost::Expired).to_string());
    }
    match guard.release() {
        Ok(Released::Released) => {
            if options.verbose {
                output::say(&format!("has released lock {name}"));
            }
            exit
        }
        Ok(Released::Gone) => lost("the server does not know it any more".into()),
        Ok(Released::OwnedByOther(holder)) => lost(format!("it is now held by {holder}")),
        Err(error) => {
            output::say(&format!(
                "lock {name} could not be released and stays until it expires, after {} at the latest: {}",
                text::span(options.ttl),
                text::clean(&error.to_string())
            ));
            exit
        }
    }
}

/// What the command leaves behind becomes a child of ours, so that we learn of its end and leave no dead processes.
fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        log::debug!("does not become the parent of orphans: {error}");
    }
}

/// This program, for another process of it, and what that is to be called.
fn own_program(name: &str) -> Command {
    // Also leads there when the file has been replaced by a newer one, which may not understand us.
    #[cfg(target_os = "linux")]
    let program = "/proc/self/exe";
    #[cfg(not(target_os = "linux"))]
    let program = env::current_exe().unwrap_or_else(|_| "distlock".into());
    let mut command = Command::new(program);
    command.arg0(name);
    command
}

fn no_system(error: io::Error) -> Failure {
    Failure::new(Exit::CannotRun, format!("the system did not give what it takes to run a command: {error}"))
}

fn quoted(options: &Run) -> String {
    format!("\"{}\"", text::clean(&options.name))
}

fn number(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(u8::MAX)
}

/// For `fuzz`: whether these options make sense together.
#[cfg(test)]
pub(crate) fn is_planned(options: &Run) -> bool {
    Plan::of(options).is_ok()
}

/// For `fuzz`: whether a guardian would understand this.
#[cfg(test)]
pub(crate) fn is_word(line: &str) -> bool {
    Word::parse(line).is_some()
}

/// For `fuzz`: what would be understood of this if the system told it about a process.
#[cfg(test)]
pub(crate) fn is_process(told: &str) -> u64 {
    crate::stat::is_stat(told) | signals::ignored(told)
}
