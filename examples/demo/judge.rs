//! The verdict: what the record says about exclusion, order, writes and waits.

use super::{
    availability::Availability,
    screen::{Palette, span},
};
use crate::history::{End, Finding, Record, Story, exclusion, order, updates};

pub(crate) struct Verdict<'a> {
    pub(crate) story: &'a Story,
    /// What the nodes did, where there were several.
    pub(crate) nodes: Availability,
    /// Sentences about what must not be.
    overlaps: Vec<String>,
    too_early: Vec<String>,
    disorder: Vec<String>,
    lost_updates: Vec<String>,
    unfinished: Vec<String>,
    waits: Vec<u64>,
    waits_left_out: usize,
}

impl<'a> Verdict<'a> {
    pub(crate) fn of(story: &'a Story, records: &[Record]) -> Verdict<'a> {
        let nodes = Availability::of(records);
        let texts = |found: Vec<Finding>| found.into_iter().map(|finding| finding.text).collect();
        let entered = || story.waits.iter().filter(|wait| wait.entered);
        let mut waits: Vec<u64> = entered().filter(|wait| !wait.stopped).map(|wait| wait.until - wait.from).collect();
        waits.sort_unstable();
        // Before a quorum of fresh servers has been up for the lease, nobody can know whom they had given the lock.
        let first = nodes.first_quorum();
        let early = story.holds.iter().filter(|hold| hold.from < first);
        let missing = (1..=story.planned).filter(|child| !story.finished.contains(child));
        let failed = story.failures.iter().map(|(_, child, why)| format!("child {child}: {why}"));
        Verdict {
            story,
            overlaps: texts(exclusion::find(story)),
            too_early: early
                .map(|hold| format!("child {} entered {} too early", hold.seat, span(first - hold.from)))
                .collect(),
            disorder: texts(order::find(story)),
            lost_updates: texts(updates::find(story)),
            unfinished: failed.chain(missing.map(|child| format!("child {child} did not finish its rounds"))).collect(),
            waits,
            waits_left_out: entered().filter(|wait| wait.stopped).count(),
            nodes,
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        [&self.overlaps, &self.too_early, &self.disorder, &self.lost_updates, &self.unfinished]
            .iter()
            .all(|found| found.is_empty())
    }

    pub(crate) fn report(&self, palette: Palette) -> String {
        let mut text = format!(
            "\n{}  from {} records of {} children ({} processes)\n\n",
            palette.bold("Verdict"),
            self.story.records,
            self.story.seats.len(),
            self.story.processes
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
            &format!("among {} beliefs, each compared with all others", self.story.holds.len()),
        );
        let order = if self.disorder.is_empty() { "ok" } else { "WRONG" };
        line("token order", order, &self.disorder, "each later holder has a larger token");
        if !self.nodes.tracks.is_empty() {
            let early = if self.too_early.is_empty() { "ok" } else { "WRONG" };
            let remark = format!("no lock before {} fresh servers had been up for the lease", self.nodes.quorum());
            line("quarantine", early, &self.too_early, &remark);
        }
        let accepted = self.story.writes.iter().filter(|write| write.accepted).count();
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
        line("locks lost", &self.story.losses.to_string(), &[], "noticed by their holders");
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
        let taken = |out: usize| self.story.holds.iter().filter(|hold| self.nodes.out_at(hold.from) == out).count();
        format!(
            "nodes killed, and back without memory; locks taken meanwhile: {} with one out, {} with two",
            taken(1),
            taken(2)
        )
    }

    fn done_by(&self, child: u32) -> usize {
        self.story.holds.iter().filter(|hold| hold.seat == child && hold.end == End::Left).count()
    }

    fn work_done(&self) -> usize {
        self.story.holds.iter().filter(|hold| hold.end == End::Left).count()
    }

    fn work_remark(&self) -> String {
        let done: Vec<usize> = self.story.seats.iter().map(|child| self.done_by(*child)).collect();
        let (least, most) = (done.iter().min().unwrap_or(&0), done.iter().max().unwrap_or(&0));
        let each = if least == most { most.to_string() } else { format!("{least} to {most}") };
        let mut text = format!("rounds finished under the lock, {each} by each child");
        if self.story.again > 0 {
            text.push_str(&format!("; asked again {} times without a quorum", self.story.again));
        }
        text
    }

    fn refused(&self) -> usize {
        self.story.writes.iter().filter(|write| !write.accepted).count()
    }

    fn fence_remark(&self) -> String {
        let late: Vec<_> = self.story.writes.iter().filter(|write| write.late).collect();
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
