//! What opens over the table: one lock in full, and the help.

use ratatui::{
    Frame,
    layout::Rect,
    text::Line,
    widgets::{Block, Clear, Paragraph},
};

use super::{
    palette::{Palette, Tone},
    words::{ago, count, fit, wrap},
};
use crate::{
    text::{self, clean},
    top::{detail::Detail, model::Inspected},
};

const LABELS: usize = 11;
/// Lines that one value may take.
const LINES_EACH: usize = 20;

const HELP: [(&str, &str); 22] = [
    ("↑ ↓ k j", "move"),
    ("PgUp PgDn", "move by a page"),
    ("Home End g G", "to the first, to the last"),
    ("s", "sort by the next column"),
    ("r", "turn the order round"),
    ("/", "filter by a part of the name; Esc clears"),
    ("Enter", "inspect a lock: holder, line, nodes"),
    ("f F", "take a lock from its holder, after a question"),
    ("p", "pause and resume"),
    ("+ -", "look less often, more often"),
    ("^L", "draw all anew"),
    ("^Z", "suspend"),
    ("q Esc ^C", "quit"),
    ("", ""),
    ("LEFT", "how long the lock lasts unless renewed, and what"),
    ("", "part of its time to live that is"),
    ("RATE", "hand-overs per second, as far as they are seen"),
    ("CLOSE", "the least part that was left, at any look or"),
    ("", "before a renewal; under 50% a renewal was late"),
    ("TOKEN", "the fencing token of the holder"),
    ("?", "before a holder: too few nodes agree"),
    ("-", "not known, or none"),
];

pub(super) fn help(frame: &mut Frame<'_>, area: Rect, palette: Palette) {
    let lines = HELP.iter().map(|(key, meaning)| Line::raw(format!("{key:<14}{meaning}"))).collect();
    window(frame, area, "help", 64, lines, palette);
}

/// One lock; scrolls as far as there are lines.
pub(super) fn inspect(frame: &mut Frame<'_>, area: Rect, inspected: &mut Inspected, palette: Palette) {
    let width = usize::from(area.width.min(100)).saturating_sub(4);
    let lines = lines(inspected, width, palette);
    let height = usize::from(inner_height(area));
    inspected.scroll = inspected.scroll.min(lines.len().saturating_sub(height));
    let lines = lines.into_iter().skip(inspected.scroll).collect();
    window(frame, area, &clean(&inspected.name), 100, lines, palette);
}

fn lines(inspected: &Inspected, width: usize, palette: Palette) -> Vec<Line<'static>> {
    let styled = |text: &str, tone| {
        wrap(text, width, LINES_EACH).into_iter().map(move |line| Line::styled(line, palette.of(tone)))
    };
    match &inspected.told {
        None => styled("asking…", Tone::Quiet).collect(),
        Some(Err(why)) => styled(why, Tone::Bad).collect(),
        Some(Ok(None)) => styled("nobody holds it", Tone::Quiet).collect(),
        Some(Ok(Some(detail))) => {
            let pairs = pairs(detail);
            let value = width.saturating_sub(LABELS);
            let of_pair = |(label, text): (&str, String)| {
                let parts = wrap(&text, value, LINES_EACH).into_iter().enumerate();
                parts
                    .map(|(at, part)| format!("{:<LABELS$}{part}", if at == 0 { label } else { "" }))
                    .map(Line::raw)
                    .collect::<Vec<_>>()
            };
            pairs.into_iter().flat_map(of_pair).collect()
        }
    }
}

fn pairs(detail: &Detail) -> Vec<(&'static str, String)> {
    let thread = detail.thread.map_or_else(String::new, |thread| format!(", thread {thread}"));
    let mut pairs = vec![("held by", format!("{}{thread}", detail.who))];
    if !detail.certain {
        pairs.push(("", "but too few nodes agree".into()));
    }
    if let (Some(since), Some(age)) = (&detail.since, detail.age) {
        pairs.push(("since", format!("{since}, for {}", ago(age))));
    }
    if let Some(asked) = &detail.asked {
        pairs.push(("asked", format!("{asked}, on its clock")));
    }
    let left =
        detail.left.map_or_else(|| "never expires".into(), |left| format!("{} unless renewed", text::span(left)));
    pairs.push(("left", left));
    pairs.push(("token", detail.token.map_or_else(|| "none".into(), |token| token.to_string())));
    pairs.push(("identifier", clean(&detail.id)));
    for (at, node) in detail.nodes.iter().enumerate() {
        pairs.push((if at == 0 { "nodes" } else { "" }, node.clone()));
    }
    let line = if detail.waiting == 0 { "nobody".into() } else { count(detail.waiting, "waiter") };
    pairs.push(("in line", line));
    pairs.extend(detail.waiters.iter().zip(1..).map(|(waiter, at)| ("", format!("{at}. {waiter}"))));
    let told = detail.waiters.len() as u64;
    if told < detail.waiting {
        pairs.push(("", format!("and {} more", detail.waiting - told)));
    }
    pairs
}

/// Whether there is room for a frame around it.
fn is_roomy(area: Rect) -> bool {
    area.width >= 20 && area.height >= 6
}

fn inner_height(area: Rect) -> u16 {
    if is_roomy(area) { area.height - 2 } else { area.height }
}

fn window(frame: &mut Frame<'_>, area: Rect, title: &str, width: u16, lines: Vec<Line<'static>>, palette: Palette) {
    if !is_roomy(area) {
        frame.render_widget(Clear, area);
        frame.render_widget(Paragraph::new(lines), area);
        return;
    }
    let height = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_add(2).min(area.height);
    let width = width.min(area.width);
    let place = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    let title = Line::styled(format!(" {} ", fit(title, usize::from(width) - 4)), palette.of(Tone::Title));
    let block = Block::bordered().title(title).padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(lines).block(block), place);
}
