use std::{
    env,
    io::{self, Write as _, stderr},
    process::Output,
};

/// Runs a test of this program in surroundings of its own, with what `run` makes of a program and its arguments.
///
/// Where such surroundings cannot be had, that is said as `missing`, and nothing is shown.
#[track_caller]
pub fn run_elsewhere(test: &str, missing: &str, run: impl Fn(&[&str]) -> io::Result<Output>) {
    if !can_be_had(test, missing, run(&["true"])) {
        return;
    }
    let program = env::current_exe().unwrap();
    let output = run(&[program.to_str().unwrap(), test, "--exact", "--nocapture"]).unwrap();
    let [said, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{errors}");
}

/// Whether a program that does nothing ran there. If not, that is said.
pub fn can_be_had(test: &str, missing: &str, tried: io::Result<Output>) -> bool {
    let why = match tried {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    // Not by `eprintln!`, which is kept to itself where the test passes.
    let _ = writeln!(stderr(), "NOT SHOWN: {test}: {missing}: {}", why.trim());
    false
}
