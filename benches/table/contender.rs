//! A contender: a process whose threads compete for one lock.

use std::{fs, sync::Mutex, thread, time::Duration};

use distlock::{LockManager, RedisMgr, Released};

use crate::{
    Result, cluster,
    holds::write_down,
    measure::{now, pause},
    raw::Raw,
    raw_mysql,
    support::WorkerSide,
};

pub(crate) const ROLE: &str = "contender";

/// Acquires and releases the lock until the given time, then writes down its holds.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let threads: usize = side.arg("threads").parse()?;
    let hold = Duration::from_micros(side.arg("hold_us").parse()?);
    let urls = side.arg("urls");
    let mgr: Box<dyn LockManager> = if side.try_arg("at_servers").is_some() {
        Box::new(RedisMgr::new(cluster::config(&urls).local_handover(Duration::ZERO))?)
    } else {
        cluster::manager(&urls, threads)?
    };
    mgr.ping()?;
    side.say("ready");
    let until = Duration::from_nanos(side.hear().ok_or("the time to stop is missing")?.parse()?);
    let records = Mutex::new(String::new());
    let (is_raw, polls) = (side.try_arg("raw").is_some(), side.try_arg("polls").is_some());
    let done: Result<Vec<()>> = thread::scope(|scope| {
        let contend = || {
            let done = if is_raw {
                contend_raw(&urls, until, &records)
            } else if polls {
                contend_polling(&urls, hold, until, &records)
            } else {
                contend(&*mgr, hold, until, &records)
            };
            done.map_err(|error| error.to_string())
        };
        let contenders: Vec<_> = (0..threads).map(|_| scope.spawn(contend)).collect();
        contenders
            .into_iter()
            .map(|contender| Ok(contender.join().map_err(|_| "a contender panicked")??))
            .collect()
    });
    done?;
    fs::write(side.arg("out"), records.into_inner()?)?;
    side.say("done");
    Ok(())
}

fn contend(
    mgr: &dyn LockManager,
    hold: Duration,
    until: Duration,
    records: &Mutex<String>,
) -> Result<()> {
    let mut holds = Vec::new();
    while now() < until {
        let started = now();
        let guard = mgr.lock("contended")?;
        let acquired = now();
        if !hold.is_zero() {
            pause(hold);
        }
        let token = guard.fencing_token();
        let released = now();
        let was_held = guard.is_held();
        // On a busy machine the lock may have been lost. The row reports that.
        let _: Released = guard.release()?;
        holds.push((token.as_u64(), acquired, released, acquired - started, was_held));
    }
    write_down(holds, records)
}

/// The same with `SET NX PX` each millisecond. Such locks have no tokens; the time of the
/// acquisition has the same order.
fn contend_polling(
    url: &str,
    hold: Duration,
    until: Duration,
    records: &Mutex<String>,
) -> Result<()> {
    let mut raw = Raw::connect(url)?;
    let mut holds = Vec::new();
    while now() < until {
        let pair = raw.pair("lock:polled");
        let started = now();
        raw.poll(&pair)?;
        let acquired = now();
        if !hold.is_zero() {
            pause(hold);
        }
        let released = now();
        raw.release(&pair)?;
        let token = u64::try_from(acquired.as_nanos())?;
        holds.push((token, acquired, released, acquired - started, true));
    }
    write_down(holds, records)
}

/// The same with the statements of a database alone. They have no tokens; the time of the
/// acquisition has the same order.
fn contend_raw(url: &str, until: Duration, records: &Mutex<String>) -> Result<()> {
    let mut raw = raw_mysql::Raw::connect(url)?;
    let mut holds = Vec::new();
    while now() < until {
        let started = now();
        raw.acquire()?;
        let acquired = now();
        let released = now();
        raw.release()?;
        let token = u64::try_from(acquired.as_nanos())?;
        holds.push((token, acquired, released, acquired - started, true));
    }
    write_down(holds, records)
}
