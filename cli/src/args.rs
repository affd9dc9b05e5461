//! What can be asked for, as types. Also what help, completions and the manual page are made of.

use std::{env, ffi::OsString, fmt, path::PathBuf, time::Duration};

use clap::{
    Args as Arguments, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum, ValueHint,
    builder::Resettable,
};

use crate::connect::{has_password, span};

const CODES: &str = "\
Exit codes:
  0    it did what was asked; for run, the command's own code, whatever it is
  1    no: nobody holds the lock, nothing was released, the doctor found problems
  64   the arguments, the environment or a file cannot work
  69   the servers cannot be reached, do not agree, or refuse
  75   somebody else holds the lock
  76   the lock was lost, or could not be renewed in time, while the command ran
  124  the command ran for longer than --max-hold
  126  the command cannot be started
  127  the command is not there
  128+ a signal ended the command, or the wait for the lock: its number is added";

/// Locks that hold across processes and machines, kept in Redis or Valkey.
///
/// With DISTLOCK_LOG=warn in the environment, or info, debug or trace, what happens underneath is told on standard error.
#[derive(Debug, Parser)]
#[command(name = "distlock", version, after_help = CODES, propagate_version = true, subcommand_required = true)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) servers: Servers,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Why a command line is no request.
#[derive(Debug)]
pub(crate) enum Unread {
    /// It asks for help or the version, or is wrong.
    Said(clap::Error),
    /// It is wrong and has a password in it. What is wrong with an argument is said by repeating it, so nothing is.
    Password,
}

impl Unread {
    /// It was asked for: no error.
    pub(crate) fn is_help(&self) -> bool {
        matches!(self, Unread::Said(error) if !error.use_stderr())
    }
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unread::Said(error) => error.fmt(f),
            Unread::Password => f.write_str(
                "there seems to be a password on the command line, where every user of this machine can read it: put the \
                 URL into DISTLOCK_URL, or the password into a file for --password-file. If what stands behind a colon \
                 was meant for a port, it has to be a number",
            ),
        }
    }
}

/// Arguments and their variables of which an empty one is none, as units of systemd's take them away. A prefix may be empty.
const UNSET_IF_EMPTY: [(&str, &str); 2] =
    [("password_file", "DISTLOCK_PASSWORD_FILE"), ("quarantine", "DISTLOCK_QUARANTINE")];

/// Makes sense of a command line, of which the first word is this program's name.
pub(crate) fn read(words: impl IntoIterator<Item = OsString>) -> Result<Args, Unread> {
    let words: Vec<OsString> = words.into_iter().collect();
    let mut command = Args::command();
    for (id, variable) in UNSET_IF_EMPTY {
        if env::var_os(variable).is_some_and(|value| value.is_empty()) {
            command = command.mut_arg(id, |arg| arg.env(Resettable::Reset));
        }
    }
    let matches = command.try_get_matches_from_mut(&words);
    let args = matches.and_then(|matches| Args::from_arg_matches(&matches)).map_err(|error| error.format(&mut command));
    args.map_err(|error| {
        let is_secret = |word: &OsString| {
            let word = word.to_string_lossy();
            word.contains("://") && has_password(&word)
        };
        if error.use_stderr() && words.iter().any(is_secret) { Unread::Password } else { Unread::Said(error) }
    })
}

/// Which servers keep the locks.
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Servers {
    /// The server, as redis://[user@]host[:port][/db] or unix:///path; several times, or with commas, for several nodes.
    /// Without it: DISTLOCK_URL, else REDIS_URL, else redis://127.0.0.1:6379. Passwords do not belong here
    #[arg(long, global = true, value_name = "URL", value_hint = ValueHint::Url, help_heading = "Servers")]
    pub(crate) url: Vec<String>,
    /// A file whose first line is the password of all servers whose URL has none
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        env = "DISTLOCK_PASSWORD_FILE",
        help_heading = "Servers"
    )]
    pub(crate) password_file: Option<PathBuf>,
    /// What stands before a name to make its key [default: lock:]
    #[arg(long, global = true, value_name = "TEXT", env = "DISTLOCK_PREFIX", help_heading = "Servers")]
    pub(crate) prefix: Option<String>,
    /// The longest time for one exchange with a server
    #[arg(long, global = true, value_name = "SPAN", default_value = "1s", value_parser = span, help_heading = "Servers")]
    pub(crate) timeout: Duration,
    /// How long one of several nodes that may have lost its data does not vote: the longest ttl that anybody uses there, and
    /// the same for all. 0 is for never, as it is with two nodes unless you say otherwise [default: 30s]
    #[arg(
        long,
        global = true,
        value_name = "SPAN",
        env = "DISTLOCK_QUARANTINE",
        value_parser = span,
        help_heading = "Servers"
    )]
    pub(crate) quarantine: Option<Duration>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Ls(Ls),
    Show(Show),
    Release(Release),
    Top(Top),
    Doctor(Doctor),
    Bench(Bench),
    Completions(Completions),
    /// Print the manual page
    Man,
}

/// Run a command under a lock
///
/// The lock is renewed while the command runs and released when it has ended. The command finds the name, the identifier
/// and the fencing token of its lock in DISTLOCK_NAME, DISTLOCK_ID and DISTLOCK_TOKEN. When the lock is lost, or can no
/// longer be renewed in time, the command and all it has started in its process group are ended; so is, when the command has ended, what it leaves behind in that
/// group. What has left the group, such as a daemon, is not seen. Of the signals that distlock is sent, INT, TERM, HUP, QUIT, USR1 and USR2
/// are passed on to the command.
#[derive(Arguments, Clone, Debug)]
#[command(after_help = CODES)]
pub(crate) struct Run {
    /// How long the lock outlives this machine, should it die
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = span)]
    pub(crate) ttl: Duration,
    /// Wait for the lock for at most that long
    #[arg(long, value_name = "SPAN", value_parser = span, conflicts_with = "no_wait")]
    pub(crate) wait: Option<Duration>,
    /// Do not wait for the lock
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// What to do when somebody else holds the lock; with --wait, still. Skip and fail do not wait unless --wait says so
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) on_held: Option<OnHeld>,
    /// End the command when it has run for that long
    #[arg(long, value_name = "SPAN", value_parser = span)]
    pub(crate) max_hold: Option<Duration>,
    /// Between asking the command to end (SIGTERM) and killing it
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span)]
    pub(crate) grace: Duration,
    /// Say on standard error what happens to the lock
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// The name of the lock, which cannot begin with a hyphen here
    pub(crate) name: String,
    /// What to run under it, with its arguments
    #[arg(required = true, last = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// What to do when somebody else holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnHeld {
    /// Run nothing, and end well (0)
    Skip,
    /// Run nothing, and say so (75)
    Fail,
    /// Wait, without limit unless --wait gives one
    Wait,
}

/// List the locks that are held
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Ls {
    /// Only names that match: * is any text, ? any character, [a-c] one of some
    #[arg(default_value = "*", hide_default_value = true)]
    pub(crate) pattern: String,
    /// Print JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show one lock: its holder, and who waits
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Show {
    /// The name of the lock
    pub(crate) name: String,
    /// Print JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
}

/// Take a lock away from its holder, who learns of it at its next renewal
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Release {
    /// The name of the lock
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) whose: Whose,
    /// Print JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
}

/// From whom a lock is taken.
#[derive(Arguments, Clone, Debug)]
#[group(required = true, multiple = false)]
pub(crate) struct Whose {
    /// From whoever holds it now
    #[arg(long)]
    pub(crate) force: bool,
    /// Only from the holder with this identifier
    #[arg(long, value_name = "ID")]
    pub(crate) if_id: Option<String>,
}

/// Watch the locks live
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Top {
    /// Only names that match: * is any text, ? any character, [a-c] one of some
    #[arg(default_value = "*", hide_default_value = true)]
    pub(crate) pattern: String,
    /// Between two looks at the servers
    #[arg(long, short, value_name = "SPAN", default_value = "1s", value_parser = span)]
    pub(crate) interval: Duration,
}

/// Check what a deployment needs, and say what to do
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Doctor {
    /// The servers; without it, those of --url or of the environment
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) urls: Vec<String>,
    /// The shortest time to live in use there
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = span)]
    pub(crate) ttl: Duration,
    /// Print JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
}

/// Measure acquiring, handing over and renewing against the servers, beside the raw round trip
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Bench {
    /// The servers; without it, those of --url or of the environment
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) urls: Vec<String>,
    /// How long to measure altogether
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span)]
    pub(crate) time: Duration,
    /// Print JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print completions for a shell
#[derive(Arguments, Clone, Debug)]
pub(crate) struct Completions {
    /// Which shell
    pub(crate) shell: clap_complete::Shell,
}
