//! `distlock doctor`: checks whether servers are fit for locks, and suggests fixes.

mod certificates;
mod cluster;
mod cluster_checks;
mod collect;
mod cross_checks;
mod facts;
mod finding;
mod grant_command;
mod handover_probe;
mod mysql;
mod mysql_checks;
mod node_checks;
mod other_prefixes;
mod permission_check;
mod permission_probe;
mod permissions;
mod replica_checks;
mod sentinel;
mod sentinel_checks;

use std::fmt::Write as _;

use serde::Serialize;

use distlock::{Config, LockError};

use self::{
    facts::{Contact, Requirements},
    finding::{Finding, Level},
};
use crate::{
    args::{Doctor, Servers},
    connect,
    exit::{Exit, Outcome},
    format,
    manager_config::ManagerConfig,
    output,
    quarantine_option::QuarantineOption,
    ranges,
    secrets::Secrets,
};

/// The servers, and what is right and wrong with them.
#[derive(Debug)]
struct Examination {
    servers: Vec<String>,
    /// None of the servers can be reached.
    is_unreachable: bool,
    findings: Vec<Finding>,
}

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
    let mut config = connect::config_for(servers, urls)?;
    if let Some(password) = &password {
        config = config.password(password);
    }
    let quarantine = QuarantineOption::from_args(servers)?;
    let nodes = config.each_node().len();
    quarantine.check_ttl(nodes, options.ttl)?;
    let prefix = servers.prefix.clone().unwrap_or_else(|| "lock:".into());
    let requirements =
        Requirements { ttl: options.ttl, nodes, quarantine: quarantine.for_nodes(nodes), prefix };
    let certificates = certificates::examine(&config, &servers.tls)?;
    let mut examined = match config {
        ManagerConfig::Redis(config) if config.is_cluster() => {
            let users = grant_command::users(urls);
            let user = users.first().map_or("default", String::as_str);
            cluster::examine(&config, &requirements, user, &Secrets::collect(password))?
        }
        ManagerConfig::Redis(config) => {
            let users = grant_command::users(urls);
            examine_redis(&config, requirements, users, &Secrets::collect(password))?
        }
        ManagerConfig::MySql(config) => mysql::examine(config, &requirements)?,
    };
    examined.findings.extend(certificates);
    examined.list_all_servers();
    if options.json {
        output::print_json(build_report(&examined))?;
    } else {
        output::print(&format_report(&examined))?;
    }
    Ok(verdict(&examined))
}

fn examine_redis(
    config: &Config,
    requirements: Requirements,
    users: Vec<String>,
    secrets: &Secrets,
) -> Result<Examination, LockError> {
    let behind = sentinel::examine(config, &requirements, secrets)?;
    let facts = collect::collect_facts(config, requirements, users, secrets)?;
    let of_nodes =
        facts.nodes.iter().flat_map(|node| node_checks::check_node(node, &facts.requirements));
    // Without replicas, a master behind sentinels has no successor, which is reported.
    let is_behind = !behind.is_empty();
    let of_nodes = of_nodes.filter(|finding| {
        !(is_behind && finding.check == "replicas" && finding.level == Level::Ok)
    });
    let together = behind.into_iter().chain(cross_checks::check_together(&facts));
    let is_unreachable =
        facts.nodes.iter().all(|node| matches!(node.contact, Contact::Unreachable(_)));
    Ok(Examination {
        findings: of_nodes.chain(together).collect(),
        servers: facts.nodes.into_iter().map(|node| node.server).collect(),
        is_unreachable,
    })
}

impl Examination {
    /// Adds the servers that only findings name, such as sentinels.
    fn list_all_servers(&mut self) {
        for server in self.findings.iter().filter_map(|finding| finding.server.as_ref()) {
            if !self.servers.contains(server) {
                self.servers.push(server.clone());
            }
        }
    }
}

fn verdict(examined: &Examination) -> Exit {
    if examined.is_unreachable {
        Exit::Unavailable
    } else if examined.findings.iter().any(|finding| finding.level == Level::Problem) {
        Exit::No
    } else {
        Exit::Success
    }
}

fn count_level(findings: &[Finding], level: Level) -> usize {
    findings.iter().filter(|finding| finding.level == level).count()
}

fn build_report(examined: &Examination) -> DoctorReport<'_> {
    let findings = &examined.findings;
    DoctorReport {
        servers: examined.servers.iter().map(String::as_str).collect(),
        findings,
        unknown: count_level(findings, Level::Unknown),
        warnings: count_level(findings, Level::Warning),
        problems: count_level(findings, Level::Problem),
    }
}

fn format_report(Examination { servers, findings, .. }: &Examination) -> String {
    let mut page = String::new();
    for server in servers {
        let own = findings.iter().filter(|finding| finding.server.as_ref() == Some(server));
        add_section(&mut page, server, own);
    }
    add_section(&mut page, "together", findings.iter().filter(|finding| finding.server.is_none()));
    let plural = |count: usize, what: &str| match count {
        0 => format!("no {what}s"),
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    };
    let problems = plural(count_level(findings, Level::Problem), "problem");
    let warnings = plural(count_level(findings, Level::Warning), "warning");
    // "no problems" alone would be wrong if some of them could not be looked for.
    let unknown = match count_level(findings, Level::Unknown) {
        0 => String::new(),
        count => format!("; {} could not be made", plural(count, "check")),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(page, "{problems}, {warnings}{unknown}");
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
