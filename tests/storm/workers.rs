//! The worker processes: starts them, kills and replaces them, stops and continues them, and ends
//! them.

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
    args::WorkerArgs,
    history::{Event, Journal, Record, now},
    nanos, pause,
    support::{Watchdog, process_state},
};

/// How long a worker may take to end after it was asked to. Only one that hangs takes nearly as
/// long.
const EXIT_TIMEOUT: Duration = Duration::from_secs(90);

pub(crate) struct Workers {
    journal: Arc<Journal>,
    args: Vec<WorkerArgs>,
    workers: Vec<Worker>,
    rng: Rng,
}

struct Worker {
    process: Child,
    input: Option<ChildStdin>,
    /// When a stopped worker is to be continued.
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

impl Workers {
    pub(crate) fn start(
        args: Vec<WorkerArgs>,
        journal: Arc<Journal>,
        rng: Rng,
    ) -> Outcome<Workers> {
        let mut all = Workers { journal, args, workers: Vec::new(), rng };
        for index in 0..all.args.len() {
            let worker = all.start_one(index)?;
            all.workers.push(worker);
        }
        Ok(all)
    }

    fn start_one(&mut self, index: usize) -> Outcome<Worker> {
        let watchdog = Watchdog::start();
        let args = WorkerArgs { seed: self.rng.u64(..), ..self.args[index].clone() };
        let program = env::current_exe()?;
        let mut process =
            Command::new(&program).args(args.to_args()).stdin(Stdio::piped()).spawn().map_err(
                |error| format!("cannot start {} as a worker: {error}", program.display()),
            )?;
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

    /// Kills a worker and starts another one in its place.
    pub(crate) fn kill(&mut self, index: usize) -> Outcome {
        let pid = self.workers[index].process.id();
        self.record(pid, Event::Doomed)?;
        self.workers[index].process.kill()?;
        self.workers[index].process.wait()?;
        self.record(pid, Event::Killed)?;
        self.workers[index] = self.start_one(index)?;
        Ok(())
    }

    /// Stops a worker for a while. Returns false if it is stopped already, or if more than half of
    /// the workers would be.
    pub(crate) fn pause(&mut self, index: usize, length: Duration) -> Outcome<bool> {
        let stopped = self.workers.iter().filter(|worker| worker.continue_at.is_some()).count();
        if self.workers[index].continue_at.is_some()
            || (stopped + 1) * 2 > self.workers.len().max(2)
        {
            return Ok(false);
        }
        let pid = self.workers[index].process.id();
        self.workers[index].signal(Signal::STOP)?;
        self.workers[index].continue_at = Some(now() + nanos(length));
        self.record(pid, Event::Stopped)?;
        Ok(true)
    }

    /// Continues the workers whose time has come, or all of them, and replaces those that have
    /// ended.
    pub(crate) fn supervise(&mut self, all: bool) -> Outcome {
        for index in 0..self.workers.len() {
            let pid = self.workers[index].process.id();
            if self.workers[index].continue_at.is_some_and(|at| all || now() >= at) {
                self.workers[index].continue_at = None;
                self.record(pid, Event::Continued)?;
                self.workers[index].signal(Signal::CONT)?;
            }
            if let Some(status) = self.workers[index].process.try_wait()? {
                // The worker has recorded the reason if it could. The storm goes on, and the record
                // is checked later.
                self.record(
                    pid,
                    Event::Failed { why: format!("process {pid} ended with {status}") },
                )?;
                self.record(pid, Event::Killed)?;
                self.workers[index] = self.start_one(index)?;
            }
        }
        Ok(())
    }

    /// Asks all workers to end, and waits until they have.
    pub(crate) fn shut_down(&mut self) -> Outcome {
        self.supervise(true)?;
        for worker in &mut self.workers {
            use std::io::Write;
            // A worker that has already ended is noticed below.
            let _ = worker.input.as_mut().map(|input| input.write_all(b"end\n"));
        }
        let limit = now() + nanos(EXIT_TIMEOUT);
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
                None => format!(
                    "process {pid} did not end in time; its state is {:?}",
                    process_state(pid)
                ),
            };
            self.journal.write(&new_record(pid, Event::Failed { why }))?;
        }
        self.workers.clear();
        Ok(())
    }

    fn record(&self, pid: u32, event: Event) -> Outcome {
        Ok(self.journal.write(&new_record(pid, event))?)
    }
}

fn new_record(pid: u32, event: Event) -> Record {
    Record { at: now(), seat: 0, lock: 0, pid, event }
}
