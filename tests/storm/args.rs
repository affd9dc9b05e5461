//! The command line of the storm, and the words with which it starts its workers.

use std::{path::PathBuf, time::Duration};

use crate::Outcome;

pub(crate) const HELP: &str = "\
Processes want locks while their servers, their network and they themselves are ill-treated at random.

    make storm                                    one minute on one server, and one on five
    make storm ARGS='--minutes 30 --nodes 5 --seed 7 --workers 6 --locks 3'

    --minutes N      how long, for each number of nodes; parts of a minute are numbers too
    --nodes N        only one storm, on so many servers
    --seed N         do to them what was done in an earlier run
    --workers N      how many processes, of two threads each (default 6)
    --locks N        how many locks (default 3)
    --html FILE      draw everything that happened
    --record FILE    keep what was written down
    --judge FILE     run nothing; judge such a record
    --help           this text

The exit code is 0 when the verdict is good, 1 when it is not, 2 when there is none.";

/// Threads of each worker.
pub(crate) const THREADS: u32 = 2;
/// The storm in which plain `cargo test` ends up.
const BREEZE: f64 = 0.15;
const USUAL: f64 = 1.0;

#[derive(Debug)]
pub(crate) enum Command {
    Help,
    /// The words are for test programs that have a harness.
    NotMeant,
    Storm(Storm),
    Judge {
        record: PathBuf,
        html: Option<PathBuf>,
    },
    Worker(Order),
}

#[derive(Debug)]
pub(crate) struct Storm {
    pub(crate) length: Duration,
    pub(crate) nodes: Vec<usize>,
    pub(crate) seed: u64,
    pub(crate) workers: u32,
    pub(crate) locks: u32,
    pub(crate) html: Option<PathBuf>,
    pub(crate) record: Option<PathBuf>,
}

impl Storm {
    pub(crate) const TTL: Duration = Duration::from_millis(1200);
    pub(crate) const OPERATION_TIMEOUT: Duration = Duration::from_millis(400);
    pub(crate) const CLAIM_WINDOW: Duration = Duration::from_millis(250);
}

/// What a parent tells its worker to do.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// Its threads have seats of their own.
    pub(crate) first_seat: u32,
    pub(crate) locks: u32,
    pub(crate) seed: u64,
    pub(crate) urls: String,
    pub(crate) record: PathBuf,
    pub(crate) resource: PathBuf,
}

impl Order {
    /// The words that [`parse`] reads this from.
    pub(crate) fn words(&self) -> Vec<String> {
        vec![
            "worker".into(),
            self.first_seat.to_string(),
            self.locks.to_string(),
            self.seed.to_string(),
            self.urls.clone(),
            self.record.display().to_string(),
            self.resource.display().to_string(),
        ]
    }
}

pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Outcome<Command> {
    let (mut minutes, mut judge) = (None, None);
    let mut storm = Storm {
        length: Duration::ZERO,
        nodes: vec![1, 5],
        seed: fastrand::u64(..1_000_000),
        workers: 6,
        locks: 3,
        html: None,
        record: None,
    };
    match words.next().as_deref() {
        None => minutes = Some(BREEZE),
        Some("brew") => {}
        Some("worker") => {
            let mut value = || words.next().ok_or("a word is missing");
            return Ok(Command::Worker(Order {
                first_seat: value()?.parse()?,
                locks: value()?.parse()?,
                seed: value()?.parse()?,
                urls: value()?,
                record: value()?.into(),
                resource: value()?.into(),
            }));
        }
        Some(_) => return Ok(Command::NotMeant),
    }
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value; see --help"));
        match &*word {
            "--help" | "-h" => return Ok(Command::Help),
            "--minutes" => minutes = Some(number(&word, &value()?, 0.05, 24.0 * 60.0)?),
            "--nodes" => storm.nodes = vec![whole(&word, &value()?, 9)? as usize],
            "--seed" => storm.seed = value()?.parse().map_err(|_| "--seed wants a number")?,
            "--workers" => storm.workers = whole(&word, &value()?, 60)?,
            "--locks" => storm.locks = whole(&word, &value()?, 60)?,
            "--html" => storm.html = Some(value()?.into()),
            "--record" => storm.record = Some(value()?.into()),
            "--judge" => judge = Some(value()?.into()),
            _ => return Err(format!("{word:?} is not understood; see --help").into()),
        }
    }
    storm.length = Duration::from_secs_f64(60.0 * minutes.unwrap_or(USUAL));
    Ok(match judge {
        Some(record) => Command::Judge { record, html: storm.html },
        None => Command::Storm(storm),
    })
}

fn whole(option: &str, value: &str, most: u32) -> Outcome<u32> {
    match value.parse() {
        Ok(count) if (1..=most).contains(&count) => Ok(count),
        _ => Err(format!("{option} wants a number from 1 to {most}, not {value:?}").into()),
    }
}

fn number(option: &str, value: &str, least: f64, most: f64) -> Outcome<f64> {
    match value.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("{option} wants a number from {least} to {most}, not {value:?}").into()),
    }
}
