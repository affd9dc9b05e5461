//! `distlock man`: the manual page, of all commands in one.

use std::io::{self, Write as _};

use clap::{Command, CommandFactory as _};
use clap_mangen::Man;

use crate::{
    args::Args,
    exit::{Exit, Failure, Outcome},
    output,
};

pub(crate) fn run() -> Outcome {
    output::print(&page().map_err(|error| Failure::new(Exit::CannotRun, format!("no manual page: {error}")))?)?;
    Ok(Exit::Fine)
}

fn page() -> io::Result<String> {
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    let mut page = Vec::new();
    let man = Man::new(command.clone()).manual("distlock");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    writeln!(page, ".SH COMMANDS")?;
    for subcommand in command.get_subcommands() {
        page.extend(section(subcommand)?);
    }
    writeln!(page, ".SH EXIT STATUS")?;
    let mut codes = Vec::new();
    man.render_extra_section(&mut codes)?;
    page.extend(without_headings(&codes).bytes());
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// One command, as a part of the page; what all commands have in common stands above.
fn section(command: &Command) -> io::Result<Vec<u8>> {
    const HELP: [&str; 2] = ["help", "version"];
    let common = |arg: &clap::Arg| arg.get_help_heading().is_some() || HELP.contains(&arg.get_id().as_str());
    let mut command = command.clone().mut_args(|arg| if common(&arg) { arg.hide(true) } else { arg });
    // As the help has it: what is made for this page leaves out what stands before the command of `run`.
    let usage = command.render_usage().to_string();
    command = command.override_usage(usage.trim_start_matches("Usage: ").to_owned());
    let man = Man::new(command.clone());
    let mut section = Vec::new();
    writeln!(section, ".SS distlock {}", command.get_name())?;
    let mut part = Vec::new();
    man.render_synopsis_section(&mut part)?;
    // Between two paragraphs of one text.
    writeln!(part, ".PP")?;
    man.render_description_section(&mut part)?;
    man.render_options_section(&mut part)?;
    section.extend(without_headings(&part).bytes());
    Ok(section)
}

/// A page has one level of headings below its sections only.
fn without_headings(part: &[u8]) -> String {
    let part = String::from_utf8_lossy(part);
    // Each section brings definitions of its own, which one page needs once.
    let text = part.lines().filter(|line| ![".SH", ".ie", ".el"].iter().any(|control| line.starts_with(control)));
    text.map(|line| format!("{line}\n")).collect()
}
