//! Processes that compete for one lock: throughput, fairness, hand-over time, and commands per
//! lock.

use std::{path::Path, time::Duration};

use tempfile::TempDir;

use crate::{
    Result, Scale,
    cluster::Cluster,
    contender::ROLE,
    holds::{Shares, read},
    measure::{Placement, Times, cpu_of, median, now, pause, pause_until},
    raw::Raw,
    report::{Figure, micros, number, per_second, share_of_core},
    support::{RedisServer, Worker},
};

/// Time for which contenders continue after the window, so that none of them stops within it.
const EXTRA_TIME: Duration = Duration::from_millis(300);
/// Pause between two round trips that are measured under load. It keeps the pings from adding to
/// the load.
const PING_PAUSE: Duration = Duration::from_millis(10);

#[derive(Clone, Copy)]
struct Contest {
    nodes: usize,
    processes: usize,
    /// Threads in each process.
    threads: usize,
    hold: Duration,
    window: Duration,
    /// Each process names the nodes in another order.
    mixed_orders: bool,
    /// The contenders ask each millisecond, without the library.
    polls: bool,
    /// No lock passes from thread to thread without the servers.
    at_servers: bool,
    scale: Scale,
}

/// The measurements within the window.
struct Outcome {
    window: Duration,
    locks: f64,
    /// Locks that were lost before they were released.
    lost: f64,
    commands_per_lock: f64,
    scripts_per_lock: f64,
    handoff: Times,
    wait: Times,
    fewest: f64,
    most: f64,
    server_cpu: Duration,
    /// Round trips to the idle server, from another core and from the same core.
    other_core_ping: Times,
    same_core_ping: Times,
    loaded_ping: Times,
    raw_pairs: f64,
    raw_time: Duration,
}

struct Snapshot {
    at: Duration,
    commands: u64,
    scripts: u64,
    server_cpu: Duration,
}

impl Snapshot {
    /// Reads the counters of all servers.
    fn take(cluster: &Cluster) -> Result<Snapshot> {
        let servers = &cluster.servers;
        let before = now();
        let commands = servers.iter().map(RedisServer::commands_processed).sum();
        let after = now();
        let server_cpu =
            servers.iter().map(|server| cpu_of(server.pid())).sum::<Result<Duration>>()?;
        Ok(Snapshot {
            at: (before + after) / 2,
            commands,
            scripts: cluster.script_calls(),
            server_cpu,
        })
    }
}

impl Contest {
    fn new(processes: usize, scale: Scale) -> Contest {
        let window = scale.pick(Duration::from_secs(5), Duration::from_millis(100));
        let (nodes, threads, hold) = (1, 1, Duration::ZERO);
        let (mixed_orders, polls, at_servers) = (false, false, false);
        Contest { nodes, processes, threads, hold, window, mixed_orders, polls, at_servers, scale }
    }

    fn run(self) -> Result<Outcome> {
        let cluster = Cluster::start(self.nodes);
        let server = &cluster.servers[0];
        let folder = TempDir::with_prefix("distlock-bench-")?;
        let mut raw = Raw::connect(&server.url())?;
        let samples = self.scale.pick(5_000, 10);
        let (mut other_core_ping, mut same_core_ping, mut loaded_ping) =
            (Times::new(), Times::new(), Times::new());
        let placement = Placement::different_cores(&[server.pid()])?;
        raw.pings(samples, &mut other_core_ping)?;
        let raw_time = raw.run_pairs(samples)?;
        drop(placement);
        let placement = Placement::same_core(&[server.pid()])?;
        raw.pings(samples, &mut same_core_ping)?;
        drop(placement);

        let mut workers: Vec<_> = (0..self.processes)
            .map(|process| self.spawn(&cluster, folder.path(), process))
            .collect();
        workers.iter().for_each(|worker| drop(worker.expect("ready")));
        let begin = now() + self.scale.pick(Duration::from_secs(1), Duration::from_millis(20));
        let end = begin + self.window;
        let stop_at = end + EXTRA_TIME;
        workers.iter_mut().for_each(|worker| worker.send(&stop_at.as_nanos().to_string()));
        pause_until(begin);
        let first = Snapshot::take(&cluster)?;
        while now() < end {
            pause(PING_PAUSE);
            loaded_ping.add(raw.ping()?);
        }
        let last = Snapshot::take(&cluster)?;
        workers.iter().for_each(|worker| drop(worker.expect("done")));
        drop(workers);
        let placement = Placement::different_cores(&[server.pid()])?;
        raw.pings(samples, &mut other_core_ping)?;
        drop(placement);

        let Shares { locks, lost, handoff, wait, fewest, most } =
            read(folder.path(), self.processes, first.at, last.at)?;
        Ok(Outcome {
            window: last.at - first.at,
            locks,
            lost,
            // The pings are not commands of the contenders.
            commands_per_lock: (last.commands - first.commands - loaded_ping.len()) as f64 / locks,
            scripts_per_lock: (last.scripts - first.scripts) as f64 / locks,
            handoff,
            wait,
            fewest,
            most,
            server_cpu: last.server_cpu - first.server_cpu,
            other_core_ping,
            same_core_ping,
            loaded_ping,
            raw_pairs: samples as f64,
            raw_time,
        })
    }

    fn spawn(&self, cluster: &Cluster, folder: &Path, process: usize) -> Worker {
        let first = if self.mixed_orders { process % self.nodes } else { 0 };
        let mut args = vec![
            ("urls", cluster.urls_from(first)),
            ("threads", self.threads.to_string()),
            ("hold_us", self.hold.as_micros().to_string()),
            ("out", folder.join(process.to_string()).display().to_string()),
        ];
        args.extend(self.polls.then(|| ("polls", "1".to_owned())));
        args.extend(self.at_servers.then(|| ("at_servers", "1".to_owned())));
        let args: Vec<_> = args.iter().map(|(key, value)| (*key, value.as_str())).collect();
        Worker::spawn(ROLE, &args)
    }
}

/// Processes that compete for one lock in a database.
pub(crate) struct Crowd {
    pub(crate) processes: usize,
    pub(crate) window: Duration,
    pub(crate) warm_up: Duration,
}

impl Crowd {
    /// Lets them compete, `raw` without the library.
    pub(crate) fn run(&self, url: &str, raw: bool) -> Result<Shares> {
        let folder = TempDir::with_prefix("distlock-bench-")?;
        let spawn = |process: usize| {
            let out = folder.path().join(process.to_string()).display().to_string();
            let mut args = vec![("urls", url), ("threads", "1"), ("hold_us", "0"), ("out", &out)];
            args.extend(raw.then_some(("raw", "1")));
            Worker::spawn(ROLE, &args)
        };
        let mut workers: Vec<Worker> = (0..self.processes).map(spawn).collect();
        workers.iter().for_each(|worker| drop(worker.expect("ready")));
        let begin = now() + self.warm_up;
        let end = begin + self.window;
        let stop_at = (end + EXTRA_TIME).as_nanos().to_string();
        workers.iter_mut().for_each(|worker| worker.send(&stop_at));
        workers.iter().for_each(|worker| drop(worker.expect("done")));
        read(folder.path(), self.processes, begin, end)
    }
}

impl Outcome {
    fn rate(&self, what: &str) -> Figure {
        Figure::new(format!("locks, {what}"), per_second(self.locks, self.window))
            .compare(per_second(self.raw_pairs, self.raw_time), "raw pairs, one client")
    }

    fn cost(&self, what: &str) -> Figure {
        Figure::new(
            format!("commands per lock and release, {what}"),
            number(self.commands_per_lock),
        )
    }

    fn handoff(&self, what: &str) -> Figure {
        Figure::new(format!("release to next holder, {what}, p50"), micros(self.handoff.p50()))
            .compare(micros(self.other_core_ping.p50()), "PING, idle, other core")
    }

    fn fairness(&self, what: &str) -> Figure {
        Figure::new(
            format!("fewest/most locks per process, {what}"),
            number(self.fewest / self.most),
        )
    }

    fn all(&self, what: &str) -> Vec<Figure> {
        vec![self.rate(what), self.cost(what), self.handoff(what), self.fairness(what)]
    }
}

pub(crate) fn contended_2(scale: Scale) -> Result<Vec<Figure>> {
    Ok(Contest::new(2, scale).run()?.all("2 processes"))
}

pub(crate) fn contended_n(scale: Scale) -> Result<Vec<Figure>> {
    let mut figures = Contest::new(scale.pick(8, 3), scale).run()?.all("8 processes");
    if let Scale::Full = scale {
        figures.extend(Contest::new(32, scale).run()?.all("32 processes"));
    }
    Ok(figures)
}

/// Waiting in the queue, compared with asking each millisecond: rate and fairness.
pub(crate) fn polling(scale: Scale) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (what, hold) in [("8 processes", 0), ("8 processes, held 1 ms", 1)] {
        let hold = Duration::from_millis(hold);
        let contest = Contest { hold, ..Contest::new(scale.pick(8, 3), scale) };
        let (ours, polled) = (contest.run()?, Contest { polls: true, ..contest }.run()?);
        let share = |outcome: &Outcome| number(outcome.fewest / outcome.most);
        figures.extend([
            Figure::new(format!("locks, {what}"), per_second(ours.locks, ours.window))
                .compare(per_second(polled.locks, polled.window), "SET NX PX each ms")
                .at_least_raw_times(1.0),
            Figure::new("  fewest/most locks per process", share(&ours))
                .compare(share(&polled), "the same")
                .at_least(0.95),
            Figure::new("  time to acquire, longest", micros(ours.wait.max()))
                .compare(micros(polled.wait.max()), "the same"),
        ]);
    }
    Ok(figures)
}

pub(crate) fn handoff(scale: Scale) -> Result<Vec<Figure>> {
    let window = scale.pick(Duration::from_secs(10), Duration::from_millis(100));
    let outcome = Contest { window, ..Contest::new(scale.pick(32, 4), scale) }.run()?;
    Ok(vec![
        outcome.handoff("32 processes").at_most_raw_times(1.5),
        Figure::new(
            "  compared with a round trip under the same load",
            micros(outcome.handoff.p50()),
        )
        .compare(micros(outcome.loaded_ping.p50()), "PING, loaded"),
        Figure::new("  compared with a round trip on one core", micros(outcome.handoff.p50()))
            .compare(micros(outcome.same_core_ping.p50()), "PING, idle, same core"),
        Figure::new("  release to next holder, p99", micros(outcome.handoff.p99()))
            .compare(micros(outcome.loaded_ping.p99()), "PING, loaded, p99"),
        outcome.fairness("32 processes").at_least(0.95),
        outcome.rate("32 processes"),
        Figure::new("  locks lost before they were released", number(outcome.lost)),
        Figure::new(
            "  processor time of the server",
            share_of_core(outcome.server_cpu, outcome.window),
        ),
    ])
}

/// Each holder keeps the lock until all others are queued again, because acquiring a free lock
/// costs fewer commands.
pub(crate) fn commands(scale: Scale) -> Result<Vec<Figure>> {
    let hold = Duration::from_millis(1);
    let contest = Contest { hold, at_servers: true, ..Contest::new(3, scale) };
    let few = contest.run()?;
    let many = Contest { threads: scale.pick(43, 2), ..contest }.run()?;
    Ok(vec![
        many.cost("128 waiters")
            .compare(number(few.commands_per_lock), "with 2 waiters")
            .same_as_raw(0.02),
        Figure::new("  script calls among these", number(many.scripts_per_lock))
            .compare(number(few.scripts_per_lock), "with 2 waiters"),
    ])
}

/// As many contenders as nodes: in this case they could split the votes forever.
pub(crate) fn redlock(scale: Scale) -> Result<Vec<Figure>> {
    let nodes = scale.pick(5, 3);
    let window = scale.pick(Duration::from_secs(10), Duration::from_millis(300));
    let outcome = Contest { nodes, window, ..Contest::new(nodes, scale) }.run()?;
    let rounds = outcome.scripts_per_lock / nodes as f64;
    Ok(vec![
        outcome.rate("5 processes on 5 nodes"),
        Figure::new("  rounds per lock and release (script calls / nodes)", number(rounds))
            .compare(number(2.0), "no contention"),
        outcome.fairness("5 processes on 5 nodes"),
        outcome.handoff("5 processes on 5 nodes"),
        Figure::new("  time to acquire, p50", micros(outcome.wait.p50())),
        Figure::new("  time to acquire, p99", micros(outcome.wait.p99())),
        Figure::new("  time to acquire, longest", micros(outcome.wait.max())),
        Figure::new("  locks lost before they were released", number(outcome.lost)),
    ])
}

/// Processes that name the nodes in different orders, which may not cost much. Both ways take
/// turns, so that they are measured in the same minute.
pub(crate) fn redlock_orders(scale: Scale) -> Result<Vec<Figure>> {
    let window = scale.pick(Duration::from_secs(3), Duration::from_millis(300));
    let contest = Contest { nodes: 3, window, ..Contest::new(3, scale) };
    let mut rates = [Vec::new(), Vec::new()];
    for turn in 0..scale.pick(6, 1) {
        for mixed in [turn % 2 == 1, turn % 2 == 0] {
            let outcome = Contest { mixed_orders: mixed, ..contest }.run()?;
            rates[usize::from(mixed)].push(outcome.locks / outcome.window.as_secs_f64());
        }
    }
    let [one, mixed] = &rates;
    let ratios: Vec<f64> = mixed.iter().zip(one).map(|(mixed, one)| mixed / one).collect();
    let fewest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let rate = |rates: &Vec<f64>| per_second(median(rates.clone()), Duration::from_secs(1));
    Ok(vec![
        Figure::new("locks, 3 processes with the orders abc, bca and cab", rate(mixed))
            .compare(rate(one), "all abc"),
        Figure::new("  median ratio of adjacent windows", number(median(ratios))).at_least(0.8),
        Figure::new("  smallest ratio", number(fewest)),
    ])
}
