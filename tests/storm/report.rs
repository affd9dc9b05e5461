//! What a storm prints: what is about to happen, what happened, and what to think of it.

use std::fmt::Write;

use crate::{
    args::{Storm, THREADS},
    history::{End, Rule, Story, Verdict, bounds, remains, span},
};

/// So many sentences about what broke one rule are enough.
const SENTENCES: usize = 8;

pub(crate) fn introduction(storm: &Storm, nodes: usize) -> String {
    format!(
        "Storm over {nodes} {}, {:?}: {} processes of {THREADS} threads want {} locks for {:?} each. Seed {}.",
        if nodes == 1 { "server" } else { "servers" },
        storm.length,
        storm.workers,
        storm.locks,
        Storm::TTL,
        storm.seed,
    )
}

/// How to have the same done again.
pub(crate) fn replay(storm: &Storm, nodes: usize) -> Vec<String> {
    let minutes = storm.length.as_secs_f64() / 60.0;
    let Storm { seed, workers, locks, .. } = storm;
    vec![format!(
        "  The same again: make storm ARGS='--minutes {minutes} --nodes {nodes} --seed {seed} --workers {workers} --locks {locks}'\n"
    )]
}

pub(crate) fn table(story: &Story, verdict: &Verdict<'_>) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String, remark: String| {
        let _ = writeln!(text, "  {name:<20} {value:<9} {remark}");
    };
    let by_kind = verdict.faults.iter().map(|(kind, count)| format!("{} {count}", kind.word()));
    let long = story.stops.iter().filter(|(_, from, until)| until - from > story.terms.ttl).count();
    line("processes killed", story.kills.len().to_string(), String::new());
    line("processes stopped", story.stops.len().to_string(), format!("{long} of them for longer than the lease"));
    let mut faults = wrap(by_kind).into_iter();
    line("other faults", story.done.len().to_string(), faults.next().unwrap_or_default());
    faults.for_each(|more| line("", String::new(), more));
    let ended = |end| story.holds.iter().filter(|hold| hold.end == end).count();
    line(
        "locks taken",
        story.holds.len().to_string(),
        format!(
            "{} released, {} lost, {} died with their holder; {} calls got none",
            ended(End::Left),
            ended(End::Lost),
            ended(End::Killed),
            story.again
        ),
    );
    let excused = verdict.overlaps.iter().filter(|overlap| overlap.excuse.is_some());
    let longest = excused.clone().map(|overlap| overlap.length()).max().unwrap_or(0);
    line(
        "overlaps",
        (verdict.overlaps.len() - excused.clone().count()).to_string(),
        format!("and {} excused by a server that forgot, the longest for {}", excused.count(), span(longest)),
    );
    line(
        "token order",
        verdict.against(Rule::Order).len().to_string(),
        "times a later holder had no larger token".to_owned(),
    );
    line(
        "belief and servers",
        verdict.against(Rule::Agreement).len().to_string(),
        format!("times they did not agree, of {} comparisons", verdict.compared),
    );
    line(
        "stale writes",
        verdict.fenced.stale_accepted.to_string(),
        format!(
            "accepted, {} refused; {} came from those who knew that they had lost",
            verdict.fenced.stale_refused, verdict.fenced.late
        ),
    );
    line("lost updates", verdict.against(Rule::Updates).len().to_string(), String::new());
    line(
        "lost for nothing",
        verdict.against(Rule::Losses).len().to_string(),
        format!("or not told, of {}; the others have a reason", verdict.losses.count),
    );
    let waits = story.waits.iter().filter(|wait| wait.entered).map(|wait| wait.until - wait.from);
    line("longest wait", span(waits.max().unwrap_or(0)), "until a lock was there, stops included".to_owned());
    line(
        "longest left free",
        span(verdict.gaps.longest),
        format!("while somebody wanted it and nothing was done to anybody, {} times", verdict.gaps.count),
    );
    line(
        "most overtaken",
        verdict.gaps.overtaken.to_string(),
        format!("later ones had the lock before, in peace, of {} waits in line", verdict.gaps.lined),
    );
    let excess = story.calls.iter().filter_map(bounds::excess).max().unwrap_or(0);
    line(
        "calls over bound",
        verdict.against(Rule::Bounds).len().to_string(),
        format!("of {}; the longest took {} more than its bound, stops included", story.calls.len(), span(excess)),
    );
    let late: u64 = story.late.get(&story.parent).into_iter().flatten().map(|(from, until)| until - from).sum();
    line("slow machine", span(late), "the parent waited for a processor in all".to_owned());
    line(
        "left over, failed",
        verdict.against(Rule::Remains).len().to_string(),
        format!("and {} places of those whom the machine gave no time to take leave", remains::excused(story)),
    );
    for rule in [
        Rule::Exclusion,
        Rule::Order,
        Rule::Agreement,
        Rule::Fence,
        Rule::Updates,
        Rule::Peace,
        Rule::Losses,
        Rule::Bounds,
        Rule::Remains,
    ] {
        let found = verdict.against(rule);
        for finding in found.iter().take(SENTENCES) {
            let _ = writeln!(text, "  {rule:?}: {}", finding.text);
        }
        if found.len() > SENTENCES {
            let _ = writeln!(text, "  {rule:?}: and {} more", found.len() - SENTENCES);
        }
    }
    let word = if verdict.is_good() { "GOOD" } else { "BAD" };
    let _ = write!(text, "{word}, from {} records of {} processes.", story.records, story.processes);
    text
}

/// Lines of no more than a screen's width.
fn wrap(words: impl Iterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < 80 => *line = format!("{line}, {word}"),
            _ => lines.push(word),
        }
    }
    lines
}
