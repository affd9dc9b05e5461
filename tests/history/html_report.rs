//! An HTML page with a timeline of a history: one row for each thread and each node, and violations
//! in red.

use std::{collections::BTreeMap, fmt::Write};

use super::{End, Story, Verdict};

/// Which part of the history is drawn.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Part {
    All,
    /// Some seconds around each of the first violations.
    Findings,
}

/// Maximum number of timelines around violations.
const TIMELINES_MAX: usize = 6;
/// Time in nanoseconds that is drawn before and after a violation.
const CONTEXT: u64 = 3_000_000_000;
/// Maximum length of one timeline, in nanoseconds.
const TIMELINE_MAX: u64 = 15_000_000_000;
/// Maximum number of violations that are listed above the timelines.
const LISTED_MAX: usize = 50;
const ROW_HEIGHT: u64 = 22;
const LABEL_WIDTH: u64 = 110;
const PIXELS_PER_SECOND: f64 = 100.0;

const STYLE: &str = "
body{font:13px sans-serif;margin:16px;background:#fff;color:#222}
h2{font-size:14px;margin:18px 0 4px}
.scroll{overflow-x:auto;border:1px solid #ddd} text{font:11px sans-serif;fill:#444}
.grid{stroke:#eee} .wait{stroke:#bbb;stroke-width:2} .stop{fill:#000;opacity:.18}
.fault{fill:#e8a33d} .amnesia{fill:#b04fc4}
.violation{fill:#e00000;opacity:.35;stroke:#e00000} .kill{stroke:#e00000;stroke-width:2}
.hold{stroke:#333;stroke-width:.4} .shared{stroke:#333;stroke-width:.4;opacity:.55}
.deadline{fill:none;stroke:#333;stroke-dasharray:2 2}
li{margin:2px 0}";

pub(crate) fn draw(story: &Story, verdict: &Verdict<'_>, part: Part) -> String {
    let mut page =
        format!("<!doctype html><meta charset=utf-8><title>Timeline</title><style>{STYLE}</style>");
    page.push_str(
        "<p>Bars show when a lock was held, with a colour for each lock. Readers and permits are \
         pale: only these may be held at the same time. The dashed part lasts until the deadline. \
         Grey lines are waits, shadows are stopped processes, red strokes are \
         kills. Orange bars are faults of a node or its network, purple ones lose data. \
         Violations are red. Point at anything for details.</p><ul>",
    );
    for finding in verdict.findings.iter().take(LISTED_MAX) {
        let _ = write!(page, "<li>{:?}: {}</li>", finding.rule, escape(&finding.text));
    }
    page.push_str("</ul>");
    for (from, until) in timelines(story, verdict, part) {
        timeline(&mut page, story, verdict, from, until);
    }
    page
}

/// Returns start and end of each timeline.
fn timelines(story: &Story, verdict: &Verdict<'_>, part: Part) -> Vec<(u64, u64)> {
    if part == Part::All {
        let starts = (story.start..story.end).step_by(TIMELINE_MAX as usize);
        return starts.map(|from| (from, (from + TIMELINE_MAX).min(story.end))).collect();
    }
    let mut parts: Vec<(u64, u64)> = Vec::new();
    for finding in &verdict.findings {
        let from = finding.from.saturating_sub(CONTEXT).max(story.start);
        let until = finding.until.saturating_add(CONTEXT).min(story.end).min(from + TIMELINE_MAX);
        if parts
            .last()
            .is_none_or(|last| finding.until.min(last.1) > last.1 || finding.from > last.1)
        {
            parts.push((from, until));
        }
    }
    parts.truncate(TIMELINES_MAX);
    parts
}

/// One timeline.
struct Canvas<'a> {
    page: &'a mut String,
    from: u64,
    until: u64,
}

impl Canvas<'_> {
    fn x(&self, at: u64) -> f64 {
        let since_start = at.clamp(self.from, self.until).saturating_sub(self.from);
        LABEL_WIDTH as f64 + since_start as f64 / 1e9 * PIXELS_PER_SECOND
    }

    fn shows(&self, from: u64, until: u64) -> bool {
        from < self.until && until > self.from
    }

    /// Draws a bar, which is visible however short it is.
    fn bar(
        &mut self,
        class: &str,
        colour: &str,
        (from, until): (u64, u64),
        (top, height): (u64, u64),
        tip: &str,
    ) {
        if self.shows(from, until.max(from + 1)) {
            let (x, width) = (self.x(from), (self.x(until) - self.x(from)).max(1.0));
            let fill =
                if colour.is_empty() { String::new() } else { format!(" fill=\"{colour}\"") };
            let tip = escape(tip);
            let _ = write!(
                self.page,
                "<rect class={class}{fill} x={x:.1} y={top} width={width:.1} \
                 height={height}><title>{tip}</title></rect>"
            );
        }
    }

    fn line(&mut self, class: &str, (x1, y1): (f64, u64), (x2, y2): (f64, u64), tip: &str) {
        let tip = escape(tip);
        let _ = write!(
            self.page,
            "<line class={class} x1={x1:.1} y1={y1} x2={x2:.1} y2={y2}><title>{tip}</title></line>"
        );
    }

    fn text(&mut self, x: f64, y: u64, text: &str) {
        let _ = write!(self.page, "<text x={x:.1} y={y}>{}</text>", escape(text));
    }
}

fn timeline(page: &mut String, story: &Story, verdict: &Verdict<'_>, from: u64, until: u64) {
    let nodes = story.terms.nodes as u64;
    let seats: BTreeMap<u32, u64> = {
        let mut seats: Vec<u32> = story.waits.iter().map(|wait| wait.seat).collect();
        seats.sort_unstable();
        seats.dedup();
        seats
            .into_iter()
            .zip((1 + nodes)..)
            .map(|(seat, row)| (seat, 20 + row * ROW_HEIGHT))
            .collect()
    };
    let mut members: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for (pid, seat) in story
        .waits
        .iter()
        .map(|wait| (wait.pid, wait.seat))
        .collect::<std::collections::BTreeSet<_>>()
    {
        members.entry(pid).or_default().extend(seats.get(&seat));
    }
    let height = 30 + (1 + nodes + seats.len() as u64) * ROW_HEIGHT;
    let _ =
        write!(page, "<h2>{} to {}</h2><div class=scroll>", story.clock(from), story.clock(until));
    let width = LABEL_WIDTH as f64 + (until - from) as f64 / 1e9 * PIXELS_PER_SECOND + 10.0;
    let _ = write!(page, "<svg width={width:.0} height={height}>");
    let mut canvas = Canvas { page, from, until };
    for at in (from..until).step_by(1_000_000_000) {
        let x = canvas.x(at);
        canvas.line("grid", (x, 14), (x, height), "");
        canvas.text(x, 12, &story.clock(at));
    }
    canvas.text(4.0, 34, "all nodes");
    (1..=nodes).for_each(|node| canvas.text(4.0, 34 + node * ROW_HEIGHT, &format!("node {node}")));
    for (seat, top) in &seats {
        canvas.text(4.0, top + 14, &format!("worker {}, {}", seat / 10, seat % 10));
    }
    for period in &story.faults {
        let class =
            if period.fault.kind.is_amnesia(story.terms.is_database) { "amnesia" } else { "fault" };
        let lock =
            if period.lock > 0 { format!(" of lock {}", period.lock) } else { String::new() };
        let tip = format!(
            "{} {}{lock} ({}), {} to {}",
            period.fault.number,
            period.fault.kind.word(),
            period.fault.amount,
            story.clock(period.from),
            story.clock(period.until.min(story.end))
        );
        let top = 22 + period.fault.node as u64 * ROW_HEIGHT;
        canvas.bar(class, "", (period.from, period.until), (top, ROW_HEIGHT - 6), &tip);
    }
    for wait in story.waits.iter().filter(|wait| wait.until > from && wait.from < until) {
        let Some(top) = seats.get(&wait.seat) else { continue };
        let why = wait.why.as_deref().unwrap_or(if wait.entered { "acquired" } else { "killed" });
        let tip = format!(
            "waits for lock {} ({}) from {}: {why}",
            wait.lock,
            wait.sharing,
            story.clock(wait.from)
        );
        let (x1, x2) = (canvas.x(wait.from), canvas.x(wait.until));
        canvas.line("wait", (x1, top + 10), (x2, top + 10), &tip);
    }
    for hold in story.holds.iter() {
        let Some(top) = seats.get(&hold.seat) else { continue };
        let deadline = hold.looks.last().map_or(hold.until, |look| look.1);
        // A writer that turns into a reader has two bars.
        let alone_until = match (hold.sharing.is_alone(), hold.downgraded) {
            (true, downgraded) => downgraded.unwrap_or(hold.until),
            (false, _) => hold.from,
        };
        let tip = format!(
            "lock {}, {}{}, token {}, {} to {}, {}; deadline {}; process {}, {}",
            hold.lock,
            hold.sharing,
            hold.downgraded
                .map_or_else(String::new, |at| format!(", reader from {} on", story.clock(at))),
            hold.token,
            story.clock(hold.from),
            story.clock(hold.until),
            hold.end.word(),
            story.clock(deadline),
            hold.pid,
            hold.id
        );
        if hold.end != End::Left {
            canvas.bar(
                "deadline",
                "",
                (hold.until, deadline.max(hold.until)),
                (top + 4, ROW_HEIGHT - 10),
                &tip,
            );
        }
        let colour = format!("hsl({} 65% 60%)", (hold.lock * 137) % 360);
        let row = (top + 4, ROW_HEIGHT - 10);
        if alone_until > hold.from {
            canvas.bar("hold", &colour, (hold.from, alone_until), row, &tip);
        }
        if alone_until < hold.until {
            canvas.bar("shared", &colour, (alone_until, hold.until), row, &tip);
        }
    }
    for (pid, begin, end) in &story.stops {
        for top in members.get(pid).into_iter().flatten() {
            let tip =
                format!("process {pid} stopped, {} to {}", story.clock(*begin), story.clock(*end));
            canvas.bar("stop", "", (*begin, *end), (*top, ROW_HEIGHT), &tip);
        }
    }
    for (pid, at) in story.kills.iter().filter(|(_, at)| *at >= from && *at < until) {
        for top in members.get(pid).into_iter().flatten() {
            let x = canvas.x(*at);
            canvas.line(
                "kill",
                (x, *top),
                (x, top + ROW_HEIGHT),
                &format!("process {pid} killed at {}", story.clock(*at)),
            );
        }
    }
    for finding in &verdict.findings {
        for top in finding.seats.iter().filter_map(|seat| seats.get(seat)) {
            canvas.bar(
                "violation",
                "",
                (finding.from, finding.until),
                (*top, ROW_HEIGHT),
                &finding.text,
            );
        }
        if finding.seats.is_empty() {
            canvas.bar("violation", "", (finding.from, finding.until), (14, 6), &finding.text);
        }
    }
    page.push_str("</svg></div>");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    const TEXT: &str = "\
        0 0 1 terms 1 100 10 0\n\
        2 0 1 fault 1 1 cut-clients 0\n\
        3 0 1 over 1\n\
        24 0@1 1 seen 22 9:<a>\n\
        10 11@1 7 wait\n\
        20 11@1 7 enter 60 5 <a>\n\
        21 21@1 8 wait\n\
        30 21@1 8 enter 99 6 b\n\
        40 11@1 7 leave";

    #[test]
    fn violation_is_drawn_in_red_and_listed() {
        let story = story(TEXT);
        let page = draw(&story, &Verdict::of(&story), Part::Findings);
        assert_eq!(
            page.matches("<rect class=violation").count(),
            2,
            "one in the row of each holder"
        );
        assert!(page.contains("<li>Exclusion: at 0.000 s child 11"));
        assert!(page.contains("&lt;a>") && !page.contains("<a>"), "ids are escaped");
    }

    #[test]
    fn good_history_is_drawn_only_on_request() {
        let story = story(&(TEXT.replace("30 21@1", "40 21@1") + "\n50 21@1 8 leave"));
        let verdict = Verdict::of(&story);
        assert_eq!(draw(&story, &verdict, Part::Findings).matches("<svg").count(), 0);
        let page = draw(&story, &verdict, Part::All);
        assert_eq!(
            (page.matches("<svg").count(), page.matches("<rect class=hold").count()),
            (1, 2)
        );
    }

    #[test]
    fn holders_that_share_a_lock_look_different() {
        let kinds = TEXT.replace("20 11@1", "11 11@1 7 as write\n20 11@1");
        let kinds = kinds.replace("30 21@1", "22 21@1 8 as read\n30 21@1");
        let kinds = kinds.replace("40 11@1", "25 11@1 7 downgrade\n40 11@1");
        let story = story(&format!("{kinds}\n50 21@1 8 leave"));
        let page = draw(&story, &Verdict::of(&story), Part::All);
        assert_eq!(page.matches("<rect class=hold").count(), 1, "the writer");
        assert_eq!(page.matches("<rect class=shared").count(), 2, "the reader it becomes, another");
        assert!(page.contains("lock 1, write, reader from 0.000 s on, token 5"), "{page}");
        assert!(page.contains("waits for lock 1 (read) from"), "{page}");
    }

    #[test]
    fn long_history_is_split_into_several_timelines() {
        let long = format!("{TEXT}\n40000000000 11 7 done");
        let story = story(&long);
        assert_eq!(draw(&story, &Verdict::of(&story), Part::All).matches("<svg").count(), 3);
    }
}
