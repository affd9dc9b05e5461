//! The checks of a single server: pure functions from facts to findings.

use std::time::Duration;

use super::{
    facts::{ClockOffset, Contact, NodeFacts, Queried, Requirements},
    finding::Finding,
    grant_command,
    other_prefixes::check_prefix,
    permission_check::{GRANT_ADVICE, PASTE_ADVICE, check_permissions},
    permission_probe,
    permissions::SETTINGS_PERMISSION,
    replica_checks::{check_cut_off, check_replicas},
};
use crate::format;

pub(super) type Check = fn(&NodeFacts, &Requirements) -> Option<Finding>;

/// Checks of one server, in the order in which their findings are shown.
pub(super) const NODE_CHECKS: [Check; 14] = [
    check_reach,
    check_permissions,
    check_info,
    check_version,
    check_kind,
    check_role,
    check_replicas,
    check_cut_off,
    check_eviction,
    check_memory,
    check_persistence,
    check_timeout,
    check_latency,
    check_prefix,
];

/// Runs all checks on a server, or only the first one if it is unreachable.
pub(super) fn check_node(node: &NodeFacts, requirements: &Requirements) -> Vec<Finding> {
    let checks =
        if node.contact == Contact::Reachable { &NODE_CHECKS[..] } else { &NODE_CHECKS[..1] };
    let clock =
        || (node.contact == Contact::Reachable).then(|| check_clock(node.clock_offset)).flatten();
    checks
        .iter()
        .filter_map(|check| check(node, requirements))
        .chain(clock())
        .map(|finding| finding.at(&node.server))
        .collect()
}

/// Runs the checks of one node that apply to a member of a cluster too.
pub(super) fn check_member(node: &NodeFacts, requirements: &Requirements) -> Vec<Finding> {
    const MEMBER_CHECKS: [Check; 5] =
        [check_info, check_cut_off, check_eviction, check_memory, check_timeout];
    if node.contact != Contact::Reachable {
        return Vec::new();
    }
    MEMBER_CHECKS.iter().filter_map(|check| check(node, requirements)).collect()
}

pub(super) fn check_reach(node: &NodeFacts, requirements: &Requirements) -> Option<Finding> {
    Some(match &node.contact {
        Contact::Reachable => Finding::ok("reach", "reachable and authenticated"),
        Contact::Unreachable(why) => {
            Finding::problem("reach", format!("unreachable: {}", format::escape(why))).advice(
                "start the server, or fix its address, its login, TLS, the network or the firewall",
            )
        }
        Contact::Refused { code, message, advice } => {
            let pattern = permission_probe::lock_key_pattern(&requirements.prefix);
            refused_finding(code, &format::escape(message), advice, &node.user, &pattern)
        }
    })
}

fn refused_finding(
    code: &str,
    message: &str,
    advice: &str,
    user: &str,
    lock_pattern: &str,
) -> Finding {
    let grant_all = || grant_command::all_permissions(lock_pattern);
    let refused = format::with_option_names(&format!("{} {message}", format::escape(code)));
    let finding = |check| Finding::problem(check, format!("refused: {refused}"));
    match code {
        "NOAUTH" => finding("login")
            .advice("put the password into a file for --password-file, or into DISTLOCK_URL"),
        "WRONGPASS" => finding("login").advice("check the user and the password"),
        // Connecting sends TIME, so without that permission nothing else can be checked.
        "NOPERM" if message.contains("'time'") => {
            Finding::problem("permissions", "missing: +time, without which distlock cannot connect")
                .advice(PASTE_ADVICE)
                .acl_setuser(grant_command::grant_command(user, grant_all()))
        }
        "NOPERM" if message.contains("'select'") => {
            finding("permissions").advice(format!("use database 0, or {PASTE_ADVICE}")).acl_setuser(
                grant_command::grant_command(user, grant_all().into_iter().chain(["+select"])),
            )
        }
        // A Sentinel does not know the TIME command.
        "ERR" if message.to_lowercase().contains("unknown command") => {
            finding("kind").advice(advice)
        }
        _ => finding("login").advice("fix what the server reports"),
    }
}

/// Reports once that `INFO` failed, for all checks that need it.
fn check_info(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    let what = "version, kind, role, replicas, eviction, memory and persistence";
    match &node.info {
        Queried::Known(_) => None,
        Queried::Denied => Some(
            Finding::unknown("info", format!("cannot check {what}: +info is missing"))
                .advice(GRANT_ADVICE)
                .acl_setuser(grant_command::grant_command(&node.user, ["+info"])),
        ),
        Queried::Unsupported(why) => {
            Some(Finding::unknown("info", format!("cannot check {what}: {}", format::escape(why))))
        }
    }
}

pub(super) fn check_version(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    let info = node.info()?;
    if let Some(version) = info.redacted("valkey_version") {
        return Some(Finding::ok("version", format!("Valkey {version}")));
    }
    let version = info.get("redis_version").unwrap_or_default();
    let shown = info.redacted("redis_version").unwrap_or_default();
    let mut numbers = version.split('.').map_while(|part| part.parse::<u32>().ok());
    Some(match (numbers.next(), numbers.next()) {
        (Some(major), minor) if (major, minor.unwrap_or(0)) >= (6, 2) => {
            Finding::ok("version", format!("Redis {shown}"))
        }
        (Some(_), _) => Finding::problem("version", format!("Redis {shown} is too old"))
            .advice("use Redis 6.2 or later, or any Valkey"),
        (None, _) => Finding::unknown("version", format!("unknown version \"{shown}\"")),
    })
}

fn check_kind(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    let info = node.info()?;
    let mode = info.get("redis_mode").or(info.get("server_mode")).unwrap_or("standalone");
    Some(match mode {
        "sentinel" => Finding::problem("kind", "a Sentinel, which keeps no locks")
            .advice("connect to its master"),
        _ if mode == "cluster" || info.get("cluster_enabled") == Some("1") => {
            Finding::problem("kind", "a node of a Redis Cluster")
                .advice("name the cluster by redis+cluster://host,host")
        }
        _ => Finding::ok("kind", "neither Sentinel nor cluster"),
    })
}

fn check_role(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    let info = node.info()?;
    (info.get("role") != Some("master")).then(|| {
        let master =
            info.redacted("master_host").map_or_else(String::new, |host| format!(" of {host}"));
        Finding::problem("role", format!("a replica{master}, which refuses writes"))
            .advice("connect to its master")
    })
}

pub(super) fn check_eviction(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    let info = node.info()?;
    let (Some(policy), Some(shown)) =
        (info.get("maxmemory_policy"), info.redacted("maxmemory_policy"))
    else {
        return Some(Finding::unknown("eviction", "the server does not report maxmemory-policy"));
    };
    let advised = |finding: Finding| {
        finding
            .advice("keep other data elsewhere, and run these in redis-cli")
            .config_set(&["maxmemory-policy noeviction"])
    };
    Some(match (policy, info.number("maxmemory")) {
        ("noeviction", _) => Finding::ok("eviction", "locks are never evicted (noeviction)"),
        (_, 0) => {
            let says = format!(
                "maxmemory-policy is {shown}: locks will be evicted if maxmemory is ever set"
            );
            advised(Finding::warning("eviction", says))
        }
        _ => {
            let says =
                format!("maxmemory-policy is {shown}: held locks are evicted when memory is full");
            advised(Finding::problem("eviction", says))
        }
    })
}

fn check_memory(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    let info = node.info()?;
    let (used, limit) = (info.number("used_memory"), info.number("maxmemory"));
    if limit == 0 {
        return None;
    }
    let percent = used.saturating_mul(100) / limit;
    let says = format!("{percent} % of maxmemory in use");
    let advice = "raise maxmemory, or free memory: when it is full, no lock can be acquired";
    Some(match percent {
        0..90 => Finding::ok("memory", says),
        90..100 => Finding::warning("memory", says).advice(advice),
        _ => Finding::problem("memory", says).advice(advice),
    })
}

/// Reports what a crash would lose. That is a warning only without a quarantine, which protects the
/// locks of a node that has lost its data. A single server has no quarantine.
fn check_persistence(node: &NodeFacts, requirements: &Requirements) -> Option<Finding> {
    let info = node.info()?;
    let check = "persistence";
    let always =
        node.appendfsync == Queried::Known("always".into()) && info.get("aof_enabled") == Some("1");
    let later = always && node.no_fsync_on_rewrite == Queried::Known("yes".into());
    let loses = match (info.get("aof_enabled") == Some("1"), &node.appendfsync) {
        _ if later => {
            "a power failure during an AOF rewrite loses the locks of the last 30 seconds or so \
             (no-appendfsync-on-rewrite yes)"
        }
        (true, Queried::Known(fsync)) if fsync == "always" => {
            let says = "every write is on disk before its reply (appendfsync always)";
            return Some(with_time_left(Finding::ok(check, says), node, requirements));
        }
        (true, Queried::Known(fsync)) if fsync == "everysec" => {
            "a crash loses the locks of the last second or two"
        }
        (true, Queried::Known(_)) => "a crash loses the locks of the last 30 seconds or so",
        (true, Queried::Denied) => {
            return Some(settings_denied(
                node,
                check,
                "cannot check what a crash would lose: +config|get is missing",
            ));
        }
        (true, Queried::Unsupported(why)) => {
            return Some(Finding::unknown(
                check,
                format!("cannot check what a crash would lose: {}", format::escape(why)),
            ));
        }
        (false, _) => "a restart loses all locks",
    };
    if !requirements.quarantine.is_zero() {
        let out = "the node then does not vote until they have expired (--quarantine)";
        let finding = Finding::ok(check, format!("{loses}; {out}"));
        return Some(with_time_left(finding, node, requirements));
    }
    let consequence = "holders learn of it at their next renewal; until then, other clients may \
                       acquire their locks";
    let settings: &[&str] = if later {
        &["no-appendfsync-on-rewrite no"]
    } else {
        &["appendonly yes", "appendfsync always"]
    };
    let instead = if requirements.nodes > 2 { "set --quarantine" } else { "use three nodes" };
    let advice = format!("{instead}, or use fencing tokens, or run these in redis-cli");
    let finding = Finding::warning(check, format!("{loses}: {consequence}")).advice(advice);
    Some(finding.config_set(settings))
}

fn settings_denied(node: &NodeFacts, check: &'static str, says: &str) -> Finding {
    Finding::unknown(check, says)
        .advice(GRANT_ADVICE)
        .acl_setuser(grant_command::grant_command(&node.user, [SETTINGS_PERMISSION]))
}

/// What to do about a quarantine that protects nothing.
pub(super) const UNUSED_NODES_ADVICE: &str =
    "if no node has ever been used, run distlock init; for tests, set --quarantine 0";

/// Adds how long a restarted node does not vote yet, whatever it has on disk.
fn with_time_left(mut finding: Finding, node: &NodeFacts, requirements: &Requirements) -> Finding {
    let quarantine = requirements.quarantine;
    let Some(left) = node.quarantine_left(quarantine).map(format::duration) else {
        let uptime_s = node.info().map_or(0, |info| info.number("uptime_in_seconds"));
        if node.declared_new && Duration::from_secs(uptime_s) < quarantine {
            finding.message += "; it was declared new, and votes already";
        }
        return finding;
    };
    finding.message += &if node.is_promoted() {
        format!("; it was a replica before, so a client counts its vote {left} after it connects")
    } else {
        format!("; it has just started, and votes in {left}; {UNUSED_NODES_ADVICE}")
    };
    finding
}

/// The server's `timeout` setting closes idle connections, such as those for renewals, but not the
/// subscriptions of waiters.
fn check_timeout(node: &NodeFacts, requirements: &Requirements) -> Option<Finding> {
    let seconds = match &node.timeout {
        Queried::Known(text) => match text.parse::<u64>() {
            Ok(seconds) => seconds,
            Err(_) => return Some(Finding::unknown("timeout", "unexpected value")),
        },
        Queried::Denied => {
            return Some(settings_denied(
                node,
                "timeout",
                "cannot check when it closes idle connections: +config|get is missing",
            ));
        }
        Queried::Unsupported(why) => {
            return Some(Finding::unknown(
                "timeout",
                format!("cannot check when it closes idle connections: {}", format::escape(why)),
            ));
        }
    };
    let every = requirements.ttl / 3;
    Some(match seconds {
        0 => Finding::ok("timeout", "idle connections stay open"),
        _ if Duration::from_secs(seconds) > every => Finding::ok(
            "timeout",
            format!(
                "closes connections that are idle for {}, longer than the time between renewals",
                format::duration(Duration::from_secs(seconds))
            ),
        ),
        _ => Finding::warning(
            "timeout",
            format!(
                "closes connections that are idle for {}, so every renewal (every {}) reconnects",
                format::duration(Duration::from_secs(seconds)),
                format::duration(every)
            ),
        )
        .advice(format!(
            "set timeout to more than {}, or run these in redis-cli",
            every.as_secs() + 1
        ))
        .config_set(&["timeout 0"]),
    })
}

pub(super) fn check_latency(node: &NodeFacts, requirements: &Requirements) -> Option<Finding> {
    let (median, worst) = (node.median_round_trip(), node.worst_round_trip());
    if node.round_trips.is_empty() {
        return None;
    }
    let ttl = requirements.ttl;
    let says = format!(
        "a round trip takes {}, {} at worst",
        format::duration(median),
        format::duration(worst)
    );
    let would_do = || {
        format!(
            "use a ttl of {} or more, or a server nearby",
            format::duration(round_up(worst.saturating_mul(10)))
        )
    };
    Some(if worst <= ttl / 10 {
        Finding::ok("latency", format!("{says}, short for a ttl of {}", format::duration(ttl)))
    } else if worst <= ttl / 3 {
        Finding::warning("latency", format!("{says}, long for a ttl of {}", format::duration(ttl)))
            .advice(would_do())
    } else {
        let says = format!(
            "{says}: with a ttl of {}, locks expire between renewals",
            format::duration(ttl)
        );
        Finding::problem("latency", says).advice(would_do())
    })
}

/// Rounds up to one significant digit, and to 10 ms at least.
fn round_up(span: Duration) -> Duration {
    let millis = u64::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX).max(10);
    let unit = 10u64.pow(millis.ilog10());
    Duration::from_millis(millis.div_ceil(unit).saturating_mul(unit))
}

/// Largest acceptable difference between two clocks, beyond which displayed times mislead.
pub(super) const CLOCK_DIFFERENCE_MAX_US: i64 = 1_000_000;

pub(super) fn check_clock(clock: Option<ClockOffset>) -> Option<Finding> {
    let Some(ClockOffset { ahead_us, error_us }) = clock else {
        return Some(Finding::unknown("clock", "the server does not report its time"));
    };
    let apart = format_us(ahead_us);
    let side = if ahead_us < 0 { "behind" } else { "ahead of" };
    let says = format!("its clock is {apart} {side} ours, give or take {}", format_us(error_us));
    Some(if ahead_us.saturating_abs().saturating_sub(error_us) <= CLOCK_DIFFERENCE_MAX_US {
        Finding::ok("clock", says)
    } else {
        Finding::warning(
            "clock",
            format!("{says}: displayed times are wrong, and tokens follow its clock"),
        )
        .advice("synchronise both clocks with NTP")
    })
}

pub(super) fn format_us(us: i64) -> String {
    format::duration(Duration::from_micros(us.unsigned_abs()))
}

#[cfg(test)]
mod tests;
