//! The command line.

use std::{path::PathBuf, time::Duration};

use super::{Defaults, resource::Work};
use crate::common::Result;

/// The second part of the help text, which is the same for all demos.
const HELP: &str = "
DATABASE    --children N     number of processes (default 5)
    --rounds N       how often each process acquires the lock (default ROUNDS)
    --work TIME      how long each works while it holds the lock: 50 to 150 % of this (default WORK)
    --ttl TIME       how long the lock stays held if its holder dies (default TTL)
    --chaos          kill processes (SIGKILL), and stop others for longer than the ttl (SIGSTOP)
    --seed N         select the same processes for that as in an earlier run
    --record FILE    keep the record of the run
    --check FILE     check the record of an earlier run, without running anything
    --help           print this text

Exit code: 0 if all checks passed, 1 if a check failed, 2 if nothing could be checked.
";

/// Options of the demo with one server.
const SERVER_OPTIONS: &str = "\
    --mysql          keep the lock in a private MariaDB
    --url URL        use this server: redis://… or mysql://user:password@host/database
";

pub(crate) fn help(defaults: &Defaults) -> String {
    let values = [
        ("ROUNDS", defaults.rounds.to_string()),
        ("WORK", format!("{:?}", defaults.work)),
        ("TTL", format!("{:?}", defaults.ttl)),
        ("DATABASE", if defaults.nodes == 0 { SERVER_OPTIONS.to_owned() } else { String::new() }),
    ];
    let text = values.iter().fold(HELP.to_owned(), |text, (word, value)| text.replace(word, value));
    defaults.help.to_owned() + &text
}

#[derive(Debug)]
pub(crate) enum Command {
    Help,
    Run(Options),
    Check(PathBuf),
    Child(Child),
}

#[derive(Debug)]
pub(crate) struct Options {
    /// Number of private servers that form a quorum; 0 for the server from the environment.
    pub(crate) nodes: usize,
    /// The lock is in a database.
    pub(crate) mysql: bool,
    /// The server to use.
    pub(crate) url: Option<String>,
    pub(crate) children: u32,
    pub(crate) rounds: u32,
    pub(crate) work: Work,
    pub(crate) ttl: Duration,
    pub(crate) chaos: bool,
    pub(crate) seed: u64,
    pub(crate) record: Option<PathBuf>,
}

/// The arguments of a child process.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) child: u32,
    pub(crate) rounds: u32,
    pub(crate) work: Work,
    pub(crate) ttl: Duration,
    pub(crate) resource: String,
    pub(crate) record: PathBuf,
}

impl Child {
    /// The command line from which [`parse`] reads this.
    pub(crate) fn to_args(&self) -> Vec<String> {
        vec![
            "--child".into(),
            self.child.to_string(),
            self.rounds.to_string(),
            self.work.0.as_micros().to_string(),
            self.ttl.as_micros().to_string(),
            self.resource.clone(),
            self.record.display().to_string(),
        ]
    }
}

pub(crate) fn parse(
    defaults: &Defaults,
    mut args: impl Iterator<Item = String>,
) -> Result<Command> {
    let mut options = Options {
        nodes: defaults.nodes,
        mysql: false,
        url: None,
        children: 5,
        rounds: defaults.rounds,
        work: Work(defaults.work),
        ttl: defaults.ttl,
        chaos: false,
        seed: fastrand::u64(..1_000_000),
        record: None,
    };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; see --help"));
        match &*arg {
            "--help" | "-h" => return Ok(Command::Help),
            "--check" => return Ok(Command::Check(value()?.into())),
            "--child" => {
                return Ok(Command::Child(Child {
                    child: value()?.parse()?,
                    rounds: value()?.parse()?,
                    work: Work(Duration::from_micros(value()?.parse()?)),
                    ttl: Duration::from_micros(value()?.parse()?),
                    resource: value()?,
                    record: value()?.into(),
                }));
            }
            "--children" => options.children = count(&arg, &value()?, 200)?,
            "--rounds" => options.rounds = count(&arg, &value()?, 100_000)?,
            "--work" => options.work = Work(time(&arg, &value()?, Duration::from_millis(1))?),
            "--ttl" => options.ttl = time(&arg, &value()?, Duration::from_millis(100))?,
            "--chaos" => options.chaos = true,
            "--mysql" if defaults.nodes == 0 => options.mysql = true,
            "--url" if defaults.nodes == 0 => options.url = Some(value()?),
            "--seed" => options.seed = value()?.parse().map_err(|_| "--seed must be a number")?,
            "--record" => options.record = Some(value()?.into()),
            _ => return Err(format!("unknown option {arg:?}; see --help").into()),
        }
    }
    Ok(Command::Run(options))
}

fn count(option: &str, value: &str, max: u32) -> Result<u32> {
    match value.parse() {
        Ok(count) if (1..=max).contains(&count) => Ok(count),
        _ => Err(format!("{option} must be a number from 1 to {max}, not {value:?}").into()),
    }
}

fn time(option: &str, value: &str, min: Duration) -> Result<Duration> {
    let max = Duration::from_secs(60);
    match humantime::parse_duration(value) {
        Ok(time) if (min..=max).contains(&time) => Ok(time),
        _ => Err(format!(
            "{option} must be a time from {min:?} to {max:?}, such as 200ms, not {value:?}"
        )
        .into()),
    }
}
