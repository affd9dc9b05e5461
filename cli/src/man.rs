//! `distlock man`: one manual page for all commands.

use std::io::{self, Write as _};

use clap::{Command, CommandFactory as _};
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::{
    args::Args,
    exit::{Exit, Failure, Outcome},
    help_text, output,
};

pub(crate) fn run() -> Outcome {
    output::print(
        &manual_page()
            .map_err(|error| Failure::new(Exit::CannotRun, format!("no manual page: {error}")))?,
    )?;
    Ok(Exit::Success)
}

fn manual_page() -> io::Result<String> {
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    let mut page = Vec::new();
    let man = Man::new(with_usage_of_help(command.clone())).manual("distlock");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    writeln!(page, ".SH COMMANDS")?;
    for subcommand in command.get_subcommands() {
        page.extend(command_section(subcommand)?);
    }
    page.extend(without_definitions(&shared_sections().to_roff()).bytes());
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// The sections that are about all commands.
fn shared_sections() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    add_definitions(&mut roff, &help_text::EXIT_CODES);
    roff.control("SH", ["ENVIRONMENT"]);
    add_definitions(&mut roff, &help_text::ENVIRONMENT);
    roff.control("PP", []).text([roman(help_text::EMPTY_VARIABLES)]);
    roff.control("PP", []);
    roff.text([bold("distlock run"), roman(" sets these variables for its command:")]);
    add_definitions(&mut roff, &help_text::COMMAND_ENVIRONMENT);
    roff.control("SH", ["EXAMPLES"]);
    for (what, line) in help_text::EXAMPLES {
        roff.control("PP", []).text([roman(format!("{what}:"))]);
        roff.control("RS", ["4"]).control("nf", []).text([roman(line)]);
        roff.control("fi", []).control("RE", []);
    }
    roff
}

fn add_definitions(roff: &mut Roff, items: &[(&str, &str)]) {
    for (term, meaning) in items {
        roff.control("TP", []).text([bold(*term)]).text([roman(*meaning)]);
    }
}

/// The part of the page about one command, without the options that all commands share.
fn command_section(command: &Command) -> io::Result<Vec<u8>> {
    const HELP: [&str; 2] = ["help", "version"];
    let common =
        |arg: &clap::Arg| arg.get_help_heading().is_some() || HELP.contains(&arg.get_id().as_str());
    let command = command.clone().mut_args(|arg| if common(&arg) { arg.hide(true) } else { arg });
    let command = with_usage_of_help(command);
    let man = Man::new(command.clone());
    let mut section = Vec::new();
    writeln!(section, ".SS distlock {}", command.get_name())?;
    let mut part = Vec::new();
    man.render_synopsis_section(&mut part)?;
    // Separates two paragraphs.
    writeln!(part, ".PP")?;
    man.render_description_section(&mut part)?;
    man.render_options_section(&mut part)?;
    section.extend(without_headings(&part).bytes());
    Ok(section)
}

/// Uses the usage line of the help. The one of `clap_mangen` leaves out the values of options, and
/// the `--` before the command of `run`.
fn with_usage_of_help(mut command: Command) -> Command {
    let usage = command.render_usage().to_string();
    command.override_usage(usage.trim_start_matches("Usage: ").to_owned())
}

/// Removes section headings, because a page has no headings of a third level.
fn without_headings(part: &[u8]) -> String {
    let text = without_definitions(&String::from_utf8_lossy(part));
    let lines = text.lines().filter(|line| !line.starts_with(".SH"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Removes the macro definitions with which each part begins. A page needs them once.
fn without_definitions(part: &str) -> String {
    let text =
        part.lines().filter(|line| ![".ie", ".el"].iter().any(|control| line.starts_with(control)));
    text.map(|line| format!("{line}\n")).collect()
}
