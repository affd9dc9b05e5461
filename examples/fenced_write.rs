//! A writer that is paused between looking at its lock and writing cannot do harm, if the resource checks the token.
//!
//! No lock service can stop a write that is already on its way. So each write carries the fencing token of its lock,
//! and the resource refuses a token smaller than the largest it has seen. Here a real process is stopped right after
//! it has seen that it holds the lock, for longer than the lock lasts, and then writes.
//!
//! ```text
//! cargo run --example fenced_write
//! ```

#[path = "common/mod.rs"]
mod common;

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    process::{ChildStdin, Command, ExitCode, Stdio},
    time::Duration,
};

use common::{Outcome, Server, Watchdog, conclude, ensure};
use distlock::{Config, FencingToken, RedisMgr};
use rustix::process::{Pid, Signal, kill_process};

const LOCK: &str = "distlock-example:account:42";
const TTL: Duration = Duration::from_millis(500);

/// The check at the resource, where the resource is Redis itself.
const FENCED_SET: &str = r"
local seen = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
if tonumber(ARGV[1]) < seen then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'balance', ARGV[2])
return 1
";

/// The same check, where the resource is a row of a database.
const FENCED_UPDATE: &str = "\
UPDATE account
   SET balance = :balance, fence = :token
 WHERE id = 42 AND fence <= :token    -- no row changed: refused";

fn main() -> ExitCode {
    let mut words = env::args().skip(1);
    conclude(match (words.next().as_deref(), words.next()) {
        (Some("--paused-writer"), Some(key)) => paused_writer(&key),
        _ => story(),
    })
}

fn story() -> Outcome {
    let watchdog = Watchdog::start()?;
    let server = Server::find(&watchdog)?;
    let mgr = RedisMgr::new(server.config().ttl(TTL))?;
    let key = format!("distlock:example:account:{}", std::process::id());
    println!("The server is {}.\n", server.introduction());

    let mut first = Command::new(env::current_exe()?)
        .args(["--paused-writer", &key])
        .env("DISTLOCK_URL", server.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    watchdog.guard(first.id())?;
    let (Some(mut input), Some(output)) = (first.stdin.take(), first.stdout.take()) else { unreachable!() };
    let mut lines = BufReader::new(output).lines();
    let mut hear = || -> Outcome<String> { Ok(lines.next().ok_or("the first writer has died")??) };

    let first_token: u64 = hear()?.parse()?;
    println!("first writer   holds the lock with token {first_token}; has looked, and is_held() says yes");
    kill_process(Pid::from_child(&first), Signal::STOP)?;
    println!("               is stopped now, before it writes, for longer than the lease of {TTL:?}");

    let guard = mgr.lock(LOCK)?;
    let token = guard.fencing_token();
    println!("second writer  holds the lock with token {token}, because the lease has run out");
    let second_accepted = fenced_set(&mgr, &key, token, 100)?;
    println!("second writer  writes balance 100 with token {token}: {}", word(second_accepted));

    kill_process(Pid::from_child(&first), Signal::CONT)?;
    go_on(&mut input)?;
    let (first_accepted, first_holds) = (hear()? == "accepted", hear()? == "held");
    watchdog.forget(first.id())?;
    first.wait()?;
    println!("first writer   goes on, writes balance 999 with token {first_token}: {}", word(first_accepted));
    println!("               looks again, and is_held() says {}", if first_holds { "yes" } else { "no" });

    let balance: u64 = redis::cmd("HGET").arg(&key).arg("balance").query(&mut mgr.connection()?)?;
    redis::cmd("DEL").arg(&key).query::<()>(&mut mgr.connection()?)?;
    println!("\nThe balance is {balance}.\n\nThe same check in a database:\n\n{FENCED_UPDATE}");
    ensure(token.as_u64() > first_token, "the later holder has the larger token")?;
    ensure(second_accepted, "the write of the holder is accepted")?;
    ensure(!first_accepted, "the write of the paused writer is refused")?;
    ensure(!first_holds, "the paused writer sees that its lock is lost")?;
    ensure(balance == 100, "the balance is what the holder wrote")
}

/// The child: takes the lock, looks, is stopped, and writes.
fn paused_writer(key: &str) -> Outcome {
    let mgr = RedisMgr::new(Config::from_env().ttl(TTL))?;
    let guard = mgr.lock(LOCK)?;
    guard.ensure_held()?;
    println!("{}", guard.fencing_token());
    // Here it is stopped. The end of the input is the end of its parent.
    if io::stdin().read_line(&mut String::new())? == 0 {
        return Ok(());
    }
    println!("{}", word(fenced_set(&mgr, key, guard.fencing_token(), 999)?));
    println!("{}", if guard.is_held() { "held" } else { "lost" });
    Ok(())
}

fn fenced_set(mgr: &RedisMgr, key: &str, token: FencingToken, balance: u64) -> Outcome<bool> {
    let script = redis::Script::new(FENCED_SET);
    Ok(script.key(key).arg(token.as_u64()).arg(balance).invoke(&mut mgr.connection()?)?)
}

fn go_on(input: &mut ChildStdin) -> io::Result<()> {
    writeln!(input, "go on")
}

fn word(accepted: bool) -> &'static str {
    if accepted { "accepted" } else { "refused" }
}
