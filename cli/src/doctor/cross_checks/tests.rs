//! Cases that servers on one machine cannot produce.

use super::{
    super::{
        facts::{ClockOffset, Contact, Handover, Info, Queried, Requirements},
        finding::Level,
    },
    *,
};
use crate::secrets::Secrets;

fn refused(code: &str) -> Contact {
    Contact::Refused { code: code.into(), message: "no".into(), advice: "" }
}

fn facts(servers: &[&str]) -> Facts {
    let node = |(number, server): (usize, &&str)| {
        let info = Queried::Known(Info::parse(&format!("run_id:{number}"), &Secrets::default()));
        NodeFacts { info, ..NodeFacts::new(server, Contact::Reachable) }
    };
    let nodes: Vec<NodeFacts> = servers.iter().enumerate().map(node).collect();
    let requirements = Requirements {
        ttl: Duration::from_secs(10),
        nodes: nodes.len(),
        quarantine: Duration::ZERO,
        prefix: "lock:".into(),
    };
    Facts { requirements, nodes, handover: None }
}

#[test]
fn even_number_of_nodes_is_a_warning() {
    let level = |servers: &[&str]| check_nodes(&facts(servers)).map(|finding| finding.level);
    assert_eq!(level(&["a:1"]), None);
    assert_eq!(level(&["a:1", "b:1"]), Some(Level::Warning));
    assert_eq!(level(&["a:1", "b:1", "c:1"]), Some(Level::Ok));
    assert!(
        check_nodes(&facts(&["a:1", "b:1", "c:1", "d:1"]))
            .unwrap()
            .message
            .contains("the loss of 1, the same as 3; the additional node")
    );
}

#[test]
fn nodes_that_are_away_are_counted() {
    for (nodes, away, level, says) in [
        (
            2,
            1,
            Level::Problem,
            "1 of 2 nodes is unreachable, so no lock can be acquired: 2 are needed",
        ),
        (3, 1, Level::Warning, "1 of 3 nodes is unreachable: none of the others may fail"),
        (
            3,
            2,
            Level::Problem,
            "2 of 3 nodes are unreachable, so no lock can be acquired: 2 are needed",
        ),
        (4, 1, Level::Warning, "1 of 4 nodes is unreachable: none of the others may fail"),
        (5, 1, Level::Warning, "1 of 5 nodes is unreachable: 1 more may fail"),
        (
            5,
            3,
            Level::Problem,
            "3 of 5 nodes are unreachable, so no lock can be acquired: 3 are needed",
        ),
    ] {
        let mut facts = facts(&["a:1", "b:1", "c:1", "d:1", "e:1"][..nodes]);
        for (number, node) in facts.nodes.iter_mut().take(away).enumerate() {
            node.contact = match number {
                0 => Contact::Unreachable("refused".into()),
                _ => refused("NOAUTH"),
            };
        }
        let finding = check_nodes(&facts).unwrap();
        assert_eq!((finding.level, finding.message.as_str()), (level, says));
        assert!(finding.advice.is_some());
    }
}

/// Without a value, a node is unreachable; otherwise this is its uptime in seconds.
fn with_uptimes(uptimes: &[Option<u64>]) -> Facts {
    let mut facts = facts(&["a:1", "b:1", "c:1", "d:1", "e:1"][..uptimes.len()]);
    facts.requirements.quarantine = Duration::from_secs(30);
    for (node, uptime) in facts.nodes.iter_mut().zip(uptimes) {
        match uptime {
            Some(uptime) => {
                let text = format!("uptime_in_seconds:{uptime}");
                node.info = Queried::Known(Info::parse(&text, &Secrets::default()));
            }
            None => node.contact = Contact::Unreachable("refused".into()),
        }
    }
    facts
}

#[test]
fn nodes_in_quarantine_are_counted() {
    let (old, away) = (Some(99), None);
    for (uptimes, level, says) in [
        (
            &[Some(1), Some(3), Some(9)][..],
            Level::Problem,
            "0 of 3 nodes vote; a quorum votes again in 28s",
        ),
        (
            &[old, Some(3), Some(9)],
            Level::Problem,
            "1 of 3 nodes votes; a quorum votes again in 22s",
        ),
        (
            &[old, Some(3), away],
            Level::Problem,
            "1 of 3 nodes is unreachable; 1 of 3 nodes votes; a quorum votes again in 28s",
        ),
        (
            &[old, Some(3), old],
            Level::Warning,
            "2 of 3 nodes vote; 1 is in quarantine, and votes again in 28s",
        ),
        (
            &[Some(3), old, Some(2), old, old],
            Level::Warning,
            "3 of 5 nodes vote; 2 are in quarantine, and the last of them votes again in 29s",
        ),
        (
            &[away, away, Some(3)],
            Level::Problem,
            "2 of 3 nodes are unreachable, so no lock can be acquired: 2 are needed",
        ),
        (&[old, old, old], Level::Ok, "3 nodes, all reachable, survive the loss of 1"),
    ] {
        let finding = check_nodes(&with_uptimes(uptimes)).unwrap();
        assert_eq!((finding.level, finding.message.as_str()), (level, says));
    }
    let mut facts = with_uptimes(&[Some(1), Some(3), Some(9)]);
    facts.nodes.iter_mut().for_each(|node| node.declared_new = true);
    assert_eq!(check_nodes(&facts).unwrap().level, Level::Ok);
    facts.nodes.iter_mut().for_each(|node| node.declared_new = false);
    facts.requirements.quarantine = Duration::ZERO;
    assert_eq!(check_nodes(&facts).unwrap().level, Level::Ok);
}

#[test]
fn handover_that_was_not_tried_is_unknown() {
    let mut facts = facts(&["a:1", "b:1", "c:1"]);
    assert_eq!(handover_level(&facts), Level::Unknown);
    facts.nodes.iter_mut().for_each(|node| node.contact = refused("WRONGPASS"));
    let says = |facts: &Facts| check_handover(facts).unwrap().message;
    assert_eq!(says(&facts), "not tried, because of the problems above");
    facts.nodes[..2].iter_mut().for_each(|node| node.contact = Contact::Unreachable("no".into()));
    assert_eq!(says(&facts), "not tried, because too few servers reply");
}

#[test]
fn nodes_on_same_machine_are_a_warning() {
    assert!(check_hosts(&facts(&["a:1", "b:1", "[::1]:1"])).is_none());
    for servers in [
        ["a:1", "a:2", "b:1"],
        ["/run/a.sock", "/run/b.sock", "b:1"],
        ["[::1]:1", "[::1]:2", "b:1"],
    ] {
        assert!(check_hosts(&facts(&servers)).is_some(), "{servers:?}");
    }
}

#[test]
fn clock_difference_within_error_is_ok() {
    let level = |ahead: [i64; 3], error_us| {
        let mut facts = facts(&["a:1", "b:1", "c:1"]);
        for (node, ahead_us) in facts.nodes.iter_mut().zip(ahead) {
            node.clock_offset = Some(ClockOffset { ahead_us, error_us });
        }
        check_clocks(&facts).map(|finding| finding.level)
    };
    assert_eq!(level([0, -400_000, 500_000], 50), Some(Level::Ok));
    assert_eq!(level([0, -600_000, 500_000], 50), Some(Level::Warning));
    assert_eq!(level([0, -600_000, 500_000], 50_001), Some(Level::Ok));
    assert!(check_clocks(&facts(&["a:1", "b:1"])).is_none());
}

/// Fault: N126
#[test]
fn slow_handover_is_a_warning() {
    let finding = |millis: u64, best: u64| {
        let mut facts = facts(&["a:1"]);
        facts.nodes[0].round_trips = vec![Duration::from_millis(best), Duration::from_millis(100)];
        let handover = Duration::from_millis(millis);
        facts.handover = Some(Ok(Handover { acquire: Duration::from_millis(1), handover }));
        handover_level(&facts)
    };
    assert_eq!(finding(100, 1), Level::Ok);
    assert_eq!(finding(400, 1), Level::Warning);
    assert_eq!(finding(400, 30), Level::Ok);
    let failed = Facts { handover: Some(Err("no".into())), ..facts(&["a:1"]) };
    assert_eq!(handover_level(&failed), Level::Problem);
}

fn handover_level(facts: &Facts) -> Level {
    check_handover(facts).unwrap().level
}
