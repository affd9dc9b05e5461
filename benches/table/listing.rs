//! How long listing many locks blocks a server, as measured by the server.

use std::time::Duration;

use distlock::{Config, RedisMgr};

use crate::{
    Result, Scale,
    measure::{median, now},
    report::{Figure, Quantity, micros, number},
    support::RedisServer,
};

const ROUNDS: usize = 5;

/// Creates locks with ids and tokens like those of the library. One lock in a hundred has a waiter.
const FILL: &str = "
    for n = ARGV[1], ARGV[2] do
      local name = string.format('orders:%07d', n)
      local format = 'host-%02d|pid%d|tid%d|ts1763712345678|67e55044-10b1-426f-9247-%012d'
      local id = string.format(format, n % 20, n, n, n)
      redis.call('SET', 'lock:' .. name, id, 'PX', 3600000)
      redis.call('SET', 'distlock:token:{lock:' .. name .. '}', 1763712345678000 + n, 'PX', 3600000)
      if n % 100 == 0 then
        local queue = 'distlock:queue:{lock:' .. name .. '}'
        redis.call('RPUSH', queue, '1000 distlock:client:x ' .. id)
      end
    end";

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let (count, rounds) = scale.pick((100_000, ROUNDS), (500, 1));
    let server = RedisServer::start();
    for first in (1..=count).step_by(1_000) {
        let (first, last) = (first.to_string(), count.min(first + 999).to_string());
        server.cli(&["EVAL", FILL, "0", &first, &last]);
    }
    let mgr = RedisMgr::new(Config::new(server.url()).operation_timeout(Duration::from_secs(20)))?;
    let (mut longest, mut raw, mut typical, mut took, mut calls) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        // Commands inside scripts mostly take less. They would fill the log.
        start_log(&server, 50);
        let started = now();
        let locks = mgr.locks("*")?;
        took.push((now() - started).as_secs_f64());
        if locks.len() != count {
            return Err(format!("{} of {count} locks were listed", locks.len()).into());
        }
        let times = read_log(&server, &["SCAN", "EVAL", "EVALSHA"])?;
        calls = times.len();
        longest.push(times.iter().copied().fold(0.0, f64::max));
        let one = median(times);
        typical.push(one);
        raw.push(longest_of_counting(&server, &mgr, calls, one)?);
    }
    let time = |seconds: Vec<f64>| -> Quantity { micros(Duration::from_secs_f64(median(seconds))) };
    Ok(vec![
        Figure::new("100,000 locks listed: longest command at the server", time(longest))
            .compare(time(raw), "longest of as many scripts that only count")
            .at_most(5_000.0),
        Figure::new("  command at the server, p50", time(typical)),
        Figure::new("  commands that took more than 50 µs", number(calls as f64)),
        Figure::new("  the whole call", time(took)),
    ])
}

/// The longest of as many scripts that usually take as long and only count. It shows what the
/// machine itself adds to the longest command.
fn longest_of_counting(
    server: &RedisServer,
    mgr: &RedisMgr,
    calls: usize,
    each: f64,
) -> Result<f64> {
    const COUNT: &str = "local n = 0 for i = 1, ARGV[1] do n = n + i end return n";
    const TRIAL: f64 = 100_000.0;
    let mut connection = mgr.connection()?;
    let mut count = |iterations: f64, calls: usize| -> Result<Vec<f64>> {
        start_log(server, 0);
        for _ in 0..calls {
            let _: u64 = redis::cmd("EVAL")
                .arg(COUNT)
                .arg(0)
                .arg(iterations.round() as u64)
                .query(&mut connection)?;
        }
        read_log(server, &["EVAL"])
    };
    let trial = median(count(TRIAL, 20)?);
    Ok(count(TRIAL * each / trial, calls)?.into_iter().fold(0.0, f64::max))
}

/// Makes the server log all commands that take at least this many microseconds.
fn start_log(server: &RedisServer, micros: u32) {
    server.config_set("slowlog-max-len", "100000");
    server.config_set("slowlog-log-slower-than", &micros.to_string());
    server.query::<()>(&["SLOWLOG", "RESET"]);
}

/// The durations of these commands in the log, in seconds.
fn read_log(server: &RedisServer, commands: &[&str]) -> Result<Vec<f64>> {
    server.config_set("slowlog-log-slower-than", "-1");
    let entries: Vec<Vec<redis::Value>> = server.query(&["SLOWLOG", "GET", "100000"]);
    let mut times = Vec::with_capacity(entries.len());
    for entry in entries {
        let [_, _, redis::Value::Int(took), redis::Value::Array(words), ..] = entry.as_slice()
        else {
            return Err("unexpected format of the slow log".into());
        };
        let is_selected = |name: &[u8]| commands.iter().any(|command| command.as_bytes() == name);
        if matches!(words.first(), Some(redis::Value::BulkString(name)) if is_selected(name)) {
            times.push(*took as f64 / 1e6);
        }
    }
    Ok(times)
}
