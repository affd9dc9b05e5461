//! Everything that happens to processes and connections, at once and at random.

use std::{env, path::Path, time::Duration};

use fastrand::Rng;

use crate::{
    processes::{Desk, expect_only_keys_that_expire, history, owner, pause, text, waiting},
    support::{CEILING, RedisServer, Worker, eventually},
};

const LOCKS: [&str; 2] = ["east", "west"];
const PROCESSES: usize = 6;
const ROUNDS: usize = 100;
/// Some always run, or there would be no progress to wait for.
const STOPPED_MAX: usize = 3;

/// Run again with the seed of a failure: `DISTLOCK_SEED=… cargo test --test it storm`.
fn seed() -> u64 {
    env::var("DISTLOCK_SEED").ok().map_or_else(|| fastrand::u64(..), |seed| seed.parse().expect("a number"))
}

struct Storm<'a> {
    server: &'a RedisServer,
    url: String,
    history: &'a Path,
    dice: Rng,
    workers: Vec<Worker>,
    /// For how many more rounds a worker is stopped.
    stopped: Vec<usize>,
}

impl Storm<'_> {
    fn spawn(&mut self) -> Worker {
        let seed = self.dice.u64(..).to_string();
        let args = [
            ("url", self.url.as_str()),
            ("history", text(self.history)),
            ("lock", &LOCKS.join(",")),
            ("window_ms", "200"),
            ("timeout_ms", "2000"),
            ("seed", &seed),
        ];
        Worker::spawn("crowd", &args)
    }

    fn round(&mut self) {
        let which = self.dice.usize(..PROCESSES);
        match self.dice.u32(..11) {
            0..=2 => {
                self.workers[which].kill();
                self.workers[which] = self.spawn();
                self.stopped[which] = 0;
            }
            3..=6 if self.stopped.iter().filter(|rounds| **rounds > 0).count() < STOPPED_MAX => {
                self.workers[which].stop();
                self.stopped[which] = self.dice.usize(1..5);
            }
            7 => drop(self.server.kill_clients(&["TYPE", "pubsub"])),
            8 => drop(self.server.kill_clients(&["TYPE", "normal"])),
            9 => drop(self.server.cli(&["SCRIPT", "FLUSH"])),
            10 => {
                self.server.stop();
                pause(self.dice.u64(50..1200));
                self.server.cont();
            }
            _ => {}
        }
        pause(self.dice.u64(..200));
        for (worker, rounds) in self.workers.iter_mut().zip(&mut self.stopped) {
            if *rounds == 1 {
                worker.cont();
            }
            *rounds = rounds.saturating_sub(1);
        }
    }
}

#[test]
fn no_storm_makes_two_believers() {
    let seed = seed();
    eprintln!("seed {seed}");
    let (server, desk) = (RedisServer::start(), Desk::new());
    let history = desk.history();
    let (url, dice) = (server.url(), Rng::with_seed(seed));
    let mut storm =
        Storm { server: &server, url, history: &history, dice, workers: Vec::new(), stopped: vec![0; PROCESSES] };
    for _ in 0..PROCESSES {
        let worker = storm.spawn();
        storm.workers.push(worker);
    }
    let foreign = [
        ("url", storm.url.as_str()),
        ("history", text(&history)),
        ("lock", &LOCKS.join(",")),
        ("ttl_ms", "700"),
        ("rest_ms", "25"),
    ];
    let foreign = Worker::spawn("foreign", &foreign);

    let mut follower = history::Follower::open(&history);
    for _ in 0..ROUNDS {
        let before = LOCKS.map(|lock| follower.entries(lock));
        storm.round();
        eventually("both locks go on being taken", CEILING, || {
            LOCKS.iter().zip(before).all(|(lock, before)| follower.entries(lock) > before)
        });
    }

    for (worker, rounds) in storm.workers.iter_mut().zip(&storm.stopped) {
        if *rounds > 0 {
            worker.cont();
        }
    }
    let mut workers = storm.workers;
    workers.push(foreign);
    workers.iter_mut().for_each(Worker::end_input);
    for worker in &mut workers {
        worker.expect("done");
        assert!(worker.wait().success(), "{}", worker.transcript());
    }

    let holds = history::expect_order(&history);
    let foreign = holds.iter().filter(|hold| hold.token.is_none()).count();
    eprintln!("{} holds, {foreign} of them foreign", holds.len());
    assert!(foreign > 0, "the foreign client was kept out");
    expect_only_keys_that_expire(&server);
    for lock in LOCKS {
        eventually("the lock is free", Duration::from_secs(10), || owner(&server, lock).is_none());
        assert_eq!(waiting(&server, lock), 0, "{lock} has a line of nobody");
    }
}
