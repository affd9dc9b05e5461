//! Workers that process jobs under a lock. If a worker loses the lock, it stops at once, another
//! worker takes over, and no job is done twice.
//!
//! Three workers compete for the lock; its holder processes the jobs. The holder waits for two
//! things at once, with `select!`: the next job, and the message that the lock is lost. An operator
//! force-releases the lock twice.
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

use common::{Cleanup, Result, Server, ensure, exit_code, now, sleep};
use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, select, unbounded};
use distlock::{Config, FencingToken, LockError, LockGuard, RedisMgr};
use parking_lot::Mutex;

const LOCK: &str = "distlock-example:mailer";
const TTL: Duration = Duration::from_secs(3);
const WORKERS: u32 = 3;
const JOBS: u32 = 60;
/// A third of the jobs then takes 2 s. That is longer than a third of the TTL, within which a
/// holder notices a loss.
const JOB_DURATION: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    exit_code(run())
}

/// One worker. In a real system each worker is a process of its own.
struct Worker<'a> {
    number: u32,
    jobs: &'a Receiver<u32>,
    /// Sender that returns a job to `jobs` if it was not done.
    put_back: &'a Sender<u32>,
    outbox: &'a Outbox,
    /// Disconnected when all jobs are done.
    all_done: &'a Receiver<()>,
}

impl Worker<'_> {
    /// Processes jobs whenever it has the lock, until all jobs are done. Returns, for each loss,
    /// how long the loss took to be noticed.
    fn run(&self, config: Config) -> Result<Vec<Duration>> {
        let mgr = RedisMgr::new(config)?;
        let mut losses = Vec::new();
        while !self.is_all_done() {
            // Waits in intervals, to notice that all jobs are done.
            match mgr.try_lock_for(LOCK, Duration::from_secs(1)) {
                Ok(_) if self.is_all_done() => {}
                Ok(guard) => losses.extend(self.process_jobs(&guard)?),
                Err(LockError::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(losses)
    }

    /// Processes jobs until the lock is lost or all jobs are done. After a loss, returns how long
    /// the loss took to be noticed.
    fn process_jobs(&self, guard: &LockGuard) -> Result<Option<Duration>> {
        println!("worker {} has the lock, token {}", self.number, guard.fencing_token());
        let mut done = 0;
        loop {
            select! {
                // Receives a message once, when the lock is lost.
                recv(guard.lost()) -> reason => {
                    println!("worker {} lost the lock after {done} jobs: {}", self.number, reason?);
                    return Ok(Some(self.outbox.time_since_release()));
                }
                recv(self.jobs) -> job => {
                    let job = job?;
                    sleep(JOB_DURATION);
                    // Checks the lock right before the effect: it may have been lost during the
                    // work. The outbox checks the token, in case the lock is lost after this check.
                    if guard.is_held() && self.outbox.send(job, guard.fencing_token()) {
                        done += 1;
                    } else {
                        self.put_back.send(job)?;
                    }
                }
                recv(self.all_done) -> _ => {
                    println!("worker {} stops after {done} jobs: all jobs are done", self.number);
                    return Ok(None);
                }
            }
        }
    }

    fn is_all_done(&self) -> bool {
        self.all_done.try_recv() == Err(TryRecvError::Disconnected)
    }
}

/// The protected resource. It rejects the token of a worker whose successor has already used it.
struct Outbox {
    sent: Mutex<Vec<Mail>>,
    progress: Sender<usize>,
    /// Time at which the operator last released the lock.
    released_at: AtomicU64,
}

struct Mail {
    job: u32,
    token: FencingToken,
}

impl Outbox {
    /// Sends the mail of a job. Returns false if the token is outdated.
    fn send(&self, job: u32, token: FencingToken) -> bool {
        let mut sent = self.sent.lock();
        if sent.last().is_some_and(|last| last.token > token) {
            return false;
        }
        sent.push(Mail { job, token });
        let _ = self.progress.send(sent.len());
        true
    }

    fn time_since_release(&self) -> Duration {
        Duration::from_nanos(now() - self.released_at.load(Ordering::SeqCst))
    }
}

/// Force-releases the lock after a third and after two thirds of the jobs. Drops `all_done` when
/// the jobs are done, or when an error occurs.
fn operate(
    config: Config,
    outbox: &Outbox,
    progress: &Receiver<usize>,
    all_done: Sender<()>,
) -> Result {
    let mgr = RedisMgr::new(config)?;
    loop {
        let done = progress
            .recv_timeout(Duration::from_secs(20))
            .map_err(|_| "no job was done for 20 s")?;
        if done == JOBS as usize {
            drop(all_done);
            return Ok(());
        }
        if done == JOBS as usize / 3 || done == JOBS as usize * 2 / 3 {
            println!("operator force-releases the lock after {done} jobs");
            outbox.released_at.store(now(), Ordering::SeqCst);
            mgr.force_release(LOCK)?;
        }
    }
}

/// Runs the workers and the operator, then checks the result.
fn run() -> Result {
    let cleanup = Cleanup::start()?;
    let server = Server::from_env_or_start(&cleanup)?;
    println!("Server: {}\n", server.description());

    let (put_back, jobs) = bounded(JOBS as usize);
    (1..=JOBS).try_for_each(|job| put_back.send(job))?;
    let (all_done, all_done_signal) = bounded(0);
    let (progress, progress_updates) = unbounded();
    let outbox = Outbox { sent: Mutex::default(), progress, released_at: AtomicU64::new(0) };

    let losses = thread::scope(|threads| {
        let workers: Vec<_> = (1..=WORKERS)
            .map(|number| {
                let (jobs, put_back, outbox, all_done) =
                    (&jobs, &put_back, &outbox, &all_done_signal);
                let worker = Worker { number, jobs, put_back, outbox, all_done };
                // Each worker has its own manager, as it would in its own process.
                let config = server.config().ttl(TTL);
                threads.spawn(move || worker.run(config))
            })
            .collect();
        operate(server.config(), &outbox, &progress_updates, all_done)?;
        let mut losses = Vec::new();
        for worker in workers {
            losses.extend(worker.join().map_err(|_| "a worker panicked")??);
        }
        Result::Ok(losses)
    })?;

    let sent = outbox.sent.into_inner();
    let mut jobs: Vec<u32> = sent.iter().map(|mail| mail.job).collect();
    jobs.sort_unstable();
    let mut tokens: Vec<FencingToken> = sent.iter().map(|mail| mail.token).collect();
    let is_ordered = tokens.is_sorted();
    tokens.dedup();
    let slowest = losses.iter().max().copied().unwrap_or_default();
    println!("\n{JOBS} jobs done, each once, by {} holders of the lock.", tokens.len());
    println!("{} locks lost; the holders noticed within {} ms.", losses.len(), slowest.as_millis());
    ensure(jobs == (1..=JOBS).collect::<Vec<_>>(), "each job is done once")?;
    ensure(
        is_ordered,
        "after a worker has lost the lock, it does no job once its successor has started",
    )?;
    ensure(losses.len() == 2, "a worker that loses the lock is notified")?;
    ensure(slowest < TTL, "the notification comes within the TTL")
}
