//! The threads that ask the servers, so that the screen never waits for them: one looks at all locks again and again,
//! one asks about single locks and releases them.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use distlock::{LockError, LockInfo, RedisMgr, Released, Vote};

use crate::{
    clock,
    exit::Failure,
    text::clean,
    top::{
        detail::Detail,
        history::{History, Picture, Sight},
        rows::who,
    },
};

/// How a look at all locks ended.
#[derive(Debug)]
pub(crate) enum Look {
    Seen(Picture),
    /// The servers could not be asked; they may be back at the next look.
    Failed {
        why: String,
        at: Instant,
    },
    /// What was asked for cannot work.
    Wrong(Failure),
}

/// How often to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) interval: Duration,
    pub(crate) paused: bool,
}

/// What the thread that looks is told.
#[derive(Clone, Copy, Debug)]
enum Word {
    Pace(Pace),
    Now,
}

/// What is asked about one lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Inspect {
        name: String,
    },
    /// From the holder with this identifier, and from nobody else.
    Release {
        name: String,
        id: String,
    },
}

/// The answer to it.
#[derive(Debug)]
pub(crate) enum Told {
    Inspected { name: String, answer: Result<Option<Detail>, String> },
    Released { name: String, answer: Result<Freed, String> },
}

/// How a release ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Yes,
    /// Nobody held it any more.
    Gone,
    /// Somebody else holds it, and was left alone.
    Other(String),
}

/// The hand on both threads, which end when it is dropped, or with the process.
#[derive(Debug)]
pub(crate) struct Feed {
    pub(crate) looks: Receiver<Look>,
    pub(crate) told: Receiver<Told>,
    words: Sender<Word>,
    asks: Sender<Ask>,
}

impl Feed {
    pub(crate) fn start(mgr: &RedisMgr, pattern: &str, pace: Pace) -> io::Result<Feed> {
        let (words, heard) = unbounded();
        let (asks, asked) = unbounded();
        // One at a time: who does not fetch a look gets no further one.
        let (look, looks) = bounded(0);
        let (tell, told) = unbounded();
        let looker = Looker { mgr: mgr.clone(), pattern: pattern.to_owned(), pace, words: heard, looks: look };
        thread::Builder::new().name("distlock-look".into()).spawn(move || looker.run())?;
        let mgr = mgr.clone();
        thread::Builder::new().name("distlock-ask".into()).spawn(move || {
            for ask in asked {
                if tell.send(answer(&mgr, ask)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Feed { looks, told, words, asks })
    }

    // A thread that is gone has ended the process, or is about to.

    pub(crate) fn pace(&self, pace: Pace) {
        let _ = self.words.send(Word::Pace(pace));
    }

    pub(crate) fn look_now(&self) {
        let _ = self.words.send(Word::Now);
    }

    pub(crate) fn ask(&self, ask: Ask) {
        let _ = self.asks.send(ask);
    }
}

struct Looker {
    mgr: RedisMgr,
    pattern: String,
    pace: Pace,
    words: Receiver<Word>,
    looks: Sender<Look>,
}

impl Looker {
    fn run(mut self) {
        let mut history = History::default();
        loop {
            let started = clock::now();
            let look = self.look(&mut history, started);
            let ended = clock::now();
            if self.looks.send(look).is_err() || !self.wait(started, ended) {
                return;
            }
        }
    }

    fn look(&self, history: &mut History, started: Instant) -> Look {
        match self.mgr.locks(&self.pattern) {
            Ok(locks) => {
                let now = clock::now();
                let mut picture = history.digest(now, locks.iter().map(sight));
                picture.took = now.saturating_duration_since(started);
                picture.silent = silent(&locks);
                Look::Seen(picture)
            }
            Err(error) if error.is_invalid() => Look::Wrong(error.into()),
            Err(error) => Look::Failed { why: clean(&error.to_string()), at: clock::now() },
        }
    }

    /// Until the next look is due; false when there is none to be.
    fn wait(&mut self, started: Instant, ended: Instant) -> bool {
        loop {
            let word = if self.pace.paused {
                self.words.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                let rest = rest(self.pace.interval, ended - started, clock::now() - ended);
                self.words.recv_timeout(rest)
            };
            match word {
                Ok(Word::Pace(pace)) => {
                    let resumed = self.pace.paused && !pace.paused;
                    self.pace = pace;
                    if resumed {
                        return true;
                    }
                }
                Ok(Word::Now) | Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }
}

/// How long to wait before the next look. Servers that are slow to answer are left alone for as long as they took.
fn rest(interval: Duration, took: Duration, ago: Duration) -> Duration {
    interval.saturating_sub(took).max(took).saturating_sub(ago)
}

fn sight(lock: &LockInfo) -> Sight<'_> {
    let holder = lock.holder();
    Sight {
        name: lock.name(),
        id: holder.id(),
        host: holder.host(),
        pid: holder.pid(),
        age: holder.held_for(),
        left: holder.ttl_left(),
        waiting: lock.waiting(),
        token: lock.fencing_token().map(u64::from),
        certain: lock.is_certain(),
    }
}

/// Nodes that did not answer, as far as the locks tell.
fn silent(locks: &[LockInfo]) -> Vec<String> {
    let nodes = locks.last().map_or(&[][..], |lock| lock.holder().nodes());
    nodes.iter().filter(|node| node.vote == Vote::Unknown).map(|node| clean(&node.to_string())).collect()
}

fn answer(mgr: &RedisMgr, ask: Ask) -> Told {
    let said = |error: LockError| clean(&error.to_string());
    match ask {
        Ask::Inspect { name } => {
            let answer = mgr.lock_info(&name).map(|lock| lock.as_ref().map(Detail::of)).map_err(said);
            Told::Inspected { name, answer }
        }
        Ask::Release { name, id } => {
            let answer = match mgr.force_release_if(&name, &id) {
                Ok(Released::Released) => Ok(Freed::Yes),
                Ok(Released::Gone) => Ok(Freed::Gone),
                Ok(Released::OwnedByOther(by)) => Ok(Freed::Other(who(by.host(), by.pid(), by.id()))),
                Err(error) => Err(said(error)),
            };
            Told::Released { name, answer }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_servers_are_not_asked_all_the_time() {
        let [zero, second, minute] = [0, 1, 60].map(Duration::from_secs);
        assert_eq!(rest(minute, second, zero), 59 * second);
        assert_eq!(rest(second, 5 * second, zero), 5 * second);
        assert_eq!(rest(second, 5 * second, 4 * second), second);
        assert_eq!(rest(second, second, 2 * second), zero);
        assert_eq!(rest(second, second / 4, zero), second - second / 4);
    }
}
