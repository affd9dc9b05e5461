//! The worker processes: started, killed and replaced, stopped and woken, and sent home.

use std::{
    env,
    process::{Child, ChildStdin, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    Outcome,
    args::Order,
    history::{Event, Journal, Record, now},
    nanos, pause,
    support::{Watchdog, process_state},
};

/// How long a worker may take to end when it is told to. Only one that hangs comes near it.
const PATIENCE: Duration = Duration::from_secs(90);

pub(crate) struct Crew {
    journal: Arc<Journal>,
    orders: Vec<Order>,
    workers: Vec<Worker>,
    dice: Rng,
}

struct Worker {
    process: Child,
    input: Option<ChildStdin>,
    /// When a stopped one is to go on.
    continue_at: Option<u64>,
    _watchdog: Watchdog,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Worker {
    fn signal(&self, signal: Signal) -> Outcome {
        Ok(kill_process(Pid::from_child(&self.process), signal)?)
    }
}

impl Crew {
    pub(crate) fn hire(orders: Vec<Order>, journal: Arc<Journal>, dice: Rng) -> Outcome<Crew> {
        let mut crew = Crew { journal, orders, workers: Vec::new(), dice };
        for index in 0..crew.orders.len() {
            let worker = crew.start(index)?;
            crew.workers.push(worker);
        }
        Ok(crew)
    }

    fn start(&mut self, index: usize) -> Outcome<Worker> {
        let watchdog = Watchdog::start();
        let order = Order { seed: self.dice.u64(..), ..self.orders[index].clone() };
        let program = env::current_exe()?;
        let mut process = Command::new(&program)
            .args(order.words())
            .stdin(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {} as a worker: {error}", program.display()))?;
        watchdog.guard(process.id());
        let input = process.stdin.take();
        Ok(Worker { process, input, continue_at: None, _watchdog: watchdog })
    }

    pub(crate) fn len(&self) -> usize {
        self.workers.len()
    }

    pub(crate) fn index_of(&self, pid: u32) -> Option<usize> {
        self.workers.iter().position(|worker| worker.process.id() == pid)
    }

    /// Kills a worker, and starts another in its place.
    pub(crate) fn kill(&mut self, index: usize) -> Outcome {
        let pid = self.workers[index].process.id();
        self.tell(pid, Event::Doomed)?;
        self.workers[index].process.kill()?;
        self.workers[index].process.wait()?;
        self.tell(pid, Event::Killed)?;
        self.workers[index] = self.start(index)?;
        Ok(())
    }

    /// Freezes a worker for a while, unless too few would be left.
    pub(crate) fn stop(&mut self, index: usize, span: Duration) -> Outcome<bool> {
        let stopped = self.workers.iter().filter(|worker| worker.continue_at.is_some()).count();
        if self.workers[index].continue_at.is_some() || (stopped + 1) * 2 > self.workers.len().max(2) {
            return Ok(false);
        }
        let pid = self.workers[index].process.id();
        self.workers[index].signal(Signal::STOP)?;
        self.workers[index].continue_at = Some(now() + nanos(span));
        self.tell(pid, Event::Stopped)?;
        Ok(true)
    }

    /// Wakes those whose time has come, and looks whether all are there.
    pub(crate) fn tend(&mut self, all: bool) -> Outcome {
        for index in 0..self.workers.len() {
            let pid = self.workers[index].process.id();
            if self.workers[index].continue_at.is_some_and(|at| all || now() >= at) {
                self.workers[index].continue_at = None;
                self.tell(pid, Event::Continued)?;
                self.workers[index].signal(Signal::CONT)?;
            }
            if let Some(status) = self.workers[index].process.try_wait()? {
                // It has told why, if it could; that is judged. The others go on.
                self.tell(pid, Event::Failed { why: format!("process {pid} ended with {status}") })?;
                self.tell(pid, Event::Killed)?;
                self.workers[index] = self.start(index)?;
            }
        }
        Ok(())
    }

    /// Tells all to end, and waits until they have.
    pub(crate) fn dismiss(&mut self) -> Outcome {
        self.tend(true)?;
        for worker in &mut self.workers {
            use std::io::Write;
            // One that has ended by itself is found below.
            let _ = worker.input.as_mut().map(|input| input.write_all(b"enough\n"));
        }
        let limit = now() + nanos(PATIENCE);
        for worker in &mut self.workers {
            let pid = worker.process.id();
            let status = loop {
                if let Some(status) = worker.process.try_wait()? {
                    break Some(status);
                }
                if now() > limit {
                    break None;
                }
                pause(Duration::from_millis(10));
            };
            let why = match status {
                Some(status) if status.success() => continue,
                Some(status) => format!("process {pid} ended with {status}"),
                None => format!("process {pid} does not end; its state is {:?}", process_state(pid)),
            };
            self.journal.write(&record(pid, Event::Failed { why }))?;
        }
        self.workers.clear();
        Ok(())
    }

    fn tell(&self, pid: u32, event: Event) -> Outcome {
        Ok(self.journal.write(&record(pid, event))?)
    }
}

fn record(pid: u32, event: Event) -> Record {
    Record { at: now(), seat: 0, lock: 0, pid, event }
}
