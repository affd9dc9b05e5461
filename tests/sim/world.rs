//! The world: fibers, of which one runs at a time, and virtual time, which moves on when all of them wait. Everything that is
//! left to chance comes from one seed, so that a seed is a run.

use std::{
    cell::{Cell, RefCell},
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    time::{Duration, SystemTime},
};

use distlock::sim::{SimWorld, enter};

use super::{
    calm::Calm,
    fiber::{Fiber, suspend},
    net::Net,
};

/// Nanoseconds since the beginning of the run.
pub(crate) type Time = u64;

pub(crate) const US: Time = 1_000;
pub(crate) const MS: Time = 1_000_000;
pub(crate) const SEC: Time = 1_000_000_000;
pub(crate) const NEVER: Time = u64::MAX;

/// More than any run takes; what goes on for longer goes round in circles.
const STEPS_MAX: u64 = 300_000;
/// The same for threads of crashed processes that are led to their end.
const LAST_STEPS_MAX: u64 = 200_000;

/// A clock that runs at its own rate and began at its own time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) base: Time,
    pub(crate) ppm: i64,
}

impl Clock {
    pub(crate) fn at(self, time: Time) -> Time {
        let drift = i128::from(time) * i128::from(self.ppm) / 1_000_000;
        u64::try_from(i128::from(self.base) + i128::from(time) + drift).unwrap_or(NEVER)
    }

    /// The first moment of the world at which this clock shows `local` or more.
    pub(crate) fn when(self, local: Time) -> Time {
        if local == NEVER {
            return NEVER;
        }
        let since = i128::from(local.saturating_sub(self.base));
        let mut time = u64::try_from(since * 1_000_000 / i128::from(1_000_000 + self.ppm)).unwrap_or(NEVER);
        while time < NEVER && self.at(time) < local {
            time += 1;
        }
        time
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Runs,
    Paused,
    /// None of its threads runs any more.
    Dead,
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) clock: Clock,
    pub(crate) life: Life,
    /// Threads that could run if the process did.
    backlog: Vec<usize>,
    /// For how long its threads were kept from running, all added up.
    pub(crate) frozen: Time,
    paused_at: Time,
}

struct Task {
    process: usize,
    fiber: Option<Fiber>,
    waiting: Option<Waiting>,
    ticket: u64,
    done: bool,
}

struct Waiting {
    /// Where it sleeps; zero is nowhere.
    place: usize,
    connections: Vec<u64>,
}

pub(crate) enum Event {
    Wake {
        task: usize,
        ticket: u64,
    },
    /// Something arrives over a connection.
    Arrive {
        connection: u64,
        at_node: bool,
    },
    Do(Box<dyn FnOnce(&Sim)>),
}

struct Due {
    at: Time,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.number == other.number
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// How often, and for how long, threads are kept from running where they talk to others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stalls {
    /// In a million.
    pub(crate) often: u32,
    pub(crate) short: Time,
    /// One in so many is this long instead.
    pub(crate) rare: u32,
    pub(crate) long: Time,
}

pub(crate) struct Sim {
    pub(crate) now: Cell<Time>,
    pub(crate) rng: RefCell<fastrand::Rng>,
    pub(crate) net: RefCell<Net>,
    pub(crate) processes: RefCell<Vec<Process>>,
    pub(crate) stalls: Cell<Stalls>,
    pub(crate) calm: RefCell<Calm>,
    /// A defect of the library: whoever writes such words panics.
    pub(crate) defect: RefCell<Option<&'static str>>,
    pub(crate) panics: Cell<u64>,
    tasks: RefCell<Vec<Task>>,
    ready: RefCell<Vec<usize>>,
    current: Cell<usize>,
    /// Through whose eyes the clock is read, if not by the running thread.
    seen_by: Cell<Option<usize>>,
    due: RefCell<BinaryHeap<Reverse<Due>>>,
    number: Cell<u64>,
    steps: Cell<u64>,
    digest: RefCell<DefaultHasher>,
    wrong: RefCell<Vec<String>>,
    trace: Cell<bool>,
    /// The run is over; threads that are left are led to their ends.
    over: Cell<bool>,
}

impl Sim {
    pub(crate) fn new(seed: u64, trace: bool) -> Rc<Sim> {
        Rc::new(Sim {
            now: Cell::new(SEC),
            rng: RefCell::new(fastrand::Rng::with_seed(seed)),
            net: RefCell::new(Net::default()),
            processes: RefCell::new(Vec::new()),
            stalls: Cell::new(Stalls::default()),
            calm: RefCell::default(),
            defect: RefCell::default(),
            panics: Cell::default(),
            tasks: RefCell::new(Vec::new()),
            ready: RefCell::new(Vec::new()),
            current: Cell::new(0),
            seen_by: Cell::new(None),
            due: RefCell::new(BinaryHeap::new()),
            number: Cell::new(0),
            steps: Cell::new(0),
            digest: RefCell::new(DefaultHasher::new()),
            wrong: RefCell::new(Vec::new()),
            trace: Cell::new(trace),
            over: Cell::new(false),
        })
    }

    pub(crate) fn say(&self, what: impl FnOnce() -> String) {
        if self.trace.get() {
            println!("{:>13.6} {}", (self.now.get() - SEC) as f64 / SEC as f64, what());
        }
    }

    /// Something that must not be.
    pub(crate) fn wrong(&self, what: String) {
        self.say(|| format!("WRONG: {what}"));
        let at = (self.now.get() - SEC) as f64 / SEC as f64;
        self.wrong.borrow_mut().push(format!("at {at:.6} s: {what}"));
    }

    pub(crate) fn faults_found(&self) -> Vec<String> {
        self.wrong.borrow().clone()
    }

    /// Differs between runs that differ.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.borrow().finish()
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.get()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.get()
    }

    pub(crate) fn chance(&self, in_a_million: u32) -> bool {
        in_a_million > 0 && self.rng.borrow_mut().u32(..1_000_000) < in_a_million
    }

    pub(crate) fn between(&self, least: Time, most: Time) -> Time {
        self.rng.borrow_mut().u64(least..=most.max(least))
    }

    pub(crate) fn schedule(&self, at: Time, event: Event) {
        let number = self.number.get() + 1;
        self.number.set(number);
        self.due.borrow_mut().push(Reverse(Due { at: at.max(self.now.get()), number, event }));
    }

    pub(crate) fn after(&self, span: Time, act: impl FnOnce(&Sim) + 'static) {
        self.schedule(self.now.get().saturating_add(span), Event::Do(Box::new(act)));
    }

    pub(crate) fn add_process(&self, clock: Clock) -> usize {
        let mut processes = self.processes.borrow_mut();
        processes.push(Process { clock, life: Life::Runs, backlog: Vec::new(), frozen: 0, paused_at: 0 });
        processes.len() - 1
    }

    /// Starts a thread of a process.
    pub(crate) fn start(self: &Rc<Sim>, process: usize, run: impl FnOnce() + 'static) -> usize {
        let sim = self.clone();
        let fiber = Fiber::new(move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                sim.wrong(format!("a thread of process {process} panicked: {}", text.unwrap_or_default()));
            }
        });
        let mut tasks = self.tasks.borrow_mut();
        tasks.push(Task { process, fiber: Some(fiber), waiting: None, ticket: 0, done: false });
        let task = tasks.len() - 1;
        drop(tasks);
        self.make_ready(task);
        task
    }

    fn make_ready(&self, task: usize) {
        let process = self.tasks.borrow()[task].process;
        let process = &mut self.processes.borrow_mut()[process];
        match process.life {
            Life::Runs => self.ready.borrow_mut().push(task),
            Life::Paused | Life::Dead => process.backlog.push(task),
        }
    }

    fn wake(&self, task: usize) {
        if self.tasks.borrow_mut()[task].waiting.take().is_some() {
            self.make_ready(task);
        }
    }

    /// None of its threads runs, until it is continued.
    pub(crate) fn pause(&self, process: usize, life: Life) {
        let mut processes = self.processes.borrow_mut();
        let stopped = &mut processes[process];
        if stopped.life == Life::Runs {
            stopped.paused_at = self.now.get();
        }
        stopped.life = life;
        let tasks = self.tasks.borrow();
        self.ready.borrow_mut().retain(|task| {
            let stays = tasks[*task].process != process;
            if !stays {
                stopped.backlog.push(*task);
            }
            stays
        });
    }

    pub(crate) fn unpause(&self, process: usize) {
        let backlog = {
            let stopped = &mut self.processes.borrow_mut()[process];
            if stopped.life != Life::Paused {
                return;
            }
            stopped.life = Life::Runs;
            stopped.frozen += self.now.get() - stopped.paused_at;
            std::mem::take(&mut stopped.backlog)
        };
        self.ready.borrow_mut().extend(backlog);
    }

    pub(crate) fn life(&self, process: usize) -> Life {
        self.processes.borrow()[process].life
    }

    pub(crate) fn frozen(&self, process: usize) -> Time {
        self.processes.borrow()[process].frozen
    }

    /// The process of the running thread.
    pub(crate) fn process(&self) -> usize {
        self.tasks.borrow()[self.current.get()].process
    }

    /// Looks at something of a process with its clock.
    pub(crate) fn as_process<T>(&self, process: usize, look: impl FnOnce() -> T) -> T {
        let outer = self.seen_by.replace(Some(process));
        let seen = look();
        self.seen_by.set(outer);
        seen
    }

    /// The running thread sleeps.
    pub(crate) fn sleep(&self, span: Time) {
        self.wait(0, &[], self.now.get().saturating_add(span));
    }

    pub(crate) fn wait(&self, place: usize, connections: &[u64], until: Time) {
        let current = self.current.get();
        if !self.over.get() {
            let ticket = {
                let task = &mut self.tasks.borrow_mut()[current];
                task.ticket += 1;
                task.waiting = Some(Waiting { place, connections: connections.to_vec() });
                task.ticket
            };
            if until != NEVER {
                self.schedule(until, Event::Wake { task: current, ticket });
            }
        } else {
            self.ready.borrow_mut().push(current);
            self.now.set(if until == NEVER { self.now.get() + SEC } else { until.max(self.now.get()) });
        }
        suspend();
    }

    /// The system has something better to do for a while.
    fn stall(&self) {
        let Stalls { often, short, rare, long } = self.stalls.get();
        if self.over.get() || !self.chance(often) {
            return;
        }
        let longest = if rare > 0 && self.between(1, rare.into()) == 1 { long } else { short };
        let span = self.between(1, longest);
        let process = self.process();
        self.processes.borrow_mut()[process].frozen += span;
        self.calm.borrow_mut().stalled(process, self.now.get() + span, span);
        self.sleep(span);
    }

    /// Wakes those who wait for something to read.
    pub(crate) fn readable(&self, connection: u64) {
        let waits = |task: &Task| task.waiting.as_ref().is_some_and(|on| on.connections.contains(&connection));
        let sleepers: Vec<_> =
            self.tasks.borrow().iter().enumerate().filter(|(_, task)| waits(task)).map(|(n, _)| n).collect();
        sleepers.into_iter().for_each(|task| self.wake(task));
    }

    /// Runs until `done`, or nothing is left to happen, or something is wrong.
    pub(crate) fn run(self: &Rc<Sim>, mut done: impl FnMut() -> bool) {
        while self.wrong.borrow().is_empty() && !done() {
            if self.steps.get() > STEPS_MAX {
                self.wrong("the run goes round in circles".into());
            }
            if !self.step() {
                return;
            }
        }
    }

    fn step(self: &Rc<Sim>) -> bool {
        self.steps.set(self.steps.get() + 1);
        let count = self.ready.borrow().len();
        if count > 0 {
            let pick = if count == 1 { 0 } else { self.rng.borrow_mut().usize(..count) };
            let task = self.ready.borrow_mut().swap_remove(pick);
            self.resume(task);
            return true;
        }
        let Some(Reverse(due)) = self.due.borrow_mut().pop() else { return false };
        self.now.set(due.at);
        match due.event {
            Event::Wake { task, ticket } => {
                if self.tasks.borrow()[task].ticket == ticket {
                    self.wake(task);
                }
            }
            Event::Arrive { connection, at_node } => self.arrive(connection, at_node),
            Event::Do(act) => act(self),
        }
        true
    }

    fn resume(self: &Rc<Sim>, task: usize) {
        (self.now.get(), task).hash(&mut *self.digest.borrow_mut());
        let Some(mut fiber) = self.tasks.borrow_mut()[task].fiber.take() else { return };
        self.current.set(task);
        let ended = fiber.resume();
        let mut tasks = self.tasks.borrow_mut();
        tasks[task].done = ended;
        tasks[task].fiber = (!ended).then_some(fiber);
    }

    pub(crate) fn is_done(&self, task: usize) -> bool {
        self.tasks.borrow()[task].done
    }

    /// Leads the threads that are left to their ends: no server answers any more, and time flies.
    pub(crate) fn end(self: &Rc<Sim>) {
        self.over.set(true);
        self.due.borrow_mut().clear();
        // The dead too: what they had begun has to be put away.
        self.processes.borrow_mut().iter_mut().for_each(|process| process.life = Life::Runs);
        let left: Vec<_> =
            self.tasks.borrow().iter().enumerate().filter(|(_, task)| !task.done).map(|(n, _)| n).collect();
        for task in &left {
            self.tasks.borrow_mut()[*task].waiting = None;
        }
        *self.ready.borrow_mut() = left;
        let last = self.steps.get() + LAST_STEPS_MAX;
        while self.steps.get() < last && !self.ready.borrow().is_empty() {
            self.step();
        }
        let all_done = self.tasks.borrow().iter().all(|task| task.done);
        if !all_done && self.wrong.borrow().is_empty() {
            self.wrong("threads do not come to an end without a server".into());
        }
    }
}

impl SimWorld for Sim {
    fn now(&self) -> u64 {
        if self.over.get() {
            self.now.set(self.now.get() + 10 * MS);
        }
        let process = self.seen_by.get().unwrap_or_else(|| self.process());
        self.processes.borrow()[process].clock.at(self.now.get())
    }

    fn wall_clock(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000) + Duration::from_nanos(self.now.get())
    }

    fn random(&self) -> u128 {
        self.rng.borrow_mut().u128(..)
    }

    fn park(&self, place: usize, until: u64) {
        self.wait(place, &[], self.local(until));
        self.stall();
    }

    fn notify(&self, place: usize, all: bool) {
        let waits = |task: &Task| task.waiting.as_ref().is_some_and(|on| on.place == place);
        let mut sleepers: VecDeque<_> =
            self.tasks.borrow().iter().enumerate().filter(|(_, task)| waits(task)).map(|(number, _)| number).collect();
        if !all && sleepers.len() > 1 {
            let lucky = self.rng.borrow_mut().usize(..sleepers.len());
            sleepers = sleepers.into_iter().skip(lucky).take(1).collect();
        }
        sleepers.into_iter().for_each(|task| self.wake(task));
    }

    fn spawn(&self, _: &str, run: Box<dyn FnOnce() + Send>) -> io::Result<u64> {
        let sim = here();
        Ok(sim.start(self.process(), run) as u64)
    }

    fn join(&self, thread: u64) {
        while !self.is_done(thread as usize) {
            self.sleep(100 * US);
        }
    }

    fn connect(&self, host: &str, _: u16, deadline: u64) -> io::Result<u64> {
        self.stall();
        self.connect_to(host, self.local(deadline))
    }

    fn loopback(&self) -> io::Result<u64> {
        Ok(self.net.borrow_mut().loopback())
    }

    fn poll(&self, connections: &[u64], until: u64) -> Vec<bool> {
        let until = self.local(until);
        loop {
            let ready = self.net.borrow().readable(connections);
            if ready.contains(&true) || self.now.get() >= until || self.over.get() {
                self.stall();
                return if self.over.get() { vec![true; connections.len()] } else { ready };
            }
            self.wait(0, connections, until);
        }
    }

    fn read(&self, connection: u64, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
        if self.over.get() {
            return Ok(0);
        }
        self.net.borrow_mut().read(connection, buffer, peek)
    }

    fn write(&self, connection: u64, bytes: &[u8]) -> io::Result<usize> {
        if self.over.get() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.stall();
        let defect = *self.defect.borrow();
        if defect.is_some_and(|words| bytes.windows(words.len()).any(|some| some == words.as_bytes())) {
            self.panics.set(self.panics.get() + 1);
            panic!("a defect, on purpose");
        }
        self.send(connection, bytes)
    }

    fn shutdown(&self, connection: u64) {
        self.hang_up(connection);
        self.readable(connection);
    }

    fn close(&self, connection: u64) {
        self.hang_up(connection);
    }
}

impl Sim {
    /// A moment on the clock of the running thread as one of the world.
    fn local(&self, until: u64) -> Time {
        self.processes.borrow()[self.process()].clock.when(until)
    }
}

thread_local! {
    static HERE: RefCell<Option<Rc<Sim>>> = const { RefCell::new(None) };
}

/// The world of the calling thread.
pub(crate) fn here() -> Rc<Sim> {
    HERE.with(|here| here.borrow().clone()).expect("a world has been entered")
}

pub(crate) fn live_in(sim: Option<Rc<Sim>>) {
    HERE.with(|here| here.replace(sim.clone()));
    enter(sim.map(|sim| sim as Rc<dyn SimWorld>));
}
