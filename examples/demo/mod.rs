//! Processes that compete for one lock. A parent starts child processes. All of them append to one
//! record what they knew about the lock, and when. The timeline and the report are made from that
//! record alone.

mod args;
mod availability;
mod chaos;
mod child;
mod child_status;
mod database;
mod node_status;
mod outages;
mod parent;
mod report;
mod resource;
mod screen;
mod servers;
mod timeline;

use std::{env, path::Path, process::ExitCode, time::Duration};

use args::Command;
use report::Report;
use screen::{Palette, print};

use crate::{
    common::Result,
    history::{Reader, Record, Story},
};

/// The name of the lock.
const LOCK: &str = "my_resource";

/// The differences between the demos.
#[derive(Debug)]
pub(crate) struct Defaults {
    /// The first part of the help text.
    pub(crate) help: &'static str,
    /// Number of private servers that form a quorum, and that are killed; 0 for the server from the
    /// environment.
    pub(crate) nodes: usize,
    pub(crate) rounds: u32,
    pub(crate) work: Duration,
    pub(crate) ttl: Duration,
}

pub(crate) fn run(defaults: &Defaults) -> ExitCode {
    match run_command(defaults) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run_command(defaults: &Defaults) -> Result<bool> {
    match args::parse(defaults, env::args().skip(1))? {
        Command::Help => print(&args::help(defaults)),
        Command::Check(record) => return show(&read(&record)?),
        // A failure is in the record, and the parent reports it.
        Command::Child(child) => return Ok(child::run(&child).is_ok()),
        Command::Run(options) => return show(&parent::run(&options)?),
    }
    Ok(true)
}

fn read(record: &Path) -> Result<Vec<Record>> {
    let explain = |error| format!("cannot read {}: {error}", record.display());
    Reader::open(record).map_err(explain)?.read_on()
}

/// Prints the timeline and the report of a record. Returns whether all checks passed.
fn show(records: &[Record]) -> Result<bool> {
    let palette = Palette::of_stdout();
    let story = Story::of(records);
    let report = Report::of(&story, records);
    if story.holds.is_empty() {
        return Err("no process ever held the lock, so there is nothing to check".into());
    }
    print(&timeline::draw(records, &report, palette));
    print(&report.text(palette));
    Ok(report.is_good())
}
