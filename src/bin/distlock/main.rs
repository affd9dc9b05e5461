//! The command `distlock`: locks for shell scripts, cron jobs and operators. Parse, run, exit code.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod clock;
mod completions;
mod connect;
mod doctor;
mod exit;
mod json;
mod list;
mod man;
mod output;
mod release;
mod run;
mod scratch;
mod show;
mod text;
mod top;

use std::process::ExitCode;

use clap::Parser as _;

use self::{
    args::{Args, Command},
    connect::{has_password, password_on_the_command_line},
    exit::{Exit, Failure, Outcome},
};

fn main() -> ExitCode {
    if let Some(outcome) = run::step(std::env::args_os()) {
        return leave(outcome);
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        // What is wrong with an argument is said by repeating it.
        Err(error)
            if error.use_stderr()
                && std::env::args_os()
                    .any(|arg| arg.to_str().is_some_and(|arg| arg.contains("://") && has_password(arg))) =>
        {
            return leave(Err(password_on_the_command_line()));
        }
        Err(error) => {
            // Help and the version are no errors, and go to standard output.
            let exit = if error.use_stderr() { Exit::Usage } else { Exit::Fine };
            // A closed pipe has nobody to be told.
            let _ = error.print();
            return exit.into();
        }
    };
    let level = std::env::var("DISTLOCK_LOG").unwrap_or_else(|_| "off".into());
    env_logger::Builder::new().parse_filters(&level).format_timestamp(None).init();
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

fn leave(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(exit) => exit.into(),
        Err(Failure { exit, message }) => {
            output::say(&message);
            exit.into()
        }
    }
}
