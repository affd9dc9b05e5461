//! The command `distlock`: locks for shell scripts, cron jobs and operators.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod clock;
mod completions;
mod connect;
mod doctor;
mod exit;
mod format;
#[cfg(test)]
mod fuzz;
mod help_text;
mod holders;
mod init;
mod job_control;
mod json;
mod list;
mod man;
mod manager_config;
mod mysql_table;
mod output;
mod proc_stat;
mod quarantine_option;
mod ranges;
mod release;
mod release_each;
mod run;
mod secrets;
mod show;
mod stderr_writer;
mod temp_lock;
mod top;
mod urls;

use std::process::ExitCode;

use self::{
    args::{ArgError, Command},
    exit::{Exit, Failure, Outcome},
    json::ErrorJson,
    stderr_writer::StderrWriter,
};

fn main() -> ExitCode {
    if let Some(outcome) = run::internal_step(std::env::args_os()) {
        stderr_writer::start_thread();
        return exit_code(outcome, false);
    }
    let is_json = wants_json(std::env::args_os());
    let args = match args::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(error @ (ArgError::Password { .. } | ArgError::LockWithCommand { .. })) => {
            return exit_code(Err(Failure::usage(error.to_string())), is_json);
        }
        Err(error) => {
            // Help and the version are not errors, and go to standard output.
            let exit = if error.is_help() { Exit::Success } else { Exit::Usage };
            if let ArgError::Clap(error) = error {
                if exit == Exit::Success {
                    let written = error.print();
                    return exit_code(output::check_stdout(written).map(|()| exit), false);
                }
                output::print_usage_error(&args::text(&error));
                if is_json {
                    print_error(&Failure::usage(args::summary(&error)));
                }
            }
            return exit.into();
        }
    };
    if matches!(args.command, Command::Run(_) | Command::Adopt(_)) {
        stderr_writer::start_thread();
    }
    let target = env_logger::Target::Pipe(Box::new(StderrWriter));
    env_logger::Builder::new()
        .parse_filters(&log_filter())
        .format_timestamp(None)
        .target(target)
        .init();
    let has_url = args.has_url();
    let outcome = match args.command {
        Command::Run(options) => run::run(&args.servers, &options),
        Command::Adopt(options) => run::adopt(&args.servers, &options),
        Command::Lock(options) => run::hold(&args.servers, &options),
        Command::Ls(options) => list::run(&args.servers, &options),
        Command::Show(options) => show::run(&args.servers, &options),
        Command::Release(options) => release::run(&args.servers, &options),
        Command::Top(options) => top::run(&args.servers, &options),
        Command::Init(options) => init::run(&args.servers, &options),
        Command::Doctor(options) => doctor::run(&args.servers, &options),
        Command::Bench(options) => bench::run(&args.servers, &options),
        Command::MysqlSchema => mysql_table::print_schema(&args.servers),
        Command::Prune(options) => mysql_table::prune(&args.servers, &options),
        Command::Completions(options) => completions::run(&options),
        Command::Man => man::run(),
    };
    let outcome = outcome.map_err(|failure| match failure.exit {
        Exit::Usage if has_url => {
            let message = format::without_password_syntax(&failure.message);
            Failure { message, ..failure }
        }
        _ => failure,
    });
    exit_code(outcome, is_json)
}

/// Whether the output is to be JSON, even if the command line is invalid otherwise.
fn wants_json(words: std::env::ArgsOs) -> bool {
    words.take_while(|word| word != "--").any(|word| word == "--json")
}

/// Prints a failure as JSON. If it cannot be printed, the exit code still reports it.
fn print_error(failure: &Failure) {
    let _ = output::print_json(ErrorJson::new(failure));
}

/// Returns the filter of the logger. A malformed filter is rejected here, because the logger would
/// report it with `eprintln!`, which blocks if nobody reads standard error, and panics if standard
/// error is closed.
fn log_filter() -> String {
    const OFF: &str = "off";
    let Some(filter) = std::env::var("DISTLOCK_LOG").ok().filter(|filter| !filter.is_empty())
    else {
        return OFF.into();
    };
    if let Some(word) = unknown_level(&filter) {
        output::print_message(&format!(
            "DISTLOCK_LOG: {} is not a level, so nothing may be logged; the levels are {}",
            format::quote(word),
            LOG_LEVELS.join(", ")
        ));
    }
    if let Err(error) = env_filter::Builder::new().try_parse(&filter) {
        output::print_message(&format!(
            "logging is off: DISTLOCK_LOG is not a valid filter: {error}"
        ));
        return OFF.into();
    }
    filter
}

const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The first word of the filter that seems to be meant as a level, but is none. The logger takes it
/// as the name of a crate, and logs nothing.
fn unknown_level(filter: &str) -> Option<&str> {
    /// Crates that log, as far as they matter here.
    const CRATES: [&str; 4] = ["distlock", "mysql", "redis", "rustls"];
    let directives = filter.split('/').next().unwrap_or_default().split(',').map(str::trim);
    let is_level = |word: &str| LOG_LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let is_target = |word: &str| {
        word.contains(['=', ':', '_']) || CRATES.iter().any(|known| word.starts_with(known))
    };
    directives.filter(|word| !word.is_empty()).find(|word| !is_level(word) && !is_target(word))
}

fn exit_code(outcome: Outcome, is_json: bool) -> ExitCode {
    let exit = match outcome {
        Ok(exit) => exit,
        Err(failure) => {
            // A negative result is not an error, and has been printed.
            if is_json && failure.exit != Exit::No {
                print_error(&failure);
            }
            output::print_message(&failure.message);
            failure.exit
        }
    };
    stderr_writer::flush(stderr_writer::EXIT_FLUSH_TIMEOUT);
    exit.into()
}
