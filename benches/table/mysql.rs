//! Locks in MariaDB, compared with the same statements without the library.

use std::{sync::Barrier, thread, time::Duration};

use distlock::{LockError, LockGuard, MySqlConfig, MySqlMgr};

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    contention::Crowd,
    measure::{Placement, Times, cpu_of_process, median, now, pause},
    raw_mysql::Raw,
    renewal,
    report::{Figure, micros, number, share_of_core},
    support::{MySqlServer, TEST_TIMEOUT, Worker, WorkerSide, eventually},
};

pub(crate) const ROLE: &str = "database-holder";

/// A server with the table of the locks. `flushes` says whether each commit waits for the disk,
/// which is the default of a server, and which hides what anything else costs.
fn start(max_connections: u32, flushes: bool) -> Result<MySqlServer> {
    let server = MySqlServer::builder()
        .arg(format!("--max-connections={max_connections}"))
        .arg(format!("--innodb-flush-log-at-trx-commit={}", u8::from(flushes)))
        .start();
    manager(&server)?.create_table()?;
    Ok(server)
}

fn manager(server: &MySqlServer) -> Result<MySqlMgr> {
    Ok(MySqlMgr::new(MySqlConfig::new(server.url()))?)
}

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let (raw, ours, query, ratios) = compare(false, scale)?;
    let mut figures = vec![
        Figure::new("lock + release in MariaDB, p50", micros(ours.pair.p50()))
            .compare(micros(raw.pair.p50()), "BEGIN, FOR UPDATE; COMMIT")
            .at_most_raw_times(3.0),
        Figure::new("  lock alone, p50", micros(ours.lock.p50()))
            .compare(micros(raw.lock.p50()), "BEGIN, FOR UPDATE"),
        Figure::new("  release alone, p50", micros(ours.release.p50()))
            .compare(micros(raw.release.p50()), "COMMIT, of nothing"),
        Figure::new("  lock + release, p99", micros(ours.pair.p99()))
            .compare(micros(raw.pair.p99()), "both"),
        Figure::new("  processor time of the process, mean", micros(ours.cpu_per_pair()))
            .compare(micros(raw.cpu_per_pair()), "both"),
        Figure::new("  compared with a query", micros(ours.pair.p50()))
            .compare(micros(query.p50()), "SELECT 1"),
        Figure::new("  median ratio of adjacent blocks", number(median(ratios))),
    ];
    let (raw, ours, ..) = compare(true, scale)?;
    figures.push(
        Figure::new("  where each commit waits for the disk, p50", micros(ours.pair.p50()))
            .compare(micros(raw.pair.p50()), "the same with an UPDATE"),
    );
    Ok(figures)
}

type Comparison = (Totals, Totals, Times, Vec<f64>);

/// Measures the raw statements, the library, and the smallest query, in turns.
fn compare(flushes: bool, scale: Scale) -> Result<Comparison> {
    let server = start(100, flushes)?;
    let (min_pairs, min_time) =
        scale.pick((20_000, Duration::from_secs(10)), (BLOCK as u64, Duration::ZERO));
    // The connections must be opened afterwards: only their threads are on the server's core.
    let pinned = Placement::different_cores(&[server.pid()])?;
    let (mgr, mut connection) = (manager(&server)?, Raw::connect(&server.url())?);
    drop(mgr.lock("ours")?);
    let (mut raw, mut ours, mut query) = (Totals::new(), Totals::new(), Times::new());
    let mut ratios = Vec::new();
    let until = now() + min_time;
    while ours.pair.len() == 0 || (ours.pair.len() < min_pairs && now() < until) {
        // Only a change makes a commit wait.
        let raw_p50 = raw.block(|| connection.run(flushes))?;
        ratios.push(ours.block(|| lock_and_release(&mgr))? / raw_p50);
        for _ in 0..BLOCK {
            query.add(connection.select_1()?);
        }
    }
    drop(pinned);
    Ok((raw, ours, query, ratios))
}

/// The time of a renewal, from the request until the lease is extended.
pub(crate) fn renew(scale: Scale) -> Result<Vec<Figure>> {
    // The locks are acquired one after another, and so renewed one by one.
    let (locks, rounds) = scale.pick((20, 15), (2, 10));
    let server = start(100, true)?;
    let config = MySqlConfig::new(server.url()).ttl(Duration::from_secs(2));
    let (mgr, mut raw) = (MySqlMgr::new(config)?, Raw::connect(&server.url())?);
    let (mut held, mut query) = (Vec::new(), Times::new());
    for number in 0..rounds * locks {
        if number < locks {
            held.push(mgr.lock(&format!("renewed-{number}"))?);
        }
        // As rare as the renewals, because a thread that has slept is slower.
        pause(Duration::from_millis(33));
        query.add(raw.select_1()?);
    }
    held.iter().try_for_each(LockGuard::ensure_held)?;
    let metrics = mgr.metrics();
    Ok(vec![
        Figure::new("renewal in MariaDB, p50", micros(metrics.renewal().quantile(0.5)))
            .compare(micros(query.p50()), "SELECT 1")
            .at_most_raw_times(2.0),
        Figure::new("  number of renewals", number(metrics.renewals() as f64)),
    ])
}

/// Processes that compete for one lock.
pub(crate) fn contended(scale: Scale) -> Result<Vec<Figure>> {
    let server = start(100, false)?;
    let crowd = Crowd {
        processes: scale.pick(8, 3),
        window: scale.pick(Duration::from_secs(5), Duration::from_millis(100)),
        warm_up: scale.pick(Duration::from_secs(1), Duration::from_millis(20)),
    };
    let raw = crowd.run(&server.url(), true)?;
    let ours = crowd.run(&server.url(), false)?;
    Ok(vec![
        Figure::new("release to next holder, 8 processes, p50", micros(ours.handoff.p50()))
            .compare(micros(raw.handoff.p50()), "COMMIT to next FOR UPDATE")
            .at_most_raw_times(2.5),
        Figure::new("  release to next holder, p99", micros(ours.handoff.p99()))
            .compare(micros(raw.handoff.p99()), "the same"),
        Figure::new("  fewest/most locks per process", number(ours.fewest / ours.most))
            .compare(number(raw.fewest / raw.most), "the same")
            .at_least(0.95),
        Figure::new("  locks in the window", number(ours.locks))
            .compare(number(raw.locks), "the same"),
        Figure::new("  locks lost before they were released", number(ours.lost)),
    ])
}

/// How late a limited wait ends.
pub(crate) fn timeout(scale: Scale) -> Result<Vec<Figure>> {
    const LIMIT: Duration = Duration::from_millis(50);
    let server = start(100, true)?;
    let (holder, waiter) = (manager(&server)?, manager(&server)?);
    let mut raw = Raw::connect(&server.url())?;
    let guard = holder.lock("ours")?;
    let (mut late, mut raw_late) = (Times::new(), Times::new());
    for _ in 0..scale.pick(100, 2) {
        let started = now();
        match waiter.try_lock_for("ours", LIMIT) {
            Err(error) if error.is_contended() => late.add((now() - started).saturating_sub(LIMIT)),
            other => return Err(format!("expected a timeout, got {other:?}").into()),
        }
        raw_late.add(raw.wait_in_vain(LIMIT)?.saturating_sub(LIMIT));
    }
    guard.ensure_held()?;
    Ok(vec![
        Figure::new("lateness of a wait of 50 ms, p50", micros(late.p50()))
            .compare(micros(raw_late.p50()), "SET STATEMENT max_statement_time")
            .at_most(2000.0),
        Figure::new("  lateness, p99", micros(late.p99()))
            .compare(micros(raw_late.p99()), "the same"),
    ])
}

/// How long a lock is not free after its holder has died, and how long until a holder notices that
/// its connection was killed.
pub(crate) fn losses(scale: Scale) -> Result<Vec<Figure>> {
    let server = start(100, true)?;
    let mgr = manager(&server)?;
    let (mut after_kill, mut noticed) = (Times::new(), Times::new());
    for _ in 0..scale.pick(50, 1) {
        let mut worker = Worker::spawn(ROLE, &[("url", server.url().as_str())]);
        worker.expect("held");
        let waiting = thread::scope(|threads| {
            let waiter = threads.spawn(|| {
                let guard = mgr.lock("ours");
                guard.map(|guard| (now(), guard))
            });
            eventually("the waiter is queued", TEST_TIMEOUT, || {
                let described = mgr.lock_info("ours").ok().flatten();
                described.is_some_and(|lock| lock.waiters().len() == 1)
            });
            let killed = now();
            worker.kill();
            let (acquired, guard) = waiter.join().map_err(|_| "a waiter panicked")??;
            drop(guard);
            Ok::<_, Box<dyn std::error::Error>>(acquired - killed)
        });
        after_kill.add(waiting?);
    }
    let mut raw = Raw::connect(&server.url())?;
    for _ in 0..scale.pick(200, 2) {
        let guard = mgr.lock("ours")?;
        let killed = now();
        raw.kill_holder("ours")?;
        guard.lost().recv_timeout(TEST_TIMEOUT)?;
        noticed.add(now() - killed);
    }
    Ok(vec![
        Figure::new("SIGKILL of the holder to the next holder, p50", micros(after_kill.p50()))
            .at_most(5000.0),
        Figure::new("  p99", micros(after_kill.p99())),
        Figure::new("KILL of the connection to lost(), p50", micros(noticed.p50())).at_most(5000.0),
        Figure::new("  p99", micros(noticed.p99())),
    ])
}

/// Holds a lock until it is killed.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let mgr = MySqlMgr::new(MySqlConfig::new(side.arg("url")))?;
    let _guard = mgr.lock("ours")?;
    side.say("held");
    side.hear();
    Ok(())
}

/// Many locks that one manager holds for a while.
pub(crate) fn held(scale: Scale) -> Result<Vec<Figure>> {
    let (count, time) =
        scale.pick((500, Duration::from_secs(60)), (20, Duration::from_millis(100)));
    let server = start(count + 20, true)?;
    let ttl = Duration::from_secs(10);
    let args = [
        ("urls", server.url()),
        ("count", count.to_string()),
        ("ttl_ms", ttl.as_millis().to_string()),
    ];
    let mut worker =
        Worker::spawn(renewal::ROLE, &args.each_ref().map(|(key, value)| (*key, value.as_str())));
    worker.expect("held");
    let (started, cpu, server_cpu) =
        (now(), cpu_of_process(worker.pid())?, cpu_of_process(server.pid())?);
    pause(time);
    let elapsed = now() - started;
    let (cpu, server_cpu) =
        (cpu_of_process(worker.pid())? - cpu, cpu_of_process(server.pid())? - server_cpu);
    worker.send("check");
    let report = worker.expect("lost");
    let (lost, _) = report.split_once(' ').ok_or("the report is too short")?;
    Ok(vec![
        Figure::new(
            format!("locks lost, {count} of TTL {ttl:?} held for {time:?}"),
            number(lost.parse()?),
        )
        .at_most(0.0),
        Figure::new("  processor time of the process", share_of_core(cpu, elapsed)).below(5.0),
        Figure::new("  processor time of the server", share_of_core(server_cpu, elapsed)),
    ])
}

/// Clients that ask for the same name at the same time, which was never used before.
pub(crate) fn absent(scale: Scale) -> Result<Vec<Figure>> {
    let (clients, rounds) = scale.pick((16, 100), (4, 3));
    let server = start(100, true)?;
    let managers: Vec<MySqlMgr> =
        (0..clients).map(|_| manager(&server)).collect::<Result<Vec<_>>>()?;
    let barrier = Barrier::new(clients);
    let started = now();
    let client = |mgr: &MySqlMgr| {
        let mut errors: Vec<LockError> = Vec::new();
        for round in 0..rounds {
            barrier.wait();
            let result = mgr.lock(&format!("round-{round}"));
            errors.extend(result.and_then(|guard| guard.release()).err());
        }
        errors
    };
    let client = &client;
    let errors: Vec<LockError> = thread::scope(|threads| {
        let running: Vec<_> =
            managers.iter().map(|mgr| threads.spawn(move || client(mgr))).collect();
        let joined = running.into_iter().map(|thread| thread.join().map_err(|_| "panicked"));
        joined.collect::<std::result::Result<Vec<_>, _>>()
    })?
    .into_iter()
    .flatten()
    .collect();
    errors.iter().take(3).for_each(|error| eprintln!("{error}"));
    Ok(vec![
        Figure::new(
            format!("errors, {clients} clients ask for {rounds} new names at once"),
            number(errors.len() as f64),
        )
        .at_most(0.0),
        Figure::new("  time for all clients, per name", micros((now() - started) / rounds)),
    ])
}
