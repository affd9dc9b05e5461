//! A storm from its beginning to its end: servers and workers come, are ill-treated and left in peace in turn, and go.

use std::{path::Path, sync::Arc, time::Duration};

use fastrand::Rng;

use crate::{
    Outcome,
    args::{Order, Storm},
    crew::Crew,
    enemy::Enemy,
    history::{Event, Journal, Record, Terms, now},
    leftovers, nanos, pause, resource,
    stage::{SIDES, Stage},
    witness::Witness,
    worker,
};

/// How often it is looked whether something is due.
const TICK: Duration = Duration::from_millis(4);
/// So long things go wrong, and then so long nothing does, in order to see that all recover.
const STORM: Duration = Duration::from_millis(7000);
const CALM: Duration = Duration::from_millis(5500);
/// Between two blows, on average.
const PACE: Duration = Duration::from_millis(160);

pub(crate) fn rage(storm: &Storm, nodes: usize, folder: &Path, record: &Path) -> Outcome {
    let journal = Arc::new(Journal::open(record)?);
    let tell = |event| journal.write(&Record { at: now(), seat: 0, lock: 0, pid: std::process::id(), event });
    tell(Event::Terms(Terms {
        nodes,
        ttl: nanos(Storm::TTL),
        operation_timeout: nanos(Storm::OPERATION_TIMEOUT),
        claim_window: nanos(Storm::CLAIM_WINDOW),
    }))?;
    worker::parents_pulse(journal.clone());
    let socket = folder.join(format!("resource-{nodes}"));
    resource::open(&socket, record)?;
    let stage = Stage::build(nodes);
    let mut seed = Rng::with_seed(storm.seed);
    let order = |index: u32| Order {
        first_seat: (index + 1) * 10 + 1,
        locks: storm.locks,
        seed: 0,
        urls: stage.urls(index as usize % SIDES),
        record: record.to_owned(),
        resource: socket.clone(),
    };
    let witness = Witness::start(&stage, storm.locks, journal.clone())?;
    let outcome = (|| {
        let mut crew = Crew::hire((0..storm.workers).map(order).collect(), journal.clone(), seed.fork())?;
        let mut enemy = Enemy::new(&stage, journal.clone(), seed.fork(), Storm::TTL, storm.locks);
        let mut dice = seed.fork();
        let end = now() + nanos(storm.length);
        // Several nodes that were just started do not vote yet.
        let mut calm_until = now() + nanos(if nodes > 1 { Storm::TTL } else { Duration::ZERO });
        let mut storm_until = calm_until + nanos(STORM);
        let (mut next, mut surprise_at) = (calm_until, u64::MAX);
        while now() < end || now() < calm_until {
            pause(TICK);
            if now() >= storm_until {
                enemy.relent(true)?;
                crew.tend(true)?;
                if dice.bool() {
                    enemy.roll(&mut crew)?;
                }
                // Somebody has to be followed.
                let victim = enemy.some_holder(&crew).unwrap_or_else(|| dice.usize(..crew.len()));
                crew.kill(victim)?;
                calm_until = now() + nanos(CALM);
                storm_until = calm_until + nanos(STORM.mul_f64(0.5 + dice.f64()));
                next = calm_until;
                surprise_at = now() + nanos(CALM / 2);
            }
            // With nothing else in the way, the holder has to find out at once.
            if (surprise_at..calm_until - 1_500_000_000).contains(&now()) && enemy.surprise()? {
                surprise_at = u64::MAX;
            }
            enemy.relent(false)?;
            crew.tend(false)?;
            if now() >= next && now() < end {
                enemy.strike(&mut crew)?;
                next = now() + nanos(PACE.mul_f64(2.0 * dice.f64()));
            }
        }
        enemy.relent(true)?;
        crew.dismiss()
    })();
    witness.end();
    outcome?;
    leftovers::look(&stage, record, &tell)?;
    Ok(())
}
