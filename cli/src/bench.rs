//! `distlock bench`: measures locks on these servers, and compares them with a bare round trip.

mod measure;

use std::time::Duration;

use distlock::RedisMgr;
use serde::Serialize;

use self::measure::Samples;
use crate::{
    args::{Bench, Servers},
    connect,
    exit::{Exit, Failure, Outcome},
    format::{self, Table},
    json::micros,
    output, ranges,
    temp_lock::TempLock,
};

/// The ttl of the temporary lock. If the program is killed, the lock expires after this time.
const BENCH_TTL: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
struct BenchReport {
    servers: Vec<String>,
    rows: Vec<BenchRow>,
}

#[derive(Debug, Serialize)]
struct BenchRow {
    name: &'static str,
    samples: u64,
    /// `null` without samples, like the other results.
    p50_us: Option<u64>,
    p99_us: Option<u64>,
    /// How many can be done in a second, one after another.
    per_second: Option<f64>,
    /// The median divided by the median of a bare round trip. Not a number of round trips.
    latency_ratio: Option<f64>,
}

pub(crate) fn run(servers: &Servers, options: &Bench) -> Outcome {
    ranges::check("--time", options.time, &ranges::BENCH_TIME)?;
    let urls = if options.urls.is_empty() { &servers.url } else { &options.urls };
    // No other client uses the temporary name, so nodes that have just started can safely vote on
    // it.
    let why_not = "for MySQL, distlock doctor measures a round trip and a hand-over";
    let config = connect::config_for(servers, urls)?.redis_only("bench", why_not)?;
    let config = config.pool_size(4).ttl(BENCH_TTL).quarantine(Duration::ZERO);
    let nodes = config.each_node().into_iter().map(RedisMgr::new).collect::<Result<Vec<_>, _>>()?;
    let mgr = RedisMgr::new(config)?;
    let temp_lock = TempLock::new(servers.prefix.as_deref().unwrap_or("lock:"));
    let measured = measure_all(&mgr, &temp_lock.name, options.time);
    drop(mgr);
    nodes.iter().for_each(|node| temp_lock.delete_keys(node));
    let servers = nodes.iter().map(|node| node.server().to_owned()).collect();
    let report = BenchReport { servers, rows: measured? };
    if options.json {
        output::print_json(&report)?;
    } else {
        output::print(&format_report(&report))?;
    }
    Ok(Exit::Success)
}

/// Spends a quarter of the time on each measurement. Stops at the first failure, so that the
/// timeout of an unreachable server is waited for once.
fn measure_all(mgr: &RedisMgr, name: &str, time: Duration) -> Result<Vec<BenchRow>, Failure> {
    let part = time / 4;
    let failed = |what: &'static str| {
        move |Failure { exit, message }| {
            Failure::new(exit, format!("cannot measure {what}: {message}"))
        }
    };
    let raw = measure::round_trips(mgr, part).map_err(failed(ROUND_TRIP))?;
    let round_trip = raw.quantile(0.5);
    let alone = measure::lock_and_release(mgr, name, part).map_err(failed(ALONE))?;
    let handovers = measure::handovers(mgr, name, part).map_err(failed(HANDOVER))?;
    let renewals =
        measure::renewals(mgr, name, part, raw.quantile(0.99)).map_err(failed(RENEWAL))?;
    let row = |what, times: &Samples, per_second: Option<f64>| {
        BenchRow::new(
            what,
            times.count(),
            [times.quantile(0.5), times.quantile(0.99)],
            per_second,
            round_trip,
        )
    };
    Ok(vec![
        row(ROUND_TRIP, &raw, Some(raw.per_second())),
        row(ALONE, &alone, Some(alone.per_second())),
        row(HANDOVER, &handovers, None),
        BenchRow::new(RENEWAL, renewals.count, [renewals.p50, renewals.p99], None, round_trip),
    ])
}

const ROUND_TRIP: &str = "round trip";
const ALONE: &str = "lock and release";
const HANDOVER: &str = "hand-over";
const RENEWAL: &str = "renewal";

impl BenchRow {
    fn new(
        name: &'static str,
        samples: u64,
        [p50, p99]: [Duration; 2],
        per_second: Option<f64>,
        round_trip: Duration,
    ) -> BenchRow {
        // A round trip measured as zero would divide by zero.
        let ratio = p50.as_secs_f64() / round_trip.max(Duration::from_micros(1)).as_secs_f64();
        let is_known = samples > 0;
        BenchRow {
            name,
            samples,
            p50_us: is_known.then(|| micros(p50)),
            p99_us: is_known.then(|| micros(p99)),
            per_second: per_second.filter(|_| is_known),
            latency_ratio: is_known.then_some(ratio),
        }
    }
}

fn format_report(report: &BenchReport) -> String {
    let mut table =
        Table::new(&["", ">MEDIAN µs", ">99 % µs", ">PER SECOND", ">LATENCY RATIO", ">SAMPLES"]);
    let known = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    for row in &report.rows {
        table.add_row(vec![
            row.name.to_owned(),
            known(row.p50_us.map(|us| us.to_string())),
            known(row.p99_us.map(|us| us.to_string())),
            known(row.per_second.map(|often| format!("{often:.0}"))),
            known(row.latency_ratio.map(|ratio| format!("{ratio:.2}"))),
            row.samples.to_string(),
        ]);
    }
    let several = match report.servers.len() {
        1 => String::new(),
        nodes => {
            format!(" ({nodes} nodes; a round trip takes until {} have replied)", nodes / 2 + 1)
        }
    };
    let servers = format::escape(&report.servers.join(", "));
    format!(
        "at {servers}{several}\n\n{table}\nLATENCY RATIO is the median of the row divided by the \
         median of a round trip.\n"
    )
}
