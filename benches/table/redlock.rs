//! One lock over five nodes, compared with the same requests on five raw connections. Also with two
//! of the nodes stopped.

use std::time::Duration;

use distlock::RedisMgr;

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    cluster::Cluster,
    measure::{Placement, Times, median, now, pause},
    raw_nodes::{NAME, RawNodes, Until},
    report::{Figure, micros, number},
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

const NODES: usize = 5;
/// The index of the nonce in the arguments of a request.
const NONCE_INDEX: usize = 6;

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let cluster = Cluster::start(NODES);
    check_requests(&cluster)?;
    let pinned = Placement::different_cores(&cluster.pids())?;
    let place = if pinned.is_some() { "servers on another core" } else { "one core" };
    let mut figures = compare(&cluster, scale)?.figures(place);
    drop(pinned);
    let pinned = Placement::same_core(&cluster.pids())?;
    figures.extend(compare(&cluster, scale)?.figures("servers on the same core"));
    drop(pinned);
    figures.push(calls(&cluster, scale)?);
    Ok(figures)
}

/// Script calls for one lock and its release, including those in the background.
fn calls(cluster: &Cluster, scale: Scale) -> Result<Figure> {
    let pairs = scale.pick(1_000, 10);
    let mgr = RedisMgr::new(cluster.config())?;
    lock_and_release(&mgr)?;
    let count = || cluster.script_calls();
    let before = count();
    for _ in 0..pairs {
        lock_and_release(&mgr)?;
    }
    // The library sends its background requests within two seconds.
    pause(scale.pick(Duration::from_secs(3), Duration::ZERO));
    let calls = (count() - before) as f64 / f64::from(pairs);
    Ok(Figure::new("  script calls per lock and release, all nodes", number(calls))
        .compare(number(10.0), "raw, 5 nodes"))
}

/// Checks that the raw requests are those of the library: the same script, and arguments of the
/// same lengths.
fn check_requests(cluster: &Cluster) -> Result<()> {
    let mgr = RedisMgr::new(cluster.config())?;
    let mut raw = RawNodes::connect(cluster)?;
    // The first request on a connection contains the text of the script.
    lock_and_release(&mgr)?;
    for server in &cluster.servers {
        // A request that a busy machine delays for too long is refused and repeated.
        let mut attempts = 10;
        while !are_requests_equal(server, &mgr, &mut raw)? {
            attempts -= 1;
            if attempts == 0 {
                return Err("the raw requests differ from the library's, see above".into());
            }
        }
    }
    Ok(())
}

fn are_requests_equal(server: &RedisServer, mgr: &RedisMgr, raw: &mut RawNodes) -> Result<bool> {
    let monitor = server.monitor();
    lock_and_release(mgr)?;
    let requests = raw.prepare()?;
    raw.run(&requests, Until::All)?;
    eventually("the requests have arrived", TEST_TIMEOUT, || {
        let lines = monitor.lines();
        let count = |name: &str| lines.iter().filter(|line| is_request(line, name)).count();
        count("ours") >= 2 && count(NAME) >= 2
    });
    let lines = monitor.lines();
    let first_two = |name: &str| -> Vec<Vec<&str>> {
        let requests = lines.iter().filter(|line| is_request(line, name));
        requests.take(2).map(|line| line.split(" \"").skip(1).collect()).collect()
    };
    // Ignores the nonce, which starts at a random number.
    let lengths = |args: &[&str]| -> Vec<usize> {
        let args = args.iter().enumerate().filter(|(index, _)| *index != NONCE_INDEX);
        args.map(|(_, arg)| arg.len()).collect()
    };
    let are_equal = |ours: &Vec<&str>, raw: &Vec<&str>| {
        ours.get(1) == raw.get(1) && lengths(ours) == lengths(raw)
    };
    let (ours, raw) = (first_two("ours"), first_two(NAME));
    let is_same = ours.len() == 2
        && raw.len() == 2
        && ours.iter().zip(&raw).all(|(ours, raw)| are_equal(ours, raw));
    if !is_same {
        eprintln!("the library sends\n{ours:#?}\nand the raw connection\n{raw:#?}");
    }
    Ok(is_same)
}

fn is_request(line: &str, name: &str) -> bool {
    line.contains("\"EVALSHA\"") && line.contains(&format!(" \"lock:{name}\" "))
}

struct Comparison {
    /// Raw requests, waiting for all replies.
    all: Totals,
    /// Raw requests, waiting for a quorum of replies.
    quorum: Totals,
    ours: Totals,
    /// The library without spinning. The raw connections do not spin either.
    no_spin: Totals,
    /// Ratios of one block of ours to the adjacent blocks: `all`, `quorum` and `no_spin`.
    ratios: [Vec<f64>; 3],
}

fn compare(cluster: &Cluster, scale: Scale) -> Result<Comparison> {
    let (min_pairs, min_time) =
        scale.pick((6_000, Duration::from_secs(20)), (BLOCK as u64, Duration::ZERO));
    let mgr = RedisMgr::new(cluster.config())?;
    let without_spin = RedisMgr::new(cluster.config().spin(Duration::ZERO))?;
    // Separate connections: replies that one side leaves unread must not reach the other.
    let (mut to_all, mut to_quorum) = (RawNodes::connect(cluster)?, RawNodes::connect(cluster)?);
    let mut totals = [Totals::new(), Totals::new(), Totals::new(), Totals::new()];
    let mut ratios = [const { Vec::new() }; 3];
    lock_and_release(&mgr)?;
    lock_and_release(&without_spin)?;
    let until = now() + min_time;
    let mut turn = 0;
    // Stops at the first of the two limits.
    while totals[0].pair.len() == 0 || (totals[0].pair.len() < min_pairs && now() < until) {
        let mut p50 = [0.0; 4];
        // The order rotates.
        for side in (0..4).map(|place| (place + turn) % 4) {
            let raw_block = |raw: &mut RawNodes,
                             totals: &mut Totals,
                             until: Until|
             -> Result<f64> {
                let requests: Result<Vec<_>> = (0..BLOCK).map(|_| raw.prepare()).collect();
                let mut requests = requests?.into_iter();
                totals.block(|| {
                    raw.run(
                        &requests.next().ok_or("the block needs more requests than prepared")?,
                        until,
                    )
                })
            };
            let totals = &mut totals[side];
            p50[side] = match side {
                0 => raw_block(&mut to_all, totals, Until::All)?,
                1 => raw_block(&mut to_quorum, totals, Until::Quorum)?,
                2 => totals.block(|| lock_and_release(&mgr))?,
                _ => totals.block(|| lock_and_release(&without_spin))?,
            };
        }
        let [all, quorum, ours, no_spin] = p50;
        for (ratios, other) in ratios.iter_mut().zip([all, quorum, no_spin]) {
            ratios.push(ours / other);
        }
        turn += 1;
    }
    let [all, quorum, ours, no_spin] = totals;
    Ok(Comparison { all, quorum, ours, no_spin, ratios })
}

impl Comparison {
    fn figures(&self, place: &str) -> Vec<Figure> {
        let Comparison { all, quorum, ours, no_spin, ratios } = self;
        let [to_all, to_quorum, to_no_spin] =
            ratios.each_ref().map(|ratios| number(median(ratios.clone())));
        let pairs = |what: String, ours: &Totals, raw: &Totals, of| {
            Figure::new(what, micros(ours.pair.p50())).compare(micros(raw.pair.p50()), of)
        };
        let cpu = |what: &str, ours: &Totals| {
            Figure::new(what, micros(ours.cpu_per_pair()))
                .compare(micros(all.cpu_per_pair()), "5 replies")
        };
        vec![
            pairs(
                format!("lock + release on 5 nodes, {place}, p50"),
                ours,
                all,
                "both EVALSHA, 5 replies",
            )
            .at_most_raw_times(1.15),
            Figure::new("  median ratio of adjacent blocks", to_all),
            pairs(
                "  compared with a quorum of replies".into(),
                ours,
                quorum,
                "both EVALSHA, 3 replies",
            ),
            Figure::new("  median ratio of adjacent blocks", to_quorum),
            pairs("  the same without spinning".into(), no_spin, all, "both EVALSHA, 5 replies"),
            Figure::new("  with spinning to without, median ratio of adjacent blocks", to_no_spin),
            Figure::new("  lock alone, p50", micros(ours.lock.p50()))
                .compare(micros(all.lock.p50()), "EVALSHA, 5 replies"),
            Figure::new("  release alone, p50", micros(ours.release.p50()))
                .compare(micros(all.release.p50()), "EVALSHA, 5 replies"),
            Figure::new("  lock + release, p99", micros(ours.pair.p99()))
                .compare(micros(all.pair.p99()), "5 replies"),
            cpu("  processor time of the process, mean", ours),
            cpu("  the same without spinning", no_spin),
        ]
    }
}

/// Compares two groups of five nodes, which take turns so that both are measured in the same
/// minute. A single group would not do: nodes that have just been continued are not healthy yet.
pub(crate) fn stopped(scale: Scale) -> Result<Vec<Figure>> {
    let (healthy_nodes, degraded_nodes) = (Cluster::start(NODES), Cluster::start(NODES));
    let pids: Vec<u32> = healthy_nodes.pids().into_iter().chain(degraded_nodes.pids()).collect();
    let (healthy, degraded) =
        (RedisMgr::new(healthy_nodes.config())?, RedisMgr::new(degraded_nodes.config())?);
    lock_and_release(&healthy)?;
    lock_and_release(&degraded)?;
    // Includes the queue node, which is the first.
    let stopped = &degraded_nodes.servers[..2];
    stopped.iter().for_each(RedisServer::stop);
    let (lock, release) = lock_and_release(&degraded)?;
    let mut figures = Vec::new();
    let pinned = Placement::different_cores(&pids)?;
    let place = if pinned.is_some() { "servers on another core" } else { "one core" };
    figures.extend(compare_degraded(&healthy, &degraded, place, scale)?);
    drop(pinned);
    let pinned = Placement::same_core(&pids)?;
    figures.extend(compare_degraded(&healthy, &degraded, "servers on the same core", scale)?);
    drop(pinned);
    figures.push(Figure::new("  the first one after the stop", micros(lock + release)));
    // Continues them, so that they can be shut down.
    stopped.iter().for_each(RedisServer::cont);
    Ok(figures)
}

fn compare_degraded(
    healthy: &RedisMgr,
    degraded: &RedisMgr,
    place: &str,
    scale: Scale,
) -> Result<Vec<Figure>> {
    let (min_pairs, min_time) =
        scale.pick((6_000, Duration::from_secs(12)), (BLOCK as u64, Duration::ZERO));
    let (mut with_all, mut with_three) = (Totals::new(), Totals::new());
    let mut ratios = Vec::new();
    let until = now() + min_time;
    while with_three.pair.len() == 0 || (with_three.pair.len() < min_pairs && now() < until) {
        let mut healthy_block = || with_all.block(|| lock_and_release(healthy));
        let mut degraded_block = || with_three.block(|| lock_and_release(degraded));
        let (healthy_p50, degraded_p50) = if ratios.len() % 2 == 0 {
            (healthy_block()?, degraded_block()?)
        } else {
            let degraded_p50 = degraded_block()?;
            (healthy_block()?, degraded_p50)
        };
        ratios.push(degraded_p50 / healthy_p50);
    }
    let compared = |what: &str, figure: fn(&Times) -> Duration| {
        Figure::new(what, micros(figure(&with_three.pair)))
            .compare(micros(figure(&with_all.pair)), "all 5 healthy")
    };
    Ok(vec![
        compared(&format!("lock + release with 2 of 5 nodes stopped, {place}, p50"), Times::p50)
            .at_most_raw_times(1.30),
        compared("  the same, p99", Times::p99),
        compared("  the longest", Times::max),
        Figure::new("  processor time of the process, mean", micros(with_three.cpu_per_pair()))
            .compare(micros(with_all.cpu_per_pair()), "all 5 healthy"),
        Figure::new("  median ratio of adjacent blocks", number(median(ratios))),
    ])
}
