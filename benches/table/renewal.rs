//! Many locks that are held for a while: whether any is lost, and the cost of renewing them.

use std::{thread, time::Duration};

use distlock::{LockGuard, LockOptions};

use crate::{
    Result, Scale,
    cluster::{self, Cluster},
    measure::{cpu_of, cpu_of_process, cpu_of_thread, now, pause, thread_cpu},
    raw::Raw,
    report::{Figure, number, share_of_core},
    support::{RedisServer, Worker, WorkerSide},
};

pub(crate) const ROLE: &str = "holder";

const RENEWER: [&str; 2] = ["distlock-timer", "distlock-renewer"];
/// Threads that acquire the locks.
const ACQUIRERS: usize = 4;
/// Batch size of the raw commands: what a client without the library could reasonably use.
const RAW_BATCH: usize = 100;

struct HoldTest {
    /// If there are several nodes, the last one is stopped once the locks are held.
    nodes: usize,
    count: usize,
    ttl: Duration,
    time: Duration,
}

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let seconds = Duration::from_secs;
    let brief = HoldTest {
        nodes: 1,
        count: 40,
        ttl: Duration::from_millis(300),
        time: Duration::from_millis(300),
    };
    let (cpu, mut figures) = scale
        .pick(HoldTest { nodes: 1, count: 10_000, ttl: seconds(3), time: seconds(30) }, brief)
        .run()?;
    figures.insert(1, cpu.below(10.0));
    if let Scale::Full = scale {
        let (cpu, more) =
            HoldTest { nodes: 1, count: 100_000, ttl: seconds(30), time: seconds(60) }.run()?;
        figures.extend(more);
        figures.push(cpu);
    }
    Ok(figures)
}

/// The same over five nodes, one of which is stopped once the locks are held.
pub(crate) fn redlock(scale: Scale) -> Result<Vec<Figure>> {
    let (ttl, time) = (Duration::from_secs(3), Duration::from_secs(30));
    let brief = HoldTest {
        nodes: 3,
        count: 40,
        ttl: Duration::from_millis(600),
        time: Duration::from_millis(600),
    };
    let (cpu, mut figures) =
        scale.pick(HoldTest { nodes: 5, count: 1_000, ttl, time }, brief).run()?;
    figures.insert(1, cpu);
    Ok(figures)
}

impl HoldTest {
    /// Returns the renewer's processor time and the other figures.
    fn run(&self) -> Result<(Figure, Vec<Figure>)> {
        let cluster = Cluster::start(self.nodes);
        let server = &cluster.servers[0];
        let args = [
            ("urls", cluster.urls()),
            ("count", self.count.to_string()),
            ("ttl_ms", self.ttl.as_millis().to_string()),
        ];
        let mut worker =
            Worker::spawn(ROLE, &args.each_ref().map(|(key, value)| (*key, value.as_str())));
        worker.expect("held");
        let stopped = &cluster.servers[1..].last();
        stopped.iter().for_each(|server| server.stop());

        let pid = worker.pid();
        let state = || {
            let renewer = cpu_of_thread(pid, RENEWER[0])? + cpu_of_thread(pid, RENEWER[1])?;
            let cpus = (renewer, cpu_of_process(pid)?, cpu_of(server.pid())?);
            Ok::<_, Box<dyn std::error::Error>>((cpus, server.commands_processed()))
        };
        let started = now();
        let ((renewer, process, server_cpu), commands) = state()?;
        pause(self.time);
        let (elapsed, (cpus, commands_after)) = (now() - started, state()?);
        let (renewer, process, server_cpu) =
            (cpus.0 - renewer, cpus.1 - process, cpus.2 - server_cpu);

        worker.send("check");
        let report = worker.expect("lost");
        let (lost, min_remaining) = report.split_once(' ').ok_or("the report is too short")?;
        let (lost, min_remaining): (u32, f64) = (lost.parse()?, min_remaining.parse()?);
        if lost > 0 {
            eprintln!("{}", worker.transcript());
        }
        drop(worker);
        stopped.iter().for_each(|server| server.cont());

        let location = if stopped.is_some() {
            format!(" on {} nodes, one stopped", self.nodes)
        } else {
            String::new()
        };
        let what =
            format!("{} of TTL {:?} held for {:?}{location}", self.count, self.ttl, self.time);
        let cpu = Figure::new(
            format!("  processor time of the renewer, {} locks", self.count),
            share_of_core(renewer, elapsed),
        )
        .compare(share_of_core(self.raw_cpu(server)?, self.ttl / 3), "PEXPIRE in batches of 100");
        let renewals = self.count as f64 * elapsed.as_secs_f64() / (self.ttl / 3).as_secs_f64();
        let figures = vec![
            Figure::new(format!("locks lost, {what}"), number(lost.into())).at_most(0.0),
            Figure::new(
                "  shortest remaining time of any lock, in TTLs",
                number(min_remaining / self.ttl.as_secs_f64()),
            ),
            Figure::new("  processor time of the process", share_of_core(process, elapsed)),
            Figure::new(
                "  processor time of the (first) server",
                share_of_core(server_cpu, elapsed),
            ),
            Figure::new(
                "  commands at this server, per lock and third of the TTL",
                number((commands_after - commands) as f64 / renewals),
            ),
        ];
        Ok((cpu, figures))
    }

    /// The processor time of a thread that extends as many keys once, without comparing their
    /// values.
    fn raw_cpu(&self, server: &RedisServer) -> Result<Duration> {
        let mut raw = Raw::connect(&server.url())?;
        let keys: Vec<String> = (0..self.count).map(|number| format!("raw:{number}")).collect();
        let px = u64::try_from(self.ttl.as_millis())?;
        for keys in keys.chunks(RAW_BATCH) {
            raw.batch(
                keys.iter()
                    .map(|key| redis::cmd("SET").arg(key).arg("x").arg("PX").arg(60_000).take()),
            )?;
        }
        let before = thread_cpu();
        for keys in keys.chunks(RAW_BATCH) {
            raw.batch(keys.iter().map(|key| redis::cmd("PEXPIRE").arg(key).arg(px).take()))?;
        }
        Ok(thread_cpu() - before)
    }
}

/// Acquires many locks. On request, reports how many of them are lost.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let count: usize = side.arg("count").parse()?;
    let options = LockOptions::new().ttl(Duration::from_millis(side.arg("ttl_ms").parse()?));
    let mgr = cluster::manager(&side.arg("urls"), count)?;
    let mgr = &*mgr;
    let acquire = |first: usize| {
        let numbers = (first..count).step_by(ACQUIRERS);
        numbers
            .map(|number| mgr.lock_with(&format!("held:{number}"), &options))
            .collect::<distlock::Result<Vec<_>>>()
    };
    let held: Result<Vec<Vec<LockGuard>>> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..ACQUIRERS).map(|first| scope.spawn(move || acquire(first))).collect();
        threads
            .into_iter()
            .map(|thread| Ok(thread.join().map_err(|_| "a thread panicked")??))
            .collect()
    });
    let held: Vec<LockGuard> = held?.into_iter().flatten().collect();
    side.say("held");
    side.hear().ok_or("the request for a report is missing")?;
    let errors: Vec<_> = held.iter().filter_map(|guard| guard.ensure_held().err()).collect();
    errors.iter().for_each(|error| eprintln!("{error}"));
    let lost = errors.len();
    let min_remaining = held.iter().map(LockGuard::remaining).min().unwrap_or_default();
    side.say(format!("lost {lost} {}", min_remaining.as_secs_f64()));
    // Waits to be killed, which is faster than releasing the locks one by one.
    side.hear();
    Ok(())
}
