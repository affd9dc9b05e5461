//! The terminal: colours, and lines that are redrawn in place.

use std::{
    env,
    fmt::Display,
    io::{IsTerminal, Write, stdout},
};

/// Prints a text. Ends the process quietly if the reader has closed the pipe, as `head` does.
pub(crate) fn print(text: &str) {
    let mut out = stdout().lock();
    if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
        std::process::exit(2);
    }
}

/// Colours, if the output is a terminal and `NO_COLOR` is not set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Palette {
    on: bool,
}

impl Palette {
    pub(crate) fn of_stdout() -> Palette {
        Palette {
            on: stdout().is_terminal()
                && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }

    pub(crate) fn green(self, text: impl Display) -> String {
        self.paint("32", text)
    }

    pub(crate) fn yellow(self, text: impl Display) -> String {
        self.paint("33", text)
    }

    pub(crate) fn red(self, text: impl Display) -> String {
        self.paint("31", text)
    }

    pub(crate) fn dim(self, text: impl Display) -> String {
        self.paint("2", text)
    }

    pub(crate) fn bold(self, text: impl Display) -> String {
        self.paint("1", text)
    }

    fn paint(self, code: &str, text: impl Display) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// Lines at the end of the output, which are redrawn in place.
#[derive(Debug, Default)]
pub(crate) struct LiveBlock {
    height: usize,
}

impl LiveBlock {
    pub(crate) fn draw(&mut self, lines: &[String]) {
        // Switches line wrapping off: a wrapped line would take two rows, and moving up by `height`
        // would not reach the first one.
        let mut frame = String::from("\x1b[?7l");
        if self.height > 0 {
            frame.push_str(&format!("\x1b[{}A", self.height));
        }
        for line in lines {
            frame.push_str(&format!("\r\x1b[2K{line}\n"));
        }
        frame.push_str("\x1b[?7h");
        self.height = lines.len();
        print(&frame);
    }
}

/// A duration in nanoseconds as text.
pub(crate) fn format_nanos(nanos: u64) -> String {
    let millis = nanos as f64 / 1e6;
    if millis < 9.95 {
        format!("{millis:.1} ms")
    } else if millis < 999.5 {
        format!("{millis:.0} ms")
    } else {
        format!("{:.2} s", millis / 1e3)
    }
}
