//! `distlock doctor`: checks whether servers are fit for locks, and suggests fixes.

mod collect;
mod cross_checks;
mod facts;
mod finding;
mod grant_command;
mod handover_probe;
mod node_checks;
mod other_prefixes;
mod permission_probe;
mod permissions;

use std::fmt::Write as _;

use serde::Serialize;

use self::{
    facts::{Contact, Facts, Requirements},
    finding::{Finding, Level},
};
use crate::{
    args::{Doctor, Servers},
    connect,
    exit::{Exit, Outcome},
    format, output,
    quarantine_option::QuarantineOption,
    ranges,
    secrets::Secrets,
};

/// The result as JSON.
#[derive(Debug, Serialize)]
struct DoctorReport<'a> {
    servers: Vec<&'a str>,
    findings: &'a [Finding],
    unknown: usize,
    warnings: usize,
    problems: usize,
}

pub(crate) fn run(servers: &Servers, options: &Doctor) -> Outcome {
    ranges::check("--ttl", options.ttl, &ranges::TTL)?;
    let urls = if options.urls.is_empty() { &servers.url } else { &options.urls };
    // The file is read once, because it may be a pipe.
    let password = servers.password_file.as_deref().map(connect::read_password).transpose()?;
    let servers = &Servers { password_file: None, ..servers.clone() };
    let config = connect::config_for(servers, urls)?.password(password.clone().unwrap_or_default());
    let quarantine = QuarantineOption::from_args(servers)?;
    quarantine.check_ttl(&config, options.ttl)?;
    let nodes = config.each_node().len();
    let prefix = servers.prefix.clone().unwrap_or_else(|| "lock:".into());
    let requirements =
        Requirements { ttl: options.ttl, nodes, quarantine: quarantine.for_nodes(nodes), prefix };
    let users = grant_command::users(urls);
    let facts = collect::collect_facts(&config, requirements, users, &Secrets::collect(password))?;
    let findings = check_facts(&facts);
    if options.json {
        output::print_json(build_report(&facts, &findings))?;
    } else {
        output::print(&format_report(&facts, &findings))?;
    }
    Ok(verdict(&facts, &findings))
}

fn check_facts(facts: &Facts) -> Vec<Finding> {
    let of_nodes =
        facts.nodes.iter().flat_map(|node| node_checks::check_node(node, &facts.requirements));
    of_nodes.chain(cross_checks::check_together(facts)).collect()
}

fn verdict(facts: &Facts, findings: &[Finding]) -> Exit {
    if facts.nodes.iter().all(|node| matches!(node.contact, Contact::Unreachable(_))) {
        Exit::Unavailable
    } else if findings.iter().any(|finding| finding.level == Level::Problem) {
        Exit::No
    } else {
        Exit::Success
    }
}

fn count_level(findings: &[Finding], level: Level) -> usize {
    findings.iter().filter(|finding| finding.level == level).count()
}

fn build_report<'a>(facts: &'a Facts, findings: &'a [Finding]) -> DoctorReport<'a> {
    DoctorReport {
        servers: facts.nodes.iter().map(|node| node.server.as_str()).collect(),
        findings,
        unknown: count_level(findings, Level::Unknown),
        warnings: count_level(findings, Level::Warning),
        problems: count_level(findings, Level::Problem),
    }
}

fn format_report(facts: &Facts, findings: &[Finding]) -> String {
    let mut page = String::new();
    for node in &facts.nodes {
        let own = findings.iter().filter(|finding| finding.server.as_ref() == Some(&node.server));
        add_section(&mut page, &node.server, own);
    }
    add_section(&mut page, "together", findings.iter().filter(|finding| finding.server.is_none()));
    let plural = |count: usize, what: &str| match count {
        0 => format!("no {what}s"),
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    };
    let problems = plural(count_level(findings, Level::Problem), "problem");
    let warnings = plural(count_level(findings, Level::Warning), "warning");
    // "no problems" would be wrong if some of them could not be looked for.
    let unknown = match count_level(findings, Level::Unknown) {
        0 => String::new(),
        count => format!("incomplete: {} unknown; otherwise ", plural(count, "result")),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(page, "{unknown}{problems}, {warnings}");
    page
}

fn add_section<'a>(page: &mut String, heading: &str, findings: impl Iterator<Item = &'a Finding>) {
    let mut findings = findings.peekable();
    if findings.peek().is_none() {
        return;
    }
    let _ = writeln!(page, "{heading}");
    for Finding { check, level, message, advice, commands, .. } in findings {
        let _ = writeln!(page, "  {:<8} {check:<12} {message}", level.label());
        if let Some(advice) = advice {
            let _ = writeln!(page, "  {:<8} {:<12} -> {advice}", "", "");
        }
        // On lines of their own, so that they can be pasted.
        for command in commands {
            let _ = writeln!(page, "      {}", format::escape(command));
        }
    }
    page.push('\n');
}
