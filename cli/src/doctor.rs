//! `distlock doctor`: what a deployment needs, and what to do where it is not so.

mod attempts;
mod checks;
mod collect;
mod facts;
mod finding;
mod rights;
mod together;
mod trial;

use std::fmt::Write as _;

use serde::Serialize;

use self::{
    facts::{Aims, Contact, Facts},
    finding::{Finding, Level},
};
use crate::{
    args::{Doctor, Servers},
    connect,
    exit::{Exit, Failure, Outcome},
    output,
    quarantine::{Quarantine, TTL},
    secrets::Secrets,
};

/// All of it, for programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    servers: Vec<&'a str>,
    findings: &'a [Finding],
    warnings: usize,
    problems: usize,
}

pub(crate) fn run(servers: &Servers, options: &Doctor) -> Outcome {
    if !TTL.contains(&options.ttl) {
        return Err(Failure::usage("--ttl has to be 10ms to 24h, for no lock lives shorter or longer"));
    }
    let urls = if options.urls.is_empty() { &servers.url } else { &options.urls };
    // Read once: it may be a pipe.
    let password = servers.password_file.as_deref().map(connect::read_password).transpose()?;
    let servers = &Servers { password_file: None, ..servers.clone() };
    let config = connect::config_at(servers, urls)?.password(password.clone().unwrap_or_default());
    let quarantine = Quarantine::of(servers)?;
    quarantine.admit(&config, options.ttl)?;
    let nodes = config.each_node().len();
    let prefix = servers.prefix.clone().unwrap_or_else(|| "lock:".into());
    let aims = Aims { ttl: options.ttl, nodes, quarantine: quarantine.among(nodes), prefix };
    let facts = collect::facts(&config, aims, &Secrets::find(password))?;
    let findings = findings(&facts);
    if options.json {
        output::print_json(&report(&facts, &findings))?;
    } else {
        output::print(&page(&facts, &findings))?;
    }
    Ok(verdict(&facts, &findings))
}

fn findings(facts: &Facts) -> Vec<Finding> {
    let of_each = facts.nodes.iter().flat_map(|node| checks::of_each(node, &facts.aims));
    of_each.chain(together::of_all(facts)).collect()
}

fn verdict(facts: &Facts, findings: &[Finding]) -> Exit {
    if facts.nodes.iter().all(|node| matches!(node.contact, Contact::Away(_))) {
        Exit::Unavailable
    } else if findings.iter().any(|finding| finding.level == Level::Problem) {
        Exit::No
    } else {
        Exit::Fine
    }
}

fn count(findings: &[Finding], level: Level) -> usize {
    findings.iter().filter(|finding| finding.level == level).count()
}

fn report<'a>(facts: &'a Facts, findings: &'a [Finding]) -> Report<'a> {
    Report {
        servers: facts.nodes.iter().map(|node| node.server.as_str()).collect(),
        findings,
        warnings: count(findings, Level::Warning),
        problems: count(findings, Level::Problem),
    }
}

fn page(facts: &Facts, findings: &[Finding]) -> String {
    let mut page = String::new();
    for node in &facts.nodes {
        let own = findings.iter().filter(|finding| finding.server.as_ref() == Some(&node.server));
        section(&mut page, &node.server, own);
    }
    section(&mut page, "together", findings.iter().filter(|finding| finding.server.is_none()));
    let plural = |count: usize, what: &str| match count {
        0 => format!("no {what}"),
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    };
    let problems = plural(count(findings, Level::Problem), "problem");
    let warnings = plural(count(findings, Level::Warning), "warning");
    // Writing to a string cannot fail.
    let _ = writeln!(page, "{problems}, {warnings}");
    page
}

fn section<'a>(page: &mut String, heading: &str, findings: impl Iterator<Item = &'a Finding>) {
    let mut findings = findings.peekable();
    if findings.peek().is_none() {
        return;
    }
    let _ = writeln!(page, "{heading}");
    for Finding { check, level, says, advice, .. } in findings {
        let _ = writeln!(page, "  {:<8} {check:<12} {says}", level.word());
        if let Some(advice) = advice {
            let _ = writeln!(page, "  {:<8} {:<12} -> {advice}", "", "");
        }
    }
    page.push('\n');
}
