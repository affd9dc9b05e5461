//! `Facts`: what has been found out about the servers, before anybody judges it.

use std::{collections::HashMap, time::Duration};

use crate::secrets::Secrets;

/// Everything.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) aims: Aims,
    pub(crate) nodes: Vec<Node>,
    /// `None` where too few nodes answer to try.
    pub(crate) trial: Option<Result<Handover, String>>,
}

/// What the servers are to be good for.
#[derive(Clone, Debug)]
pub(crate) struct Aims {
    /// The shortest time to live in use.
    pub(crate) ttl: Duration,
    pub(crate) nodes: usize,
    /// How long a node that may have forgotten does not vote; zero for not at all.
    pub(crate) quarantine: Duration,
    pub(crate) prefix: String,
}

/// One server.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) server: String,
    pub(crate) contact: Contact,
    /// Sorted.
    pub(crate) round_trips: Vec<Duration>,
    pub(crate) clock: Option<Clock>,
    pub(crate) info: Told<Info>,
    pub(crate) appendfsync: Told<String>,
    /// `no-appendfsync-on-rewrite`, which makes exceptions to that.
    pub(crate) no_fsync_on_rewrite: Told<String>,
    pub(crate) timeout: Told<String>,
    pub(crate) rights: Rights,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Contact {
    Answers,
    /// It is there, and does not let us in.
    Refuses {
        code: String,
        message: String,
    },
    Away(String),
}

/// How far a server's clock is ahead of ours, in microseconds, give or take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Clock {
    pub(crate) ahead_us: i64,
    pub(crate) unsure_us: i64,
}

/// What may be kept from us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told<T> {
    Yes(T),
    /// We lack the right to ask.
    Denied,
    /// The server has no answer, and why.
    No(String),
}

/// Which rights are missing.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) missing: Vec<String>,
    /// Could not be tried without those.
    pub(crate) untried: Vec<&'static str>,
}

/// A lock was handed from one thread to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handover {
    /// Taking a free lock.
    pub(crate) acquire: Duration,
    /// From the moment before the release until the next one had it.
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

    /// As the server has it: to be judged, and not to be told.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// The same, fit for a sentence.
    pub(crate) fn told(&self, name: &str) -> Option<String> {
        self.get(name).map(|value| self.secrets.quote(value))
    }

    /// Zero for what is not told.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
    }
}

impl Node {
    pub(crate) fn info(&self) -> Option<&Info> {
        match &self.info {
            Told::Yes(info) => Some(info),
            _ => None,
        }
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
    fn info_is_read_whatever_it_says() {
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
