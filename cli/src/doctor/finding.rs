//! `Finding`: what one check has found, and what is to be done.

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// It could not be found out.
    Unknown,
    /// It works, and may stop working or cost more than it should.
    Warning,
    /// Locks do not work, or do not exclude.
    Problem,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// Which check; a name that stays.
    pub(crate) check: &'static str,
    /// `None` for what is about all servers together.
    pub(crate) server: Option<String>,
    pub(crate) level: Level,
    pub(crate) says: String,
    pub(crate) advice: Option<String>,
}

impl Finding {
    fn new(check: &'static str, level: Level, says: impl Into<String>) -> Finding {
        Finding { check, server: None, level, says: says.into(), advice: None }
    }

    pub(crate) fn ok(check: &'static str, says: impl Into<String>) -> Finding {
        Finding::new(check, Level::Ok, says)
    }

    pub(crate) fn unknown(check: &'static str, says: impl Into<String>) -> Finding {
        Finding::new(check, Level::Unknown, says)
    }

    pub(crate) fn warning(check: &'static str, says: impl Into<String>) -> Finding {
        Finding::new(check, Level::Warning, says)
    }

    pub(crate) fn problem(check: &'static str, says: impl Into<String>) -> Finding {
        Finding::new(check, Level::Problem, says)
    }

    /// What to do about it.
    pub(crate) fn advice(self, advice: impl Into<String>) -> Finding {
        Finding { advice: Some(advice.into()), ..self }
    }

    pub(crate) fn at(self, server: &str) -> Finding {
        Finding { server: Some(server.to_owned()), ..self }
    }
}

impl Level {
    /// As a word in a table.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Unknown => "unknown",
            Level::Warning => "warning",
            Level::Problem => "PROBLEM",
        }
    }
}
