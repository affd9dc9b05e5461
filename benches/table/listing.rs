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
    let (mut longest, mut raw, mut took, mut calls) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        watch(&server);
        let started = now();
        let locks = mgr.locks("*")?;
        took.push((now() - started).as_secs_f64());
        if locks.len() != count {
            return Err(format!("{} of {count} locks were listed", locks.len()).into());
        }
        let times = watched(&server)?;
        calls = times.len();
        longest.push(times.into_iter().fold(0.0, f64::max));
        // What the machine itself does to the longest of so many commands, each of which takes a microsecond.
        watch(&server);
        let mut connection = mgr.connection()?;
        for _ in 0..calls {
            let _: Option<String> = redis::cmd("GET").arg("nothing").query(&mut connection)?;
        }
        drop(connection);
        raw.push(watched(&server)?.into_iter().fold(0.0, f64::max));
    }
    let time = |seconds: Vec<f64>| -> Quantity { micros(Duration::from_secs_f64(median(seconds))) };
    Ok(vec![
        Line::new("100,000 locks listed: longest command at the server", time(longest))
            .beside(time(raw), "longest of as many GET")
            .at_most(5_000.0),
        Line::new("... commands sent", number(calls as f64)),
        Line::new("... all of it", time(took)),
    ])
}

/// From here on the server notes how long each command keeps it.
fn watch(server: &RedisServer) {
    server.config_set("slowlog-max-len", "100000");
    server.config_set("slowlog-log-slower-than", "0");
    server.query::<()>(&["SLOWLOG", "RESET"]);
}

/// In seconds, without those that watch.
fn watched(server: &RedisServer) -> Result<Vec<f64>> {
    server.config_set("slowlog-log-slower-than", "-1");
    let entries: Vec<Vec<redis::Value>> = server.query(&["SLOWLOG", "GET", "100000"]);
    let mut times = Vec::with_capacity(entries.len());
    for entry in entries {
        let [_, _, redis::Value::Int(took), redis::Value::Array(words), ..] = entry.as_slice() else {
            return Err("the slow log has another form".into());
        };
        let is_ours = |name: &[u8]| !matches!(name, b"CONFIG" | b"SLOWLOG" | b"TIME");
        if matches!(words.first(), Some(redis::Value::BulkString(name)) if is_ours(name)) {
            times.push(*took as f64 / 1e6);
        }
    }
    Ok(times)
}
