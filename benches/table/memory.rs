//! How much memory a held lock takes, in a process that does nothing else.

use std::time::Duration;

use distlock::{Config, LockGuard, RedisMgr, generate_lock_id};

use crate::{
    Result, Scale,
    measure::{own_memory, pause},
    report::{Line, bytes},
    support::{RedisServer, Worker, WorkerSide},
};

pub(crate) const ROLE: &str = "hoarder";

/// Long enough for each lock to have been renewed at least once, which needs memory too.
const TTL: Duration = Duration::from_secs(10);

pub(crate) fn row(scale: Scale) -> Result<Vec<Line>> {
    let (count, pause) = scale.pick((100_000, TTL / 2), (100, Duration::ZERO));
    let server = RedisServer::start();
    let args = [("url", server.url()), ("count", count.to_string()), ("pause_ms", pause.as_millis().to_string())];
    let worker = Worker::spawn(ROLE, &args.each_ref().map(|(key, value)| (*key, value.as_str())));
    let report = worker.expect("memory");
    let (raw, ours) = report.split_once(' ').ok_or("the report is too short")?;
    let (raw, ours): (f64, f64) = (raw.parse()?, ours.parse()?);
    let each = |total: f64| bytes((total / f64::from(count)).round());
    Ok(vec![
        Line::new("memory per held lock, of 100,000", each(ours))
            .beside(each(raw), "name and id as strings")
            .below(1024.0),
    ])
}

/// Takes many locks, and tells by how much that made it grow.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let count: usize = side.arg("count").parse()?;
    let settle = Duration::from_millis(side.arg("pause_ms").parse()?);
    let mgr = RedisMgr::new(Config::new(side.arg("url")).ttl(TTL))?;
    let name = |number: usize| format!("hoarded:{number}");
    // Connections, threads and buffers are not the locks'.
    for number in 0..count.min(1_000) {
        drop(mgr.lock(&name(number))?);
    }
    let at_first = own_memory()?;
    let raw: Vec<(String, String)> = (0..count).map(|number| (name(number), generate_lock_id().to_string())).collect();
    let with_raw = own_memory()?;
    let held = (0..count).map(|number| mgr.lock(&name(number))).collect::<distlock::Result<Vec<LockGuard>>>()?;
    pause(settle);
    let with_locks = own_memory()?;
    if let Some(lost) = held.iter().find(|guard| !guard.is_held()) {
        return Err(format!("{} was lost", lost.name()).into());
    }
    side.say(format!("memory {} {}", with_raw - at_first, with_locks - with_raw));
    // Releasing them one by one would take longer than being killed, which is what comes next.
    side.hear();
    drop(raw);
    Ok(())
}
