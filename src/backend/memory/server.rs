//! `Server`: one server in memory, which all its managers share.

use std::{
    collections::{BTreeMap, VecDeque},
    io, mem,
    sync::Arc,
    time::Duration,
};

use redis::Value;

use super::{
    scripts::{Channels, Script},
    store::{Bytes, CommandError, Data, Keys},
};
use crate::{
    backend::redis::{
        Decoded, Exchange, NodeError, NodeErrorKind, Request, ScriptRef,
        requests::{Release, ReleaseReply},
    },
    core::{
        clock_sample::ClockSample,
        glob,
        key::LockKey,
        kind::{LockKind, is_group},
    },
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex},
    },
};

/// What the server's clock shows when the server is created, in microseconds: in 2023.
const FIRST_US: u64 = 1_700_000_000_000_000;
/// A reply is the result of the call that sent the request, so one nonce is enough.
const NONCE: u64 = 1;

#[derive(Debug)]
pub(crate) struct Server {
    created_at: Moment,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    keys: Keys,
    stopped: bool,
    /// Time from a request to its reply.
    reply_delay: Duration,
    subscribers: BTreeMap<Bytes, Vec<Arc<Inbox>>>,
}

/// The messages for one subscriber.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    messages: VecDeque<Bytes>,
    closed: bool,
    /// The next read, or the one in progress, ends early.
    woken: bool,
}

/// What a script publishes: inboxes and their messages.
struct Publisher<'a> {
    subscribers: &'a BTreeMap<Bytes, Vec<Arc<Inbox>>>,
    published: Vec<(Arc<Inbox>, Bytes)>,
}

impl Channels for Publisher<'_> {
    fn publish(&mut self, channel: &[u8], payload: &[u8]) -> usize {
        let inboxes = self.subscribers.get(channel).map_or(&[][..], Vec::as_slice);
        self.published.extend(inboxes.iter().map(|inbox| (inbox.clone(), payload.to_vec())));
        inboxes.len()
    }

    fn subscribers(&self, channel: &[u8]) -> usize {
        self.subscribers.get(channel).map_or(0, Vec::len)
    }
}

impl Server {
    pub(crate) fn new() -> Server {
        Server { created_at: clock::now(), state: Mutex::default() }
    }

    fn now_us(&self, now: Moment) -> u64 {
        let elapsed = now.duration_since(self.created_at).as_micros();
        FIRST_US.saturating_add(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }

    /// Reads the server's clock.
    pub(super) fn clock_sample(&self) -> ClockSample {
        let now = clock::now();
        ClockSample::new(now, now, self.now_us(now))
    }

    /// Sends a request that must be carried out by `deadline`, and returns its reply.
    pub(crate) fn exchange<C: Request>(
        &self,
        request: &C,
        deadline: Moment,
    ) -> Result<Exchange<C::Reply>, NodeError> {
        let sent = clock::now();
        let reply_delay = {
            let state = self.state.lock();
            if state.stopped {
                return Err(stopped());
            }
            state.reply_delay
        };
        let reply = self.run(request, deadline);
        if !reply_delay.is_zero() {
            let arrives = sent.saturating_add(reply_delay);
            clock::sleep_until(arrives.min(deadline));
            if arrives > deadline {
                return Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
            }
        }
        let (reply, server_us) = reply?;
        Ok(Exchange { sent, server_us, reply })
    }

    /// Carries out a request, even if the server is stopped.
    fn run<C: Request>(
        &self,
        request: &C,
        deadline: Moment,
    ) -> Result<Decoded<C::Reply>, NodeError> {
        let mut bytes = Vec::new();
        request.encode(ScriptRef::HASH, NONCE, self.now_us(deadline), &mut bytes);
        let reply = self.execute(&words(&bytes))?;
        let unexpected = || NodeError::protocol("its reply has an unexpected form");
        request.decode(NONCE, reply).ok_or_else(unexpected)
    }

    fn execute(&self, words: &[Bytes]) -> Result<Value, NodeError> {
        let mut state = self.state.lock();
        // Read under the mutex, because the time must not go back from one request to the next.
        let now_us = self.now_us(clock::now());
        let State { keys, subscribers, .. } = &mut *state;
        let mut publisher = Publisher { subscribers, published: Vec::new() };
        let unknown = || Err(CommandError("ERR unknown command or script".into()));
        let result = match words {
            [ping] if ping == b"PING" => Ok(Value::SimpleString("PONG".into())),
            [scan, _cursor, _match, pattern, ..] if scan == b"SCAN" => {
                Ok(scan_all(keys, pattern, now_us))
            }
            [evalsha, hash, rest @ ..] if evalsha == b"EVALSHA" => match Script::by_hash(hash) {
                Some(script) => script.run(rest, keys.open(now_us, false), &mut publisher),
                None => unknown(),
            },
            _ => unknown(),
        };
        let published = publisher.published;
        drop(state);
        for (inbox, message) in published {
            inbox.push(message);
        }
        result.map_err(|CommandError(why)| {
            let (code, message) = why.split_once(' ').unwrap_or((&why, ""));
            NodeError::from_server(code, message, str::to_owned)
        })
    }

    /// Subscribes to a channel, until the inbox is dropped elsewhere or closed.
    pub(super) fn subscribe(&self, channel: &str) -> Result<Arc<Inbox>, NodeError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(stopped());
        }
        let inbox = Arc::new(Inbox::default());
        state.subscribers.entry(channel.into()).or_default().push(inbox.clone());
        Ok(inbox)
    }

    pub(super) fn unsubscribe(&self, channel: &str, inbox: &Arc<Inbox>) {
        let mut state = self.state.lock();
        if let Some(inboxes) = state.subscribers.get_mut(channel.as_bytes()) {
            inboxes.retain(|other| !Arc::ptr_eq(other, inbox));
            if inboxes.is_empty() {
                state.subscribers.remove(channel.as_bytes());
            }
        }
    }

    /// Sets a lock key, even if the lock is held.
    pub(crate) fn hold(&self, key: &LockKey, holder: &str, ttl: Duration) {
        let now_ms = self.now_us(clock::now()) / 1_000;
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let (key, holder) = (key.lock_key().as_bytes(), Data::Text(holder.into()));
        self.state.lock().keys.put(key, Some(holder), Some(now_ms.saturating_add(ttl_ms)));
    }

    /// Releases a lock of any holder. Returns whether there was one.
    pub(crate) fn take_away(&self, key: &LockKey) -> bool {
        let now = clock::now();
        let lock_key = key.lock_key().as_bytes();
        let holder = self.state.lock().keys.peek(lock_key, self.now_us(now)).map(<[u8]>::to_vec);
        let Some(id) = holder else { return false };
        let kind = if is_group(&id) { LockKind::Write } else { LockKind::Mutex };
        let released = self.run(&Release::new(kind, key, &id), now);
        matches!(released, Ok((ReleaseReply::Released { .. }, _)))
    }

    /// Refuses connections from now on, and closes those that exist.
    pub(crate) fn stop(&self) {
        self.restart(|state| state.stopped = true);
    }

    /// Delays each reply from now on.
    pub(crate) fn slow(&self, reply_delay: Duration) {
        self.state.lock().reply_delay = reply_delay;
    }

    /// Accepts connections again, and replies at once.
    pub(crate) fn resume(&self) {
        let mut state = self.state.lock();
        (state.stopped, state.reply_delay) = (false, Duration::ZERO);
    }

    /// Restarts without data.
    pub(crate) fn forget(&self) {
        self.restart(|state| state.keys = Keys::default());
    }

    fn restart(&self, change: impl FnOnce(&mut State)) {
        let subscribers = {
            let mut state = self.state.lock();
            change(&mut state);
            std::mem::take(&mut state.subscribers)
        };
        subscribers.values().flatten().for_each(|inbox| inbox.close());
    }
}

/// The words of a request.
fn words(request: &[u8]) -> Vec<Bytes> {
    let Ok(Value::Array(words)) = redis::parse_redis_value(request) else { return Vec::new() };
    let text = |word| match word {
        Value::BulkString(bytes) => bytes,
        _ => Bytes::new(),
    };
    words.into_iter().map(text).collect()
}

/// All keys of strings that match, in one step.
fn scan_all(keys: &Keys, pattern: &[u8], now_us: u64) -> Value {
    let found = keys
        .live_entries(now_us)
        .filter(|(key, data, _)| matches!(data, Data::Text(_)) && glob::matches(pattern, key));
    let found = found.map(|(key, ..)| Value::BulkString(key.to_vec())).collect();
    Value::Array(vec![Value::BulkString(b"0".to_vec()), Value::Array(found)])
}

/// Nothing listens at the server's address.
fn stopped() -> NodeError {
    NodeError::not_applied(io::ErrorKind::ConnectionRefused)
}

impl Inbox {
    fn push(&self, message: Bytes) {
        self.state.lock().messages.push_back(message);
        clock::wake_all(&self.changed);
    }

    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        clock::wake_all(&self.changed);
    }

    pub(super) fn wake(&self) {
        self.state.lock().woken = true;
        clock::wake_all(&self.changed);
    }

    pub(super) fn is_open(&self) -> bool {
        !self.state.lock().closed
    }

    /// Waits for a message until `until`.
    pub(super) fn receive(&self, until: Moment) -> Result<Option<Bytes>, NodeError> {
        let mut state = self.state.lock();
        loop {
            if let Some(message) = state.messages.pop_front() {
                return Ok(Some(message));
            }
            if state.closed {
                let closed = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(NodeError::outcome_unknown(closed.into()));
            }
            if mem::take(&mut state.woken) || clock::now() >= until {
                return Ok(None);
            }
            clock::park(&self.changed, &mut state, until);
        }
    }
}
