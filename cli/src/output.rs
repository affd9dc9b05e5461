//! Writing to standard output and to standard error.

use std::io::{self, ErrorKind, Write as _};

use crate::{
    exit::{Exit, Failure},
    format,
    json::Versioned,
    stderr_writer::StderrWriter,
};

/// Prints all of `text`. A closed pipe is not an error, because a reader such as `head` has seen
/// enough.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    check_stdout(write(text))
}

/// Writes all of `text` to standard output. A closed pipe is an error.
pub(crate) fn write(text: &str) -> io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Turns the result of a write to standard output into the outcome of the program.
pub(crate) fn check_stdout(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(Exit::CannotRun, cannot_write(&error)))
        }
        _ => Ok(()),
    }
}

pub(crate) fn cannot_write(error: &io::Error) -> String {
    format!("cannot write to standard output: {error}")
}

/// Prints the output of a command as indented JSON.
pub(crate) fn print_json(content: impl serde::Serialize) -> Result<(), Failure> {
    print(&to_json(content)?)
}

pub(crate) fn to_json(content: impl serde::Serialize) -> Result<String, Failure> {
    let json = serde_json::to_string_pretty(&Versioned::new(content))
        .map_err(|error| Failure::new(Exit::CannotRun, format!("cannot write JSON: {error}")))?;
    Ok(escape_json(&json) + "\n")
}

/// Escapes control characters, which occur only within JSON strings, so that a terminal cannot obey
/// them.
fn escape_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || format::is_printable(c) {
            out.push(c);
        } else {
            c.encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
        }
    }
    out
}

/// Prints a message on standard error. It may contain text of other clients, so it is escaped.
pub(crate) fn print_message(sentence: &str) {
    // One write, so that output of the command under the lock does not come between.
    let sentence = format::escape(&format::with_option_names(sentence));
    let _ = StderrWriter.write_all(format!("distlock: {sentence}\n").as_bytes());
}

/// Prints a usage error, which has several lines and is escaped already.
pub(crate) fn print_usage_error(text: &str) {
    let _ = StderrWriter.write_all(format!("distlock: {text}").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_json_parses_to_same_value() {
        let text = "a\u{9b}31m\u{7f}\u{202e}é漢🦀\n\"";
        let json = escape_json(&serde_json::to_string_pretty(&[text]).unwrap());
        assert!(json.chars().all(|c| c == '\n' || format::is_printable(c)), "{json:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [text]);
    }
}
