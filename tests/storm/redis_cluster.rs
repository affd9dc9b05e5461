//! A storm on a Redis Cluster: slots move, masters fail over, and shards are killed, while the
//! workers themselves have no faults. So each wait is due to the cluster.

use std::{path::Path, time::Duration};

use fastrand::Rng;

use crate::{
    Outcome,
    args::{Storm, Target, WorkerArgs},
    cluster::lock_key,
    history::{Event, Fault, Kind, Said, now},
    leftovers, nanos, pause,
    poller::{HOLDERS_AND_TTLS, parse_reply},
    runner::Setting,
    support::{Cluster, RedisServer, RedisServerBuilder},
    workers::Workers,
};

const MASTERS: usize = 3;
/// Maximum pause from one fault to the next.
const PAUSE_MAX_MS: u64 = 150;

pub(crate) fn run(storm: &Storm, folder: &Path, record: &Path) -> Outcome {
    let setting = Setting::begin(Target::Cluster, folder, record)?;
    // Otherwise all nodes would refuse requests while one master fails over.
    let settings = |server: RedisServerBuilder| {
        let server = server.arg("--cluster-require-full-coverage").arg("no");
        server.arg("--repl-diskless-sync-delay").arg("0")
    };
    let cluster = Cluster::start_with(MASTERS, true, &settings);
    let mut seed = Rng::with_seed(storm.seed);
    let worker = |index: u32| WorkerArgs {
        first_seat: (index + 1) * 10 + 1,
        locks: storm.locks,
        seed: 0,
        urls: cluster.url(),
        kinds: false,
        record: record.to_owned(),
        resource: setting.resource.clone(),
    };
    let mut workers = Workers::start(
        (0..storm.workers).map(worker).collect(),
        setting.journal.clone(),
        seed.fork(),
    )?;
    let end = now() + nanos(storm.duration_on(Target::Cluster));
    let mut number = 0;
    while now() < end {
        workers.supervise(false)?;
        let key = lock_key(seed.u32(1..=storm.locks));
        let slot = cluster.slot(&key);
        let kind = match seed.u32(..40) {
            0 => Kind::Promote,
            1..4 => Kind::Failover,
            _ => Kind::Move,
        };
        number += 1;
        setting.record(Event::Fault(Fault { number, node: 1, kind, amount: 0 }))?;
        let killed = inject(&cluster, kind, slot);
        // The new master may be known and not reply yet: after some of the failovers that are
        // requested, Redis 7.0 lets scripts wait until five seconds after the request, its time
        // limit for a failover.
        if kind != Kind::Move {
            let _: i64 = cluster.owner(slot).query(&["EVAL", "return 1", "1", &key]);
        }
        setting.record(Event::Over { number })?;
        if let Some(killed) = killed {
            rejoin(&cluster, killed);
        }
        ask_for_holders(&cluster, &setting, storm.locks)?;
        pause(Duration::from_millis(seed.u64(..PAUSE_MAX_MS)));
    }
    workers.shut_down()?;
    leftovers::check_cluster(&cluster, |event| setting.record(event))
}

/// Returns the node that was killed, if one was.
fn inject(cluster: &Cluster, kind: Kind, slot: u16) -> Option<&RedisServer> {
    match kind {
        Kind::Promote => {
            let master = cluster.owner(slot);
            cluster.await_replica(master);
            master.kill();
            cluster.await_other_owner(slot, master);
            return Some(master);
        }
        Kind::Failover => cluster.fail_over(cluster.owner(slot)),
        _ => cluster.move_slot(slot),
    }
    None
}

/// Starts a node that was killed, and waits until it is a replica of its successor.
fn rejoin(cluster: &Cluster, node: &RedisServer) {
    node.restart();
    cluster.await_in_sync(node);
    cluster.await_ok();
}

/// Records what the nodes of the locks reply about their holders. No slot may be moving.
fn ask_for_holders(cluster: &Cluster, setting: &Setting, locks: u32) -> Outcome {
    for lock in 1..=locks {
        let key = lock_key(lock);
        let owner = cluster.owner(cluster.slot(&key));
        let began = now();
        let said: (String, i64) = owner.query(&["EVAL", HOLDERS_AND_TTLS, "1", &key]);
        let said: Vec<Said> = vec![parse_reply(said.0, said.1)];
        setting.record_about(lock, Event::Seen { began, said })?;
    }
    Ok(())
}
