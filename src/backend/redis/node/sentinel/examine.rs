//! What each sentinel knows about the master, for diagnosis.

use std::{collections::HashSet, time::Duration};

use redis::Value;

use super::{
    Failure, FramedSocket, REPLY_TIMEOUT, Sentinel, Sentinels, Watched, address_in, of_host, text,
};
use crate::{
    backend::{discovery::host_label, transport::Security},
    sys::clock,
};

/// Maximum number of sentinels that are asked; otherwise their replies could name any number.
const SENTINELS_MAX: usize = 32;

/// What one sentinel says about the master, for diagnosis.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SentinelInfo {
    /// Address of the sentinel, as the URL or another sentinel names it.
    pub sentinel: String,
    /// Whether the URL names it. If it does not, another sentinel does.
    pub is_in_url: bool,
    /// What it knows, or why it cannot be asked.
    pub view: std::result::Result<SentinelView, String>,
}

/// What a sentinel knows about the master.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SentinelView {
    /// Name of the master in the configuration of the sentinel.
    pub name: String,
    /// Address of the master.
    pub master: String,
    /// Number of the failover that made it the master; zero if there was none.
    pub config_epoch: u64,
    /// State of the master, such as `master,s_down`.
    pub flags: String,
    /// Number of sentinels that must agree that the master is down.
    pub quorum: u64,
    /// Number of the other sentinels that it knows.
    pub other_sentinels: u64,
    /// Why too few sentinels can be reached for a failover.
    pub quorum_failure: Option<String>,
    /// Time without a reply after which it considers the master down.
    pub down_after: Duration,
    /// Maximum time of a failover. The next one begins twice this time after a failed one.
    pub failover_timeout: Duration,
    /// Replicas that it knows.
    pub replicas: Vec<SentinelReplica>,
}

/// A replica of the master, as a sentinel sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentinelReplica {
    /// Address of the replica.
    pub server: String,
    /// Whether the sentinel gets no reply from it.
    pub is_down: bool,
    /// Whether it may become the master: its priority is not zero.
    pub can_be_promoted: bool,
}

/// Asks the sentinels of the URL, then those that they name, one after the other. Each takes at
/// most [`REPLY_TIMEOUT`]. `security` has no name of a server.
pub(crate) fn examine(sentinels: &Sentinels, security: Option<&Security>) -> Vec<SentinelInfo> {
    let Sentinels(shared) = sentinels;
    let (mut found, mut ids, mut named) = (Vec::new(), HashSet::new(), Vec::new());
    for watched in &shared.sentinels {
        let reply = watched.examine(&shared.service);
        found.push(SentinelInfo {
            sentinel: watched.sentinel.label.clone(),
            is_in_url: true,
            view: reply.map(|reply| {
                ids.insert(reply.id);
                named.extend(reply.named);
                reply.view
            }),
        });
    }
    for other in named {
        let label = host_label(&other.host, other.port);
        let is_known = found.iter().any(|known: &SentinelInfo| known.sentinel == label);
        if found.len() >= SENTINELS_MAX || is_known || !ids.insert(other.id) {
            continue;
        }
        // All have the same users.
        let Some(login) = shared.sentinels.first().map(|watched| &watched.sentinel) else { break };
        let sentinel = Sentinel {
            label,
            discovery: of_host(&other.host, other.port),
            user: login.user.clone(),
            password: login.password.clone(),
            security: security.map(|security| security.for_host(&other.host)),
        };
        let watched = Watched::new(sentinel);
        found.push(SentinelInfo {
            view: watched.examine(&shared.service).map(|reply| reply.view),
            sentinel: watched.sentinel.label,
            is_in_url: false,
        });
    }
    found
}

/// A sentinel's reply.
struct Reply {
    /// Identifier of the sentinel.
    id: String,
    view: SentinelView,
    /// The other sentinels that it knows.
    named: Vec<Named>,
}

/// A sentinel that another one names.
struct Named {
    id: String,
    host: String,
    port: u16,
}

impl Watched {
    fn examine(&self, service: &str) -> Result<Reply, String> {
        let deadline = clock::now().saturating_add(REPLY_TIMEOUT);
        let reason = |failure: Failure| failure.reason;
        let mut link: FramedSocket = self.connect(deadline).map_err(reason)?;
        let commands: [&[&str]; 6] = [
            &["SENTINEL", "MASTER", service],
            &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service],
            &["SENTINEL", "MYID"],
            &["SENTINEL", "CKQUORUM", service],
            &["SENTINEL", "SENTINELS", service],
            &["SENTINEL", "REPLICAS", service],
        ];
        let [state, address, id, quorum, sentinels, replicas] =
            self.exchange(&mut link, commands, deadline).map_err(reason)?;
        for reply in [&state, &address, &sentinels, &replicas] {
            self.check(reply).map_err(reason)?;
        }
        let unexpected = || "its reply has an unexpected form".to_owned();
        let (host, port) = address_in(&address).ok_or_else(unexpected)?;
        let state = Fields(&state);
        let view = SentinelView {
            name: service.to_owned(),
            master: host_label(&host, port),
            config_epoch: state.number("config-epoch"),
            flags: state.text("flags"),
            quorum: state.number("quorum"),
            other_sentinels: state.number("num-other-sentinels"),
            quorum_failure: match &quorum {
                // Any other error, such as a missing permission, says nothing about the quorum.
                Value::ServerError(error) if error.code() == "NOQUORUM" => {
                    Some(self.quote(error.details().unwrap_or_default()))
                }
                _ => None,
            },
            down_after: Duration::from_millis(state.number("down-after-milliseconds")),
            failover_timeout: Duration::from_millis(state.number("failover-timeout")),
            replicas: rows(&replicas).map(|row| row.replica()).collect(),
        };
        let named = rows(&sentinels).map(|row| Named {
            id: row.text("runid"),
            host: row.text("ip"),
            port: u16::try_from(row.number("port")).unwrap_or_default(),
        });
        Ok(Reply { id: text(&id).unwrap_or_default(), named: named.collect(), view })
    }
}

/// An array of names, each followed by its value.
struct Fields<'a>(&'a Value);

fn rows(reply: &Value) -> impl Iterator<Item = Fields<'_>> {
    let rows: &[Value] = if let Value::Array(rows) = reply { rows } else { &[] };
    rows.iter().map(Fields)
}

impl Fields<'_> {
    /// Empty if the field is missing.
    fn text(&self, name: &str) -> String {
        let Value::Array(fields) = self.0 else { return String::new() };
        let mut pairs = fields.chunks_exact(2);
        let found = pairs.find(|pair| text(&pair[0]).as_deref() == Some(name));
        found.and_then(|pair| text(&pair[1])).unwrap_or_default()
    }

    /// Zero if the field is missing.
    fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap_or_default()
    }

    fn replica(&self) -> SentinelReplica {
        let flags = self.text("flags");
        SentinelReplica {
            server: host_label(&self.text("ip"), self.text("port")),
            is_down: flags.contains("down") || flags.contains("disconnected"),
            can_be_promoted: self.number("slave-priority") > 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_fields_are_read_leniently() {
        let reply = redis::parse_redis_value(
            b"*2\r\n*8\r\n$2\r\nip\r\n$2\r\n::\r\n$4\r\nport\r\n$1\r\n7\r\n$5\r\nflags\r\n\
              $12\r\nslave,s_down\r\n$14\r\nslave-priority\r\n$1\r\n0\r\n*1\r\n$2\r\nip\r\n",
        );
        let reply = reply.unwrap();
        let replicas: Vec<_> = rows(&reply).map(|row| row.replica()).collect();
        let server = "[::]:7".to_owned();
        let down = SentinelReplica { server, is_down: true, can_be_promoted: false };
        assert_eq!(replicas[0], down);
        assert_eq!((replicas[1].server.as_str(), replicas[1].can_be_promoted), (":", false));
        assert_eq!(rows(&Value::Nil).count(), 0);
    }
}
