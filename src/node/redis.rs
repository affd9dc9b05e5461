//! `RedisNode`: one server, asked over connections that the caller brings.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use redis::Value;

use super::{
    connection::{Connection, Greeting},
    door::Door,
    endpoint::Endpoint,
    failure::{Failure, Reason},
    identity::{self, Identity, MEMORY_KEY},
    reading::Reading,
    roster::{Finding, Roster, Upkeep},
    script::{By, Call},
};
use crate::{
    clock::{self, Moment},
    observer::Observer,
    text::Span,
};

/// For how long a node that failed is left alone while the others suffice; doubled with each failure.
const REST_MIN: Duration = Duration::from_millis(20);
const REST_MAX: Duration = Duration::from_secs(1);
/// How long a server remembers what it was told of its memory, unless it is told again: 30 days.
const MEMORY_MS: &[u8] = b"2592000000";
/// With so many failures in a row a node is not one to wait on.
const ILL: u32 = 3;

/// An answer, and the moment before its request was sent, from which every validity is counted.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    pub(crate) sent: Moment,
    pub(crate) reply: T,
}

#[derive(Debug)]
pub(crate) struct RedisNode {
    endpoint: Arc<Endpoint>,
    operation_timeout: Duration,
    spin_max: Duration,
    observer: Arc<Observer>,
    contact: Mutex<Contact>,
    /// The last exchange that told the server's time, on whatever connection.
    reading: Mutex<Option<Reading>>,
    /// Its place among several nodes; a node that stands alone is taken as it is.
    place: Option<Place>,
    /// Until when it is left alone after a failure, in nanoseconds, and how many there were in a row.
    rests_until: AtomicU64,
    failures: AtomicU32,
    /// A connection that came too late for whom it was made.
    spare: Mutex<Option<Connection>>,
    door: Door,
}

/// Whether the server can be reached, so that each outage is told of once, however many connections it breaks.
#[derive(Debug)]
struct Contact {
    /// When it was first noticed that it is away.
    away_since: Option<Moment>,
    /// When it was last there again.
    mended_at: Moment,
}

#[derive(Debug)]
struct Place {
    index: usize,
    roster: Arc<Mutex<Roster>>,
    /// How often another server has come in the place of the former one.
    succession: AtomicU64,
}

impl RedisNode {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        operation_timeout: Duration,
        spin_max: Duration,
        observer: Arc<Observer>,
    ) -> RedisNode {
        RedisNode {
            endpoint,
            operation_timeout,
            spin_max,
            observer,
            contact: Mutex::new(Contact { away_since: None, mended_at: Moment::from_nanos(0) }),
            reading: Mutex::new(None),
            place: None,
            rests_until: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            spare: Mutex::new(None),
            door: Door::default(),
        }
    }

    /// The same as one of several.
    pub(crate) fn among(self, index: usize, roster: Arc<Mutex<Roster>>) -> RedisNode {
        RedisNode { place: Some(Place { index, roster, succession: AtomicU64::new(0) }), ..self }
    }

    pub(crate) fn label(&self) -> &Arc<str> {
        &self.endpoint.label
    }

    /// A place for a connection that threads of users share.
    pub(crate) fn pooled(&self) -> Connection {
        self.unconnected(self.spin_max)
    }

    /// A place for a connection of a thread that must never wait for users of the pool.
    pub(crate) fn reserved(&self) -> Connection {
        self.unconnected(Duration::ZERO)
    }

    fn unconnected(&self, spin_max: Duration) -> Connection {
        Connection::unconnected(self.endpoint.clone(), self.operation_timeout, spin_max, self.place.is_some())
    }

    /// The last reading of the server's clock.
    pub(crate) fn reading(&self) -> Option<Reading> {
        *self.reading.lock()
    }

    pub(crate) fn note(&self, reading: Reading) {
        let mut last = self.reading.lock();
        if last.is_none_or(|last| reading.is_newer_than(&last)) {
            *last = Some(reading);
        }
    }

    /// The first half of an exchange, over a connection that is there.
    pub(crate) fn send<C: Call>(
        &self,
        connection: &mut Connection,
        call: &C,
        by: By,
        deadline: Moment,
    ) -> Result<Pending, Failure> {
        let not_after_us = self.reading().map_or(0, |reading| reading.server_us_at(deadline));
        let nonce = connection.next_nonce();
        let sent = connection.send(deadline, |out| call.encode(by, nonce, not_after_us, out))?;
        Ok(Pending { nonce, sent })
    }

    /// Makes sure of a connection.
    pub(crate) fn connect(&self, connection: &mut Connection, deadline: Moment) -> Result<(), Failure> {
        let begun = clock::now();
        let knocking = self.door.knock(begun);
        let connected = connection.connect(deadline);
        if connected.is_ok() {
            self.door.opened(clock::now());
        }
        drop(knocking);
        let mut broken = connection.take_broken();
        let hurried = deadline.after(begun) < self.operation_timeout / 2;
        let out_of_time = matches!(&connected, Err(Failure { reason: Reason::TimedOut, .. }));
        let failed = connected.is_err() && !(hurried && out_of_time);
        if !failed {
            // Who was in a hurry has not found out by this one that the server is away.
            broken = broken.filter(|opened_at| *opened_at < begun);
        }
        self.note_contact(broken, failed, matches!(connected, Ok(Some(_))));
        let Some(greeting) = connected? else { return Ok(()) };
        let Greeting { reading, identity } = greeting;
        // A new connection may lead to another server with another clock.
        *self.reading.lock() = Some(reading);
        if let (Some(place), Some(identity)) = (&self.place, identity) {
            let (replaced, finding, upkeep) = {
                let mut roster = place.roster.lock();
                let replaced = roster.knew_another(place.index, &identity);
                let finding = roster.meet(place.index, &identity);
                // What it led to before may from now on be met under another name, and would vote twice.
                if replaced && finding != Finding::Replica {
                    place.succession.fetch_add(1, Ordering::AcqRel);
                }
                connection.leads_to(place.succession.load(Ordering::Acquire));
                (replaced, finding, roster.upkeep(place.index, &identity))
            };
            let quarantine = if let Finding::Quarantined(left) = finding { Some(left) } else { None };
            if replaced || quarantine.is_some() {
                self.observer.server_changed(self.label(), replaced, quarantine);
            }
            let unfit = match finding {
                Finding::Fit => return keep_up(connection, upkeep, &identity, deadline),
                Finding::Quarantined(left) => {
                    let label = self.label();
                    say!(warn, "{label} may have lost its data in a restart; it does not vote for {}", Span(left));
                    return keep_up(connection, upkeep, &identity, deadline);
                }
                Finding::Replica => "it is a replica, and nodes have to be masters that stand alone".to_owned(),
                Finding::Duplicate(other) => format!("it is the same server as {other}, and would vote twice"),
            };
            connection.poison();
            return Err(Failure { sent: false, reason: Reason::Unfit(unfit) });
        }
        Ok(())
    }

    /// Tells when the server is there again. A connection that broke, but had been made before that was last told, broke
    /// in the same outage.
    fn note_contact(&self, broken: Option<Moment>, failed: bool, connected: bool) {
        let now = clock::now();
        let mut contact = self.contact.lock();
        if failed || broken.is_some_and(|opened_at| opened_at >= contact.mended_at) {
            contact.away_since.get_or_insert(now);
        }
        if !connected {
            return;
        }
        if let Some(since) = contact.away_since.take() {
            contact.mended_at = now;
            drop(contact);
            self.observer.reconnected(self.label(), now.after(since));
        }
    }

    /// Makes sure that nothing is asked over a connection to a server that was here before the one that is known by now.
    pub(crate) fn leave_former(&self, connection: &mut Connection) {
        if let Some(place) = &self.place {
            connection.leave_former(place.succession.load(Ordering::Acquire));
        }
    }

    /// For how long its votes do not count yet, at `now`.
    pub(crate) fn quarantined(&self, now: Moment) -> Option<Duration> {
        let place = self.place.as_ref()?;
        let left = place.roster.lock().votes_from(place.index).after(now);
        (!left.is_zero()).then_some(left)
    }

    /// The second half of an exchange: makes sense of what came back.
    pub(crate) fn settle<C: Call>(
        &self,
        connection: &mut Connection,
        call: &C,
        pending: Pending,
        reply: Value,
    ) -> Result<Answer<C::Reply>, Failure> {
        connection.refuse_errors(&reply).map_err(|failure| failure.naming(call.script()))?;
        match call.read(pending.nonce, reply) {
            Some(reply) => {
                if let Some(server_us) = C::server_us(&reply) {
                    self.note(Reading::new(pending.sent, clock::now(), server_us));
                }
                Ok(Answer { sent: pending.sent, reply })
            }
            None => {
                connection.poison();
                Err(Failure::unclear(Reason::Garbled("its reply has an unexpected form".into())))
            }
        }
    }

    /// Whether it failed a short time ago.
    pub(crate) fn rests(&self, now: Moment) -> bool {
        now.as_nanos() < self.rests_until.load(Ordering::Acquire)
    }

    /// Whether somebody has been connecting for at least this long, and nobody has got in meanwhile. Now and then somebody else
    /// is to try all the same.
    pub(crate) fn keeps_outside(&self, now: Moment, patience: Duration) -> bool {
        self.door.is_closed(now, patience, REST_MAX)
    }

    /// Whether it has not failed since it last answered.
    pub(crate) fn is_well(&self) -> bool {
        self.failures.load(Ordering::Acquire) == 0
    }

    /// Whether it has failed again and again.
    pub(crate) fn is_ill(&self) -> bool {
        self.failures.load(Ordering::Acquire) >= ILL
    }

    /// It has answered.
    pub(crate) fn answered(&self) {
        if self.failures.load(Ordering::Acquire) != 0 {
            self.failures.store(0, Ordering::Release);
            self.rests_until.store(0, Ordering::Release);
        }
    }

    /// It has not answered, or could not be reached.
    pub(crate) fn failed(&self, now: Moment) {
        let failures = self.failures.fetch_add(1, Ordering::AcqRel).min(10);
        let rest = REST_MIN.saturating_mul(1 << failures).min(REST_MAX);
        self.rests_until.store(now.saturating_add(rest).as_nanos(), Ordering::Release);
    }

    /// Keeps a connection that came too late, for whoever needs one next.
    pub(crate) fn put_spare(&self, connection: Connection) {
        let former = self.spare.lock().replace(connection);
        drop(former);
    }

    pub(crate) fn take_spare(&self) -> Option<Connection> {
        self.spare.lock().take()
    }
}

/// A request that has been sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    nonce: u64,
    pub(crate) sent: Moment,
}

/// Tells a server what it has to remember about itself, before anybody counts on its votes. What it refuses costs it its
/// votes for a while after the next restart.
fn keep_up(connection: &mut Connection, upkeep: Upkeep, who: &Identity, deadline: Moment) -> Result<(), Failure> {
    match upkeep {
        Upkeep::Nothing => Ok(()),
        Upkeep::MeetAgain(from) => {
            connection.retire_at(from);
            Ok(())
        }
        Upkeep::Forget(from) => {
            connection.retire_at(from);
            connection.tell(&[b"DEL", MEMORY_KEY], deadline)
        }
        Upkeep::Remember(span) => {
            let lasted = identity::memory(span, who.promotion.as_deref());
            connection.tell(&[b"SET", MEMORY_KEY, lasted.as_bytes(), b"PX", MEMORY_MS], deadline)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_fails_rests_for_a_moment_then_for_longer_and_never_for_more_than_a_second() {
        let endpoint = Arc::new(Endpoint::parse("redis://h").unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone()).unwrap();
        let node = RedisNode::new(endpoint, Duration::from_secs(1), Duration::ZERO, observer);
        let now = Moment::from_nanos(1_000_000_000);
        let rests_after = |ms| node.rests(now.saturating_add(Duration::from_millis(ms)));
        for rest in [20, 40, 80, 160, 320, 640] {
            node.failed(now);
            assert!(rests_after(rest - 1) && !rests_after(rest), "{rest}");
        }
        for _ in 0..100 {
            node.failed(now);
            assert!(rests_after(999) && !rests_after(1000));
        }
        node.answered();
        assert!(node.is_well() && !rests_after(0));
        node.failed(now);
        assert!(rests_after(19) && !rests_after(20));
    }
}
