//! Many locks held for a while: whether any is lost, and what keeping them costs.

use std::{thread, time::Duration};

use distlock::{LockGuard, LockOptions, RedisMgr};

use crate::{
    Result, Scale,
    cluster::{self, Cluster},
    measure::{cpu_of, cpu_of_process, cpu_of_thread, now, pause, thread_cpu},
    raw::Raw,
    report::{Line, number, of_a_core},
    support::{RedisServer, Worker, WorkerSide},
};

pub(crate) const ROLE: &str = "keeper";

const RENEWER: &str = "distlock-renewer";
/// Threads that take the locks in the first place.
const TAKERS: usize = 4;
/// What a client without the library would reasonably send at once.
const RAW_BATCH: usize = 100;

struct Keep {
    /// The last of several is stopped once the locks are held.
    nodes: usize,
    count: usize,
    ttl: Duration,
    time: Duration,
}

pub(crate) fn row(scale: Scale) -> Result<Vec<Line>> {
    let seconds = Duration::from_secs;
    let brief = Keep { nodes: 1, count: 40, ttl: Duration::from_millis(300), time: Duration::from_millis(300) };
    let (cpu, mut lines) =
        scale.pick(Keep { nodes: 1, count: 10_000, ttl: seconds(3), time: seconds(30) }, brief).run()?;
    lines.insert(1, cpu.below(10.0));
    if let Scale::Full = scale {
        let (cpu, more) = Keep { nodes: 1, count: 100_000, ttl: seconds(30), time: seconds(60) }.run()?;
        lines.extend(more);
        lines.push(cpu);
    }
    Ok(lines)
}

/// The same over five nodes, one of which is stopped once the locks are held.
pub(crate) fn redlock(scale: Scale) -> Result<Vec<Line>> {
    let (ttl, time) = (Duration::from_secs(3), Duration::from_secs(30));
    let brief = Keep { nodes: 3, count: 40, ttl: Duration::from_millis(600), time: Duration::from_millis(600) };
    let (cpu, mut lines) = scale.pick(Keep { nodes: 5, count: 1_000, ttl, time }, brief).run()?;
    lines.insert(1, cpu);
    Ok(lines)
}

impl Keep {
    /// The line about the renewer's processor time, and the others.
    fn run(&self) -> Result<(Line, Vec<Line>)> {
        let cluster = Cluster::start(self.nodes);
        let server = &cluster.servers[0];
        let args =
            [("urls", cluster.urls()), ("count", self.count.to_string()), ("ttl_ms", self.ttl.as_millis().to_string())];
        let mut worker = Worker::spawn(ROLE, &args.each_ref().map(|(key, value)| (*key, value.as_str())));
        worker.expect("held");
        let stopped = &cluster.servers[1..].last();
        stopped.iter().for_each(|server| server.stop());

        let pid = worker.pid();
        let state = || {
            let cpus = (cpu_of_thread(pid, RENEWER)?, cpu_of_process(pid)?, cpu_of(server.pid())?);
            Ok::<_, Box<dyn std::error::Error>>((cpus, server.commands_processed()))
        };
        let started = now();
        let ((renewer, process, server_cpu), commands) = state()?;
        pause(self.time);
        let (elapsed, (cpus, commands_after)) = (now() - started, state()?);
        let (renewer, process, server_cpu) = (cpus.0 - renewer, cpus.1 - process, cpus.2 - server_cpu);

        worker.send("check");
        let report = worker.expect("lost");
        let (lost, least_left) = report.split_once(' ').ok_or("the report is too short")?;
        let (lost, least_left): (u32, f64) = (lost.parse()?, least_left.parse()?);
        if lost > 0 {
            eprintln!("{}", worker.transcript());
        }
        drop(worker);
        stopped.iter().for_each(|server| server.cont());

        let whereabouts =
            if stopped.is_some() { format!(" on {} nodes, one stopped", self.nodes) } else { String::new() };
        let what = format!("{} of TTL {:?} held for {:?}{whereabouts}", self.count, self.ttl, self.time);
        let cpu =
            Line::new(format!("  processor time of the renewer, {} locks", self.count), of_a_core(renewer, elapsed))
                .beside(of_a_core(self.raw_cpu(server)?, self.ttl / 3), "PEXPIRE in batches of 100");
        let renewals = self.count as f64 * elapsed.as_secs_f64() / (self.ttl / 3).as_secs_f64();
        let lines = vec![
            Line::new(format!("locks lost, {what}"), number(lost.into())).at_most(0.0),
            Line::new("  least part of a TTL that any lock had left", number(least_left / self.ttl.as_secs_f64())),
            Line::new("  processor time of the process", of_a_core(process, elapsed)),
            Line::new("  processor time of the server, or the first of them", of_a_core(server_cpu, elapsed)),
            Line::new(
                "  commands there, per lock and a third of its TTL",
                number((commands_after - commands) as f64 / renewals),
            ),
        ];
        Ok((cpu, lines))
    }

    /// The processor time of a thread that pushes out as many keys once, without asking whose they are.
    fn raw_cpu(&self, server: &RedisServer) -> Result<Duration> {
        let mut raw = Raw::connect(&server.url())?;
        let keys: Vec<String> = (0..self.count).map(|number| format!("raw:{number}")).collect();
        let px = u64::try_from(self.ttl.as_millis())?;
        for keys in keys.chunks(RAW_BATCH) {
            raw.batch(keys.iter().map(|key| redis::cmd("SET").arg(key).arg("x").arg("PX").arg(60_000).take()))?;
        }
        let before = thread_cpu();
        for keys in keys.chunks(RAW_BATCH) {
            raw.batch(keys.iter().map(|key| redis::cmd("PEXPIRE").arg(key).arg(px).take()))?;
        }
        Ok(thread_cpu() - before)
    }
}

/// Takes many locks, and tells when asked how many it still has.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let count: usize = side.arg("count").parse()?;
    let options = LockOptions::new().ttl(Duration::from_millis(side.arg("ttl_ms").parse()?));
    let mgr = RedisMgr::new(cluster::config(&side.arg("urls")))?;
    let take = |taker: usize| {
        let numbers = (taker..count).step_by(TAKERS);
        numbers.map(|number| mgr.lock_with(&format!("kept:{number}"), &options)).collect::<distlock::Result<Vec<_>>>()
    };
    let held: Result<Vec<Vec<LockGuard>>> = thread::scope(|scope| {
        let takers: Vec<_> = (0..TAKERS).map(|taker| scope.spawn(move || take(taker))).collect();
        takers.into_iter().map(|taker| Ok(taker.join().map_err(|_| "a taker panicked")??)).collect()
    });
    let held: Vec<LockGuard> = held?.into_iter().flatten().collect();
    side.say("held");
    side.hear().ok_or("nobody asked")?;
    let complaints: Vec<_> = held.iter().filter_map(|guard| guard.ensure_held().err()).collect();
    complaints.iter().for_each(|complaint| eprintln!("{complaint}"));
    let lost = complaints.len();
    let least_left = held.iter().map(LockGuard::remaining).min().unwrap_or_default();
    side.say(format!("lost {lost} {}", least_left.as_secs_f64()));
    // Releasing them one by one would take longer than being killed, which is what comes next.
    side.hear();
    Ok(())
}
