//! Standard error is a full pipe or a stopped terminal.

use std::io::{PipeReader, PipeWriter, Write as _};

use rustix::process::Signal;

use super::{
    Fixture,
    fixture::{KEY, LONG_TTL},
};
use crate::pty::Pty;

/// A full pipe. The reading end is open, but not read.
pub(super) fn full() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    for piece in [&[b'-'; 4096][..], b"-"] {
        while writer.write(piece).is_ok() {}
    }
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

/// Fault: N48
#[test]
fn full_stderr_does_not_delay_termination() {
    let fixture = Fixture::new();
    let options = ["--ttl", "9s", "--grace", "1s", "--max-hold", "1s"];
    let (_unread, err) = full();
    let mut job =
        fixture.start_with_stderr(fixture.command(&options, &["sh", "-c", "exec yes >&2"]), err);
    assert_eq!(job.code(), 124);
    fixture.expect_nothing_left();
}

/// Fault: N48
#[test]
fn full_stderr_does_not_delay_end_on_loss() {
    let fixture = Fixture::new();
    let (_unread, err) = full();
    let command =
        fixture.command(&["--ttl", "9s"], &["sh", "-c", "echo >$DIR/runs; exec sleep 600"]);
    let mut job = fixture.start_with_stderr(command, err);
    fixture.read_line("runs");
    fixture.server.cli(&["DEL", KEY]);
    assert_eq!(job.code(), 76);
    fixture.expect_nothing_left();
}

/// Fault: N48
#[test]
fn full_stderr_does_not_delay_acquire_and_release() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let (_unread, err) = full();
    let mut job = fixture.start_with_stderr(
        fixture.command(&["--verbose", "--ttl", LONG_TTL], &["sh", "-c", "exit 3"]),
        err,
    );
    fixture.await_queue_length(1);
    drop(guard);
    assert_eq!(job.code(), 3);
    fixture.expect_nothing_left();
}

/// Fault: N48
#[test]
fn full_log_does_not_delay_renewal() {
    let fixture = Fixture::new();
    let (_unread, err) = std::io::pipe().unwrap();
    let mut command =
        fixture.command(&["--ttl", "9s"], &["sh", "-c", "echo >$DIR/runs; exec yes >&2"]);
    command.env("DISTLOCK_LOG", "trace");
    let mut job = fixture.start_with_stderr(command, err);
    fixture.read_line("runs");
    fixture.await_renewals(3);
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 128 + Signal::TERM.as_raw());
    fixture.expect_nothing_left();
}

/// The message is distlock's own, not that of the logger.
///
/// Fault: N108
#[test]
fn malformed_log_filter_is_reported_without_blocking() {
    let fixture = Fixture::new();
    let command = |err: Option<PipeWriter>| {
        let mut command = fixture.command(&["--ttl", LONG_TTL], &["sh", "-c", "exit 3"]);
        command.env("DISTLOCK_LOG", "distlock=wran");
        match err {
            Some(err) => fixture.start_with_stderr(command, err),
            None => fixture.start(command),
        }
    };
    let mut job = command(None);
    assert_eq!(job.code(), 3);
    assert!(
        job.err().starts_with("distlock: ") && job.err().contains("DISTLOCK_LOG"),
        "{}",
        job.err()
    );
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(command(Some(closed)).code(), 3);
    let (_unread, full) = full();
    assert_eq!(command(Some(full)).code(), 3);
    fixture.expect_nothing_left();
}

/// Fault: N48
#[test]
fn full_stderr_keeps_exit_code_of_error() {
    let fixture = Fixture::new();
    let (_unread, err) = full();
    let mut job = fixture.start_with_stderr(
        fixture.command(&["--ttl", LONG_TTL], &["no-such-command"]),
        err.try_clone().unwrap(),
    );
    assert_eq!(job.code(), 127);
    fixture.expect_nothing_left();
    let _guard = fixture.manager().lock("x").unwrap();
    assert_eq!(
        fixture.start_with_stderr(fixture.command(&["--no-wait"], &["true"]), err).code(),
        75
    );
}

/// As by ^S.
///
/// Fault: N48
#[test]
fn stopped_terminal_does_not_delay_termination() {
    let fixture = Fixture::new();
    let environment = fixture.environment();
    let environment: Vec<_> =
        environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let script = "echo >$DIR/runs; exec sleep 600";
    let args = [
        "--timeout",
        "20s",
        "run",
        "--ttl",
        "9s",
        "--max-hold",
        "2s",
        "x",
        "--",
        "sh",
        "-c",
        script,
    ];
    let mut terminal = Pty::start_with(80, 24, &args, &environment);
    fixture.read_line("runs");
    terminal.press("\x13");
    assert_eq!(terminal.exit_code(), 124);
    fixture.expect_nothing_left();
}
