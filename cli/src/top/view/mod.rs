//! Draws the screen: header, alert, table, footer and popups.

mod layout;
mod palette;
mod popup;
mod table;
#[cfg(test)]
mod tests;

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
    layout::{ago, fit, plural, rate, wrap},
    palette::Tone,
};
use crate::{
    format::{self, escape},
    top::{
        keys::Mode,
        model::{Confirmation, Model},
    },
};

/// How long a recovery, or the result of an action, is shown.
const STATUS_SHOWN_FOR: Duration = Duration::from_secs(10);
const KEY_HINTS: &str =
    "q quit  ? help  / filter  s sort  r flip  ⏎ inspect  f release  p pause  +- rate";

/// Maximum number of lines for the question before a release.
const CONFIRMATION_LINES_MAX: usize = 4;

/// Heights of the parts of the screen, from top to bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heights {
    head: u16,
    alert: u16,
    table: u16,
    foot: u16,
}

/// Distributes the lines of the screen: first to an urgent footer, then one line to the table, then
/// the rest.
fn heights(all: u16, alert: u16, urgent: u16) -> Heights {
    let foot = if urgent > 0 { urgent.min(all) } else { u16::from(all >= 4) };
    let rest = all - foot;
    let alert = alert.min(if rest >= 8 { 3 } else { u16::from(rest >= 2) });
    let rest = rest - alert;
    // On a small screen, the alert replaces the header.
    let head = if rest >= 8 { 2 } else { u16::from(rest >= 3 || rest == 2 && alert == 0) };
    Heights { head, alert, table: rest - head, foot }
}

pub(super) fn draw(frame: &mut Frame<'_>, model: &mut Model, now: Instant, palette: Palette) {
    let area = frame.area();
    let width = usize::from(area.width);
    let alert = alert_lines(model, now, width, palette);
    let (foot, is_urgent) = footer(model, now, area, palette);
    let heights =
        heights(area.height, line_count(&alert), if is_urgent { line_count(&foot) } else { 0 });
    let mut y = area.y;
    let mut next = |height: u16| {
        let part = Rect { y, height, ..area };
        y += height;
        part
    };
    let (head_area, alert_area, table_area, foot_area) =
        (next(heights.head), next(heights.alert), next(heights.table), next(heights.foot));
    let mut head = vec![summary(model, now, width, palette)];
    if heights.head > 1 {
        head.insert(0, title(model, width, palette));
    }
    frame.render_widget(Paragraph::new(head), head_area);
    frame.render_widget(Paragraph::new(alert), alert_area);
    table::draw(frame, table_area, model, palette);
    frame.render_widget(Paragraph::new(foot), foot_area);
    if let Some(inspected) = &mut model.inspected {
        popup::draw_inspected(frame, table_area, inspected, palette);
    }
    if model.mode == Mode::Help {
        // It needs more lines than the table has on a small screen.
        popup::draw_help(frame, area, palette);
    }
}

fn line_count(lines: &[Line<'_>]) -> u16 {
    u16::try_from(lines.len()).unwrap_or(u16::MAX)
}

fn title(model: &Model, width: usize, palette: Palette) -> Line<'static> {
    const NAME: &str = "distlock top";
    let mut text = format!("  {}", escape(&model.servers));
    if model.pattern != "*" {
        text += &format!("  names {}", escape(&model.pattern));
    }
    text += &format!("  every {}", format::duration(model.poll_rate.interval));
    let mut line = vec![Span::styled(fit(NAME, width), palette.style(Tone::Title))];
    let paused = if model.poll_rate.paused { "  PAUSED" } else { "" };
    line.push(Span::raw(fit(&text, width.saturating_sub(NAME.len() + paused.len()))));
    line.push(Span::styled(paused, palette.style(Tone::Warn)));
    Line::from(line)
}

fn summary(model: &Model, now: Instant, width: usize, palette: Palette) -> Line<'static> {
    let Some(data) = &model.data else {
        return Line::styled(fit("querying…", width), palette.style(Tone::Quiet));
    };
    let mut text = plural(data.rows.len() as u64, "lock");
    if !model.filter.is_empty() {
        text = format!("{} of {text} match {}", model.len(), escape(&model.filter));
    }
    text += &format!(", {}", plural(data.waiting, "waiter"));
    text += &format!(", {} hand-overs/s", rate(data.rate));
    text += &format!(", polled {} ago", ago(now.saturating_duration_since(data.at)));
    text += &format!(" in {}", format::duration(data.poll_time));
    Line::styled(fit(&text, width), palette.style(Tone::Strong))
}

/// Reports an outage, nodes that do not reply, or a recovery.
fn alert_lines(model: &Model, now: Instant, width: usize, palette: Palette) -> Vec<Line<'static>> {
    let (text, tone) = match (&model.outage, &model.recovered, &model.data) {
        (Some(outage), _, data) => {
            let since = ago(now.saturating_duration_since(outage.since));
            let old = if data.is_some() { "; the table below is OLD" } else { "" };
            (format!("NO REPLY for {since}: {}{old}", outage.why), Tone::Bad)
        }
        (None, _, Some(data)) if !data.silent_nodes.is_empty() => {
            let nodes = plural(data.silent_nodes.len() as u64, "node");
            (format!("{nodes} without a reply: {}", data.silent_nodes.join("; ")), Tone::Warn)
        }
        (None, Some((at, outage)), _) if now.saturating_duration_since(*at) < STATUS_SHOWN_FOR => {
            (format!("back after {} without a reply", ago(*outage)), Tone::Good)
        }
        _ => return Vec::new(),
    };
    wrap(&text, width, 3).into_iter().map(|line| Line::styled(line, palette.style(tone))).collect()
}

/// The lines at the bottom, and whether they are urgent.
fn footer(model: &Model, now: Instant, area: Rect, palette: Palette) -> (Vec<Line<'static>>, bool) {
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let lines = |texts: Vec<String>, tone| {
        texts.into_iter().map(|text| Line::styled(text, palette.style(tone))).collect()
    };
    if let (Mode::Confirm, Some(confirmation)) = (model.mode, &model.confirmation) {
        return (
            lines(
                confirmation_lines(confirmation, width, height.min(CONFIRMATION_LINES_MAX)),
                Tone::Confirmation,
            ),
            true,
        );
    }
    if model.mode == Mode::Filter {
        let text = format!("filter: {}_", escape(&model.filter));
        // A long filter is cut at its beginning, because the user types at its end.
        let (mut from, hint) = (0, "  Enter keeps, Esc clears");
        while text[from..].width() > width {
            from += text[from..].chars().next().map_or(1, char::len_utf8);
        }
        let shown = &text[from..];
        let hint = if shown.width() + hint.len() <= width { hint } else { "" };
        return (lines(vec![format!("{shown}{hint}")], Tone::Warn), true);
    }
    match &model.status {
        Some(status) if now.saturating_duration_since(status.at) < STATUS_SHOWN_FOR => {
            let tone = if status.good { Tone::Good } else { Tone::Bad };
            (lines(wrap(&status.text, width, 3), tone), true)
        }
        _ => {
            let keys = if model.mode == Mode::Inspect {
                "Esc back  ↑↓ scroll  f release  ^C quit"
            } else {
                KEY_HINTS
            };
            (lines(vec![fit(keys, width)], Tone::Quiet), false)
        }
    }
}

/// The question in at most `most` lines. Names are cut before the answers are.
fn confirmation_lines(
    Confirmation { name, holder, .. }: &Confirmation,
    width: usize,
    most: usize,
) -> Vec<String> {
    const ANSWERS: &str = "? y/n";
    let (name, holder) = (escape(name), escape(holder));
    let fitting = |name: &str, holder: &str| {
        let lines = wrap(&format!("Release {name}, held by {holder}{ANSWERS}"), width, most + 1);
        (lines.len() <= most).then_some(lines)
    };
    // Breaking lines at spaces wastes a part of each line.
    let room = (width * most.saturating_sub(1)).saturating_sub(40) / 2;
    fitting(&name, &holder)
        .or_else(|| fitting(&fit(&name, room.max(8)), &fit(&holder, room.max(8))))
        .unwrap_or_else(|| {
            let mut lines = wrap(&format!("Release {name}"), width, most.saturating_sub(1));
            lines.push(fit(ANSWERS, width));
            lines
        })
}
