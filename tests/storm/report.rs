//! What a storm prints: its settings, a table of what happened, and the verdict.

use std::fmt::Write;

use crate::{
    args::{Storm, THREADS, Target},
    history::{End, Hold, Rule, Sharing, Story, Verdict, bounds, leaks, span},
};

/// Maximum number of findings that are printed for each rule.
const FINDINGS_MAX: usize = 8;

pub(crate) fn headline(storm: &Storm, target: Target) -> String {
    let servers = match target {
        Target::Nodes(1) => "1 server".to_owned(),
        Target::Nodes(nodes) => format!("{nodes} servers"),
        Target::Kinds(1) => "1 server with all kinds of locks".to_owned(),
        Target::Kinds(nodes) => format!("{nodes} servers with mutexes and read-write locks"),
        Target::Database => "a MariaDB".to_owned(),
        Target::Cluster => "a Redis Cluster".to_owned(),
    };
    format!(
        "Storm on {servers} for {:?}: {} worker processes with {THREADS} threads each, {} locks \
         with a ttl of {:?}. Seed {}.",
        storm.duration_on(target),
        storm.workers,
        storm.locks,
        target.ttl(),
        storm.seed,
    )
}

/// The command that repeats a storm.
pub(crate) fn replay(storm: &Storm, target: Target) -> Vec<String> {
    let minutes = storm.duration_on(target).as_secs_f64() / 60.0;
    let option = target.option();
    let Storm { seed, workers, locks, .. } = storm;
    vec![format!(
        "  Repeat with: make storm ARGS='--minutes {minutes} --{option} --seed {seed} \
         --workers {workers} --locks {locks}'\n"
    )]
}

pub(crate) fn table(story: &Story, verdict: &Verdict<'_>) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String, remark: String| {
        let _ = writeln!(text, "  {name:<20} {value:<9} {remark}");
    };
    let by_kind = verdict.faults.iter().map(|(kind, count)| format!("{} {count}", kind.word()));
    let long = story.stops.iter().filter(|(_, from, until)| until - from > story.terms.ttl).count();
    line("workers killed", story.kills.len().to_string(), String::new());
    line(
        "workers stopped",
        story.stops.len().to_string(),
        format!("{long} of them for longer than the lease"),
    );
    let mut faults = wrap(by_kind).into_iter();
    line("other faults", story.faults.len().to_string(), faults.next().unwrap_or_default());
    faults.for_each(|more| line("", String::new(), more));
    let ended = |end| story.holds.iter().filter(|hold| hold.end == end).count();
    line(
        "locks acquired",
        story.holds.len().to_string(),
        format!(
            "{} released, {} lost, {} held by a worker that was killed; {} calls failed",
            ended(End::Left),
            ended(End::Lost),
            ended(End::Killed),
            story.again
        ),
    );
    let kinds = kinds_of(story);
    if !kinds.is_empty() {
        line("kinds of locks", kinds.len().to_string(), kinds.join(", "));
    }
    let excused = verdict.overlaps.iter().filter(|overlap| overlap.excuse.is_some());
    let longest = excused.clone().map(|overlap| overlap.length()).max().unwrap_or(0);
    line(
        "overlaps",
        (verdict.overlaps.len() - excused.clone().count()).to_string(),
        format!(
            "and {} excused by lost data or connections; the longest took {}",
            excused.count(),
            span(longest)
        ),
    );
    line(
        "token order",
        verdict.against(Rule::Order).len().to_string(),
        "times a later holder had no larger token".to_owned(),
    );
    line(
        "holders and servers",
        verdict.against(Rule::ServerAgreement).len().to_string(),
        format!("times they disagreed, in {} comparisons", verdict.compared),
    );
    line(
        "stale writes",
        verdict.fenced.stale_accepted.to_string(),
        format!(
            "accepted, {} refused; {} from holders that knew of their loss",
            verdict.fenced.stale_refused, verdict.fenced.late
        ),
    );
    line("lost updates", verdict.against(Rule::LostUpdates).len().to_string(), String::new());
    line(
        "unexplained losses",
        verdict.against(Rule::UnexplainedLosses).len().to_string(),
        format!("or unreported, of {} losses", verdict.losses.count),
    );
    let waits = story.waits.iter().filter(|wait| wait.entered).map(|wait| wait.until - wait.from);
    line(
        "longest wait",
        span(waits.max().unwrap_or(0)),
        "until the lock was acquired, including the time that the worker was stopped".to_owned(),
    );
    line(
        "longest idle",
        span(verdict.gaps.longest),
        format!(
            "a lock was free although a worker waited and there was no fault; {} times",
            verdict.gaps.count
        ),
    );
    line(
        "most overtakings",
        verdict.gaps.overtaken.to_string(),
        format!(
            "of one waiter while there was no fault, in {} waits in a queue",
            verdict.gaps.queued_waits
        ),
    );
    let excess = story.calls.iter().filter_map(bounds::excess).max().unwrap_or(0);
    line(
        "calls over bound",
        verdict.against(Rule::Bounds).len().to_string(),
        format!(
            "of {}; the longest took {} more, including stops",
            story.calls.len(),
            span(excess)
        ),
    );
    let late: u64 =
        story.late.get(&story.parent).into_iter().flatten().map(|(from, until)| until - from).sum();
    line(
        "slow machine",
        span(late),
        "total time that the parent process waited for a processor".to_owned(),
    );
    line(
        "leftovers, failures",
        verdict.against(Rule::Other).len().to_string(),
        format!(
            "and {} queue entries excused because the machine was too slow to remove them",
            leaks::excused(story)
        ),
    );
    for rule in [
        Rule::Exclusion,
        Rule::Order,
        Rule::ServerAgreement,
        Rule::Fence,
        Rule::LostUpdates,
        Rule::Availability,
        Rule::UnexplainedLosses,
        Rule::Bounds,
        Rule::Other,
    ] {
        let found = verdict.against(rule);
        for finding in found.iter().take(FINDINGS_MAX) {
            let _ = writeln!(text, "  {rule:?}: {}", finding.text);
        }
        if found.len() > FINDINGS_MAX {
            let _ = writeln!(text, "  {rule:?}: and {} more", found.len() - FINDINGS_MAX);
        }
    }
    let word = if verdict.is_good() { "GOOD" } else { "BAD" };
    let _ = write!(
        text,
        "{word}: {} records of {} processes were checked.",
        story.records, story.processes
    );
    text
}

/// How many locks of each kind were acquired; nothing if there were only mutexes.
fn kinds_of(story: &Story) -> Vec<String> {
    let count = |word: &str, is_kind: fn(&Hold) -> bool| {
        let count = story.holds.iter().filter(|hold| is_kind(hold)).count();
        (count > 0).then(|| format!("{word} {count}"))
    };
    if story.holds.iter().all(|hold| hold.sharing == Sharing::Mutex) {
        return Vec::new();
    }
    [
        count("mutex", |hold| hold.sharing == Sharing::Mutex),
        count("write", |hold| hold.sharing == Sharing::Write && hold.downgraded.is_none()),
        count("write, then read", |hold| hold.downgraded.is_some()),
        count("read", |hold| hold.sharing == Sharing::Read),
        count("permits", |hold| matches!(hold.sharing, Sharing::Permits { .. })),
        count("other libraries", |hold| hold.sharing == Sharing::Foreign),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Joins the words to lines that fit on a screen.
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
