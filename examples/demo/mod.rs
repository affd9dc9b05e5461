//! Processes that contend for one lock: a parent starts child processes; all of them append to one record what they
//! believed and when; the picture and the verdict come from that record alone.

mod args;
mod availability;
mod board;
mod chaos;
mod child;
mod judge;
mod nodes;
mod outages;
mod parent;
mod resource;
mod screen;
mod servers;
mod timeline;

use std::{env, path::Path, process::ExitCode, time::Duration};

use args::Command;
use judge::Verdict;
use screen::{Palette, say};

use crate::{
    common::Outcome,
    history::{Reader, Record, Story},
};

/// The name of the lock.
const LOCK: &str = "my_resource";

/// In what one demo differs from another.
#[derive(Debug)]
pub(crate) struct Stage {
    /// How the help begins.
    pub(crate) help: &'static str,
    /// How many private servers decide together, and are killed on the way; none for the one server that is there.
    pub(crate) nodes: usize,
    pub(crate) rounds: u32,
    pub(crate) work: Duration,
    pub(crate) ttl: Duration,
}

pub(crate) fn play(stage: &Stage) -> ExitCode {
    match run(stage) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(stage: &Stage) -> Outcome<bool> {
    match args::parse(stage, env::args().skip(1))? {
        Command::Help => say(&args::help(stage)),
        Command::Judge(record) => return conclude(&read(&record)?),
        // Its record says why, and its parent tells.
        Command::Child(child) => return Ok(child::run(&child).is_ok()),
        Command::Demo(demo) => return conclude(&parent::run(&demo)?),
    }
    Ok(true)
}

fn read(record: &Path) -> Outcome<Vec<Record>> {
    let explain = |error| format!("cannot read {}: {error}", record.display());
    Reader::open(record).map_err(explain)?.read_on()
}

fn conclude(records: &[Record]) -> Outcome<bool> {
    let palette = Palette::of_stdout();
    let story = Story::of(records);
    let verdict = Verdict::of(&story, records);
    if story.holds.is_empty() {
        return Err("nobody ever held the lock, so there is nothing to judge".into());
    }
    say(&timeline::draw(records, &verdict, palette));
    say(&verdict.report(palette));
    Ok(verdict.is_good())
}
