//! Texts of the help and the manual page that are about more than one argument.

use std::fmt::Write as _;

/// The exit codes with their meanings.
pub(crate) const EXIT_CODES: [(&str, &str); 10] = [
    ("0", "success; run exits with the exit code of its command"),
    ("1", "negative result: lock not held, nothing released, or doctor found problems"),
    ("64", "usage error: invalid arguments, environment variable or file"),
    ("69", "servers unreachable, not in agreement, or refusing the request"),
    ("75", "the lock is held by another process"),
    ("76", "the lock was lost, or not renewed in time, or gone when it was to be adopted"),
    ("124", "the command ran for longer than --max-hold"),
    ("126", "the command could not be started, or output could not be written"),
    ("127", "the command was not found"),
    ("128+N", "signal N ended the command, or the wait for the lock"),
];

/// The environment variables that distlock reads.
pub(crate) const ENVIRONMENT: [(&str, &str); 9] = [
    ("DISTLOCK_URL", "servers, unless --url is given; may contain passwords"),
    ("REDIS_URL", "the same, unless DISTLOCK_URL is set"),
    ("DISTLOCK_PASSWORD_FILE", "default of --password-file"),
    ("DISTLOCK_CACERT, DISTLOCK_CERT, DISTLOCK_KEY", "defaults of --cacert, --cert, --key"),
    ("DISTLOCK_PREFIX", "default of --prefix"),
    ("DISTLOCK_TABLE", "default of --table"),
    ("DISTLOCK_QUARANTINE", "default of --quarantine"),
    ("DISTLOCK_LOG", "details to log: off, error, warn, info, debug or trace"),
    ("NO_COLOR", "turns off the colours of top"),
];

pub(crate) const EMPTY_VARIABLES: &str =
    "An empty variable counts as unset, except for DISTLOCK_PREFIX.";

/// The environment variables that `run` and `adopt` set for their command.
pub(crate) const COMMAND_ENVIRONMENT: [(&str, &str); 3] = [
    ("DISTLOCK_NAME", "name of the lock; with several, one on each line"),
    ("DISTLOCK_ID", "id of this holder, for release --if-id; one for each lock"),
    ("DISTLOCK_TOKEN", "fencing token: a number that increases with every grant of the lock"),
];

/// Command lines, and what they do.
pub(crate) const EXAMPLES: [(&str, &str); 6] = [
    (
        "Deploy, after waiting up to 10 minutes for other deployments",
        "distlock run --wait 10m deploy:shop -- ./deploy.sh",
    ),
    (
        "In cron on every machine, skip the job while it runs anywhere",
        "distlock run --quiet --on-held skip --max-hold 4m sync-stock -- sync-stock",
    ),
    ("List some of the held locks", "distlock ls 'orders:*'"),
    ("Show the holder of a lock and its queue", "distlock show deploy:shop"),
    (
        "Take a lock from one holder, whose id `distlock show` prints",
        "distlock release deploy:shop --if-id ID",
    ),
    ("Check three nodes", "distlock doctor redis://10.0.0.1 redis://10.0.0.2 redis://10.0.0.3"),
];

/// The usage of `run`, which clap would show without the `--` that its command needs.
pub(crate) const RUN_USAGE: &str = "distlock run [OPTIONS] <NAME>... -- <COMMAND>...
       distlock run [OPTIONS] <NAME>... --command <TEXT>";

/// The same of `adopt`.
pub(crate) const ADOPT_USAGE: &str = "distlock adopt [OPTIONS] <DETACHED> -- <COMMAND>...
       distlock adopt [OPTIONS] <DETACHED> --command <TEXT>";

/// Shown at the end of every short help.
pub(crate) fn short_footer() -> String {
    definitions("Exit codes", &EXIT_CODES)
}

/// Shown at the end of the long help of the whole program.
pub(crate) fn long_footer() -> String {
    let mut text = String::from("Examples:");
    for (what, line) in EXAMPLES {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n  # {what}\n  {line}");
    }
    let environment = definitions("Environment variables", &ENVIRONMENT);
    format!("{text}\n\n{environment}\n  {EMPTY_VARIABLES}\n\n{}", short_footer())
}

/// Shown at the end of the long help of `run`.
pub(crate) fn run_footer() -> String {
    let environment = definitions("Environment variables of the command", &COMMAND_ENVIRONMENT);
    format!("{environment}\n\n{}", short_footer())
}

/// A heading and a list of two columns.
fn definitions(heading: &str, items: &[(&str, &str)]) -> String {
    let width = items.iter().map(|(term, _)| term.len()).max().unwrap_or(0);
    items.iter().fold(format!("{heading}:"), |text, (term, meaning)| {
        format!("{text}\n  {term:<width$}  {meaning}")
    })
}
