//! The threads that query the servers, so that the screen never waits for them. One polls all
//! locks, the other inspects and releases single locks.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use distlock::{LockError, LockInfo, RedisMgr, Released, Vote};

use crate::{
    clock,
    exit::Failure,
    format::{escape, with_option_names},
    release_each::{EachRelease, release_each},
    top::{
        detail::LockDetail,
        history::{History, TableData},
        rows::{Row, holder_name},
    },
};

/// The result of one poll of all locks.
#[derive(Debug)]
pub(crate) enum PollResult {
    Table(TableData),
    /// The servers could not be queried. A later poll may succeed.
    Failed {
        why: String,
        at: Instant,
    },
    /// The request is invalid, so no later poll can succeed.
    Invalid(Failure),
}

/// How often to poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PollRate {
    pub(crate) interval: Duration,
    pub(crate) paused: bool,
}

/// A command to the polling thread.
#[derive(Clone, Copy, Debug)]
enum PollCommand {
    Rate(PollRate),
    Now,
}

/// A request about one lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Inspect {
        name: String,
    },
    /// Release the lock, as far as its holders have these ids.
    Release {
        name: String,
        ids: Vec<String>,
    },
}

/// The result of a [`Query`].
#[derive(Debug)]
pub(crate) enum QueryResult {
    Inspected { name: String, result: Result<Option<Box<LockDetail>>, String> },
    Released { name: String, result: Result<ReleaseResult, String> },
}

/// How a release ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReleaseResult {
    Released,
    /// The lock is still held by some of its holders, because a request failed.
    Partly {
        released: usize,
        of: usize,
        why: String,
    },
    /// The lock was not held any more.
    Gone,
    /// Another client holds the lock and keeps it.
    HeldByOther(String),
}

/// Controls both threads, which end when it is dropped.
#[derive(Debug)]
pub(crate) struct Poller {
    pub(crate) poll_results: Receiver<PollResult>,
    pub(crate) query_results: Receiver<QueryResult>,
    commands: Sender<PollCommand>,
    queries: Sender<Query>,
}

impl Poller {
    pub(crate) fn start(mgr: &RedisMgr, pattern: &str, rate: PollRate) -> io::Result<Poller> {
        let (commands, received_commands) = unbounded();
        let (queries, received_queries) = unbounded();
        // Without a buffer, so that no poll starts before the result of the last one is taken.
        let (result_sender, poll_results) = bounded(0);
        let poll_thread = PollThread {
            mgr: mgr.clone(),
            pattern: pattern.to_owned(),
            rate,
            commands: received_commands,
            poll_results: result_sender,
        };
        thread::Builder::new().name("distlock-poll".into()).spawn(move || poll_thread.run())?;
        let (result_sender, query_results) = unbounded();
        let mgr = mgr.clone();
        thread::Builder::new().name("distlock-query".into()).spawn(move || {
            for query in received_queries {
                if result_sender.send(run_query(&mgr, query)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Poller { poll_results, query_results, commands, queries })
    }

    // Sending fails only if the thread has panicked, which ends the process.

    pub(crate) fn set_rate(&self, rate: PollRate) {
        let _ = self.commands.send(PollCommand::Rate(rate));
    }

    pub(crate) fn poll_now(&self) {
        let _ = self.commands.send(PollCommand::Now);
    }

    pub(crate) fn query(&self, query: Query) {
        let _ = self.queries.send(query);
    }
}

struct PollThread {
    mgr: RedisMgr,
    pattern: String,
    rate: PollRate,
    commands: Receiver<PollCommand>,
    poll_results: Sender<PollResult>,
}

impl PollThread {
    fn run(mut self) {
        let mut history = History::default();
        loop {
            let started = clock::now();
            let result = self.poll(&mut history, started);
            let ended = clock::now();
            if self.poll_results.send(result).is_err() || !self.wait_until_due(started, ended) {
                return;
            }
        }
    }

    fn poll(&self, history: &mut History, started: Instant) -> PollResult {
        match self.mgr.locks(&self.pattern) {
            Ok(locks) => {
                let now = clock::now();
                let mut data = history.update(now, locks.iter().map(Row::of).collect());
                data.poll_time = now.saturating_duration_since(started);
                data.silent_nodes = silent_nodes(&locks);
                PollResult::Table(data)
            }
            Err(error) if error.is_invalid() => PollResult::Invalid(error.into()),
            Err(error) => PollResult::Failed {
                why: escape(&with_option_names(&error.to_string())),
                at: clock::now(),
            },
        }
    }

    /// Waits until the next poll is due. Returns false if there will be none.
    fn wait_until_due(&mut self, started: Instant, ended: Instant) -> bool {
        loop {
            let command = if self.rate.paused {
                self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                let delay = delay(self.rate.interval, ended - started, clock::now() - ended);
                self.commands.recv_timeout(delay)
            };
            match command {
                Ok(PollCommand::Rate(rate)) => {
                    let resumed = self.rate.paused && !rate.paused;
                    self.rate = rate;
                    if resumed {
                        return true;
                    }
                }
                Ok(PollCommand::Now) | Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }
}

/// Time until the next poll. If a poll takes longer than the interval, the pause is as long as the
/// poll, to spare slow servers.
fn delay(interval: Duration, took: Duration, ago: Duration) -> Duration {
    interval.saturating_sub(took).max(took).saturating_sub(ago)
}

/// Nodes that did not reply, according to the last lock of the list.
fn silent_nodes(locks: &[LockInfo]) -> Vec<String> {
    let nodes = locks.last().map_or(&[][..], |lock| lock.holder().nodes());
    nodes
        .iter()
        .filter(|node| node.vote == Vote::Unknown)
        .map(|node| escape(&node.to_string()))
        .collect()
}

fn run_query(mgr: &RedisMgr, query: Query) -> QueryResult {
    let to_text = |error: LockError| escape(&with_option_names(&error.to_string()));
    match query {
        Query::Inspect { name } => {
            let result = mgr
                .lock_info(&name)
                .map(|lock| lock.as_ref().map(LockDetail::of).map(Box::new))
                .map_err(to_text);
            QueryResult::Inspected { name, result }
        }
        Query::Release { name, ids } => {
            let EachRelease { outcomes, error } =
                release_each(mgr, &name, ids.iter().map(String::as_str));
            let result = to_release_result(&outcomes, error.map(to_text), ids.len());
            QueryResult::Released { name, result }
        }
    }
}

/// The result of the releases for all holders, of which there are `of`.
fn to_release_result(
    outcomes: &[Released],
    error: Option<String>,
    of: usize,
) -> Result<ReleaseResult, String> {
    let released = outcomes.iter().filter(|outcome| **outcome == Released::Released).count();
    match (error, outcomes.last()) {
        (Some(why), _) if released == 0 => Err(why),
        (Some(why), _) => Ok(ReleaseResult::Partly { released, of, why }),
        _ if released > 0 => Ok(ReleaseResult::Released),
        (None, Some(Released::OwnedByOther(by))) => {
            Ok(ReleaseResult::HeldByOther(holder_name(by.host(), by.pid(), by.id())))
        }
        _ => Ok(ReleaseResult::Gone),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_servers_are_polled_less_often() {
        let [zero, second, minute] = [0, 1, 60].map(Duration::from_secs);
        assert_eq!(delay(minute, second, zero), 59 * second);
        assert_eq!(delay(second, 5 * second, zero), 5 * second);
        assert_eq!(delay(second, 5 * second, 4 * second), second);
        assert_eq!(delay(second, second, 2 * second), zero);
        assert_eq!(delay(second, second / 4, zero), second - second / 4);
    }
}
