//! The command lines that acquire locks: `run`, `lock` and `adopt`.

use std::{ffi::OsString, time::Duration};

use clap::{Args as Arguments, ValueEnum, ValueHint};
use distlock::Detached;

use crate::{format::parse_duration, help_text};

/// Which lock to acquire, and how: what `run` and `lock` have in common.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Acquire {
    /// Lease: how long the locks stay held if this machine dies
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    pub(crate) ttl: Duration,
    /// Wait at most this long for the locks, all together; without it, wait without limit
    #[arg(
        long,
        short,
        value_name = "DURATION",
        value_parser = parse_duration,
        conflicts_with = "no_wait"
    )]
    pub(crate) wait: Option<Duration>,
    /// Do not wait for the locks
    #[arg(long, short)]
    pub(crate) no_wait: bool,
    /// What to do if another process holds a lock, or still holds it after --wait. Without --wait,
    /// skip and fail do not wait
    #[arg(long, value_enum, value_name = "ACTION")]
    pub(crate) on_held: Option<OnHeld>,
    /// Exit with this code instead of 75 if another process holds a lock
    #[arg(long, short = 'E', value_name = "CODE", value_parser = parse_exit_code)]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Share the lock with other commands that use --shared; without it, the lock is exclusive.
    /// Takes one NAME. Not with MySQL
    #[arg(long, conflicts_with_all = ["permits", "at_least"])]
    pub(crate) shared: bool,
    /// Let at most LIMIT commands have the lock at a time. With COUNT/LIMIT, this command uses
    /// COUNT of the LIMIT permits. Every command must use the same LIMIT: each command checks only
    /// its own. Takes one NAME. On several nodes, LIMIT must be 1. Not with MySQL
    #[arg(long, value_name = "[COUNT/]LIMIT", value_parser = parse_permits)]
    pub(crate) permits: Option<Permits>,
    /// Keep the lock taken for at least this long after it was acquired, even if it is released
    /// earlier: at most one run in that time. Takes one NAME. Not on several nodes, nor with MySQL
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) at_least: Option<Duration>,
    /// Report on standard error when distlock waits for, acquires and releases the locks
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// Print only failures: no message if another process holds a lock, none about the wait, about
    /// processes that the command left behind, or about renewals that fail at first
    #[arg(long, short, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Names of the locks, which are acquired all or none; a name must not begin with a hyphen
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

/// The command under the lock: what `run` and `adopt` have in common.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Work {
    /// End the command if it has run for this long
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) max_hold: Option<Duration>,
    /// Time between SIGTERM and SIGKILL when distlock ends the command
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_duration)]
    pub(crate) grace: Duration,
    /// Run this text by sh -c, instead of a command after --
    #[arg(
        long = "command",
        short = 'c',
        value_name = "TEXT",
        value_hint = ValueHint::CommandString,
        conflicts_with = "command"
    )]
    pub(crate) shell_command: Option<OsString>,
    /// Command to run under the lock, with its arguments
    #[arg(
        required_unless_present = "shell_command",
        last = true,
        value_name = "COMMAND",
        value_hint = ValueHint::CommandWithArguments
    )]
    command: Vec<OsString>,
}

impl Work {
    /// The command with its arguments.
    pub(crate) fn command_words(&self) -> Vec<OsString> {
        match &self.shell_command {
            Some(text) => vec!["sh".into(), "-c".into(), text.clone()],
            None => self.command.clone(),
        }
    }
}

/// Run a command under a lock
///
/// Waits for the lock, runs the command, renews the lock while the command runs, and releases the
/// lock when the command has ended. Standard streams and exit code are those of the command. With
/// several NAMEs, the command runs under the locks of all of them.
///
/// The command runs in a process group of its own. distlock ends this group if the lock is lost or
/// cannot be renewed in time, if the command has run for --max-hold, and if the command has ended
/// and left processes in the group. To end it, distlock sends SIGTERM, and SIGKILL after --grace.
/// The lock is released when the whole group has ended. Processes that have left the group are not
/// tracked: daemons, and what setsid, an interactive shell, or timeout within a script have
/// started.
///
/// If the lock cannot be renewed, the group must be gone before the lock expires. So SIGTERM is
/// sent shortly before that, in the last quarter of --ttl, and the grace period is cut short where
/// necessary. If the lock turns out to have been deleted or taken by another client, SIGTERM is
/// sent at once, with the full grace period.
///
/// distlock forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 to the group. While it
/// waits for the lock, each of them ends the wait. Signals that were ignored when distlock started
/// stay ignored in the command, except SIGPIPE, SIGCHLD, SIGCONT and, in the foreground of a
/// terminal, SIGTTIN.
///
/// A second process, the guardian (named distlock-guard), ends the group and releases the lock if
/// distlock itself is killed, or stopped by SIGSTOP. In MySQL, the lock ends together with
/// distlock, so another process may get it while the guardian still ends the group.
#[derive(Arguments, Clone, Debug)]
#[command(
    override_usage = help_text::RUN_USAGE,
    after_help = help_text::short_footer(),
    after_long_help = help_text::run_footer()
)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) acquire: Acquire,
    #[command(flatten)]
    pub(crate) work: Work,
}

/// Hold locks until a signal arrives
///
/// Acquires the locks of all NAMEs, prints a line with the fencing token and the name of each, and
/// holds them until SIGINT, SIGTERM, SIGHUP or another signal arrives. Then releases them and exits
/// with 0. Several names are acquired in sorted order, whatever the order on the command line, so
/// that two of these commands cannot deadlock. If one of the locks is lost, exits with 76.
///
/// Nothing supervises a process that relies on the locks; see distlock run for that.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Lock {
    #[command(flatten)]
    pub(crate) acquire: Acquire,
    /// Leave the lock to distlock adopt: print the argument for it, and exit. The lock stays held
    /// for its ttl
    #[arg(long)]
    pub(crate) detach: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) json: bool,
    /// Words after `--`, which are refused: they are a command that was meant for `run`, and must
    /// not be taken as names.
    #[arg(last = true, hide = true)]
    pub(crate) command: Vec<OsString>,
}

/// Run a command under a lock that lock --detach has acquired
///
/// DETACHED is what distlock lock --detach has printed. The lock passes to this process, with a new
/// fencing token, and nobody else can get it in between. From then on, adopt behaves like
/// distlock run. If the lock has expired, or another process has it, the command does not run, and
/// distlock exits with 76.
#[derive(Arguments, Clone, Debug)]
#[command(
    override_usage = help_text::ADOPT_USAGE,
    after_help = help_text::short_footer(),
    after_long_help = help_text::run_footer()
)]
pub(crate) struct Adopt {
    /// Report on standard error when distlock adopts and releases the lock
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// The line that distlock lock --detach has printed
    pub(crate) detached: Detached,
    #[command(flatten)]
    pub(crate) work: Work,
}

/// Permits of a semaphore: how many this command needs, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permits {
    pub(crate) count: u32,
    pub(crate) limit: u32,
}

fn parse_exit_code(text: &str) -> Result<u8, String> {
    text.parse().map_err(|_| "write a number from 0 to 255".to_owned())
}

fn parse_permits(text: &str) -> Result<Permits, String> {
    let (count, limit) = text.split_once('/').unwrap_or(("1", text));
    let number = |digits: &str| {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err("write LIMIT or COUNT/LIMIT, such as 4 or 2/4".to_owned());
        }
        digits
            .parse::<u32>()
            .map_err(|_| format!("{digits} is too large; write at most {}", u32::MAX))
    };
    let (count, limit) = (number(count)?, number(limit)?);
    if limit == 0 {
        return Err("the limit is 0, so that no command could run; write at least 1".into());
    }
    if count == 0 {
        return Err(format!("0 permits are no lock; write 1/{limit} to {limit}/{limit}"));
    }
    if count > limit {
        return Err(format!(
            "{count} permits cannot be acquired if the limit is {limit}; write at least 1 and at \
             most {limit}"
        ));
    }
    Ok(Permits { count, limit })
}

/// What `run` and `lock` do if another process holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnHeld {
    /// Exit with 0 at once, without the lock; with --wait, after that time
    Skip,
    /// Exit with 75 at once, without the lock; with --wait, after that time
    Fail,
    /// Wait for the lock; with --wait, exit with 75 after that time
    Wait,
}
