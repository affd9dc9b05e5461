//! A worker process: acquires locks over and over, works while it holds them, and records what it
//! did, what its guards reported, and when.

use std::{
    fs,
    io::BufRead,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::Select;
use distlock::{
    Config, LockError, LockGuard, LockManager, LockOptions, Metrics, MySqlConfig, MySqlMgr,
    ReadGuard, RedisMgr, WriteGuard,
};
use fastrand::Rng;
use parking_lot::RwLock;

use crate::{
    Outcome,
    args::{Storm, THREADS, Target, WorkerArgs},
    cluster::lock_key,
    history::{Event, Journal, Record, Sharing, UNREPORTED, now},
    kinds::{self, Guard},
    nanos, pause,
    resource::Resource,
};

/// Average lifetime of a manager. It is then shut down, and must leave no thread and no open file.
const MANAGER_LIFETIME: Duration = Duration::from_secs(15);
const POOL_SIZE: u32 = 3;
/// Interval at which lateness is measured, and minimum lateness that is recorded.
const LATENESS_INTERVAL: Duration = Duration::from_millis(5);
const LATENESS_MIN: Duration = Duration::from_millis(5);
/// How late a thread usually wakes on an idle machine; does not count as lateness.
const USUAL_DELAY: Duration = Duration::from_micros(200);
/// How long a worker waits for the reason of a loss, and how often. One wait is not enough, because
/// a stop of the process can use it up. Only a reason that never comes takes all of this time.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);
const REASON_TRIES: u32 = 4;
/// Maximum time for threads and connections to end. Only a leak takes nearly as long.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// Writes records for one seat.
#[derive(Clone)]
pub(crate) struct Recorder {
    journal: Arc<Journal>,
    seat: u32,
}

impl Recorder {
    fn record(&self, lock: u32, event: Event) -> Outcome {
        self.record_as_of(now(), lock, event)
    }

    fn record_as_of(&self, at: u64, lock: u32, event: Event) -> Outcome {
        Ok(self.journal.write(&Record { at, seat: self.seat, lock, pid: process::id(), event })?)
    }

    /// Makes a call of the library, which must return within `bound`.
    fn call<T>(
        &self,
        lock: u32,
        what: &str,
        bound: Option<Duration>,
        call: impl FnOnce() -> T,
    ) -> Outcome<(T, u64)> {
        self.record(lock, Event::Call { what: what.into(), bound: bound.map(nanos) })?;
        let before = processor_wait();
        let result = call();
        let back = now();
        let delayed = processor_wait().saturating_sub(before);
        self.record_as_of(back, lock, Event::Back { delayed })?;
        Ok((result, back))
    }
}

/// Nanoseconds for which this thread was ready to run but had no processor, where the system counts
/// that.
fn processor_wait() -> u64 {
    let counts = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    counts.split(' ').nth(1).and_then(|count| count.parse().ok()).unwrap_or(0)
}

pub(crate) fn run(args: &WorkerArgs) -> Outcome {
    let journal = Arc::new(Journal::open(&args.record)?);
    let recorder = |seat| Recorder { journal: journal.clone(), seat };
    let own = recorder(0);
    let outcome = run_managers(args, &recorder);
    match &outcome {
        Ok(()) => own.record(0, Event::Done)?,
        Err(error) => own.record(0, Event::Failed { why: error.to_string() })?,
    }
    outcome
}

fn run_managers(args: &WorkerArgs, recorder: &impl Fn(u32) -> Recorder) -> Outcome {
    let finish = watch_parent();
    measure_lateness(recorder(0));
    let seats: Vec<u32> = (args.first_seat..args.first_seat + THREADS).collect();
    let mut resources = seats
        .iter()
        .map(|seat| Resource::connect(&args.resource, *seat))
        .collect::<Outcome<Vec<_>>>()?;
    let mut seed = Rng::with_seed(args.seed);
    let before = OpenResources::count();
    while !finish.load(Ordering::Acquire) {
        let own = recorder(args.first_seat + THREADS);
        // Each names the nodes in an order of its own.
        let is_cluster = args.target() == Target::Cluster;
        let mut urls: Vec<_> = args.urls.split(',').collect();
        if !is_cluster {
            seed.shuffle(&mut urls);
        }
        let (mgr, _) = own.call(0, "new", Some(Storm::OPERATION_TIMEOUT), || {
            Manager::new(args.target(), &urls.join(","))
        })?;
        let mgr = match mgr {
            // A process that was stopped meanwhile also fails like this.
            Err(error) if error.is_unavailable() => continue,
            mgr => mgr?,
        };
        let (ended, gate) = (AtomicBool::new(false), RwLock::new(()));
        let outcome = thread::scope(|threads| {
            let mut running = Vec::new();
            for (seat, resource) in seats.iter().zip(&mut resources) {
                let recorder = recorder(*seat);
                let thread = LockThread {
                    mgr: mgr.locks(),
                    kinds: mgr.kinds(args.target()),
                    is_on_one_server: args.target().nodes() == 1,
                    ttl: args.target().ttl(),
                    is_brief: is_cluster,
                    recorder,
                    locks: args.locks,
                    ended: &ended,
                    gate: &gate,
                };
                let rng = seed.fork();
                running.push(threads.spawn(move || thread.run(resource, rng)));
            }
            let (recorder, rng) = (recorder(args.first_seat + THREADS + 1), seed.fork());
            let (mgr, ended) = (&mgr, &ended);
            // No connection leads to all nodes of a cluster.
            if let Manager::Redis(mgr) = mgr
                && !is_cluster
            {
                running.push(threads.spawn(move || exhaust_pool(mgr, &recorder, ended, rng)));
            }
            // A shutdown during a failover leaves what was not released yet to expire, which a
            // storm on a cluster does not allow.
            let lifetime = nanos(MANAGER_LIFETIME.mul_f64(0.5 + seed.f64()));
            let end = if is_cluster { u64::MAX } else { now() + lifetime };
            while now() < end
                && !finish.load(Ordering::Acquire)
                && running.iter().all(|thread| !thread.is_finished())
            {
                pause(Duration::from_millis(20));
            }
            ended.store(true, Ordering::Release);
            {
                // Wait until no thread holds a lock: a shutdown ends the locks, and a holder might
                // not notice in time.
                let _no_holder = gate.write();
                own.call(0, "shutdown", Some(Storm::OPERATION_TIMEOUT), || mgr.locks().shutdown())?;
            }
            running
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
        });
        outcome?;
        let metrics = mgr.metrics();
        if metrics.held() > 0 || metrics.waiting() > 0 {
            let what = format!("{} held locks and {} waiters", metrics.held(), metrics.waiting());
            own.record(0, Event::Leak { what })?;
        }
        own.call(0, "drop-manager", Some(Storm::OPERATION_TIMEOUT), || drop(mgr))?;
        if let Some(what) = before.wait_for_leftovers() {
            own.record(0, Event::Leak { what })?;
        }
    }
    Ok(())
}

/// A manager of either kind.
enum Manager {
    Redis(RedisMgr),
    Database(MySqlMgr),
}

impl Manager {
    fn new(target: Target, urls: &str) -> distlock::Result<Manager> {
        Ok(match target {
            Target::Nodes(_) | Target::Kinds(_) | Target::Cluster => {
                let config = Config::new(urls)
                    .ttl(target.ttl())
                    .operation_timeout(Storm::OPERATION_TIMEOUT)
                    .claim_window(target.claim_window())
                    .pool_size(POOL_SIZE);
                Manager::Redis(RedisMgr::new(config)?)
            }
            Target::Database => {
                let config = MySqlConfig::new(urls)
                    .ttl(target.ttl())
                    .operation_timeout(Storm::OPERATION_TIMEOUT)
                    .max_connections(POOL_SIZE);
                Manager::Database(MySqlMgr::new(config)?)
            }
        })
    }

    fn locks(&self) -> &dyn LockManager {
        match self {
            Manager::Redis(mgr) => mgr,
            Manager::Database(mgr) => mgr,
        }
    }

    /// The manager, if the storm has all kinds of locks.
    fn kinds(&self, target: Target) -> Option<&RedisMgr> {
        match self {
            Manager::Redis(mgr) if matches!(target, Target::Kinds(_)) => Some(mgr),
            _ => None,
        }
    }

    fn metrics(&self) -> Metrics {
        match self {
            Manager::Redis(mgr) => mgr.metrics(),
            Manager::Database(mgr) => mgr.metrics(),
        }
    }
}

/// The threads and open files of this process.
#[derive(Debug)]
struct OpenResources {
    threads: usize,
    files: usize,
}

impl OpenResources {
    fn count() -> OpenResources {
        let count = |folder| fs::read_dir(folder).map_or(0, Iterator::count);
        OpenResources { threads: count("/proc/self/task"), files: count("/proc/self/fd") }
    }

    /// Waits until no more are left than before; returns what is left after the timeout.
    fn wait_for_leftovers(&self) -> Option<String> {
        let limit = now() + nanos(RELEASE_TIMEOUT);
        loop {
            let left = OpenResources::count();
            if left.threads <= self.threads && left.files <= self.files {
                return None;
            }
            if now() > limit {
                let (threads, files) = (left.threads - self.threads, left.files - self.files);
                return Some(format!(
                    "{threads} threads and {files} open files of a dropped manager"
                ));
            }
            pause(Duration::from_millis(10));
        }
    }
}

/// Returns a flag that is set when the parent asks this process to end. If the parent dies, this
/// process exits.
fn watch_parent() -> Arc<AtomicBool> {
    let finish = Arc::new(AtomicBool::new(false));
    let flag = finish.clone();
    thread::spawn(move || {
        let mut lines = std::io::stdin().lock().lines();
        match lines.next() {
            Some(Ok(_)) => flag.store(true, Ordering::Release),
            _ => process::exit(1),
        }
        // Watch until the end, because a worker that hangs must not outlive its parent either.
        let _ = lines.next();
        process::exit(1);
    });
    finish
}

/// Records how much later than requested this process runs, including the time that it is stopped.
fn measure_lateness(recorder: Recorder) {
    thread::spawn(move || {
        // Short delays are added up, because they also add up for a thread of the library.
        let mut late = 0;
        loop {
            let began = now();
            pause(LATENESS_INTERVAL);
            late += (now() - began).saturating_sub(nanos(LATENESS_INTERVAL + USUAL_DELAY));
            if late > nanos(LATENESS_MIN) {
                if recorder.record(0, Event::Late { by: late }).is_err() {
                    return;
                }
                late = 0;
            }
        }
    });
}

pub(crate) fn measure_parent_lateness(journal: Arc<Journal>) {
    measure_lateness(Recorder { journal, seat: 0 });
}

/// Occupies all pooled connections for a while, over and over.
fn exhaust_pool(mgr: &RedisMgr, recorder: &Recorder, ended: &AtomicBool, mut rng: Rng) -> Outcome {
    while !ended.load(Ordering::Acquire) {
        let mut taken = Vec::new();
        for _ in 0..POOL_SIZE {
            let (connection, _) =
                recorder
                    .call(0, "connection", Some(Storm::OPERATION_TIMEOUT), || mgr.connection())?;
            taken.extend(connection.ok());
        }
        pause_unless_ended(ended, Duration::from_millis(rng.u64(50..700)));
        drop(taken);
        pause_unless_ended(ended, Duration::from_millis(rng.u64(1000..5000)));
    }
    Ok(())
}

fn pause_unless_ended(ended: &AtomicBool, length: Duration) {
    let until = now() + nanos(length);
    while now() < until && !ended.load(Ordering::Acquire) {
        pause(Duration::from_millis(20).min(length));
    }
}

/// One thread that acquires locks.
struct LockThread<'a> {
    mgr: &'a dyn LockManager,
    /// For all kinds of locks; otherwise there are only mutexes.
    kinds: Option<&'a RedisMgr>,
    is_on_one_server: bool,
    ttl: Duration,
    /// Locks are used for a few milliseconds only.
    is_brief: bool,
    recorder: Recorder,
    locks: u32,
    ended: &'a AtomicBool,
    /// Read-locked while the thread holds a lock.
    gate: &'a RwLock<()>,
}

impl LockThread<'_> {
    fn run(&self, resource: &mut Resource, mut rng: Rng) -> Outcome {
        while !self.ended.load(Ordering::Acquire) {
            let lock = rng.u32(1..=self.locks);
            if let Some(guard) = self.acquire(lock, &mut rng)? {
                self.hold(guard, lock, resource, &mut rng)?;
            }
            if rng.u32(..20) == 0 {
                let name = name_of(lock);
                self.recorder.call(lock, "holder", Some(Storm::OPERATION_TIMEOUT), || {
                    drop(self.mgr.holder(&name))
                })?;
            }
            pause(Duration::from_millis(rng.u64(0..if self.is_brief { 3 } else { 25 })));
        }
        Ok(())
    }

    fn acquire(&self, lock: u32, rng: &mut Rng) -> Outcome<Option<Guard>> {
        let sharing = match self.kinds {
            Some(_) if self.is_on_one_server => kinds::choose(lock, rng),
            Some(_) => kinds::choose_over_nodes(lock, rng),
            None => Sharing::Mutex,
        };
        let mut options = LockOptions::new();
        if rng.u32(..4) == 0 {
            options = options.ttl(self.ttl.mul_f64(0.6));
        }
        let wait = match rng.u32(..6) {
            0 => Some(Duration::ZERO),
            1 => None,
            _ => Some(Duration::from_millis(rng.u64(1..4000))),
        };
        if let Some(wait) = wait {
            options = options.wait(wait);
        }
        self.recorder.record(lock, Event::Wait)?;
        if sharing != Sharing::Mutex {
            self.recorder.record(lock, Event::As { sharing })?;
        }
        if let (Sharing::Foreign, Some(mgr)) = (sharing, self.kinds) {
            self.hold_as_foreign(mgr, lock, rng)?;
            return Ok(None);
        }
        let bound = wait.map(|wait| wait + Storm::OPERATION_TIMEOUT);
        let name = name_of(lock);
        let (result, _) = self.recorder.call(lock, "lock", bound, || match self.kinds {
            Some(mgr) => kinds::acquire(mgr, &name, sharing, &options),
            None => self.mgr.lock_with(&name, &options).map(Guard::Mutex),
        })?;
        let error = match result {
            Ok(guard) => return Ok(Some(guard)),
            Err(error) => error,
        };
        let kind = match &error {
            error if error.is_contended() => "contended",
            // Other users of the pool can cause this without any fault of a server.
            LockError::PoolExhausted { .. } => "exhausted",
            error if error.is_unavailable() => "unavailable",
            LockError::Refused { .. } => "refused",
            // The worker was stopped before the call returned.
            error if error.is_lost() => "lost",
            LockError::Shutdown if self.ended.load(Ordering::Acquire) => "shutdown",
            _ => return Err(error.into()),
        };
        self.recorder.record(lock, Event::Again { why: format!("{kind}: {error}") })?;
        if kind == "refused" {
            pause(Duration::from_millis(rng.u64(20..100)));
        }
        Ok(None)
    }

    /// Acquires and releases a lock as clients of other libraries do.
    fn hold_as_foreign(&self, mgr: &RedisMgr, lock: u32, rng: &mut Rng) -> Outcome {
        let (key, id) = (lock_key(lock), format!("foreign|pid{}|{}", process::id(), rng.u64(..)));
        let deadline = now() + nanos(kinds::FOREIGN_TTL);
        if !kinds::acquire_foreign(mgr, &key, &id) {
            let why = "contended: another client has it, or it is not known".to_owned();
            return self.recorder.record(lock, Event::Again { why });
        }
        let inside = self.gate.read();
        if now() < deadline {
            self.recorder.record(lock, Event::Enter { deadline, token: 0, id: id.clone() })?;
            pause(Duration::from_millis(rng.u64(0..60)));
            self.recorder.record(lock, Event::Leave)?;
        } else {
            let why = "contended: the reply came too late".to_owned();
            self.recorder.record(lock, Event::Again { why })?;
        }
        drop(inside);
        kinds::release_foreign(mgr, &key, &id);
        Ok(())
    }

    fn hold(&self, mut guard: Guard, lock: u32, resource: &mut Resource, rng: &mut Rng) -> Outcome {
        let inside = self.gate.read();
        let token = guard.fencing_token().as_u64();
        // Read before `is_held`. Otherwise a pause in between would make this holder seem later
        // than it is.
        let entered = now();
        let mut held = false;
        let mut value = None;
        if let Some(deadline) = deadline_if_held(&guard, entered) {
            held = true;
            let enter = Event::Enter { deadline, token, id: guard.id().to_string() };
            self.recorder.record_as_of(entered, lock, enter)?;
            if guard.sharing().is_alone() {
                value = resource.read(lock, token)?;
            }
        }
        // Now and then long enough to need a renewal.
        let work = match rng.u32(..30) {
            _ if self.is_brief => rng.u64(0..4),
            0 => rng.u64(500..3000),
            _ => rng.u64(0..60),
        };
        let end = now() + nanos(Duration::from_millis(work));
        while held && now() < end && !self.ended.load(Ordering::Acquire) {
            // Wakes at a loss, but leaves the message for `record_loss`.
            let mut loss = Select::new();
            loss.recv(guard.lost());
            let _ = loss.ready_timeout(Duration::from_millis(rng.u64(1..20)));
            held = self.check(&guard, lock)?;
        }
        held = held && self.check(&guard, lock)?;
        if !held {
            self.record_loss(&guard, lock)?;
            // Gives a successor time to reach the resource.
            pause_unless_ended(self.ended, Duration::from_millis(rng.u64(0..600)));
            // A lost lock must stay lost.
            self.check(&guard, lock)?;
        }
        // A holder that has lost its lock should not write. This one does, to show that the
        // resource refuses it.
        if let Some(value) = value {
            resource.write(lock, token, value + 1)?;
        }
        if let Guard::Write(writer) = guard {
            if !held || rng.u32(..3) > 0 {
                guard = Guard::Write(writer);
            } else if let Some(reader) = self.downgrade(writer, lock)? {
                guard = Guard::Read(reader);
                pause_unless_ended(self.ended, Duration::from_millis(rng.u64(0..60)));
            } else {
                return Ok(());
            }
        }
        if held && !self.check(&guard, lock)? {
            held = false;
            self.record_loss(&guard, lock)?;
        }
        if held {
            self.recorder.record(lock, Event::Leave)?;
        }
        drop(inside);
        let bound = Some(Storm::OPERATION_TIMEOUT);
        if rng.bool() {
            self.recorder.call(lock, "release", bound, || drop(guard.release()))?;
        } else {
            self.recorder.call(lock, "drop", bound, || drop(guard))?;
        }
        Ok(())
    }

    /// Turns a write lock into a read lock. If that fails, the lock is lost or released.
    fn downgrade(&self, writer: WriteGuard, lock: u32) -> Outcome<Option<ReadGuard>> {
        let before = now();
        self.recorder.record_as_of(before, lock, Event::Downgrade)?;
        let bound = Some(Storm::OPERATION_TIMEOUT);
        let (reader, _) = self.recorder.call(lock, "downgrade", bound, || writer.downgrade())?;
        if reader.is_err() {
            self.recorder.record_as_of(before, lock, Event::Leave)?;
        }
        Ok(reader.ok())
    }

    /// Returns whether the lock is still held. If so, records that as of the moment before the
    /// call.
    fn check(&self, guard: &LockGuard, lock: u32) -> Outcome<bool> {
        let before = now();
        let deadline = deadline_if_held(guard, before);
        if let Some(deadline) = deadline {
            self.recorder.record_as_of(before, lock, Event::Look { deadline })?;
        }
        Ok(deadline.is_some())
    }

    fn record_loss(&self, guard: &LockGuard, lock: u32) -> Outcome {
        let at = now();
        // The thread that ends the lease also sends the reason, and may have to wait for a
        // processor in between.
        let why = (0..REASON_TRIES).find_map(|_| guard.lost().recv_timeout(REASON_TIMEOUT).ok());
        let why = why.map_or_else(|| UNREPORTED.to_owned(), |why| why.to_string());
        self.recorder.record_as_of(at, lock, Event::Lost { why })
    }
}

pub(crate) fn name_of(lock: u32) -> String {
    format!("storm-{lock}")
}

/// Returns the deadline of the lease, as seen at `before`, if it has not passed.
///
/// The remaining time is read after `before`. So a pause in between makes the deadline too early,
/// and never too late.
fn deadline_if_held(guard: &LockGuard, before: u64) -> Option<u64> {
    let deadline = before + nanos(guard.remaining());
    guard.is_held().then_some(deadline)
}
