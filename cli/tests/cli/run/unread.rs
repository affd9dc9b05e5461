//! Standard error is a pipe that is full, or a terminal that is stopped, and nobody reads.

use std::io::{PipeReader, PipeWriter, Write as _};

use rustix::process::Signal;

use super::{
    Scene,
    scene::{KEY, LONG},
};
use crate::pty::Pty;

/// A pipe without room for another byte, and the end of it that nobody reads.
pub(super) fn full() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    for piece in [&[b'-'; 4096][..], b"-"] {
        while writer.write(piece).is_ok() {}
    }
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

#[test]
fn what_nobody_reads_holds_nothing_up() {
    let scene = Scene::new();
    let options = ["--ttl", "9s", "--grace", "1s", "--max-hold", "1s"];
    let (_unread, err) = full();
    let mut job = scene.start_saying(scene.command(&options, &["sh", "-c", "exec yes >&2"]), err);
    assert_eq!(job.code(), 124);
    scene.expect_nothing_left();
}

#[test]
fn a_loss_of_which_nobody_reads_ends_the_command_all_the_same() {
    let scene = Scene::new();
    let (_unread, err) = full();
    let command = scene.command(&["--ttl", "9s"], &["sh", "-c", "echo >$DIR/runs; exec sleep 600"]);
    let mut job = scene.start_saying(command, err);
    scene.line("runs");
    scene.server.cli(&["DEL", KEY]);
    assert_eq!(job.code(), 76);
    scene.expect_nothing_left();
}

#[test]
fn who_waits_gets_the_lock_and_gives_it_up_without_being_read() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
    let (_unread, err) = full();
    let mut job = scene.start_saying(scene.command(&["--verbose", "--ttl", LONG], &["sh", "-c", "exit 3"]), err);
    scene.await_line(1);
    drop(guard);
    assert_eq!(job.code(), 3);
    scene.expect_nothing_left();
}

#[test]
fn a_log_that_nobody_reads_keeps_nobody_from_renewing() {
    let scene = Scene::new();
    let (_unread, err) = std::io::pipe().unwrap();
    let mut command = scene.command(&["--ttl", "9s"], &["sh", "-c", "echo >$DIR/runs; exec yes >&2"]);
    command.env("DISTLOCK_LOG", "trace");
    let mut job = scene.start_saying(command, err);
    scene.line("runs");
    scene.await_renewals(3);
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 128 + Signal::TERM.as_raw());
    scene.expect_nothing_left();
}

/// In the words of this program, not of the one that reads it.
#[test]
fn a_log_that_cannot_be_had_is_told_without_waiting_for_a_reader() {
    let scene = Scene::new();
    let command = |err: Option<PipeWriter>| {
        let mut command = scene.command(&["--ttl", LONG], &["sh", "-c", "exit 3"]);
        command.env("DISTLOCK_LOG", "distlock=wran");
        match err {
            Some(err) => scene.start_saying(command, err),
            None => scene.start(command),
        }
    };
    let mut job = command(None);
    assert_eq!(job.code(), 3);
    assert!(job.err().starts_with("distlock: ") && job.err().contains("DISTLOCK_LOG"), "{}", job.err());
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(command(Some(closed)).code(), 3);
    let (_unread, full) = full();
    assert_eq!(command(Some(full)).code(), 3);
    scene.expect_nothing_left();
}

#[test]
fn what_went_wrong_is_told_as_a_number_where_nobody_reads() {
    let scene = Scene::new();
    let (_unread, err) = full();
    let mut job = scene.start_saying(scene.command(&["--ttl", LONG], &["no-such-command"]), err.try_clone().unwrap());
    assert_eq!(job.code(), 127);
    scene.expect_nothing_left();
    let _guard = scene.manager().lock("x").unwrap();
    assert_eq!(scene.start_saying(scene.command(&["--no-wait"], &["true"]), err).code(), 75);
}

/// As by ^S, or by a pager that nobody scrolls.
#[test]
fn a_terminal_that_is_stopped_holds_nothing_up() {
    let scene = Scene::new();
    let environment = scene.environment();
    let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let script = "echo >$DIR/runs; exec sleep 600";
    let args = ["--timeout", "20s", "run", "--ttl", "9s", "--max-hold", "2s", "x", "--", "sh", "-c", script];
    let mut terminal = Pty::start_with(80, 24, &args, &environment);
    scene.line("runs");
    terminal.press("\x13");
    assert_eq!(terminal.end(), 124);
    scene.expect_nothing_left();
}
