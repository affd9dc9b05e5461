//! Several nodes.

use super::{
    Scene,
    scene::{LONG, STAY, is_alive},
};
use crate::{
    command::{at_url, run},
    support::{CEILING, Nodes, RedisServer, eventually},
};
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
    let options = ["--timeout", "5s", "--ttl", LONG, "--quarantine", LONG];
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

/// Two of three forget a lock with a ttl of 20 s. Whoever asks for the same one with a ttl of 2 s has to wait as long as
/// anybody else.
#[test]
fn who_has_a_short_ttl_does_not_believe_nodes_that_forgot_a_longer_one() {
    let nodes = trio();
    let scene = scene(&nodes);
    let (job, pid) = scene.running(&["--ttl", "20s"], STAY);
    // So that it does not take the lock anew where it is missing. Its command goes on until the lease is nearly over.
    job.signal(Signal::STOP);
    [0, 1].into_iter().for_each(|node| nodes.restart_empty(node));
    // Whoever was killed and has not been looked at yet does not run.
    let script = format!("if grep -q 'State:.[^Z]' /proc/{pid}/status; then echo both; fi 2>/dev/null");
    let mut other = scene.run(&["--timeout", "2s", "--ttl", "2s", "--wait", "6s"], &script);
    let code = other.code();
    assert_eq!(other.out(), "", "both run under the lock: {}", other.err());
    // On a machine that is slow enough the quarantine is over by now.
    assert!(code == 69 || !is_alive(pid), "{code}: {}", other.err());
}

/// By a quarantine that no test could wait for, and by one that is over.
#[test]
fn the_quarantine_is_what_the_option_or_the_environment_says() {
    let nodes = Nodes::start(3);
    let scene = scene(&nodes);
    let refused = |options: &[&str], environment: &[(&str, &str)]| {
        let mut command = scene.command(&[&["--no-wait", "--ttl", "1s"], options].concat(), &["true"]);
        command.envs(environment.iter().copied());
        let mut job = scene.start(command);
        (job.code(), job.err())
    };
    for (options, environment) in [
        (&["--quarantine", "24h"][..], &[][..]),
        (&[], &[("DISTLOCK_QUARANTINE", "24h")]),
        (&["--quarantine", "24h"], &[("DISTLOCK_QUARANTINE", "1s")]),
    ] {
        let (code, err) = refused(options, environment);
        assert!(code == 69 && err.contains("does not vote for another 23h"), "{code}: {err}");
    }
    assert_eq!(refused(&["--quarantine", "0"], &[("DISTLOCK_QUARANTINE", "24h")]), (0, String::new()));
    let mut job = scene.run(&["--wait", "1m", "--ttl", "1s", "--quarantine", "1s"], "true");
    assert_eq!(job.code(), 0, "{}", job.err());
}

/// It has to be told of the quarantine to be able to give up a lock with a ttl that is longer than the usual one.
#[test]
fn the_guardian_knows_the_quarantine() {
    let nodes = trio();
    let scene = scene(&nodes);
    let (mut job, pid) = scene.running(&["--ttl", LONG, "--quarantine", LONG], STAY);
    job.signal(Signal::KILL);
    job.status();
    eventually("the guardian gives the lock up", CEILING, || nodes.values("lock:x").iter().all(Option::is_none));
    assert!(!is_alive(pid));
}

/// A manager of all three would be refused by now.
#[test]
fn a_guardian_gives_the_lock_up_where_it_can_although_a_node_has_become_a_replica() {
    for replica in [0, 2] {
        let nodes = trio();
        let scene = scene(&nodes);
        let (mut job, pid) = scene.running(&["--ttl", LONG, "--quarantine", LONG], STAY);
        nodes.server(replica).cli(&["REPLICAOF", "127.0.0.1", "1"]);
        job.signal(Signal::KILL);
        job.status();
        let kept = || (0..3).filter(|node| nodes.values("lock:x")[*node].is_some()).collect::<Vec<_>>();
        eventually("the guardian gives the lock up on the others", CEILING, || kept() == [replica]);
        assert!(!is_alive(pid));
    }
}

#[test]
fn a_ttl_beyond_the_quarantine_is_a_matter_of_usage_where_there_is_one() {
    let ended = |urls: &str, args: &[&str]| run(at_url(urls, args));
    let [run_for_a_minute, doctor] =
        [&["run", "--ttl", "1m", "x", "--", "true"][..], &["doctor", "--ttl", "1m"]].map(<[&str]>::to_vec);
    // Before anybody is asked.
    let urls = "redis://127.0.0.1:1,redis://127.0.0.1:2,redis://127.0.0.1:3";
    for args in [&run_for_a_minute, &doctor] {
        let ended = ended(urls, args).with(64).only_says("longer than the quarantine (30s)");
        assert!(ended.err.contains("--quarantine or DISTLOCK_QUARANTINE"), "{ended:?}");
    }
    for asked in ["1ms", "25h", "soon"] {
        assert!(ended(urls, &["ls", "--quarantine", asked]).with(64).err.contains("--quarantine"), "{asked}");
    }
    let nodes = trio();
    ended(&nodes.urls(), &[&["--quarantine", "1m"][..], &run_for_a_minute].concat()).with(0);
    // One that is shorter than any ttl is no obstacle to looking.
    ended(&nodes.urls(), &["ls", "--quarantine", "1s"]).with(0);
    // One server does not vote.
    let server = RedisServer::start();
    ended(&server.url(), &run_for_a_minute).with(0);
    ended(&server.url(), &[&["--quarantine", "1s"][..], &run_for_a_minute].concat()).with(0);
}
