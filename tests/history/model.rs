//! The model that rules check, built from a record: which thread held which lock and when, and the
//! waits, calls and faults. Pure.

use std::collections::HashMap;

use super::{
    event::{Event, Fault, Said, Terms, UNREPORTED},
    record::Record,
    rules::intervals::union,
    sharing::Sharing,
};

/// The time for which one thread held a lock, as far as the thread could know.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) token: u64,
    pub(crate) id: String,
    pub(crate) sharing: Sharing,
    /// When the thread was about to turn its write lock into a read lock.
    pub(crate) downgraded: Option<u64>,
    /// When the thread began to acquire it.
    pub(crate) asked: u64,
    pub(crate) from: u64,
    /// When the thread could no longer consider the lock held.
    pub(crate) until: u64,
    pub(crate) end: End,
    /// When `is_held()` returned true, and the deadline at that time.
    pub(crate) looks: Vec<(u64, u64)>,
}

impl Hold {
    /// Until when nobody may hold the lock beside this holder and `other`; `None` if both may.
    pub(crate) fn excludes_until(&self, other: &Hold) -> Option<u64> {
        let both = self.until.min(other.until);
        let writer_until = |writer: &Hold, reader: &Hold| match reader.sharing {
            Sharing::Read => writer.downgraded,
            _ => None,
        };
        let downgraded = writer_until(self, other).or_else(|| writer_until(other, self));
        let is_shared = self.sharing.is_shared_with(other.sharing);
        (!is_shared).then(|| both.min(downgraded.unwrap_or(u64::MAX)))
    }

    /// Whether nobody may hold the lock beside this holder, at any time.
    pub(crate) fn is_alone(&self) -> bool {
        self.sharing.is_alone() && self.downgraded.is_none()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Left,
    Lost,
    Killed,
    /// The record ends before the hold does.
    Open,
}

impl End {
    pub(crate) fn word(self) -> &'static str {
        match self {
            End::Left => "left",
            End::Lost => "lost",
            End::Killed => "killed",
            End::Open => "?",
        }
    }
}

/// The time for which one thread tried to acquire a lock.
#[derive(Clone, Debug)]
pub(crate) struct Wait {
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) from: u64,
    /// When it acquired the lock, failed to, or was killed.
    pub(crate) until: u64,
    pub(crate) sharing: Sharing,
    pub(crate) entered: bool,
    /// Why the lock was not acquired.
    pub(crate) why: Option<String>,
    /// The process was stopped during the wait.
    pub(crate) stopped: bool,
}

/// A call of the library.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) what: String,
    pub(crate) from: u64,
    pub(crate) until: u64,
    pub(crate) bound: Option<u64>,
    /// Nanoseconds for which the thread waited for a processor, as counted by the system.
    pub(crate) delayed: u64,
    /// The call did not return because the process was killed.
    pub(crate) killed: bool,
}

/// A request to the fenced resource.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) at: u64,
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) token: u64,
    /// `None` if the request only showed the token.
    pub(crate) value: Option<u64>,
    pub(crate) accepted: bool,
    /// The writer knew that it had lost the lock.
    pub(crate) late: bool,
}

/// A fault of a server or of the network, and when it lasted.
#[derive(Clone, Debug)]
pub(crate) struct FaultPeriod {
    pub(crate) fault: Fault,
    /// Zero if it affects all locks.
    pub(crate) lock: u32,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

/// The replies of all nodes about a lock.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) lock: u32,
    pub(crate) from: u64,
    pub(crate) until: u64,
    pub(crate) said: Vec<Said>,
}

#[derive(Debug, Default)]
pub(crate) struct Story {
    pub(crate) terms: Terms,
    /// The process that started the others and injected the faults.
    pub(crate) parent: u32,
    pub(crate) start: u64,
    pub(crate) end: u64,
    // The following lists are sorted by start.
    pub(crate) holds: Vec<Hold>,
    pub(crate) waits: Vec<Wait>,
    pub(crate) calls: Vec<Call>,
    pub(crate) faults: Vec<FaultPeriod>,
    pub(crate) seen: Vec<Seen>,
    /// In the order in which the resource received them.
    pub(crate) writes: Vec<Write>,
    /// Process, start and end.
    pub(crate) stops: Vec<(u32, u64, u64)>,
    pub(crate) kills: Vec<(u32, u64)>,
    /// When each process waited for a processor or was stopped; the intervals do not overlap.
    pub(crate) late: HashMap<u32, Vec<(u64, u64)>>,
    pub(crate) leaks: Vec<(u64, u32, String)>,
    pub(crate) failures: Vec<(u64, u32, String)>,
    /// Processes that the parent was about to kill, and when.
    pub(crate) doomed: HashMap<u32, u64>,
    /// Locks that were reported as held after they had been reported as lost: time, seat and lock.
    pub(crate) held_after_loss: Vec<(u64, u32, u32)>,
    /// Waits whose guard had already lost its lock when `lock()` returned.
    pub(crate) lost_on_arrival: Vec<Wait>,
    pub(crate) losses: usize,
    /// Losses that the guard's channel did not report: time, seat and lock.
    pub(crate) unreported_losses: Vec<(u64, u32, u32)>,
    /// Number of acquisitions that failed.
    pub(crate) again: usize,
    pub(crate) records: usize,
    /// All seats, and the number of processes that had them.
    pub(crate) seats: Vec<u32>,
    pub(crate) processes: usize,
    pub(crate) planned: u32,
    /// Seats that finished all their rounds.
    pub(crate) finished: Vec<u32>,
}

/// The state of one thread while the records are read.
#[derive(Default)]
struct Thread {
    wait: Option<Wait>,
    call: Option<Call>,
    hold: Option<Hold>,
    sharing: Sharing,
    knows_loss: bool,
}

impl Story {
    pub(crate) fn of(records: &[Record]) -> Story {
        let ends = || records.iter().map(|record| record.at);
        let mut story = Story {
            start: ends().min().unwrap_or(0),
            end: ends().max().unwrap_or(0),
            records: records.len(),
            ..Story::default()
        };
        let mut threads: HashMap<(u32, u32), Thread> = HashMap::new();
        for record in records {
            story.apply(&mut threads, record);
        }
        let mut pids: Vec<u32> = threads.keys().map(|(pid, _)| *pid).collect();
        for list in [&mut pids, &mut story.seats, &mut story.finished] {
            list.sort_unstable();
            list.dedup();
        }
        story.processes = pids.len();
        let end = story.end;
        for thread in threads.into_values() {
            story.close(thread, End::Open, end);
        }
        for stop in &mut story.stops {
            stop.2 = stop.2.min(end);
        }
        for (pid, from, until) in &story.stops {
            // A process that is killed while it is stopped cannot record its lateness.
            story.late.entry(*pid).or_default().push((*from, *until));
        }
        for late in story.late.values_mut() {
            *late = union(std::mem::take(late));
        }
        story.holds.sort_by_key(|hold| hold.from);
        story.waits.sort_by_key(|wait| wait.from);
        story.calls.sort_by_key(|call| call.from);
        story.seen.sort_by_key(|seen| seen.from);
        story
    }

    fn apply(&mut self, threads: &mut HashMap<(u32, u32), Thread>, record: &Record) {
        let Record { at, seat, lock, pid, ref event } = *record;
        match event {
            Event::Plan { children } => return self.planned = *children,
            Event::Terms(terms) => return (self.terms, self.parent) = (*terms, pid),
            Event::Node { .. } => return,
            Event::Fault(fault) => {
                let period = FaultPeriod { fault: *fault, lock, from: at, until: u64::MAX };
                return self.faults.push(period);
            }
            Event::Over { number } => {
                let ended =
                    self.faults.iter_mut().rev().find(|period| period.fault.number == *number);
                return ended.into_iter().for_each(|period| period.until = at);
            }
            Event::Seen { began, said } => {
                return self.seen.push(Seen { lock, from: *began, until: at, said: said.clone() });
            }
            Event::Late { by } => {
                return self.late.entry(pid).or_default().push((at.saturating_sub(*by), at));
            }
            Event::Leak { what } => return self.leaks.push((at, pid, what.clone())),
            Event::Failed { why } => return self.failures.push((at, seat, why.clone())),
            Event::Doomed => {
                self.doomed.insert(pid, at);
                // Its calls need not return from now on. But it may hold locks until it has ended.
                let doomed = threads.iter_mut().filter(|((of, _), _)| *of == pid);
                let calls = doomed.filter_map(|(_, thread)| thread.call.take());
                return self.calls.extend(calls.map(|call| Call {
                    until: at,
                    killed: true,
                    ..call
                }));
            }
            Event::Killed => {
                self.kills.push((pid, at));
                self.end_stop(pid, at);
                let dead: Vec<_> = threads.iter_mut().filter(|((of, _), _)| *of == pid).collect();
                let dead: Vec<_> =
                    dead.into_iter().map(|(_, thread)| std::mem::take(thread)).collect();
                let doomed = self.doomed.get(&pid).copied().filter(|_| self.terms.is_database);
                return dead.into_iter().for_each(|mut thread| {
                    // A database grants its locks before the parent knows that it has ended.
                    if let (Some(hold), Some(doomed)) = (&thread.hold, doomed) {
                        let seen = hold.looks.last().map_or(hold.from, |(seen, _)| *seen);
                        self.end_hold(thread.hold.take(), End::Killed, doomed.max(seen));
                    }
                    self.close(thread, End::Killed, at);
                });
            }
            Event::Stopped => {
                self.stops.push((pid, at, u64::MAX));
                let waits = threads.iter_mut().filter(|((of, _), _)| *of == pid);
                return waits
                    .filter_map(|(_, thread)| thread.wait.as_mut())
                    .for_each(|wait| wait.stopped = true);
            }
            Event::Continued => return self.end_stop(pid, at),
            _ => {}
        }
        self.seats.push(seat);
        let thread = threads.entry((pid, seat)).or_default();
        match event {
            Event::Wait => {
                (thread.knows_loss, thread.sharing) = (false, Sharing::Mutex);
                let stopped = self.stops.iter().any(|stop| stop.0 == pid && stop.2 == u64::MAX);
                thread.wait = Some(Wait {
                    seat,
                    pid,
                    lock,
                    from: at,
                    until: at,
                    sharing: Sharing::Mutex,
                    entered: false,
                    why: None,
                    stopped,
                });
            }
            Event::As { sharing } => {
                thread.sharing = *sharing;
                thread.wait.iter_mut().for_each(|wait| wait.sharing = *sharing);
            }
            Event::Downgrade => {
                if let Some(hold) = &mut thread.hold {
                    hold.downgraded = Some(at);
                }
            }
            Event::Enter { deadline, token, id } => {
                let asked = self.end_wait(thread, at, None);
                thread.hold = Some(Hold {
                    seat,
                    pid,
                    lock,
                    token: *token,
                    id: id.clone(),
                    sharing: thread.sharing,
                    downgraded: None,
                    asked: asked.unwrap_or(at),
                    from: at,
                    until: at,
                    end: End::Open,
                    looks: vec![(at, *deadline)],
                });
            }
            Event::Look { deadline } => match &mut thread.hold {
                Some(hold) => hold.looks.push((at, *deadline)),
                None => self.held_after_loss.extend(thread.knows_loss.then_some((at, seat, lock))),
            },
            Event::Lost { why } => {
                self.losses += 1;
                self.unreported_losses.extend((why == UNREPORTED).then_some((at, seat, lock)));
                thread.knows_loss = true;
                // A thread that still waits had lost the lock before `lock()` returned.
                self.lost_on_arrival
                    .extend(thread.wait.clone().map(|wait| Wait { until: at, ..wait }));
                self.end_wait(thread, at, None);
                self.end_hold(thread.hold.take(), End::Lost, at);
            }
            Event::Leave => self.end_hold(thread.hold.take(), End::Left, at),
            Event::Again { why } => {
                self.again += 1;
                self.end_wait(thread, at, Some(why.clone()));
            }
            Event::Met { token } => self.writes.push(Write {
                at,
                seat,
                pid,
                lock,
                token: *token,
                value: None,
                accepted: true,
                late: thread.knows_loss,
            }),
            Event::Write { token, value, accepted } => self.writes.push(Write {
                at,
                seat,
                pid,
                lock,
                token: *token,
                value: Some(*value),
                accepted: *accepted,
                late: thread.knows_loss,
            }),
            Event::Call { what, bound } => {
                let (what, bound) = (what.clone(), *bound);
                let delayed = 0;
                thread.call = Some(Call {
                    seat,
                    pid,
                    lock,
                    what,
                    from: at,
                    until: at,
                    bound,
                    delayed,
                    killed: false,
                });
            }
            Event::Back { delayed } => {
                if let Some(call) = thread.call.take() {
                    self.calls.push(Call { until: at, delayed: *delayed, ..call });
                }
            }
            Event::Done => self.finished.push(seat),
            _ => {}
        }
    }

    fn end_stop(&mut self, pid: u32, at: u64) {
        let open = self.stops.iter_mut().rev().find(|stop| stop.0 == pid && stop.2 == u64::MAX);
        open.into_iter().for_each(|stop| stop.2 = at);
    }

    fn end_wait(&mut self, thread: &mut Thread, at: u64, why: Option<String>) -> Option<u64> {
        let wait = thread.wait.take()?;
        let asked = wait.from;
        self.waits.push(Wait { until: at, entered: why.is_none(), why, ..wait });
        Some(asked)
    }

    /// A hold ends with the event at `at`, but not later than the last known deadline, and not
    /// earlier than the last time `is_held()` returned true.
    fn end_hold(&mut self, hold: Option<Hold>, end: End, at: u64) {
        if let Some(mut hold) = hold {
            let (seen, deadline) = hold.looks.last().copied().unwrap_or((hold.from, hold.from));
            hold.until = at.min(seen.max(deadline));
            hold.end = end;
            self.holds.push(hold);
        }
    }

    fn close(&mut self, thread: Thread, end: End, at: u64) {
        // If the record just ends, assume that the thread held the lock until its deadline.
        self.end_hold(thread.hold, end, if end == End::Open { u64::MAX } else { at });
        self.waits.extend(thread.wait.map(|wait| Wait { until: at, ..wait }));
        let killed = end == End::Killed;
        self.calls.extend(thread.call.map(|call| Call { until: at, killed, ..call }));
    }

    /// How long the process waited for a processor, or was stopped, between `from` and `until`.
    pub(crate) fn lateness(&self, pid: u32, from: u64, until: u64) -> u64 {
        let Some(late) = self.late.get(&pid) else { return 0 };
        // The intervals are sorted and do not overlap.
        let first = late.partition_point(|(_, end)| *end <= from);
        let within = late[first..].iter().take_while(|(begin, _)| *begin < until);
        within.map(|(begin, end)| (*end).min(until) - (*begin).max(from)).sum()
    }

    /// Returns the faults that excuse a hold that lasted until `until`, although the server did not
    /// have the lock any more or granted it to another thread. There must be a single server, which
    /// lost the lock after it had been `asked` for and before the other thread `got` it. And a
    /// lease from before the fault must be able to last until `until`.
    pub(crate) fn excuses(
        &self,
        lock: u32,
        asked: u64,
        got: u64,
        until: u64,
    ) -> impl Iterator<Item = &FaultPeriod> {
        let is_single = self.terms.nodes == 1;
        self.faults.iter().filter(move |period| {
            is_single
                && period.fault.kind.is_amnesia(self.terms.is_database)
                && (period.lock == 0 || period.lock == lock)
                && period.until >= asked
                && period.from <= got
                && until <= period.until.saturating_add(self.terms.ttl)
        })
    }

    /// Formats a time for reports, relative to the start of the record.
    pub(crate) fn clock(&self, at: u64) -> String {
        format!("{:.3} s", at.saturating_sub(self.start) as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    #[test]
    fn stopped_hold_ends_at_the_last_known_deadline() {
        let text = "\
            10 1@1 7 wait\n\
            20 1@1 7 enter 60 5 a\n\
            30 1@1 7 look 70\n\
            40 0 7 stopped\n\
            200 0 7 continued\n\
            210 1@1 7 lost x";
        assert_eq!(story(text).holds[0].until, 70);
    }

    #[test]
    fn hold_reported_after_its_deadline_counts_until_then() {
        assert_eq!(
            story("20 1@1 7 enter 60 5 a\n90 1@1 7 look 60\n95 1@1 7 leave").holds[0].until,
            90
        );
    }

    #[test]
    fn kill_ends_holds_waits_and_calls_of_all_threads() {
        let text = "\
            10 1@1 7 enter 60 5 a\n\
            11 2@2 7 call lock 9\n\
            11 2@2 7 wait\n\
            12 3@1 8 enter 60 6 b\n\
            20 0 7 killed";
        let story = story(text);
        assert_eq!(
            story.holds.iter().map(|hold| hold.end).collect::<Vec<_>>(),
            [End::Killed, End::Open]
        );
        assert_eq!(story.holds[0].until, 20);
        assert!(story.calls[0].killed && !story.waits[0].entered);
    }

    #[test]
    fn lateness_counts_only_within_the_given_interval() {
        let story = story("100 0 7 late 20\n150 0 7 late 10\n300 0 8 late 90");
        assert_eq!(story.lateness(7, 0, 1000), 30);
        assert_eq!(story.lateness(7, 90, 145), 15);
        assert_eq!(story.lateness(7, 100, 140), 0);
    }

    #[test]
    fn stopped_then_killed_process_is_late() {
        let stopped = "\
            100 0 7 stopped\n\
            150 0 7 continued\n\
            155 0 7 late 50\n\
            200 0 7 stopped\n\
            220 0 7 killed\n\
            300 0 8 done";
        assert_eq!(story(stopped).lateness(7, 0, 1000), 55 + 20);
    }
}
