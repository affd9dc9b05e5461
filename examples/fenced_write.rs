//! Fencing tokens: a writer that was paused after checking its lock can do no harm if the resource
//! checks the token.
//!
//! No lock service can stop a write that is already on its way. So each write carries the fencing
//! token of its lock, and the resource rejects a token that is smaller than the largest it has
//! seen. This example stops a real process right after it has checked its lock. When the lease has
//! expired, the example continues the process, which then writes.
//!
//! ```text
//! cargo run --example fenced_write
//! ```

#[path = "common/mod.rs"]
mod common;

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use common::{Cleanup, Result, Server, ensure, exit_code};
use distlock::{Config, FencingToken, RedisMgr};
use rustix::process::{Pid, Signal, kill_process};

const LOCK: &str = "distlock-example:account:42";
const TTL: Duration = Duration::from_secs(2);

/// The check for a resource that is a Redis key.
const FENCED_SET: &str = r"
local seen = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
if tonumber(ARGV[1]) < seen then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'balance', ARGV[2])
return 1
";

/// The same check for a row of a database.
const FENCED_UPDATE: &str = "\
CREATE TABLE account (
    id      BIGINT PRIMARY KEY,
    balance BIGINT NOT NULL,
    fence   BIGINT NOT NULL DEFAULT 0    -- as_i64() of a token; a NULL would match no token
);

UPDATE account
   SET balance = :balance, fence = :token
 WHERE id = 42 AND fence <= :token;      -- if no row has changed, the write was rejected";

fn main() -> ExitCode {
    let mut args = env::args().skip(1);
    exit_code(match (args.next().as_deref(), args.next()) {
        (Some("--paused-writer"), Some(key)) => write_after_pause(&key),
        _ => run(),
    })
}

/// Writes to the resource. Returns false if the resource rejects the token.
fn fenced_set(mgr: &RedisMgr, key: &str, token: FencingToken, balance: u64) -> Result<bool> {
    let script = redis::Script::new(FENCED_SET);
    Ok(script.key(key).arg(token.as_u64()).arg(balance).invoke(&mut mgr.connection()?)?)
}

/// The first writer, a process of its own: acquires the lock, checks it, is stopped, and writes.
fn write_after_pause(key: &str) -> Result {
    let mgr = RedisMgr::new(Config::from_env().ttl(TTL))?;
    let guard = mgr.lock(LOCK)?;
    guard.ensure_held()?;
    println!("{}", guard.fencing_token());
    // The parent stops this process here. If the parent has ended, there is nothing to read.
    if io::stdin().read_line(&mut String::new())? == 0 {
        return Ok(());
    }
    println!("{}", outcome(fenced_set(&mgr, key, guard.fencing_token(), 999)?));
    println!("{}", if guard.is_held() { "held" } else { "lost" });
    Ok(())
}

/// The second writer. Also starts, stops and continues the first one.
fn run() -> Result {
    let cleanup = Cleanup::start()?;
    let server = Server::from_env_or_start(&cleanup)?;
    let mgr = RedisMgr::new(server.config().ttl(TTL))?;
    let key = format!("distlock:example:account:{}", std::process::id());
    println!("Server: {}\n", server.description());

    let mut first = Command::new(env::current_exe()?)
        .args(["--paused-writer", &key])
        .env("DISTLOCK_URL", server.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    cleanup.register(first.id())?;
    let mut input = first.stdin.take().ok_or("the first writer has no input")?;
    let mut lines =
        BufReader::new(first.stdout.take().ok_or("the first writer has no output")?).lines();
    let mut next_line =
        || -> Result<String> { Ok(lines.next().ok_or("the first writer has ended")??) };

    let first_token: u64 = next_line()?.parse()?;
    println!("first writer   has the lock, token {first_token}; is_held() says yes");
    kill_process(Pid::from_child(&first), Signal::STOP)?;
    println!("               is stopped before it writes, for longer than the ttl of {TTL:?}");

    let guard = mgr.lock(LOCK)?;
    let token = guard.fencing_token();
    println!("second writer  has the lock, token {token}, because the first lease has expired");
    let second_accepted = fenced_set(&mgr, &key, token, 100)?;
    println!("second writer  writes balance 100 with token {token}: {}", outcome(second_accepted));

    kill_process(Pid::from_child(&first), Signal::CONT)?;
    writeln!(input, "continue")?;
    let (first_accepted, first_holds) = (next_line()? == "accepted", next_line()? == "held");
    cleanup.unregister(first.id())?;
    first.wait()?;
    println!(
        "first writer   continues and writes balance 999 with token {first_token}: {}",
        outcome(first_accepted)
    );
    println!(
        "               checks its lock again; is_held() says {}",
        if first_holds { "yes" } else { "no" }
    );

    let balance: u64 = redis::cmd("HGET").arg(&key).arg("balance").query(&mut mgr.connection()?)?;
    redis::cmd("DEL").arg(&key).query::<()>(&mut mgr.connection()?)?;
    println!("\nThe balance is {balance}.\n\nThe same check in a database:\n\n{FENCED_UPDATE}");
    ensure(token.as_u64() > first_token, "the later holder has the larger token")?;
    ensure(second_accepted, "the write of the holder is accepted")?;
    ensure(!first_accepted, "the write of the paused writer is rejected")?;
    ensure(!first_holds, "the paused writer sees that its lock is lost")?;
    ensure(balance == 100, "the balance is the one that the holder wrote")
}

fn outcome(accepted: bool) -> &'static str {
    if accepted { "accepted" } else { "rejected" }
}
