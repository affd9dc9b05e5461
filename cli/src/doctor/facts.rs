//! `Facts`: what the servers replied, before it is judged.

use std::{collections::HashMap, time::Duration};

use distlock::SentinelView;

use crate::secrets::Secrets;

/// All facts.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) requirements: Requirements,
    pub(crate) nodes: Vec<NodeFacts>,
    /// `None` if too few nodes are reachable to try a hand-over.
    pub(crate) handover: Option<Result<Handover, String>>,
}

/// What the servers must be fit for.
#[derive(Clone, Debug)]
pub(crate) struct Requirements {
    /// The shortest ttl in use.
    pub(crate) ttl: Duration,
    pub(crate) nodes: usize,
    /// How long a node that may have lost its data must not vote; zero if there is no quarantine.
    pub(crate) quarantine: Duration,
    pub(crate) prefix: String,
}

/// The facts of one server.
#[derive(Debug)]
pub(crate) struct NodeFacts {
    pub(crate) server: String,
    /// The user of the login.
    pub(crate) user: String,
    pub(crate) contact: Contact,
    /// In ascending order.
    pub(crate) round_trips: Vec<Duration>,
    pub(crate) clock_offset: Option<ClockOffset>,
    pub(crate) info: Queried<Info>,
    /// The operator declared that the server's present run has lost no data.
    pub(crate) declared_new: bool,
    pub(crate) appendfsync: Queried<String>,
    /// `no-appendfsync-on-rewrite`, which makes an exception to `appendfsync`.
    pub(crate) no_fsync_on_rewrite: Queried<String>,
    pub(crate) timeout: Queried<String>,
    /// Keys of locks that do not begin with our prefix, as far as they were seen.
    pub(crate) locks_elsewhere: Vec<String>,
    pub(crate) permissions: Permissions,
}

/// A sentinel, and what it says.
#[derive(Debug)]
pub(crate) struct AskedSentinel {
    pub(crate) sentinel: String,
    pub(crate) is_in_url: bool,
    pub(crate) view: Result<SentinelView, String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Contact {
    Reachable,
    /// The server runs, but refuses the login or the first requests.
    Refused {
        code: String,
        message: String,
        /// What the library advises.
        advice: &'static str,
    },
    Unreachable(String),
}

/// How far a server's clock is ahead of ours, and the error of that measurement, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockOffset {
    pub(crate) ahead_us: i64,
    pub(crate) error_us: i64,
}

/// A value that the server may not reveal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Queried<T> {
    Known(T),
    /// The user lacks the permission.
    Denied,
    /// The server does not know, for this reason.
    Unsupported(String),
}

/// The permissions that the user lacks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Permissions {
    pub(crate) missing: Vec<String>,
    /// Those that cannot be tested while others are missing.
    pub(crate) untested: Vec<String>,
}

/// The times of handing a lock from one thread to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handover {
    /// Acquiring a free lock.
    pub(crate) acquire: Duration,
    /// From just before the release until the waiter has the lock.
    pub(crate) handover: Duration,
}

/// The fields of `INFO`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Info {
    fields: HashMap<String, String>,
    secrets: Secrets,
}

impl Info {
    pub(crate) fn parse(text: &str, secrets: &Secrets) -> Info {
        let pairs = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        let fields = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Info { fields, secrets: secrets.clone() }
    }

    /// The value as sent by the server, for checks but not for messages.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// The value made fit for a message.
    pub(crate) fn redacted(&self, name: &str) -> Option<String> {
        self.get(name).map(|value| self.secrets.redact(value))
    }

    /// Zero if the field is missing.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
    }
}

impl NodeFacts {
    pub(crate) fn info(&self) -> Option<&Info> {
        match &self.info {
            Queried::Known(info) => Some(info),
            _ => None,
        }
    }

    /// How long a client that connects now does not count the node's vote; `None` if it does. By
    /// the rule of the library, which takes one second off the uptime.
    pub(crate) fn quarantine_left(&self, quarantine: Duration) -> Option<Duration> {
        let info = self.info()?;
        let age = if self.is_promoted() {
            // It does not report since when it is a master.
            Duration::ZERO
        } else if self.declared_new {
            quarantine
        } else {
            Duration::from_secs(info.number("uptime_in_seconds").saturating_sub(1))
        };
        Some(quarantine.saturating_sub(age)).filter(|left| !left.is_zero())
    }

    /// The server was a replica earlier in this run.
    pub(crate) fn is_promoted(&self) -> bool {
        let followed = self.info().and_then(|info| info.get("master_replid2"));
        followed.is_some_and(|id| id.bytes().any(|byte| byte != b'0'))
    }

    pub(crate) fn worst_round_trip(&self) -> Duration {
        self.round_trips.last().copied().unwrap_or_default()
    }

    pub(crate) fn best_round_trip(&self) -> Duration {
        self.round_trips.first().copied().unwrap_or_default()
    }

    pub(crate) fn median_round_trip(&self) -> Duration {
        self.round_trips.get(self.round_trips.len() / 2).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_parsed_leniently() {
        let info = Info::parse(
            "# Server\r\nrun_id:abc\r\nuptime:17\r\nos:Linux 6 a:b\r\n\r\nnonsense\r\n",
            &Secrets::default(),
        );
        assert_eq!(
            (info.get("run_id"), info.get("os"), info.get("nonsense")),
            (Some("abc"), Some("Linux 6 a:b"), None)
        );
        assert_eq!((info.number("uptime"), info.number("os"), info.number("missing")), (17, 0, 0));
    }
}
