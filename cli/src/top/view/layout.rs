//! Fits texts into terminal columns. Pure.

use std::time::Duration;

use unicode_width::UnicodeWidthStr as _;

use crate::format;

/// Cuts a text to `width` columns, with an ellipsis.
pub(super) fn fit(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut cut = take_columns(text, width.saturating_sub(1)).trim_end_matches(' ').to_owned();
    if width > 0 {
        cut.push('…');
    }
    cut
}

/// The beginning of a text that fits into `width` columns.
fn take_columns(text: &str, width: usize) -> &str {
    let mut end = 0;
    for (at, letter) in text.char_indices() {
        let next = at + letter.len_utf8();
        if text[..next].width() > width {
            break;
        }
        end = next;
    }
    &text[..end]
}

/// Cuts or pads a text to exactly `width` columns. `right` aligns it right.
pub(super) fn pad(text: &str, width: usize, right: bool) -> String {
    let text = fit(text, width);
    let gap = " ".repeat(width.saturating_sub(text.width()));
    if right { gap + &text } else { text + &gap }
}

/// Breaks a text into at most `most` lines of `width` columns, at spaces if possible.
pub(super) fn wrap(text: &str, width: usize, most: usize) -> Vec<String> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() && width > 0 && lines.len() < most {
        if lines.len() + 1 == most || rest.width() <= width {
            lines.push(fit(rest, width));
            break;
        }
        let mut line = take_columns(rest, width);
        if line.is_empty() {
            // The line is narrower than the next character.
            lines.push(fit(rest, width));
            break;
        }
        if !rest[line.len()..].starts_with(' ') {
            line = line.rfind(' ').filter(|space| *space > 0).map_or(line, |space| &line[..space]);
        }
        lines.push(line.to_owned());
        rest = rest[line.len()..].trim_start_matches(' ');
    }
    lines
}

/// How long ago something was, in whole seconds, so that it does not flicker.
pub(super) fn ago(span: Duration) -> String {
    let seconds = span.as_secs();
    if seconds < 120 { format!("{seconds}s") } else { format::duration(span) }
}

pub(super) fn percent(part: f32) -> String {
    format!("{:.0}%", part * 100.0)
}

pub(super) fn rate(rate: f64) -> String {
    match rate {
        rate if rate < 0.005 => "-".into(),
        rate if rate < 0.995 => format!("{rate:.2}"),
        rate if rate < 99.95 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

/// A number with its noun: `1 lock`, `2 locks`.
pub(super) fn plural(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// A bar that fills this part of `width` columns.
pub(super) fn bar(part: f32, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    // From float to integer, `as` saturates.
    let eighths = ((part.clamp(0.0, 1.0) * width as f32 * 8.0).round() as usize).min(width * 8);
    let drawn = "█".repeat(eighths / 8) + EIGHTHS[eighths % 8];
    let rest = width.saturating_sub(drawn.width());
    drawn + &"·".repeat(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts_are_cut_by_display_width() {
        assert_eq!((fit("orders", 6), fit("orders", 5)), ("orders".into(), "orde…".into()));
        assert_eq!((fit("漢字漢字", 4), fit("漢字漢字", 5)), ("漢…".into(), "漢字…".into()));
        assert_eq!((fit("x", 0), fit("xy", 1)), (String::new(), "…".into()));
        assert_eq!((pad("漢字", 6, false), pad("7", 3, true)), ("漢字  ".into(), "  7".into()));
    }

    #[test]
    fn lines_break_at_spaces() {
        assert_eq!(
            wrap("release it, held by me? y/n", 12, 9),
            ["release it,", "held by me?", "y/n"]
        );
        assert_eq!(wrap("abcdefgh", 3, 9), ["abc", "def", "gh"]);
        assert_eq!(wrap("one two three", 5, 2), ["one", "two…"]);
        assert_eq!(wrap("漢字", 1, 9), ["…"]);
        assert_eq!((wrap("", 5, 2), wrap("x", 0, 2)), (vec![], vec![]));
        assert_eq!(wrap("abc def", 3, 9), ["abc", "def"]);
    }

    #[test]
    fn bar_length_is_proportional() {
        assert_eq!(
            [0.0, 0.05, 0.5, 1.0, 7.0].map(|part| bar(part, 4)),
            ["····", "▎···", "██··", "████", "████"]
        );
        assert_eq!(bar(f32::NAN, 2), "··");
    }

    #[test]
    fn rates_have_useful_precision() {
        assert_eq!([0.0, 0.25, 5.0, 99.96, 1234.5].map(rate), ["-", "0.25", "5.0", "100", "1234"]);
    }

    proptest! {
        #[test]
        fn no_result_exceeds_width(text in "\\PC{0,40}", width in 0usize..30, most in 0usize..5) {
            prop_assert!(fit(&text, width).width() <= width);
            prop_assert_eq!(pad(&text, width, true).width(), width);
            let lines = wrap(&text, width, most);
            prop_assert!(lines.len() <= most, "{:?}", lines);
            prop_assert!(lines.iter().all(|line| line.width() <= width), "{:?}", lines);
        }
    }
}
