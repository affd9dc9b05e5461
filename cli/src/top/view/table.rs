//! The table of locks: which columns there is room for, and the rows that are in sight.

use ratatui::{
    Frame,
    layout::Rect,
    style::Style,
    text::{Line, Span},
    widgets::Paragraph,
};

use super::{
    layout::{bar, fit, pad, percent, rate},
    palette::{Palette, Tone},
};
use crate::{
    format::{self, escape},
    top::{
        model::Model,
        rows::{Column, Row},
    },
};

const COLUMN_GAP: usize = 2;
const BAR_WIDTH: usize = 5;
/// Maximum width of the holder's column; further room goes to the names.
const HOLDER_WIDTH_MAX: usize = 40;

/// How a column is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColumnView {
    column: Column,
    title: &'static str,
    is_right_aligned: bool,
    /// The minimum, until there is room for more.
    width: usize,
    /// Width that the column must leave to the names; otherwise it is not shown.
    name_reserve: usize,
}

/// The more important columns are the last to go.
const BY_PRIORITY: [ColumnView; 8] = {
    const fn view(
        column: Column,
        title: &'static str,
        is_right_aligned: bool,
        width: usize,
        name_reserve: usize,
    ) -> ColumnView {
        ColumnView { column, title, is_right_aligned, width, name_reserve }
    }
    [
        view(Column::Name, "NAME", false, 12, 0),
        view(Column::Left, "LEFT", false, BAR_WIDTH + 7, 0),
        view(Column::Holder, "HELD BY", false, 16, 0),
        view(Column::Waiting, "WAIT", true, 5, 2),
        view(Column::Age, "AGE", true, 6, 2),
        view(Column::Rate, "RATE", true, 5, 6),
        view(Column::Closest, "CLOSE", true, 6, 6),
        view(Column::Token, "TOKEN", true, 16, 16),
    ]
};

/// The columns that fit into `width`, from left to right.
fn visible_columns(width: usize) -> Vec<ColumnView> {
    let [name, others @ ..] = BY_PRIORITY;
    let (mut shown, mut room) = (vec![name], width.saturating_sub(name.width));
    for one in others {
        let needed = one.width + COLUMN_GAP;
        if needed + one.name_reserve > room {
            break;
        }
        room -= needed;
        shown.push(one);
    }
    if let Some(holder) = shown.iter_mut().find(|one| one.column == Column::Holder) {
        let extra = (room / 3).min(HOLDER_WIDTH_MAX - holder.width);
        holder.width += extra;
        room -= extra;
    }
    shown[0].width = (name.width + room).min(width);
    shown.sort_by_key(|one| one.column);
    shown
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, model: &mut Model, palette: Palette) {
    let columns = visible_columns(area.width.into());
    let has_heading = area.height > 1;
    let window =
        model.window(usize::from(area.height) - usize::from(has_heading && area.height > 0));
    let mut lines = Vec::with_capacity(area.height.into());
    if has_heading {
        lines.push(heading_line(&columns, model, palette));
    }
    // Only the visible rows are formatted.
    for at in window {
        let Some(row) = model.row(at) else { break };
        let line = row_line(&columns, row, at == model.selected(), palette);
        lines.push(if model.outage.is_some() {
            line.patch_style(palette.style(Tone::Outdated))
        } else {
            line
        });
    }
    frame.render_widget(Paragraph::new(lines), area);
    if model.len() == 0 && area.height > 1 {
        let rest = Rect { y: area.y + 1, height: area.height - 1, ..area };
        let message =
            Line::styled(fit(empty_message(model), area.width.into()), palette.style(Tone::Quiet));
        frame.render_widget(Paragraph::new(message), rest);
    }
}

/// Why there are no rows.
fn empty_message(model: &Model) -> &'static str {
    match &model.data {
        None if model.outage.is_some() => "nothing is known yet",
        None => "querying…",
        Some(data) if data.rows.is_empty() && model.pattern == "*" => "no locks are held",
        Some(data) if data.rows.is_empty() => "no held lock matches",
        Some(_) => "no name matches the filter",
    }
}

fn heading_line(columns: &[ColumnView], model: &Model, palette: Palette) -> Line<'static> {
    let cells = columns.iter().enumerate().flat_map(|(at, visible)| {
        let mut text = visible.title.to_owned();
        let sorted = model.sorting.by == visible.column;
        if sorted {
            text.push(if model.sorting.is_descending() { '▼' } else { '▲' });
        }
        let tone = if sorted { Tone::Sorted } else { Tone::Heading };
        let cell =
            Span::styled(pad(&text, visible.width, visible.is_right_aligned), palette.style(tone));
        [Span::raw(gap(at)), cell]
    });
    Line::from_iter(cells)
}

fn row_line(
    columns: &[ColumnView],
    row: &Row,
    is_selected: bool,
    palette: Palette,
) -> Line<'static> {
    let base = if is_selected { palette.style(Tone::Selected) } else { Style::new() };
    let mut spans = Vec::with_capacity(2 * columns.len() + 1);
    for (at, visible) in columns.iter().enumerate() {
        spans.push(Span::styled(gap(at), base));
        let (text, tone) = cell(visible.column, row);
        let (style, mut width) = (palette.style(tone), visible.width);
        if let (Column::Left, Some(part), false) = (visible.column, row.fraction_left, row.is_kept)
        {
            // Without the row's style: in reverse video, the bar would show what is not left.
            spans.push(Span::styled(bar(part, BAR_WIDTH), style));
            width = width.saturating_sub(BAR_WIDTH);
        }
        spans.push(Span::styled(pad(&text, width, visible.is_right_aligned), style.patch(base)));
    }
    Line::from(spans)
}

fn gap(at: usize) -> &'static str {
    if at == 0 { "" } else { "  " }
}

fn cell(column: Column, row: &Row) -> (String, Tone) {
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    match column {
        Column::Name => (escape(&row.name), Tone::Plain),
        Column::Holder if row.certain => (row.holder_name(), Tone::Plain),
        Column::Holder => (format!("? {}", row.holder_name()), Tone::Warn),
        Column::Age => (known(row.age.map(format::duration)), Tone::Plain),
        Column::Left => match row.left {
            Some(left) if row.is_kept => (format!("kept {}", format::duration(left)), Tone::Quiet),
            Some(left) => {
                (format!(" {}", format::duration(left)), severity(row.fraction_left.unwrap_or(0.0)))
            }
            None => ("no expiry".into(), Tone::Warn),
        },
        Column::Waiting if row.waiting == 0 => ("-".into(), Tone::Quiet),
        Column::Waiting => (row.waiting.to_string(), Tone::Strong),
        Column::Rate => (rate(row.rate), Tone::Plain),
        Column::Closest => {
            (known(row.closest_call.map(percent)), row.closest_call.map_or(Tone::Quiet, severity))
        }
        Column::Token => (known(row.token.map(|token| token.to_string())), Tone::Quiet),
    }
}

/// A lock is renewed after a third of its ttl. If less than half is left, a renewal has failed, or
/// the lock is not renewed.
pub(super) fn severity(part: f32) -> Tone {
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
    fn columns_fit_width_and_least_important_go_first() {
        let names = |width| {
            visible_columns(width).into_iter().map(|visible| visible.column).collect::<Vec<_>>()
        };
        assert_eq!(names(200), Column::ALL);
        assert_eq!(names(80), Column::ALL[..7]);
        assert_eq!(names(48), [Column::Name, Column::Holder, Column::Left]);
        assert_eq!(names(27), [Column::Name, Column::Left]);
        assert_eq!(visible_columns(5), [ColumnView { width: 5, ..BY_PRIORITY[0] }]);
        for width in 0..300 {
            let columns = visible_columns(width);
            let total: usize = columns.iter().map(|visible| visible.width).sum::<usize>()
                + (columns.len() - 1) * COLUMN_GAP;
            assert!(total == width || width > 100 && total <= width, "{total} of {width}");
        }
    }

    #[test]
    fn colour_changes_as_renewals_fail() {
        assert_eq!(
            [1.0, 0.66, 0.4, 0.1].map(severity),
            [Tone::Good, Tone::Good, Tone::Warn, Tone::Bad]
        );
    }
}
