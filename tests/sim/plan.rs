//! What a seed stands for: how many of what, how fast, and what goes wrong how often.

use super::{
    net::Link,
    scripts::Flaw,
    world::{MS, SEC, Stalls, Time, US},
};

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) nodes: usize,
    pub(crate) processes: usize,
    pub(crate) threads: usize,
    pub(crate) names: usize,
    pub(crate) ttl: Time,
    pub(crate) operation_timeout: Time,
    pub(crate) claim_window: Time,
    pub(crate) pool_size: u32,
    /// How long users go about their business, and how long things go wrong.
    pub(crate) length: Time,
    /// Between two faults, about.
    pub(crate) fault_every: Time,
    /// Only the first of these kinds of faults happen.
    pub(crate) kinds: Vec<Kind>,
    pub(crate) link: Link,
    pub(crate) stalls: Stalls,
    /// In a million requests: the connection breaks right after they were carried out.
    pub(crate) breaks: u32,
    pub(crate) durable: bool,
    /// Clocks run too fast or too slow by up to this much.
    pub(crate) ppm: i64,
    pub(crate) flaw: Option<Flaw>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pause,
    Crash,
    LosePower,
    Break,
    Partition,
    OneWay,
    Slow,
    StopNode,
    RestartNode,
    ForgetfulNode,
    StaleNode,
    FullNode,
    NodeRefuses,
    ForgetScripts,
}

impl Kind {
    const ALL: [Kind; 14] = [
        Kind::Pause,
        Kind::Crash,
        Kind::LosePower,
        Kind::Break,
        Kind::Partition,
        Kind::OneWay,
        Kind::Slow,
        Kind::StopNode,
        Kind::RestartNode,
        Kind::ForgetfulNode,
        Kind::StaleNode,
        Kind::FullNode,
        Kind::NodeRefuses,
        Kind::ForgetScripts,
    ];
}

impl Plan {
    pub(crate) fn new(rng: &mut fastrand::Rng) -> Plan {
        let nodes = *rng.choice(&[1, 1, 1, 1, 3, 3, 3, 3, 5, 2]).expect("there is a choice");
        let ttl = *rng.choice(&[60, 150, 400, 1_000, 3_000]).expect("there is a choice") * MS;
        let operation_timeout = *rng.choice(&[50, 200, 1_000]).expect("there is a choice") * MS;
        let mut kinds: Vec<Kind> = Kind::ALL.to_vec();
        rng.shuffle(&mut kinds);
        // A few kinds meet each other more often than all do; and calm runs have to work too.
        kinds.truncate(*rng.choice(&[0, 1, 2, 3, 14]).expect("there is a choice"));
        // Who is far away needs the time for it.
        let far = rng.u64(..4) == 0 && ttl >= 400 * MS && operation_timeout >= 200 * MS;
        let link = Link {
            least: if far { 2 * MS } else { 30 * US },
            most: if far { 15 * MS } else { rng.u64(100..2_000) * US },
            loses: *rng.choice(&[0, 0, 2_000, 30_000]).expect("there is a choice"),
            again: rng.u64(10..600) * MS,
            ..Link::default()
        };
        let stalls = Stalls {
            often: *rng.choice(&[0, 5_000, 50_000]).expect("there is a choice"),
            short: rng.u64(10..5_000) * US,
            rare: *rng.choice(&[0, 10, 50]).expect("there is a choice"),
            long: ttl + ttl / 2,
        };
        Plan {
            nodes,
            processes: rng.usize(2..=3),
            threads: rng.usize(1..=2),
            names: if rng.u64(..3) == 0 { 2 } else { 1 },
            ttl,
            operation_timeout,
            claim_window: *rng.choice(&[50, 200, 1_000]).expect("there is a choice") * MS,
            pool_size: if rng.u64(..6) == 0 { 1 } else { 10 },
            length: (6 * ttl).clamp(2 * SEC, 8 * SEC),
            fault_every: rng.u64(100..1_500) * MS,
            kinds,
            link,
            stalls,
            breaks: *rng.choice(&[0, 0, 3_000, 30_000]).expect("there is a choice"),
            durable: rng.u64(..5) == 0,
            ppm: 4_500,
            flaw: None,
        }
    }
}
