//! The simulated machine: its threads, its clocks and its scheduler. Each thread is a fiber. One
//! fiber runs at a time, until it waits. When all of them wait, virtual time jumps to the next
//! event. All random choices come from one seed, so that running the same seed again repeats the
//! run exactly.

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
    fault_free::FaultLog,
    fiber::{Fiber, suspend},
    net::Net,
};

/// Nanoseconds of virtual time since the start of the run.
pub(crate) type Time = u64;

pub(crate) const US: Time = 1_000;
pub(crate) const MS: Time = 1_000_000;
pub(crate) const SEC: Time = 1_000_000_000;
pub(crate) const NEVER: Time = u64::MAX;

/// Maximum number of scheduler steps in a run; a run that needs more is taken for an endless loop.
const STEPS_MAX: u64 = 300_000;
/// Maximum number of scheduler steps for ending the remaining threads after a run.
const SHUTDOWN_STEPS_MAX: u64 = 200_000;

/// A clock with a rate and a starting time of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) base: Time,
    pub(crate) drift_ppm: i64,
}

impl Clock {
    pub(crate) fn at(self, time: Time) -> Time {
        let drift = i128::from(time) * i128::from(self.drift_ppm) / 1_000_000;
        u64::try_from(i128::from(self.base) + i128::from(time) + drift).unwrap_or(NEVER)
    }

    /// Earliest virtual time at which this clock shows `local` or later.
    pub(crate) fn when(self, local: Time) -> Time {
        if local == NEVER {
            return NEVER;
        }
        let since = i128::from(local.saturating_sub(self.base));
        let mut time = u64::try_from(since * 1_000_000 / i128::from(1_000_000 + self.drift_ppm))
            .unwrap_or(NEVER);
        while time < NEVER && self.at(time) < local {
            time += 1;
        }
        time
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Running,
    Paused,
    /// Crashed; none of its threads runs any more.
    Dead,
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) clock: Clock,
    pub(crate) state: ProcessState,
    /// Threads that are ready to run once the process is continued.
    backlog: Vec<usize>,
    /// Total time for which its threads were kept from running by pauses and stalls.
    pub(crate) suspended: Time,
    paused_at: Time,
}

struct Task {
    process: usize,
    fiber: Option<Fiber>,
    waiting: Option<Waiting>,
    wait_number: u64,
    done: bool,
}

struct Waiting {
    /// The `place` that the thread parks at; zero for none.
    place: usize,
    connections: Vec<u64>,
}

pub(crate) enum Event {
    Wake {
        task: usize,
        wait_number: u64,
    },
    /// A packet arrives at one end of a connection.
    Arrive {
        connection: u64,
        at_node: bool,
    },
    Do(Box<dyn FnOnce(&Sim)>),
}

struct Scheduled {
    at: Time,
    sequence: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.sequence == other.sequence
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

/// How often, and for how long, a thread is kept from running when it does I/O or parks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stalls {
    /// Number of stalls per million opportunities.
    pub(crate) per_million: u32,
    pub(crate) short_max: Time,
    /// One in this many stalls lasts up to `long_max` instead of `short_max`; zero for none.
    pub(crate) long_one_in: u32,
    pub(crate) long_max: Time,
}

pub(crate) struct Sim {
    pub(crate) now: Cell<Time>,
    pub(crate) rng: RefCell<fastrand::Rng>,
    pub(crate) net: RefCell<Net>,
    pub(crate) processes: RefCell<Vec<Process>>,
    pub(crate) stalls: Cell<Stalls>,
    pub(crate) fault_log: RefCell<FaultLog>,
    /// Simulates a defect of the library: writing a request that contains this text panics.
    pub(crate) panic_on_write_of: RefCell<Option<&'static str>>,
    /// Threads of this name cannot be started.
    pub(crate) refused_thread: Cell<Option<&'static str>>,
    pub(crate) panic_count: Cell<u64>,
    tasks: RefCell<Vec<Task>>,
    ready: RefCell<Vec<usize>>,
    current: Cell<usize>,
    /// Process whose clock is read instead of that of the running thread's process.
    clock_of: Cell<Option<usize>>,
    events: RefCell<BinaryHeap<Reverse<Scheduled>>>,
    sequence: Cell<u64>,
    steps: Cell<u64>,
    digest: RefCell<DefaultHasher>,
    violations: RefCell<Vec<String>>,
    verbose: Cell<bool>,
    /// The run has ended, and `shut_down` is ending the remaining threads.
    shutting_down: Cell<bool>,
}

impl Sim {
    pub(crate) fn new(seed: u64, verbose: bool) -> Rc<Sim> {
        Rc::new(Sim {
            now: Cell::new(SEC),
            rng: RefCell::new(fastrand::Rng::with_seed(seed)),
            net: RefCell::new(Net::default()),
            processes: RefCell::new(Vec::new()),
            stalls: Cell::new(Stalls::default()),
            fault_log: RefCell::default(),
            panic_on_write_of: RefCell::default(),
            refused_thread: Cell::default(),
            panic_count: Cell::default(),
            tasks: RefCell::new(Vec::new()),
            ready: RefCell::new(Vec::new()),
            current: Cell::new(0),
            clock_of: Cell::new(None),
            events: RefCell::new(BinaryHeap::new()),
            sequence: Cell::new(0),
            steps: Cell::new(0),
            digest: RefCell::new(DefaultHasher::new()),
            violations: RefCell::new(Vec::new()),
            verbose: Cell::new(verbose),
            shutting_down: Cell::new(false),
        })
    }

    pub(crate) fn log(&self, what: impl FnOnce() -> String) {
        if self.verbose.get() {
            println!("{:>13.6} {}", (self.now.get() - SEC) as f64 / SEC as f64, what());
        }
    }

    /// Records that an invariant was violated, which ends the run.
    pub(crate) fn violation(&self, what: String) {
        self.log(|| format!("VIOLATION: {what}"));
        let at = (self.now.get() - SEC) as f64 / SEC as f64;
        self.violations.borrow_mut().push(format!("at {at:.6} s: {what}"));
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.violations.borrow().clone()
    }

    /// Hash of the schedule; differs between runs that scheduled differently.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.borrow().finish()
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.get()
    }

    pub(crate) fn is_shutting_down(&self) -> bool {
        self.shutting_down.get()
    }

    pub(crate) fn chance(&self, per_million: u32) -> bool {
        per_million > 0 && self.rng.borrow_mut().u32(..1_000_000) < per_million
    }

    pub(crate) fn between(&self, min: Time, max: Time) -> Time {
        self.rng.borrow_mut().u64(min..=max.max(min))
    }

    pub(crate) fn schedule(&self, at: Time, event: Event) {
        let sequence = self.sequence.get() + 1;
        self.sequence.set(sequence);
        self.events.borrow_mut().push(Reverse(Scheduled {
            at: at.max(self.now.get()),
            sequence,
            event,
        }));
    }

    pub(crate) fn after(&self, span: Time, act: impl FnOnce(&Sim) + 'static) {
        self.schedule(self.now.get().saturating_add(span), Event::Do(Box::new(act)));
    }

    pub(crate) fn add_process(&self, clock: Clock) -> usize {
        let mut processes = self.processes.borrow_mut();
        processes.push(Process {
            clock,
            state: ProcessState::Running,
            backlog: Vec::new(),
            suspended: 0,
            paused_at: 0,
        });
        processes.len() - 1
    }

    /// Starts a thread of a process. A panic of the thread is a violation.
    pub(crate) fn start_thread(
        self: &Rc<Sim>,
        process: usize,
        run: impl FnOnce() + 'static,
    ) -> usize {
        let sim = self.clone();
        let fiber = Fiber::new(move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                let text = panic.downcast_ref::<String>().cloned();
                let text =
                    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                sim.violation(format!(
                    "a thread of process {process} panicked: {}",
                    text.unwrap_or_default()
                ));
            }
        });
        let mut tasks = self.tasks.borrow_mut();
        tasks.push(Task {
            process,
            fiber: Some(fiber),
            waiting: None,
            wait_number: 0,
            done: false,
        });
        let task = tasks.len() - 1;
        drop(tasks);
        self.make_ready(task);
        task
    }

    fn make_ready(&self, task: usize) {
        let process = self.tasks.borrow()[task].process;
        let process = &mut self.processes.borrow_mut()[process];
        match process.state {
            ProcessState::Running => self.ready.borrow_mut().push(task),
            ProcessState::Paused | ProcessState::Dead => process.backlog.push(task),
        }
    }

    fn wake(&self, task: usize) {
        if self.tasks.borrow_mut()[task].waiting.take().is_some() {
            self.make_ready(task);
        }
    }

    /// Stops all threads of a process, which becomes paused or dead. `unpause` continues a paused
    /// process, but not a dead one.
    pub(crate) fn pause(&self, process: usize, state: ProcessState) {
        let mut processes = self.processes.borrow_mut();
        let stopped = &mut processes[process];
        if stopped.state == ProcessState::Running {
            stopped.paused_at = self.now.get();
        }
        stopped.state = state;
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
            if stopped.state != ProcessState::Paused {
                return;
            }
            stopped.state = ProcessState::Running;
            stopped.suspended += self.now.get() - stopped.paused_at;
            std::mem::take(&mut stopped.backlog)
        };
        self.ready.borrow_mut().extend(backlog);
    }

    pub(crate) fn process_state(&self, process: usize) -> ProcessState {
        self.processes.borrow()[process].state
    }

    pub(crate) fn suspended_total(&self, process: usize) -> Time {
        self.processes.borrow()[process].suspended
    }

    /// The process of the running thread.
    pub(crate) fn process(&self) -> usize {
        self.tasks.borrow()[self.current.get()].process
    }

    /// Runs `read` with the clock of another process.
    pub(crate) fn on_clock_of<T>(&self, process: usize, read: impl FnOnce() -> T) -> T {
        let outer = self.clock_of.replace(Some(process));
        let value = read();
        self.clock_of.set(outer);
        value
    }

    /// Blocks the running thread.
    pub(crate) fn sleep(&self, span: Time) {
        self.wait(0, &[], self.now.get().saturating_add(span));
    }

    pub(crate) fn wait(&self, place: usize, connections: &[u64], until: Time) {
        let current = self.current.get();
        if !self.shutting_down.get() {
            let wait_number = {
                let task = &mut self.tasks.borrow_mut()[current];
                task.wait_number += 1;
                task.waiting = Some(Waiting { place, connections: connections.to_vec() });
                task.wait_number
            };
            if until != NEVER {
                self.schedule(until, Event::Wake { task: current, wait_number });
            }
        } else {
            self.ready.borrow_mut().push(current);
            self.now.set(if until == NEVER {
                self.now.get() + SEC
            } else {
                until.max(self.now.get())
            });
        }
        suspend();
    }

    /// Delays the running thread at random, as a busy machine does.
    fn stall(&self) {
        let Stalls { per_million, short_max, long_one_in, long_max } = self.stalls.get();
        if self.shutting_down.get() || !self.chance(per_million) {
            return;
        }
        let longest = if long_one_in > 0 && self.between(1, long_one_in.into()) == 1 {
            long_max
        } else {
            short_max
        };
        let span = self.between(1, longest);
        let process = self.process();
        self.processes.borrow_mut()[process].suspended += span;
        self.fault_log.borrow_mut().add_stall(process, self.now.get() + span, span);
        self.sleep(span);
    }

    /// Wakes the threads that wait for this connection to become readable.
    pub(crate) fn wake_readers(&self, connection: u64) {
        let waits = |task: &Task| {
            task.waiting.as_ref().is_some_and(|on| on.connections.contains(&connection))
        };
        let waiters: Vec<_> = self
            .tasks
            .borrow()
            .iter()
            .enumerate()
            .filter(|(_, task)| waits(task))
            .map(|(n, _)| n)
            .collect();
        waiters.into_iter().for_each(|task| self.wake(task));
    }

    /// Runs until `done` returns true, no event is left, or an invariant is violated.
    pub(crate) fn run_until(self: &Rc<Sim>, mut done: impl FnMut() -> bool) {
        while self.violations.borrow().is_empty() && !done() {
            if self.steps.get() > STEPS_MAX {
                self.violation(
                    "the run does not end: it has reached the maximum number of steps".into(),
                );
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
        let Some(Reverse(next)) = self.events.borrow_mut().pop() else { return false };
        self.now.set(next.at);
        match next.event {
            Event::Wake { task, wait_number } => {
                if self.tasks.borrow()[task].wait_number == wait_number {
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

    /// Ends the remaining threads: every connection fails, and each reading of the clock advances
    /// time.
    pub(crate) fn shut_down(self: &Rc<Sim>) {
        self.shutting_down.set(true);
        self.events.borrow_mut().clear();
        // Crashed processes run again too; otherwise everything that their stacks own would leak.
        self.processes
            .borrow_mut()
            .iter_mut()
            .for_each(|process| process.state = ProcessState::Running);
        let left: Vec<_> = self
            .tasks
            .borrow()
            .iter()
            .enumerate()
            .filter(|(_, task)| !task.done)
            .map(|(n, _)| n)
            .collect();
        for task in &left {
            self.tasks.borrow_mut()[*task].waiting = None;
        }
        *self.ready.borrow_mut() = left;
        let last = self.steps.get() + SHUTDOWN_STEPS_MAX;
        while self.steps.get() < last && !self.ready.borrow().is_empty() {
            self.step();
        }
        let all_done = self.tasks.borrow().iter().all(|task| task.done);
        if !all_done && self.violations.borrow().is_empty() {
            self.violation("some threads do not end when every connection is broken".into());
        }
    }
}

impl SimWorld for Sim {
    fn now(&self) -> u64 {
        if self.shutting_down.get() {
            self.now.set(self.now.get() + 10 * MS);
        }
        let process = self.clock_of.get().unwrap_or_else(|| self.process());
        self.processes.borrow()[process].clock.at(self.now.get())
    }

    fn wall_clock(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH
            + Duration::from_secs(1_700_000_000)
            + Duration::from_nanos(self.now.get())
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
        let mut waiters: VecDeque<_> = self
            .tasks
            .borrow()
            .iter()
            .enumerate()
            .filter(|(_, task)| waits(task))
            .map(|(task, _)| task)
            .collect();
        if !all && waiters.len() > 1 {
            let chosen = self.rng.borrow_mut().usize(..waiters.len());
            waiters = waiters.into_iter().skip(chosen).take(1).collect();
        }
        waiters.into_iter().for_each(|task| self.wake(task));
    }

    fn spawn(&self, name: &str, run: Box<dyn FnOnce() + Send>) -> io::Result<u64> {
        let sim = current_sim();
        if self.refused_thread.get() == Some(name) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(sim.start_thread(self.process(), run) as u64)
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
            if ready.contains(&true) || self.now.get() >= until || self.shutting_down.get() {
                self.stall();
                return if self.shutting_down.get() {
                    vec![true; connections.len()]
                } else {
                    ready
                };
            }
            self.wait(0, connections, until);
        }
    }

    fn read(&self, connection: u64, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
        if self.shutting_down.get() {
            return Ok(0);
        }
        self.net.borrow_mut().read(connection, buffer, peek)
    }

    fn write(&self, connection: u64, bytes: &[u8]) -> io::Result<usize> {
        if self.shutting_down.get() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.stall();
        let trigger = *self.panic_on_write_of.borrow();
        if trigger.is_some_and(|text| bytes.windows(text.len()).any(|part| part == text.as_bytes()))
        {
            self.panic_count.set(self.panic_count.get() + 1);
            panic!("panicking on purpose");
        }
        self.send(connection, bytes)
    }

    fn shutdown(&self, connection: u64) {
        self.close_connection(connection);
        self.wake_readers(connection);
    }

    fn close(&self, connection: u64) {
        self.close_connection(connection);
    }
}

impl Sim {
    /// Converts a time on the clock of the running thread's process to virtual time.
    fn local(&self, until: u64) -> Time {
        self.processes.borrow()[self.process()].clock.when(until)
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Sim>>> = const { RefCell::new(None) };
}

/// The simulator that the calling thread runs in.
pub(crate) fn current_sim() -> Rc<Sim> {
    CURRENT.with(|current| current.borrow().clone()).expect("this thread runs in no simulator")
}

pub(crate) fn enter_sim(sim: Option<Rc<Sim>>) {
    CURRENT.with(|current| current.replace(sim.clone()));
    enter(sim.map(|sim| sim as Rc<dyn SimWorld>));
}
