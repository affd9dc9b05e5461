//! The parent process: starts the children, injects faults, replaces killed children, and shows
//! progress.

use std::{
    env,
    io::{IsTerminal, stdout},
    path::PathBuf,
    process::{Child as Process, ChildStdin, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use super::{
    LOCK,
    args::{Child, Options},
    chaos::{Chaos, Fault},
    child_status::ChildTable,
    node_status::NodeTable,
    outages::{Outages, Step},
    screen::{LiveBlock, Palette, print},
    servers::Servers,
};
use crate::{
    common::{Cleanup, Result, nanos, now, sleep},
    history::{Change, Event, Journal, Reader, Record, Terms},
};

/// Interval between two reads of the record.
const READ_INTERVAL: Duration = Duration::from_millis(5);
/// Interval between two updates of the live display.
const DRAW_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of children for the live display, which must fit on a screen.
const LIVE_CHILDREN_MAX: u32 = 20;
/// Maximum time without any progress, in addition to the ttl.
const NO_PROGRESS_MAX: Duration = Duration::from_secs(30);
/// Duration of a stop, in multiples of the ttl.
const STOP_TTLS: f64 = 1.4;

struct Parent<'a> {
    options: &'a Options,
    cleanup: &'a Cleanup,
    servers: Servers<'a>,
    record: PathBuf,
    resource: String,
    journal: Journal,
    reader: Reader,
    records: Vec<Record>,
    children: ChildTable,
    nodes: NodeTable,
    /// Nodes that have been started and do not respond yet, each with the time of its start.
    starting_nodes: Vec<(usize, u64)>,
    running: Vec<RunningChild<'a>>,
    palette: Palette,
    /// `None` if the output is not a terminal.
    live: Option<LiveBlock>,
}

/// A child process. It is killed and waited for when this value is dropped.
struct RunningChild<'a> {
    child: u32,
    process: Process,
    cleanup: &'a Cleanup,
    /// When to continue the process, if it is stopped.
    continue_at: Option<u64>,
    /// The child ends when this pipe is closed.
    _stdin: Option<ChildStdin>,
}

/// Runs the demo and returns its record.
pub(crate) fn run(options: &Options) -> Result<Vec<Record>> {
    let cleanup = Cleanup::start()?;
    let started = now();
    let mut servers = Servers::start(options, &cleanup)?;
    let palette = Palette::of_stdout();
    let record = options.record.clone().unwrap_or_else(|| cleanup.folder().join("record"));
    std::fs::write(&record, "")
        .map_err(|error| format!("cannot write {}: {error}", record.display()))?;
    print(&introduction(options, &servers));
    let resource =
        servers.resource(&format!("distlock:demo:{}:{:x}", std::process::id(), now()))?;
    let is_live = stdout().is_terminal() && options.children <= LIVE_CHILDREN_MAX;
    let start = now();
    let mut parent = Parent {
        options,
        cleanup: &cleanup,
        resource: resource.key().to_owned(),
        journal: Journal::open(&record)?,
        reader: Reader::open(&record)?,
        record,
        records: Vec::new(),
        children: ChildTable::new(options.children, options.rounds, start),
        nodes: NodeTable::new(servers.nodes().iter().map(|server| server.label()), start),
        starting_nodes: (1..=servers.nodes().len()).map(|node| (node, started)).collect(),
        servers,
        running: Vec::new(),
        palette,
        live: is_live.then(LiveBlock::default),
    };
    let outcome = parent.run();
    let records = std::mem::take(&mut parent.records);
    // The children must end before the resource is removed.
    parent.running.clear();
    outcome.and(resource.remove())?;
    if let Some(path) = &options.record {
        print(&format!("\nRecord: {}\n", path.display()));
    }
    Ok(records)
}

fn introduction(options: &Options, servers: &Servers<'_>) -> String {
    let mut text = format!(
        "{} processes compete for the lock {LOCK}. Each acquires it {} and works for {:?} to \
         {:?}.\n\
         The ttl is {:?}.\n",
        options.children,
        if options.rounds == 1 { "once".into() } else { format!("{} times", options.rounds) },
        options.work.shortest(),
        options.work.longest(),
        options.ttl,
    );
    text.push_str(&servers.description(options.ttl));
    if options.chaos {
        text.push_str(&format!(
            "Chaos: some processes are killed, others are stopped for {:?}, longer than the ttl. \
             To repeat: --seed {}\n",
            options.ttl.mul_f64(STOP_TTLS),
            options.seed
        ));
    }
    text.push('\n');
    text
}

impl Parent<'_> {
    fn run(&mut self) -> Result {
        self.journal.note(
            0,
            std::process::id(),
            Event::Plan { children: self.options.children },
        )?;
        if self.servers.has_database() {
            // A database grants the lock of a killed process at once.
            let (nodes, is_database, ttl) = (1, true, nanos(self.options.ttl));
            let terms = Terms { nodes, is_database, ttl, ..Terms::default() };
            self.journal.note(0, std::process::id(), Event::Terms(terms))?;
        }
        for child in 1..=self.options.children {
            self.start_child(child, self.options.rounds)?;
        }
        let total_rounds = self.options.children * self.options.rounds;
        let mut chaos = Chaos::new(self.options.seed, total_rounds, self.options.work.shortest());
        let mut outages = Outages::new(self.options.seed, self.options.nodes, total_rounds);
        let (mut draw_at, mut last_progress) = (0, now());
        while !(self.running.is_empty() && outages.is_finished() && self.starting_nodes.is_empty())
        {
            sleep(READ_INTERVAL);
            if self.read_records()? {
                last_progress = now();
            }
            self.update_nodes(&mut outages)?;
            self.continue_stopped()?;
            if self.options.chaos
                && let Some((fault, child)) = chaos.next_fault(&self.children, now())
            {
                self.inject(fault, child)?;
            }
            self.remove_ended()?;
            if now() >= draw_at {
                self.draw();
                draw_at = now() + nanos(DRAW_INTERVAL);
            }
            let limit = NO_PROGRESS_MAX + self.options.ttl;
            if now() - last_progress > nanos(limit) {
                return Err(format!("no progress for {limit:?}: {}", self.servers.holder()).into());
            }
        }
        self.read_records()?;
        self.draw();
        Ok(())
    }

    fn start_child(&mut self, child: u32, rounds: u32) -> Result {
        let args = Child {
            child,
            rounds,
            work: self.options.work,
            ttl: self.options.ttl,
            resource: self.resource.clone(),
            record: self.record.clone(),
        };
        let mut process = Command::new(env::current_exe()?)
            .args(args.to_args())
            .envs(self.servers.environment())
            .stdin(Stdio::piped())
            .spawn()?;
        let stdin = process.stdin.take();
        let running = RunningChild {
            child,
            process,
            cleanup: self.cleanup,
            continue_at: None,
            _stdin: stdin,
        };
        self.cleanup.register(running.pid())?;
        self.running.push(running);
        Ok(())
    }

    /// Kills and restarts nodes when it is due, and records the changes of all nodes.
    fn update_nodes(&mut self, outages: &mut Outages) -> Result {
        for node in self.nodes.ended_quarantines(now()) {
            self.record_node(node, Change::Votes)?;
        }
        if let Some(step) = outages.next_step(self.children.total_rounds(), &self.nodes) {
            match step {
                Step::Kill(node) => {
                    self.servers.nodes()[node - 1].kill();
                    self.record_node(node, Change::Down)?;
                }
                Step::Restart(node) => {
                    // Taken before the start: the quarantine lasts for one ttl from then on.
                    self.starting_nodes.push((node, now()));
                    self.servers.nodes()[node - 1].restart()?;
                }
            }
        }
        for (node, started) in std::mem::take(&mut self.starting_nodes) {
            if self.servers.nodes()[node - 1].is_up()? {
                self.record_node(
                    node,
                    Change::Up { votes_from: started + nanos(self.options.ttl) },
                )?;
            } else {
                self.starting_nodes.push((node, started));
            }
        }
        Ok(())
    }

    fn record_node(&mut self, node: usize, change: Change) -> Result {
        let pid = self.servers.nodes()[node - 1].pid().unwrap_or(0);
        self.journal.note(0, pid, Event::Node { node, change })?;
        self.read_records()?;
        Ok(())
    }

    /// Reads new records. Returns whether any of them is progress.
    fn read_records(&mut self) -> Result<bool> {
        let records = self.reader.read_on()?;
        for record in &records {
            let lines = [self.nodes.apply(record), self.children.apply(record)];
            if self.live.is_none() {
                lines.into_iter().flatten().for_each(|line| print(&line));
            }
        }
        let has_progress =
            records.iter().any(|record| !matches!(record.event, Event::Again { .. }));
        self.records.extend(records);
        Ok(has_progress)
    }

    fn draw(&mut self) {
        if let Some(live) = &mut self.live {
            let mut lines = self.nodes.lines(&self.servers.views(), now(), self.palette);
            lines.extend(self.children.lines(now(), self.palette));
            live.draw(&lines);
        }
    }

    fn inject(&mut self, fault: Fault, child: u32) -> Result {
        let Some(index) = self.running.iter().position(|running| running.child == child) else {
            return Ok(());
        };
        let running = &mut self.running[index];
        // The process may have ended since it was selected.
        if running.process.try_wait()?.is_some() {
            return Ok(());
        }
        match fault {
            Fault::Stop => {
                running.signal(Signal::STOP)?;
                running.continue_at = Some(now() + nanos(self.options.ttl.mul_f64(STOP_TTLS)));
                self.journal.note(child, running.pid(), Event::Stopped)?;
            }
            Fault::Kill => {
                let pid = running.pid();
                self.journal.note(child, pid, Event::Doomed)?;
                drop(self.running.swap_remove(index));
                self.journal.note(child, pid, Event::Killed)?;
                // The last records of the killed process decide how many rounds remain for its
                // successor.
                self.read_records()?;
                let status = self.children.children.iter().find(|status| status.child == child);
                self.start_child(
                    child,
                    self.options.rounds - status.map_or(0, |status| status.rounds),
                )?;
            }
        }
        Ok(())
    }

    fn continue_stopped(&mut self) -> Result {
        for running in &mut self.running {
            if running.continue_at.is_some_and(|at| now() >= at) {
                running.continue_at = None;
                self.journal.note(running.child, running.pid(), Event::Continued)?;
                running.signal(Signal::CONT)?;
            }
        }
        Ok(())
    }

    /// Removes children that have ended. Fails if one of them has failed.
    fn remove_ended(&mut self) -> Result {
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            match running.process.try_wait()? {
                None => index += 1,
                Some(status) => {
                    let running = self.running.swap_remove(index);
                    if !status.success() {
                        self.read_records()?;
                        let last =
                            self.records.iter().rev().find(|record| record.pid == running.pid());
                        let reason = match last.map(|record| &record.event) {
                            Some(Event::Failed { why }) => why.clone(),
                            _ => format!("it ended with {status}"),
                        };
                        return Err(format!("child {} failed: {reason}", running.child).into());
                    }
                }
            }
        }
        Ok(())
    }
}

impl RunningChild<'_> {
    fn pid(&self) -> u32 {
        self.process.id()
    }

    fn signal(&self, signal: Signal) -> Result {
        Ok(kill_process(Pid::from_child(&self.process), signal)?)
    }
}

impl Drop for RunningChild<'_> {
    fn drop(&mut self) {
        let _ = self.cleanup.unregister(self.pid());
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
