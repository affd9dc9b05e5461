//! How lock names, ids, durations and texts from servers are displayed.

use std::{fmt, time::Duration};

/// Displays a name quoted, escaped and truncated.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 80;
        match self.0.char_indices().nth(SHOWN) {
            None => write!(f, "\"{}\"", self.0.escape_debug()),
            Some((end, _)) => {
                write!(f, "\"{}…\" ({} bytes)", self.0[..end].escape_debug(), self.0.len())
            }
        }
    }
}

/// Prepares a text from a server for messages: replaces the password, escapes control characters
/// and limits the length.
pub(crate) fn quote_reply(text: &str, password: Option<&str>) -> String {
    const QUOTED_CHARS_MAX: usize = 256;
    /// Maximum length of a password in whose place all of the text is hidden. The rest of a
    /// well-known text would show which letters are missing.
    const SHORT_PASSWORD_BYTES_MAX: usize = 3;
    let mut text = text.to_owned();
    if let Some(password) = password {
        if password.len() <= SHORT_PASSWORD_BYTES_MAX && text.contains(password) {
            return "(text hidden, because it could reveal the short password)".to_owned();
        }
        text = text.replace(password, "<password>");
    }
    text.chars()
        .take(QUOTED_CHARS_MAX)
        .map(|c| if c.is_control() { c.escape_debug().to_string() } else { c.into() })
        .collect()
}

/// Maximum number of bytes of an id that the scripts report and compare.
pub(crate) const ID_BYTES_MAX: usize = 512;

/// Truncates an id from a server, which can be of any length.
pub(crate) fn truncate_id(mut id: String) -> String {
    if id.len() > ID_BYTES_MAX {
        let cut = (0..=ID_BYTES_MAX).rev().find(|at| id.is_char_boundary(*at)).unwrap_or(0);
        id.truncate(cut);
        // Otherwise the full allocation would stay in memory.
        id.shrink_to_fit();
    }
    id
}

/// Displays a duration in a few characters, such as `1.5s` or `3m10s`: rounded down, in at most two
/// units, and without a zero at the end. The command uses the same format.
#[derive(Clone, Copy, Debug)]
pub struct HumanDuration(pub Duration);

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DAY: u64 = 86_400;
        let (span, seconds) = (self.0, self.0.as_secs());
        let (unit, name, below, name_below) = match seconds {
            0 if span < Duration::from_micros(1) => return f.write_str("0s"),
            0 if span < Duration::from_millis(1) => return write!(f, "{}µs", span.as_micros()),
            0 => return write!(f, "{}ms", span.as_millis()),
            1..10 if span.subsec_millis() >= 100 => {
                return write!(f, "{seconds}.{}s", span.subsec_millis() / 100);
            }
            1..120 => return write!(f, "{seconds}s"),
            _ if seconds >= 2 * DAY => (DAY, 'd', 3_600, 'h'),
            _ if seconds >= 7_200 || seconds.is_multiple_of(3_600) => (3_600, 'h', 60, 'm'),
            _ => (60, 'm', 1, 's'),
        };
        write!(f, "{}{name}", seconds / unit)?;
        match seconds % unit / below {
            0 => Ok(()),
            rest => write!(f, "{rest:02}{name_below}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_names_escaped_and_truncated() {
        assert_eq!(Quoted("a\n\0\u{1b}[31m").to_string(), "\"a\\n\\0\\u{1b}[31m\"");
        assert!(Quoted(&"é".repeat(1000)).to_string().ends_with("…\" (2000 bytes)"));
    }

    #[test]
    fn short_password_hides_the_whole_text() {
        let text = "invalid username-password pair";
        for password in ["p", "air"] {
            let hidden = quote_reply(text, Some(password));
            assert!(hidden.starts_with("(text hidden, "), "{hidden}");
        }
        assert_eq!(quote_reply(text, Some("x")), text);
        assert_eq!(quote_reply(text, Some("pair")), "invalid username-password <password>");
    }

    #[test]
    fn ids_truncated_at_char_boundaries() {
        assert_eq!(truncate_id("web-3".into()), "web-3");
        assert_eq!(truncate_id("é".repeat(1 << 20)), "é".repeat(256));
        assert_eq!(truncate_id(format!("x{}", "é".repeat(1 << 20))).len(), 511);
    }

    #[test]
    fn human_durations_are_short() {
        for (micros, text) in
            [(80, "80µs"), (81_500, "81ms"), (1_500_000, "1.5s"), (7_200_000_000, "2h")]
        {
            assert_eq!(HumanDuration(Duration::from_micros(micros)).to_string(), text);
        }
    }

    #[test]
    fn human_durations_do_not_end_with_zeros() {
        for (nanos, text) in [
            (0, "0s"),
            (999, "0s"),
            (1_000_000_000, "1s"),
            (1_099_999_999, "1s"),
            (9_999_999_999, "9.9s"),
            (10_900_000_000, "10s"),
            (120_000_000_001, "2m"),
            (3_600_900_000_000, "1h"),
            (86_400_500_000_000, "24h"),
            (86_459_999_999_999, "24h"),
            (172_800_000_000_001, "2d"),
            (176_400_000_000_001, "2d01h"),
        ] {
            assert_eq!(HumanDuration(Duration::from_nanos(nanos)).to_string(), text, "{nanos} ns");
        }
    }
}
