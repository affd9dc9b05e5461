//! `Identity`: which server is at the other end of a connection, since when, and what it remembers. Pure.

use std::time::Duration;

use redis::Value;

use crate::clock::Moment;

/// What a new connection to one node of several asks.
pub(crate) const QUESTIONS: [&[&[u8]]; 4] =
    [&[b"INFO", b"server"], &[b"INFO", b"replication"], &[b"INFO", b"persistence"], CONFIG];
/// Users may lack the right to ask this; a server is then taken for one that can forget.
const CONFIG: &[&[u8]] = &[b"CONFIG", b"GET", b"appendfsync"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Differs between runs of all servers.
    pub(crate) run: String,
    /// At least as long as this. The server counts from and to whole seconds, and may say one too much.
    pub(crate) up_for: Duration,
    pub(crate) asked_at: Moment,
    pub(crate) is_master: bool,
    /// It writes down what it does before it answers, so that a restart loses nothing.
    pub(crate) forgets_nothing: bool,
}

/// The answers so far.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    info: String,
    fsync_always: bool,
}

impl Facts {
    /// Takes the answer if it is to one of our questions, and not a refusal that has to be told.
    pub(crate) fn take(&mut self, question: &[&[u8]], answer: &Value) -> bool {
        match answer {
            _ if question == CONFIG => {
                self.fsync_always = matches!(answer, Value::Array(pair) if pair.last().is_some_and(says_always));
                true
            }
            Value::BulkString(text) if question.first() == Some(&&b"INFO"[..]) => {
                self.info.push_str(&String::from_utf8_lossy(text));
                self.info.push('\n');
                true
            }
            _ => false,
        }
    }

    pub(crate) fn identity(&self, asked_at: Moment) -> Option<Identity> {
        let run = self.field("run_id").filter(|run| !run.is_empty())?.to_owned();
        Some(Identity {
            run,
            up_for: Duration::from_secs(self.field("uptime_in_seconds")?.parse::<u64>().ok()?.saturating_sub(1)),
            asked_at,
            is_master: self.field("role")? == "master",
            forgets_nothing: self.fsync_always && self.field("aof_enabled") == Some("1"),
        })
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

fn says_always(value: &Value) -> bool {
    matches!(value, Value::BulkString(text) if text == b"always")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Value {
        Value::BulkString(text.replace('\n', "\r\n").into_bytes())
    }

    fn facts(role: &str, aof: u8, fsync: &str) -> Facts {
        let mut facts = Facts::default();
        assert!(facts.take(QUESTIONS[0], &info("# Server\nrun_id:abc\nuptime_in_seconds:17\nuptime_in_days:0\n")));
        assert!(facts.take(QUESTIONS[1], &info(&format!("# Replication\nrole:{role}\n"))));
        assert!(facts.take(QUESTIONS[2], &info(&format!("# Persistence\naof_enabled:{aof}\n"))));
        let pair = ["appendfsync", fsync].map(|text| Value::BulkString(text.into()));
        assert!(facts.take(QUESTIONS[3], &Value::Array(pair.into())));
        facts
    }

    #[test]
    fn who_it_is_and_since_when() {
        let at = Moment::from_nanos(5);
        let identity = facts("master", 1, "always").identity(at).unwrap();
        let up_for = Duration::from_secs(16);
        assert_eq!(
            identity,
            Identity { run: "abc".into(), up_for, asked_at: at, is_master: true, forgets_nothing: true }
        );
        assert!(!facts("slave", 1, "always").identity(at).unwrap().is_master);
        for (aof, fsync) in [(0, "always"), (1, "everysec"), (1, "no")] {
            assert!(!facts("master", aof, fsync).identity(at).unwrap().forgets_nothing, "{aof} {fsync}");
        }
    }

    #[test]
    fn an_answer_to_somebody_elses_question_is_left_to_them() {
        let mut facts = Facts::default();
        let selected: [&[u8]; 2] = [b"CLIENT", b"INFO"];
        assert!(!facts.take(&selected, &info("run_id:abc\nuptime_in_seconds:17\nrole:master\n")));
        assert_eq!(facts.identity(Moment::NEVER), None);
    }

    #[test]
    fn a_refusal_is_told_unless_it_is_about_the_configuration() {
        let refusal = redis::parse_redis_value(b"-NOPERM no\r\n").unwrap();
        let mut facts = Facts::default();
        assert!(!facts.take(QUESTIONS[0], &refusal));
        assert!(facts.take(QUESTIONS[3], &refusal));
        assert_eq!(facts.identity(Moment::NEVER), None);
    }
}
