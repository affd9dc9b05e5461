//! `ServerInfo`: which server a connection leads to, how long it has been running, and whether it
//! is or was a replica. Pure.

use std::time::Duration;

use redis::Value;

use crate::{
    backend::redis::{
        fields::write_command,
        script::{Decoded, Request, ScriptRef},
    },
    sys::clock::Moment,
};

/// Key of the declaration that a node is new: the run id of its server. Another run, with or
/// without the data of this one, has another run id, so the declaration does not apply to it.
pub(crate) const NEW_KEY: &[u8] = b"distlock:new";

/// Commands that a new connection to one of several nodes sends in its handshake.
pub(crate) const INFO_COMMANDS: [&[&[u8]]; 3] =
    [&[b"INFO", b"server"], &[b"INFO", b"replication"], &[b"GET", NEW_KEY]];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerInfo {
    /// Unique per run of any server.
    pub(crate) run_id: String,
    /// Lower bound of uptime. INFO has second resolution, so one second is subtracted.
    pub(crate) uptime: Duration,
    pub(crate) observed_at: Moment,
    pub(crate) is_master: bool,
    /// The operator declared that this run has lost no data.
    pub(crate) is_declared_new: bool,
    /// Replication id of the current period as a master, if the server is known to have been a
    /// replica earlier in this run. Differs between all promotions of all servers.
    pub(crate) promotion_id: Option<String>,
}

/// Collects the replies to [`INFO_COMMANDS`].
#[derive(Debug, Default)]
pub(crate) struct ServerInfoReader {
    info: String,
    declared_run_id: Vec<u8>,
}

impl ServerInfoReader {
    /// Accepts the reply to one of [`INFO_COMMANDS`]. Returns false if the reply belongs to another
    /// command, or is an error. A declaration that cannot be read does not exist.
    pub(crate) fn read_reply(&mut self, command: &[&[u8]], reply: &Value) -> bool {
        match reply {
            _ if command == [b"GET", NEW_KEY] => {
                if let Value::BulkString(run_id) = reply {
                    self.declared_run_id.clone_from(run_id);
                }
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
        let run_id = self.field("run_id").filter(|run_id| !run_id.is_empty())?.to_owned();
        // INFO computes the uptime from the wall clock. If the clock was set back to before the
        // start, the uptime is negative and counts as zero.
        let uptime_s = self.field("uptime_in_seconds")?.parse::<i64>().ok()?.saturating_sub(1);
        let uptime = Duration::from_secs(u64::try_from(uptime_s).unwrap_or(0));
        let is_master = self.field("role")? == "master";
        let is_declared_new = self.declared_run_id == run_id.as_bytes();
        Some(ServerInfo {
            run_id,
            uptime,
            observed_at,
            is_master,
            is_declared_new,
            promotion_id: self.promotion_id(),
        })
    }

    /// Returns the current promotion, if the server was a replica earlier in this run. The server
    /// then has only the data that its former master had sent by the time of the promotion. A
    /// promoted server starts a new replication id and keeps its master's as the second one.
    fn promotion_id(&self) -> Option<String> {
        let followed_another = self.field("master_replid2")?.bytes().any(|byte| byte != b'0');
        followed_another.then(|| self.field("master_replid").unwrap_or_default().to_owned())
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

/// Asks an established connection for what a handshake asks.
pub(crate) struct Info;

impl Request for Info {
    type Reply = ServerInfoReader;

    fn encode(&self, _: ScriptRef, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"INFO"]);
    }

    fn decode(&self, _: u64, reply: Value) -> Option<Decoded<ServerInfoReader>> {
        let mut reader = ServerInfoReader::default();
        reader.read_reply(&[b"INFO"], &reply).then_some((reader, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Value {
        Value::BulkString(text.replace('\n', "\r\n").into_bytes())
    }

    fn reader(role: &str) -> ServerInfoReader {
        let mut reader = ServerInfoReader::default();
        assert!(reader.read_reply(
            INFO_COMMANDS[0],
            &info("# Server\nrun_id:abc\nuptime_in_seconds:17\nuptime_in_days:0\n")
        ));
        assert!(
            reader.read_reply(INFO_COMMANDS[1], &info(&format!("# Replication\nrole:{role}\n")))
        );
        reader
    }

    #[test]
    fn server_info_is_read_from_replies() {
        let observed_at = Moment::from_nanos(5);
        let uptime = Duration::from_secs(16);
        for (role, is_master) in [("master", true), ("slave", false)] {
            assert_eq!(
                reader(role).server_info(observed_at),
                Some(ServerInfo {
                    run_id: "abc".into(),
                    uptime,
                    observed_at,
                    is_master,
                    is_declared_new: false,
                    promotion_id: None,
                })
            );
        }
    }

    /// A restarted server can have the declaration of its former run.
    ///
    /// Fault: N144
    #[test]
    fn declaration_applies_to_one_run() {
        let refusal = redis::parse_redis_value(b"-NOPERM no\r\n").unwrap();
        for (reply, is_declared_new) in [
            (Value::BulkString(b"abc".to_vec()), true),
            (Value::BulkString(b"ab".to_vec()), false),
            (Value::BulkString(Vec::new()), false),
            (Value::Nil, false),
            (refusal, false),
        ] {
            let mut reader = reader("master");
            assert!(reader.read_reply(INFO_COMMANDS[2], &reply));
            let info = reader.server_info(Moment::NEVER).unwrap();
            assert_eq!(info.is_declared_new, is_declared_new, "{reply:?}");
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
            let mut reader = reader("master");
            reader.info =
                reader.info.replace("uptime_in_seconds:17", &format!("uptime_in_seconds:{said}"));
            let identity = reader.server_info(Moment::NEVER);
            assert_eq!(
                identity.map(|identity| identity.uptime),
                uptime.map(Duration::from_secs),
                "{said}"
            );
        }
        let mut reader = reader("master");
        reader.info =
            reader.info.replace("uptime_in_seconds:17", &format!("uptime_in_seconds:{}", i64::MIN));
        assert_eq!(reader.server_info(Moment::NEVER).unwrap().uptime, Duration::ZERO);
    }

    #[test]
    fn former_replica_has_promotion_id() {
        for (before, promotion) in [("0".repeat(40), None), ("7f".repeat(20), Some("a1"))] {
            let mut reader = reader("master");
            let replication = info(&format!("master_replid:a1\nmaster_replid2:{before}\n"));
            assert!(reader.read_reply(INFO_COMMANDS[1], &replication));
            let server_info = reader.server_info(Moment::NEVER).unwrap();
            assert_eq!(server_info.promotion_id.as_deref(), promotion);
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
    fn reader_leaves_refusal_to_its_caller() {
        let refusal = redis::parse_redis_value(b"-NOPERM no\r\n").unwrap();
        let mut reader = ServerInfoReader::default();
        assert!(!reader.read_reply(INFO_COMMANDS[0], &refusal));
        assert_eq!(reader.server_info(Moment::NEVER), None);
    }
}
