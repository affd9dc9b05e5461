//! How long a server is kept from all else while many locks are listed, as it measures itself.

use std::time::Duration;

use distlock::{Config, RedisMgr};

use crate::{
    Result, Scale,
    measure::{median, now},
    report::{Line, Quantity, micros, number},
    support::RedisServer,
};

const ROUNDS: usize = 5;

/// Locks with identifiers and tokens as the library has them, a hundredth of them with a waiter.
const FILL: &str = "
    for n = ARGV[1], ARGV[2] do
      local name = string.format('orders:%07d', n)
      local id = string.format('host-%02d|pid%d|tid%d|ts1763712345678|67e55044-10b1-426f-9247-%012d', n % 20, n, n, n)
      redis.call('SET', 'lock:' .. name, id, 'PX', 3600000)
      redis.call('SET', 'distlock:fence:{lock:' .. name .. '}', 1763712345678000 + n, 'PX', 3600000)
      if n % 100 == 0 then redis.call('RPUSH', 'distlock:queue:{lock:' .. name .. '}', '1000 distlock:client:x ' .. id) end
    end";

pub(crate) fn row(scale: Scale) -> Result<Vec<Line>> {
    let (count, rounds) = scale.pick((100_000, ROUNDS), (500, 1));
    let server = RedisServer::start();
    for first in (1..=count).step_by(1_000) {
        let (first, last) = (first.to_string(), count.min(first + 999).to_string());
        server.cli(&["EVAL", FILL, "0", &first, &last]);
    }
    let mgr = RedisMgr::new(Config::new(server.url()).operation_timeout(Duration::from_secs(20)))?;
    let (mut longest, mut raw, mut usual, mut took, mut calls) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        // Most of what scripts call takes less, and would fill the log.
        watch(&server, 50);
        let started = now();
        let locks = mgr.locks("*")?;
        took.push((now() - started).as_secs_f64());
        if locks.len() != count {
            return Err(format!("{} of {count} locks were listed", locks.len()).into());
        }
        let times = watched(&server, &["SCAN", "EVAL", "EVALSHA"])?;
        calls = times.len();
        longest.push(times.iter().copied().fold(0.0, f64::max));
        let one = median(times);
        usual.push(one);
        raw.push(longest_of_idle(&server, &mgr, calls, one)?);
    }
    let time = |seconds: Vec<f64>| -> Quantity { micros(Duration::from_secs_f64(median(seconds))) };
    Ok(vec![
        Line::new("100,000 locks listed: longest command at the server", time(longest))
            .beside(time(raw), "longest of as many scripts that count for as long")
            .at_most(5_000.0),
        Line::new("... a command at the server, p50", time(usual)),
        Line::new("... commands sent that took more than 50 µs", number(calls as f64)),
        Line::new("... all of it", time(took)),
    ])
}

/// What the machine itself does to the longest of so many commands that take so long: these only count.
fn longest_of_idle(server: &RedisServer, mgr: &RedisMgr, calls: usize, each: f64) -> Result<f64> {
    const COUNT: &str = "local n = 0 for i = 1, ARGV[1] do n = n + i end return n";
    const TRIAL: f64 = 100_000.0;
    let mut connection = mgr.connection()?;
    let mut count = |turns: f64, calls: usize| -> Result<Vec<f64>> {
        watch(server, 0);
        for _ in 0..calls {
            let _: u64 = redis::cmd("EVAL").arg(COUNT).arg(0).arg(turns.round() as u64).query(&mut connection)?;
        }
        watched(server, &["EVAL"])
    };
    let trial = median(count(TRIAL, 20)?);
    Ok(count(TRIAL * each / trial, calls)?.into_iter().fold(0.0, f64::max))
}

/// From here on the server notes how long each command keeps it that takes at least so many microseconds.
fn watch(server: &RedisServer, micros: u32) {
    server.config_set("slowlog-max-len", "100000");
    server.config_set("slowlog-log-slower-than", &micros.to_string());
    server.query::<()>(&["SLOWLOG", "RESET"]);
}

/// How long these commands took, in seconds.
fn watched(server: &RedisServer, commands: &[&str]) -> Result<Vec<f64>> {
    server.config_set("slowlog-log-slower-than", "-1");
    let entries: Vec<Vec<redis::Value>> = server.query(&["SLOWLOG", "GET", "100000"]);
    let mut times = Vec::with_capacity(entries.len());
    for entry in entries {
        let [_, _, redis::Value::Int(took), redis::Value::Array(words), ..] = entry.as_slice() else {
            return Err("the slow log has another form".into());
        };
        let is_asked = |name: &[u8]| commands.iter().any(|command| command.as_bytes() == name);
        if matches!(words.first(), Some(redis::Value::BulkString(name)) if is_asked(name)) {
            times.push(*took as f64 / 1e6);
        }
    }
    Ok(times)
}
