//! The scenario of a run, chosen from its seed: how many nodes and clients, how fast the network
//! is, and which faults occur how often.

use super::{
    flaw::Flaw,
    kinds::Family,
    net::Link,
    world::{MS, SEC, Stalls, Time, US},
};

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) nodes: usize,
    pub(crate) processes: usize,
    pub(crate) threads: usize,
    pub(crate) names: usize,
    /// What the locks of all names are.
    pub(crate) family: Family,
    pub(crate) ttl: Time,
    pub(crate) operation_timeout: Time,
    pub(crate) claim_window: Time,
    pub(crate) pool_size: u32,
    /// How long the clients work and faults occur. After that, all faults end.
    pub(crate) duration: Time,
    /// Average time between two faults.
    pub(crate) fault_interval: Time,
    /// The kinds of faults that occur.
    pub(crate) fault_kinds: Vec<FaultKind>,
    pub(crate) link: Link,
    pub(crate) stalls: Stalls,
    /// Requests per million after whose execution the connection breaks.
    pub(crate) breaks_per_million: u32,
    /// The nodes keep their data in every restart, and so have no quarantine.
    pub(crate) durable: bool,
    /// Maximum drift of a clock, in parts per million.
    pub(crate) drift_ppm: i64,
    pub(crate) flaw: Option<Flaw>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    Pause,
    Crash,
    PowerLoss,
    BreakConnections,
    Partition,
    OneWayPartition,
    SlowLink,
    StopNode,
    RestartNode,
    ForgetfulNode,
    StaleNode,
    FullNode,
    RefusingNode,
    FlushScripts,
}

impl FaultKind {
    const ALL: [FaultKind; 14] = [
        FaultKind::Pause,
        FaultKind::Crash,
        FaultKind::PowerLoss,
        FaultKind::BreakConnections,
        FaultKind::Partition,
        FaultKind::OneWayPartition,
        FaultKind::SlowLink,
        FaultKind::StopNode,
        FaultKind::RestartNode,
        FaultKind::ForgetfulNode,
        FaultKind::StaleNode,
        FaultKind::FullNode,
        FaultKind::RefusingNode,
        FaultKind::FlushScripts,
    ];
}

impl Scenario {
    pub(crate) fn new(rng: &mut fastrand::Rng) -> Scenario {
        let nodes = *rng.choice(&[1, 1, 1, 1, 3, 3, 3, 3, 5, 2]).expect("there is a choice");
        let ttl = *rng.choice(&[60, 150, 400, 1_000, 3_000]).expect("there is a choice") * MS;
        let operation_timeout = *rng.choice(&[50, 200, 1_000]).expect("there is a choice") * MS;
        let mut fault_kinds: Vec<FaultKind> = FaultKind::ALL.to_vec();
        rng.shuffle(&mut fault_kinds);
        // Few kinds of faults coincide more often than all kinds do. Runs without faults must work
        // too.
        fault_kinds.truncate(*rng.choice(&[0, 1, 2, 3, 14]).expect("there is a choice"));
        // Long delays are only possible with leases and timeouts that leave time for them.
        let slow = rng.u64(..4) == 0 && ttl >= 400 * MS && operation_timeout >= 200 * MS;
        let link = Link {
            min_delay: if slow { 2 * MS } else { 30 * US },
            max_delay: if slow { 15 * MS } else { rng.u64(100..2_000) * US },
            losses_per_million: *rng.choice(&[0, 0, 2_000, 30_000]).expect("there is a choice"),
            retransmit_after: rng.u64(10..600) * MS,
            ..Link::default()
        };
        let stalls = Stalls {
            per_million: *rng.choice(&[0, 5_000, 50_000]).expect("there is a choice"),
            short_max: rng.u64(10..5_000) * US,
            long_one_in: *rng.choice(&[0, 10, 50]).expect("there is a choice"),
            long_max: ttl + ttl / 2,
        };
        Scenario {
            nodes,
            processes: rng.usize(2..=3),
            threads: rng.usize(1..=2),
            names: if rng.u64(..3) == 0 { 2 } else { 1 },
            // A clone, so that a seed still has the scenario that it had for mutexes.
            family: Family::random(nodes, &mut rng.clone()),
            ttl,
            operation_timeout,
            claim_window: *rng.choice(&[50, 200, 1_000]).expect("there is a choice") * MS,
            pool_size: if rng.u64(..6) == 0 { 1 } else { 10 },
            duration: (6 * ttl).clamp(2 * SEC, 8 * SEC),
            fault_interval: rng.u64(100..1_500) * MS,
            fault_kinds,
            link,
            stalls,
            breaks_per_million: *rng.choice(&[0, 0, 3_000, 30_000]).expect("there is a choice"),
            durable: rng.u64(..5) == 0,
            drift_ppm: 4_500,
            flaw: None,
        }
    }
}
