//! Several processes want one lock, and at no instant do two of them believe that they hold it: not even when some
//! are killed, or stopped for longer than the lock lasts, while they hold it or wait for it.
//!
//! Run it with `make demo`, or `make demo ARGS=--chaos`. A parent starts child processes; all of them append to one
//! record what they believed and when; the verdict comes from that record alone.

mod args;
mod board;
mod chaos;
mod child;
#[path = "../common/mod.rs"]
mod common;
mod judge;
mod parent;
mod record;
mod resource;
mod screen;
mod timeline;

use std::{env, path::Path, process::ExitCode};

use args::Command;
use common::Outcome;
use judge::Verdict;
use record::{Reader, Record};
use screen::{Palette, say};

/// The name of the lock.
const LOCK: &str = "my_resource";

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
        Command::Help => say(args::HELP),
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
    let verdict = Verdict::of(records);
    if verdict.holds.is_empty() {
        return Err("nobody ever held the lock, so there is nothing to judge".into());
    }
    say(&timeline::draw(records, &verdict, palette));
    say(&verdict.report(palette));
    Ok(verdict.is_good())
}
