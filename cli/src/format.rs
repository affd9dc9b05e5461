//! Formatting of names, durations and tables; also parsing of durations. Text that other clients
//! chose (lock names, ids) is always escaped before it reaches a terminal.

use std::{
    fmt::Write as _,
    time::{Duration, SystemTime},
};

use distlock::{Holder, HumanDuration};
use humantime::DurationError;
use unicode_width::UnicodeWidthStr as _;

/// Escapes everything in a text of another client that a terminal would obey.
pub(crate) fn escape(text: &str) -> String {
    text.chars()
        .map(|c| if is_printable(c) { c.to_string() } else { c.escape_default().to_string() })
        .collect()
}

/// The same, in quotes.
pub(crate) fn quote(text: &str) -> String {
    format!("\"{}\"", escape(text))
}

/// What the library's messages call settings and remedies, and what they are for this command.
const OPTION_NAMES: [(&str, &str); 18] = [
    ("run distlock init or call Config::declare_nodes_new", "run distlock init"),
    ("pass true to Config::declare_nodes_new", "add --yes"),
    ("Config::quarantine(Duration::ZERO)", "--quarantine 0"),
    ("Config::quarantine", "--quarantine"),
    ("set Tls::ca_file to", "set --cacert to"),
    (" and unix:///path", ", unix:///path and mysql://[user[:password]@]host[:port]/database"),
    (
        "if all programs use the same member, set MySqlConfig::allow_cluster",
        "keep locks on a server with a single primary, or in Redis",
    ),
    (
        "create it with MySqlMgr::create_table, `distlock mysql-schema`, or:",
        "create it by `distlock mysql-schema | mysql DATABASE`, or:",
    ),
    (
        "check the user, its password and its host in the server's list",
        "check the user in the URL, the password in DISTLOCK_URL or --password-file, and the hosts \
         from which the user may sign in",
    ),
    (
        "lower max_connections here or raise the server's limit",
        "raise max_connections of the server, or the limit of the user",
    ),
    ("use a longer ttl", "use a longer --ttl"),
    ("hold_at_least works", "--at-least works"),
    ("detach and adopt work", "--detach and adopt work"),
    (
        "if the server has no password, remove it",
        "if the server has no password, leave out --password-file, or the password in DISTLOCK_URL",
    ),
    (
        "put a password into the URL or Config::password",
        "put the password into a file for --password-file, or into DISTLOCK_URL",
    ),
    (
        "the password there or in Config::password",
        "the password in DISTLOCK_URL or in --password-file",
    ),
    (
        "grant the permissions listed in the README, here access to the keys of the prefix and to \
         distlock:*",
        "run distlock doctor, which prints the command that grants all permissions",
    ),
    (
        "grant the permissions listed in the README",
        "run distlock doctor, which prints the command that grants all permissions",
    ),
];

/// Replaces the names of the library's API in a message by the options of this command.
pub(crate) fn with_option_names(message: &str) -> String {
    OPTION_NAMES.iter().fold(message.to_owned(), |text, (api, option)| text.replace(api, option))
}

/// Leaves out the password where a message shows the syntax of a URL, because a command line must
/// not contain one.
pub(crate) fn without_password_syntax(message: &str) -> String {
    with_option_names(message).replace("[user[:password]@]", "[user@]")
}

/// A short name of a holder: host and process, or else the beginning of its id.
pub(crate) fn holder_name(holder: &Holder) -> String {
    const SHOWN: usize = 40;
    match (holder.host(), holder.pid()) {
        (Some(host), Some(pid)) => format!("{}/{pid}", escape(host)),
        _ => match holder.id().char_indices().nth(SHOWN) {
            None => escape(holder.id()),
            Some((end, _)) => escape(&holder.id()[..end]) + "…",
        },
    }
}

/// A time of the wall clock; `None` if it is out of the format's range.
pub(crate) fn rfc3339(moment: SystemTime) -> Option<String> {
    let mut text = String::new();
    // `humantime` panics for times before the epoch, and fails after the year 9999.
    moment.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    write!(text, "{}", humantime::format_rfc3339_millis(moment)).ok().map(|()| text)
}

/// Neither a control character nor one that hides or reorders its neighbours.
pub(crate) fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(
            c,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

/// A duration in at most six characters or so, which [`parse_duration`] accepts. The library's
/// messages use the same format.
pub(crate) fn duration(span: Duration) -> String {
    HumanDuration(span).to_string()
}

/// Parses a duration such as `300ms`, `30s` or `1h 30m`. A number alone is in seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    const HINT: &str = "write it like 300ms, 30s, 5m or 1h; a number alone is in seconds";
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_end);
    let seconds_per_unit = match unit.trim() {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "m" => 60.0,
        "h" => 3_600.0,
        "d" => 86_400.0,
        _ if text.starts_with('-') => {
            return Err(format!("a duration cannot be negative; {HINT}"));
        }
        // `humantime` reads it as months.
        _ if text.split(|c: char| !c.is_alphabetic()).any(|unit| unit == "M") => {
            return Err(format!("M is not a unit of time, minutes are m; {HINT}"));
        }
        // `humantime` panics if parts add up to more than 2^64 seconds.
        _ if text.len() > 100 || text.split(|c: char| !c.is_numeric()).any(|one| one.len() > 9) => {
            return Err(format!("not a duration; {HINT}"));
        }
        _ => {
            return humantime::parse_duration(text).map_err(|error| match error {
                DurationError::UnknownUnit { unit, .. } if !unit.is_empty() => {
                    format!("{unit} is not a unit of time; {HINT}")
                }
                _ => format!("not a duration; {HINT}"),
            });
        }
    };
    let parsed = match number.parse::<u64>() {
        // Whole seconds are exact, however many there are.
        Ok(seconds) if matches!(unit.trim(), "" | "s") => Some(Duration::from_secs(seconds)),
        _ => number
            .parse::<f64>()
            .ok()
            .and_then(|number| Duration::try_from_secs_f64(number * seconds_per_unit).ok()),
    };
    parsed.ok_or_else(|| match number.parse::<f64>() {
        Ok(_) => "it is too long".to_owned(),
        Err(_) => format!("not a duration; {HINT}"),
    })
}

/// A table whose columns are as wide as their widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// Creates a table with these headings. A heading that begins with `>` aligns its column right.
    pub(crate) fn new(headings: &[&str]) -> Table {
        let right = headings.iter().map(|heading| heading.starts_with('>')).collect();
        let head =
            headings.iter().map(|heading| heading.trim_start_matches('>').to_owned()).collect();
        Table { rows: vec![head], right }
    }

    pub(crate) fn add_row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let wide = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max()
        };
        let widths: Vec<usize> =
            (0..self.right.len()).map(|column| wide(column).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let gap = " ".repeat(width.saturating_sub(cell.width()));
                if !line.is_empty() {
                    line.push_str("  ");
                }
                line.push_str(&if *right {
                    format!("{gap}{cell}")
                } else {
                    format!("{cell}{gap}")
                });
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
    fn control_characters_are_escaped() {
        assert_eq!(escape("a\u{1b}[31m\n\u{202e}é漢"), "a\\u{1b}[31m\\n\\u{202e}é漢");
    }

    /// All characters that Unicode calls `Bidi_Control`.
    /// Fault: N107
    #[test]
    fn bidi_controls_are_not_printable() {
        let all = ['\u{61c}', '\u{200e}', '\u{200f}'].into_iter().chain('\u{202a}'..='\u{202e}');
        for c in all.chain('\u{2066}'..='\u{2069}') {
            assert!(!is_printable(c), "{c:?}");
        }
    }

    #[test]
    fn time_out_of_range_is_none() {
        let day = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400);
        assert_eq!(rfc3339(day).as_deref(), Some("1970-01-02T00:00:00.000Z"));
        assert_eq!(rfc3339(day - Duration::from_secs(86_401)), None);
        assert_eq!(rfc3339(day + Duration::from_secs(1 << 40)), None);
    }

    #[test]
    fn durations_are_short_and_can_be_typed() {
        for (micros, text) in [
            (0, "0s"),
            (80, "80µs"),
            (81_500, "81ms"),
            (1_000_000, "1s"),
            (1_500_000, "1.5s"),
            (45_000_000, "45s"),
            (60_000_000, "60s"),
            (120_000_000, "2m"),
            (190_000_000, "3m10s"),
            (3_600_000_000, "1h"),
            (3_605_000_000, "60m05s"),
            (7_260_000_000, "2h01m"),
            (86_400_000_000, "24h"),
            (180_000_000_000, "2d02h"),
            (864_000_000_000, "10d"),
        ] {
            let span = Duration::from_micros(micros);
            assert_eq!(duration(span), text);
            let typed = parse_duration(text).unwrap();
            assert_eq!(duration(typed), text);
        }
    }

    #[test]
    fn column_is_as_wide_as_widest_cell() {
        let mut table = Table::new(&["name", ">n", "who"]);
        table.add_row(vec!["漢字".into(), "10".into(), "me".into()]);
        assert_eq!(table.to_string(), "name   n  who\n漢字  10  me\n");
    }

    /// Fault: N210
    #[test]
    fn durations_are_parsed() {
        for (text, millis) in [
            ("1h 30m", 5_400_000),
            ("0", 0),
            ("3", 3_000),
            ("10", 10_000),
            ("0.5", 500),
            ("1.5s", 1_500),
            ("250ms", 250),
            ("0.5m", 30_000),
            ("2d", 172_800_000),
            ("3m10s", 190_000),
            ("1month", 2_630_016_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for (text, why) in [
            ("-5", "a duration cannot be negative"),
            ("5x", "x is not a unit of time"),
            ("5M", "M is not a unit of time, minutes are m"),
            ("1h 5 M", "M is not a unit of time, minutes are m"),
            ("1M30s", "M is not a unit of time, minutes are m"),
            ("soon", "not a duration"),
            ("1h30", "not a duration"),
            ("18446744073709551615s 1000ms", "not a duration"),
            ("213503982334601d 25215s 1000ms", "not a duration"),
        ] {
            let error = parse_duration(text).unwrap_err();
            assert!(error.starts_with(&format!("{why}; write it like 300ms, ")), "{error}");
        }
        for text in ["", ".", "1.2.3", "-1", "soon", "3x", "s", "1e9"] {
            assert!(parse_duration(text).unwrap_err().contains("30s"), "{text}");
        }
        for text in ["99999999999999999999999", "99999999999999999999999s", "1000000000000000000d"]
        {
            assert_eq!(parse_duration(text).unwrap_err(), "it is too long");
        }
    }
}
