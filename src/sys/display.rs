//! How lock names, ids and durations are displayed.

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

/// Displays a duration with three digits.
pub(crate) struct HumanDuration(pub(crate) Duration);

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        if seconds < 0.001 {
            write!(f, "{:.0} µs", seconds * 1e6)
        } else if seconds < 1.0 {
            write!(f, "{:.0} ms", seconds * 1e3)
        } else if seconds < 120.0 {
            write!(f, "{seconds:.1} s")
        } else {
            write!(f, "{}", humantime::format_duration(Duration::from_secs(self.0.as_secs())))
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
    fn ids_truncated_at_char_boundaries() {
        assert_eq!(truncate_id("web-3".into()), "web-3");
        assert_eq!(truncate_id("é".repeat(1 << 20)), "é".repeat(256));
        assert_eq!(truncate_id(format!("x{}", "é".repeat(1 << 20))).len(), 511);
    }

    #[test]
    fn human_durations_are_short() {
        for (micros, text) in
            [(80, "80 µs"), (81_500, "82 ms"), (1_500_000, "1.5 s"), (7_200_000_000, "2h")]
        {
            assert_eq!(HumanDuration(Duration::from_micros(micros)).to_string(), text);
        }
    }
}
