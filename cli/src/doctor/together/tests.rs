//! What the servers of one machine cannot be brought to say.

use super::{
    super::{
        facts::{Aims, Clock, Contact, Handover, Info, Told},
        finding::Level,
    },
    *,
};
use crate::secrets::Secrets;

fn facts(servers: &[&str]) -> Facts {
    let node = |(number, server): (usize, &&str)| {
        let info = Told::Yes(Info::parse(&format!("run_id:{number}"), &Secrets::default()));
        Node { info, ..Node::new(server, Contact::Answers) }
    };
    let nodes: Vec<Node> = servers.iter().enumerate().map(node).collect();
    let aims =
        Aims { ttl: Duration::from_secs(10), nodes: nodes.len(), quarantine: Duration::ZERO, prefix: "lock:".into() };
    Facts { aims, nodes, trial: None }
}

#[test]
fn even_numbers_of_nodes_are_a_waste() {
    let level = |servers: &[&str]| count(&facts(servers)).map(|finding| finding.level);
    assert_eq!(level(&["a:1"]), None);
    assert_eq!(level(&["a:1", "b:1"]), Some(Level::Warning));
    assert_eq!(level(&["a:1", "b:1", "c:1"]), Some(Level::Ok));
    assert!(count(&facts(&["a:1", "b:1", "c:1", "d:1"])).unwrap().says.contains("the loss of 1, like 3 nodes do"));
}

#[test]
fn nodes_on_one_machine_are_told() {
    assert!(hosts(&facts(&["a:1", "b:1", "[::1]:1"])).is_none());
    for servers in [["a:1", "a:2", "b:1"], ["/run/a.sock", "/run/b.sock", "b:1"], ["[::1]:1", "[::1]:2", "b:1"]] {
        assert!(hosts(&facts(&servers)).is_some(), "{servers:?}");
    }
}

#[test]
fn clocks_are_compared_beyond_doubt() {
    let level = |ahead: [i64; 3], unsure_us| {
        let mut facts = facts(&["a:1", "b:1", "c:1"]);
        for (node, ahead_us) in facts.nodes.iter_mut().zip(ahead) {
            node.clock = Some(Clock { ahead_us, unsure_us });
        }
        clocks(&facts).map(|finding| finding.level)
    };
    assert_eq!(level([0, -400_000, 500_000], 50), Some(Level::Ok));
    assert_eq!(level([0, -600_000, 500_000], 50), Some(Level::Warning));
    assert_eq!(level([0, -600_000, 500_000], 50_001), Some(Level::Ok));
    assert!(clocks(&facts(&["a:1", "b:1"])).is_none());
}

#[test]
fn a_handover_that_took_too_long_was_not_told() {
    let finding = |millis: u64, best: u64| {
        let mut facts = facts(&["a:1"]);
        facts.nodes[0].round_trips = vec![Duration::from_millis(best), Duration::from_millis(100)];
        let handover = Duration::from_millis(millis);
        facts.trial = Some(Ok(Handover { acquire: Duration::from_millis(1), handover }));
        handover_level(&facts)
    };
    assert_eq!(finding(100, 1), Level::Ok);
    assert_eq!(finding(400, 1), Level::Warning);
    assert_eq!(finding(400, 30), Level::Ok);
    let failed = Facts { trial: Some(Err("no".into())), ..facts(&["a:1"]) };
    assert_eq!(handover_level(&failed), Level::Problem);
}

fn handover_level(facts: &Facts) -> Level {
    handover(facts).unwrap().level
}
