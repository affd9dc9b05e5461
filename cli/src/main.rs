//! The command `distlock`: locks for shell scripts, cron jobs and operators. Parse, run, exit code.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod clock;
mod completions;
mod connect;
mod doctor;
mod exit;
#[cfg(test)]
mod fuzz;
mod job;
mod json;
mod list;
mod man;
mod output;
mod quarantine;
mod release;
mod run;
mod scratch;
mod secrets;
mod show;
mod stat;
mod text;
mod top;
mod voice;

use std::process::ExitCode;

use self::{
    args::{Command, Unread},
    exit::{Exit, Failure, Outcome},
    voice::Voice,
};

fn main() -> ExitCode {
    if let Some(outcome) = run::step(std::env::args_os()) {
        voice::begin();
        return leave(outcome);
    }
    let args = match args::read(std::env::args_os()) {
        Ok(args) => args,
        Err(said @ Unread::Password) => return leave(Err(Failure::usage(said.to_string()))),
        Err(said) => {
            // Help and the version are no errors, and go to standard output.
            let exit = if said.is_help() { Exit::Fine } else { Exit::Usage };
            if let Unread::Said(error) = said {
                // A closed pipe has nobody to be told; and who cannot be told an error gets its number.
                let written = error.print();
                if exit == Exit::Fine {
                    return leave(output::written(written).map(|()| exit));
                }
            }
            return exit.into();
        }
    };
    if matches!(args.command, Command::Run(_)) {
        voice::begin();
    }
    let target = env_logger::Target::Pipe(Box::new(Voice));
    env_logger::Builder::new().parse_filters(&log_filter()).format_timestamp(None).target(target).init();
    let outcome = match args.command {
        Command::Run(options) => run::run(&args.servers, &options),
        Command::Ls(options) => list::run(&args.servers, &options),
        Command::Show(options) => show::run(&args.servers, &options),
        Command::Release(options) => release::run(&args.servers, &options),
        Command::Top(options) => top::run(&args.servers, &options),
        Command::Doctor(options) => doctor::run(&args.servers, &options),
        Command::Bench(options) => bench::run(&args.servers, &options),
        Command::Completions(options) => completions::run(&options),
        Command::Man => man::run(),
    };
    leave(outcome)
}

/// What is to be logged. The logger would tell of one that it cannot read with `eprintln!`, which waits for a reader, and
/// panics without one.
fn log_filter() -> String {
    const NOTHING: &str = "off";
    let Some(filter) = std::env::var("DISTLOCK_LOG").ok().filter(|filter| !filter.is_empty()) else {
        return NOTHING.into();
    };
    if let Err(error) = env_filter::Builder::new().try_parse(&filter) {
        output::say(&format!("nothing is logged, for DISTLOCK_LOG cannot be read: {error}"));
        return NOTHING.into();
    }
    filter
}

fn leave(outcome: Outcome) -> ExitCode {
    let exit = match outcome {
        Ok(exit) => exit,
        Err(Failure { exit, message }) => {
            output::say(&message);
            exit
        }
    };
    voice::await_written(voice::LAST_WORDS);
    exit.into()
}
