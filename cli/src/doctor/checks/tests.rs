//! What no server here can be brought to say.

use std::time::Duration;

use super::{
    super::{
        facts::{Info, Rights},
        finding::Level,
    },
    *,
};
use crate::secrets::Secrets;

fn aims(nodes: usize) -> Aims {
    let quarantine = Duration::from_secs(if nodes > 2 { 10 } else { 0 });
    Aims { ttl: Duration::from_secs(10), nodes, quarantine, prefix: "lock:".into() }
}

fn node(info: &str) -> Node {
    Node { info: Told::Yes(Info::parse(info, &Secrets::default())), ..Node::new("a:1", Contact::Answers) }
}

fn level(check: Check, node: &Node) -> Option<Level> {
    check(node, &aims(1)).map(|finding| finding.level)
}

#[test]
fn old_versions_are_a_problem_and_valkey_of_any_is_not() {
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
        assert_eq!(level(version, &node(info)), Some(expected), "{info}");
    }
}

#[test]
fn sentinels_are_no_servers_for_locks() {
    assert_eq!(level(kind, &node("redis_mode:sentinel")), Some(Level::Problem));
    assert_eq!(level(kind, &node("server_mode:cluster")), Some(Level::Problem));
    let sentinel = Contact::Refuses { code: "ERR".into(), message: "unknown command 'TIME', with args".into() };
    let finding = reach(&Node::new("a:1", sentinel), &aims(1)).unwrap();
    assert!(finding.check == "kind" && finding.advice.unwrap().contains("Sentinel"));
}

#[test]
fn policies_are_worse_where_there_is_a_limit() {
    for (info, expected) in [
        ("maxmemory_policy:noeviction\nmaxmemory:100", Level::Ok),
        ("maxmemory_policy:volatile-lru\nmaxmemory:0", Level::Warning),
        ("maxmemory_policy:volatile-ttl\nmaxmemory:100", Level::Problem),
        ("maxmemory_policy:allkeys-lru\nmaxmemory:100", Level::Problem),
    ] {
        assert_eq!(level(eviction, &node(info)), Some(expected), "{info}");
    }
    for (used, expected) in [(89, Level::Ok), (90, Level::Warning), (99, Level::Warning), (100, Level::Problem)] {
        let info = format!("used_memory:{used}\nmaxmemory:100");
        assert_eq!(level(memory, &node(&info)), Some(expected), "{used}");
    }
    assert_eq!(level(memory, &node("used_memory:7\nmaxmemory:0")), None);
}

#[test]
fn what_a_restart_forgets_matters_less_to_three_nodes() {
    let cases = [(0, "no"), (1, "no"), (1, "everysec"), (1, "always")];
    for (nodes, expected) in [
        (1, [Level::Warning, Level::Warning, Level::Warning, Level::Ok]),
        (2, [Level::Warning, Level::Warning, Level::Warning, Level::Ok]),
        (3, [Level::Ok; 4]),
    ] {
        for ((aof, fsync), expected) in cases.into_iter().zip(expected) {
            let node = Node { appendfsync: Told::Yes(fsync.into()), ..node(&format!("aof_enabled:{aof}")) };
            assert_eq!(persistence(&node, &aims(nodes)).unwrap().level, expected, "{nodes} {aof} {fsync}");
        }
    }
    let young = persistence(&node("aof_enabled:0\nuptime_in_seconds:7"), &aims(3)).unwrap().says;
    assert!(young.ends_with("it has just started, and votes in 3.0s"), "{young}");
    // The quarantine counts, and not the ttl.
    let longer = Aims { quarantine: Duration::from_secs(17), ..aims(2) };
    let young = persistence(&node("aof_enabled:0\nuptime_in_seconds:7"), &longer).unwrap().says;
    assert!(young.ends_with("and votes in 10s"), "{young}");
    let old = persistence(&node("aof_enabled:0\nuptime_in_seconds:10"), &aims(3)).unwrap().says;
    assert!(!old.contains("just started"), "{old}");
}

#[test]
fn what_is_written_later_is_no_promise() {
    for (later, expected) in [("no", Level::Ok), ("yes", Level::Warning)] {
        let (appendfsync, no_fsync_on_rewrite) = (Told::Yes("always".into()), Told::Yes(later.into()));
        let node = Node { appendfsync, no_fsync_on_rewrite, ..node("aof_enabled:1") };
        let finding = persistence(&node, &aims(1)).unwrap();
        assert_eq!(finding.level, expected, "{}", finding.says);
        assert_eq!(finding.says.contains("no-appendfsync-on-rewrite"), later == "yes", "{}", finding.says);
        assert_eq!(persistence(&node, &aims(3)).unwrap().level, Level::Ok);
    }
}

#[test]
fn round_trips_are_held_against_the_time_to_live() {
    for (worst_ms, expected, would_do) in
        [(999, Level::Ok, None), (1_001, Level::Warning, Some("20s")), (3_400, Level::Problem, Some("40s"))]
    {
        let worst = Duration::from_millis(worst_ms);
        let node = Node { round_trips: vec![Duration::from_millis(1), worst], ..node("") };
        let finding = latency(&node, &aims(1)).unwrap();
        assert_eq!(finding.level, expected, "{worst_ms}");
        assert_eq!(finding.advice.is_some(), would_do.is_some());
        let advice = finding.advice.unwrap_or_default();
        assert!(advice.contains(would_do.unwrap_or_default()), "{advice}");
    }
    let rounded = [0, 10, 11, 99, 100, 101, 20_100].map(|millis| rounded_up(Duration::from_millis(millis)).as_millis());
    assert_eq!(rounded, [10, 10, 20, 100, 100, 200, 30_000]);
}

#[test]
fn clocks_that_are_apart_beyond_doubt_are_told() {
    let level = |ahead_us, unsure_us| clock(Some(Clock { ahead_us, unsure_us })).map(|finding| finding.level);
    assert_eq!(level(900_000, 50), Some(Level::Ok));
    assert_eq!(level(1_400_000, 500_000), Some(Level::Ok));
    assert_eq!(level(1_400_000, 50), Some(Level::Warning));
    assert_eq!(level(-1_400_000, 50), Some(Level::Warning));
    assert_eq!(level(i64::MIN, 50), Some(Level::Warning));
    assert!(clock(None).is_none());
}

#[test]
fn rights_that_only_several_nodes_need_are_no_problem_for_one() {
    let missing = |rights: &[&str], nodes| {
        let missing = rights.iter().map(|right| (*right).to_owned()).collect();
        let node = Node { rights: Rights { missing, untried: vec![] }, ..node("") };
        let finding = rights_of(&node, nodes);
        (finding.level, finding.says)
    };
    assert_eq!(missing(&["+info", "+config|get"], 1).0, Level::Ok);
    assert_eq!(missing(&["+config|get"], 3).0, Level::Warning);
    assert_eq!(missing(&["+info"], 3).0, Level::Problem);
    assert_eq!(missing(&["+scan"], 1).0, Level::Warning);
    let (level, says) = missing(&["+lpos", "+scan"], 1);
    assert!(level == Level::Problem && says.contains("missing: +lpos,") && says.ends_with("+scan"), "{says}");
}

fn rights_of(node: &Node, nodes: usize) -> Finding {
    rights(node, &aims(nodes)).unwrap()
}

#[test]
fn connections_that_are_closed_between_two_renewals_are_told() {
    for (timeout, expected) in [("0", Level::Ok), ("4", Level::Ok), ("3", Level::Warning), ("1", Level::Warning)] {
        let node = Node { timeout: Told::Yes(timeout.into()), ..node("") };
        assert_eq!(level(idle, &node), Some(expected), "{timeout}");
    }
}
