//! The verdict: what the record says about exclusion, order, writes and waits.

use std::collections::HashMap;

use super::{
    availability::Availability,
    record::{Event, Record},
    screen::{Palette, span},
};

/// One time that a child had the lock, as the child could know it.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) child: u32,
    pub(crate) token: u64,
    pub(crate) id: String,
    pub(crate) from: u64,
    /// When its belief ended.
    pub(crate) until: u64,
    pub(crate) end: End,
    /// The latest moment at which the lock was certainly believed in.
    seen: u64,
    /// What the guard promised at that moment.
    deadline: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Left,
    Lost,
    Killed,
    /// The record ends before it.
    Open,
}

impl End {
    pub(crate) fn word(self) -> &'static str {
        match self {
            End::Left => "left",
            End::Lost => "lost",
            End::Killed => "killed",
            End::Open => "?",
        }
    }
}

#[derive(Debug)]
struct Write {
    at: u64,
    token: u64,
    value: u64,
    accepted: bool,
    /// By a child that knew that its lock was lost.
    late: bool,
}

#[derive(Debug)]
pub(crate) struct Verdict {
    /// By the moment they began.
    pub(crate) holds: Vec<Hold>,
    start: u64,
    /// What the nodes did, where there were several.
    pub(crate) nodes: Availability,
    /// Sentences about what must not be.
    overlaps: Vec<String>,
    too_early: Vec<String>,
    disorder: Vec<String>,
    lost_updates: Vec<String>,
    unfinished: Vec<String>,
    writes: Vec<Write>,
    waits: Vec<u64>,
    waits_left_out: usize,
    losses: usize,
    again: usize,
    records: usize,
    /// Of the children.
    ids: Vec<u32>,
    processes: usize,
}

/// What is known of one process while its records are read.
#[derive(Default)]
struct Process {
    child: u32,
    asked_at: Option<u64>,
    stopped_meanwhile: bool,
    hold: Option<Hold>,
    knows_loss: bool,
    ended: bool,
}

impl Verdict {
    pub(crate) fn of(records: &[Record]) -> Verdict {
        let mut verdict = Verdict {
            holds: Vec::new(),
            start: records.iter().map(|record| record.at).min().unwrap_or(0),
            nodes: Availability::of(records),
            overlaps: Vec::new(),
            too_early: Vec::new(),
            disorder: Vec::new(),
            lost_updates: Vec::new(),
            unfinished: Vec::new(),
            writes: Vec::new(),
            waits: Vec::new(),
            waits_left_out: 0,
            losses: 0,
            again: 0,
            records: records.len(),
            ids: Vec::new(),
            processes: 0,
        };
        verdict.read(records);
        verdict.holds.sort_by_key(|hold| hold.from);
        verdict.writes.sort_by_key(|write| write.at);
        verdict.waits.sort_unstable();
        verdict.find_overlaps();
        verdict.find_too_early();
        verdict.find_disorder();
        verdict.find_lost_updates();
        verdict
    }

    pub(crate) fn is_good(&self) -> bool {
        [&self.overlaps, &self.too_early, &self.disorder, &self.lost_updates, &self.unfinished]
            .iter()
            .all(|found| found.is_empty())
    }

    fn read(&mut self, records: &[Record]) {
        let mut processes: HashMap<u32, Process> = HashMap::new();
        let mut planned = 0;
        for record in records {
            match record.event {
                Event::Plan { children } => {
                    planned = children;
                    continue;
                }
                Event::Node { .. } => continue,
                _ => {}
            }
            let process = processes.entry(record.pid).or_default();
            process.child = record.child;
            self.take(process, record);
        }
        self.processes = processes.len();
        let mut done: Vec<u32> =
            processes.values().filter(|process| process.ended).map(|process| process.child).collect();
        let mut children: Vec<u32> = processes.values().map(|process| process.child).collect();
        for process in processes.into_values() {
            self.close(process.hold, End::Open, u64::MAX);
        }
        for list in [&mut done, &mut children] {
            list.sort_unstable();
            list.dedup();
        }
        self.ids = children;
        self.unfinished.extend(
            (1..=planned)
                .filter(|child| !done.contains(child))
                .map(|child| format!("child {child} did not finish its rounds")),
        );
    }

    fn take(&mut self, process: &mut Process, record: &Record) {
        match &record.event {
            Event::Wait => {
                process.asked_at = Some(record.at);
                process.stopped_meanwhile = false;
                process.knows_loss = false;
            }
            Event::Enter { deadline, token, id } => {
                if let Some(asked_at) = process.asked_at.take() {
                    if process.stopped_meanwhile {
                        self.waits_left_out += 1;
                    } else {
                        self.waits.push(record.at.saturating_sub(asked_at));
                    }
                }
                process.hold = Some(Hold {
                    child: record.child,
                    token: *token,
                    id: id.clone(),
                    from: record.at,
                    until: record.at,
                    end: End::Open,
                    seen: record.at,
                    deadline: *deadline,
                });
            }
            Event::Look { deadline } => {
                if let Some(hold) = &mut process.hold {
                    (hold.seen, hold.deadline) = (record.at, *deadline);
                }
            }
            Event::Lost { .. } => {
                self.losses += 1;
                process.knows_loss = true;
                self.close(process.hold.take(), End::Lost, record.at);
            }
            Event::Write { token, value, accepted } => self.writes.push(Write {
                at: record.at,
                token: *token,
                value: *value,
                accepted: *accepted,
                late: process.knows_loss,
            }),
            Event::Leave => self.close(process.hold.take(), End::Left, record.at),
            Event::Killed => self.close(process.hold.take(), End::Killed, record.at),
            Event::Done => process.ended = true,
            Event::Failed { why } => self.unfinished.push(format!("child {}: {why}", record.child)),
            Event::Stopped => process.stopped_meanwhile = true,
            Event::Again { .. } => self.again += 1,
            Event::Continued | Event::Plan { .. } | Event::Node { .. } => {}
        }
    }

    /// Belief ends with what the child did or saw, but never later than its guard had promised, and never earlier
    /// than the guard last said yes.
    fn close(&mut self, hold: Option<Hold>, end: End, at: u64) {
        if let Some(mut hold) = hold {
            hold.until = at.min(hold.seen.max(hold.deadline));
            hold.end = end;
            self.holds.push(hold);
        }
    }

    fn find_overlaps(&mut self) {
        // Those before the current one that are not over when it begins.
        let mut open: Vec<&Hold> = Vec::new();
        for hold in &self.holds {
            open.retain(|earlier| earlier.until > hold.from);
            for earlier in &open {
                let shared = earlier.until.min(hold.until).saturating_sub(hold.from);
                self.overlaps.push(format!(
                    "at {} child {} (token {}) and child {} (token {}) both believed, for {}",
                    span(hold.from - self.start),
                    earlier.child,
                    earlier.token,
                    hold.child,
                    hold.token,
                    span(shared)
                ));
            }
            open.push(hold);
        }
    }

    /// Before a quorum of fresh servers has been up for the lease, nobody can know whom they had given the lock.
    fn find_too_early(&mut self) {
        let first = self.nodes.first_quorum();
        for hold in self.holds.iter().filter(|hold| hold.from < first) {
            self.too_early.push(format!("child {} entered {} too early", hold.child, span(first - hold.from)));
        }
    }

    fn find_disorder(&mut self) {
        for pair in self.holds.windows(2) {
            if pair[1].token <= pair[0].token {
                self.disorder.push(format!(
                    "child {} entered with token {} after child {} had entered with {}",
                    pair[1].child, pair[1].token, pair[0].child, pair[0].token
                ));
            }
        }
    }

    fn find_lost_updates(&mut self) {
        let mut accepted: Vec<&Write> = self.writes.iter().filter(|write| write.accepted).collect();
        accepted.sort_by_key(|write| (write.value, write.token));
        for pair in accepted.windows(2) {
            if pair[0].value == pair[1].value {
                self.lost_updates.push(format!(
                    "tokens {} and {} both wrote the value {}",
                    pair[0].token, pair[1].token, pair[0].value
                ));
            } else if pair[1].token <= pair[0].token {
                self.lost_updates.push(format!(
                    "token {} wrote {} and token {} then wrote {}",
                    pair[0].token, pair[0].value, pair[1].token, pair[1].value
                ));
            }
        }
    }

    pub(crate) fn report(&self, palette: Palette) -> String {
        let mut text = format!(
            "\n{}  from {} records of {} children ({} processes)\n\n",
            palette.bold("Verdict"),
            self.records,
            self.ids.len(),
            self.processes
        );
        let mut line = |name: &str, found: &str, bad: &[String], remark: &str| {
            let found = format!("{found:<5}");
            let found = if bad.is_empty() { palette.green(found) } else { palette.red(found) };
            text.push_str(&format!("  {name:<14} {found} {remark}\n"));
            for sentence in bad.iter().take(10) {
                text.push_str(&format!("                       {}\n", palette.red(sentence)));
            }
            if bad.len() > 10 {
                text.push_str(&format!("                       and {} more\n", bad.len() - 10));
            }
        };
        let count = |list: &[String]| list.len().to_string();
        line(
            "overlaps",
            &count(&self.overlaps),
            &self.overlaps,
            &format!("among {} beliefs, each compared with all others", self.holds.len()),
        );
        let order = if self.disorder.is_empty() { "ok" } else { "WRONG" };
        line("token order", order, &self.disorder, "each later holder has a larger token");
        if !self.nodes.tracks.is_empty() {
            let early = if self.too_early.is_empty() { "ok" } else { "WRONG" };
            let remark = format!("no lock before {} fresh servers had been up for the lease", self.nodes.quorum());
            line("quarantine", early, &self.too_early, &remark);
        }
        let accepted = self.writes.iter().filter(|write| write.accepted).count();
        line(
            "lost updates",
            &count(&self.lost_updates),
            &self.lost_updates,
            &format!("{accepted} times, a number was read, worked on, and written back one larger"),
        );
        line("work done", &self.work_done().to_string(), &[], &self.work_remark());
        if !self.nodes.tracks.is_empty() {
            line("outages", &self.nodes.outages().to_string(), &[], &self.outages_remark());
        }
        line("locks lost", &self.losses.to_string(), &[], "noticed by their holders");
        line("fenced off", &self.refused().to_string(), &[], &self.fence_remark());
        line("waits", &self.waits.len().to_string(), &[], &self.waits_remark());
        if !self.unfinished.is_empty() {
            line("unfinished", &count(&self.unfinished), &self.unfinished, "");
        }
        text.push_str(&palette.dim(EXPLANATION));
        let (word, sentence) = if self.is_good() {
            (palette.green("GOOD"), "At no instant did two processes believe that they held the lock.")
        } else if self.overlaps.is_empty() {
            (palette.red("BAD"), "Nothing overlapped, but see above.")
        } else {
            (palette.red("BAD"), "Two processes believed at once that they held the lock.")
        };
        text.push_str(&format!("\n{word}  {sentence}\n"));
        text
    }

    fn outages_remark(&self) -> String {
        let taken = |out: usize| self.holds.iter().filter(|hold| self.nodes.out_at(hold.from) == out).count();
        format!(
            "nodes killed, and back without memory; locks taken meanwhile: {} with one out, {} with two",
            taken(1),
            taken(2)
        )
    }

    fn done_by(&self, child: u32) -> usize {
        self.holds.iter().filter(|hold| hold.child == child && hold.end == End::Left).count()
    }

    fn work_done(&self) -> usize {
        self.holds.iter().filter(|hold| hold.end == End::Left).count()
    }

    fn work_remark(&self) -> String {
        let done: Vec<usize> = self.ids.iter().map(|child| self.done_by(*child)).collect();
        let (least, most) = (done.iter().min().unwrap_or(&0), done.iter().max().unwrap_or(&0));
        let each = if least == most { most.to_string() } else { format!("{least} to {most}") };
        let mut text = format!("rounds finished under the lock, {each} by each child");
        if self.again > 0 {
            text.push_str(&format!("; asked again {} times without a quorum", self.again));
        }
        text
    }

    fn refused(&self) -> usize {
        self.writes.iter().filter(|write| !write.accepted).count()
    }

    fn fence_remark(&self) -> String {
        let late: Vec<&Write> = self.writes.iter().filter(|write| write.late).collect();
        let harmless = late.iter().filter(|write| write.accepted).count();
        match (late.len(), harmless) {
            (0, _) => "writes refused for an old token; nobody tried after a loss".into(),
            (tried, 0) => format!("writes refused for an old token; {tried} tried on purpose after a loss"),
            (tried, harmless) => format!(
                "writes refused for an old token; {tried} tried on purpose after a loss, {harmless} of them before \
                 anybody else had come"
            ),
        }
    }

    fn waits_remark(&self) -> String {
        let at = |fraction: f64| {
            let last = self.waits.len().saturating_sub(1);
            span(self.waits.get((last as f64 * fraction).round() as usize).copied().unwrap_or(0))
        };
        let mut text = format!("median {}, 95 % within {}, longest {}", at(0.5), at(0.95), at(1.0));
        if !self.nodes.tracks.is_empty() {
            text.push_str("; the first quarantine counts as well");
        }
        if self.waits_left_out > 0 {
            text.push_str(&format!("; {} of stopped waiters left out", self.waits_left_out));
        }
        text
    }
}

const EXPLANATION: &str = "
  A child believes from the moment lock() returned until the first of these: it left (before it
  released), its guard said no, it died, or the deadline came that its guard had shown at the last
  look, even if the child was stopped and could not look. Two beliefs that share an instant overlap.
";
