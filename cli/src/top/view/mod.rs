//! The screen: header, table, footer, and what opens over them. Draws the model, and decides nothing but what fits.

mod palette;
mod popup;
mod table;
#[cfg(test)]
mod tests;
mod words;

use std::time::{Duration, Instant};

use ratatui::{
    Frame,
    layout::Rect,
    text::{Line, Span},
    widgets::Paragraph,
};
use unicode_width::UnicodeWidthStr as _;

pub(super) use self::palette::Palette;
use self::{
    palette::Tone,
    words::{ago, count, fit, rate, wrap},
};
use crate::{
    text::{self, clean},
    top::{
        keys::Mode,
        model::{Model, Question},
    },
};

/// For how long it is told that servers are back, and what was done.
const NEWS: Duration = Duration::from_secs(10);
const KEYS: &str = "q quit  ? help  / filter  s sort  r turn  ⏎ inspect  f release  p pause  +- pace";

/// Lines that a question takes at most.
const QUESTION: usize = 4;

/// From top to bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heights {
    head: u16,
    trouble: u16,
    table: u16,
    foot: u16,
}

/// Who gets how many lines: questions before all else, then one line of the table, then the rest.
fn heights(all: u16, trouble: u16, asked: u16) -> Heights {
    let foot = if asked > 0 { asked.min(all) } else { u16::from(all >= 4) };
    let rest = all - foot;
    let trouble = trouble.min(if rest >= 8 { 3 } else { u16::from(rest >= 2) });
    let rest = rest - trouble;
    // Where there is little room, trouble stands in the header's place.
    let head = if rest >= 8 { 2 } else { u16::from(rest >= 3 || rest == 2 && trouble == 0) };
    Heights { head, trouble, table: rest - head, foot }
}

pub(super) fn draw(frame: &mut Frame<'_>, model: &mut Model, now: Instant, palette: Palette) {
    let area = frame.area();
    let width = usize::from(area.width);
    let trouble = trouble(model, now, width, palette);
    let (foot, asked) = foot(model, now, area, palette);
    let heights = heights(area.height, lines_in(&trouble), if asked { lines_in(&foot) } else { 0 });
    let mut y = area.y;
    let mut next = |height: u16| {
        let part = Rect { y, height, ..area };
        y += height;
        part
    };
    let (head_area, trouble_area, table_area, foot_area) =
        (next(heights.head), next(heights.trouble), next(heights.table), next(heights.foot));
    let mut head = vec![summary(model, now, width, palette)];
    if heights.head > 1 {
        head.insert(0, title(model, width, palette));
    }
    frame.render_widget(Paragraph::new(head), head_area);
    frame.render_widget(Paragraph::new(trouble), trouble_area);
    table::draw(frame, table_area, model, palette);
    frame.render_widget(Paragraph::new(foot), foot_area);
    if let Some(inspected) = &mut model.inspected {
        popup::inspect(frame, table_area, inspected, palette);
    }
    if model.mode == Mode::Help {
        popup::help(frame, table_area, palette);
    }
}

fn lines_in(lines: &[Line<'_>]) -> u16 {
    u16::try_from(lines.len()).unwrap_or(u16::MAX)
}

fn title(model: &Model, width: usize, palette: Palette) -> Line<'static> {
    const NAME: &str = "distlock top";
    let mut text = format!("  {}", clean(&model.servers));
    if model.pattern != "*" {
        text += &format!("  names {}", clean(&model.pattern));
    }
    text += &format!("  every {}", text::span(model.pace.interval));
    let mut line = vec![Span::styled(fit(NAME, width), palette.of(Tone::Title))];
    let paused = if model.pace.paused { "  PAUSED" } else { "" };
    line.push(Span::raw(fit(&text, width.saturating_sub(NAME.len() + paused.len()))));
    line.push(Span::styled(paused, palette.of(Tone::Warn)));
    Line::from(line)
}

fn summary(model: &Model, now: Instant, width: usize, palette: Palette) -> Line<'static> {
    let Some(picture) = &model.picture else {
        return Line::styled(fit("asking…", width), palette.of(Tone::Quiet));
    };
    let mut text = count(picture.rows.len() as u64, "lock");
    if !model.filter.is_empty() {
        text = format!("{} of {text} match {}", model.len(), clean(&model.filter));
    }
    text += &format!(", {}", count(picture.waiting, "waiter"));
    text += &format!(", {} hand-overs/s", rate(picture.rate));
    text += &format!(", looked {} ago", ago(now.saturating_duration_since(picture.at)));
    text += &format!(" in {}", text::span(picture.took));
    Line::styled(fit(&text, width), palette.of(Tone::Strong))
}

/// What is wrong, or was until now.
fn trouble(model: &Model, now: Instant, width: usize, palette: Palette) -> Vec<Line<'static>> {
    let (text, tone) = match (&model.trouble, &model.back, &model.picture) {
        (Some(trouble), _, picture) => {
            let since = ago(now.saturating_duration_since(trouble.since));
            let old = if picture.is_some() { "; below is the last picture, which is OLD" } else { "" };
            (format!("NO ANSWER for {since}: {}{old}", trouble.why), Tone::Bad)
        }
        (None, _, Some(picture)) if !picture.silent.is_empty() => {
            let nodes = count(picture.silent.len() as u64, "node");
            (format!("{nodes} without an answer: {}", picture.silent.join("; ")), Tone::Warn)
        }
        (None, Some((at, away)), _) if now.saturating_duration_since(*at) < NEWS => {
            (format!("back, after {} without an answer", ago(*away)), Tone::Good)
        }
        _ => return Vec::new(),
    };
    wrap(&text, width, 3).into_iter().map(|line| Line::styled(line, palette.of(tone))).collect()
}

/// The last lines, and whether they need to be read.
fn foot(model: &Model, now: Instant, area: Rect, palette: Palette) -> (Vec<Line<'static>>, bool) {
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let lines = |texts: Vec<String>, tone| texts.into_iter().map(|text| Line::styled(text, palette.of(tone))).collect();
    if let (Mode::Ask, Some(question)) = (model.mode, &model.question) {
        return (lines(ask(question, width, height.min(QUESTION)), Tone::Question), true);
    }
    if model.mode == Mode::Filter {
        let text = format!("filter: {}_", clean(&model.filter));
        // The end is where one writes.
        let (mut from, hint) = (0, "  Enter keeps, Esc clears");
        while text[from..].width() > width {
            from += text[from..].chars().next().map_or(1, char::len_utf8);
        }
        let shown = &text[from..];
        let hint = if shown.width() + hint.len() <= width { hint } else { "" };
        return (lines(vec![format!("{shown}{hint}")], Tone::Warn), true);
    }
    match &model.notice {
        Some(notice) if now.saturating_duration_since(notice.at) < NEWS => {
            let tone = if notice.good { Tone::Good } else { Tone::Bad };
            (lines(wrap(&notice.text, width, 3), tone), true)
        }
        _ => {
            let keys = if model.mode == Mode::Inspect { "Esc back  ↑↓ scroll  f release  ^C quit" } else { KEYS };
            (lines(vec![fit(keys, width)], Tone::Quiet), false)
        }
    }
}

/// The question in at most so many lines; names are cut before the answers are.
fn ask(Question { name, who, .. }: &Question, width: usize, most: usize) -> Vec<String> {
    const ANSWERS: &str = "? y/n";
    let (name, who) = (clean(name), clean(who));
    let fitting = |name: &str, who: &str| {
        let lines = wrap(&format!("Release {name}, held by {who}{ANSWERS}"), width, most + 1);
        (lines.len() <= most).then_some(lines)
    };
    // Breaking at spaces leaves a part of each line empty.
    let room = (width * most.saturating_sub(1)).saturating_sub(40) / 2;
    fitting(&name, &who).or_else(|| fitting(&fit(&name, room.max(8)), &fit(&who, room.max(8)))).unwrap_or_else(|| {
        let mut lines = wrap(&format!("Release {name}"), width, most.saturating_sub(1));
        lines.push(fit(ANSWERS, width));
        lines
    })
}
