//! `distlock completions`: prints a completion script for a shell.

use clap::CommandFactory as _;

use crate::{
    args::{Args, Completions},
    exit::{Exit, Outcome},
    output,
};

pub(crate) fn run(options: &Completions) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Args::command(), "distlock", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Success)
}
