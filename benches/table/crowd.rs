//! Thousands of threads of one process that compete for a few locks, while other threads keep the
//! cores busy.

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{Config, LockError, RedisMgr};

use crate::{
    Result, Scale,
    measure::{now, pause},
    report::{Figure, number, per_second},
    support::RedisServer,
};

const LOCKS: usize = 10;
const BUSY_THREADS: usize = 4;

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let (threads, window) =
        scale.pick((10_000, Duration::from_secs(7)), (20, Duration::from_millis(50)));
    let server = RedisServer::start();
    let mgr = RedisMgr::new(Config::new(server.url()))?;
    let (locked, busy) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let rate = |window| {
        let (before, began) = (locked.load(Ordering::Relaxed), now());
        pause(window);
        (locked.load(Ordering::Relaxed) - before) as f64 / (now() - began).as_secs_f64()
    };
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for number in 0..threads {
            let (mgr, locked) = (&mgr, &locked);
            let name = format!("crowd:{}", number % LOCKS);
            let work = move || loop {
                match mgr.lock(&name).and_then(|guard| guard.release()) {
                    Ok(_) => locked.fetch_add(1, Ordering::Relaxed),
                    Err(LockError::Shutdown) => return Ok(()),
                    // Tried again in the background.
                    Err(error) if error.is_unavailable() || error.is_lost() => 0,
                    Err(error) => return Err(error),
                };
            };
            workers.push(thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, work)?);
        }
        pause(window / 2);
        let quiet = rate(window);
        busy.store(true, Ordering::Relaxed);
        let burning: Vec<_> = (0..BUSY_THREADS)
            .map(|_| {
                let busy = busy.clone();
                scope.spawn(move || {
                    while busy.load(Ordering::Relaxed) {
                        black_box((0..black_box(10_000_u64)).sum::<u64>());
                    }
                })
            })
            .collect();
        let loaded = rate(window);
        busy.store(false, Ordering::Relaxed);
        burning.into_iter().for_each(|thread| drop(thread.join()));
        pause(scale.pick(Duration::from_secs(1), Duration::ZERO));
        let after = rate(window);
        mgr.shutdown();
        for worker in workers {
            worker.join().map_err(|_| "a thread panicked")??;
        }
        Ok(vec![
            Figure::new(
                "locks, 10,000 threads for 10 locks",
                per_second(quiet, Duration::from_secs(1)),
            ),
            Figure::new("  share of that while 4 threads burn the cores", number(loaded / quiet))
                .at_least(0.5),
            Figure::new("  share of it from a second after the load on", number(after / quiet))
                .at_least(0.9),
        ])
    })
}
