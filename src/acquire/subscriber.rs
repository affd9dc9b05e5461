//! `Subscriber`: the thread that hears of grants. It subscribes once, to the manager's own channel, when somebody first
//! waits; it asks after a silent server, reconnects, and then lets every waiter look again. When nobody has waited for
//! a while it closes the connection and sleeps.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use redis::Value;

use super::{
    mailbox::{Handover, Mailbox},
    patience::retry_pause,
};
use crate::{
    clock::{self, Moment},
    node::{Breaker, Connection, Failure, Reason, RedisNode, script::GrantNews, write_command},
};

/// How long a connection may be silent while somebody waits before the server is asked whether it is still there.
const PING_EVERY: Duration = Duration::from_secs(2);
/// How long a subscription is kept that nobody uses.
const IDLE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Subscriber {
    shared: Arc<Shared>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    channel: String,
    mailbox: Arc<Mailbox>,
    /// Guards what the thread is told and what it tells.
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    live: bool,
    wanted: bool,
    stop: bool,
    /// Counts attempts to subscribe that failed.
    failures: u64,
    breaker: Option<Breaker>,
}

impl Subscriber {
    pub(crate) fn start(node: Arc<RedisNode>, channel: String, mailbox: Arc<Mailbox>) -> io::Result<Subscriber> {
        let shared = Arc::new(Shared { channel, mailbox, state: Mutex::default(), changed: Condvar::new() });
        let listener = Listener { connection: node.reserved(), node, shared: shared.clone(), troubled: false };
        let thread = thread::Builder::new().name("distlock-subscriber".into()).spawn(move || listener.run())?;
        Ok(Subscriber { shared, thread: Mutex::new(Some(thread)) })
    }

    pub(crate) fn channel(&self) -> &str {
        &self.shared.channel
    }

    /// Whether a grant would be heard. To be asked by a thread that is already in the mailbox.
    pub(crate) fn is_live(&self) -> bool {
        self.shared.state.lock().live
    }

    /// Has the subscription made if there is none; waits until it is there, an attempt has failed, or time is over.
    pub(crate) fn await_live(&self, until: Moment) -> bool {
        let mut state = self.shared.state.lock();
        let failures = state.failures;
        if !state.live && !state.wanted {
            state.wanted = true;
            self.shared.changed.notify_all();
        }
        while !state.live && !state.stop && state.failures == failures && clock::now() < until {
            clock::park(&self.shared.changed, &mut state, until);
        }
        state.live
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        let breaker = {
            let mut state = self.shared.state.lock();
            state.stop = true;
            state.live = false;
            state.breaker.take()
        };
        self.shared.changed.notify_all();
        if let Some(breaker) = breaker {
            breaker.cut();
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            // It catches its panics; there is nothing to hear from it.
            let _ = thread.join();
        }
    }
}

/// Why listening ended.
enum Ended {
    Stopped,
    Idle,
    Broken(Failure),
}

struct Listener {
    node: Arc<RedisNode>,
    connection: Connection,
    shared: Arc<Shared>,
    /// There was trouble, and it has been logged.
    troubled: bool,
}

impl Listener {
    fn run(mut self) {
        let mut failures = 0;
        while self.await_wanted() {
            let ended = catch_unwind(AssertUnwindSafe(|| match self.subscribe() {
                Ok(()) => {
                    failures = 0;
                    self.listen()
                }
                Err(failure) => Ended::Broken(failure),
            }));
            self.connection.poison();
            match ended {
                Ok(Ended::Stopped) => return,
                Ok(Ended::Idle) => {}
                Ok(Ended::Broken(failure)) => {
                    self.tell_trouble(&failure.reason);
                    self.mark_broken();
                    failures += 1;
                    self.pause(retry_pause(failures, clock::now().as_nanos()));
                }
                Err(_) => {
                    log::error!("the lock subscriber met a defect of its own; please report it");
                    self.mark_broken();
                    failures += 1;
                    self.pause(retry_pause(failures, clock::now().as_nanos()));
                }
            }
        }
    }

    /// Sleeps until somebody waits; false when it is time to end.
    fn await_wanted(&self) -> bool {
        let mut state = self.shared.state.lock();
        while !state.stop && !state.wanted {
            clock::park(&self.shared.changed, &mut state, Moment::NEVER);
        }
        !state.stop
    }

    fn subscribe(&mut self) -> Result<(), Failure> {
        let deadline = clock::now().saturating_add(self.node.operation_timeout());
        self.node.connect(&mut self.connection, deadline)?;
        let channel = self.shared.channel.as_bytes();
        self.connection.send(deadline, |out| write_command(out, &[b"SUBSCRIBE", channel]))?;
        let answer = self.connection.receive(deadline)?;
        self.connection.refuse_errors(&answer)?;
        if kind(&answer) != Some(b"subscribe") {
            return Err(Failure::unclear(Reason::Garbled("its answer to SUBSCRIBE has an unexpected form".into())));
        }
        let breaker = self.connection.breaker().map_err(|error| Failure::unclear(error.into()))?;
        {
            let mut state = self.shared.state.lock();
            if state.stop {
                return Err(Failure::unclear(Reason::Io(io::ErrorKind::Interrupted.into())));
            }
            state.live = true;
            state.breaker = Some(breaker);
        }
        self.shared.changed.notify_all();
        if std::mem::take(&mut self.troubled) {
            log::info!("hears of grants from {} again", self.node.label());
        }
        // Whoever waited through a gap may have been passed over in it.
        self.shared.mailbox.look_again();
        Ok(())
    }

    fn listen(&mut self) -> Ended {
        let mut heard_at = clock::now();
        let mut used_at = heard_at;
        let mut asked_at = None;
        loop {
            let until = clock::now().saturating_add(PING_EVERY.min(self.node.operation_timeout()));
            match self.connection.receive_until(until) {
                Ok(Some(message)) => {
                    heard_at = clock::now();
                    asked_at = None;
                    self.dispatch(&message);
                }
                Ok(None) => {}
                Err(_) if self.shared.state.lock().stop => return Ended::Stopped,
                Err(failure) => return Ended::Broken(failure),
            }
            let now = clock::now();
            if self.shared.state.lock().stop {
                return Ended::Stopped;
            }
            if !self.shared.mailbox.is_empty() {
                used_at = now;
            } else if now.after(used_at) >= IDLE_MAX && self.retire() {
                return Ended::Idle;
            }
            match asked_at {
                Some(asked) if now.after(asked) >= self.node.operation_timeout() => {
                    return Ended::Broken(Failure::unclear(Reason::TimedOut));
                }
                None if used_at == now && now.after(heard_at) >= PING_EVERY => {
                    if let Err(failure) = self.connection.send(until, |out| write_command(out, &[b"PING"])) {
                        return Ended::Broken(failure);
                    }
                    asked_at = Some(now);
                }
                _ => {}
            }
        }
    }

    fn dispatch(&self, message: &Value) {
        let Value::Array(parts) = message else { return };
        if let [Value::BulkString(kind), _, Value::BulkString(payload)] = parts.as_slice()
            && kind == b"message"
        {
            match GrantNews::parse(payload) {
                Some(news) => {
                    let grant = Handover { token: news.token, granted_at_us: news.granted_at_us, px_ms: news.px_ms };
                    self.shared.mailbox.deliver(news.id, grant);
                }
                None => log::warn!("ignores a message on {} that is not a grant", self.shared.channel),
            }
        }
    }

    /// Ends the subscription unless somebody has come to use it. Whoever comes later finds it not live.
    fn retire(&self) -> bool {
        let mut state = self.shared.state.lock();
        if !self.shared.mailbox.is_empty() {
            return false;
        }
        state.live = false;
        state.wanted = false;
        state.breaker = None;
        true
    }

    fn mark_broken(&self) {
        let mut state = self.shared.state.lock();
        state.live = false;
        state.breaker = None;
        state.failures += 1;
        // With nobody left to wait, there is no hurry to come back.
        state.wanted = !self.shared.mailbox.is_empty();
        drop(state);
        self.shared.changed.notify_all();
    }

    fn pause(&self, span: Duration) {
        let until = clock::now().saturating_add(span);
        let mut state = self.shared.state.lock();
        while !state.stop && clock::now() < until {
            clock::park(&self.shared.changed, &mut state, until);
        }
    }

    fn tell_trouble(&mut self, reason: &Reason) {
        if !std::mem::replace(&mut self.troubled, true) {
            log::warn!("cannot hear of grants from {}: {reason}; waiters look by themselves", self.node.label());
        }
    }
}

fn kind(value: &Value) -> Option<&[u8]> {
    match value {
        Value::Array(parts) => match parts.first()? {
            Value::BulkString(kind) => Some(kind),
            _ => None,
        },
        _ => None,
    }
}
