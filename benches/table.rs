//! `make bench`: what the library promises about its speed, measured on this machine, beside the raw figures of the
//! same run. Each row starts servers of its own; `cargo bench --bench table -- handoff` runs one row.
//! The row of the command is left out if the command has not been built with the same profile:
//! `cargo build --release -p distlock-cli`, which `make bench` does.
//!
//! Under `cargo test --benches`, or with `-- --test`, every row runs for an instant and nothing is judged.

#[path = "table/blocks.rs"]
mod blocks;
#[path = "table/cluster.rs"]
mod cluster;
#[path = "table/command.rs"]
mod command;
#[path = "table/contention.rs"]
mod contention;
#[path = "table/events.rs"]
mod events;
#[path = "table/listing.rs"]
mod listing;
#[path = "table/measure.rs"]
mod measure;
#[path = "table/memory.rs"]
mod memory;
#[path = "table/raw.rs"]
mod raw;
#[path = "table/raw_nodes.rs"]
mod raw_nodes;
#[path = "table/redlock.rs"]
mod redlock;
#[path = "table/renewal.rs"]
mod renewal;
#[path = "table/report.rs"]
mod report;
#[path = "table/uncontended.rs"]
mod uncontended;
#[path = "table/waiting.rs"]
mod waiting;

use std::{
    error::Error,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
};

use distlock_test_support as support;
use report::{Line, Table};
use support::WorkerSide;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How much is done: enough to judge by, or just enough to see that it works.
#[derive(Clone, Copy)]
enum Scale {
    Full,
    Brief,
}

impl Scale {
    fn pick<T>(self, full: T, brief: T) -> T {
        match self {
            Scale::Full => full,
            Scale::Brief => brief,
        }
    }
}

type Row = fn(Scale) -> Result<Vec<Line>>;

const ROWS: [(&str, Row); 15] = [
    ("uncontended", uncontended::row),
    ("events", events::row),
    ("contended_2", contention::contended_2),
    ("contended_n", contention::contended_n),
    ("handoff", contention::handoff),
    ("commands", contention::commands),
    ("waiting", waiting::row),
    ("renew", renewal::row),
    ("memory", memory::row),
    ("listing", listing::row),
    ("run", command::row),
    ("redlock", redlock::row),
    ("redlock_stopped", redlock::stopped),
    ("redlock_contended", contention::redlock),
    ("redlock_renew", renewal::redlock),
];

fn main() -> ExitCode {
    if let Some(side) = WorkerSide::from_env() {
        return work(&side);
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is_flag = |flag: &str| args.iter().any(|arg| arg == flag);
    // Only `cargo bench` says `--bench`.
    let scale = if is_flag("--bench") && !is_flag("--test") { Scale::Full } else { Scale::Brief };
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let wanted = |row: &str| names.is_empty() || names.iter().any(|name| row.starts_with(name.as_str()));
    let rows: Vec<_> = ROWS.into_iter().filter(|(name, _)| wanted(name)).collect();
    match scale {
        // A filter that was meant for the tests may match nothing in here.
        Scale::Brief => try_out(&rows),
        Scale::Full if rows.is_empty() => {
            eprintln!("there is no row {names:?}, only {}", ROWS.map(|(name, _)| name).join(", "));
            ExitCode::from(2)
        }
        Scale::Full => measure_all(&rows),
    }
}

fn measure_all(rows: &[(&'static str, Row)]) -> ExitCode {
    println!("{}", report::machine());
    let mut table = Table::default();
    let mut failed = false;
    for (name, row) in rows {
        eprintln!("measuring {name} ...");
        match run_and_watch(*row) {
            Ok((lines, others)) => table.add(name, lines, others),
            Err(error) => {
                table.add_failed(name, &error.to_string());
                failed = true;
            }
        }
    }
    let selection: String = rows.iter().map(|(name, _)| format!(" {name}")).collect();
    let selection = if rows.len() == ROWS.len() { String::new() } else { format!(" --{selection}") };
    println!("\n{table}\nagain: cargo bench --bench table{selection}");
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Also tells what share of all cores other programs used meanwhile: the figures are worth the less the more it is.
fn run_and_watch(row: Row) -> Result<(Vec<Line>, f64)> {
    let (started, others) = (measure::now(), measure::cpu_of_others()?);
    let lines = run(row, Scale::Full)?;
    let others = measure::cpu_of_others()?.saturating_sub(others);
    let cores = report::cores() as f64;
    Ok((lines, others.as_secs_f64() / (measure::now() - started).as_secs_f64() / cores))
}

fn try_out(rows: &[(&'static str, Row)]) -> ExitCode {
    let mut failed = false;
    for (name, row) in rows {
        match run(*row, Scale::Brief) {
            Ok(_) => println!("bench {name} ... ok"),
            Err(error) => {
                println!("bench {name} ... FAILED: {error}");
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run(row: Row, scale: Scale) -> Result<Vec<Line>> {
    // A row that fails must not keep the others from being measured.
    catch_unwind(AssertUnwindSafe(|| row(scale))).unwrap_or_else(|_| Err("it panicked, see above".into()))
}

/// The life of a child process.
fn work(side: &WorkerSide) -> ExitCode {
    let done = match side.role() {
        contention::ROLE => contention::work(side),
        waiting::ROLE => waiting::work(side),
        renewal::ROLE => renewal::work(side),
        memory::ROLE => memory::work(side),
        role => Err(format!("there is no role {role}").into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", side.role());
            ExitCode::FAILURE
        }
    }
}
