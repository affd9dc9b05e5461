use proptest::prelude::*;

use super::*;

const TERMS: Terms = Terms { ttl: Duration::from_secs(30), renew: true, is_local: true };
const WINDOW: u64 = 5;

fn at(ms: u64) -> Moment {
    Moment::from_nanos(ms * 1_000_000)
}

fn ticket(thread: u64) -> Ticket {
    Ticket(NonZeroU64::MIN.saturating_add(thread))
}

fn hold(number: u64) -> HoldNumber {
    HoldNumber(NonZeroU64::MIN.saturating_add(number))
}

/// A queue whose first thread has been granted the lock at time 0, and in which `waiting` wait.
fn held(waiting: u64) -> LocalQueue<u64> {
    let mut queue = LocalQueue::default();
    assert_eq!(queue.arrive(ticket(0), TERMS, at(0), || 0), Arrival::Represents);
    assert_eq!(queue.on_granted(hold(1), at(WINDOW), 100), None);
    for thread in 1..=waiting {
        let watch_until = (thread == 1).then(|| at(WINDOW));
        let arrival = queue.arrive(ticket(thread), TERMS, at(0), || thread);
        assert_eq!(arrival, Arrival::Waits { waiter: thread, watch_until });
    }
    queue
}

#[test]
fn lock_handed_over_first_come_first_served() {
    let mut queue = held(3);
    // The first one was the watcher, so the last one becomes it.
    let signal = Some(Signal::Watch(3, at(WINDOW)));
    assert_eq!(queue.release(hold(1), Some(TERMS), at(1)), Release::HandOver { to: 1, signal });
    for to in [2, 3] {
        let handed = Release::HandOver { to, signal: None };
        assert_eq!(queue.release(hold(1), Some(TERMS), at(2)), handed);
    }
    assert_eq!(queue.release(hold(1), Some(TERMS), at(3)), Release::ToServer(None));
    assert!(queue.is_idle(at(3)));
}

#[test]
fn hold_is_forgotten_after_its_window() {
    let mut queue = LocalQueue::default();
    queue.arrive(ticket(0), TERMS, at(0), || 0);
    assert!(!queue.is_idle(at(0)), "a thread asks the server");
    let _ = queue.on_granted(hold(1), at(WINDOW), 100);
    assert!(!queue.is_idle(at(WINDOW - 1)) && queue.is_idle(at(WINDOW)));
    queue.arrive(ticket(1), TERMS, at(0), || 1);
    assert!(!queue.is_idle(at(WINDOW)), "a thread waits");
    // What a release does that finds no queue any more.
    let mut queue = LocalQueue::<u64>::default();
    assert_eq!(queue.release(hold(1), Some(TERMS), at(WINDOW)), Release::ToServer(None));
    assert!(queue.is_idle(at(WINDOW)));
}

#[test]
fn release_after_the_window_goes_to_the_server() {
    let mut queue = held(2);
    let released = queue.release(hold(1), Some(TERMS), at(WINDOW));
    assert_eq!(released, Release::ToServer(Some(Signal::Represent(1))));
    // The other one waits until the representative has been granted the lock, and then watches.
    assert_eq!(queue.on_window_end(ticket(1), at(WINDOW)), None);
    let signal = queue.on_granted(hold(2), at(2 * WINDOW), 100);
    assert_eq!(signal, Some(Signal::Watch(2, at(2 * WINDOW))));
}

#[test]
fn watcher_makes_the_first_thread_a_representative() {
    let mut queue = held(2);
    let _ = queue.release(hold(1), Some(TERMS), at(1));
    assert_eq!(queue.on_window_end(ticket(2), at(1)), Some(Signal::Watch(2, at(WINDOW))));
    queue.arrive(ticket(3), TERMS, at(2), || 3);
    assert_eq!(queue.on_window_end(ticket(3), at(WINDOW)), None, "not the watcher");
    assert_eq!(queue.on_window_end(ticket(2), at(WINDOW)), Some(Signal::Represent(2)));
    assert_eq!(queue.on_window_end(ticket(2), at(WINDOW)), None);
    // Others come after it.
    let waits = Arrival::Waits { waiter: 4, watch_until: None };
    assert_eq!(queue.arrive(ticket(4), TERMS, at(WINDOW), || 4), waits);
    assert_eq!(queue.release(hold(1), Some(TERMS), at(6)), Release::ToServer(None));
}

#[test]
fn next_thread_replaces_a_representative_that_leaves() {
    let mut queue = LocalQueue::default();
    assert_eq!(queue.arrive(ticket(0), TERMS, at(0), || 0), Arrival::Represents);
    queue.arrive(ticket(1), TERMS, at(0), || 1);
    queue.arrive(ticket(2), TERMS, at(0), || 2);
    assert_eq!(queue.leave(ticket(1), at(0)), Some(None));
    assert_eq!(queue.on_left(at(1)), Some(Signal::Represent(2)));
    assert!(queue.has_waiting(), "the next one has not asked the server yet");
    assert_eq!(queue.on_left(at(1)), None);
    assert!(queue.is_idle(at(1)) && !queue.has_waiting());
}

#[test]
fn watcher_that_leaves_appoints_another() {
    let mut queue = held(3);
    assert_eq!(queue.leave(ticket(1), at(1)), Some(Some(Signal::Watch(3, at(WINDOW)))));
    assert_eq!(queue.leave(ticket(1), at(1)), None, "it has left");
    assert_eq!(queue.leave(ticket(2), at(1)), Some(None));
    assert_eq!(queue.leave(ticket(3), at(1)), Some(None));
    let mut queue = held(2);
    assert_eq!(queue.leave(ticket(1), at(WINDOW)), Some(Some(Signal::Represent(2))));
}

#[test]
fn other_terms_end_the_chain() {
    for terms in [
        Terms { ttl: Duration::from_secs(1), ..TERMS },
        Terms { renew: false, ..TERMS },
        Terms { is_local: false, ..TERMS },
    ] {
        let mut queue = held(0);
        queue.arrive(ticket(1), terms, at(0), || 1);
        let released = queue.release(hold(1), Some(TERMS), at(1));
        assert_eq!(released, Release::ToServer(Some(Signal::Represent(1))));
    }
    let mut queue = held(0);
    let alone = Terms { is_local: false, ..TERMS };
    queue.arrive(ticket(1), alone, at(0), || 1);
    let released = queue.release(hold(1), Some(alone), at(1));
    assert_eq!(released, Release::ToServer(Some(Signal::Represent(1))));
}

#[test]
fn chain_ends_when_its_tokens_are_used_up() {
    let mut queue = held(0);
    let _ = queue.on_granted(hold(2), at(WINDOW), 1);
    queue.arrive(ticket(1), TERMS, at(0), || 1);
    queue.arrive(ticket(2), TERMS, at(0), || 2);
    assert!(matches!(queue.release(hold(2), Some(TERMS), at(1)), Release::HandOver { to: 1, .. }));
    let released = queue.release(hold(2), Some(TERMS), at(1));
    assert_eq!(released, Release::ToServer(Some(Signal::Represent(2))));
}

#[test]
fn lost_hold_is_not_handed_over() {
    let mut queue = held(2);
    let Release::HandOver { to: 1, .. } = queue.release(hold(1), Some(TERMS), at(1)) else {
        panic!("not handed over")
    };
    queue.on_lost(hold(1));
    assert_eq!(queue.release(hold(1), Some(TERMS), at(1)), Release::ToServer(None));
    assert_eq!(queue.on_granted(hold(2), at(9), 1), Some(Signal::Watch(2, at(9))));
    // The former holder notices its loss late.
    assert_eq!(queue.release(hold(1), Some(TERMS), at(2)), Release::ToServer(None));
    assert!(matches!(queue.release(hold(2), Some(TERMS), at(2)), Release::HandOver { to: 2, .. }));
}

#[test]
fn all_ask_the_server_after_an_outage() {
    let mut queue = LocalQueue::default();
    queue.arrive(ticket(0), TERMS, at(0), || 0);
    queue.arrive(ticket(1), TERMS, at(0), || 1);
    queue.arrive(ticket(2), TERMS, at(0), || 2);
    assert_eq!(queue.scatter(), [1, 2]);
    assert_eq!(queue.on_left(at(1)), None);
    queue.arrive(ticket(3), TERMS, at(1), || 3);
    assert_eq!(queue.on_left(at(1)), None, "a representative is left");
    assert_eq!(queue.on_left(at(1)), Some(Signal::Represent(3)));
}

/// What happens in a process, with the effects that each step owes to its threads.
struct Process {
    queue: LocalQueue<u64>,
    now: u64,
    last: u64,
    /// In the order of their arrival.
    waiting: Vec<u64>,
    watches: Vec<(u64, Moment)>,
    representatives: Vec<u64>,
    /// The guards that have not been released: the hold of each, and until when it may be handed
    /// over.
    guards: Vec<(HoldNumber, u64)>,
}

impl Process {
    fn obey(&mut self, signal: Option<Signal<u64>>) {
        match signal {
            Some(Signal::Represent(thread)) => self.promote(thread),
            Some(Signal::Watch(thread, until)) => self.watches.push((thread, until)),
            None => {}
        }
    }

    fn promote(&mut self, thread: u64) {
        self.serve(thread);
        self.representatives.push(thread);
    }

    /// A thread leaves the queue with something. It must be the first.
    fn serve(&mut self, thread: u64) {
        assert_eq!(self.waiting.first(), Some(&thread), "not first come, first served");
        self.waiting.remove(0);
        self.watches.retain(|(watcher, _)| *watcher != thread);
    }

    fn arrive(&mut self) {
        self.last += 1;
        let thread = self.last;
        match self.queue.arrive(ticket(thread), TERMS, at(self.now), || thread) {
            Arrival::Represents => self.representatives.push(thread),
            Arrival::Waits { waiter: _, watch_until } => {
                self.waiting.push(thread);
                self.watches.extend(watch_until.map(|until| (thread, until)));
            }
        }
    }

    fn step(&mut self, step: u8, which: usize) {
        let now = at(self.now);
        match step {
            0 => self.arrive(),
            1 if !self.representatives.is_empty() => {
                self.representatives.remove(which % self.representatives.len());
                self.last += 1;
                let number = hold(self.last);
                self.guards.push((number, self.now + WINDOW));
                let signal = self.queue.on_granted(number, at(self.now + WINDOW), 1_000);
                self.obey(signal);
            }
            2 if !self.representatives.is_empty() => {
                self.representatives.remove(which % self.representatives.len());
                let signal = self.queue.on_left(now);
                self.obey(signal);
            }
            3 if !self.guards.is_empty() => {
                let (number, window_end) = self.guards.remove(which % self.guards.len());
                match self.queue.release(number, Some(TERMS), now) {
                    Release::HandOver { to, signal } => {
                        assert!(self.now < window_end, "handed over after the window");
                        let newer = self.guards.iter().any(|(other, _)| other.0 > number.0);
                        assert!(!newer, "a former hold was handed over");
                        self.serve(to);
                        if which.is_multiple_of(4) {
                            self.queue.on_lost(number);
                            self.representatives.push(to);
                        } else {
                            self.guards.push((number, window_end));
                        }
                        self.obey(signal);
                    }
                    Release::ToServer(signal) => self.obey(signal),
                }
            }
            4 if !self.waiting.is_empty() => {
                let thread = self.waiting.remove(which % self.waiting.len());
                self.watches.retain(|(watcher, _)| *watcher != thread);
                let left = self.queue.leave(ticket(thread), now);
                self.obey(left.unwrap());
            }
            5 if which.is_multiple_of(8) => {
                assert_eq!(self.queue.scatter(), self.waiting);
                self.representatives.append(&mut self.waiting);
                self.watches.clear();
            }
            _ => self.now += 1,
        }
        self.run_timers();
    }

    fn run_timers(&mut self) {
        let now = at(self.now);
        while let Some(due) = self.watches.iter().position(|(_, until)| *until <= now) {
            let (thread, _) = self.watches.remove(due);
            let signal = self.queue.on_window_end(ticket(thread), now);
            let is_over = |until: &Moment| *until <= now;
            let is_awake = matches!(&signal, Some(Signal::Watch(_, until)) if is_over(until));
            assert!(!is_awake, "the watcher would not sleep");
            self.obey(signal);
        }
    }

    fn check(&self) {
        let somebody_acts = !self.representatives.is_empty() || !self.watches.is_empty();
        assert!(self.waiting.is_empty() || somebody_acts, "threads wait that nobody serves");
        assert_eq!(self.queue.representatives as usize, self.representatives.len());
        assert_eq!(self.queue.waiting.len(), self.waiting.len());
        if self.waiting.is_empty() && self.representatives.is_empty() && self.guards.is_empty() {
            assert!(self.queue.is_idle(at(self.now)), "an entry stays for ever");
        }
    }
}

proptest! {
    /// Whatever happens, in any order: threads are served in the order of their arrival, a lock is
    /// handed over in its window only, and threads that wait are never forgotten.
    #[test]
    fn waiting_threads_served_in_order_and_never_forgotten(
        steps in proptest::collection::vec((0u8..8, any::<u8>()), 0..120)
    ) {
        let mut process = Process {
            queue: LocalQueue::default(),
            now: 0,
            last: 0,
            waiting: Vec::new(),
            watches: Vec::new(),
            representatives: Vec::new(),
            guards: Vec::new(),
        };
        for (step, which) in steps {
            process.step(step, which.into());
            process.check();
        }
    }
}
