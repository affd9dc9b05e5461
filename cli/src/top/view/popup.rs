//! Popups over the table: the details of a lock, and the help.

use ratatui::{
    Frame,
    layout::Rect,
    text::Line,
    widgets::{Block, Clear, Paragraph},
};

use super::{
    layout::{fit, pad, wrap},
    palette::{Palette, Tone},
};
use crate::{format::escape, top::model::Inspected};

/// Maximum number of lines for one value.
const LINES_PER_VALUE_MAX: usize = 20;

const HELP_KEYS: [(&str, &str); 13] = [
    ("↑ ↓ k j", "move"),
    ("PgUp PgDn", "move by a page"),
    ("Home End g G", "to the first, to the last"),
    ("s", "sort by the next column"),
    ("r", "reverse the order"),
    ("/", "filter by a part of the name; Esc clears"),
    ("Enter", "inspect a lock: holder, queue, nodes"),
    ("f F", "force the release of a lock, after a question"),
    ("p", "pause or resume"),
    ("+ -", "poll less often, more often"),
    ("^L", "redraw"),
    ("^Z", "suspend"),
    ("q Esc ^C", "quit"),
];
const HELP_COLUMNS: [(&str, &str); 6] = [
    (
        "LEFT",
        "time until the lock expires unless renewed, and as a part of its ttl; kept if released",
    ),
    ("RATE", "hand-overs per second, as far as polls show"),
    (
        "CLOSE",
        "the smallest part left so far, at a poll or before a renewal; under 50% a renewal was \
         late",
    ),
    ("TOKEN", "the fencing token of the holder"),
    ("?", "before a holder: no quorum of nodes agrees"),
    ("-", "unknown, or none"),
];
/// Width of one column of the help.
const HELP_WIDTH: usize = 60;
const HELP_KEY_WIDTH: usize = 14;
const HELP_GAP: usize = 3;
/// Width of the frame and the space within it, left and right together.
const FRAME_WIDTH: usize = 4;
/// Width of the details, which are tables with ids.
const DETAIL_WIDTH: u16 = 150;

/// Draws the help: in one column, or in two if it is too long for the screen and there is room.
pub(super) fn draw_help(frame: &mut Frame<'_>, area: Rect, palette: Palette) {
    let room = usize::from(area.width).saturating_sub(FRAME_WIDTH);
    let width = HELP_WIDTH.min(room);
    let (keys, columns) = (help_lines(&HELP_KEYS, width), help_lines(&HELP_COLUMNS, width));
    let is_short = keys.len() + 1 + columns.len() <= usize::from(inner_height(area));
    let both = 2 * HELP_WIDTH + HELP_GAP;
    let (lines, width) = if is_short || room < both {
        ([keys, vec![String::new()], columns].concat(), width)
    } else {
        let height = keys.len().max(columns.len());
        let line = |lines: &[String], at: usize| lines.get(at).cloned().unwrap_or_default();
        let beside = |at| pad(&line(&keys, at), HELP_WIDTH + HELP_GAP, false) + &line(&columns, at);
        ((0..height).map(beside).collect(), both)
    };
    let width = u16::try_from(width + FRAME_WIDTH).unwrap_or(u16::MAX);
    draw_popup(frame, area, "help", width, lines.into_iter().map(Line::raw).collect(), palette);
}

fn help_lines(items: &[(&str, &str)], width: usize) -> Vec<String> {
    let lines = |(key, meaning): &(&str, &str)| {
        let parts = wrap(meaning, width.saturating_sub(HELP_KEY_WIDTH), LINES_PER_VALUE_MAX);
        let label = |at: usize| if at == 0 { *key } else { "" };
        let line = |(at, part)| format!("{:<HELP_KEY_WIDTH$}{part}", label(at));
        parts.into_iter().enumerate().map(line).collect::<Vec<_>>()
    };
    items.iter().flat_map(lines).collect()
}

/// Draws the details of a lock, and limits scrolling to their number of lines.
pub(super) fn draw_inspected(
    frame: &mut Frame<'_>,
    area: Rect,
    inspected: &mut Inspected,
    palette: Palette,
) {
    let width = usize::from(area.width.min(DETAIL_WIDTH)).saturating_sub(FRAME_WIDTH);
    let lines = detail_lines(inspected, width, palette);
    let height = usize::from(inner_height(area));
    inspected.scroll = inspected.scroll.min(lines.len().saturating_sub(height));
    let lines = lines.into_iter().skip(inspected.scroll).collect();
    draw_popup(frame, area, &escape(&inspected.name), DETAIL_WIDTH, lines, palette);
}

fn detail_lines(inspected: &Inspected, width: usize, palette: Palette) -> Vec<Line<'static>> {
    let styled = |text: &str, tone| {
        wrap(text, width, LINES_PER_VALUE_MAX)
            .into_iter()
            .map(move |line| Line::styled(line, palette.style(tone)))
    };
    match &inspected.result {
        None => styled("querying…", Tone::Quiet).collect(),
        Some(Err(why)) => styled(why, Tone::Bad).collect(),
        Some(Ok(None)) => styled("not held", Tone::Quiet).collect(),
        // An empty line has nothing to wrap.
        Some(Ok(Some(detail))) => detail
            .page
            .lines()
            .flat_map(|line| {
                let parts = wrap(line, width, LINES_PER_VALUE_MAX);
                if parts.is_empty() { vec![String::new()] } else { parts }
            })
            .map(Line::raw)
            .collect(),
    }
}

/// Whether the area has room for a frame.
fn has_room_for_frame(area: Rect) -> bool {
    area.width >= 20 && area.height >= 6
}

fn inner_height(area: Rect) -> u16 {
    if has_room_for_frame(area) { area.height - 2 } else { area.height }
}

fn draw_popup(
    frame: &mut Frame<'_>,
    area: Rect,
    title: &str,
    width: u16,
    lines: Vec<Line<'static>>,
    palette: Palette,
) {
    if !has_room_for_frame(area) {
        frame.render_widget(Clear, area);
        frame.render_widget(Paragraph::new(lines), area);
        return;
    }
    let height = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_add(2).min(area.height);
    let width = width.min(area.width);
    let position = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    let title = Line::styled(
        format!(" {} ", fit(title, usize::from(width) - 4)),
        palette.style(Tone::Title),
    );
    let block = Block::bordered().title(title).padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Clear, position);
    frame.render_widget(Paragraph::new(lines).block(block), position);
}
