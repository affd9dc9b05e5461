//! `Identity`: which server is at the other end of a connection, since when, and what it remembers. Pure.

use std::time::Duration;

use redis::Value;

use crate::clock::Moment;

/// What a new connection to one node of several asks.
pub(crate) const QUESTIONS: [&[&[u8]]; 5] =
    [&[b"INFO", b"server"], &[b"INFO", b"replication"], &[b"INFO", b"persistence"], CONFIG, MEMORY];
/// Users may lack the right to ask this; a server is then taken for one that can forget. Old servers take one name or pattern
/// only: it is for `appendfsync`, and for `no-appendfsync-on-rewrite`, which makes exceptions to it.
const CONFIG: &[&[u8]] = &[b"CONFIG", b"GET", b"*appendfsync*"];
const MEMORY: &[&[u8]] = &[b"GET", MEMORY_KEY];

/// Where a server that forgets nothing keeps for how long, in milliseconds, it had done so at least when that was
/// written. Whoever finds it finds all that was written since. On one that was a replica the promotion stands behind: it says
/// for how long that one was the master, and counts for no other.
pub(crate) const MEMORY_KEY: &[u8] = b"distlock:memory";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Differs between runs of all servers.
    pub(crate) run: String,
    /// At least as long as this it has been the server that it is. It counts from and to whole seconds, and may say one too
    /// much; since when it is a master, where it was none before, it knows only if it was told.
    pub(crate) up_for: Duration,
    pub(crate) asked_at: Moment,
    pub(crate) is_master: bool,
    /// Differs between all times that any server is a master, if it is known to have been a replica before, in this run.
    pub(crate) promotion: Option<String>,
    /// It writes down what it does before it answers, so that the next restart loses nothing; and no replica has what it
    /// remembers of itself, which it would repeat as its own.
    pub(crate) forgets_nothing: bool,
    /// What stands under `MEMORY_KEY` about a server that forgets nothing.
    pub(crate) memory: Option<Duration>,
}

/// The answers so far.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    info: String,
    fsync_always: bool,
    memory: Option<String>,
}

/// What is to be written under `MEMORY_KEY`.
pub(crate) fn memory(lasted: Duration, promotion: Option<&str>) -> String {
    let lasted = lasted.as_millis();
    promotion.map_or_else(|| lasted.to_string(), |promotion| format!("{lasted} {promotion}"))
}

impl Facts {
    /// Takes the answer if it is to one of our questions, and not a refusal that has to be told.
    pub(crate) fn take(&mut self, question: &[&[u8]], answer: &Value) -> bool {
        match answer {
            _ if question == CONFIG => {
                let set = |name, value| matches!(answer, Value::Array(pairs) if is_set(pairs, name, value));
                self.fsync_always = set("appendfsync", "always") && !set("no-appendfsync-on-rewrite", "yes");
                true
            }
            // It cannot say yet, and is asked anew.
            Value::ServerError(error) if question == MEMORY && matches!(error.code(), "LOADING" | "BUSY") => false,
            _ if question == MEMORY => {
                self.memory = match answer {
                    Value::BulkString(text) => String::from_utf8(text.clone()).ok(),
                    _ => None,
                };
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
        let promotion = self.promotion();
        let run = self.field("run_id").filter(|run| !run.is_empty())?.to_owned();
        // Of wall clocks: a server whose clock was set back behind its start says less than nothing, and is as good as new.
        let said = self.field("uptime_in_seconds")?.parse::<i64>().ok()?.saturating_sub(1);
        let up_for = Duration::from_secs(u64::try_from(said).unwrap_or(0));
        Some(Identity {
            run,
            up_for: if promotion.is_some() { self.memory(promotion.as_deref()).unwrap_or_default() } else { up_for },
            asked_at,
            is_master: self.field("role")? == "master",
            forgets_nothing: self.is_durable() && !self.has_replicas() && promotion.is_none(),
            promotion,
            memory: self.memory(None),
        })
    }

    fn is_durable(&self) -> bool {
        self.fsync_always && self.field("aof_enabled") == Some("1")
    }

    /// Or has had some lately. One of them that is started anew as a master shows no trace of what it was.
    fn has_replicas(&self) -> bool {
        self.field("repl_backlog_active") != Some("0")
    }

    /// Which time as a master this is, if it was a replica before: its data is then what another had sent so far. It takes
    /// a new name for its stream of changes with each promotion, and keeps that of its master's as the second.
    fn promotion(&self) -> Option<String> {
        let followed_another = self.field("master_replid2")?.bytes().any(|byte| byte != b'0');
        followed_another.then(|| self.field("master_replid").unwrap_or_default().to_owned())
    }

    /// What the server was told that holds for this time as a master.
    fn memory(&self, promotion: Option<&str>) -> Option<Duration> {
        let text = self.memory.as_deref()?;
        let (lasted, told_of) = text.split_once(' ').map_or((text, None), |(lasted, of)| (lasted, Some(of)));
        (told_of == promotion).then(|| lasted.parse().ok().map(Duration::from_millis))?
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

/// Whether a setting has this value, among names with their values behind them.
fn is_set(pairs: &[Value], name: &str, value: &str) -> bool {
    let is = |said: &Value, text: &str| matches!(said, Value::BulkString(said) if said == text.as_bytes());
    pairs.chunks_exact(2).any(|pair| is(&pair[0], name) && is(&pair[1], value))
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
        assert!(facts.take(QUESTIONS[1], &info(&format!("# Replication\nrole:{role}\nrepl_backlog_active:0\n"))));
        assert!(facts.take(QUESTIONS[2], &info(&format!("# Persistence\naof_enabled:{aof}\n"))));
        let pair = ["appendfsync", fsync].map(|text| Value::BulkString(text.into()));
        assert!(facts.take(QUESTIONS[3], &Value::Array(pair.into())));
        assert!(facts.take(QUESTIONS[4], &Value::BulkString("7000".into())));
        facts
    }

    #[test]
    fn who_it_is_and_since_when() {
        let at = Moment::from_nanos(5);
        let identity = facts("master", 1, "always").identity(at).unwrap();
        let up_for = Duration::from_secs(16);
        let memory = Some(Duration::from_secs(7));
        assert_eq!(
            identity,
            Identity {
                run: "abc".into(),
                up_for,
                asked_at: at,
                is_master: true,
                promotion: None,
                forgets_nothing: true,
                memory,
            }
        );
        assert!(!facts("slave", 1, "always").identity(at).unwrap().is_master);
        for (aof, fsync) in [(0, "always"), (1, "everysec"), (1, "no")] {
            assert!(!facts("master", aof, fsync).identity(at).unwrap().forgets_nothing, "{aof} {fsync}");
        }
    }

    #[test]
    fn who_was_started_later_than_now_is_as_old_as_nothing() {
        for (said, up_for) in
            [("-7200", Some(0)), ("-1", Some(0)), ("0", Some(0)), ("1", Some(0)), ("2", Some(1)), ("x", None)]
        {
            let mut facts = facts("master", 0, "no");
            facts.info = facts.info.replace("uptime_in_seconds:17", &format!("uptime_in_seconds:{said}"));
            let identity = facts.identity(Moment::NEVER);
            assert_eq!(identity.map(|identity| identity.up_for), up_for.map(Duration::from_secs), "{said}");
        }
        let mut facts = facts("master", 0, "no");
        facts.info = facts.info.replace("uptime_in_seconds:17", &format!("uptime_in_seconds:{}", i64::MIN));
        assert_eq!(facts.identity(Moment::NEVER).unwrap().up_for, Duration::ZERO);
    }

    #[test]
    fn who_writes_down_later_while_it_rewrites_its_file_forgets() {
        let texts = |texts: &[&str]| Value::Array(texts.iter().map(|text| Value::BulkString((*text).into())).collect());
        let (always, later) = (["appendfsync", "always"], ["no-appendfsync-on-rewrite", "yes"]);
        let at_once = ["no-appendfsync-on-rewrite", "no"];
        for (settings, forgets_nothing) in [
            (texts(&[at_once, always].concat()), true),
            (texts(&[always, at_once].concat()), true),
            (texts(&always), true),
            (texts(&[always, later].concat()), false),
            (texts(&[later, always].concat()), false),
            (texts(&["always"]), false),
            (texts(&[]), false),
            (Value::Nil, false),
        ] {
            let mut facts = facts("master", 1, "always");
            assert!(facts.take(QUESTIONS[3], &settings));
            assert_eq!(facts.identity(Moment::NEVER).unwrap().forgets_nothing, forgets_nothing, "{settings:?}");
        }
    }

    #[test]
    fn who_has_replicas_may_come_back_as_one_of_them() {
        let alone = facts("master", 1, "always");
        assert!(alone.identity(Moment::NEVER).unwrap().forgets_nothing);
        for backlog in ["repl_backlog_active:1", "repl_backlog_active:", "connected_slaves:0"] {
            let info = alone.info.replace("repl_backlog_active:0", backlog);
            let facts = Facts { info, fsync_always: true, memory: Some("7000".into()) };
            assert!(!facts.identity(Moment::NEVER).unwrap().forgets_nothing, "{backlog}");
        }
    }

    #[test]
    fn who_followed_another_has_its_data_as_far_as_it_was_sent() {
        for (before, promotion) in [("0".repeat(40), None), ("7f".repeat(20), Some("a1"))] {
            let mut facts = facts("master", 1, "always");
            assert!(facts.take(QUESTIONS[1], &info(&format!("master_replid:a1\nmaster_replid2:{before}\n"))));
            let identity = facts.identity(Moment::NEVER).unwrap();
            assert_eq!(identity.forgets_nothing, promotion.is_none());
            assert_eq!(identity.promotion.as_deref(), promotion);
        }
    }

    #[test]
    fn who_was_promoted_is_as_old_as_it_was_told() {
        let second = Duration::from_secs(1);
        for (told, up_for, memory) in [
            (memory(second, Some("a1")), 1_000, None),
            (memory(second, Some("b2")), 0, None),
            ("1000 a1 a1".into(), 0, None),
            ("x a1".into(), 0, None),
            // It was its master's.
            (memory(second, None), 0, Some(second)),
        ] {
            let mut facts = facts("master", 1, "always");
            assert!(facts.take(QUESTIONS[1], &info("master_replid:a1\nmaster_replid2:b2\n")));
            assert!(facts.take(QUESTIONS[4], &Value::BulkString(told.clone().into_bytes())));
            let identity = facts.identity(Moment::NEVER).unwrap();
            assert_eq!((identity.up_for, identity.memory), (Duration::from_millis(up_for), memory), "{told}");
        }
    }

    #[test]
    fn a_memory_is_a_number_or_none() {
        let cases = [
            ("", None),
            ("0", Some(0)),
            ("12", Some(12)),
            ("-1", None),
            ("9e9", None),
            ("9".repeat(30).leak(), None),
            ("12 a1", None),
        ];
        let mut facts = facts("master", 1, "always");
        for (text, memory) in cases {
            assert!(facts.take(QUESTIONS[4], &Value::BulkString(text.into())));
            assert_eq!(facts.identity(Moment::NEVER).unwrap().memory, memory.map(Duration::from_millis), "{text}");
        }
        for answer in [&b"$-1\r\n"[..], b"-NOPERM no\r\n", b"-WRONGTYPE no\r\n", b":7\r\n"] {
            assert!(facts.take(QUESTIONS[4], &redis::parse_redis_value(answer).unwrap()));
            assert_eq!(facts.identity(Moment::NEVER).unwrap().memory, None);
        }
        for busy in [&b"-LOADING wait\r\n"[..], b"-BUSY wait\r\n"] {
            assert!(!facts.take(QUESTIONS[4], &redis::parse_redis_value(busy).unwrap()));
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
    fn a_refusal_is_told_unless_it_is_about_memory() {
        let refusal = redis::parse_redis_value(b"-NOPERM no\r\n").unwrap();
        let mut facts = Facts::default();
        assert!(!facts.take(QUESTIONS[0], &refusal));
        assert!(facts.take(QUESTIONS[3], &refusal));
        assert!(facts.take(QUESTIONS[4], &refusal));
        assert_eq!(facts.identity(Moment::NEVER), None);
    }
}
