//! `ClusterGrantStream`: the subscription of a manager. It has a connection to each node that keeps
//! a lock that somebody waits for, and a channel for each slot: a node counts as subscribers only
//! those that are connected to it, so a waiter must be subscribed where the lock is.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use redis::Value;

use super::{
    channel_of_slot,
    cluster_node::Part,
    node_link::{Link, LinkState, Received},
    redirect_reply::Redirect,
    router::Router,
};
use crate::{
    backend::{
        CancelHandle, GrantStream, QueuePlace, StreamEvent, WakeFn,
        error::NodeError,
        redis::{BackgroundConnects, Connected, Subscriber, Transport, poll_readable},
    },
    core::{
        backoff::{RETRY_PAUSE_MAX, retry_backoff},
        cluster_slot::slot_of,
    },
    sys::clock::{self, Moment},
};

/// Where the stream leads to. Differs from the place of queues, because one slot without a
/// subscriber is no reason to close the whole stream.
const STREAM_PLACE: QueuePlace = QueuePlace(1);
/// Maximum number of values read from one connection before the others have their turn.
const VALUES_MAX: usize = 256;
/// Minimum pause from one request for the map to the next.
const REFRESH_PAUSE: Duration = Duration::from_millis(200);
/// Pause after a refusal that does not depend on the cluster, such as a missing permission.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);
/// Pause after a refusal of a node that cannot serve the slot now.
const UNAVAILABLE_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct ClusterGrantStream {
    router: Arc<Router>,
    /// Channel of the manager.
    channel: String,
    connects: BackgroundConnects,
    is_closed: Arc<AtomicBool>,
    /// The read in progress, or the next one, ends early.
    is_woken: Arc<AtomicBool>,
    /// By the number of the node.
    links: BTreeMap<u64, Link>,
    /// Number of the node at which each slot is subscribed, or has been requested.
    slots: BTreeMap<u16, u64>,
    events: VecDeque<StreamEvent>,
    /// What the subscriptions were planned for.
    is_sharded: bool,
    /// Time of the next step that needs no input.
    plan_at: Moment,
    /// A refusal has been logged.
    refusal_logged: bool,
}

impl ClusterGrantStream {
    /// Connects only when a slot is requested.
    pub(super) fn open(router: &Arc<Router>, channel: &str) -> io::Result<ClusterGrantStream> {
        let connects = BackgroundConnects::new()?;
        router.subscriptions.set_wake(connects.wake());
        Ok(ClusterGrantStream {
            router: router.clone(),
            channel: channel.to_owned(),
            connects,
            is_closed: Arc::default(),
            is_woken: Arc::default(),
            links: BTreeMap::new(),
            slots: BTreeMap::new(),
            events: VecDeque::new(),
            is_sharded: router.is_sharded(),
            plan_at: Moment::from_nanos(0),
            refusal_logged: false,
        })
    }

    /// Subscribes where that is needed now.
    fn plan(&mut self, now: Moment) {
        if !self.router.subscriptions.take_changed() && now < self.plan_at {
            return;
        }
        self.plan_at = Moment::NEVER;
        if self.is_sharded != self.router.is_sharded() {
            self.is_sharded = self.router.is_sharded();
            let links: Vec<_> = self.links.keys().copied().collect();
            links.into_iter().for_each(|number| self.drop_link(number));
        }
        let wanted = self.router.subscriptions.wanted(now);
        let is_wanted: BTreeSet<u16> = wanted.iter().map(|(slot, _)| *slot).collect();
        let unused: Vec<_> =
            self.slots.keys().copied().filter(|slot| !is_wanted.contains(slot)).collect();
        unused.into_iter().for_each(|slot| self.unsubscribe(slot, now));
        for (slot, retry_at) in wanted {
            self.plan_slot(slot, retry_at, now);
        }
        if !self.slots.is_empty() {
            self.plan_by(now.saturating_add(super::subscriptions::UNUSED_MAX));
        }
        let slots = &self.slots;
        let router = &self.router;
        self.links
            .retain(|number, _| router.has_part(*number) || slots.values().any(|at| at == number));
    }

    fn plan_slot(&mut self, slot: u16, retry_at: Option<Moment>, now: Moment) {
        let Ok(owner) = self.router.known_owner(slot) else {
            self.refresh(now);
            return;
        };
        let at = self.slots.get(&slot).copied();
        if at == Some(owner.number) && retry_at.is_none() {
            return;
        }
        if let Some(former) = at.filter(|at| *at != owner.number) {
            // The node of the slot reports it to the nodes of the cluster, and these to their
            // subscribers, if channels are not sharded. So the former node must not know us.
            if !self.is_sharded {
                self.drop_link(former);
            }
            self.slots.remove(&slot);
            self.router.subscriptions.set_up(slot, false, now);
        }
        match retry_at {
            Some(later) if later > now => self.plan_by(later),
            _ => self.subscribe(slot, &owner, now),
        }
    }

    fn subscribe(&mut self, slot: u16, owner: &Arc<Part>, now: Moment) {
        let number = owner.number;
        let link = self.links.entry(number).or_insert_with(|| Link {
            part: owner.clone(),
            state: LinkState::Waiting(now),
            failures: 0,
        });
        match &mut link.state {
            LinkState::Connecting => {}
            LinkState::Waiting(until) if *until > now => {
                let until = *until;
                self.plan_by(until);
            }
            LinkState::Waiting(_) => {
                let deadline = now.saturating_add(self.router.operation_timeout);
                let connection = owner.node.reserved_connection();
                let node = owner.node.clone();
                let index = usize::try_from(number).unwrap_or(usize::MAX);
                link.state = LinkState::Connecting;
                if self.connects.connect(index, node, connection, deadline).is_err() {
                    // No thread can be spawned.
                    self.on_link_failure(number, now);
                }
            }
            LinkState::Up { subscriber, asked } => {
                if asked.contains(&slot) {
                    // The reply to an earlier `SUNSUBSCRIBE` may have removed it.
                    self.slots.insert(slot, number);
                    return;
                }
                let command: &[u8] = if self.is_sharded { b"SSUBSCRIBE" } else { b"SUBSCRIBE" };
                let channel = channel_of_slot(&self.channel, slot);
                let deadline = now.saturating_add(self.router.operation_timeout);
                match subscriber.send(&[command, channel.as_bytes()], deadline) {
                    Ok(()) => {
                        asked.push_back(slot);
                        self.slots.insert(slot, number);
                    }
                    Err(_) => self.on_link_failure(number, now),
                }
            }
        }
    }

    fn unsubscribe(&mut self, slot: u16, now: Moment) {
        let Some(number) = self.slots.remove(&slot) else { return };
        let Some(Link { state: LinkState::Up { subscriber, .. }, .. }) =
            self.links.get_mut(&number)
        else {
            return;
        };
        let command: &[u8] = if self.is_sharded { b"SUNSUBSCRIBE" } else { b"UNSUBSCRIBE" };
        let channel = channel_of_slot(&self.channel, slot);
        let deadline = now.saturating_add(self.router.operation_timeout);
        if subscriber.send(&[command, channel.as_bytes()], deadline).is_err() {
            self.on_link_failure(number, now);
        }
    }

    /// Closes a connection. Its slots must be subscribed again.
    fn drop_link(&mut self, number: u64) {
        self.links.remove(&number);
        let now = clock::now();
        for (slot, at) in &self.slots {
            if *at == number {
                self.router.subscriptions.set_up(*slot, false, now);
            }
        }
        self.slots.retain(|_, at| *at != number);
        self.plan_by(now);
    }

    fn on_link_failure(&mut self, number: u64, now: Moment) {
        let Some(mut link) = self.links.remove(&number) else { return };
        // All waiters must notice an outage now, because each fails at a time that counts from its
        // own first failure.
        let slots = self.slots.iter().filter(|(_, at)| **at == number).map(|(slot, _)| *slot);
        self.report_changed(slots.collect());
        self.drop_link(number);
        link.part.note_failure();
        link.failures = link.failures.saturating_add(1);
        let pause = retry_backoff(link.failures, RETRY_PAUSE_MAX, now.as_nanos() ^ number);
        link.state = LinkState::Waiting(now.saturating_add(pause));
        self.links.insert(number, link);
        self.refresh(now);
    }

    fn refresh(&mut self, now: Moment) {
        self.router.begin_refresh();
        self.plan_by(now.saturating_add(REFRESH_PAUSE));
    }

    fn plan_by(&mut self, at: Moment) {
        self.plan_at = self.plan_at.min(at);
    }

    fn on_connected(&mut self, Connected { node, connection, outcome }: Connected) {
        let (number, now) = (node as u64, clock::now());
        let timeout = self.router.operation_timeout;
        // Otherwise this is an earlier attempt for a link that was dropped since.
        let connecting = |link: &&mut Link| matches!(link.state, LinkState::Connecting);
        match (self.links.get_mut(&number).filter(connecting), outcome) {
            (Some(link), Ok(())) => {
                let node = link.part.node.clone();
                let subscriber = Box::new(Subscriber::over(node, connection, timeout));
                link.state = LinkState::Up { subscriber, asked: VecDeque::new() };
            }
            (Some(_), Err(_)) => self.on_link_failure(number, now),
            (None, _) => {}
        }
        self.plan_by(now);
    }

    /// Waits for input, and reads it.
    fn read(&mut self, until: Moment) {
        let mut until = until.min(self.plan_at);
        let mut polled: Vec<&dyn Transport> = vec![&*self.connects.wakeups];
        let mut numbers = Vec::new();
        for (number, link) in &self.links {
            if let LinkState::Up { subscriber, .. } = &link.state
                && let Some(transport) = subscriber.transport()
            {
                polled.push(transport);
                numbers.push((*number, subscriber.check_at()));
                until = until.min(subscriber.check_at());
            }
        }
        let is_ready = poll_readable(&polled, until, Duration::ZERO);
        let now = clock::now();
        let mut resubscribed = BTreeSet::new();
        for ((number, check_at), is_ready) in numbers.into_iter().zip(is_ready.into_iter().skip(1))
        {
            if is_ready || check_at <= now {
                self.read_link(number, now, &mut resubscribed);
            }
        }
        self.report_changed(resubscribed);
    }

    /// Has the waiters for locks of these slots ask for them.
    fn report_changed(&mut self, slots: BTreeSet<u16>) {
        if !slots.is_empty() {
            let concerns = move |lock: &str| slots.contains(&slot_of(lock));
            self.events.push_back(StreamEvent::SubscriptionChanged(Box::new(concerns)));
        }
    }

    fn read_link(&mut self, number: u64, now: Moment, resubscribed: &mut BTreeSet<u16>) {
        for _ in 0..VALUES_MAX {
            let Some(Link { state: LinkState::Up { subscriber, .. }, .. }) =
                self.links.get_mut(&number)
            else {
                return;
            };
            match subscriber.receive(now) {
                Ok(Some(value)) => self.on_value(number, &value, now, resubscribed),
                Ok(None) => return,
                Err(failure) => {
                    let label = subscriber.label();
                    log_safely!(debug, "lost the subscription to {label}: {}", failure.kind);
                    self.on_link_failure(number, now);
                    return;
                }
            }
        }
        // There may be more, which no poll shows.
        self.plan_by(now);
    }

    fn on_value(
        &mut self,
        number: u64,
        value: &Value,
        now: Moment,
        resubscribed: &mut BTreeSet<u16>,
    ) {
        match Received::parse(value, number) {
            Received::Grant(id, notice) => self.events.push_back(StreamEvent::Grant(id, notice)),
            Received::Subscribed(slot) => {
                self.on_subscribed(number, slot, now);
                resubscribed.insert(slot);
            }
            // The slot has been moved to another node.
            Received::Unsubscribed(slot) if self.slots.get(&slot) == Some(&number) => {
                self.slots.remove(&slot);
                self.router.subscriptions.set_up(slot, false, now);
                self.plan_by(now);
            }
            Received::Refusal => self.on_refusal(number, value, now),
            Received::Unsubscribed(_) | Received::Other => {}
        }
    }

    fn on_subscribed(&mut self, number: u64, slot: u16, now: Moment) {
        if let Some(link) = self.links.get_mut(&number) {
            link.failures = 0;
            if let LinkState::Up { asked, .. } = &mut link.state {
                asked.pop_front();
            }
        }
        if self.slots.get(&slot) == Some(&number) {
            self.router.subscriptions.set_up(slot, true, now);
        }
    }

    /// A node refused to subscribe us to a slot.
    fn on_refusal(&mut self, number: u64, value: &Value, now: Moment) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let LinkState::Up { subscriber, asked } = &mut link.state else { return };
        let (Some(slot), Err(failure)) = (asked.pop_front(), subscriber.check(value)) else {
            return;
        };
        let pause = match self.router.note(&failure, &link.part) {
            Redirect::Moved { .. } => self.router.subscriptions.on_redirect(slot),
            Redirect::None => {
                if !std::mem::replace(&mut self.refusal_logged, true) {
                    let (server, reason) = (link.part.node.label(), &failure.kind);
                    log_safely!(
                        warn,
                        "could not subscribe to grants at {server}: {reason}; waiters poll instead"
                    );
                }
                REFUSED_PAUSE
            }
            _ => UNAVAILABLE_PAUSE,
        };
        self.slots.remove(&slot);
        self.router.subscriptions.set_up(slot, false, now.saturating_add(pause));
        self.plan_by(now.saturating_add(pause));
    }
}

impl GrantStream for ClusterGrantStream {
    fn place(&self) -> QueuePlace {
        STREAM_PLACE
    }

    fn label(&self) -> &Arc<str> {
        self.router.label()
    }

    fn is_open(&mut self) -> bool {
        !self.is_closed.load(Ordering::Acquire)
    }

    fn cancel_handle(&self) -> Result<CancelHandle, NodeError> {
        let (is_closed, wake) = (self.is_closed.clone(), self.connects.wake());
        Ok(CancelHandle::new(move || {
            is_closed.store(true, Ordering::Release);
            wake();
        }))
    }

    fn wake_handle(&mut self) -> Result<WakeFn, NodeError> {
        let (is_woken, wake) = (self.is_woken.clone(), self.connects.wake());
        Ok(Arc::new(move || {
            is_woken.store(true, Ordering::Release);
            wake();
        }))
    }

    fn receive(&mut self, until: Moment) -> Result<Option<StreamEvent>, NodeError> {
        loop {
            if !self.is_open() {
                return Err(NodeError::not_applied(io::ErrorKind::NotConnected));
            }
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let connected = self.connects.take_connected();
            connected.into_iter().for_each(|one| self.on_connected(one));
            self.plan(clock::now());
            self.read(until);
            let is_over = self.is_woken.swap(false, Ordering::AcqRel) || clock::now() >= until;
            if self.events.is_empty() && is_over {
                return Ok(None);
            }
        }
    }
}

impl std::fmt::Debug for ClusterGrantStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterGrantStream").field("slots", &self.slots).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
