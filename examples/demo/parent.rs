//! The parent: starts the children, strikes some of them, replaces the dead, and shows what they do.

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
    args::{Child, Demo},
    board::Board,
    chaos::{Blow, Chaos},
    nodes::Nodes,
    outages::{Outages, Step},
    screen::{LiveBlock, Palette, say},
    servers::Servers,
};
use crate::{
    common::{Outcome, Watchdog, nanos, now, work_for},
    history::{Change, Event, Journal, Reader, Record},
};

/// How often the record is read.
const LOOK: Duration = Duration::from_millis(5);
/// How often the block of live lines is drawn.
const FRAME: Duration = Duration::from_millis(50);
/// With more children than fit on a screen, lines cannot be redrawn.
const MOST_LIVE_LINES: u32 = 20;
/// For how long nothing at all may happen, besides one lease.
const SILENCE: Duration = Duration::from_secs(30);

/// A stop is longer than the lease by this much.
const STOP_FACTOR: f64 = 1.4;

struct Demonstration<'a> {
    demo: &'a Demo,
    watchdog: &'a Watchdog,
    servers: Servers<'a>,
    record: PathBuf,
    resource: String,
    journal: Journal,
    reader: Reader,
    records: Vec<Record>,
    board: Board,
    nodes: Nodes,
    /// Nodes that have been started again and have not answered yet, and when that was.
    coming_up: Vec<(usize, u64)>,
    running: Vec<Running<'a>>,
    palette: Palette,
    /// Empty where the output is no terminal.
    live: Option<LiveBlock>,
}

/// A child process; killed and waited for when dropped.
struct Running<'a> {
    child: u32,
    process: Process,
    watchdog: &'a Watchdog,
    /// When a stopped one is to go on.
    continue_at: Option<u64>,
    /// The child ends when this is closed.
    _life: Option<ChildStdin>,
}

/// Runs the demo and returns the record.
pub(crate) fn run(demo: &Demo) -> Outcome<Vec<Record>> {
    let watchdog = Watchdog::start()?;
    let launched = now();
    let mut servers = Servers::start(demo.nodes, &watchdog)?;
    let palette = Palette::of_stdout();
    let record = demo.record.clone().unwrap_or_else(|| watchdog.folder().join("record"));
    std::fs::write(&record, "").map_err(|error| format!("cannot write {}: {error}", record.display()))?;
    say(&introduce(demo, &servers));
    let resource = servers.resource(&format!("distlock:demo:{}:{:x}", std::process::id(), now()));
    let live = stdout().is_terminal() && demo.children <= MOST_LIVE_LINES;
    let start = now();
    let mut demonstration = Demonstration {
        demo,
        watchdog: &watchdog,
        resource: resource.key().to_owned(),
        journal: Journal::open(&record)?,
        reader: Reader::open(&record)?,
        record,
        records: Vec::new(),
        board: Board::new(demo.children, demo.rounds, start),
        nodes: Nodes::new(servers.nodes().iter().map(|server| server.label()), start),
        coming_up: (1..=servers.nodes().len()).map(|node| (node, launched)).collect(),
        servers,
        running: Vec::new(),
        palette,
        live: live.then(LiveBlock::default),
    };
    let outcome = demonstration.run();
    let records = std::mem::take(&mut demonstration.records);
    // Before what they work on.
    demonstration.running.clear();
    outcome.and(resource.remove())?;
    if let Some(path) = &demo.record {
        say(&format!("\nThe record is in {}.\n", path.display()));
    }
    Ok(records)
}

fn introduce(demo: &Demo, servers: &Servers<'_>) -> String {
    let mut text = format!(
        "{} processes want the lock {LOCK}, {} each, for {:?} to {:?} of work. The lease is {:?}.\n",
        demo.children,
        if demo.rounds == 1 { "once".into() } else { format!("{} times", demo.rounds) },
        demo.work.shortest(),
        demo.work.shortest() + demo.work.0,
        demo.ttl,
    );
    text.push_str(&servers.introduction(demo.ttl));
    if demo.chaos {
        text.push_str(&format!(
            "Chaos: some are killed, some are stopped for {:?}, longer than the lease. Same again: --seed {}\n",
            demo.ttl.mul_f64(STOP_FACTOR),
            demo.seed
        ));
    }
    text.push('\n');
    text
}

impl Demonstration<'_> {
    fn run(&mut self) -> Outcome {
        self.journal.note(0, std::process::id(), Event::Plan { children: self.demo.children })?;
        for child in 1..=self.demo.children {
            self.start(child, self.demo.rounds)?;
        }
        let rounds_of_all = self.demo.children * self.demo.rounds;
        let mut chaos = Chaos::new(self.demo.seed, rounds_of_all, self.demo.work.shortest());
        let mut outages = Outages::new(self.demo.seed, self.demo.nodes, rounds_of_all);
        let (mut next_frame, mut last_news) = (0, now());
        while !(self.running.is_empty() && outages.are_over() && self.coming_up.is_empty()) {
            work_for(LOOK);
            if self.read_on()? {
                last_news = now();
            }
            self.tend_nodes(&mut outages)?;
            self.wake_the_stopped()?;
            if self.demo.chaos
                && let Some((blow, child)) = chaos.strike(&self.board, now())
            {
                self.strike(blow, child)?;
            }
            self.reap()?;
            if now() >= next_frame {
                self.draw();
                next_frame = now() + nanos(FRAME);
            }
            let patience = SILENCE + self.demo.ttl;
            if now() - last_news > nanos(patience) {
                return Err(format!("nothing has happened for {patience:?}: {}", self.servers.holder()).into());
            }
        }
        self.read_on()?;
        self.draw();
        Ok(())
    }

    fn start(&mut self, child: u32, rounds: u32) -> Outcome {
        let args = Child {
            child,
            rounds,
            work: self.demo.work,
            ttl: self.demo.ttl,
            resource: self.resource.clone(),
            record: self.record.clone(),
        };
        let mut process = Command::new(env::current_exe()?)
            .args(args.words())
            .envs(self.servers.environment())
            .stdin(Stdio::piped())
            .spawn()?;
        let life = process.stdin.take();
        let running = Running { child, process, watchdog: self.watchdog, continue_at: None, _life: life };
        self.watchdog.guard(running.pid())?;
        self.running.push(running);
        Ok(())
    }

    /// Kills and restarts nodes when it is time, and writes down what became of them.
    fn tend_nodes(&mut self, outages: &mut Outages) -> Outcome {
        for node in self.nodes.ripe(now()) {
            self.tell_of_node(node, Change::Votes)?;
        }
        if let Some(step) = outages.step(self.board.rounds_of_all(), &self.nodes) {
            match step {
                Step::Kill(node) => {
                    self.servers.nodes()[node - 1].kill();
                    self.tell_of_node(node, Change::Down)?;
                }
                Step::Restart(node) => {
                    // Before it starts: from then on the lease is counted that its quarantine lasts.
                    self.coming_up.push((node, now()));
                    self.servers.nodes()[node - 1].restart()?;
                }
            }
        }
        for (node, started) in std::mem::take(&mut self.coming_up) {
            if self.servers.nodes()[node - 1].is_up()? {
                self.tell_of_node(node, Change::Up { votes_from: started + nanos(self.demo.ttl) })?;
            } else {
                self.coming_up.push((node, started));
            }
        }
        Ok(())
    }

    fn tell_of_node(&mut self, node: usize, change: Change) -> Outcome {
        let pid = self.servers.nodes()[node - 1].pid().unwrap_or(0);
        self.journal.note(0, pid, Event::Node { node, change })?;
        self.read_on()?;
        Ok(())
    }

    /// Reads what is new in the record; true if anybody has got any further.
    fn read_on(&mut self) -> Outcome<bool> {
        let records = self.reader.read_on()?;
        for record in &records {
            let news = [self.nodes.apply(record), self.board.apply(record)];
            if self.live.is_none() {
                news.into_iter().flatten().for_each(|news| say(&news));
            }
        }
        let any = records.iter().any(|record| !matches!(record.event, Event::Again { .. }));
        self.records.extend(records);
        Ok(any)
    }

    fn draw(&mut self) {
        if let Some(live) = &mut self.live {
            let mut lines = self.nodes.lines(&self.servers.views(), now(), self.palette);
            lines.extend(self.board.lines(now(), self.palette));
            live.draw(&lines);
        }
    }

    fn strike(&mut self, blow: Blow, child: u32) -> Outcome {
        let Some(index) = self.running.iter().position(|running| running.child == child) else { return Ok(()) };
        let running = &mut self.running[index];
        // It may have ended by itself since it was chosen.
        if running.process.try_wait()?.is_some() {
            return Ok(());
        }
        match blow {
            Blow::Stop => {
                running.signal(Signal::STOP)?;
                running.continue_at = Some(now() + nanos(self.demo.ttl.mul_f64(STOP_FACTOR)));
                self.journal.note(child, running.pid(), Event::Stopped)?;
            }
            Blow::Kill => {
                let pid = running.pid();
                drop(self.running.swap_remove(index));
                self.journal.note(child, pid, Event::Killed)?;
                // What it wrote last decides how many rounds are left to its successor.
                self.read_on()?;
                let seat = self.board.seats.iter().find(|seat| seat.child == child);
                self.start(child, self.demo.rounds - seat.map_or(0, |seat| seat.rounds))?;
            }
        }
        Ok(())
    }

    fn wake_the_stopped(&mut self) -> Outcome {
        for running in &mut self.running {
            if running.continue_at.is_some_and(|at| now() >= at) {
                running.continue_at = None;
                self.journal.note(running.child, running.pid(), Event::Continued)?;
                running.signal(Signal::CONT)?;
            }
        }
        Ok(())
    }

    fn reap(&mut self) -> Outcome {
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            match running.process.try_wait()? {
                None => index += 1,
                Some(status) => {
                    let running = self.running.swap_remove(index);
                    if !status.success() {
                        self.read_on()?;
                        let last = self.records.iter().rev().find(|record| record.pid == running.pid());
                        let why = match last.map(|record| &record.event) {
                            Some(Event::Failed { why }) => why.clone(),
                            _ => format!("it ended with {status}"),
                        };
                        return Err(format!("child {} could not go on: {why}", running.child).into());
                    }
                }
            }
        }
        Ok(())
    }
}

impl Running<'_> {
    fn pid(&self) -> u32 {
        self.process.id()
    }

    fn signal(&self, signal: Signal) -> Outcome {
        Ok(kill_process(Pid::from_child(&self.process), signal)?)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = self.watchdog.forget(self.pid());
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
