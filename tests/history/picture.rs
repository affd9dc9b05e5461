//! A history as a picture: a page of its own, with one row for each thread and each node, and what
//! was wrong in red.

use std::{collections::BTreeMap, fmt::Write};

use super::{End, Story, Verdict};

/// What is drawn.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Part {
    All,
    /// Some seconds around what was wrong, for the first of it.
    Findings,
}

const PICTURES: usize = 6;
const AROUND: u64 = 3_000_000_000;
/// Of one picture, in nanoseconds.
const LONGEST: u64 = 15_000_000_000;
const ROW: u64 = 22;
const LEFT: u64 = 110;
/// Points for a second.
const SCALE: f64 = 100.0;

const STYLE: &str = "
body{font:13px sans-serif;margin:16px;background:#fff;color:#222} h2{font-size:14px;margin:18px 0 4px}
.scroll{overflow-x:auto;border:1px solid #ddd} text{font:11px sans-serif;fill:#444} .grid{stroke:#eee}
.wait{stroke:#bbb;stroke-width:2} .stop{fill:#000;opacity:.18} .fault{fill:#e8a33d} .amnesia{fill:#b04fc4}
.wrong{fill:#e00000;opacity:.35;stroke:#e00000} .kill{stroke:#e00000;stroke-width:2}
.hold{stroke:#333;stroke-width:.4} .promised{fill:none;stroke:#333;stroke-dasharray:2 2}
li{margin:2px 0}";

pub(crate) fn draw(story: &Story, verdict: &Verdict<'_>, part: Part) -> String {
    let mut page = format!(
        "<!doctype html><meta charset=utf-8><title>What happened</title><style>{STYLE}</style>"
    );
    page.push_str(
        "<p>Bars are beliefs, a colour for each lock, and the dashed rest is what the guard had promised; grey lines wait; \
         shadows are stops, red strokes kills. Orange is done to a node or the way to it, purple makes it forget. \
         Red is wrong. Everything tells more under the pointer.</p><ul>",
    );
    for finding in verdict.findings.iter().take(50) {
        let _ = write!(page, "<li>{:?}: {}</li>", finding.rule, escape(&finding.text));
    }
    page.push_str("</ul>");
    for (from, until) in parts(story, verdict, part) {
        picture(&mut page, story, verdict, from, until);
    }
    page
}

/// From when until when the pictures are.
fn parts(story: &Story, verdict: &Verdict<'_>, part: Part) -> Vec<(u64, u64)> {
    if part == Part::All {
        let starts = (story.start..story.end).step_by(LONGEST as usize);
        return starts.map(|from| (from, (from + LONGEST).min(story.end))).collect();
    }
    let mut parts: Vec<(u64, u64)> = Vec::new();
    for finding in &verdict.findings {
        let from = finding.from.saturating_sub(AROUND).max(story.start);
        let until = finding.until.saturating_add(AROUND).min(story.end).min(from + LONGEST);
        if parts
            .last()
            .is_none_or(|last| finding.until.min(last.1) > last.1 || finding.from > last.1)
        {
            parts.push((from, until));
        }
    }
    parts.truncate(PICTURES);
    parts
}

/// One picture, with its rows.
struct Canvas<'a> {
    page: &'a mut String,
    from: u64,
    until: u64,
}

impl Canvas<'_> {
    fn x(&self, at: u64) -> f64 {
        LEFT as f64 + at.clamp(self.from, self.until).saturating_sub(self.from) as f64 / 1e9 * SCALE
    }

    fn shows(&self, from: u64, until: u64) -> bool {
        from < self.until && until > self.from
    }

    /// A bar that is seen however short it is.
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
                "<rect class={class}{fill} x={x:.1} y={top} width={width:.1} height={height}><title>{tip}</title></rect>"
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

fn picture(page: &mut String, story: &Story, verdict: &Verdict<'_>, from: u64, until: u64) {
    let nodes = story.terms.nodes as u64;
    let seats: BTreeMap<u32, u64> = {
        let mut seats: Vec<u32> = story.waits.iter().map(|wait| wait.seat).collect();
        seats.sort_unstable();
        seats.dedup();
        seats.into_iter().zip((1 + nodes)..).map(|(seat, row)| (seat, 20 + row * ROW)).collect()
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
    let height = 30 + (1 + nodes + seats.len() as u64) * ROW;
    let _ =
        write!(page, "<h2>{} to {}</h2><div class=scroll>", story.clock(from), story.clock(until));
    let width = LEFT as f64 + (until - from) as f64 / 1e9 * SCALE + 10.0;
    let _ = write!(page, "<svg width={width:.0} height={height}>");
    let mut canvas = Canvas { page, from, until };
    for at in (from..until).step_by(1_000_000_000) {
        let x = canvas.x(at);
        canvas.line("grid", (x, 14), (x, height), "");
        canvas.text(x, 12, &story.clock(at));
    }
    canvas.text(4.0, 34, "all nodes");
    (1..=nodes).for_each(|node| canvas.text(4.0, 34 + node * ROW, &format!("node {node}")));
    for (seat, top) in &seats {
        canvas.text(4.0, top + 14, &format!("worker {}, {}", seat / 10, seat % 10));
    }
    for done in &story.done {
        let class = if done.fault.kind.is_amnesia() { "amnesia" } else { "fault" };
        let lock = if done.lock > 0 { format!(" of lock {}", done.lock) } else { String::new() };
        let tip = format!(
            "{} {}{lock} ({}), {} to {}",
            done.fault.number,
            done.fault.kind.word(),
            done.fault.amount,
            story.clock(done.from),
            story.clock(done.until.min(story.end))
        );
        let top = 22 + done.fault.node as u64 * ROW;
        canvas.bar(class, "", (done.from, done.until), (top, ROW - 6), &tip);
    }
    for wait in story.waits.iter().filter(|wait| wait.until > from && wait.from < until) {
        let Some(top) = seats.get(&wait.seat) else { continue };
        let why = wait.why.as_deref().unwrap_or(if wait.entered { "got it" } else { "died" });
        let tip = format!("wants lock {} from {}: {why}", wait.lock, story.clock(wait.from));
        let (x1, x2) = (canvas.x(wait.from), canvas.x(wait.until));
        canvas.line("wait", (x1, top + 10), (x2, top + 10), &tip);
    }
    for hold in story.holds.iter() {
        let Some(top) = seats.get(&hold.seat) else { continue };
        let promised = hold.looks.last().map_or(hold.until, |look| look.1);
        let tip = format!(
            "lock {}, token {}, {} to {}, {}; promised until {}; process {}, {}",
            hold.lock,
            hold.token,
            story.clock(hold.from),
            story.clock(hold.until),
            hold.end.word(),
            story.clock(promised),
            hold.pid,
            hold.id
        );
        if hold.end != End::Left {
            canvas.bar(
                "promised",
                "",
                (hold.until, promised.max(hold.until)),
                (top + 4, ROW - 10),
                &tip,
            );
        }
        let colour = format!("hsl({} 65% 60%)", (hold.lock * 137) % 360);
        canvas.bar("hold", &colour, (hold.from, hold.until), (top + 4, ROW - 10), &tip);
    }
    for (pid, begin, end) in &story.stops {
        for top in members.get(pid).into_iter().flatten() {
            let tip =
                format!("process {pid} stopped, {} to {}", story.clock(*begin), story.clock(*end));
            canvas.bar("stop", "", (*begin, *end), (*top, ROW), &tip);
        }
    }
    for (pid, at) in story.kills.iter().filter(|(_, at)| *at >= from && *at < until) {
        for top in members.get(pid).into_iter().flatten() {
            let x = canvas.x(*at);
            canvas.line(
                "kill",
                (x, *top),
                (x, top + ROW),
                &format!("process {pid} killed at {}", story.clock(*at)),
            );
        }
    }
    for finding in &verdict.findings {
        for top in finding.seats.iter().filter_map(|seat| seats.get(seat)) {
            canvas.bar("wrong", "", (finding.from, finding.until), (*top, ROW), &finding.text);
        }
        if finding.seats.is_empty() {
            canvas.bar("wrong", "", (finding.from, finding.until), (14, 6), &finding.text);
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

    const TEXT: &str = "0 0 1 terms 1 100 10 0\n2 0 1 fault 1 1 cut-clients 0\n3 0 1 over 1\n24 0@1 1 seen 22 9:<a>\n10 11@1 7 wait\n20 11@1 7 enter 60 5 <a>\n21 21@1 8 wait\n30 21@1 8 enter 99 6 b\n40 11@1 7 leave";

    #[test]
    fn what_was_wrong_is_drawn_in_red_and_told() {
        let story = story(TEXT);
        let page = draw(&story, &Verdict::of(&story), Part::Findings);
        assert_eq!(page.matches("<rect class=wrong").count(), 2, "in the rows of both");
        assert!(page.contains("<li>Exclusion: at 0.000 s child 11"));
        assert!(page.contains("&lt;a>") && !page.contains("<a>"), "an identifier is no markup");
    }

    #[test]
    fn a_good_history_is_drawn_when_it_is_wanted() {
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
    fn pictures_do_not_grow_with_the_storm() {
        let long = format!("{TEXT}\n40000000000 11 7 done");
        let story = story(&long);
        assert_eq!(draw(&story, &Verdict::of(&story), Part::All).matches("<svg").count(), 3);
    }
}
