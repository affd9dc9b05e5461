//! Cases that the servers of the tests cannot produce.

use std::time::Duration;

use super::{
    super::{
        facts::{Info, Permissions},
        finding::Level,
    },
    *,
};
use crate::secrets::Secrets;

fn requirements(nodes: usize) -> Requirements {
    let quarantine = Duration::from_secs(if nodes > 2 { 10 } else { 0 });
    Requirements { ttl: Duration::from_secs(10), nodes, quarantine, prefix: "lock:".into() }
}

fn node(info: &str) -> NodeFacts {
    NodeFacts {
        info: Queried::Known(Info::parse(info, &Secrets::default())),
        ..NodeFacts::new("a:1", Contact::Reachable)
    }
}

fn level(check: Check, node: &NodeFacts) -> Option<Level> {
    check(node, &requirements(1)).map(|finding| finding.level)
}

#[test]
fn old_redis_is_a_problem_and_any_valkey_is_ok() {
    for (info, expected) in [
        ("redis_version:6.0.20", Level::Problem),
        ("redis_version:5.0.14", Level::Problem),
        ("redis_version:6.2.0", Level::Ok),
        ("redis_version:7.0.15", Level::Ok),
        ("redis_version:10.1", Level::Ok),
        ("redis_version:8", Level::Ok),
        ("redis_version:7.2.4\nserver_name:valkey\nvalkey_version:9.0.0", Level::Ok),
        ("redis_version:6.0.0\nvalkey_version:7.2.5", Level::Ok),
        ("redis_version:unstable", Level::Unknown),
        ("", Level::Unknown),
    ] {
        assert_eq!(level(check_version, &node(info)), Some(expected), "{info}");
    }
}

#[test]
fn sentinel_is_a_problem() {
    assert_eq!(level(check_kind, &node("redis_mode:sentinel")), Some(Level::Problem));
    assert_eq!(level(check_kind, &node("server_mode:cluster")), Some(Level::Problem));
    let sentinel = Contact::Refused {
        code: "ERR".into(),
        message: "unknown command 'TIME', with args".into(),
        advice: "write redis+sentinel://",
    };
    let finding = check_reach(&NodeFacts::new("a:1", sentinel), &requirements(1)).unwrap();
    assert!(finding.check == "kind" && finding.advice.unwrap().contains("redis+sentinel://"));
}

#[test]
fn eviction_policy_is_a_problem_only_with_memory_limit() {
    for (info, expected) in [
        ("maxmemory_policy:noeviction\nmaxmemory:100", Level::Ok),
        ("maxmemory_policy:volatile-lru\nmaxmemory:0", Level::Warning),
        ("maxmemory_policy:volatile-ttl\nmaxmemory:100", Level::Problem),
        ("maxmemory_policy:allkeys-lru\nmaxmemory:100", Level::Problem),
    ] {
        assert_eq!(level(check_eviction, &node(info)), Some(expected), "{info}");
    }
    for (used, expected) in
        [(89, Level::Ok), (90, Level::Warning), (99, Level::Warning), (100, Level::Problem)]
    {
        let info = format!("used_memory:{used}\nmaxmemory:100");
        assert_eq!(level(check_memory, &node(&info)), Some(expected), "{used}");
    }
    assert_eq!(level(check_memory, &node("used_memory:7\nmaxmemory:0")), None);
}

#[test]
fn data_loss_on_restart_is_ok_for_three_nodes() {
    let cases = [(0, "no"), (1, "no"), (1, "everysec"), (1, "always")];
    for (nodes, expected) in [
        (1, [Level::Warning, Level::Warning, Level::Warning, Level::Ok]),
        (2, [Level::Warning, Level::Warning, Level::Warning, Level::Ok]),
        (3, [Level::Ok; 4]),
    ] {
        for ((aof, fsync), expected) in cases.into_iter().zip(expected) {
            let node = NodeFacts {
                appendfsync: Queried::Known(fsync.into()),
                ..node(&format!("aof_enabled:{aof}"))
            };
            assert_eq!(
                check_persistence(&node, &requirements(nodes)).unwrap().level,
                expected,
                "{nodes} {aof} {fsync}"
            );
        }
    }
    let finding =
        check_persistence(&node("aof_enabled:0\nuptime_in_seconds:7"), &requirements(3)).unwrap();
    assert!(
        finding.message.contains("distlock init; for tests, set --quarantine 0"),
        "{finding:?}"
    );
    let young = finding.message;
    assert!(young.contains("it has just started, and votes in 4s; "), "{young}");
    let durable = NodeFacts {
        appendfsync: Queried::Known("always".into()),
        ..node("aof_enabled:1\nuptime_in_seconds:7")
    };
    let young = check_persistence(&durable, &requirements(3)).unwrap().message;
    assert!(young.contains("it has just started, and votes in 4s; "), "{young}");
    let new = NodeFacts { declared_new: true, ..node("aof_enabled:0\nuptime_in_seconds:7") };
    let new = check_persistence(&new, &requirements(3)).unwrap();
    assert!(new.message.ends_with("votes already"), "{new:?}");
    // The time left counts from the quarantine, not from the ttl.
    let longer = Requirements { quarantine: Duration::from_secs(17), ..requirements(2) };
    let young =
        check_persistence(&node("aof_enabled:0\nuptime_in_seconds:7"), &longer).unwrap().message;
    assert!(young.contains("and votes in 11s; "), "{young}");
    let old = check_persistence(&node("aof_enabled:0\nuptime_in_seconds:11"), &requirements(3))
        .unwrap()
        .message;
    assert!(!old.contains("just started"), "{old}");
    let promoted = node("aof_enabled:0\nuptime_in_seconds:99\nmaster_replid2:00a0");
    let promoted = check_persistence(&promoted, &requirements(3)).unwrap().message;
    let says = "; it was a replica before, so a client counts its vote 10s after it connects";
    assert!(promoted.ends_with(says), "{promoted}");
}

/// Fault: N58
#[test]
fn postponed_fsync_is_a_warning() {
    for (later, expected) in [("no", Level::Ok), ("yes", Level::Warning)] {
        let (appendfsync, no_fsync_on_rewrite) =
            (Queried::Known("always".into()), Queried::Known(later.into()));
        let node = NodeFacts { appendfsync, no_fsync_on_rewrite, ..node("aof_enabled:1") };
        let finding = check_persistence(&node, &requirements(1)).unwrap();
        assert_eq!(finding.level, expected, "{}", finding.message);
        assert_eq!(
            finding.message.contains("no-appendfsync-on-rewrite"),
            later == "yes",
            "{}",
            finding.message
        );
        assert_eq!(check_persistence(&node, &requirements(3)).unwrap().level, Level::Ok);
    }
}

/// A managed service may hide its settings.
#[test]
fn what_cannot_be_checked_is_unknown() {
    for timeout in [Queried::Unsupported("unknown command".into()), Queried::Known("soon".into())] {
        let node = NodeFacts { timeout, ..node("") };
        assert_eq!(level(check_timeout, &node), Some(Level::Unknown));
    }
    assert_eq!(level(check_eviction, &node("")), Some(Level::Unknown));
}

#[test]
fn round_trips_are_judged_by_ttl() {
    for (worst_ms, expected, would_do) in [
        (999, Level::Ok, None),
        (1_001, Level::Warning, Some("20s")),
        (3_400, Level::Problem, Some("40s")),
    ] {
        let worst = Duration::from_millis(worst_ms);
        let node = NodeFacts { round_trips: vec![Duration::from_millis(1), worst], ..node("") };
        let finding = check_latency(&node, &requirements(1)).unwrap();
        assert_eq!(finding.level, expected, "{worst_ms}");
        assert_eq!(finding.advice.is_some(), would_do.is_some());
        let advice = finding.advice.unwrap_or_default();
        assert!(advice.contains(would_do.unwrap_or_default()), "{advice}");
    }
    let rounded = [0, 10, 11, 99, 100, 101, 20_100]
        .map(|millis| round_up(Duration::from_millis(millis)).as_millis());
    assert_eq!(rounded, [10, 10, 20, 100, 100, 200, 30_000]);
}

#[test]
fn clock_difference_beyond_error_is_a_warning() {
    let level = |ahead_us, error_us| {
        check_clock(Some(ClockOffset { ahead_us, error_us })).map(|finding| finding.level)
    };
    assert_eq!(level(900_000, 50), Some(Level::Ok));
    assert_eq!(level(1_400_000, 500_000), Some(Level::Ok));
    assert_eq!(level(1_400_000, 50), Some(Level::Warning));
    assert_eq!(level(-1_400_000, 50), Some(Level::Warning));
    assert_eq!(level(i64::MIN, 50), Some(Level::Warning));
    assert_eq!(check_clock(None).map(|finding| finding.level), Some(Level::Unknown));
}

#[test]
fn node_permissions_are_not_needed_for_one_server() {
    let missing = |permissions: &[&str], nodes| {
        let missing = permissions.iter().map(|right| (*right).to_owned()).collect();
        let node = NodeFacts { permissions: Permissions { missing, untested: vec![] }, ..node("") };
        let finding = rights_of(&node, nodes);
        (finding.level, finding.message)
    };
    assert_eq!(missing(&["+info"], 1).0, Level::Ok);
    assert_eq!(missing(&["+info"], 3).0, Level::Problem);
    assert_eq!(missing(&["+scan"], 1).0, Level::Warning);
    let (level, says) = missing(&["+lpos", "+scan"], 1);
    assert!(
        level == Level::Problem && says.contains("missing: +lpos,") && says.ends_with("+scan"),
        "{says}"
    );
}

#[test]
fn refused_permission_gets_one_command_with_everything() {
    for (command, more) in [("time", ""), ("select", " +select")] {
        let message = format!("User app has no permissions to run the '{command}' command");
        let contact = Contact::Refused { code: "NOPERM".into(), message, advice: "" };
        let mut node = NodeFacts::new("a:1", contact);
        node.user = "app".into();
        let requirements = Requirements { prefix: "my[1]:".into(), ..requirements(1) };
        let finding = check_reach(&node, &requirements).unwrap();
        let [line, _save] = finding.commands.as_slice() else { panic!("{finding:?}") };
        let start = "ACL SETUSER app '~my\\[1\\]:*' '~distlock:*' '&distlock:client:*' +eval ";
        let end = format!(" +zscore +info '+config|get'{more}");
        assert!(line.contains(" +subscribe +scan +lrange +lindex +pexpireat +zadd "), "{line}");
        assert!(line.starts_with(start) && line.ends_with(&end), "{line}");
    }
}

fn rights_of(node: &NodeFacts, nodes: usize) -> Finding {
    check_permissions(node, &requirements(nodes)).unwrap()
}

#[test]
fn timeout_shorter_than_renewal_interval_is_a_warning() {
    for (timeout, expected) in
        [("0", Level::Ok), ("4", Level::Ok), ("3", Level::Warning), ("1", Level::Warning)]
    {
        let node = NodeFacts { timeout: Queried::Known(timeout.into()), ..node("") };
        assert_eq!(level(check_timeout, &node), Some(expected), "{timeout}");
    }
}
