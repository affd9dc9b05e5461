//! `Finding`: the result of a check, and what to do about it.

use serde::Serialize;

const KEEP_SETTINGS_ADVICE: &str = "CONFIG SET is forgotten at a restart unless the setting is \
                                    also in redis.conf, where CONFIG REWRITE writes it";
const KEEP_USER_ADVICE: &str = "ACL SETUSER is forgotten at a restart unless the user is also in \
                                the ACL file, where ACL SAVE writes it; without an ACL file, \
                                CONFIG REWRITE writes it to redis.conf";

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
    pub(crate) message: String,
    pub(crate) advice: Option<String>,
    /// Commands for `redis-cli`, or for the `mysql` client, that follow the advice, each ready to
    /// be pasted.
    pub(crate) commands: Vec<String>,
}

impl Finding {
    fn new(check: &'static str, level: Level, message: impl Into<String>) -> Finding {
        Finding {
            check,
            server: None,
            level,
            message: message.into(),
            advice: None,
            commands: Vec::new(),
        }
    }

    pub(crate) fn ok(check: &'static str, message: impl Into<String>) -> Finding {
        Finding::new(check, Level::Ok, message)
    }

    pub(crate) fn unknown(check: &'static str, message: impl Into<String>) -> Finding {
        Finding::new(check, Level::Unknown, message)
    }

    pub(crate) fn warning(check: &'static str, message: impl Into<String>) -> Finding {
        Finding::new(check, Level::Warning, message)
    }

    pub(crate) fn problem(check: &'static str, message: impl Into<String>) -> Finding {
        Finding::new(check, Level::Problem, message)
    }

    /// What to do about it.
    pub(crate) fn advice(self, advice: impl Into<String>) -> Finding {
        Finding { advice: Some(advice.into()), ..self }
    }

    /// A command for the server's client that follows the advice.
    pub(crate) fn command(mut self, command: impl Into<String>) -> Finding {
        self.commands.push(command.into());
        self
    }

    /// Commands that change settings, each given as name and value, and one that keeps them.
    pub(crate) fn config_set(self, settings: &[&str]) -> Finding {
        let set =
            |finding: Finding, setting: &&str| finding.command(format!("CONFIG SET {setting}"));
        settings.iter().fold(self, set).add_advice(KEEP_SETTINGS_ADVICE).command("CONFIG REWRITE")
    }

    /// A command that changes a user, and one that keeps the change.
    pub(crate) fn acl_setuser(self, command: String) -> Finding {
        self.command(command).add_advice(KEEP_USER_ADVICE).command("ACL SAVE")
    }

    fn add_advice(mut self, more: &str) -> Finding {
        let advice = self.advice.get_or_insert_default();
        if !advice.is_empty() {
            advice.push_str("; ");
        }
        advice.push_str(more);
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
