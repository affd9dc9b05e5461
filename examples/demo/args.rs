//! The command line.

use std::{path::PathBuf, time::Duration};

use super::{Stage, resource::Work};
use crate::common::Outcome;

/// What `--help` says after the beginning that each demo has of its own.
const HELP: &str = "
    --children N     how many processes (default 5)
    --rounds N       how often each wants the lock (default ROUNDS)
    --work TIME      how long each works under it, half of this to one and a half (default WORK)
    --ttl TIME       the lease: how long the lock outlives a holder that died (default TTL)
    --chaos          kill some with SIGKILL, and stop some with SIGSTOP for longer than the lease
    --seed N         choose the victims as in an earlier run
    --record FILE    keep what the processes wrote down
    --judge FILE     run nothing; judge such a record
    --help           this text

The exit code is 0 when the verdict is good, 1 when it is not, 2 when there is none.
";

pub(crate) fn help(stage: &Stage) -> String {
    let defaults = [
        ("ROUNDS", stage.rounds.to_string()),
        ("WORK", format!("{:?}", stage.work)),
        ("TTL", format!("{:?}", stage.ttl)),
    ];
    let text = defaults.iter().fold(HELP.to_owned(), |text, (word, value)| text.replace(word, value));
    stage.help.to_owned() + &text
}

#[derive(Debug)]
pub(crate) enum Command {
    Help,
    Demo(Demo),
    Judge(PathBuf),
    Child(Child),
}

#[derive(Debug)]
pub(crate) struct Demo {
    /// How many private servers decide together; none for the one server that is there.
    pub(crate) nodes: usize,
    pub(crate) children: u32,
    pub(crate) rounds: u32,
    pub(crate) work: Work,
    pub(crate) ttl: Duration,
    pub(crate) chaos: bool,
    pub(crate) seed: u64,
    pub(crate) record: Option<PathBuf>,
}

/// What a parent tells its child to do.
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
    /// The words that [`parse`] reads this from.
    pub(crate) fn words(&self) -> Vec<String> {
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

pub(crate) fn parse(stage: &Stage, mut words: impl Iterator<Item = String>) -> Outcome<Command> {
    let mut demo = Demo {
        nodes: stage.nodes,
        children: 5,
        rounds: stage.rounds,
        work: Work(stage.work),
        ttl: stage.ttl,
        chaos: false,
        seed: fastrand::u64(..1_000_000),
        record: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value; see --help"));
        match &*word {
            "--help" | "-h" => return Ok(Command::Help),
            "--judge" => return Ok(Command::Judge(value()?.into())),
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
            "--children" => demo.children = count(&word, &value()?, 200)?,
            "--rounds" => demo.rounds = count(&word, &value()?, 100_000)?,
            "--work" => demo.work = Work(time(&word, &value()?, Duration::from_millis(1))?),
            "--ttl" => demo.ttl = time(&word, &value()?, Duration::from_millis(100))?,
            "--chaos" => demo.chaos = true,
            "--seed" => demo.seed = value()?.parse().map_err(|_| "--seed wants a number")?,
            "--record" => demo.record = Some(value()?.into()),
            _ => return Err(format!("{word:?} is not understood; see --help").into()),
        }
    }
    Ok(Command::Demo(demo))
}

fn count(option: &str, value: &str, most: u32) -> Outcome<u32> {
    match value.parse() {
        Ok(count) if (1..=most).contains(&count) => Ok(count),
        _ => Err(format!("{option} wants a number from 1 to {most}, not {value:?}").into()),
    }
}

fn time(option: &str, value: &str, least: Duration) -> Outcome<Duration> {
    let most = Duration::from_secs(60);
    match humantime::parse_duration(value) {
        Ok(time) if (least..=most).contains(&time) => Ok(time),
        _ => Err(format!("{option} wants a time from {least:?} to {most:?}, such as 200ms, not {value:?}").into()),
    }
}
