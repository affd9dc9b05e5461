//! What goes to standard output and to standard error.

use std::io::{self, ErrorKind, Write as _};

use crate::{
    exit::{Exit, Failure},
    text,
    voice::Voice,
};

/// Prints everything. A reader who went away, such as `head`, has seen enough.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// What to make of what became of it.
pub(crate) fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(Exit::CannotRun, format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a value as JSON, on lines of its own.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::new(Exit::CannotRun, format!("cannot write JSON: {error}")))?;
    print(&(escaped(&json) + "\n"))
}

/// The same JSON without a character that a terminal would obey: outside of its texts there are none.
fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || text::is_plain(c) {
            out.push(c);
        } else {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
        }
    }
    out
}

/// Says a sentence on standard error, whatever others have put into it.
pub(crate) fn say(sentence: &str) {
    // In one piece, so that it is not torn by what the command writes.
    let _ = Voice.write_all(format!("distlock: {}\n", text::clean(sentence)).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_the_same_without_what_terminals_obey() {
        let text = "a\u{9b}31m\u{7f}\u{202e}é漢🦀\n\"";
        let json = escaped(&serde_json::to_string_pretty(&[text]).unwrap());
        assert!(json.chars().all(|c| c == '\n' || text::is_plain(c)), "{json:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [text]);
    }
}
