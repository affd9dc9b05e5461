//! One lock over five nodes, against the same bytes on five raw connections; and with two of the nodes stopped.

use std::time::Duration;

use distlock::RedisMgr;

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    cluster::Cluster,
    measure::{Placement, Times, median, now, pause},
    raw_nodes::{NAME, RawNodes, Until},
    report::{Line, micros, number},
    support::{CEILING, RedisServer, eventually},
};

const NODES: usize = 5;
/// The place of the nonce among the words of a request.
const NONCE_AT: usize = 6;

pub(crate) fn row(scale: Scale) -> Result<Vec<Line>> {
    let cluster = Cluster::start(NODES);
    same_requests(&cluster)?;
    let apart = Placement::apart(&cluster.pids())?;
    let place = if apart.is_some() { "servers on another core" } else { "one core" };
    let mut lines = compare(&cluster, scale)?.lines(place);
    drop(apart);
    let together = Placement::together(&cluster.pids())?;
    lines.extend(compare(&cluster, scale)?.lines("servers on the same core"));
    drop(together);
    lines.push(calls(&cluster, scale)?);
    Ok(lines)
}

/// What the nodes are asked for one lock and its release, in the background too.
fn calls(cluster: &Cluster, scale: Scale) -> Result<Line> {
    let pairs = scale.pick(1_000, 10);
    let mgr = RedisMgr::new(cluster.config())?;
    lock_and_release(&mgr)?;
    let count = || cluster.script_calls();
    let before = count();
    for _ in 0..pairs {
        lock_and_release(&mgr)?;
    }
    // What the library leaves for later, it does within a second or two.
    pause(scale.pick(Duration::from_secs(3), Duration::ZERO));
    let calls = (count() - before) as f64 / f64::from(pairs);
    Ok(Line::new("  script calls per lock and release, all nodes", number(calls)).beside(number(10.0), "raw, 5 nodes"))
}

/// Makes sure that the raw requests are the library's, word by word as long.
fn same_requests(cluster: &Cluster) -> Result<()> {
    let mgr = RedisMgr::new(cluster.config())?;
    let mut raw = RawNodes::connect(cluster)?;
    // The first time a connection carries the texts of the scripts.
    lock_and_release(&mgr)?;
    for server in &cluster.servers {
        // A request that the machine has kept back for too long is refused, and made once more.
        let mut tries = 10;
        while !same_requests_at(server, &mgr, &mut raw)? {
            tries -= 1;
            if tries == 0 {
                return Err("the raw requests are not the library's, see above".into());
            }
        }
    }
    Ok(())
}

fn same_requests_at(server: &RedisServer, mgr: &RedisMgr, raw: &mut RawNodes) -> Result<bool> {
    let monitor = server.monitor();
    lock_and_release(mgr)?;
    let requests = raw.prepare()?;
    raw.run(&requests, Until::All)?;
    eventually("the requests have come", CEILING, || {
        let lines = monitor.lines();
        let of = |name: &str| lines.iter().filter(|line| is_request(line, name)).count();
        of("ours") >= 2 && of(NAME) >= 2
    });
    let lines = monitor.lines();
    let first_two = |name: &str| -> Vec<Vec<&str>> {
        let requests = lines.iter().filter(|line| is_request(line, name));
        requests.take(2).map(|line| line.split(" \"").skip(1).collect()).collect()
    };
    // The hash is the same, and everything else is as long; but the library numbers its requests from anywhere.
    let shape = |words: &[&str]| -> Vec<usize> {
        let words = words.iter().enumerate().filter(|(at, _)| *at != NONCE_AT);
        words.map(|(_, word)| word.len()).collect()
    };
    let alike = |ours: &Vec<&str>, bare: &Vec<&str>| ours.get(1) == bare.get(1) && shape(ours) == shape(bare);
    let (ours, bare) = (first_two("ours"), first_two(NAME));
    let same = ours.len() == 2 && bare.len() == 2 && ours.iter().zip(&bare).all(|(ours, bare)| alike(ours, bare));
    if !same {
        eprintln!("the library sends\n{ours:#?}\nand the raw connection\n{bare:#?}");
    }
    Ok(same)
}

fn is_request(line: &str, name: &str) -> bool {
    line.contains("\"EVALSHA\"") && line.contains(&format!(" \"lock:{name}\" "))
}

struct Comparison {
    all: Totals,
    quorum: Totals,
    ours: Totals,
    /// The library without keeping the core while answers are on their way, as the raw connections do not.
    asleep: Totals,
    /// Of one block of ours to the blocks beside it: all answers, a quorum of them, and ours without spinning.
    ratios: [Vec<f64>; 3],
}

fn compare(cluster: &Cluster, scale: Scale) -> Result<Comparison> {
    let (least_pairs, least_time) = scale.pick((6_000, Duration::from_secs(20)), (BLOCK as u64, Duration::ZERO));
    let mgr = RedisMgr::new(cluster.config())?;
    let sleeping = RedisMgr::new(cluster.config().spin(Duration::ZERO))?;
    // Each with connections of its own: what one leaves unread must not reach the other.
    let (mut to_all, mut to_quorum) = (RawNodes::connect(cluster)?, RawNodes::connect(cluster)?);
    let mut totals = [Totals::new(), Totals::new(), Totals::new(), Totals::new()];
    let mut ratios = [const { Vec::new() }; 3];
    lock_and_release(&mgr)?;
    lock_and_release(&sleeping)?;
    let until = now() + least_time;
    let mut turn = 0;
    // Whichever comes first is enough.
    while totals[0].pair.len() == 0 || (totals[0].pair.len() < least_pairs && now() < until) {
        let mut p50 = [0.0; 4];
        // Who goes first alternates too.
        for side in (0..4).map(|place| (place + turn) % 4) {
            let raw_block = |raw: &mut RawNodes, totals: &mut Totals, until: Until| -> Result<f64> {
                let requests: Result<Vec<_>> = (0..BLOCK).map(|_| raw.prepare()).collect();
                let mut requests = requests?.into_iter();
                totals.block(|| raw.run(&requests.next().ok_or("a block is longer than prepared")?, until))
            };
            let totals = &mut totals[side];
            p50[side] = match side {
                0 => raw_block(&mut to_all, totals, Until::All)?,
                1 => raw_block(&mut to_quorum, totals, Until::Quorum)?,
                2 => totals.block(|| lock_and_release(&mgr))?,
                _ => totals.block(|| lock_and_release(&sleeping))?,
            };
        }
        let [all, quorum, ours, asleep] = p50;
        for (ratios, beside) in ratios.iter_mut().zip([all, quorum, asleep]) {
            ratios.push(ours / beside);
        }
        turn += 1;
    }
    let [all, quorum, ours, asleep] = totals;
    Ok(Comparison { all, quorum, ours, asleep, ratios })
}

impl Comparison {
    fn lines(&self, place: &str) -> Vec<Line> {
        let Comparison { all, quorum, ours, asleep, ratios } = self;
        let [to_all, to_quorum, to_asleep] = ratios.each_ref().map(|ratios| number(median(ratios.clone())));
        let pairs = |what: String, ours: &Totals, raw: &Totals, of| {
            Line::new(what, micros(ours.pair.p50())).beside(micros(raw.pair.p50()), of)
        };
        let cpu = |what: &str, ours: &Totals| {
            Line::new(what, micros(ours.cpu_per_pair())).beside(micros(all.cpu_per_pair()), "5 answers")
        };
        vec![
            pairs(format!("lock + release on 5 nodes, {place}, p50"), ours, all, "both EVALSHA, 5 answers")
                .at_most_times_raw(1.15),
            Line::new("  median of the ratios of neighbouring blocks", to_all),
            pairs("  the same beside a quorum of the answers".into(), ours, quorum, "both EVALSHA, 3 answers"),
            Line::new("  median of the ratios of neighbouring blocks", to_quorum),
            pairs("  the same without spinning".into(), asleep, all, "both EVALSHA, 5 answers"),
            Line::new("  spinning to not spinning, median ratio of neighbouring blocks", to_asleep),
            Line::new("  lock alone, p50", micros(ours.lock.p50()))
                .beside(micros(all.lock.p50()), "EVALSHA, 5 answers"),
            Line::new("  release alone, p50", micros(ours.release.p50()))
                .beside(micros(all.release.p50()), "EVALSHA, 5 answers"),
            Line::new("  lock + release, p99", micros(ours.pair.p99())).beside(micros(all.pair.p99()), "5 answers"),
            cpu("  processor time of the process, mean", ours),
            cpu("  the same without spinning", asleep),
        ]
    }
}

/// Two groups of five in turn, so that the healthy figure is of the same minute: nodes that have only just been resumed
/// would not be healthy yet.
pub(crate) fn stopped(scale: Scale) -> Result<Vec<Line>> {
    let (healthy, ailing) = (Cluster::start(NODES), Cluster::start(NODES));
    let pids: Vec<u32> = healthy.pids().into_iter().chain(ailing.pids()).collect();
    let (well, ill) = (RedisMgr::new(healthy.config())?, RedisMgr::new(ailing.config())?);
    lock_and_release(&well)?;
    lock_and_release(&ill)?;
    // The first of them is the one on which waiters would be in line.
    let stopped = &ailing.servers[..2];
    stopped.iter().for_each(RedisServer::stop);
    let (lock, release) = lock_and_release(&ill)?;
    let mut lines = Vec::new();
    let apart = Placement::apart(&pids)?;
    let place = if apart.is_some() { "servers on another core" } else { "one core" };
    lines.extend(with_and_without(&well, &ill, place, scale)?);
    drop(apart);
    let together = Placement::together(&pids)?;
    lines.extend(with_and_without(&well, &ill, "servers on the same core", scale)?);
    drop(together);
    lines.push(Line::new("  the first one after they were stopped", micros(lock + release)));
    // Continued, so that they can be told to end.
    stopped.iter().for_each(RedisServer::cont);
    Ok(lines)
}

fn with_and_without(well: &RedisMgr, ill: &RedisMgr, place: &str, scale: Scale) -> Result<Vec<Line>> {
    let (least_pairs, least_time) = scale.pick((6_000, Duration::from_secs(12)), (BLOCK as u64, Duration::ZERO));
    let (mut with_all, mut with_three) = (Totals::new(), Totals::new());
    let mut ratios = Vec::new();
    let until = now() + least_time;
    while with_three.pair.len() == 0 || (with_three.pair.len() < least_pairs && now() < until) {
        let mut healthy_block = || with_all.block(|| lock_and_release(well));
        let mut ailing_block = || with_three.block(|| lock_and_release(ill));
        let (healthy, ailing) = if ratios.len() % 2 == 0 {
            (healthy_block()?, ailing_block()?)
        } else {
            let ailing = ailing_block()?;
            (healthy_block()?, ailing)
        };
        ratios.push(ailing / healthy);
    }
    let beside = |what: &str, figure: fn(&Times) -> Duration| {
        Line::new(what, micros(figure(&with_three.pair))).beside(micros(figure(&with_all.pair)), "all 5 well")
    };
    Ok(vec![
        beside(&format!("lock + release with 2 of 5 nodes stopped, {place}, p50"), Times::p50).at_most_times_raw(1.30),
        beside("  the same, p99", Times::p99),
        beside("  the longest", Times::longest),
        Line::new("  processor time of the process, mean", micros(with_three.cpu_per_pair()))
            .beside(micros(with_all.cpu_per_pair()), "all 5 well"),
        Line::new("  median of the ratios of neighbouring blocks", number(median(ratios))),
    ])
}
