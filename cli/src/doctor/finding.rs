//! `Finding`: the result of a check, and what to do about it.

use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// It could not be checked.
    Unknown,
    /// It works, but may stop working or cost more than it should.
    Warning,
    /// Locks do not work, or do not exclude each other.
    Problem,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// A stable name.
    pub(crate) check: &'static str,
    /// `None` if the finding is about all servers together.
    pub(crate) server: Option<String>,
    pub(crate) level: Level,
    pub(crate) says: String,
    pub(crate) advice: Option<String>,
    /// Commands for `redis-cli` that follow the advice, each ready to be pasted.
    pub(crate) commands: Vec<String>,
}

impl Finding {
    fn new(check: &'static str, level: Level, says: impl Into<String>) -> Finding {
        Finding {
            check,
            server: None,
            level,
            says: says.into(),
            advice: None,
            commands: Vec::new(),
        }
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

    /// A command for `redis-cli` that follows the advice.
    pub(crate) fn command(mut self, command: impl Into<String>) -> Finding {
        self.commands.push(command.into());
        self
    }

    pub(crate) fn at(self, server: &str) -> Finding {
        Finding { server: Some(server.to_owned()), ..self }
    }
}

impl Level {
    /// The word for a table.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Unknown => "unknown",
            Level::Warning => "warning",
            Level::Problem => "PROBLEM",
        }
    }
}
