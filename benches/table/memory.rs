//! The memory that a held lock takes.

use std::time::Duration;

use distlock::{Config, LockGuard, RedisMgr, generate_lock_id};

use crate::{
    Result, Scale,
    measure::{pause, resident_memory},
    report::{Figure, bytes},
    support::{RedisServer, Worker, WorkerSide},
};

pub(crate) const ROLE: &str = "memory";

/// Each lock is renewed at least once within half of this, because renewing needs memory too.
const TTL: Duration = Duration::from_secs(10);

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let (count, pause) = scale.pick((100_000, TTL / 2), (100, Duration::ZERO));
    let server = RedisServer::start();
    let args = [
        ("url", server.url()),
        ("count", count.to_string()),
        ("pause_ms", pause.as_millis().to_string()),
    ];
    let worker = Worker::spawn(ROLE, &args.each_ref().map(|(key, value)| (*key, value.as_str())));
    let report = worker.expect("memory");
    let (raw, ours) = report.split_once(' ').ok_or("the report is too short")?;
    let (raw, ours): (f64, f64) = (raw.parse()?, ours.parse()?);
    let each = |total: f64| bytes((total / f64::from(count)).round());
    Ok(vec![
        Figure::new("memory per held lock, of 100,000", each(ours))
            .compare(each(raw), "name and id as strings")
            .below(1024.0),
    ])
}

/// Acquires many locks and reports by how much the process grew.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let count: usize = side.arg("count").parse()?;
    let settle = Duration::from_millis(side.arg("pause_ms").parse()?);
    let mgr = RedisMgr::new(Config::new(side.arg("url")).ttl(TTL))?;
    let name = |number: usize| format!("holding:{number}");
    // Creates connections, threads and buffers, which do not belong to the locks.
    for number in 0..count.min(1_000) {
        drop(mgr.lock(&name(number))?);
    }
    let at_first = resident_memory()?;
    let raw: Vec<(String, String)> =
        (0..count).map(|number| (name(number), generate_lock_id().to_string())).collect();
    let with_raw = resident_memory()?;
    let held = (0..count)
        .map(|number| mgr.lock(&name(number)))
        .collect::<distlock::Result<Vec<LockGuard>>>()?;
    pause(settle);
    let with_locks = resident_memory()?;
    if let Some(lost) = held.iter().find(|guard| !guard.is_held()) {
        return Err(format!("{} was lost", lost.name()).into());
    }
    side.say(format!("memory {} {}", with_raw - at_first, with_locks - with_raw));
    // Waits to be killed, which is faster than releasing the locks one by one.
    side.hear();
    drop(raw);
    Ok(())
}
