//! The command line as types. Help, shell completions and the manual page are generated from them.

mod locking;
mod usage_error;

use std::{env, ffi::OsString, fmt, path::PathBuf, time::Duration};

use clap::{
    Args as Arguments, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueHint,
    builder::Resettable,
};
use serde::{Deserialize, Serialize};

pub(crate) use self::{
    locking::{Acquire, Adopt, Lock, OnHeld, Permits, Run, Work},
    usage_error::{summary, text},
};
use crate::{
    format::{escape, parse_duration},
    help_text,
    urls::has_password,
};

/// Distributed locks for shell scripts and operators, kept in Redis, Valkey, MySQL or MariaDB.
///
/// At most one process at a time, on any machine, holds the lock of a given name. distlock run runs
/// a command under a lock. The other commands list, inspect, release and measure locks, and check
/// their servers.
///
/// Durations are written like 300ms, 30s, 5m or 1h. A number alone is in seconds.
#[derive(Debug, Parser)]
#[command(
    name = "distlock",
    version,
    after_help = help_text::short_footer(),
    after_long_help = help_text::long_footer(),
    propagate_version = true,
    subcommand_required = true
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) servers: Servers,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// Whether the command line names servers, and not the environment.
    pub(crate) fn has_url(&self) -> bool {
        let arguments: &[String] = match &self.command {
            Command::Init(Init { urls, .. })
            | Command::Doctor(Doctor { urls, .. })
            | Command::Bench(Bench { urls, .. }) => urls,
            _ => &[],
        };
        !self.servers.url.is_empty() || !arguments.is_empty()
    }
}

/// Why a command line was not parsed into `Args`.
#[derive(Debug)]
pub(crate) enum ArgError {
    /// A request for help or the version, or a usage error.
    Clap(clap::Error),
    /// A usage error with a password in it. Clap's message would repeat the argument, so it is not
    /// shown.
    Password {
        /// There is no `--`, so the argument may belong to a command that the lock is for.
        lacks_separator: bool,
    },
    /// `lock` with a command after `--`.
    LockWithCommand {
        /// The command line that does what this one seems to ask for.
        instead: String,
    },
}

impl ArgError {
    /// The user asked for help or the version, which is not an error.
    pub(crate) fn is_help(&self) -> bool {
        matches!(self, ArgError::Clap(error) if !error.use_stderr())
    }
}

impl fmt::Display for ArgError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArgError::Clap(error) => f.write_str(&text(error)),
            ArgError::Password { lacks_separator } => {
                f.write_str(
                    "a URL on the command line seems to contain a password, which every user of \
                     this machine can read: put the URL into DISTLOCK_URL, or the password into a \
                     file and pass --password-file. If the text after a colon is meant as a port, \
                     it must be a number; in a list, each server needs a whole URL",
                )?;
                if *lacks_separator {
                    f.write_str(
                        ". If the URL is for the command that is to run, write -- before it",
                    )?;
                }
                Ok(())
            }
            ArgError::LockWithCommand { instead } => {
                write!(f, "lock runs no command; use: {instead}")
            }
        }
    }
}

/// Arguments whose environment variable counts as unset if it is empty, because a systemd unit can
/// only clear a variable that way. An empty prefix is valid, so it is not in this list.
const UNSET_IF_EMPTY: [(&str, &str); 6] = [
    ("password_file", "DISTLOCK_PASSWORD_FILE"),
    ("table", "DISTLOCK_TABLE"),
    ("quarantine", "DISTLOCK_QUARANTINE"),
    ("cacert", "DISTLOCK_CACERT"),
    ("cert", "DISTLOCK_CERT"),
    ("key", "DISTLOCK_KEY"),
];

/// Parses a command line, whose first word is the name of this program.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Args, ArgError> {
    let words: Vec<OsString> = words.into_iter().collect();
    let mut command = with_negative_numbers(Args::command());
    for (id, variable) in UNSET_IF_EMPTY {
        if env::var_os(variable).is_some_and(|value| value.is_empty()) {
            command = command.mut_arg(id, |arg| arg.env(Resettable::Reset));
        }
    }
    let matches = command.try_get_matches_from_mut(&words);
    let args = matches
        .and_then(|matches| Args::from_arg_matches(&matches))
        .map_err(|error| usage_error::with_our_tips(error.format(&mut command), &words));
    let args = args.map_err(|error| {
        let (shown, separator) = (text(&error), words.iter().position(|word| word == "--"));
        let is_secret = |(at, word): (usize, &OsString)| {
            let word = word.to_string_lossy();
            // Arguments of the command are not for us: they count only if the message shows them.
            let may_be_shown = separator.is_none_or(|separator| at < separator)
                || shown.contains(&*word)
                || escape(&word) != word;
            may_be_shown && word.contains("://") && has_password(&word)
        };
        if error.use_stderr() && words.iter().enumerate().any(is_secret) {
            ArgError::Password { lacks_separator: separator.is_none() }
        } else {
            ArgError::Clap(error)
        }
    })?;
    match &args.command {
        Command::Lock(lock) if !lock.command.is_empty() => {
            Err(ArgError::LockWithCommand { instead: usage_error::as_run(&words) })
        }
        _ => Ok(args),
    }
}

/// Lets `-5` reach the parser of an option, which can say what is wrong with it.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let allow = |arg: clap::Arg| {
        let has_value = arg.get_action().takes_values() && !arg.is_positional();
        if has_value { arg.allow_negative_numbers(true) } else { arg }
    };
    command.mut_args(allow).mut_subcommands(|command| command.mut_args(allow))
}

/// The servers that keep the locks.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Servers {
    /// Server: redis://[user@]host[:port][/db], rediss:// for TLS, valkey://, unix:///path,
    /// redis+sentinel://host,host/master, redis+cluster://host,host, or mysql://[user@]host[:port]/database. For several nodes,
    /// repeat the option or separate URLs with commas. Default: DISTLOCK_URL, then REDIS_URL, then
    /// redis://127.0.0.1:6379. Must not contain a password
    #[arg(
        long,
        global = true,
        value_name = "URL",
        value_hint = ValueHint::Url,
        help_heading = "Servers"
    )]
    pub(crate) url: Vec<String>,
    /// File whose first line is the password for all servers whose URL has none
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        env = "DISTLOCK_PASSWORD_FILE",
        help_heading = "Servers"
    )]
    pub(crate) password_file: Option<PathBuf>,
    /// Text put before each lock name [default: lock: in Redis and Valkey, nothing in MySQL]
    #[arg(
        long,
        global = true,
        value_name = "TEXT",
        env = "DISTLOCK_PREFIX",
        help_heading = "Servers"
    )]
    pub(crate) prefix: Option<String>,
    /// Table of the locks in MySQL, as table or database.table [default: distlock]
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "DISTLOCK_TABLE",
        help_heading = "Servers"
    )]
    pub(crate) table: Option<String>,
    /// Maximum time for one exchange with a server, connecting included [default: 1s, in MySQL 3s]
    #[arg(
        long,
        global = true,
        value_name = "DURATION",
        value_parser = parse_duration,
        help_heading = "Servers"
    )]
    pub(crate) timeout: Option<Duration>,
    /// How long one of several nodes must not vote if it may have lost its data. Use the longest
    /// ttl of all clients of these nodes, and the same value for all of them. 0 turns it off, which
    /// is the default for two nodes [default: 30s]
    #[arg(
        long,
        global = true,
        value_name = "DURATION",
        env = "DISTLOCK_QUARANTINE",
        value_parser = parse_duration,
        help_heading = "Servers"
    )]
    pub(crate) quarantine: Option<Duration>,
    #[command(flatten)]
    pub(crate) tls: TlsFiles,
}

/// Certificates for rediss:// and valkeys://.
#[derive(Arguments, Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct TlsFiles {
    /// CA certificates to trust (PEM), for rediss://, valkeys:// and mysql://; default: the system's
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        env = "DISTLOCK_CACERT",
        help_heading = "Servers"
    )]
    pub(crate) cacert: Option<PathBuf>,
    /// File with the certificate of this client, for servers that ask for one; needs --key
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        env = "DISTLOCK_CERT",
        help_heading = "Servers"
    )]
    pub(crate) cert: Option<PathBuf>,
    /// File with the private key of that certificate
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        env = "DISTLOCK_KEY",
        help_heading = "Servers"
    )]
    pub(crate) key: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Lock(Lock),
    Adopt(Adopt),
    Ls(Ls),
    Show(Show),
    Release(Release),
    Top(Top),
    Init(Init),
    Doctor(Doctor),
    Bench(Bench),
    /// Print the statement that creates the table of the locks in MySQL
    ///
    /// To create the table: distlock mysql-schema | mysql DATABASE
    ///
    /// Needs no server. --table names another table.
    MysqlSchema,
    Prune(Prune),
    Completions(Completions),
    /// Print the manual page
    ///
    /// To read it: distlock man | man -l -
    Man,
}

/// List held locks
///
/// Shows for each lock whether one client holds it alone, or how many readers or permits share it;
/// its holder, how long it has been held, the time left until it expires unless it is renewed, the
/// number of waiters, and the fencing token. "+2" after a holder stands for two more. "kept" before
/// the time means that the holder has released the lock, which stays taken for that time. Right
/// after a hand-over, the time left is short, until the new holder confirms that it has the lock.
/// "not certain" means that no quorum of the nodes agrees on the holder.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Ls {
    /// Pattern for names: * is any text, ? any character, [a-c] any of a set
    #[arg(default_value = "*", hide_default_value = true)]
    pub(crate) pattern: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show one lock: its kind and holders, its queue and what each node reports
///
/// Exits with 1 if the lock is not held.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Show {
    /// Name of the lock
    pub(crate) name: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Take a lock from its holder, which learns of it at its next renewal
///
/// The next waiter gets the lock at once, so for up to a third of the ttl two processes may act as
/// its holder. If several processes share the lock, --force takes it from all of them, and --if-id
/// from one. Exits with 1 if nothing was released, or if the lock is still held by a process from
/// which --force should have taken it.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Release {
    /// Name of the lock
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) target: ReleaseTarget,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which holder `release` may take the lock from.
#[derive(Arguments, Clone, Debug)]
#[group(required = true, multiple = false)]
pub(crate) struct ReleaseTarget {
    /// Take the lock from its current holder or holders, whichever those are
    #[arg(long)]
    pub(crate) force: bool,
    /// Take the lock only if its holder has this id
    #[arg(long, value_name = "ID")]
    pub(crate) if_id: Option<String>,
}

/// Watch locks live
///
/// Press ? for a list of keys and columns, and q to quit.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Top {
    /// Pattern for names: * is any text, ? any character, [a-c] any of a set
    #[arg(default_value = "*", hide_default_value = true)]
    pub(crate) pattern: String,
    /// Time between two polls of the servers
    #[arg(
        long,
        short,
        value_name = "DURATION",
        default_value = "1s",
        value_parser = parse_duration
    )]
    pub(crate) interval: Duration,
}

/// Declare that several nodes are new, so that they vote at once
///
/// A node that has just started does not vote until its quarantine has ended, because it may have
/// lost its locks in a restart. A new node looks the same. Run this once, when the nodes are set
/// up; never whenever a node starts. It is safe only if no node has ever been used, or if nobody
/// has held a lock there for the longest ttl in use. Otherwise two processes can hold a lock at
/// the same time.
///
/// All nodes must be reachable, and none may be or have been a replica. A node that restarts later
/// is in quarantine again. A single server needs no declaration. For tests, --quarantine 0 makes
/// this unnecessary.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Init {
    /// Servers to declare new; without them, those of --url or of the environment
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) urls: Vec<String>,
    /// Also declare nodes new that have been used. Nobody may have held a lock there for the
    /// longest ttl in use
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Check whether the servers are fit for locks, and suggest fixes
///
/// Checks permissions, settings, clocks and round trips, and hands a test lock from one thread to
/// another. Temporary keys are deleted afterwards. Exits with 1 if there is a problem; warnings and
/// unknown results do not count.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Doctor {
    /// Servers to check; without them, those of --url or of the environment
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) urls: Vec<String>,
    /// Shortest ttl in use on these servers
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    pub(crate) ttl: Duration,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Measure how fast these servers lock, hand over and renew, beside a bare round trip
///
/// Uses a temporary lock, which no other client waits for.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Bench {
    /// Servers to measure; without them, those of --url or of the environment
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) urls: Vec<String>,
    /// Total time to measure
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_duration)]
    pub(crate) time: Duration,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Delete rows of unused locks from a table in MySQL
///
/// The row of a lock stays in the table when the lock is released. The fencing tokens of a lock
/// whose row was deleted still increase, unless the server's clock is set back by more than
/// --older-than.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Prune {
    /// Delete only rows of locks that nobody has acquired for this time
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = parse_duration)]
    pub(crate) older_than: Duration,
}

/// Print completions for a shell
///
/// For bash: distlock completions bash > ~/.local/share/bash-completion/completions/distlock
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Completions {
    /// Shell to print them for
    pub(crate) shell: clap_complete::Shell,
}
