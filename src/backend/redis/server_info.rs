//! `ServerInfo`: which server a connection leads to, how long it has been running, and whether it
//! keeps its data. Pure.

use std::time::Duration;

use redis::Value;

use crate::sys::clock::Moment;

/// Commands that a new connection to one of several nodes sends in its handshake.
pub(crate) const INFO_COMMANDS: [&[&[u8]]; 5] = [
    &[b"INFO", b"server"],
    &[b"INFO", b"replication"],
    &[b"INFO", b"persistence"],
    CONFIG_COMMAND,
    DURABILITY_COMMAND,
];
/// Command that reads the fsync settings. The pattern matches `appendfsync` and its exception
/// `no-appendfsync-on-rewrite`; servers before Redis 7 accept only one pattern. If the user lacks
/// the permission for CONFIG, the server counts as not durable.
const CONFIG_COMMAND: &[&[u8]] = &[b"CONFIG", b"GET", b"*appendfsync*"];
const DURABILITY_COMMAND: &[&[u8]] = &[b"GET", DURABILITY_KEY];

/// Key of a durability record: the time in milliseconds for which a durable server had lost nothing
/// when the record was written. If the record survived a restart, so did everything written after
/// it. On a promoted replica, the promotion id follows the time. Such a record says how long the
/// server has been master, and does not count after any other promotion.
pub(crate) const DURABILITY_KEY: &[u8] = b"distlock:memory";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerInfo {
    /// Unique per run of any server.
    pub(crate) run_id: String,
    /// Lower bound of uptime. INFO has second resolution, so one second is subtracted. A promoted
    /// replica does not know when it was promoted, so its uptime comes from its durability record.
    pub(crate) uptime: Duration,
    pub(crate) observed_at: Moment,
    pub(crate) is_master: bool,
    /// Replication id of the current period as a master, if the server is known to have been a
    /// replica earlier in this run. Differs between all promotions of all servers.
    pub(crate) promotion_id: Option<String>,
    /// Whether the server writes every change to disk before it replies, so that a restart loses
    /// nothing. False if the server has replicas, because they would receive a copy of its
    /// durability record. False for a promoted replica.
    pub(crate) is_durable: bool,
    /// Time in the durability record, if the record names no promotion.
    pub(crate) recorded_durability: Option<Duration>,
}

/// Collects the replies to [`INFO_COMMANDS`].
#[derive(Debug, Default)]
pub(crate) struct ServerInfoReader {
    info: String,
    fsync_always: bool,
    durability_record: Option<String>,
}

/// Formats the value of [`DURABILITY_KEY`].
pub(crate) fn durability_record(durable_for: Duration, promotion: Option<&str>) -> String {
    let millis = durable_for.as_millis();
    promotion.map_or_else(|| millis.to_string(), |promotion| format!("{millis} {promotion}"))
}

impl ServerInfoReader {
    /// Accepts the reply to one of [`INFO_COMMANDS`]. Returns false if the reply belongs to another
    /// command, or is an error that must be reported.
    pub(crate) fn read_reply(&mut self, command: &[&[u8]], reply: &Value) -> bool {
        match reply {
            _ if command == CONFIG_COMMAND => {
                let set = |name, value| {
                    matches!(
                        reply,
                        Value::Array(pairs) if has_setting(pairs, name, value)
                    )
                };
                self.fsync_always =
                    set("appendfsync", "always") && !set("no-appendfsync-on-rewrite", "yes");
                true
            }
            // The server cannot reply yet, so the error is reported and the connection is retried.
            Value::ServerError(error)
                if command == DURABILITY_COMMAND && matches!(error.code(), "LOADING" | "BUSY") =>
            {
                false
            }
            _ if command == DURABILITY_COMMAND => {
                self.durability_record = match reply {
                    Value::BulkString(text) => String::from_utf8(text.clone()).ok(),
                    _ => None,
                };
                true
            }
            Value::BulkString(text) if command.first() == Some(&&b"INFO"[..]) => {
                self.info.push_str(&String::from_utf8_lossy(text));
                self.info.push('\n');
                true
            }
            _ => false,
        }
    }

    pub(crate) fn server_info(&self, observed_at: Moment) -> Option<ServerInfo> {
        let promotion = self.promotion_id();
        let run_id = self.field("run_id").filter(|run_id| !run_id.is_empty())?.to_owned();
        // INFO computes the uptime from the wall clock. If the clock was set back to before the
        // start, the uptime is negative and counts as zero.
        let uptime_s = self.field("uptime_in_seconds")?.parse::<i64>().ok()?.saturating_sub(1);
        let uptime = Duration::from_secs(u64::try_from(uptime_s).unwrap_or(0));
        Some(ServerInfo {
            run_id,
            uptime: if promotion.is_some() {
                self.recorded_durability(promotion.as_deref()).unwrap_or_default()
            } else {
                uptime
            },
            observed_at,
            is_master: self.field("role")? == "master",
            is_durable: self.has_synchronous_aof() && !self.has_replicas() && promotion.is_none(),
            promotion_id: promotion,
            recorded_durability: self.recorded_durability(None),
        })
    }

    fn has_synchronous_aof(&self) -> bool {
        self.fsync_always && self.field("aof_enabled") == Some("1")
    }

    /// Whether the server has replicas, or had some recently. They may have a copy of its
    /// durability record, and a replica that is restarted as a master shows no trace of having been
    /// one.
    fn has_replicas(&self) -> bool {
        self.field("repl_backlog_active") != Some("0")
    }

    /// Returns the current promotion, if the server was a replica earlier in this run. The server
    /// then has only the data that its former master had sent by the time of the promotion. A
    /// promoted server starts a new replication id and keeps its master's as the second one.
    fn promotion_id(&self) -> Option<String> {
        let followed_another = self.field("master_replid2")?.bytes().any(|byte| byte != b'0');
        followed_another.then(|| self.field("master_replid").unwrap_or_default().to_owned())
    }

    /// Returns the time in the durability record, if the record belongs to `promotion`.
    fn recorded_durability(&self, promotion: Option<&str>) -> Option<Duration> {
        let text = self.durability_record.as_deref()?;
        let (durable_for, record_of) =
            text.split_once(' ').map_or((text, None), |(millis, of)| (millis, Some(of)));
        (record_of == promotion).then(|| durable_for.parse().ok().map(Duration::from_millis))?
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

/// Whether a list of alternating names and values contains this setting.
fn has_setting(pairs: &[Value], name: &str, value: &str) -> bool {
    let is = |said: &Value, text: &str| {
        matches!(
            said,
            Value::BulkString(said) if said == text.as_bytes()
        )
    };
    pairs.chunks_exact(2).any(|pair| is(&pair[0], name) && is(&pair[1], value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Value {
        Value::BulkString(text.replace('\n', "\r\n").into_bytes())
    }

    fn reader(role: &str, aof: u8, fsync: &str) -> ServerInfoReader {
        let mut reader = ServerInfoReader::default();
        assert!(reader.read_reply(
            INFO_COMMANDS[0],
            &info("# Server\nrun_id:abc\nuptime_in_seconds:17\nuptime_in_days:0\n")
        ));
        assert!(reader.read_reply(
            INFO_COMMANDS[1],
            &info(&format!("# Replication\nrole:{role}\nrepl_backlog_active:0\n"))
        ));
        assert!(
            reader.read_reply(
                INFO_COMMANDS[2],
                &info(&format!("# Persistence\naof_enabled:{aof}\n"))
            )
        );
        let pair = ["appendfsync", fsync].map(|text| Value::BulkString(text.into()));
        assert!(reader.read_reply(INFO_COMMANDS[3], &Value::Array(pair.into())));
        assert!(reader.read_reply(INFO_COMMANDS[4], &Value::BulkString("7000".into())));
        reader
    }

    #[test]
    fn server_info_is_read_from_replies() {
        let at = Moment::from_nanos(5);
        let server_info = reader("master", 1, "always").server_info(at).unwrap();
        let uptime = Duration::from_secs(16);
        let recorded_durability = Some(Duration::from_secs(7));
        assert_eq!(
            server_info,
            ServerInfo {
                run_id: "abc".into(),
                uptime,
                observed_at: at,
                is_master: true,
                promotion_id: None,
                is_durable: true,
                recorded_durability,
            }
        );
        assert!(!reader("slave", 1, "always").server_info(at).unwrap().is_master);
        for (aof, fsync) in [(0, "always"), (1, "everysec"), (1, "no")] {
            assert!(
                !reader("master", aof, fsync).server_info(at).unwrap().is_durable,
                "{aof} {fsync}"
            );
        }
    }

    /// Fault: N92
    #[test]
    fn negative_uptime_counts_as_zero() {
        for (said, uptime) in [
            ("-7200", Some(0)),
            ("-1", Some(0)),
            ("0", Some(0)),
            ("1", Some(0)),
            ("2", Some(1)),
            ("x", None),
        ] {
            let mut reader = reader("master", 0, "no");
            reader.info =
                reader.info.replace("uptime_in_seconds:17", &format!("uptime_in_seconds:{said}"));
            let identity = reader.server_info(Moment::NEVER);
            assert_eq!(
                identity.map(|identity| identity.uptime),
                uptime.map(Duration::from_secs),
                "{said}"
            );
        }
        let mut reader = reader("master", 0, "no");
        reader.info =
            reader.info.replace("uptime_in_seconds:17", &format!("uptime_in_seconds:{}", i64::MIN));
        assert_eq!(reader.server_info(Moment::NEVER).unwrap().uptime, Duration::ZERO);
    }

    /// Fault: N58
    #[test]
    fn server_without_fsync_on_rewrite_is_not_durable() {
        let texts = |texts: &[&str]| {
            Value::Array(texts.iter().map(|text| Value::BulkString((*text).into())).collect())
        };
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
            let mut reader = reader("master", 1, "always");
            assert!(reader.read_reply(INFO_COMMANDS[3], &settings));
            assert_eq!(
                reader.server_info(Moment::NEVER).unwrap().is_durable,
                forgets_nothing,
                "{settings:?}"
            );
        }
    }

    /// Fault: N47
    #[test]
    fn server_with_replicas_is_not_durable() {
        let alone = reader("master", 1, "always");
        assert!(alone.server_info(Moment::NEVER).unwrap().is_durable);
        for backlog in ["repl_backlog_active:1", "repl_backlog_active:", "connected_slaves:0"] {
            let info = alone.info.replace("repl_backlog_active:0", backlog);
            let reader = ServerInfoReader {
                info,
                fsync_always: true,
                durability_record: Some("7000".into()),
            };
            assert!(!reader.server_info(Moment::NEVER).unwrap().is_durable, "{backlog}");
        }
    }

    #[test]
    fn promoted_replica_is_not_durable() {
        for (before, promotion) in [("0".repeat(40), None), ("7f".repeat(20), Some("a1"))] {
            let mut reader = reader("master", 1, "always");
            assert!(reader.read_reply(
                INFO_COMMANDS[1],
                &info(&format!("master_replid:a1\nmaster_replid2:{before}\n"))
            ));
            let identity = reader.server_info(Moment::NEVER).unwrap();
            assert_eq!(identity.is_durable, promotion.is_none());
            assert_eq!(identity.promotion_id.as_deref(), promotion);
        }
    }

    #[test]
    fn promoted_server_takes_uptime_from_its_record() {
        let second = Duration::from_secs(1);
        for (told, uptime, memory) in [
            (durability_record(second, Some("a1")), 1_000, None),
            (durability_record(second, Some("b2")), 0, None),
            ("1000 a1 a1".into(), 0, None),
            ("x a1".into(), 0, None),
            // The record was copied from its master.
            (durability_record(second, None), 0, Some(second)),
        ] {
            let mut reader = reader("master", 1, "always");
            assert!(
                reader.read_reply(INFO_COMMANDS[1], &info("master_replid:a1\nmaster_replid2:b2\n"))
            );
            assert!(
                reader.read_reply(INFO_COMMANDS[4], &Value::BulkString(told.clone().into_bytes()))
            );
            let identity = reader.server_info(Moment::NEVER).unwrap();
            assert_eq!(
                (identity.uptime, identity.recorded_durability),
                (Duration::from_millis(uptime), memory),
                "{told}"
            );
        }
    }

    #[test]
    fn malformed_durability_record_counts_as_none() {
        let cases = [
            ("", None),
            ("0", Some(0)),
            ("12", Some(12)),
            ("-1", None),
            ("9e9", None),
            ("9".repeat(30).leak(), None),
            ("12 a1", None),
        ];
        let mut reader = reader("master", 1, "always");
        for (text, memory) in cases {
            assert!(reader.read_reply(INFO_COMMANDS[4], &Value::BulkString(text.into())));
            assert_eq!(
                reader.server_info(Moment::NEVER).unwrap().recorded_durability,
                memory.map(Duration::from_millis),
                "{text}"
            );
        }
        for reply in [&b"$-1\r\n"[..], b"-NOPERM no\r\n", b"-WRONGTYPE no\r\n", b":7\r\n"] {
            assert!(reader.read_reply(INFO_COMMANDS[4], &redis::parse_redis_value(reply).unwrap()));
            assert_eq!(reader.server_info(Moment::NEVER).unwrap().recorded_durability, None);
        }
        for busy in [&b"-LOADING wait\r\n"[..], b"-BUSY wait\r\n"] {
            assert!(!reader.read_reply(INFO_COMMANDS[4], &redis::parse_redis_value(busy).unwrap()));
        }
    }

    #[test]
    fn reader_ignores_reply_to_other_command() {
        let mut reader = ServerInfoReader::default();
        let selected: [&[u8]; 2] = [b"CLIENT", b"INFO"];
        assert!(
            !reader.read_reply(&selected, &info("run_id:abc\nuptime_in_seconds:17\nrole:master\n"))
        );
        assert_eq!(reader.server_info(Moment::NEVER), None);
    }

    #[test]
    fn reader_accepts_refusal_of_optional_commands_only() {
        let refusal = redis::parse_redis_value(b"-NOPERM no\r\n").unwrap();
        let mut reader = ServerInfoReader::default();
        assert!(!reader.read_reply(INFO_COMMANDS[0], &refusal));
        assert!(reader.read_reply(INFO_COMMANDS[3], &refusal));
        assert!(reader.read_reply(INFO_COMMANDS[4], &refusal));
        assert_eq!(reader.server_info(Moment::NEVER), None);
    }
}
