//! How a test went, and whether that says anything about the change that was made. Pure.

use std::fmt;

/// How the tests say that there is no server to test with.
const NO_SERVER: [&str; 2] = ["server did not start", "run `make test`"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Green,
    Red,
    Hangs,
    /// It fails, and does not say what it should.
    Otherwise,
    /// The code does not compile, there is no such test, or no server for it: that proves nothing.
    Broken,
}

impl Outcome {
    /// Of a test by its path, which ran alone: whether it succeeded, if it ended at all, what was
    /// said, and what should have been.
    pub(crate) fn of(
        succeeded: Option<bool>,
        said: &str,
        path: &str,
        fails_with: Option<&str>,
    ) -> Outcome {
        // Of what died without a word it is known that this test was running.
        let failed =
            said.contains(&format!("\nfailures:\n    {path}\n")) || !said.contains("test result:");
        match succeeded {
            None if fails_with.is_some() => Outcome::Otherwise,
            None => Outcome::Hangs,
            Some(true) if said.contains("test result: ok. 1 passed") => Outcome::Green,
            Some(true) => Outcome::Broken,
            Some(false) if !said.contains("running 1 test\n") || !failed => Outcome::Broken,
            Some(false) if NO_SERVER.iter().any(|words| said.contains(words)) => Outcome::Broken,
            Some(false) if fails_with.is_some_and(|part| !said.contains(part)) => {
                Outcome::Otherwise
            }
            Some(false) => Outcome::Red,
        }
    }

    pub(crate) fn has_noticed(self) -> bool {
        matches!(self, Outcome::Red | Outcome::Hangs)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Green => "green",
            Outcome::Red => "red",
            Outcome::Hangs => "hanging",
            Outcome::Otherwise => "failing for another reason",
            Outcome::Broken => "not to be had: it does not compile, is not there, or has no server",
        })
    }
}
