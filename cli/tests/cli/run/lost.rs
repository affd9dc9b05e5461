//! The lock is lost while the command runs.

use std::io::Read as _;

use distlock::RedisMgr;
use rustix::process::Signal;

use super::{
    Job, Scene,
    killed::behind_a_proxy,
    scene::{KEY, LONG, STAY, STUBBORN, await_state, ignoring, is_alive, signal},
    unread::full,
};
use crate::{
    kit::{is_renewal, patient},
    support::{CEILING, Fault, RedisServer, eventually},
};

#[track_caller]
fn expect_lost(scene: &Scene, job: Job, why: &str) {
    expect_ended(scene, job, &format!("is lost: {why}"));
}

#[track_caller]
fn expect_ended(scene: &Scene, mut job: Job, what: &str) {
    assert_eq!(job.code(), 76, "{}", job.err());
    let err = job.err();
    assert!(err.contains(&format!("distlock: lock \"x\" {what}")), "{err}");
    // A shell has its own words for a command of its own that was ended.
    assert_eq!(err.lines().filter(|line| line.starts_with("distlock: ")).count(), 1, "{err}");
    assert_eq!(scene.processes(), []);
}

#[test]
fn a_lock_that_vanishes_ends_the_command() {
    let ways: [fn(&RedisServer); 3] = [
        |server| drop(server.cli(&["DEL", KEY])),
        |server| drop(server.cli(&["FLUSHALL"])),
        RedisServer::restart_empty,
    ];
    for way in ways {
        let scene = Scene::new();
        let (job, _) = scene.running(&["--ttl", "9s"], STAY);
        way(&scene.server);
        expect_lost(&scene, job, "the server does not know it");
        scene.expect_no_lock();
    }
}

#[test]
fn a_lock_that_is_forced_away_ends_the_command() {
    let scene = Scene::new();
    let (job, _) = scene.running(&["--ttl", "9s"], STAY);
    let mgr = scene.manager();
    assert!(mgr.force_release("x").unwrap());
    expect_lost(&scene, job, "the server does not know it");
    scene.expect_nothing_left();
}

#[test]
fn a_lock_that_is_forced_to_the_next_in_line_stays_there() {
    let scene = Scene::new();
    let (job, _) = scene.running(&["--ttl", "9s"], STAY);
    let mut next = scene.run(&["--ttl", LONG], "echo >$DIR/next; read -r line; exit 3");
    scene.await_line(1);
    assert!(scene.manager().force_release("x").unwrap());
    scene.line("next");
    let holder = scene.holder();
    let mut job = job;
    assert_eq!(job.code(), 76, "{}", job.err());
    assert!(job.err().contains("is now held by") && job.err().contains(&format!("pid {}", next.pid())));
    assert_eq!(scene.holder(), holder);
    next.end_input();
    assert_eq!(next.code(), 3, "{}", next.err());
    scene.expect_nothing_left();
}

#[test]
fn a_server_that_is_away_for_longer_than_the_lease_ends_the_command() {
    let scene = Scene::new();
    let (job, pid) = scene.running(&["--ttl", "3s", "--timeout", "500ms"], STAY);
    scene.server.stop();
    expect_ended(&scene, job, "could not be renewed in time");
    assert!(!is_alive(pid));
    scene.server.cont();
    eventually("the lock expires", CEILING, || scene.holder().is_none());
    scene.expect_nothing_left();
}

#[test]
fn a_server_that_is_killed_ends_the_command() {
    let scene = Scene::new();
    let (job, _) = scene.running(&["--ttl", "3s", "--timeout", "500ms"], STAY);
    scene.server.kill();
    expect_ended(&scene, job, "could not be renewed in time");
}

#[test]
fn a_server_that_comes_back_in_time_disturbs_nobody() {
    let server = RedisServer::builder().append_only(true).start();
    server.config_set("appendfsync", "always");
    let url = server.url();
    let scene = Scene::at(server, url);
    let (mut job, _) = scene.running(&["--ttl", LONG], "echo $$ >$DIR/pid; read -r line; exit 3");
    scene.server.restart();
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    scene.expect_nothing_left();
}

/// Nobody can take it, and nobody can renew it: the one thing that is known is when others can have it.
#[test]
fn a_command_whose_lock_cannot_be_renewed_is_dead_when_others_can_have_it() {
    let (scene, proxy) = behind_a_proxy();
    let (job, pid) = scene.running(&["--ttl", "10s", "--grace", "10m", "--timeout", "500ms"], STUBBORN);
    let other = scene.number("other");
    proxy.blackhole();
    let guard = scene.manager().lock("x").unwrap();
    assert!(!is_alive(pid) && !is_alive(other), "two at once");
    expect_ended(&scene, job, "could not be renewed in time: ");
    assert!(guard.is_held());
}

#[test]
fn a_renewal_that_is_late_ends_no_command() {
    let (scene, proxy) = behind_a_proxy();
    let lost = proxy.on_request(is_renewal(KEY), Fault::HoldRequest);
    let script = "echo $$ >$DIR/pid; read -r line; exit 3";
    let (mut job, _) = scene.running(&["--ttl", "18s", "--timeout", "1s"], script);
    lost.wait_fired();
    scene.await_renewals(2);
    job.end_input();
    assert_eq!((job.code(), job.err().as_str()), (3, ""));
    scene.expect_nothing_left();
}

/// The code is about the lock, whatever the command says when it is asked to end.
#[test]
fn a_command_that_ends_well_when_its_lock_is_lost_has_lost_it_all_the_same() {
    let scene = Scene::new();
    let script = "trap 'echo >$DIR/asked; exit 0' TERM; echo $$ >$DIR/pid; while :; do sleep 600 & wait $!; done";
    let (job, _) = scene.running(&["--ttl", "9s", "--grace", "10m"], script);
    scene.server.cli(&["DEL", KEY]);
    expect_lost(&scene, job, "the server does not know it");
    assert_eq!(scene.read("asked"), "\n");
}

#[test]
fn a_command_that_does_not_listen_is_killed_after_the_grace_period() {
    let scene = Scene::new();
    let (job, pid) = scene.running(&["--ttl", "9s", "--grace", "500ms"], STUBBORN);
    let other = scene.number("other");
    scene.server.cli(&["DEL", KEY]);
    expect_lost(&scene, job, "the server does not know it");
    assert!(!is_alive(pid) && !is_alive(other));
    scene.expect_nothing_left();
}

#[test]
fn a_command_that_is_stopped_is_ended_too() {
    let scene = Scene::new();
    let (job, pid) = scene.running(&["--ttl", "9s", "--grace", "10m"], STAY);
    signal(pid, Signal::STOP);
    await_state(pid, 'T');
    scene.server.cli(&["DEL", KEY]);
    expect_lost(&scene, job, "the server does not know it");
}

/// Between having the lock and starting the command a process may be kept from running, as here by who reads its first words.
/// One that began would be killed in no time, so what it says of itself is looked at too.
#[test]
fn a_command_whose_lock_is_lost_before_it_begins_never_begins() {
    let (scene, proxy) = behind_a_proxy();
    let unrenewed = proxy.on_request(is_renewal(KEY), Fault::HoldRequest).forever();
    let run = scene.command(&["--verbose", "--ttl", "50ms"], &["sh", "-c", "echo >$DIR/ran"]);
    let mut said = String::new();
    // Its last words are lost if this test is kept from running for too long.
    eventually("somebody has time to read", CEILING, || {
        let (mut unread, err) = full();
        let renewals = unrenewed.fired();
        let mut job = scene.start_saying(ignoring("TERM", &run), err);
        let pid = job.pid();
        let is_over = || !is_alive(pid) || unrenewed.fired() > renewals && scene.holder().is_none();
        eventually("the lock expires", CEILING, is_over);
        said.clear();
        unread.read_to_string(&mut said).unwrap();
        assert_eq!((job.code(), scene.path("ran").exists()), (76, false));
        said.contains("has lock")
    });
    assert!(said.contains("lock \"x\" was lost before the command could begin"), "{}", said.trim_start_matches('-'));
    scene.expect_nothing_left();
}

/// Nobody renews while the command is too short for that.
#[test]
fn a_loss_that_only_the_release_finds_out_is_told_too() {
    let scene = Scene::new();
    let mut job = scene.run(&["--ttl", LONG], "echo >$DIR/pid; read -r line; exit 3");
    scene.line("pid");
    scene.server.cli(&["SET", KEY, "a stranger\u{1b}[31m"]);
    job.end_input();
    assert_eq!(job.code(), 76);
    let err = job.err();
    assert!(err.contains("was lost while the command ran") && err.contains("stranger"), "{err}");
    assert!(!err.contains('\u{1b}'), "{err:?}");
    assert_eq!(scene.holder().as_deref(), Some("a stranger\u{1b}[31m"));
}

#[test]
fn a_command_that_is_stopped_keeps_its_lock() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", "9s"], "echo $$ >$DIR/pid; exec sleep 600");
    signal(pid, Signal::STOP);
    await_state(pid, 'T');
    scene.await_renewals(4);
    assert!(RedisMgr::new(patient(scene.server.url())).unwrap().is_locked("x").unwrap());
    // One that is stopped could not hear it, and so it is let go on too.
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 128 + Signal::TERM.as_raw());
    scene.expect_nothing_left();
}
