//! A worker: takes locks over and over, works under them, and writes down what it did, what it believed, and when.

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
use distlock::{Config, LockError, LockGuard, LockOptions, RedisMgr};
use fastrand::Rng;
use parking_lot::RwLock;

use crate::{
    Outcome,
    args::{Order, Storm, THREADS},
    history::{Event, Journal, Record, UNTOLD, now},
    nanos, pause,
    resource::Resource,
};

/// So long a manager lives before it is shut down, and everything it had must be gone.
const ERA: Duration = Duration::from_secs(15);
const POOL: u32 = 3;
/// How often it is measured whether the process gets a processor, and how late it may be in all without a word.
const PULSE: Duration = Duration::from_millis(5);
const PUNCTUAL: Duration = Duration::from_millis(5);
/// So much later than asked is usual where nothing else runs.
const USUAL: Duration = Duration::from_micros(200);
/// So long the news of a loss may take, and so often it is waited for: a stop of the process can use up only one of them.
/// Only what never comes comes near it.
const NEWS: Duration = Duration::from_millis(500);
const TIMES: u32 = 4;
/// How long threads and connections may take to go. Only what never goes comes near it.
const GONE: Duration = Duration::from_secs(30);

/// Who writes down, and for whom.
#[derive(Clone)]
pub(crate) struct Diary {
    journal: Arc<Journal>,
    seat: u32,
}

impl Diary {
    fn tell(&self, lock: u32, event: Event) -> Outcome {
        self.tell_as_of(now(), lock, event)
    }

    fn tell_as_of(&self, at: u64, lock: u32, event: Event) -> Outcome {
        Ok(self.journal.write(&Record { at, seat: self.seat, lock, pid: process::id(), event })?)
    }

    /// A call of the library, which has to return within `bound`.
    fn call<T>(&self, lock: u32, what: &str, bound: Option<Duration>, call: impl FnOnce() -> T) -> Outcome<(T, u64)> {
        self.tell(lock, Event::Call { what: what.into(), bound: bound.map(nanos) })?;
        let before = waited();
        let result = call();
        let back = now();
        let delayed = waited().saturating_sub(before);
        self.tell_as_of(back, lock, Event::Back { delayed })?;
        Ok((result, back))
    }
}

/// For how many nanoseconds this thread has been ready to run and did not, as far as the system counts that.
fn waited() -> u64 {
    let counts = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    counts.split(' ').nth(1).and_then(|count| count.parse().ok()).unwrap_or(0)
}

pub(crate) fn run(order: &Order) -> Outcome {
    let journal = Arc::new(Journal::open(&order.record)?);
    let diary = |seat| Diary { journal: journal.clone(), seat };
    let own = diary(0);
    let outcome = eras(order, &diary);
    match &outcome {
        Ok(()) => own.tell(0, Event::Done)?,
        Err(error) => own.tell(0, Event::Failed { why: error.to_string() })?,
    }
    outcome
}

fn eras(order: &Order, diary: &impl Fn(u32) -> Diary) -> Outcome {
    let finish = watch_for_the_end();
    take_pulse(diary(0));
    let seats: Vec<u32> = (order.first_seat..order.first_seat + THREADS).collect();
    let mut resources = seats.iter().map(|seat| Resource::find(&order.resource, *seat)).collect::<Outcome<Vec<_>>>()?;
    let mut seed = Rng::with_seed(order.seed);
    let before = Belongings::count();
    while !finish.load(Ordering::Acquire) {
        let own = diary(order.first_seat + THREADS);
        let config = Config::new(&order.urls)
            .ttl(Storm::TTL)
            .operation_timeout(Storm::OPERATION_TIMEOUT)
            .claim_window(Storm::CLAIM_WINDOW)
            .pool_size(POOL);
        let (mgr, _) = own.call(0, "new", Some(Storm::OPERATION_TIMEOUT), || RedisMgr::new(config))?;
        let mgr = match mgr {
            // Also of a process that was stopped meanwhile.
            Err(error) if error.is_unavailable() => continue,
            mgr => mgr?,
        };
        let (over, gate) = (AtomicBool::new(false), RwLock::new(()));
        let outcome = thread::scope(|threads| {
            let mut hands = Vec::new();
            for (seat, resource) in seats.iter().zip(&mut resources) {
                let hand = Hand { mgr: &mgr, diary: diary(*seat), locks: order.locks, over: &over, gate: &gate };
                let dice = seed.fork();
                hands.push(threads.spawn(move || hand.work(resource, dice)));
            }
            let (glutton, dice) = (diary(order.first_seat + THREADS + 1), seed.fork());
            let (mgr, over) = (&mgr, &over);
            hands.push(threads.spawn(move || exhaust(mgr, &glutton, over, dice)));
            let end = now() + nanos(ERA.mul_f64(0.5 + seed.f64()));
            while now() < end && !finish.load(Ordering::Acquire) && hands.iter().all(|hand| !hand.is_finished()) {
                pause(Duration::from_millis(20));
            }
            over.store(true, Ordering::Release);
            {
                // Whoever is inside leaves first: a shutdown takes the lock away, and nobody would look in time.
                let _nobody_inside = gate.write();
                own.call(0, "shutdown", Some(Storm::OPERATION_TIMEOUT), || mgr.shutdown())?;
            }
            hands.into_iter().try_for_each(|hand| hand.join().map_err(|_| "a thread panicked")?)
        });
        outcome?;
        let metrics = mgr.metrics();
        if metrics.held() > 0 || metrics.waiting() > 0 {
            let what = format!("{} locks held and {} waited for", metrics.held(), metrics.waiting());
            own.tell(0, Event::Leak { what })?;
        }
        own.call(0, "drop-manager", Some(Storm::OPERATION_TIMEOUT), || drop(mgr))?;
        if let Some(what) = before.wait_until_back() {
            own.tell(0, Event::Leak { what })?;
        }
    }
    Ok(())
}

/// What a process has of the system.
#[derive(Debug)]
struct Belongings {
    threads: usize,
    files: usize,
}

impl Belongings {
    fn count() -> Belongings {
        let count = |folder| fs::read_dir(folder).map_or(0, Iterator::count);
        Belongings { threads: count("/proc/self/task"), files: count("/proc/self/fd") }
    }

    /// What is left that was not there before.
    fn wait_until_back(&self) -> Option<String> {
        let limit = now() + nanos(GONE);
        loop {
            let left = Belongings::count();
            if left.threads <= self.threads && left.files <= self.files {
                return None;
            }
            if now() > limit {
                let (threads, files) = (left.threads - self.threads, left.files - self.files);
                return Some(format!("{threads} threads and {files} open files of a manager that is gone"));
            }
            pause(Duration::from_millis(10));
        }
    }
}

/// Set when the parent has said that it is enough. When it is gone, so are we.
fn watch_for_the_end() -> Arc<AtomicBool> {
    let finish = Arc::new(AtomicBool::new(false));
    let flag = finish.clone();
    thread::spawn(move || {
        let mut lines = std::io::stdin().lock().lines();
        match lines.next() {
            Some(Ok(_)) => flag.store(true, Ordering::Release),
            _ => process::exit(1),
        }
        // Until the end, for the same reason; a process that does not end must not outlive its parent either.
        let _ = lines.next();
        process::exit(1);
    });
    finish
}

/// Measures by how much this process gets a processor later than it asked for, stops included.
pub(crate) fn take_pulse(diary: Diary) {
    thread::spawn(move || {
        // Many small waits add up for a thread as they do here.
        let mut late = 0;
        loop {
            let asked = now();
            pause(PULSE);
            late += (now() - asked).saturating_sub(nanos(PULSE + USUAL));
            if late > nanos(PUNCTUAL) {
                if diary.tell(0, Event::Late { by: late }).is_err() {
                    return;
                }
                late = 0;
            }
        }
    });
}

pub(crate) fn parents_pulse(journal: Arc<Journal>) {
    take_pulse(Diary { journal, seat: 0 });
}

/// Takes all pooled connections for a while, over and over.
fn exhaust(mgr: &RedisMgr, diary: &Diary, over: &AtomicBool, mut dice: Rng) -> Outcome {
    while !over.load(Ordering::Acquire) {
        let mut taken = Vec::new();
        for _ in 0..POOL {
            let (connection, _) = diary.call(0, "connection", Some(Storm::OPERATION_TIMEOUT), || mgr.connection())?;
            taken.extend(connection.ok());
        }
        rest(over, Duration::from_millis(dice.u64(50..700)));
        drop(taken);
        rest(over, Duration::from_millis(dice.u64(1000..5000)));
    }
    Ok(())
}

fn rest(over: &AtomicBool, span: Duration) {
    let until = now() + nanos(span);
    while now() < until && !over.load(Ordering::Acquire) {
        pause(Duration::from_millis(20).min(span));
    }
}

/// One thread that takes locks.
struct Hand<'a> {
    mgr: &'a RedisMgr,
    diary: Diary,
    locks: u32,
    over: &'a AtomicBool,
    /// Read by those who are inside.
    gate: &'a RwLock<()>,
}

impl Hand<'_> {
    fn work(&self, resource: &mut Resource, mut dice: Rng) -> Outcome {
        while !self.over.load(Ordering::Acquire) {
            let lock = dice.u32(1..=self.locks);
            if let Some(guard) = self.take(lock, &mut dice)? {
                self.hold(guard, lock, resource, &mut dice)?;
            }
            if dice.u32(..20) == 0 {
                let name = name_of(lock);
                self.diary.call(lock, "holder", Some(Storm::OPERATION_TIMEOUT), || drop(self.mgr.holder(&name)))?;
            }
            pause(Duration::from_millis(dice.u64(0..25)));
        }
        Ok(())
    }

    fn take(&self, lock: u32, dice: &mut Rng) -> Outcome<Option<LockGuard>> {
        let mut options = LockOptions::new();
        if dice.u32(..4) == 0 {
            options = options.ttl(Storm::TTL.mul_f64(0.6));
        }
        let wait = match dice.u32(..6) {
            0 => Some(Duration::ZERO),
            1 => None,
            _ => Some(Duration::from_millis(dice.u64(1..4000))),
        };
        if let Some(wait) = wait {
            options = options.wait(wait);
        }
        self.diary.tell(lock, Event::Wait)?;
        let bound = wait.map(|wait| wait + Storm::OPERATION_TIMEOUT);
        let (result, _) = self.diary.call(lock, "lock", bound, || self.mgr.lock_with(&name_of(lock), &options))?;
        let error = match result {
            Ok(guard) => return Ok(Some(guard)),
            Err(error) => error,
        };
        let kind = match &error {
            error if error.is_contended() => "contended",
            // Which others may have brought about that use the same connections, and no server.
            LockError::PoolExhausted { .. } => "exhausted",
            error if error.is_unavailable() => "unavailable",
            LockError::Refused { .. } => "refused",
            LockError::Shutdown if self.over.load(Ordering::Acquire) => "shutdown",
            _ => return Err(error.into()),
        };
        self.diary.tell(lock, Event::Again { why: format!("{kind}: {error}") })?;
        if kind == "refused" {
            pause(Duration::from_millis(dice.u64(20..100)));
        }
        Ok(None)
    }

    fn hold(&self, guard: LockGuard, lock: u32, resource: &mut Resource, dice: &mut Rng) -> Outcome {
        let inside = self.gate.read();
        let token = guard.fencing_token().as_u64();
        // Before the look that allows us to act: a pause in between must not make us seem later than we are.
        let entered = now();
        let mut held = false;
        let mut value = None;
        if let Some(deadline) = believes(&guard, entered) {
            held = true;
            let enter = Event::Enter { deadline, token, id: guard.id().to_string() };
            self.diary.tell_as_of(entered, lock, enter)?;
            value = resource.read(lock, token)?;
        }
        // Now and then so long that it has to be renewed.
        let work = if dice.u32(..30) == 0 { dice.u64(500..3000) } else { dice.u64(0..60) };
        let end = now() + nanos(Duration::from_millis(work));
        while held && now() < end && !self.over.load(Ordering::Acquire) {
            // A loss is noticed at once, and its news left for `lost`.
            let mut news = Select::new();
            news.recv(guard.lost());
            let _ = news.ready_timeout(Duration::from_millis(dice.u64(1..20)));
            held = self.look(&guard, lock)?;
        }
        held = held && self.look(&guard, lock)?;
        if !held {
            self.lost(&guard, lock)?;
            // Its successor has been there, or not.
            rest(self.over, Duration::from_millis(dice.u64(0..600)));
            // Nothing may bring it back.
            self.look(&guard, lock)?;
        }
        // A holder that has lost its lock should not write. This one does, to show that it gets nowhere.
        if let Some(value) = value {
            resource.write(lock, token, value + 1)?;
        }
        if held && !self.look(&guard, lock)? {
            held = false;
            self.lost(&guard, lock)?;
        }
        if held {
            self.diary.tell(lock, Event::Leave)?;
        }
        drop(inside);
        let bound = Some(Storm::OPERATION_TIMEOUT);
        if dice.bool() {
            self.diary.call(lock, "release", bound, || drop(guard.release()))?;
        } else {
            self.diary.call(lock, "drop", bound, || drop(guard))?;
        }
        Ok(())
    }

    /// Whether the lock is still held; if so, that is recorded as of before the question.
    fn look(&self, guard: &LockGuard, lock: u32) -> Outcome<bool> {
        let before = now();
        let deadline = believes(guard, before);
        if let Some(deadline) = deadline {
            self.diary.tell_as_of(before, lock, Event::Look { deadline })?;
        }
        Ok(deadline.is_some())
    }

    fn lost(&self, guard: &LockGuard, lock: u32) -> Outcome {
        let at = now();
        // Whoever ends a lease tells it, and may have to wait for a processor in between.
        let why = (0..TIMES).find_map(|_| guard.lost().recv_timeout(NEWS).ok());
        let why = why.map_or_else(|| UNTOLD.to_owned(), |why| why.to_string());
        self.diary.tell_as_of(at, lock, Event::Lost { why })
    }
}

pub(crate) fn name_of(lock: u32) -> String {
    format!("storm-{lock}")
}

/// The deadline of the belief, as seen at `before`, if it has not come.
///
/// The time that remains is asked for later than `before`, so that a pause in between makes this too early and not
/// too late.
fn believes(guard: &LockGuard, before: u64) -> Option<u64> {
    let deadline = before + nanos(guard.remaining());
    guard.is_held().then_some(deadline)
}
