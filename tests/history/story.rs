//! What a record amounts to: who believed in which lock from when until when, who waited, what was
//! called, what was done to whom. Pure.

use std::collections::HashMap;

use super::{
    event::{Event, Fault, Said, Terms, UNTOLD},
    record::Record,
    rules::spans::union,
};

/// One time that somebody had a lock, as it could be known there.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) token: u64,
    pub(crate) id: String,
    /// When it was asked for.
    pub(crate) asked: u64,
    pub(crate) from: u64,
    /// When its belief ended.
    pub(crate) until: u64,
    pub(crate) end: End,
    /// When the guard said yes, and which deadline it showed then.
    pub(crate) looks: Vec<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Left,
    Lost,
    Killed,
    /// The record ends before it.
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

/// One time that somebody wanted a lock.
#[derive(Clone, Debug)]
pub(crate) struct Wait {
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) from: u64,
    /// When it had the lock, gave up, or died.
    pub(crate) until: u64,
    pub(crate) entered: bool,
    /// Why there was no lock.
    pub(crate) why: Option<String>,
    /// Its process was stopped meanwhile.
    pub(crate) stopped: bool,
}

/// One call of the library.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) what: String,
    pub(crate) from: u64,
    pub(crate) until: u64,
    pub(crate) bound: Option<u64>,
    /// For how long its thread waited for a processor, as the system counts it.
    pub(crate) delayed: u64,
    /// It did not return; that is no fault of a process that was killed.
    pub(crate) killed: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) at: u64,
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    pub(crate) lock: u32,
    pub(crate) token: u64,
    /// Nothing for a token that was only shown.
    pub(crate) value: Option<u64>,
    pub(crate) accepted: bool,
    /// By somebody who knew that the lock was lost.
    pub(crate) late: bool,
}

/// Something that was done to a server or to the way to it.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) fault: Fault,
    /// Zero where it is about all.
    pub(crate) lock: u32,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

/// What the nodes said about a lock.
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
    /// The process that did things to all others.
    pub(crate) parent: u32,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// These lists are each in the order of their beginnings.
    pub(crate) holds: Vec<Hold>,
    pub(crate) waits: Vec<Wait>,
    pub(crate) calls: Vec<Call>,
    pub(crate) done: Vec<Done>,
    pub(crate) seen: Vec<Seen>,
    /// What the resource saw, in its order.
    pub(crate) writes: Vec<Write>,
    /// Process, beginning and end.
    pub(crate) stops: Vec<(u32, u64, u64)>,
    pub(crate) kills: Vec<(u32, u64)>,
    /// When each process had asked for a processor, and got one.
    pub(crate) late: HashMap<u32, Vec<(u64, u64)>>,
    pub(crate) leaks: Vec<(u64, u32, String)>,
    pub(crate) failures: Vec<(u64, u32, String)>,
    /// Who was told that a lock was held after having been told that it was not, and when.
    pub(crate) revived: Vec<(u64, u32, u32)>,
    /// Waits for guards that said no at the first look.
    pub(crate) lapsed: Vec<Wait>,
    pub(crate) losses: usize,
    /// Losses of which the guard's channel said nothing: when, whose and of which lock.
    pub(crate) untold: Vec<(u64, u32, u32)>,
    pub(crate) again: usize,
    pub(crate) records: usize,
    /// Those who wanted locks, and the processes that they were.
    pub(crate) seats: Vec<u32>,
    pub(crate) processes: usize,
    pub(crate) planned: u32,
    /// Seats that came to the end of what they were to do.
    pub(crate) finished: Vec<u32>,
}

/// What is known of one thread of one process while its records are read.
#[derive(Default)]
struct Thread {
    wait: Option<Wait>,
    call: Option<Call>,
    hold: Option<Hold>,
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
            story.take(&mut threads, record);
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
            // A process that is killed while it is stopped tells of no lateness.
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

    fn take(&mut self, threads: &mut HashMap<(u32, u32), Thread>, record: &Record) {
        let Record { at, seat, lock, pid, ref event } = *record;
        match event {
            Event::Plan { children } => return self.planned = *children,
            Event::Terms(terms) => return (self.terms, self.parent) = (*terms, pid),
            Event::Node { .. } => return,
            Event::Fault(fault) => {
                return self.done.push(Done { fault: *fault, lock, from: at, until: u64::MAX });
            }
            Event::Over { number } => {
                let over = self.done.iter_mut().rev().find(|done| done.fault.number == *number);
                return over.into_iter().for_each(|done| done.until = at);
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
                // From here on nothing can be asked of it. But it may believe until it is gone.
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
                return dead.into_iter().for_each(|thread| self.close(thread, End::Killed, at));
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
                thread.knows_loss = false;
                let stopped = self.stops.iter().any(|stop| stop.0 == pid && stop.2 == u64::MAX);
                thread.wait = Some(Wait {
                    seat,
                    pid,
                    lock,
                    from: at,
                    until: at,
                    entered: false,
                    why: None,
                    stopped,
                });
            }
            Event::Enter { deadline, token, id } => {
                let asked = self.end_wait(thread, at, None);
                thread.hold = Some(Hold {
                    seat,
                    pid,
                    lock,
                    token: *token,
                    id: id.clone(),
                    asked: asked.unwrap_or(at),
                    from: at,
                    until: at,
                    end: End::Open,
                    looks: vec![(at, *deadline)],
                });
            }
            Event::Look { deadline } => match &mut thread.hold {
                Some(hold) => hold.looks.push((at, *deadline)),
                None => self.revived.extend(thread.knows_loss.then_some((at, seat, lock))),
            },
            Event::Lost { why } => {
                self.losses += 1;
                self.untold.extend((why == UNTOLD).then_some((at, seat, lock)));
                thread.knows_loss = true;
                // It may have been lost before it was ever believed in.
                self.lapsed.extend(thread.wait.clone().map(|wait| Wait { until: at, ..wait }));
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

    /// Belief ends with what was done or seen, but never later than the guard had promised, and
    /// never earlier than the guard last said yes.
    fn end_hold(&mut self, hold: Option<Hold>, end: End, at: u64) {
        if let Some(mut hold) = hold {
            let (seen, deadline) = hold.looks.last().copied().unwrap_or((hold.from, hold.from));
            hold.until = at.min(seen.max(deadline));
            hold.end = end;
            self.holds.push(hold);
        }
    }

    fn close(&mut self, thread: Thread, end: End, at: u64) {
        // Nobody can tell when it stopped believing, but that it did not do so later than it had
        // promised.
        self.end_hold(thread.hold, end, if end == End::Open { u64::MAX } else { at });
        self.waits.extend(thread.wait.map(|wait| Wait { until: at, ..wait }));
        let killed = end == End::Killed;
        self.calls.extend(thread.call.map(|call| Call { until: at, killed, ..call }));
    }

    /// For how long the process, or whoever wrote the record, was kept waiting for a processor
    /// within a time.
    pub(crate) fn lateness(&self, pid: u32, from: u64, until: u64) -> u64 {
        let Some(late) = self.late.get(&pid) else { return 0 };
        // They are in order and do not overlap.
        let first = late.partition_point(|(_, end)| *end <= from);
        let within = late[first..].iter().take_while(|(begin, _)| *begin < until);
        within.map(|(begin, end)| (*end).min(until) - (*begin).max(from)).sum()
    }

    /// The faults that excuse that somebody believed in a lock until `until`, or that a server did
    /// not know it: one server forgot after the lock had been `asked` for, and before somebody
    /// else `got` it, and not longer ago than what it gave before can last.
    pub(crate) fn excuses(
        &self,
        lock: u32,
        asked: u64,
        got: u64,
        until: u64,
    ) -> impl Iterator<Item = &Done> {
        let alone = self.terms.nodes == 1;
        self.done.iter().filter(move |done| {
            alone
                && done.fault.kind.is_amnesia()
                && (done.lock == 0 || done.lock == lock)
                && done.until >= asked
                && done.from <= got
                && until <= done.until.saturating_add(self.terms.ttl)
        })
    }

    /// What is told in sentences: so long after the beginning.
    pub(crate) fn clock(&self, at: u64) -> String {
        format!("{:.3} s", at.saturating_sub(self.start) as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    #[test]
    fn belief_ends_at_the_promised_deadline_even_if_nobody_could_look() {
        let text = "10 1@1 7 wait\n20 1@1 7 enter 60 5 a\n30 1@1 7 look 70\n40 0 7 stopped\n200 0 7 continued\n210 1@1 7 lost x";
        assert_eq!(story(text).holds[0].until, 70);
    }

    #[test]
    fn a_yes_after_the_deadline_counts() {
        assert_eq!(
            story("20 1@1 7 enter 60 5 a\n90 1@1 7 look 60\n95 1@1 7 leave").holds[0].until,
            90
        );
    }

    #[test]
    fn a_kill_ends_what_all_threads_of_the_process_do() {
        let text = "10 1@1 7 enter 60 5 a\n11 2@2 7 call lock 9\n11 2@2 7 wait\n12 3@1 8 enter 60 6 b\n20 0 7 killed";
        let story = story(text);
        assert_eq!(
            story.holds.iter().map(|hold| hold.end).collect::<Vec<_>>(),
            [End::Killed, End::Open]
        );
        assert_eq!(story.holds[0].until, 20);
        assert!(story.calls[0].killed && !story.waits[0].entered);
    }

    #[test]
    fn lateness_is_what_falls_into_a_time() {
        let story = story("100 0 7 late 20\n150 0 7 late 10\n300 0 8 late 90");
        assert_eq!(story.lateness(7, 0, 1000), 30);
        assert_eq!(story.lateness(7, 90, 145), 15);
        assert_eq!(story.lateness(7, 100, 140), 0);
    }

    #[test]
    fn a_stopped_process_is_late_even_if_it_is_killed_before_it_can_tell() {
        let stopped = "100 0 7 stopped\n150 0 7 continued\n155 0 7 late 50\n200 0 7 stopped\n220 0 7 killed\n300 0 8 done";
        assert_eq!(story(stopped).lateness(7, 0, 1000), 55 + 20);
    }
}
