//! `make bench`: the speed that the library promises, measured on this machine and compared with
//! raw figures of the same run. Each row starts its own servers.
//! `cargo bench --features mysql --bench table -- handoff` runs one row.
//!
//! The row of the command is left out if the command has not been built with the same profile:
//! `cargo build --release -p distlock-cli`, which `make bench` does.
//!
//! With `cargo test --benches` or `-- --test`, every row runs briefly and its results are ignored.

#[path = "table/blocks.rs"]
mod blocks;
#[path = "table/cluster.rs"]
mod cluster;
#[path = "table/command.rs"]
mod command;
#[path = "table/contender.rs"]
mod contender;
#[path = "table/contention.rs"]
mod contention;
#[path = "table/crowd.rs"]
mod crowd;
#[path = "table/events.rs"]
mod events;
#[path = "table/groups.rs"]
mod groups;
#[path = "table/holds.rs"]
mod holds;
#[path = "table/listing.rs"]
mod listing;
#[path = "table/measure.rs"]
mod measure;
#[path = "table/memory.rs"]
mod memory;
#[path = "table/mysql.rs"]
mod mysql;
#[path = "table/raw.rs"]
mod raw;
#[path = "table/raw_mysql.rs"]
mod raw_mysql;
#[path = "table/raw_nodes.rs"]
mod raw_nodes;
#[path = "table/redis_cluster.rs"]
mod redis_cluster;
#[path = "table/redlock.rs"]
mod redlock;
#[path = "table/renewal.rs"]
mod renewal;
#[path = "table/report.rs"]
mod report;
#[cfg(feature = "tls")]
#[path = "table/tls.rs"]
mod tls;
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
use report::{Figure, Table};
use support::WorkerSide;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How much to measure: enough for a result, or just enough to see that the benchmark works.
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

type Row = fn(Scale) -> Result<Vec<Figure>>;

const ROWS: &[(&str, Row)] = &[
    ("uncontended", uncontended::row),
    ("events", events::row),
    ("contended_2", contention::contended_2),
    ("contended_n", contention::contended_n),
    ("polling", contention::polling),
    ("handoff", contention::handoff),
    ("commands", contention::commands),
    ("waiting", waiting::row),
    ("crowd", crowd::row),
    ("renew", renewal::row),
    ("several", groups::several),
    ("readers", groups::readers),
    ("writer_release", groups::writer_release),
    ("members_renew", groups::members_renew),
    ("memory", memory::row),
    ("listing", listing::row),
    #[cfg(feature = "tls")]
    ("tls", tls::row),
    ("run", command::row),
    ("cluster", redis_cluster::row),
    ("redlock", redlock::row),
    ("redlock_stopped", redlock::stopped),
    ("redlock_contended", contention::redlock),
    ("redlock_orders", contention::redlock_orders),
    ("redlock_renew", renewal::redlock),
    ("mysql_uncontended", mysql::row),
    ("mysql_contended", mysql::contended),
    ("mysql_timeout", mysql::timeout),
    ("mysql_losses", mysql::losses),
    ("mysql_absent", mysql::absent),
    ("mysql_renew", mysql::renew),
    ("mysql_held", mysql::held),
];

fn main() -> ExitCode {
    if let Some(side) = WorkerSide::from_env() {
        return work(&side);
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is_flag = |flag: &str| args.iter().any(|arg| arg == flag);
    // Only `cargo bench` passes `--bench`.
    let scale = if is_flag("--bench") && !is_flag("--test") { Scale::Full } else { Scale::Brief };
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let is_selected =
        |row: &str| names.is_empty() || names.iter().any(|name| row.starts_with(name.as_str()));
    let rows: Vec<_> = ROWS.iter().copied().filter(|(name, _)| is_selected(name)).collect();
    match scale {
        // A filter for the tests need not match any row.
        Scale::Brief => try_all(&rows),
        Scale::Full if rows.is_empty() => {
            eprintln!(
                "no row matches {names:?}; the rows are {}",
                ROWS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
            );
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
        match measure_with_load(*row) {
            Ok((figures, others)) => table.add(name, figures, others),
            Err(error) => {
                table.add_failed(name, &error.to_string());
                failed = true;
            }
        }
    }
    let selection: String = rows.iter().map(|(name, _)| format!(" {name}")).collect();
    let selection =
        if rows.len() == ROWS.len() { String::new() } else { format!(" --{selection}") };
    println!("\n{table}\nTo repeat: cargo bench --features mysql --bench table{selection}");
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Also returns the share of all cores that other programs used meanwhile. If it is high, the
/// figures are not reliable.
fn measure_with_load(row: Row) -> Result<(Vec<Figure>, f64)> {
    let (started, others) = (measure::now(), measure::cpu_of_other_processes()?);
    let figures = run(row, Scale::Full)?;
    let others = measure::cpu_of_other_processes()?.saturating_sub(others);
    let cores = report::cores() as f64;
    Ok((figures, others.as_secs_f64() / (measure::now() - started).as_secs_f64() / cores))
}

fn try_all(rows: &[(&'static str, Row)]) -> ExitCode {
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

fn run(row: Row, scale: Scale) -> Result<Vec<Figure>> {
    // A row that fails must not prevent the others from being measured.
    catch_unwind(AssertUnwindSafe(|| row(scale)))
        .unwrap_or_else(|_| Err("panicked, see above".into()))
}

/// Runs a child process.
fn work(side: &WorkerSide) -> ExitCode {
    let done = match side.role() {
        contender::ROLE => contender::work(side),
        waiting::ROLE => waiting::work(side),
        renewal::ROLE => renewal::work(side),
        memory::ROLE => memory::work(side),
        mysql::ROLE => mysql::work(side),
        role => Err(format!("unknown role {role}").into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", side.role());
            ExitCode::FAILURE
        }
    }
}
