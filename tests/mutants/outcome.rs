//! The outcome of a test, and whether it shows that the test detects a patch. Pure.

use std::fmt;

/// What the tests print when there is no server to test with.
const NO_SERVER: [&str; 2] = ["server did not start", "run `make test`"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Green,
    Red,
    Hangs,
    /// The test fails, but does not print the expected text.
    Otherwise,
    /// Proves nothing: the code does not compile, the test does not exist, or there is no server
    /// for it.
    Broken,
}

impl Outcome {
    /// Evaluates a test that ran alone. `succeeded` is None if it was killed because it did not
    /// end. `fails_with` is the text that it must print.
    pub(crate) fn of(
        succeeded: Option<bool>,
        output: &str,
        path: &str,
        fails_with: Option<&str>,
    ) -> Outcome {
        // If the process died without a summary, this test was running.
        let failed = names_failure(output, path) || !output.contains("test result:");
        match succeeded {
            None if fails_with.is_some() => Outcome::Otherwise,
            None => Outcome::Hangs,
            Some(true) if output.contains("test result: ok. 1 passed") => Outcome::Green,
            Some(true) => Outcome::Broken,
            Some(false) if !output.contains("running 1 test\n") || !failed => Outcome::Broken,
            Some(false) if NO_SERVER.iter().any(|text| output.contains(text)) => Outcome::Broken,
            Some(false) if fails_with.is_some_and(|part| !output.contains(part)) => {
                Outcome::Otherwise
            }
            Some(false) => Outcome::Red,
        }
    }

    pub(crate) fn has_noticed(self) -> bool {
        matches!(self, Outcome::Red | Outcome::Hangs)
    }
}

/// Returns whether the list of failures at the end of `output` has the test.
pub(crate) fn names_failure(output: &str, path: &str) -> bool {
    let list = output.rsplit_once("\nfailures:\n").map_or("", |(_, list)| list);
    list.lines().any(|line| line.strip_prefix("    ") == Some(path))
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Green => "green",
            Outcome::Red => "red",
            Outcome::Hangs => "hanging",
            Outcome::Otherwise => "failing for another reason",
            Outcome::Broken => "not usable: it does not compile, does not exist, or has no server",
        })
    }
}
