//! Runs one storm: starts servers and workers, alternates phases with faults and phases without,
//! and ends.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fastrand::Rng;

use crate::{
    Outcome,
    args::{Storm, Target, WorkerArgs},
    cluster::{Cluster, ROUTES},
    history::{Event, Journal, Record, Terms, now},
    leftovers, nanos,
    nemesis::Nemesis,
    pause,
    poller::Poller,
    resource, worker,
    workers::Workers,
};

/// How often the runner checks whether something is due.
const TICK: Duration = Duration::from_millis(4);
/// Average length of a phase with faults, and length of a phase without, in which everything must
/// recover.
const FAULT_PHASE: Duration = Duration::from_millis(7000);
const FAULT_FREE_PHASE: Duration = Duration::from_millis(5500);
/// Average time between two faults.
const FAULT_INTERVAL: Duration = Duration::from_millis(160);

/// What each storm begins with.
pub(crate) struct Setting {
    pub(crate) journal: Arc<Journal>,
    /// Socket of the fenced resource.
    pub(crate) resource: PathBuf,
}

impl Setting {
    pub(crate) fn begin(storm_on: Target, folder: &Path, record: &Path) -> Outcome<Setting> {
        let journal = Arc::new(Journal::open(record)?);
        let setting = Setting { journal, resource: folder.join("resource") };
        setting.record(Event::Terms(Terms {
            nodes: storm_on.nodes(),
            ttl: nanos(storm_on.ttl()),
            operation_timeout: nanos(Storm::OPERATION_TIMEOUT),
            claim_window: nanos(storm_on.claim_window()),
            is_database: storm_on.is_database(),
        }))?;
        worker::measure_parent_lateness(setting.journal.clone());
        resource::start(&setting.resource, record)?;
        Ok(setting)
    }

    pub(crate) fn record(&self, event: Event) -> io::Result<()> {
        self.record_about(0, event)
    }

    pub(crate) fn record_about(&self, lock: u32, event: Event) -> io::Result<()> {
        let pid = std::process::id();
        self.journal.write(&Record { at: now(), seat: 0, lock, pid, event })
    }
}

pub(crate) fn run(storm: &Storm, target: Target, folder: &Path, record: &Path) -> Outcome {
    let (nodes, ttl) = (target.nodes(), target.ttl());
    let setting = Setting::begin(target, folder, record)?;
    let journal = &setting.journal;
    let cluster = Cluster::build(target)?;
    let mut seed = Rng::with_seed(storm.seed);
    let worker_args = |index: u32| WorkerArgs {
        first_seat: (index + 1) * 10 + 1,
        locks: storm.locks,
        seed: 0,
        urls: cluster.urls(index as usize % ROUTES),
        kinds: matches!(target, Target::Kinds(_)),
        record: record.to_owned(),
        resource: setting.resource.clone(),
    };
    let poller = Poller::start(&cluster, storm.locks, journal.clone())?;
    let outcome = (|| {
        let mut workers = Workers::start(
            (0..storm.workers).map(worker_args).collect(),
            journal.clone(),
            seed.fork(),
        )?;
        let mut nemesis = Nemesis::new(&cluster, journal.clone(), seed.fork(), ttl, storm.locks);
        let mut rng = seed.fork();
        let end = now() + nanos(storm.duration_on(target));
        // Several nodes that were just started are in quarantine.
        let mut fault_free_until = now() + nanos(if nodes > 1 { ttl } else { Duration::ZERO });
        let mut faults_until = fault_free_until + nanos(FAULT_PHASE);
        let (mut next, mut deletion_at) = (fault_free_until, u64::MAX);
        while now() < end || now() < fault_free_until {
            pause(TICK);
            if now() >= faults_until {
                nemesis.end_faults(true)?;
                workers.supervise(true)?;
                if rng.bool() {
                    nemesis.forget_one_by_one(&mut workers)?;
                }
                // Kill a holder, so that another worker must succeed it.
                let victim =
                    nemesis.some_holder(&workers).unwrap_or_else(|| rng.usize(..workers.len()));
                workers.kill(victim)?;
                fault_free_until = now() + nanos(FAULT_FREE_PHASE);
                faults_until = fault_free_until + nanos(FAULT_PHASE.mul_f64(0.5 + rng.f64()));
                next = fault_free_until;
                deletion_at = now() + nanos(FAULT_FREE_PHASE / 2);
            }
            // There is no other fault, so the holder must notice its loss at once.
            if (deletion_at..fault_free_until - 1_500_000_000).contains(&now())
                && nemesis.delete_held_key()?
            {
                deletion_at = u64::MAX;
            }
            nemesis.end_faults(false)?;
            workers.supervise(false)?;
            if now() >= next && now() < end {
                nemesis.inject(&mut workers)?;
                next = now() + nanos(FAULT_INTERVAL.mul_f64(2.0 * rng.f64()));
            }
        }
        nemesis.end_faults(true)?;
        workers.shut_down()
    })();
    poller.end();
    outcome?;
    leftovers::check(&cluster, record, &|event| setting.record(event))?;
    Ok(())
}
