//! How many locks a cluster can serve with 1, 3 and 5 masters: counted in processor time of its
//! busiest master, because the masters share the cores of this machine.

use std::thread;

use distlock::{Config, RedisMgr};

use crate::{
    Result, Scale,
    measure::cpu_of_process,
    report::{Figure, per_second},
    support::{Cluster, RedisServer},
};

const THREADS: usize = 4;
/// Names whose slots are spread over the masters.
const NAMES: usize = 240;

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let rounds = scale.pick(40, 1);
    let single = {
        let server = RedisServer::start();
        locks_in_server_time(&server.url(), &[&server], rounds)?
    };
    let mut figures = Vec::new();
    for masters in [1, 3, 5] {
        let cluster = Cluster::start(masters);
        let nodes: Vec<_> = cluster.nodes.iter().collect();
        let (count, cpu) = locks_in_server_time(&cluster.url(), &nodes, rounds)?;
        let figure = Figure::new(
            format!("locks in a second of the busiest of {masters} masters"),
            per_second(count, cpu),
        );
        figures.push(figure.compare(per_second(single.0, single.1), "a single server"));
    }
    Ok(figures)
}

/// Returns the number of locks, and the processor time of the server that used most.
fn locks_in_server_time(
    url: &str,
    servers: &[&RedisServer],
    rounds: usize,
) -> Result<(f64, std::time::Duration)> {
    let mgr = RedisMgr::new(Config::new(url))?;
    // Connects to all masters.
    lock_all(&mgr, 0)?;
    let before = servers.iter().map(|server| cpu_of_process(server.pid()));
    let before = before.collect::<Result<Vec<_>>>()?;
    thread::scope(|threads| {
        let lock = |number| {
            let mgr = &mgr;
            threads.spawn(move || {
                let done = (0..rounds).try_for_each(|_| lock_all(mgr, number));
                done.map_err(|error| error.to_string())
            })
        };
        let running: Vec<_> = (0..THREADS).map(lock).collect();
        running.into_iter().try_for_each(|thread| thread.join().map_err(|_| "it panicked")?)
    })?;
    let mut busiest = std::time::Duration::ZERO;
    for (server, before) in servers.iter().zip(before) {
        busiest = busiest.max(cpu_of_process(server.pid())?.saturating_sub(before));
    }
    Ok(((THREADS * rounds * NAMES) as f64, busiest))
}

/// Each thread has names of its own.
fn lock_all(mgr: &RedisMgr, thread: usize) -> distlock::Result<()> {
    for name in 0..NAMES {
        drop(mgr.lock(&format!("{thread}:{name}"))?);
    }
    Ok(())
}
