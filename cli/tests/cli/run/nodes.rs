//! Several nodes.

use super::{
    Fixture,
    fixture::{LONG_TTL, RUN_UNTIL_KILLED, is_alive},
};
use crate::{
    command::{distlock_at_url, run_to_end},
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};
use rustix::process::Signal;

/// A fixture that uses these nodes, and not its own server.
fn fixture(nodes: &Nodes) -> Fixture {
    Fixture::at(RedisServer::start(), nodes.urls())
}

/// No node is in quarantine.
fn three_nodes() -> Nodes {
    Nodes::start(3).long_running()
}

#[test]
fn command_runs_with_one_of_three_nodes_dead() {
    let nodes = three_nodes();
    nodes.kill(1);
    let fixture = fixture(&nodes);
    let options = ["--timeout", "5s", "--ttl", LONG_TTL, "--quarantine", LONG_TTL];
    for (script, code) in [("true", 0), ("exit 7", 7)] {
        let mut job = fixture.run(&options, script);
        assert_eq!(job.code(), code, "{}", job.err());
        assert_eq!((nodes.values("lock:x"), fixture.processes()), (vec![None, None, None], vec![]));
    }
    let (mut job, pid) = fixture.run_until_started(&options, RUN_UNTIL_KILLED);
    assert_eq!(nodes.values("lock:x").iter().flatten().count(), 2);
    job.signal(Signal::KILL);
    job.status();
    eventually("the guardian releases the lock", TEST_TIMEOUT, || {
        nodes.values("lock:x").iter().all(Option::is_none)
    });
    assert!(!is_alive(pid));
}

#[test]
fn command_ends_with_two_of_three_nodes_dead() {
    let nodes = three_nodes();
    let fixture = fixture(&nodes);
    let (mut job, _) =
        fixture.run_until_started(&["--timeout", "500ms", "--ttl", "3s"], RUN_UNTIL_KILLED);
    nodes.kill(0);
    nodes.kill(2);
    assert_eq!(job.code(), 76, "{}", job.err());
    assert_eq!(fixture.processes(), []);
    let mut job = fixture.run(&["--timeout", "500ms", "--ttl", "3s", "--no-wait"], "true");
    assert_eq!(job.code(), 69, "{}", job.err());
    assert!(job.err().contains("2 of 3 nodes"), "{}", job.err());
    assert_eq!(fixture.processes(), []);
}

/// Fault: N208
#[test]
fn release_without_quorum_is_reported_once() {
    let nodes = three_nodes();
    let fixture = fixture(&nodes);
    let options = ["--timeout", "500ms", "--ttl", LONG_TTL, "--quarantine", LONG_TTL];
    let (mut job, _) =
        fixture.run_until_started(&options, "echo $$ >$DIR/pid; read -r line; exit 3");
    nodes.kill(0);
    nodes.kill(2);
    job.end_input();
    assert_eq!(job.code(), 3);
    let err = job.err();
    let says = "distlock: could not release lock \"x\": needs 2 of 3 nodes (";
    assert!(err.starts_with(says) && err.matches("could not release").count() == 1, "{err}");
    let then = "; it may stay held until it expires, after 10m at the latest\n";
    assert!(err.ends_with(then), "{err}");
}

#[test]
fn shared_and_one_permit_work_on_several_nodes() {
    let nodes = three_nodes();
    let fixture = fixture(&nodes);
    let code = |options: &[&str]| fixture.run(options, "true").code();
    let (_reader, _) = fixture.run_until_started(&["--shared"], RUN_UNTIL_KILLED);
    assert_eq!(code(&["--shared", "-n"]), 0);
    assert_eq!(code(&["-n"]), 75);
    let other = |options: &[&str]| {
        let line = [&["run"], options, &["y", "--", "true"]].concat();
        run_to_end(fixture.distlock(&line)).code
    };
    assert_eq!(other(&["--permits", "1"]), Some(0));
    assert_eq!(other(&["--permits", "2"]), Some(64));
    assert_eq!(other(&["--at-least", "1s"]), Some(64));
}

/// Fault: N211
#[test]
fn detached_lock_over_nodes_is_refused_before_the_wait() {
    let urls = "redis://127.0.0.1:1,redis://127.0.0.1:2,redis://127.0.0.1:3";
    run_to_end(distlock_at_url(urls, &["lock", "--detach", "x"]))
        .expect_code(64)
        .expect_error("--detach works with one Redis or Valkey server, or a cluster, only");
}

/// Two of three nodes lose a lock with a ttl of 20 s. A command with a ttl of 2 s must wait as long
/// as any other.
///
/// Fault: N49
#[test]
fn restarted_nodes_do_not_vote_for_shorter_ttl() {
    let nodes = three_nodes();
    let fixture = fixture(&nodes);
    let (job, pid) = fixture.run_until_started(&["--ttl", "20s"], RUN_UNTIL_KILLED);
    // A stopped wrapper cannot re-acquire the lock on the restarted nodes. Its command runs until
    // the lease is nearly over.
    job.signal(Signal::STOP);
    [0, 1].into_iter().for_each(|node| nodes.restart_empty(node));
    // A process that was killed but not yet reaped does not run.
    let script =
        format!("if grep -q 'State:.[^Z]' /proc/{pid}/status; then echo both; fi 2>/dev/null");
    let mut other = fixture.run(&["--timeout", "2s", "--ttl", "2s", "--wait", "6s"], &script);
    let code = other.code();
    assert_eq!(other.out(), "", "both commands run: {}", other.err());
    // On a slow machine, the quarantine may have ended meanwhile.
    assert!(code == 69 || !is_alive(pid), "{code}: {}", other.err());
}

/// With a quarantine much longer than the test, and with one that ends during it.
///
/// Fault: N49
#[test]
fn quarantine_is_set_by_option_or_environment() {
    let nodes = Nodes::start(3);
    let fixture = fixture(&nodes);
    let refused = |options: &[&str], environment: &[(&str, &str)]| {
        let mut command =
            fixture.command(&[&["--no-wait", "--ttl", "1s"], options].concat(), &["true"]);
        command.envs(environment.iter().copied());
        let mut job = fixture.start(command);
        (job.code(), job.err())
    };
    for (options, environment) in [
        (&["--quarantine", "24h"][..], &[][..]),
        (&[], &[("DISTLOCK_QUARANTINE", "24h")]),
        (&["--quarantine", "24h"], &[("DISTLOCK_QUARANTINE", "1s")]),
    ] {
        let (code, err) = refused(options, environment);
        assert!(code == 69 && err.contains("votes again in 23h"), "{code}: {err}");
    }
    assert_eq!(
        refused(&["--quarantine", "0"], &[("DISTLOCK_QUARANTINE", "24h")]),
        (0, String::new())
    );
    let mut job = fixture.run(&["--wait", "1m", "--ttl", "1s", "--quarantine", "1s"], "true");
    assert_eq!(job.code(), 0, "{}", job.err());
}

/// The guardian needs the quarantine, because without it a ttl longer than the default would be
/// refused.
///
/// Fault: N49
#[test]
fn guardian_receives_quarantine() {
    let nodes = three_nodes();
    let fixture = fixture(&nodes);
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", LONG_TTL, "--quarantine", LONG_TTL], RUN_UNTIL_KILLED);
    job.signal(Signal::KILL);
    job.status();
    eventually("the guardian releases the lock", TEST_TIMEOUT, || {
        nodes.values("lock:x").iter().all(Option::is_none)
    });
    assert!(!is_alive(pid));
}

/// A manager of all three nodes cannot be created any more.
///
/// Fault: N95
#[test]
fn guardian_releases_on_others_if_node_became_replica() {
    for replica in [0, 2] {
        let nodes = three_nodes();
        let fixture = fixture(&nodes);
        let (mut job, pid) = fixture
            .run_until_started(&["--ttl", LONG_TTL, "--quarantine", LONG_TTL], RUN_UNTIL_KILLED);
        nodes.server(replica).cli(&["REPLICAOF", "127.0.0.1", "1"]);
        job.signal(Signal::KILL);
        job.status();
        let kept =
            || (0..3).filter(|node| nodes.values("lock:x")[*node].is_some()).collect::<Vec<_>>();
        eventually("the guardian releases the lock on the others", TEST_TIMEOUT, || {
            kept() == [replica]
        });
        assert!(!is_alive(pid));
    }
}

/// Fault: N49
#[test]
fn ttl_longer_than_quarantine_exits_with_64() {
    let ended = |urls: &str, args: &[&str]| run_to_end(distlock_at_url(urls, args));
    let [run_for_a_minute, doctor] =
        [&["run", "--ttl", "1m", "x", "--", "true"][..], &["doctor", "--ttl", "1m"]]
            .map(<[&str]>::to_vec);
    // The servers are not asked.
    let urls = "redis://127.0.0.1:1,redis://127.0.0.1:2,redis://127.0.0.1:3";
    for args in [&run_for_a_minute, &doctor] {
        let ended =
            ended(urls, args).expect_code(64).expect_error("longer than the quarantine (30s)");
        assert!(ended.err.contains("--quarantine or DISTLOCK_QUARANTINE"), "{ended:?}");
    }
    for asked in ["1ms", "25h", "soon"] {
        assert!(
            ended(urls, &["ls", "--quarantine", asked])
                .expect_code(64)
                .err
                .contains("--quarantine"),
            "{asked}"
        );
    }
    for (args, says) in [
        (&["ls"][..], "invalid value 'soon' for 'DISTLOCK_QUARANTINE': "),
        (&["ls", "--quarantine", "late"], "invalid value 'late' for '--quarantine <DURATION>': "),
    ] {
        let mut command = distlock_at_url(urls, args);
        command.env("DISTLOCK_QUARANTINE", "soon");
        let ended = run_to_end(command).expect_code(64);
        assert!(ended.err.contains(says), "{ended:?}");
    }
    let nodes = three_nodes();
    ended(&nodes.urls(), &[&["--quarantine", "1m"][..], &run_for_a_minute].concat()).expect_code(0);
    // A command that takes no lock accepts a quarantine shorter than the default ttl.
    ended(&nodes.urls(), &["ls", "--quarantine", "1s"]).expect_code(0);
    // One server does not vote.
    let server = RedisServer::start();
    ended(&server.url(), &run_for_a_minute).expect_code(0);
    ended(&server.url(), &[&["--quarantine", "1s"][..], &run_for_a_minute].concat()).expect_code(0);
}
