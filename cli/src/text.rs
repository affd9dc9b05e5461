//! How names, spans of time and tables stand in output. What others chose (names, identifiers) never reaches the terminal
//! as it is.

use std::{
    fmt::Write as _,
    time::{Duration, SystemTime},
};

use distlock::Holder;
use unicode_width::UnicodeWidthStr as _;

/// A text of somebody else's without anything that a terminal would obey.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if is_plain(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

/// The same in a sentence.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", clean(text))
}

/// Who holds a lock, in few characters: host and process, or else the beginning of the identifier.
pub(crate) fn who(holder: &Holder) -> String {
    const SHOWN: usize = 40;
    match (holder.host(), holder.pid()) {
        (Some(host), Some(pid)) => format!("{}/{pid}", clean(host)),
        _ => match holder.id().char_indices().nth(SHOWN) {
            None => clean(holder.id()),
            Some((end, _)) => clean(&holder.id()[..end]) + "…",
        },
    }
}

/// A moment on the wall clock; `None` for one that is too far away to be written down.
pub(crate) fn moment(moment: SystemTime) -> Option<String> {
    let mut text = String::new();
    // Before the epoch it would panic, and after the year 9999 it fails.
    moment.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    write!(text, "{}", humantime::format_rfc3339_millis(moment)).ok().map(|()| text)
}

/// Neither a control character nor one that reorders or hides what stands beside it.
pub(crate) fn is_plain(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// A span of time in few characters.
pub(crate) fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    if span < Duration::from_millis(1) {
        format!("{}µs", span.as_micros())
    } else if seconds == 0 {
        format!("{}ms", span.as_millis())
    } else if seconds < 10 {
        format!("{:.1}s", span.as_secs_f64())
    } else if seconds < 120 {
        format!("{seconds}s")
    } else if seconds < 2 * 3_600 {
        format!("{}m{:02}s", seconds / 60, seconds % 60)
    } else if seconds < 48 * 3_600 {
        format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60)
    } else {
        format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24)
    }
}

/// Columns, as wide as what stands in them.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// Headings; those that begin with `>` are of columns that are set flush right.
    pub(crate) fn new(headings: &[&str]) -> Table {
        let right = headings.iter().map(|heading| heading.starts_with('>')).collect();
        let head = headings.iter().map(|heading| heading.trim_start_matches('>').to_owned()).collect();
        Table { rows: vec![head], right }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let wide = |column: usize| self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max();
        let widths: Vec<usize> = (0..self.right.len()).map(|column| wide(column).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let gap = " ".repeat(width.saturating_sub(cell.width()));
                if !line.is_empty() {
                    line.push_str("  ");
                }
                line.push_str(&if *right { format!("{gap}{cell}") } else { format!("{cell}{gap}") });
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_others_commands_the_terminal() {
        assert_eq!(clean("a\u{1b}[31m\n\u{202e}é漢"), "a\\u{1b}[31m\\n\\u{202e}é漢");
    }

    /// All that Unicode calls `Bidi_Control`.
    #[test]
    fn nothing_of_others_turns_the_line_round() {
        let all = ['\u{61c}', '\u{200e}', '\u{200f}'].into_iter().chain('\u{202a}'..='\u{202e}');
        for c in all.chain('\u{2066}'..='\u{2069}') {
            assert!(!is_plain(c), "{c:?}");
        }
    }

    #[test]
    fn moments_that_nobody_can_write_are_left_out() {
        let day = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400);
        assert_eq!(moment(day).as_deref(), Some("1970-01-02T00:00:00.000Z"));
        assert_eq!(moment(day - Duration::from_secs(86_401)), None);
        assert_eq!(moment(day + Duration::from_secs(1 << 40)), None);
    }

    #[test]
    fn spans_are_short() {
        let shown = [80, 81_500, 1_500_000, 45_000_000, 190_000_000, 7_260_000_000, 180_000_000_000];
        let texts = ["80µs", "81ms", "1.5s", "45s", "3m10s", "2h01m", "2d02h"];
        assert_eq!(shown.map(|micros| span(Duration::from_micros(micros))), texts);
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let mut table = Table::new(&["name", ">n", "who"]);
        table.row(vec!["漢字".into(), "10".into(), "me".into()]);
        assert_eq!(table.to_string(), "name   n  who\n漢字  10  me\n");
    }
}
