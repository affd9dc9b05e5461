//! A worker stops at once when its lock is lost, another takes over, and no job is done twice.
//!
//! Three workers want the lock that allows to take jobs. The one that has it waits for two things at the same time,
//! with `select!`: the next job, and the news that the lock is lost. Twice, an operator takes the lock away.
//!
//! ```text
//! cargo run --example worker
//! ```

#[path = "common/mod.rs"]
mod common;

use std::{
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use common::{Outcome, Server, Watchdog, conclude, ensure, now, work_for};
use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, select, unbounded};
use distlock::{Config, FencingToken, LockError, LockGuard, RedisMgr};
use parking_lot::Mutex;

const LOCK: &str = "distlock-example:mailer";
const TTL: Duration = Duration::from_secs(3);
const JOBS: u32 = 60;
const WORKERS: u32 = 3;
/// A third of the jobs takes longer than a third of the lease, within which a loss is heard of.
const TIME_OF_A_JOB: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    conclude(story())
}

fn story() -> Outcome {
    let watchdog = Watchdog::start()?;
    let server = Server::find(&watchdog)?;
    println!("The server is {}.\n", server.introduction());

    let (put, jobs) = bounded(JOBS as usize);
    (1..=JOBS).try_for_each(|job| put.send(job))?;
    let (finish, finished) = bounded(0);
    let (progress, done) = unbounded();
    let outbox = Outbox { sent: Mutex::default(), progress, taken_away_at: AtomicU64::new(0) };

    let losses = thread::scope(|threads| {
        let workers: Vec<_> = (1..=WORKERS)
            .map(|number| {
                let shift = Shift { number, jobs: &jobs, put: &put, outbox: &outbox, finished: &finished };
                // Each has a manager of its own, as if it were a process of its own.
                let config = server.config().ttl(TTL);
                threads.spawn(move || shift.work(config))
            })
            .collect();
        operate(server.config(), &outbox, &done, finish)?;
        let mut losses = Vec::new();
        for worker in workers {
            losses.extend(worker.join().map_err(|_| "a worker panicked")??);
        }
        Outcome::Ok(losses)
    })?;

    let sent = outbox.sent.into_inner();
    let mut tokens: Vec<FencingToken> = sent.iter().map(|sent| sent.token).collect();
    let ordered = tokens.is_sorted();
    tokens.dedup();
    let mut jobs: Vec<u32> = sent.iter().map(|sent| sent.job).collect();
    jobs.sort_unstable();
    let slowest = losses.iter().max().copied().unwrap_or_default();
    println!("\n{JOBS} jobs done, each once, under {} locks in turn.", tokens.len());
    println!("{} locks lost; the slowest to hear of it heard after {} ms.", losses.len(), slowest.as_millis());
    ensure(jobs == (1..=JOBS).collect::<Vec<_>>(), "each job is done once")?;
    ensure(ordered, "who has lost the lock does no job after its successor's first")?;
    ensure(losses.len() == 2, "who loses the lock hears of it")?;
    ensure(slowest < TTL, "the news comes within the lease")
}

/// What one worker has at hand.
struct Shift<'a> {
    number: u32,
    jobs: &'a Receiver<u32>,
    put: &'a Sender<u32>,
    outbox: &'a Outbox,
    finished: &'a Receiver<()>,
}

impl Shift<'_> {
    /// Works whenever the lock is ours, until all is done. Returns how long each loss took to be heard of.
    fn work(&self, config: Config) -> Outcome<Vec<Duration>> {
        let mgr = RedisMgr::new(config)?;
        let mut losses = Vec::new();
        while !self.is_over() {
            // Not for ever, so that it also sees the end of the work.
            match mgr.try_lock_for(LOCK, Duration::from_secs(1)) {
                Ok(_) if self.is_over() => {}
                Ok(guard) => losses.extend(self.hold(guard)?),
                Err(LockError::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(losses)
    }

    fn is_over(&self) -> bool {
        self.finished.try_recv() == Err(TryRecvError::Disconnected)
    }

    fn hold(&self, guard: LockGuard) -> Outcome<Option<Duration>> {
        println!("worker {} starts, with token {}", self.number, guard.fencing_token());
        let mut done = 0;
        loop {
            select! {
                recv(guard.lost()) -> why => {
                    let after = Duration::from_nanos(now() - self.outbox.taken_away_at.load(Ordering::SeqCst));
                    println!("worker {} stops after {done} jobs: {}", self.number, why?);
                    return Ok(Some(after));
                }
                recv(self.jobs) -> job => {
                    let job = job?;
                    work_for(TIME_OF_A_JOB);
                    // `select!` picks any arm that is ready, and the lock may have been lost since.
                    if guard.is_held() && self.outbox.send(job, guard.fencing_token()) {
                        done += 1;
                    } else {
                        self.put.send(job)?;
                    }
                }
                recv(self.finished) -> _ => {
                    println!("worker {} stops after {done} jobs: all is done", self.number);
                    return Ok(None);
                }
            }
        }
    }
}

/// Takes the lock away from its holder now and then. Drops `finish` when all jobs are done, or something is wrong.
fn operate(config: Config, outbox: &Outbox, done: &Receiver<usize>, finish: Sender<()>) -> Outcome {
    let mgr = RedisMgr::new(config)?;
    loop {
        let done = done.recv_timeout(Duration::from_secs(20)).map_err(|_| "the workers do nothing")?;
        if done == JOBS as usize {
            drop(finish);
            return Ok(());
        }
        if done == JOBS as usize / 3 || done == JOBS as usize * 2 / 3 {
            println!("operator takes the lock away after {done} jobs");
            outbox.taken_away_at.store(now(), Ordering::SeqCst);
            mgr.force_release(LOCK)?;
        }
    }
}

struct Sent {
    job: u32,
    token: FencingToken,
}

/// Where the work ends up. It refuses the token of a worker whose successor has been here.
struct Outbox {
    sent: Mutex<Vec<Sent>>,
    progress: Sender<usize>,
    taken_away_at: AtomicU64,
}

impl Outbox {
    /// Whether the job was taken.
    fn send(&self, job: u32, token: FencingToken) -> bool {
        let mut sent = self.sent.lock();
        if sent.last().is_some_and(|last| last.token > token) {
            return false;
        }
        sent.push(Sent { job, token });
        let _ = self.progress.send(sent.len());
        true
    }
}
