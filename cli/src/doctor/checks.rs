//! What is judged of each server alone: from facts to findings, and nothing else.

use std::time::Duration;

use super::{
    facts::{Aims, Clock, Contact, Node, Told},
    finding::Finding,
    rights,
};
use crate::text;

pub(super) type Check = fn(&Node, &Aims) -> Option<Finding>;

/// In the order in which people read them.
pub(super) const OF_EACH: [Check; 12] =
    [reach, rights, info, version, kind, role, replicas, eviction, memory, persistence, idle, latency];

/// Every server that answers is asked for the rest only.
pub(super) fn of_each(node: &Node, aims: &Aims) -> Vec<Finding> {
    let checks = if node.contact == Contact::Answers { &OF_EACH[..] } else { &OF_EACH[..1] };
    let clock = || (node.contact == Contact::Answers).then(|| clock(node.clock)).flatten();
    checks.iter().filter_map(|check| check(node, aims)).chain(clock()).map(|finding| finding.at(&node.server)).collect()
}

fn reach(node: &Node, _: &Aims) -> Option<Finding> {
    Some(match &node.contact {
        Contact::Answers => Finding::ok("reach", "answers and lets us in"),
        Contact::Away(why) => Finding::problem("reach", format!("cannot be reached: {}", text::clean(why)))
            .advice("start it, or mend its address, the network or a firewall"),
        Contact::Refuses { code, message } => refused(code, &text::clean(message)),
    })
}

fn refused(code: &str, message: &str) -> Finding {
    let finding = |check| Finding::problem(check, format!("refuses us: {} {message}", text::clean(code)));
    match code {
        "NOAUTH" => finding("login").advice("put the password into a file for --password-file, or into DISTLOCK_URL"),
        "WRONGPASS" => finding("login").advice("check the user and the password"),
        // Connecting asks for the time, so nothing else can be tried.
        "NOPERM" if message.contains("'time'") => {
            Finding::problem("rights", "missing: +time, without which there is no connection")
                .advice("ACL SETUSER <user> +time, and look again")
        }
        "NOPERM" if message.contains("'select'") => finding("rights").advice("grant +select, or use database 0"),
        // A Sentinel knows neither the time nor locks.
        "ERR" if message.to_lowercase().contains("unknown command") => {
            finding("kind").advice("this looks like a Sentinel or a proxy; connect to the server behind it")
        }
        _ => finding("login").advice("mend what the server complains of"),
    }
}

/// All that is missing, with the line that grants it.
fn rights(node: &Node, aims: &Aims) -> Option<Finding> {
    let missing = &node.rights.missing;
    let is_needed = |right: &String| {
        let of_nodes = rights::NODES.contains(&right.as_str());
        !rights::LOOKING.contains(&right.as_str()) && (!of_nodes || (aims.nodes > 1 && right == "+info"))
    };
    // What only tells us more is said by those checks that miss it.
    let told: Vec<&String> =
        missing.iter().filter(|right| aims.nodes > 1 || !rights::NODES.contains(&right.as_str())).collect();
    if told.is_empty() {
        return Some(Finding::ok("rights", "all that locks need"));
    }
    let words = told.iter().map(|right| right.as_str()).collect::<Vec<_>>().join(" ");
    let grant = format!("ACL SETUSER <user> {words}");
    let grant = match node.rights.untried.as_slice() {
        [] => grant,
        untried => format!("{grant}; {} could not be tried without it, so look again then", untried.join(" and ")),
    };
    let (needed, more): (Vec<&String>, Vec<&String>) = told.into_iter().partition(|right| is_needed(right));
    let list = |rights: &[&String]| rights.iter().map(|right| right.as_str()).collect::<Vec<_>>().join(" ");
    Some(match (needed.as_slice(), more.as_slice()) {
        ([], more) => {
            Finding::warning("rights", format!("not all commands work; missing: {}", list(more))).advice(grant)
        }
        (needed, []) => Finding::problem("rights", format!("missing: {}", list(needed))).advice(grant),
        (needed, more) => {
            let says = format!("missing: {}, and for looking at locks and nodes {}", list(needed), list(more));
            Finding::problem("rights", says).advice(grant)
        }
    })
}

/// What all the checks that need `INFO` have to say without it.
fn info(node: &Node, _: &Aims) -> Option<Finding> {
    let what = "version, kind, role, replicas, eviction, memory and persistence";
    match &node.info {
        Told::Yes(_) => None,
        Told::Denied => Some(Finding::unknown("info", format!("cannot tell its {what}: needs +info"))),
        Told::No(why) => Some(Finding::unknown("info", format!("cannot tell its {what}: {}", text::clean(why)))),
    }
}

fn version(node: &Node, _: &Aims) -> Option<Finding> {
    let info = node.info()?;
    if let Some(version) = info.told("valkey_version") {
        return Some(Finding::ok("version", format!("Valkey {version}")));
    }
    let version = info.get("redis_version").unwrap_or_default();
    let shown = info.told("redis_version").unwrap_or_default();
    let mut numbers = version.split('.').map_while(|part| part.parse::<u32>().ok());
    Some(match (numbers.next(), numbers.next()) {
        (Some(major), minor) if (major, minor.unwrap_or(0)) >= (6, 2) => {
            Finding::ok("version", format!("Redis {shown}"))
        }
        (Some(_), _) => Finding::problem("version", format!("Redis {shown} is too old"))
            .advice("use Redis 6.2 or newer, or any Valkey"),
        (None, _) => Finding::unknown("version", format!("cannot tell its version from \"{shown}\"")),
    })
}

fn kind(node: &Node, _: &Aims) -> Option<Finding> {
    let info = node.info()?;
    let mode = info.get("redis_mode").or(info.get("server_mode")).unwrap_or("standalone");
    Some(match mode {
        "sentinel" => Finding::problem("kind", "is a Sentinel, which keeps no locks").advice("connect to its master"),
        _ if mode == "cluster" || info.get("cluster_enabled") == Some("1") => {
            Finding::problem("kind", "is in cluster mode, which is not supported")
                .advice("use a server that stands alone, or several with commas between")
        }
        _ => Finding::ok("kind", "stands alone"),
    })
}

fn role(node: &Node, _: &Aims) -> Option<Finding> {
    let info = node.info()?;
    (info.get("role") != Some("master")).then(|| {
        let master = info.told("master_host").map_or_else(String::new, |host| format!(" of {host}"));
        Finding::problem("role", format!("is a replica{master}, and refuses writes")).advice("connect to its master")
    })
}

fn replicas(node: &Node, _: &Aims) -> Option<Finding> {
    let info = node.info()?;
    match info.number("connected_slaves") {
        _ if info.get("role") != Some("master") => None,
        0 => Some(Finding::ok("replicas", "none that could take over without the last locks")),
        count => Some(
            Finding::warning(
                "replicas",
                format!("{count} connected: a failover to one of them can lose the locks of its last moments"),
            )
            .advice("check fencing tokens where it matters, or use several nodes that do not replicate"),
        ),
    }
}

fn eviction(node: &Node, _: &Aims) -> Option<Finding> {
    let info = node.info()?;
    let (policy, shown) = (info.get("maxmemory_policy")?, info.told("maxmemory_policy")?);
    let advice = "CONFIG SET maxmemory-policy noeviction, and keep other data elsewhere";
    Some(match (policy, info.number("maxmemory")) {
        ("noeviction", _) => Finding::ok("eviction", "nothing is evicted (noeviction)"),
        (_, 0) => {
            let says = format!("maxmemory-policy is {shown}: locks will be evicted once there is a maxmemory");
            Finding::warning("eviction", says).advice(advice)
        }
        _ => {
            let says =
                format!("maxmemory-policy is {shown}: when memory is full, locks are evicted while they are held");
            Finding::problem("eviction", says).advice(advice)
        }
    })
}

fn memory(node: &Node, _: &Aims) -> Option<Finding> {
    let info = node.info()?;
    let (used, limit) = (info.number("used_memory"), info.number("maxmemory"));
    if limit == 0 {
        return None;
    }
    let percent = used.saturating_mul(100) / limit;
    let says = format!("{percent} % of maxmemory in use");
    let advice = "raise maxmemory, or free memory: without it no lock can be taken";
    Some(match percent {
        0..90 => Finding::ok("memory", says),
        90..100 => Finding::warning("memory", says).advice(advice),
        _ => Finding::problem("memory", says).advice(advice),
    })
}

/// Several nodes keep one out that may have forgotten; one server cannot.
fn persistence(node: &Node, aims: &Aims) -> Option<Finding> {
    let info = node.info()?;
    let check = "persistence";
    let always = node.appendfsync == Told::Yes("always".into()) && info.get("aof_enabled") == Some("1");
    let later = always && node.no_fsync_on_rewrite == Told::Yes("yes".into());
    let loses = match (info.get("aof_enabled") == Some("1"), &node.appendfsync) {
        _ if later => {
            "a power failure while it rewrites its file forgets the locks of the last half minute or so \
             (no-appendfsync-on-rewrite yes)"
        }
        (true, Told::Yes(fsync)) if fsync == "always" => {
            return Some(Finding::ok(check, "everything is on disk before it is answered (appendfsync always)"));
        }
        (true, Told::Yes(fsync)) if fsync == "everysec" => "a crash forgets the locks of the last second or two",
        (true, Told::Yes(_)) => "a crash forgets the locks of the last half minute or so",
        (true, Told::Denied) => {
            return Some(Finding::unknown(check, "cannot tell what a crash forgets: needs +config|get"));
        }
        (true, Told::No(why)) => {
            return Some(Finding::unknown(check, format!("cannot tell what a crash forgets: {}", text::clean(why))));
        }
        (false, _) => "a restart forgets all locks",
    };
    if !aims.quarantine.is_zero() {
        let up = Duration::from_secs(info.number("uptime_in_seconds"));
        let out = "it then does not vote until what it forgot has expired (--quarantine)";
        let now = match aims.quarantine.checked_sub(up) {
            Some(left) if !left.is_zero() => format!("; it has just started, and votes in {}", text::span(left)),
            _ => String::new(),
        };
        return Some(Finding::ok(check, format!("{loses}; {out}{now}")));
    }
    let found_out = "holders find out at their next renewal, and others may have their locks meanwhile";
    let settings = if later { "no-appendfsync-on-rewrite no" } else { "appendonly yes and appendfsync always" };
    let advice = format!("CONFIG SET {settings}, or three nodes; or check fencing tokens");
    Some(Finding::warning(check, format!("{loses}: {found_out}")).advice(advice))
}

/// Waiters' connections are not closed by it, those of renewals are.
fn idle(node: &Node, aims: &Aims) -> Option<Finding> {
    let seconds = match &node.timeout {
        Told::Yes(seconds) => seconds.parse::<u64>().ok()?,
        Told::Denied => {
            return Some(Finding::unknown("timeout", "cannot tell when it closes idle connections: needs +config|get"));
        }
        Told::No(_) => return None,
    };
    let every = aims.ttl / 3;
    Some(match seconds {
        0 => Finding::ok("timeout", "idle connections stay open"),
        _ if Duration::from_secs(seconds) > every => Finding::ok(
            "timeout",
            format!("closes connections that are idle for {seconds} s, longer than between renewals"),
        ),
        _ => Finding::warning(
            "timeout",
            format!(
                "closes connections that are idle for {seconds} s: every renewal ({} apart) connects anew",
                text::span(every)
            ),
        )
        .advice(format!("CONFIG SET timeout 0, or more than {}", every.as_secs().saturating_add(1))),
    })
}

fn latency(node: &Node, aims: &Aims) -> Option<Finding> {
    let (median, worst) = (node.median_round_trip(), node.worst_round_trip());
    if node.round_trips.is_empty() {
        return None;
    }
    let ttl = aims.ttl;
    let says = format!("a round trip takes {}, {} at worst", text::span(median), text::span(worst));
    let would_do =
        || format!("use a ttl of {} or more, or a server nearby", text::span(rounded_up(worst.saturating_mul(10))));
    Some(if worst <= ttl / 10 {
        Finding::ok("latency", format!("{says}, little beside a ttl of {}", text::span(ttl)))
    } else if worst <= ttl / 3 {
        Finding::warning("latency", format!("{says}, much beside a ttl of {}", text::span(ttl))).advice(would_do())
    } else {
        let says = format!("{says}: with a ttl of {} locks are lost between two renewals", text::span(ttl));
        Finding::problem("latency", says).advice(would_do())
    })
}

/// To one digit, so that it is no less.
fn rounded_up(span: Duration) -> Duration {
    let millis = u64::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX).max(10);
    let unit = 10u64.pow(millis.ilog10());
    Duration::from_millis(millis.div_ceil(unit).saturating_mul(unit))
}

/// Beyond this clocks of people and servers tell different stories.
pub(super) const CLOCKS_APART_US: i64 = 1_000_000;

fn clock(clock: Option<Clock>) -> Option<Finding> {
    let Clock { ahead_us, unsure_us } = clock?;
    let apart = span_of(ahead_us);
    let side = if ahead_us < 0 { "behind" } else { "ahead of" };
    let says = format!("its clock is {apart} {side} ours, give or take {}", span_of(unsure_us));
    Some(if ahead_us.saturating_abs().saturating_sub(unsure_us) <= CLOCKS_APART_US {
        Finding::ok("clock", says)
    } else {
        Finding::warning("clock", format!("{says}: times are told wrong, and tokens go by its clock"))
            .advice("keep both clocks by NTP")
    })
}

pub(super) fn span_of(us: i64) -> String {
    text::span(Duration::from_micros(us.unsigned_abs()))
}

#[cfg(test)]
mod tests;
