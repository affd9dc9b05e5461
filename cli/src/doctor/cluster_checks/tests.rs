//! Cases that the clusters of the tests cannot produce, or only slowly.

use super::{super::finding::Level, *};
use crate::secrets::Secrets;

const NODES: &str = "\
1 a:1@2 myself,master - 0 0 1 connected 0-8190 8191 [17->-2]
2 b:1@2,host master - 0 0 2 connected 8192-16383
3 ::1:7@8 slave 1 0 0 1 connected
4 c:1@2 slave 2 0 0 2 connected
5 d:1@2 handshake - 0 0 0 disconnected
";

fn member(server: &str, state: &str, nodes: &str) -> Member {
    let info = |text: &str| Info::parse(text, &Secrets::default());
    let mut facts = NodeFacts::new(server, Contact::Reachable);
    facts.info = Queried::Known(info("redis_version:7.0.15"));
    let view = View::parse(&info(&format!("cluster_state:{state}")), nodes, server);
    Member { facts, coverage: Queried::Known("no".into()), view: Queried::Known(view) }
}

fn finding(members: &[Member], check: &str) -> Option<Finding> {
    check_cluster(members, "me").into_iter().find(|finding| finding.check == check)
}

#[track_caller]
fn says(members: &[Member], check: &str, level: Level, part: &str) {
    let finding = finding(members, check).unwrap_or_else(|| panic!("nothing about {check}"));
    assert_eq!(finding.level, level, "{finding:?}");
    assert!(finding.message.contains(part), "{finding:?}");
}

#[test]
fn healthy_cluster_has_only_an_open_move() {
    let members = [member("a:1", "ok", NODES)];
    says(&members, "slots", Level::Ok, "all 16384 are served by 2 masters: a:1 (8192), b:1 (8192)");
    says(&members, "replicas", Level::Ok, "each master has one");
    says(&members, "moves", Level::Warning, "a:1 (1)");
    says(&members, "versions", Level::Ok, "Redis 7.0.15 at all nodes");
    says(&members, "coverage", Level::Ok, "does not affect");
    assert_eq!((finding(&members, "state"), finding(&members, "nodes")), (None, None));
    let view = members[0].view().unwrap();
    let addresses: Vec<_> = view.nodes.iter().map(|node| node.address.as_str()).collect();
    assert_eq!(addresses, ["a:1", "b:1", "[::1]:7", "c:1"]);
}

#[test]
fn failed_and_suspected_nodes_are_named() {
    let failed = NODES.replace("2 b:1@2,host master", "2 b:1@2,host master,fail");
    let suspected = failed
        .replace("1 ::1:7@8 slave", "1 x")
        .replace("3 ::1:7@8 slave", "3 ::1:7@8 slave,fail?");
    let members = [member("a:1", "fail", &suspected), Member::silent("c:1", "refused".into())];
    says(&members, "slots", Level::Problem, "8192 of 16384 are served, so locks in the others");
    says(&members, "state", Level::Problem, "so these refuse requests: a:1");
    says(&members, "nodes", Level::Warning, "down, as most masters say: b:1");
    says(&members, "nodes", Level::Warning, "suspected to be down (fail?): [::1]:7");
    says(&members, "nodes", Level::Warning, "cannot be reached from here: c:1");
    let mut strict = member("a:1", "fail", &failed);
    strict.coverage = Queried::Known("yes".into());
    says(&[strict], "slots", Level::Problem, "all nodes refuse all requests");
}

#[test]
fn missing_replicas_and_different_versions_are_warnings() {
    let lone = NODES.replace("4 c:1@2 slave 2", "4 c:1@2 slave,fail 2");
    let mut other = member("b:1", "ok", &lone);
    other.facts.info = Queried::Known(Info::parse("valkey_version:9.1.2", &Secrets::default()));
    let members = [member("a:1", "ok", &lone), other];
    says(&members, "replicas", Level::Warning, "nothing takes over from these masters: b:1");
    says(&members, "versions", Level::Warning, "Redis 7.0.15 at a:1; Valkey 9.1.2 at b:1");
}

#[test]
fn denied_views_are_reported_once() {
    let denied = || Member { view: Queried::Denied, ..member("a:1", "ok", NODES) };
    let found = check_cluster(&[Member::silent("x:1", "refused".into()), denied(), denied()], "me");
    assert_eq!((found.len(), found[0].level), (1, Level::Unknown));
    assert!(found[0].message.contains("+cluster|info and +cluster|nodes"), "{found:?}");
    assert_eq!(found[0].commands, ["ACL SETUSER me '+cluster|info' '+cluster|nodes'", "ACL SAVE"]);
}

#[test]
fn malformed_lines_are_left_out() {
    let view = View::parse(&Info::default(), "\nx\n1 a master\n1 a:1 master -\n", "b:1");
    assert_eq!(view.nodes.len(), 1);
    let odd = "1 :7@8 myself,master - 0 0 1 connected 5-4 1-99999 x 7-7 [1-<-2]";
    let view = View::parse(&Info::default(), odd, "b:1");
    assert_eq!((view.nodes[0].slot_count(), view.nodes[0].address.as_str()), (1, "b:1"));
}
