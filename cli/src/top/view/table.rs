//! The table of locks: which columns there is room for, and the rows that are in sight.

use ratatui::{
    Frame,
    layout::Rect,
    style::Style,
    text::{Line, Span},
    widgets::Paragraph,
};

use super::{
    palette::{Palette, Tone},
    words::{bar, fit, pad, percent, rate},
};
use crate::{
    text::{self, clean},
    top::{
        model::Model,
        rows::{Column, Row},
    },
};

const GAP: usize = 2;
const BAR: usize = 5;
/// The widest a holder's column becomes; names get the rest.
const HOLDER_MAX: usize = 40;

/// A column that is shown, and how wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    column: Column,
    width: usize,
}

/// The least width of a column.
fn width_of(column: Column) -> usize {
    match column {
        Column::Name => 12,
        Column::Holder | Column::Token => 16,
        Column::Left => BAR + 7,
        Column::Age | Column::Closest => 6,
        Column::Waiting | Column::Rate => 5,
    }
}

/// Room that has to be left for names beside a column.
fn spare(column: Column) -> usize {
    match column {
        Column::Name | Column::Left | Column::Holder => 0,
        Column::Waiting | Column::Age => 2,
        Column::Rate | Column::Closest => 6,
        Column::Token => 16,
    }
}

fn title(column: Column) -> &'static str {
    match column {
        Column::Name => "NAME",
        Column::Holder => "HELD BY",
        Column::Age => "AGE",
        Column::Left => "LEFT",
        Column::Waiting => "WAIT",
        Column::Rate => "RATE",
        Column::Closest => "CLOSE",
        Column::Token => "TOKEN",
    }
}

fn is_right(column: Column) -> bool {
    !matches!(column, Column::Name | Column::Holder | Column::Left)
}

/// The columns there is room for, the more telling ones first to come and last to go.
fn slots(width: usize) -> Vec<Slot> {
    const BY_WORTH: [Column; 8] = [
        Column::Name,
        Column::Left,
        Column::Holder,
        Column::Waiting,
        Column::Age,
        Column::Rate,
        Column::Closest,
        Column::Token,
    ];
    let (mut shown, mut room) = (vec![Column::Name], width.saturating_sub(width_of(Column::Name)));
    for column in &BY_WORTH[1..] {
        let needed = width_of(*column) + GAP;
        if needed + spare(*column) > room {
            break;
        }
        room -= needed;
        shown.push(*column);
    }
    let for_holder =
        if shown.contains(&Column::Holder) { (room / 3).min(HOLDER_MAX - width_of(Column::Holder)) } else { 0 };
    let extra = |column| match column {
        Column::Name => room - for_holder,
        Column::Holder => for_holder,
        _ => 0,
    };
    let slot = |column: Column| Slot { column, width: (width_of(column) + extra(column)).min(width) };
    Column::ALL.into_iter().filter(|column| shown.contains(column)).map(slot).collect()
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, model: &mut Model, palette: Palette) {
    let slots = slots(area.width.into());
    let has_heading = area.height > 1;
    let window = model.window(usize::from(area.height) - usize::from(has_heading && area.height > 0));
    let mut lines = Vec::with_capacity(area.height.into());
    if has_heading {
        lines.push(heading(&slots, model, palette));
    }
    // Only what is in sight is made.
    for at in window {
        let Some(row) = model.row(at) else { break };
        let line = line(&slots, row, at == model.selected(), palette);
        lines.push(if model.trouble.is_some() { line.patch_style(palette.of(Tone::Old)) } else { line });
    }
    frame.render_widget(Paragraph::new(lines), area);
    if model.len() == 0 && area.height > 1 {
        let rest = Rect { y: area.y + 1, height: area.height - 1, ..area };
        let words = Line::styled(fit(nothing(model), area.width.into()), palette.of(Tone::Quiet));
        frame.render_widget(Paragraph::new(words), rest);
    }
}

/// Why there are no rows.
fn nothing(model: &Model) -> &'static str {
    match &model.picture {
        None if model.trouble.is_some() => "nothing is known yet",
        None => "asking…",
        Some(picture) if picture.rows.is_empty() => "no lock is held",
        Some(_) => "no name matches the filter",
    }
}

fn heading(slots: &[Slot], model: &Model, palette: Palette) -> Line<'static> {
    let cells = slots.iter().enumerate().flat_map(|(at, slot)| {
        let mut text = title(slot.column).to_owned();
        let sorted = model.sorting.by == slot.column;
        if sorted {
            text.push(if model.sorting.falls() { '▼' } else { '▲' });
        }
        let tone = if sorted { Tone::Sorted } else { Tone::Heading };
        let cell = Span::styled(pad(&text, slot.width, is_right(slot.column)), palette.of(tone));
        [Span::raw(gap(at)), cell]
    });
    Line::from_iter(cells)
}

fn line(slots: &[Slot], row: &Row, chosen: bool, palette: Palette) -> Line<'static> {
    let chosen = if chosen { palette.of(Tone::Chosen) } else { Style::new() };
    let mut spans = Vec::with_capacity(2 * slots.len() + 1);
    for (at, slot) in slots.iter().enumerate() {
        spans.push(Span::styled(gap(at), chosen));
        let (text, tone) = cell(slot.column, row);
        let (style, mut width) = (palette.of(tone), slot.width);
        if let (Column::Left, Some(part)) = (slot.column, row.part) {
            // Reversed, it would show what is not left.
            spans.push(Span::styled(bar(part, BAR), style));
            width = width.saturating_sub(BAR);
        }
        spans.push(Span::styled(pad(&text, width, is_right(slot.column)), style.patch(chosen)));
    }
    Line::from(spans)
}

fn gap(at: usize) -> &'static str {
    if at == 0 { "" } else { "  " }
}

fn cell(column: Column, row: &Row) -> (String, Tone) {
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    match column {
        Column::Name => (clean(&row.name), Tone::Plain),
        Column::Holder if row.certain => (row.who(), Tone::Plain),
        Column::Holder => (format!("? {}", row.who()), Tone::Warn),
        Column::Age => (known(row.age.map(text::span)), Tone::Plain),
        Column::Left => match row.left {
            Some(left) => (format!(" {}", text::span(left)), nearness(row.part.unwrap_or(0.0))),
            None => ("no expiry".into(), Tone::Warn),
        },
        Column::Waiting if row.waiting == 0 => ("-".into(), Tone::Quiet),
        Column::Waiting => (row.waiting.to_string(), Tone::Strong),
        Column::Rate => (rate(row.rate), Tone::Plain),
        Column::Closest => (known(row.closest.map(percent)), row.closest.map_or(Tone::Quiet, nearness)),
        Column::Token => (known(row.token.map(|token| token.to_string())), Tone::Quiet),
    }
}

/// A lock is renewed when a third of its time to live is over: less than half left means that a renewal has failed, or
/// that there is none.
pub(super) fn nearness(part: f32) -> Tone {
    if part >= 0.5 {
        Tone::Good
    } else if part >= 0.25 {
        Tone::Warn
    } else {
        Tone::Bad
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_go_when_there_is_no_room_and_fill_what_there_is() {
        let columns = |width| slots(width).into_iter().map(|slot| slot.column).collect::<Vec<_>>();
        assert_eq!(columns(200), Column::ALL);
        assert_eq!(columns(80), Column::ALL[..7]);
        assert_eq!(columns(48), [Column::Name, Column::Holder, Column::Left]);
        assert_eq!(columns(27), [Column::Name, Column::Left]);
        assert_eq!(slots(5), [Slot { column: Column::Name, width: 5 }]);
        for width in 0..300 {
            let slots = slots(width);
            let total: usize = slots.iter().map(|slot| slot.width).sum::<usize>() + (slots.len() - 1) * GAP;
            assert!(total == width || width > 100 && total <= width, "{total} of {width}");
        }
    }

    #[test]
    fn colours_turn_when_renewals_fail() {
        assert_eq!([1.0, 0.66, 0.4, 0.1].map(nearness), [Tone::Good, Tone::Good, Tone::Warn, Tone::Bad]);
    }
}
