//! The command line of the storm, and that of its worker processes.

use std::{path::PathBuf, time::Duration};

use crate::Outcome;

pub(crate) const HELP: &str = "\
The storm: randomised fault injection. Worker processes acquire and release locks on real
servers, while workers are killed and stopped, servers crash, and connections break. Everything is
recorded, and the record is checked: no two holders at once, rising tokens, bounded calls, no loss
without a reason, nothing left behind.

    make storm                                    one minute on one server, one with all kinds of
                                                  locks, one on five servers, and half a minute
                                                  on a MariaDB
    make storm ARGS='--minutes 30 --nodes 5 --seed 7 --workers 6 --locks 3'
    make storm ARGS='--minutes 5 --database'
    make storm ARGS='--minutes 5 --cluster --workers 10 --locks 6'

    --minutes N      length of each storm; may be a fraction (default 1)
    --nodes N        run only one storm, on this many Redis servers
    --kinds          run only one storm, on one Redis server, with mutexes, read-write locks,
                     permits and clients of other libraries on the same names; with --nodes, on
                     this many servers, with mutexes and read-write locks
    --database       run only one storm, on a MariaDB
    --cluster        run only one storm, on a Redis Cluster whose slots move and whose masters
                     change; the workers have no faults, and use locks for a few milliseconds
    --seed N         repeat the random choices of an earlier storm; the timing still differs
    --workers N      number of worker processes, with two threads each (default 6)
    --locks N        number of locks (default 3)
    --html FILE      draw a timeline of everything that happened
    --record FILE    keep the record
    --judge FILE     check an existing record instead of running a storm
    --help           print this text

The exit code is 0 if no rule was broken, 1 if one was, and 2 if the storm could not run.";

/// Threads of each worker that acquire locks.
pub(crate) const THREADS: u32 = 2;
/// Length in minutes of the storm that runs as part of `cargo test`.
const TEST_MINUTES: f64 = 0.15;
const DEFAULT_MINUTES: f64 = 1.0;

#[derive(Debug)]
pub(crate) enum Command {
    Help,
    /// The arguments are meant for test programs with a harness, so there is nothing to do.
    Ignore,
    Storm(Storm),
    Judge {
        record: PathBuf,
        html: Option<PathBuf>,
    },
    Worker(WorkerArgs),
}

#[derive(Debug)]
pub(crate) struct Storm {
    pub(crate) duration: Duration,
    pub(crate) targets: Vec<Target>,
    pub(crate) seed: u64,
    pub(crate) workers: u32,
    pub(crate) locks: u32,
    pub(crate) html: Option<PathBuf>,
    pub(crate) record: Option<PathBuf>,
}

/// What a storm runs on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// This many Redis servers.
    Nodes(usize),
    /// This many Redis servers with all kinds of locks that they keep.
    Kinds(usize),
    /// A MariaDB.
    Database,
    /// A Redis Cluster.
    Cluster,
}

impl Target {
    pub(crate) fn nodes(self) -> usize {
        match self {
            Target::Nodes(nodes) | Target::Kinds(nodes) => nodes,
            Target::Database | Target::Cluster => 1,
        }
    }

    pub(crate) fn is_database(self) -> bool {
        self == Target::Database
    }

    pub(crate) fn ttl(self) -> Duration {
        match self {
            Target::Nodes(_) | Target::Kinds(_) => Duration::from_millis(1200),
            // A database counts in whole seconds. A longer time than the ttl would hide mistakes.
            Target::Database => Duration::from_secs(1),
            // A failover takes about two seconds, in which a lock must not expire.
            Target::Cluster => Duration::from_secs(5),
        }
    }

    pub(crate) fn claim_window(self) -> Duration {
        match self {
            // The default. After a failover, no waiter may need longer than that.
            Target::Cluster => Duration::from_secs(1),
            _ => Duration::from_millis(250),
        }
    }

    /// The options that select it, which also distinguish its files.
    pub(crate) fn option(self) -> String {
        match self {
            Target::Nodes(nodes) => format!("nodes {nodes}"),
            Target::Kinds(1) => "kinds".to_owned(),
            Target::Kinds(nodes) => format!("kinds --nodes {nodes}"),
            Target::Database => "database".to_owned(),
            Target::Cluster => "cluster".to_owned(),
        }
    }
}

impl Storm {
    pub(crate) const OPERATION_TIMEOUT: Duration = Duration::from_millis(400);

    /// The database has half the time, unless it is the only target.
    pub(crate) fn duration_on(&self, target: Target) -> Duration {
        if target.is_database() && self.targets.len() > 1 {
            self.duration / 2
        } else {
            self.duration
        }
    }
}

/// The arguments of a worker process.
#[derive(Clone, Debug)]
pub(crate) struct WorkerArgs {
    /// The worker's threads have this seat and the following ones in the record.
    pub(crate) first_seat: u32,
    pub(crate) locks: u32,
    pub(crate) seed: u64,
    pub(crate) urls: String,
    pub(crate) kinds: bool,
    pub(crate) record: PathBuf,
    pub(crate) resource: PathBuf,
}

impl WorkerArgs {
    pub(crate) fn target(&self) -> Target {
        if self.urls.starts_with("mysql:") {
            return Target::Database;
        }
        if self.urls.contains("+cluster:") {
            return Target::Cluster;
        }
        let nodes = self.urls.split(',').count();
        if self.kinds { Target::Kinds(nodes) } else { Target::Nodes(nodes) }
    }

    /// The command line that [`parse`] reads back.
    pub(crate) fn to_args(&self) -> Vec<String> {
        vec![
            "worker".into(),
            self.first_seat.to_string(),
            self.locks.to_string(),
            self.seed.to_string(),
            self.urls.clone(),
            self.kinds.to_string(),
            self.record.display().to_string(),
            self.resource.display().to_string(),
        ]
    }
}

pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Outcome<Command> {
    let (mut minutes, mut judge, mut nodes, mut kinds) = (None, None, None, false);
    let mut storm = Storm {
        duration: Duration::ZERO,
        targets: vec![Target::Nodes(1), Target::Kinds(1), Target::Nodes(5), Target::Database],
        seed: fastrand::u64(..1_000_000),
        workers: 6,
        locks: 3,
        html: None,
        record: None,
    };
    match args.next().as_deref() {
        None => minutes = Some(TEST_MINUTES),
        Some("--run") => {}
        Some("worker") => {
            let mut value = || args.next().ok_or("an argument of the worker is missing");
            return Ok(Command::Worker(WorkerArgs {
                first_seat: value()?.parse()?,
                locks: value()?.parse()?,
                seed: value()?.parse()?,
                urls: value()?,
                kinds: value()?.parse()?,
                record: value()?.into(),
                resource: value()?.into(),
            }));
        }
        Some(_) => return Ok(Command::Ignore),
    }
    while let Some(option) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{option} needs a value; see --help"));
        match &*option {
            "--help" | "-h" => return Ok(Command::Help),
            "--minutes" => minutes = Some(fraction(&option, &value()?, 0.05, 24.0 * 60.0)?),
            "--nodes" => {
                nodes = Some(whole(&option, &value()?, 9)? as usize);
            }
            "--kinds" => kinds = true,
            "--database" => storm.targets = vec![Target::Database],
            "--cluster" => storm.targets = vec![Target::Cluster],
            "--seed" => storm.seed = value()?.parse().map_err(|_| "--seed needs a number")?,
            "--workers" => storm.workers = whole(&option, &value()?, 60)?,
            "--locks" => storm.locks = whole(&option, &value()?, 60)?,
            "--html" => storm.html = Some(value()?.into()),
            "--record" => storm.record = Some(value()?.into()),
            "--judge" => judge = Some(value()?.into()),
            _ => return Err(format!("unknown option {option:?}; see --help").into()),
        }
    }
    match (kinds, nodes) {
        (true, nodes) => storm.targets = vec![Target::Kinds(nodes.unwrap_or(1))],
        (false, Some(nodes)) => storm.targets = vec![Target::Nodes(nodes)],
        (false, None) => {}
    }
    storm.duration = Duration::from_secs_f64(60.0 * minutes.unwrap_or(DEFAULT_MINUTES));
    Ok(match judge {
        Some(record) => Command::Judge { record, html: storm.html },
        None => Command::Storm(storm),
    })
}

fn whole(option: &str, value: &str, max: u32) -> Outcome<u32> {
    match value.parse() {
        Ok(count) if (1..=max).contains(&count) => Ok(count),
        _ => Err(format!("{option} needs a number from 1 to {max}, not {value:?}").into()),
    }
}

fn fraction(option: &str, value: &str, min: f64, max: f64) -> Outcome<f64> {
    match value.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(format!("{option} needs a number from {min} to {max}, not {value:?}").into()),
    }
}
