//! The report: what the record shows about exclusion, token order, writes and waits.

use super::{
    availability::Availability,
    screen::{Palette, format_nanos},
};
use crate::history::{End, Finding, Record, Story, exclusion, lost_updates, order};

pub(crate) struct Report<'a> {
    pub(crate) story: &'a Story,
    /// Empty if there is a single server.
    pub(crate) availability: Availability,
    /// Descriptions of violations, for each check.
    overlaps: Vec<String>,
    too_early: Vec<String>,
    wrong_order: Vec<String>,
    lost_updates: Vec<String>,
    unfinished: Vec<String>,
    /// Sorted.
    waits: Vec<u64>,
    /// Number of waits of stopped processes, which are not in `waits`.
    stopped_waits: usize,
}

impl<'a> Report<'a> {
    pub(crate) fn of(story: &'a Story, records: &[Record]) -> Report<'a> {
        let availability = Availability::of(records);
        let texts =
            |findings: Vec<Finding>| findings.into_iter().map(|finding| finding.text).collect();
        let successful_waits = || story.waits.iter().filter(|wait| wait.entered);
        let mut waits: Vec<u64> = successful_waits()
            .filter(|wait| !wait.stopped)
            .map(|wait| wait.until - wait.from)
            .collect();
        waits.sort_unstable();
        // Until a quorum of new servers has been up for the ttl, they may have forgotten a holder.
        let first_quorum = availability.first_quorum();
        let too_early = story.holds.iter().filter(|hold| hold.from < first_quorum);
        let missing = (1..=story.planned).filter(|child| !story.finished.contains(child));
        let failed = story.failures.iter().map(|(_, child, why)| format!("child {child}: {why}"));
        Report {
            story,
            overlaps: texts(exclusion::find(story)),
            too_early: too_early
                .map(|hold| {
                    let by = format_nanos(first_quorum - hold.from);
                    format!("child {} acquired the lock {by} too early", hold.seat)
                })
                .collect(),
            wrong_order: texts(order::find(story)),
            lost_updates: texts(lost_updates::find(story)),
            unfinished: failed
                .chain(missing.map(|child| format!("child {child} did not finish its rounds")))
                .collect(),
            waits,
            stopped_waits: successful_waits().filter(|wait| wait.stopped).count(),
            availability,
        }
    }

    /// Whether all checks passed.
    pub(crate) fn is_good(&self) -> bool {
        [&self.overlaps, &self.too_early, &self.wrong_order, &self.lost_updates, &self.unfinished]
            .iter()
            .all(|violations| violations.is_empty())
    }

    pub(crate) fn text(&self, palette: Palette) -> String {
        let mut text = format!(
            "\n{}  from {} records of {} children ({} processes)\n\n",
            palette.bold("Report"),
            self.story.records,
            self.story.seats.len(),
            self.story.processes
        );
        let mut line = |name: &str, value: &str, violations: &[String], remark: &str| {
            let value = format!("{value:<5}");
            let value =
                if violations.is_empty() { palette.green(value) } else { palette.red(value) };
            text.push_str(&format!("  {name:<14} {value} {remark}\n"));
            for violation in violations.iter().take(10) {
                text.push_str(&format!("                       {}\n", palette.red(violation)));
            }
            if violations.len() > 10 {
                text.push_str(&format!(
                    "                       and {} more\n",
                    violations.len() - 10
                ));
            }
        };
        let count = |list: &[String]| list.len().to_string();
        let verdict = |list: &[String]| if list.is_empty() { "ok" } else { "WRONG" };
        line(
            "overlaps",
            &count(&self.overlaps),
            &self.overlaps,
            &format!("between any two of {} holds", self.story.holds.len()),
        );
        line(
            "token order",
            verdict(&self.wrong_order),
            &self.wrong_order,
            "each holder has a larger token than the last",
        );
        if !self.availability.nodes.is_empty() {
            let remark = format!(
                "no lock granted until {} new servers had been up for the ttl",
                self.availability.quorum()
            );
            line("quarantine", verdict(&self.too_early), &self.too_early, &remark);
        }
        let accepted = self.story.writes.iter().filter(|write| write.accepted).count();
        line(
            "lost updates",
            &count(&self.lost_updates),
            &self.lost_updates,
            &format!("among {accepted} times that a number was read and written back plus one"),
        );
        line("rounds done", &self.rounds_done().to_string(), &[], &self.rounds_remark());
        if !self.availability.nodes.is_empty() {
            line("outages", &self.availability.outages().to_string(), &[], &self.outages_remark());
        }
        line("locks lost", &self.story.losses.to_string(), &[], "noticed by their holders");
        line("writes fenced", &self.rejected_writes().to_string(), &[], &self.fence_remark());
        line("waits", &self.waits.len().to_string(), &[], &self.waits_remark());
        if !self.unfinished.is_empty() {
            line("unfinished", &count(&self.unfinished), &self.unfinished, "");
        }
        text.push_str(&palette.dim(EXPLANATION));
        let (verdict, sentence) = if self.is_good() {
            (palette.green("GOOD"), "No two processes ever held the lock at once.")
        } else if self.overlaps.is_empty() {
            (
                palette.red("BAD"),
                "No two processes held the lock at once, but another check failed.",
            )
        } else {
            (palette.red("BAD"), "Two processes held the lock at once.")
        };
        text.push_str(&format!("\n{verdict}  {sentence}\n"));
        text
    }

    fn outages_remark(&self) -> String {
        let holds_with = |count: usize| {
            self.story
                .holds
                .iter()
                .filter(|hold| self.availability.unavailable_at(hold.from) == count)
                .count()
        };
        format!(
            "nodes killed and restarted without data; locks granted meanwhile: \
             {} without one node, {} without two",
            holds_with(1),
            holds_with(2)
        )
    }

    fn rounds_done(&self) -> usize {
        self.story.holds.iter().filter(|hold| hold.end == End::Left).count()
    }

    fn rounds_done_by(&self, child: u32) -> usize {
        self.story.holds.iter().filter(|hold| hold.seat == child && hold.end == End::Left).count()
    }

    fn rounds_remark(&self) -> String {
        let done: Vec<usize> =
            self.story.seats.iter().map(|child| self.rounds_done_by(*child)).collect();
        let (fewest, most) = (done.iter().min().unwrap_or(&0), done.iter().max().unwrap_or(&0));
        let each = if fewest == most { most.to_string() } else { format!("{fewest} to {most}") };
        let mut text = format!("{each} by each child");
        if self.story.again > 0 {
            text.push_str(&format!("; {} retries without a quorum", self.story.again));
        }
        text
    }

    fn rejected_writes(&self) -> usize {
        self.story.writes.iter().filter(|write| !write.accepted).count()
    }

    fn fence_remark(&self) -> String {
        let late: Vec<_> = self.story.writes.iter().filter(|write| write.late).collect();
        let accepted = late.iter().filter(|write| write.accepted).count();
        match (late.len(), accepted) {
            (0, _) => {
                "rejected because of an outdated token; none was attempted after a loss".into()
            }
            (attempted, 0) => {
                format!(
                    "rejected because of an outdated token; {attempted} attempted on purpose \
                     after a loss"
                )
            }
            (attempted, accepted) => format!(
                "rejected because of an outdated token; {attempted} attempted on purpose after a \
                 loss, \
                 {accepted} of them before the next holder's"
            ),
        }
    }

    fn waits_remark(&self) -> String {
        let quantile = |fraction: f64| {
            let last = self.waits.len().saturating_sub(1);
            format_nanos(
                self.waits.get((last as f64 * fraction).round() as usize).copied().unwrap_or(0),
            )
        };
        let mut text =
            format!("median {}, p95 {}, longest {}", quantile(0.5), quantile(0.95), quantile(1.0));
        if !self.availability.nodes.is_empty() {
            text.push_str("; includes the first quarantine");
        }
        if self.stopped_waits > 0 {
            text.push_str(&format!("; without {} of stopped processes", self.stopped_waits));
        }
        text
    }
}

const EXPLANATION: &str = "
  A hold begins when lock() returns. It ends when the first of these happens: the child is about
  to release the lock; its guard reports that the lock is lost; the child is killed; the deadline
  passes that its guard last reported, even if the child is stopped and cannot check. Two holds
  overlap if they have an instant in common.
";
