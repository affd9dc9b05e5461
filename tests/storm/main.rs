//! The storm: worker processes want several locks, on one server and on five, while everything that can go wrong does,
//! at random and by a seed. All of them write down what they did and believed, and a judge reads that afterwards.
//!
//! Run it with `make storm`; `make storm ARGS=--help` says more.

mod args;
mod crew;
mod enemy;
#[path = "../history/mod.rs"]
mod history;
mod leftovers;
mod network;
mod report;
mod resource;
mod stage;
mod weather;
mod witness;
mod worker;

use std::{env, fs, path::Path, process::ExitCode, time::Duration};

use args::{Command, Storm};
use distlock_test_support as support;
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
        Command::NotMeant => {}
        Command::Worker(order) => worker::run(&order)?,
        Command::Judge { record, html } => return conclude(&read(&record)?, html.as_deref(), &[]),
        Command::Storm(storm) => {
            // All of it, even if the first part went wrong.
            let good = storm.nodes.iter().map(|nodes| brew(&storm, *nodes)).collect::<Outcome<Vec<bool>>>()?;
            return Ok(good.into_iter().all(|good| good));
        }
    }
    Ok(true)
}

/// One storm over so many nodes.
fn brew(storm: &Storm, nodes: usize) -> Outcome<bool> {
    let folder = tempfile::Builder::new().prefix("distlock-storm-").tempdir()?;
    let record = storm.record.as_ref().map(|path| numbered(path, nodes, storm));
    let record = record.unwrap_or_else(|| folder.path().join("record"));
    fs::write(&record, "")?;
    println!("{}", report::introduction(storm, nodes));
    weather::rage(storm, nodes, folder.path(), &record)?;
    let html = storm.html.as_ref().map(|path| numbered(path, nodes, storm));
    let good = conclude(&read(&record)?, html.as_deref(), &report::replay(storm, nodes))?;
    if !good && storm.record.is_none() {
        let kept = env::temp_dir().join(format!("distlock-storm-{}-{nodes}.record", storm.seed));
        fs::copy(&record, &kept)?;
        println!("  The record is in {}.", kept.display());
    }
    Ok(good)
}

/// Of several storms each has its own file.
fn numbered(path: &Path, nodes: usize, storm: &Storm) -> std::path::PathBuf {
    if storm.nodes.len() == 1 {
        return path.to_owned();
    }
    let ending = path.extension().map(|ending| format!(".{}", ending.display())).unwrap_or_default();
    path.with_extension(format!("{nodes}{ending}"))
}

fn read(record: &Path) -> Outcome<Vec<Record>> {
    let explain = |error| format!("cannot read {}: {error}", record.display());
    Reader::open(record).map_err(explain)?.read_on()
}

fn conclude(records: &[Record], html: Option<&Path>, replay: &[String]) -> Outcome<bool> {
    let story = Story::of(records);
    let verdict = Verdict::of(&story);
    println!("{}", report::table(&story, &verdict));
    replay.iter().for_each(|line| println!("{line}"));
    if let Some(path) = html {
        fs::write(path, draw(&story, &verdict, Part::All))?;
        println!("  The timeline is in {}.", path.display());
    }
    if !verdict.is_good() {
        let path = env::temp_dir().join(format!("distlock-storm-{}.html", std::process::id()));
        fs::write(&path, draw(&story, &verdict, Part::Findings))?;
        println!("  What went wrong, drawn: {}", path.display());
    }
    Ok(verdict.is_good())
}

/// Stands for work, and for everything else that takes time.
fn pause(span: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(span);
}

/// Nanoseconds of a span, for arithmetic with [`history::now`].
fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
