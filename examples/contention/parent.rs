//! The parent: starts the children, strikes some of them, replaces the dead, and shows what they do.

use std::{
    env,
    io::{IsTerminal, stdout},
    path::PathBuf,
    process::{Child as Process, ChildStdin, Command, Stdio},
    time::Duration,
};

use distlock::RedisMgr;
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    LOCK,
    args::{Child, Demo},
    board::Board,
    chaos::{Blow, Chaos},
    common::{Outcome, Server, Watchdog, nanos, now, work_for},
    record::{Event, Journal, Reader, Record},
    resource::Resource,
    screen::{LiveBlock, Palette, say},
};

/// How often the record is read.
const LOOK: Duration = Duration::from_millis(5);
/// How often the block of live lines is drawn.
const FRAME: Duration = Duration::from_millis(50);
/// With more children than fit on a screen, lines cannot be redrawn.
const MOST_LIVE_LINES: u32 = 20;
/// For how long nothing at all may happen.
const SILENCE: Duration = Duration::from_secs(30);

/// A stop is longer than the lease by this much.
const STOP_FACTOR: f64 = 1.4;

struct Demonstration<'a> {
    demo: &'a Demo,
    watchdog: &'a Watchdog,
    server: &'a Server<'a>,
    record: PathBuf,
    resource: String,
    journal: Journal,
    reader: Reader,
    records: Vec<Record>,
    board: Board,
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
    let server = Server::find(&watchdog)?;
    let palette = Palette::of_stdout();
    let record = demo.record.clone().unwrap_or_else(|| watchdog.folder().join("record"));
    std::fs::write(&record, "").map_err(|error| format!("cannot write {}: {error}", record.display()))?;
    let live = stdout().is_terminal() && demo.children <= MOST_LIVE_LINES;
    let mut demonstration = Demonstration {
        demo,
        watchdog: &watchdog,
        server: &server,
        resource: format!("distlock:demo:{}:{:x}", std::process::id(), now()),
        journal: Journal::open(&record)?,
        reader: Reader::open(&record)?,
        record,
        records: Vec::new(),
        board: Board::new(demo.children, demo.rounds, now()),
        running: Vec::new(),
        palette,
        live: live.then(LiveBlock::default),
    };
    say(&format!(
        "{} processes want the lock {LOCK}, {} each, for {:?} to {:?} of work. The lease is {:?}.\n\
         The server is {}.\n",
        demo.children,
        if demo.rounds == 1 { "once".into() } else { format!("{} times", demo.rounds) },
        demo.work.shortest(),
        demo.work.shortest() + demo.work.0,
        demo.ttl,
        server.introduction()
    ));
    if demo.chaos {
        say(&format!(
            "Chaos: some are killed, some are stopped for {:?}, longer than the lease. Same again: --seed {}\n",
            demo.ttl.mul_f64(STOP_FACTOR),
            demo.seed
        ));
    }
    say("\n");
    let outcome = demonstration.run();
    let records = std::mem::take(&mut demonstration.records);
    let resource = demonstration.resource.clone();
    drop(demonstration);
    let mgr = RedisMgr::new(server.config())?;
    Resource::new(&mgr, &resource).remove()?;
    outcome?;
    if let Some(path) = &demo.record {
        say(&format!("\nThe record is in {}.\n", path.display()));
    }
    Ok(records)
}

impl Demonstration<'_> {
    fn run(&mut self) -> Outcome {
        self.journal.write(0, std::process::id(), Event::Plan { children: self.demo.children })?;
        for child in 1..=self.demo.children {
            self.start(child, self.demo.rounds)?;
        }
        let mut chaos = Chaos::new(self.demo.seed, self.demo.children * self.demo.rounds, self.demo.work.shortest());
        let (mut next_frame, mut last_news) = (0, now());
        while !self.running.is_empty() {
            work_for(LOOK);
            if self.read_on()? {
                last_news = now();
            }
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
            if now() - last_news > nanos(SILENCE) {
                return Err(self.explain_silence().into());
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
            .env("DISTLOCK_URL", self.server.url())
            .stdin(Stdio::piped())
            .spawn()?;
        let life = process.stdin.take();
        let running = Running { child, process, watchdog: self.watchdog, continue_at: None, _life: life };
        self.watchdog.guard(running.pid())?;
        self.running.push(running);
        Ok(())
    }

    /// Reads what is new in the record; true if there was anything.
    fn read_on(&mut self) -> Outcome<bool> {
        let records = self.reader.read_on()?;
        for record in &records {
            let news = self.board.apply(record);
            if let (Some(news), None) = (news, &self.live) {
                say(&news);
            }
        }
        let any = !records.is_empty();
        self.records.extend(records);
        Ok(any)
    }

    fn draw(&mut self) {
        if let Some(live) = &mut self.live {
            live.draw(&self.board.lines(now(), self.palette));
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
                self.journal.write(child, running.pid(), Event::Stopped)?;
            }
            Blow::Kill => {
                let pid = running.pid();
                drop(self.running.swap_remove(index));
                self.journal.write(child, pid, Event::Killed)?;
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
                self.journal.write(running.child, running.pid(), Event::Continued)?;
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

    fn explain_silence(&self) -> String {
        let holder = RedisMgr::new(self.server.config()).and_then(|mgr| mgr.holder(LOCK));
        match holder {
            Ok(Some(holder)) => format!("nothing has happened for {SILENCE:?}; the lock is held by {holder}"),
            Ok(None) => format!("nothing has happened for {SILENCE:?}, although the lock is free"),
            Err(error) => format!("nothing has happened for {SILENCE:?}: {error}"),
        }
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
