//! The examples, run for real: they say of themselves whether what they show holds.

#[path = "../examples/common/mod.rs"]
mod common;

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

use common::{Server, Watchdog, nanos, now, work_for};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// Generous: only a run that hangs comes near it.
const CEILING: Duration = Duration::from_secs(120);

/// How a run of an example ended.
struct Run {
    status: ExitStatus,
    out: String,
    err: String,
}

impl Run {
    #[track_caller]
    fn exits_with(self, code: i32) -> Run {
        assert_eq!(self.status.code(), Some(code), "{}\n--- errors\n{}", self.out, self.err);
        self
    }

    #[track_caller]
    fn says(self, words: &str) -> Run {
        assert!(self.out.contains(words), "{words:?} is missing in\n{}\n--- errors\n{}", self.out, self.err);
        self
    }

    #[track_caller]
    fn complains(self, words: &str) -> Run {
        assert!(self.err.contains(words), "{words:?} is missing in the errors\n{}", self.err);
        self
    }
}

/// The program of an example, which cargo puts beside those of the tests.
#[track_caller]
fn program(example: &str) -> PathBuf {
    let this = env::current_exe().expect("a test has a path");
    let folder = this.parent().and_then(Path::parent).expect("it is in target/<profile>/deps");
    let program = folder.join("examples").join(example);
    assert!(
        program.is_file(),
        "{} is missing: `cargo test` builds it when no target is chosen, and `cargo build --examples` does",
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
    let output = result.recv_timeout(CEILING).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("the example hangs");
    });
    let output = output.expect("its output can be read");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Run { status: output.status, out: text(&output.stdout), err: text(&output.stderr) }
}

/// Runs an example against a server of its own, named by the environment.
#[track_caller]
fn run_with_server(example: &str, args: &[&str]) -> Run {
    let watchdog = Watchdog::start().expect("sh can be run");
    let server = Server::private(&watchdog).expect("a server can be started");
    let mut command = Command::new(program(example));
    command.args(args).env("DISTLOCK_URL", server.url());
    run(command)
}

#[track_caller]
fn judge(history: &str) -> Run {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    let record = folder.path().join("record");
    fs::write(&record, history).expect("it can be written to");
    let mut command = Command::new(program("contention"));
    command.arg("--judge").arg(&record);
    run(command)
}

#[test]
fn contention_without_trouble() {
    let run = run_with_server("contention", &["--children", "3", "--rounds", "3", "--work", "30ms"])
        .exits_with(0)
        .says("overlaps       0     among 9 beliefs")
        .says("token order    ok")
        .says("lost updates   0     9 times")
        .says("GOOD");
    assert_eq!(run.out.matches("holds, token").count(), 9, "{}", run.out);
}

#[test]
fn contention_under_chaos() {
    let args = ["--chaos", "--children", "4", "--rounds", "6", "--work", "100ms", "--ttl", "400ms", "--seed", "7"];
    run_with_server("contention", &args)
        .exits_with(0)
        .says("was killed while holding")
        .says("was stopped while holding")
        .says("was stopped while waiting")
        .says("has lost the lock")
        .says("overlaps       0")
        .says("token order    ok")
        .says("lost updates   0")
        .says("GOOD");
}

#[test]
fn contention_over_several_servers() {
    let watchdog = Watchdog::start().expect("sh can be run");
    let servers = Server::several(&watchdog, 3).expect("servers can be started");
    let urls: Vec<&str> = servers.iter().map(Server::url).collect();
    let mut command = Command::new(program("contention"));
    command.args(["--children", "2", "--rounds", "3", "--work", "30ms"]).env("DISTLOCK_URL", urls.join(","));
    let run = run(command).exits_with(0).says("overlaps       0").says("lost updates   0     6 times").says("GOOD");
    for server in &servers {
        assert!(run.out.contains(server.label()), "{} is not named in\n{}", server.label(), run.out);
    }
}

#[test]
fn redlock_while_two_nodes_are_killed_and_come_back() {
    let mut command = Command::new(program("redlock"));
    command.args(["--children", "3", "--rounds", "6", "--work", "60ms", "--ttl", "1s", "--seed", "3"]);
    // Its servers are its own, whatever the environment says.
    command.env("DISTLOCK_URL", "redis://127.0.0.1:1");
    let run = run(command)
        .exits_with(0)
        .says("node 1   was killed")
        .says("overlaps       0")
        .says("token order    ok")
        .says("quarantine     ok")
        .says("lost updates   0")
        .says("outages        2")
        .says("GOOD");
    assert_eq!(run.out.matches("is done").count(), 3, "{}", run.out);
    assert_eq!(run.out.matches("is back on").count(), 2, "{}", run.out);
}

/// A child that holds from 1 to 2 ms, then one that does from 3 to 4 ms.
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
fn the_judge_accepts_a_good_history() {
    judge(GOOD_HISTORY).exits_with(0).says("overlaps       0     among 2 beliefs").says("GOOD");
}

#[test]
fn the_judge_sees_two_holders_at_once() {
    judge(&GOOD_HISTORY.replace("2000000 1 11 leave", "3250000 1 11 leave"))
        .exits_with(1)
        .says("child 1 (token 101) and child 2 (token 102) both believed, for 0.2 ms")
        .says("BAD");
}

#[test]
fn the_judge_holds_a_stopped_child_to_its_deadline() {
    let stopped = "1900000 1 11 stopped\n9900000 1 11 continued\n9950000 1 11 lost its lease ran out";
    // Its guard had promised the lock until 9.5 ms, and another came at 3 ms.
    judge(&GOOD_HISTORY.replace("2000000 1 11 leave", stopped)).exits_with(1).says("both believed, for 1.0 ms");
    // With a promise until 2.5 ms, the next one came in time.
    let short = GOOD_HISTORY.replace("look 9500000", "look 2500000");
    judge(&short.replace("2000000 1 11 leave", stopped)).exits_with(0).says("locks lost     1");
}

#[test]
fn the_judge_sees_a_token_that_went_back() {
    let history = GOOD_HISTORY.replace("102", "100");
    judge(&history).exits_with(1).says("token order    WRONG").says("entered with token 100 after");
}

#[test]
fn the_judge_sees_a_lost_update() {
    let history = GOOD_HISTORY.replace("102 2 accepted", "102 1 accepted");
    judge(&history).exits_with(1).says("tokens 101 and 102 both wrote the value 1");
}

/// Three nodes that may vote from 0.9 ms on; one of them is killed between the holds of [`GOOD_HISTORY`], and comes back.
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
fn the_judge_knows_which_nodes_were_out() {
    judge(&format!("{GOOD_HISTORY}{NODES}"))
        .exits_with(0)
        .says("from 21 records of 2 children (2 processes)")
        .says("quarantine     ok    no lock before 2 fresh servers")
        .says("outages        1     nodes killed, and back without memory; locks taken meanwhile: 1 with one out, 0 with two")
        .says("work done      2     rounds finished under the lock, 1 by each child");
}

#[test]
fn the_judge_sees_a_lock_that_was_given_in_quarantine() {
    // One node alone decides nothing.
    let one_early =
        NODES.replace("node 2 up 900000", "node 2 up 1500000").replace("900000 0 2 node", "1500000 0 2 node");
    judge(&format!("{GOOD_HISTORY}{one_early}")).exits_with(0).says("quarantine     ok");
    judge(&format!("{GOOD_HISTORY}{}", one_early.replace("990000", "1500000")))
        .exits_with(1)
        .says("quarantine     WRONG")
        .says("child 1 entered 0.5 ms too early")
        .says("BAD");
}

#[test]
fn the_judge_misses_a_child_that_never_finished() {
    judge(&GOOD_HISTORY.replace("4200000 2 12 done\n", "")).exits_with(1).says("child 2 did not finish its rounds");
}

#[test]
fn a_record_that_is_none_is_refused_with_its_line() {
    judge(&format!("{GOOD_HISTORY}5000000 1 11 sing\n")).exits_with(2).complains("line 14 of the record: \"sing\"");
    judge("").exits_with(2).complains("nobody ever held the lock");
}

#[test]
fn wrong_arguments_are_explained() {
    for (args, words) in [
        (["--children", "0"], "--children wants a number from 1 to 200, not \"0\""),
        (["--ttl", "soon"], "--ttl wants a time"),
        (["--help", ""], ""),
        (["--sing", ""], "\"--sing\" is not understood; see --help"),
    ] {
        let mut command = Command::new(program("contention"));
        command.args(args);
        run(command).exits_with(if words.is_empty() { 0 } else { 2 }).complains(words);
    }
}

#[test]
fn without_a_server_program_the_way_out_is_named() {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    for tool in ["sh", "rm"] {
        symlink(Path::new("/bin").join(tool), folder.path().join(tool)).expect("a link can be made");
    }
    let mut command = Command::new(program("contention"));
    command.env("PATH", folder.path()).env_remove("DISTLOCK_URL").env_remove("REDIS_URL");
    run(command).exits_with(2).complains("neither redis-server nor valkey-server is in PATH").complains("make demo");
}

#[test]
fn a_server_that_does_not_answer_is_named_without_its_password() {
    let mut command = Command::new(program("worker"));
    command.env("DISTLOCK_URL", "redis://:hush@127.0.0.1:1");
    let run = run(command).exits_with(1).complains("127.0.0.1:1");
    assert!(!run.err.contains("hush") && !run.out.contains("hush"), "{}{}", run.out, run.err);
}

/// Killed, the parent cannot clean up: neither its children, stopped ones among them, nor its server may outlive it.
#[test]
fn nothing_outlives_a_demo_that_is_killed() {
    let folder = tempfile::tempdir().expect("there is a temporary folder");
    let record = folder.path().join("record");
    let mut parent = Command::new(program("contention"))
        .args(["--chaos", "--children", "3", "--rounds", "1000", "--work", "100ms", "--ttl", "30s", "--record"])
        .arg(&record)
        .env_remove("DISTLOCK_URL")
        .env_remove("REDIS_URL")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example can be run");
    let mut lines = BufReader::new(parent.stdout.take().expect("it is piped")).lines();
    let mut line = |words: &str| {
        let found = lines.find_map(|line| line.ok().filter(|line| line.contains(words)));
        found.unwrap_or_else(|| panic!("it never said {words:?}"))
    };
    let server = line("The server is").rsplit(' ').next().expect("an address").trim_end_matches('.').to_owned();
    line("holds, token");
    let words = fs::read_to_string(&record).expect("there is a record");
    let mut pids: Vec<i32> = words.lines().filter(|line| line.ends_with("wait")).map(pid_of).collect();
    pids.sort_unstable();
    pids.dedup();
    assert!(!pids.is_empty(), "{words}");
    let first = Pid::from_raw(pids[0]).expect("a pid");
    kill_process(first, Signal::STOP).expect("it runs");

    parent.kill().expect("it runs");
    parent.wait().expect("it can be waited for");
    let alive = |pid: &i32| Pid::from_raw(*pid).is_some_and(|pid| test_kill_process(pid).is_ok());
    eventually("its children are gone", || !pids.iter().any(alive));
    eventually("its server is gone", || TcpStream::connect(&server).is_err());
}

/// The same with all of its servers.
#[test]
fn no_node_outlives_a_redlock_that_is_killed() {
    let mut parent = Command::new(program("redlock"))
        .args(["--children", "1", "--ttl", "30s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example can be run");
    let lines = BufReader::new(parent.stdout.take().expect("it is piped")).lines();
    let address = |line: String| Some(line.split_once("is up on ")?.1.split_once(' ')?.0.to_owned());
    let servers: Vec<String> = lines.filter_map(|line| line.ok().and_then(address)).take(5).collect();
    assert_eq!(servers.len(), 5, "{servers:?}");
    for server in &servers {
        assert!(TcpStream::connect(server).is_ok(), "{server} is not there");
    }
    parent.kill().expect("it runs");
    parent.wait().expect("it can be waited for");
    eventually("its servers are gone", || servers.iter().all(|server| TcpStream::connect(server).is_err()));
}

fn pid_of(line: &str) -> i32 {
    line.split(' ').nth(2).and_then(|pid| pid.parse().ok()).expect("each line has a pid")
}

#[track_caller]
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = now() + nanos(CEILING);
    while !holds() {
        assert!(now() < deadline, "not true after {CEILING:?}: {what}");
        work_for(Duration::from_millis(10));
    }
}

#[test]
fn worker() {
    run_with_server("worker", &[]).exits_with(0).says("60 jobs done, each once").says("2 locks lost");
}

#[test]
fn server() {
    run_with_server("server", &["--self-test"])
        .exits_with(0)
        .says("order 4: handled by at most 1 at once")
        .says("409 says: lock \"order:")
        .says("503 says: could not acquire");
}

#[test]
fn fenced_write() {
    run_with_server("fenced_write", &[])
        .exits_with(0)
        .says("writes balance 100")
        .says("is_held() says no")
        .says("The balance is 100.");
}
