//! Several nodes.

use super::{
    Scene,
    scene::{LONG, STAY, is_alive},
};
use crate::support::{CEILING, Nodes, RedisServer, eventually};
use rustix::process::Signal;

/// Three nodes that may vote at once; the first server of the scene is not among them.
fn scene(nodes: &Nodes) -> Scene {
    Scene::at(RedisServer::start(), nodes.urls())
}

fn trio() -> Nodes {
    Nodes::durable(3)
}

#[test]
fn one_of_three_may_be_dead() {
    let nodes = trio();
    nodes.kill(1);
    let scene = scene(&nodes);
    let options = ["--timeout", "5s", "--ttl", LONG];
    for (script, code) in [("true", 0), ("exit 7", 7)] {
        let mut job = scene.run(&options, script);
        assert_eq!(job.code(), code, "{}", job.err());
        assert_eq!((nodes.values("lock:x"), scene.processes()), (vec![None, None, None], vec![]));
    }
    let (mut job, pid) = scene.running(&options, STAY);
    assert_eq!(nodes.values("lock:x").iter().flatten().count(), 2);
    job.signal(Signal::KILL);
    job.status();
    eventually("the guardian gives the lock up", CEILING, || nodes.values("lock:x").iter().all(Option::is_none));
    assert!(!is_alive(pid));
}

#[test]
fn two_of_three_may_not() {
    let nodes = trio();
    let scene = scene(&nodes);
    let (mut job, _) = scene.running(&["--timeout", "500ms", "--ttl", "3s"], STAY);
    nodes.kill(0);
    nodes.kill(2);
    assert_eq!(job.code(), 76, "{}", job.err());
    assert_eq!(scene.processes(), []);
    let mut job = scene.run(&["--timeout", "500ms", "--ttl", "3s", "--no-wait"], "true");
    assert_eq!(job.code(), 69, "{}", job.err());
    assert!(job.err().contains("2 of 3 nodes"), "{}", job.err());
    assert_eq!(scene.processes(), []);
}
