//! Breaks each promise on purpose, in a copy of the code, and checks that its test detects that.
//! Run it with `make mutants`.

mod change;
mod copy;
mod outcome;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use change::{Change, Test};
use copy::Copy;
use outcome::Outcome;

/// Far longer than any of these tests takes. A test that hangs has detected the patch too.
const TEST_MAX: Duration = Duration::from_secs(240);

const USAGE: &str = "\
Breaks each promise on purpose, in a copy of the code, and checks that its test detects that.

usage: cargo test --test mutants -- --run [PART]...
  --run   apply the patches whose names contain one of the PARTs, or all patches
  --rows  print the rows of docs/promises.md";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let home = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let done = match args.first().map(String::as_str) {
        Some("--run") => Change::all(home).and_then(|changes| run(home, changes, &args[1..])),
        Some("--rows") => Change::all(home).map(|changes| {
            changes.iter().for_each(|change| println!("{} {}", change.promise, change.row()));
            true
        }),
        Some("--help") => {
            println!("{USAGE}");
            Ok(true)
        }
        // As a part of `cargo test` it does nothing. tests/it/promises.rs checks that the patches
        // fit the code.
        _ => Ok(true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mutants: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(home: &std::path::Path, mut changes: Vec<Change>, parts: &[String]) -> Result<bool, String> {
    if !parts.is_empty() {
        changes.retain(|change| parts.iter().any(|part| change.name.contains(part.as_str())));
    }
    if changes.is_empty() {
        return Err("no patch has such a name".into());
    }
    // Checked first, because everything else takes long.
    let unfit: Vec<_> = changes.iter().filter_map(|change| change.applied(home).err()).collect();
    if !unfit.is_empty() {
        return Err(unfit.join("\n"));
    }
    #[expect(clippy::disallowed_methods, reason = "only printed")]
    let started = Instant::now();
    let copy = Copy::make(home)?;
    // By test, because the tests of one target share a build.
    changes.sort_by(|one, other| one.test.cmp(&other.test));
    let mut tests: Vec<&Test> = changes.iter().map(|change| &change.test).collect();
    tests.dedup();
    println!("{} patches, {} tests; first the tests without a patch", changes.len(), tests.len());
    let mut unusable = Vec::new();
    for tests in tests.chunk_by(|one, other| one.target == other.target) {
        for test in copy.doubtful(tests, TEST_MAX)? {
            let alone = copy.test(test, None, TEST_MAX)?;
            if alone != Outcome::Green {
                eprintln!("without a patch, {test} is {alone}");
                unusable.push(test);
            }
        }
    }
    let mut rows = Vec::new();
    for change in &changes {
        let test = &change.test;
        let outcome =
            if unusable.contains(&test) { Outcome::Broken } else { detect(&copy, change)? };
        let verdict = if outcome.has_noticed() { "detected" } else { "NOT DETECTED" };
        println!("{verdict:12}  {:<44} {:<9} {test}", change.name, outcome.to_string());
        rows.push((change, outcome));
    }
    let missed: Vec<_> = rows.iter().filter(|(_, outcome)| !outcome.has_noticed()).collect();
    println!(
        "\n{} of {} patches were detected by their tests, in {} minutes",
        rows.len() - missed.len(),
        rows.len(),
        started.elapsed().as_secs().div_ceil(60)
    );
    for (change, outcome) in &missed {
        println!("  {}: {} is {outcome}", change.name, change.test);
    }
    Ok(missed.is_empty())
}

/// Runs the test of a patch, which is green without it.
fn detect(copy: &Copy, change: &Change) -> Result<Outcome, String> {
    let fails_with = change.fails_with.as_deref();
    let outcome = copy.with(change, |copy| copy.test(&change.test, fails_with, TEST_MAX))?;
    // The machine may have been busy, so run the test without the patch.
    if outcome == Outcome::Hangs && copy.test(&change.test, None, TEST_MAX)? != Outcome::Green {
        return Ok(Outcome::Broken);
    }
    Ok(outcome)
}
