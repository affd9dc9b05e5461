//! Runs the examples. Each example checks its own claims.

#[path = "../examples/common/mod.rs"]
mod common;
#[path = "examples/orders.rs"]
mod orders;
/// For the tests that the example itself contains.
#[path = "../examples/orders.rs"]
#[allow(dead_code, reason = "nothing calls its `main`")]
mod orders_service;

use std::{
    env, fs,
    io::{BufRead, BufReader},
    net::TcpStream,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use common::{Cleanup, Server, nanos, now, sleep};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// Only a run that hangs takes this long.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The result of running an example.
struct Run {
    status: ExitStatus,
    out: String,
    err: String,
}

impl Run {
    #[track_caller]
    fn expect_code(self, code: i32) -> Run {
        assert_eq!(self.status.code(), Some(code), "{}\n--- errors\n{}", self.out, self.err);
        self
    }

    #[track_caller]
    fn expect_out(self, text: &str) -> Run {
        assert!(
            self.out.contains(text),
            "{text:?} is missing in\n{}\n--- errors\n{}",
            self.out,
            self.err
        );
        self
    }

    #[track_caller]
    fn expect_err(self, text: &str) -> Run {
        assert!(self.err.contains(text), "{text:?} is missing in the errors\n{}", self.err);
        self
    }
}

/// The program of an example. Cargo puts it next to the programs of the tests.
#[track_caller]
fn program(example: &str) -> PathBuf {
    let this = env::current_exe().expect("a test has a path");
    let folder = this.parent().and_then(Path::parent).expect("it is in target/<profile>/deps");
    let program = folder.join("examples").join(example);
    assert!(
        program.is_file(),
        "{} is missing: `cargo test` builds it when no target is chosen, and `cargo build \
         --examples` does",
        program.display()
    );
    program
}

#[track_caller]
fn run(mut command: Command) -> Run {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("the example cannot be run");
    let pid = Pid::from_child(&child);
    let (done, result) = crossbeam_channel::bounded(1);
    thread::spawn(move || done.send(child.wait_with_output()));
    let output = result.recv_timeout(TEST_TIMEOUT).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("the example hangs");
    });
    let output = output.expect("its output can be read");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Run { status: output.status, out: text(&output.stdout), err: text(&output.stderr) }
}

/// Runs an example with a new server, which the environment names.
#[track_caller]
fn run_with_server(example: &str, args: &[&str]) -> Run {
    let cleanup = Cleanup::start().expect("sh can be run");
    let server = Server::start(&cleanup).expect("a server can be started");
    let mut command = Command::new(program(example));
    command.args(args).env("DISTLOCK_URL", server.url());
    run(command)
}

#[track_caller]
fn check(history: &str) -> Run {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    let record = folder.path().join("record");
    fs::write(&record, history).expect("it can be written to");
    let mut command = Command::new(program("contention"));
    command.arg("--check").arg(&record);
    run(command)
}

#[test]
fn contention_without_faults_is_good() {
    let run =
        run_with_server("contention", &["--children", "3", "--rounds", "3", "--work", "30ms"])
            .expect_code(0)
            .expect_out("overlaps       0     between any two of 9 holds")
            .expect_out("token order    ok")
            .expect_out("lost updates   0     among 9 times")
            .expect_out("GOOD");
    assert_eq!(run.out.matches("acquired the lock").count(), 9, "{}", run.out);
}

#[test]
fn contention_with_chaos_is_good() {
    let args = [
        "--chaos",
        "--children",
        "4",
        "--rounds",
        "6",
        "--work",
        "100ms",
        "--ttl",
        "400ms",
        "--seed",
        "7",
    ];
    run_with_server("contention", &args)
        .expect_code(0)
        .expect_out("was killed while holding")
        .expect_out("was stopped while holding")
        .expect_out("was stopped while waiting")
        .expect_out("lost the lock")
        .expect_out("overlaps       0")
        .expect_out("token order    ok")
        .expect_out("lost updates   0")
        .expect_out("GOOD");
}

#[test]
fn contention_in_a_database_with_chaos_is_good() {
    let mut command = Command::new(program("contention"));
    command.args(["--mysql", "--chaos", "--children", "4", "--rounds", "6"]);
    command.args(["--work", "100ms", "--seed", "7"]);
    command.env_remove("DISTLOCK_URL");
    run(command)
        .expect_code(0)
        .expect_out("a private MariaDB")
        .expect_out("was killed while holding")
        .expect_out("was stopped while holding")
        .expect_out("overlaps       0")
        .expect_out("token order    ok")
        .expect_out("lost updates   0")
        .expect_out("GOOD");
}

#[test]
fn contention_over_several_servers_is_good() {
    let cleanup = Cleanup::start().expect("sh can be run");
    let servers = Server::start_many(&cleanup, 3).expect("servers can be started");
    let urls: Vec<&str> = servers.iter().map(Server::url).collect();
    let mut command = Command::new(program("contention"));
    command
        .args(["--children", "2", "--rounds", "3", "--work", "30ms"])
        .env("DISTLOCK_URL", urls.join(","));
    let run = run(command)
        .expect_code(0)
        .expect_out("overlaps       0")
        .expect_out("lost updates   0     among 6 times")
        .expect_out("GOOD");
    for server in &servers {
        assert!(
            run.out.contains(server.label()),
            "{} is not named in\n{}",
            server.label(),
            run.out
        );
    }
}

#[test]
fn redlock_with_two_nodes_restarted_is_good() {
    let mut command = Command::new(program("redlock"));
    command.args([
        "--children",
        "3",
        "--rounds",
        "6",
        "--work",
        "60ms",
        "--ttl",
        "1s",
        "--seed",
        "3",
    ]);
    // It starts its own servers and ignores the environment.
    command.env("DISTLOCK_URL", "redis://127.0.0.1:1");
    let run = run(command)
        .expect_code(0)
        .expect_out("node 1   was killed")
        .expect_out("overlaps       0")
        .expect_out("token order    ok")
        .expect_out("quarantine     ok")
        .expect_out("lost updates   0")
        .expect_out("outages        2")
        .expect_out("GOOD");
    assert_eq!(run.out.matches("is done").count(), 3, "{}", run.out);
    assert_eq!(run.out.matches("is back on").count(), 2, "{}", run.out);
}

/// One child holds the lock from 1 to 2 ms, another one from 3 to 4 ms.
const GOOD_HISTORY: &str = "\
# two children, one after the other
500000 0 10 plan 2
600000 1 11 wait
700000 2 12 wait
1000000 1 11 enter 9000000 101 host|pid11
1500000 1 11 look 9500000
1600000 1 11 write 101 1 accepted
2000000 1 11 leave
3000000 2 12 enter 9000000 102 host|pid12
3500000 2 12 write 102 2 accepted
4000000 2 12 leave
4100000 1 11 done
4200000 2 12 done
";

#[test]
fn check_accepts_a_good_history() {
    check(GOOD_HISTORY)
        .expect_code(0)
        .expect_out("overlaps       0     between any two of 2 holds")
        .expect_out("GOOD");
}

#[test]
fn check_finds_two_holders_at_once() {
    check(&GOOD_HISTORY.replace("2000000 1 11 leave", "3250000 1 11 leave"))
        .expect_code(1)
        .expect_out(
            "(mutex, token 101) and child 2 (mutex, token 102) both held the lock, for 0.2 ms",
        )
        .expect_out("BAD");
}

#[test]
fn check_counts_a_stopped_hold_until_its_deadline() {
    let stopped =
        "1900000 1 11 stopped\n9900000 1 11 continued\n9950000 1 11 lost its lease ran out";
    // Its guard last reported a deadline of 9.5 ms, and the other child acquired the lock at 3 ms.
    check(&GOOD_HISTORY.replace("2000000 1 11 leave", stopped))
        .expect_code(1)
        .expect_out("both held the lock, for 1.0 ms");
    // With a deadline of 2.5 ms there is no overlap.
    let short = GOOD_HISTORY.replace("look 9500000", "look 2500000");
    check(&short.replace("2000000 1 11 leave", stopped))
        .expect_code(0)
        .expect_out("locks lost     1");
}

#[test]
fn check_finds_a_decreasing_token() {
    let history = GOOD_HISTORY.replace("102", "100");
    check(&history)
        .expect_code(1)
        .expect_out("token order    WRONG")
        .expect_out("entered with token 100 after");
}

#[test]
fn check_finds_a_lost_update() {
    let history = GOOD_HISTORY.replace("102 2 accepted", "102 1 accepted");
    check(&history).expect_code(1).expect_out("tokens 101 and 102 both wrote the value 1");
}

/// Three nodes that may vote from 0.9 ms on. One is killed between the holds of [`GOOD_HISTORY`]
/// and comes back.
const NODES: &str = "\
100000 0 1 node 1 up 900000
100000 0 2 node 2 up 900000
100000 0 3 node 3 up 990000
900000 0 1 node 1 votes
900000 0 2 node 2 votes
990000 0 3 node 3 votes
2500000 0 0 node 3 down
2600000 0 4 node 3 up 3900000
3900000 0 4 node 3 votes
";

#[test]
fn check_counts_unavailable_nodes() {
    check(&format!("{GOOD_HISTORY}{NODES}"))
        .expect_code(0)
        .expect_out("from 21 records of 2 children (2 processes)")
        .expect_out("quarantine     ok    no lock granted until 2 new servers")
        .expect_out("outages        1     nodes killed and restarted without data;")
        .expect_out("locks granted meanwhile: 1 without one node, 0 without two")
        .expect_out("rounds done    2     1 by each child");
}

#[test]
fn check_finds_a_lock_granted_in_quarantine() {
    // One node is not a quorum.
    let one_early = NODES
        .replace("node 2 up 900000", "node 2 up 1500000")
        .replace("900000 0 2 node", "1500000 0 2 node");
    check(&format!("{GOOD_HISTORY}{one_early}")).expect_code(0).expect_out("quarantine     ok");
    check(&format!("{GOOD_HISTORY}{}", one_early.replace("990000", "1500000")))
        .expect_code(1)
        .expect_out("quarantine     WRONG")
        .expect_out("child 1 acquired the lock 0.5 ms too early")
        .expect_out("BAD");
}

#[test]
fn check_finds_an_unfinished_child() {
    check(&GOOD_HISTORY.replace("4200000 2 12 done\n", ""))
        .expect_code(1)
        .expect_out("child 2 did not finish its rounds");
}

#[test]
fn check_of_an_invalid_record_names_the_line() {
    check(&format!("{GOOD_HISTORY}5000000 1 11 sing\n"))
        .expect_code(2)
        .expect_err("line 14 of the record: unknown event \"sing\"");
    check("").expect_code(2).expect_err("no process ever held the lock");
}

#[test]
fn invalid_arguments_are_explained() {
    for (args, text) in [
        (["--children", "0"], "--children must be a number from 1 to 200, not \"0\""),
        (["--ttl", "soon"], "--ttl must be a time"),
        (["--help", ""], ""),
        (["--sing", ""], "unknown option \"--sing\"; see --help"),
    ] {
        let mut command = Command::new(program("contention"));
        command.args(args);
        run(command).expect_code(if text.is_empty() { 0 } else { 2 }).expect_err(text);
    }
}

#[test]
fn missing_server_program_is_explained() {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    for tool in ["sh", "rm"] {
        symlink(Path::new("/bin").join(tool), folder.path().join(tool))
            .expect("a link can be made");
    }
    let mut command = Command::new(program("contention"));
    command.env("PATH", folder.path()).env_remove("DISTLOCK_URL").env_remove("REDIS_URL");
    run(command)
        .expect_code(2)
        .expect_err("neither redis-server nor valkey-server is in PATH")
        .expect_err("make demo");
}

#[test]
fn unreachable_server_is_named_without_password() {
    let mut command = Command::new(program("worker"));
    command.env("DISTLOCK_URL", "redis://:hush@127.0.0.1:1");
    let run = run(command).expect_code(1).expect_err("127.0.0.1:1");
    assert!(!run.err.contains("hush") && !run.out.contains("hush"), "{}{}", run.out, run.err);
}

/// A killed parent cannot clean up. Its children, even stopped ones, and its server must end all
/// the same.
#[test]
fn killed_demo_leaves_no_process() {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    let record = folder.path().join("record");
    let mut parent = Command::new(program("contention"))
        .args([
            "--chaos",
            "--children",
            "3",
            "--rounds",
            "1000",
            "--work",
            "100ms",
            "--ttl",
            "30s",
            "--record",
        ])
        .arg(&record)
        .env_remove("DISTLOCK_URL")
        .env_remove("REDIS_URL")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example can be run");
    let mut lines = BufReader::new(parent.stdout.take().expect("it is piped")).lines();
    let mut line = |text: &str| {
        let found = lines.find_map(|line| line.ok().filter(|line| line.contains(text)));
        found.unwrap_or_else(|| panic!("{text:?} is missing in its output"))
    };
    let server = line("Server: ").rsplit(' ').next().expect("an address").to_owned();
    line("acquired the lock");
    let text = fs::read_to_string(&record).expect("there is a record");
    let mut pids: Vec<i32> =
        text.lines().filter(|line| line.ends_with("wait")).map(pid_of).collect();
    pids.sort_unstable();
    pids.dedup();
    assert!(!pids.is_empty(), "{text}");
    let first = Pid::from_raw(pids[0]).expect("a pid");
    kill_process(first, Signal::STOP).expect("it runs");

    parent.kill().expect("it runs");
    parent.wait().expect("it can be waited for");
    let alive = |pid: &i32| Pid::from_raw(*pid).is_some_and(|pid| test_kill_process(pid).is_ok());
    eventually("its children have ended", || !pids.iter().any(alive));
    eventually("its server has ended", || TcpStream::connect(&server).is_err());
}

/// The same for all its servers.
#[test]
fn killed_redlock_demo_leaves_no_server() {
    let mut parent = Command::new(program("redlock"))
        .args(["--children", "1", "--ttl", "30s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example can be run");
    let lines = BufReader::new(parent.stdout.take().expect("it is piped")).lines();
    let address =
        |line: String| Some(line.split_once("is up on ")?.1.split_once(' ')?.0.to_owned());
    let servers: Vec<String> =
        lines.filter_map(|line| line.ok().and_then(address)).take(5).collect();
    assert_eq!(servers.len(), 5, "{servers:?}");
    for server in &servers {
        assert!(TcpStream::connect(server).is_ok(), "{server} is not running");
    }
    parent.kill().expect("it runs");
    parent.wait().expect("it can be waited for");
    eventually("its servers have ended", || {
        servers.iter().all(|server| TcpStream::connect(server).is_err())
    });
}

fn pid_of(line: &str) -> i32 {
    line.split(' ').nth(2).and_then(|pid| pid.parse().ok()).expect("each line has a pid")
}

#[track_caller]
fn eventually(claim: &str, holds: impl Fn() -> bool) {
    let deadline = now() + nanos(TEST_TIMEOUT);
    while !holds() {
        assert!(now() < deadline, "not true after {TEST_TIMEOUT:?}: {claim}");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn worker_loses_no_job() {
    run_with_server("worker", &[])
        .expect_code(0)
        .expect_out("60 jobs done, each once")
        .expect_out("2 locks lost");
}

#[test]
fn server_pays_each_order_once() {
    run_with_server("server", &["--self-test"])
        .expect_code(0)
        .expect_out("order 4: handled by at most 1 at once")
        .expect_out("409: lock \"order:")
        .expect_out("503: could not acquire");
}

#[test]
fn fenced_write_rejects_the_paused_writer() {
    run_with_server("fenced_write", &[])
        .expect_code(0)
        .expect_out("writes balance 100")
        .expect_out("is_held() says no")
        .expect_out("The balance is 100.");
}
