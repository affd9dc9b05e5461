//! Runs a test again in an environment that may not be available, such as another network or time
//! namespace.

use std::{
    env,
    io::{self, Write as _, stderr},
    process::Output,
};

/// Runs the test `test` of this test binary again in the environment that `run` creates: it gets a
/// program with its arguments and runs it there.
///
/// If this machine does not allow such an environment, this prints `missing` and returns, and the
/// test proves nothing.
#[track_caller]
pub fn run_elsewhere(test: &str, missing: &str, run: impl Fn(&[&str]) -> io::Result<Output>) {
    if !trial_succeeded(test, missing, run(&["true"])) {
        return;
    }
    let program = env::current_exe().unwrap();
    let output = run(&[program.to_str().unwrap(), test, "--exact", "--nocapture"]).unwrap();
    let [said, errors] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{errors}");
}

/// Returns whether the trial run succeeded. If not, prints that the test was skipped, and why.
pub fn trial_succeeded(test: &str, missing: &str, tried: io::Result<Output>) -> bool {
    let why = match tried {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    // The test harness captures the output of `eprintln!` and drops it if the test passes.
    let _ = writeln!(stderr(), "NOT SHOWN: {test}: {missing}: {}", why.trim());
    false
}
