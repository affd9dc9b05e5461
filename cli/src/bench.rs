//! `distlock bench`: how long locks take at these servers, beside what nothing at all takes.

mod measure;

use std::time::Duration;

use distlock::RedisMgr;
use serde::Serialize;

use self::measure::{Times, Trouble};
use crate::{
    args::{Bench, Servers},
    connect,
    exit::{Exit, Failure, Outcome},
    json::micros,
    output,
    scratch::Scratch,
    text::{self, Table},
};

/// Short enough to measure something, and no longer than somebody waits for it.
const TIME: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(10 * 60);

/// What is left of the scratch lock when this is killed is gone after that.
const TTL: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
struct Report {
    servers: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    count: u64,
    p50_us: u64,
    p99_us: u64,
    /// How often this can be done one after another.
    per_second: Option<f64>,
    /// How many round trips that do nothing the median takes.
    round_trips: f64,
}

pub(crate) fn run(servers: &Servers, options: &Bench) -> Outcome {
    if !TIME.contains(&options.time) {
        return Err(Failure::usage("--time has to be 100ms to 10m"));
    }
    let urls = if options.urls.is_empty() { &servers.url } else { &options.urls };
    // Nobody but us knows the scratch name, so that nodes which have just started may vote on it.
    let config = connect::config_at(servers, urls)?.pool_size(4).ttl(TTL).quarantine(Duration::ZERO);
    let nodes = config.each_node().into_iter().map(RedisMgr::new).collect::<Result<Vec<_>, _>>()?;
    let mgr = RedisMgr::new(config)?;
    let scratch = Scratch::new(servers.prefix.as_deref().unwrap_or("lock:"));
    let measured = measure_all(&mgr, &scratch.name, options.time);
    drop(mgr);
    nodes.iter().for_each(|node| scratch.clean(node));
    let servers = nodes.iter().map(|node| node.server().to_owned()).collect();
    let report = Report { servers, rows: measured? };
    if options.json {
        output::print_json(&report)?;
    } else {
        output::print(&page(&report))?;
    }
    Ok(Exit::Fine)
}

/// A quarter of the time for each; stops at the first that fails, so that a server which has gone is waited for once.
fn measure_all(mgr: &RedisMgr, name: &str, time: Duration) -> Result<Vec<Row>, Failure> {
    let part = time / 4;
    let failed = |what: &'static str| {
        move |trouble: Trouble| match trouble {
            Trouble::Lock(error) => {
                let failure = Failure::from(error);
                Failure::new(failure.exit, format!("cannot measure {what}: {}", failure.message))
            }
            Trouble::Other(why) => Failure::new(Exit::Unavailable, format!("cannot measure {what}: {why}")),
        }
    };
    let raw = measure::round_trips(mgr, part).map_err(failed(ROUND_TRIP))?;
    let round_trip = raw.quantile(0.5);
    let alone = measure::alone(mgr, name, part).map_err(failed(ALONE))?;
    let handovers = measure::handovers(mgr, name, part).map_err(failed(HANDOVER))?;
    let renewals = measure::renewals(mgr, name, part, raw.quantile(0.99)).map_err(failed(RENEWAL))?;
    let row = |what, times: &Times, per_second: Option<f64>| {
        Row::new(what, times.count(), [times.quantile(0.5), times.quantile(0.99)], per_second, round_trip)
    };
    Ok(vec![
        row(ROUND_TRIP, &raw, Some(raw.per_second())),
        row(ALONE, &alone, Some(alone.per_second())),
        row(HANDOVER, &handovers, None),
        Row::new(RENEWAL, renewals.count, [renewals.p50, renewals.p99], None, round_trip),
    ])
}

const ROUND_TRIP: &str = "round trip";
const ALONE: &str = "lock and release";
const HANDOVER: &str = "hand-over";
const RENEWAL: &str = "renewal";

impl Row {
    fn new(
        what: &'static str,
        count: u64,
        [p50, p99]: [Duration; 2],
        per_second: Option<f64>,
        round_trip: Duration,
    ) -> Row {
        // What was never measured took no time.
        let round_trips = p50.as_secs_f64() / round_trip.max(Duration::from_micros(1)).as_secs_f64();
        Row { what, count, p50_us: micros(p50), p99_us: micros(p99), per_second, round_trips }
    }
}

fn page(report: &Report) -> String {
    let mut table = Table::new(&["", ">MEDIAN", ">99 %", ">PER SECOND", ">ROUND TRIPS", ">MEASURED"]);
    for row in &report.rows {
        let told = |text: String| if row.count == 0 { "-".to_owned() } else { text };
        table.row(vec![
            row.what.to_owned(),
            told(format!("{} µs", row.p50_us)),
            told(format!("{} µs", row.p99_us)),
            row.per_second.map_or_else(|| "-".into(), |often| format!("{often:.0}")),
            told(format!("{:.2}", row.round_trips)),
            row.count.to_string(),
        ]);
    }
    let several = match report.servers.len() {
        1 => String::new(),
        nodes => format!(" ({nodes} nodes; a round trip is over when {} have answered)", nodes / 2 + 1),
    };
    format!("at {}{several}\n\n{table}", text::clean(&report.servers.join(", ")))
}
