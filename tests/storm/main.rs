//! The storm: randomised fault injection on real servers. Worker processes acquire several locks,
//! on one server, on five, and on a MariaDB, while processes, servers and connections fail in every
//! way that can be arranged. A seed determines the faults. All processes record what they did and
//! what their guards reported, and rules check the record afterwards.
//!
//! Run it with `make storm`; `make storm ARGS=--help` lists the options.

mod args;
mod cluster;
mod database;
#[path = "../history/mod.rs"]
mod history;
mod kinds;
mod leftovers;
mod nemesis;
mod network;
mod poller;
mod redis_cluster;
mod report;
mod resource;
mod runner;
mod worker;
mod workers;

use distlock_test_support as support;

use std::{env, fs, path::Path, process::ExitCode, time::Duration};

use args::{Command, Storm, Target};
use history::{Part, Reader, Record, Story, Verdict, draw};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Outcome<bool> {
    match args::parse(env::args().skip(1))? {
        Command::Help => println!("{}", args::HELP),
        Command::Ignore => {}
        Command::Worker(args) => worker::run(&args)?,
        Command::Judge { record, html } => {
            return check_record(&read(&record)?, html.as_deref(), &[]);
        }
        Command::Storm(storm) => {
            // Run all storms, even if the first one broke a rule.
            let good = storm
                .targets
                .iter()
                .map(|target| run_storm(&storm, *target))
                .collect::<Outcome<Vec<bool>>>()?;
            return Ok(good.into_iter().all(|good| good));
        }
    }
    Ok(true)
}

/// Runs one storm; returns whether all rules held.
fn run_storm(storm: &Storm, target: Target) -> Outcome<bool> {
    let folder = tempfile::Builder::new().prefix("distlock-storm-").tempdir()?;
    let record = storm.record.as_ref().map(|path| numbered(path, target, storm));
    let record = record.unwrap_or_else(|| folder.path().join("record"));
    fs::write(&record, "")?;
    println!("{}", report::headline(storm, target));
    match target {
        Target::Cluster => redis_cluster::run(storm, folder.path(), &record)?,
        _ => runner::run(storm, target, folder.path(), &record)?,
    }
    let html = storm.html.as_ref().map(|path| numbered(path, target, storm));
    let good = check_record(&read(&record)?, html.as_deref(), &report::replay(storm, target))?;
    if !good && storm.record.is_none() {
        let name = target.option().replace(' ', "-");
        let kept = env::temp_dir().join(format!("distlock-storm-{}-{name}.record", storm.seed));
        fs::copy(&record, &kept)?;
        println!("  Record: {}", kept.display());
    }
    Ok(good)
}

/// The name of a file for one of several storms.
fn numbered(path: &Path, target: Target, storm: &Storm) -> std::path::PathBuf {
    if storm.targets.len() == 1 {
        return path.to_owned();
    }
    let ending =
        path.extension().map(|ending| format!(".{}", ending.display())).unwrap_or_default();
    path.with_extension(format!("{}{ending}", target.option().replace(' ', "-")))
}

fn read(record: &Path) -> Outcome<Vec<Record>> {
    let explain = |error| format!("cannot read {}: {error}", record.display());
    Reader::open(record).map_err(explain)?.read_on()
}

fn check_record(records: &[Record], html: Option<&Path>, replay: &[String]) -> Outcome<bool> {
    let story = Story::of(records);
    let verdict = Verdict::of(&story);
    println!("{}", report::table(&story, &verdict));
    replay.iter().for_each(|line| println!("{line}"));
    if let Some(path) = html {
        fs::write(path, draw(&story, &verdict, Part::All))?;
        println!("  Timeline: {}", path.display());
    }
    if !verdict.is_good() {
        let path = env::temp_dir().join(format!("distlock-storm-{}.html", std::process::id()));
        fs::write(&path, draw(&story, &verdict, Part::Findings))?;
        println!("  Timeline of what broke the rules: {}", path.display());
    }
    Ok(verdict.is_good())
}

/// Stands for work, and for any other wait.
fn pause(duration: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(duration);
}

/// Nanoseconds of a duration, for arithmetic with [`history::now`].
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
