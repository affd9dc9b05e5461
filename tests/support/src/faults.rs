//! The faults that a [`FaultProxy`](super::FaultProxy) can cause, and the rules that select the
//! requests for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::TEST_TIMEOUT;

/// What happens to a request that a rule has matched.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The server runs the request. Its reply is lost, and the connection stays open.
    DropReply,
    /// The server runs the request. The client gets a reset instead of the reply.
    ResetAfterRequest,
    /// The server runs the request. The client gets an end of stream instead of the reply.
    CloseAfterRequest,
    /// The client gets a reset, and the server never sees the request.
    ResetBeforeRequest,
    /// The reply and everything after it on this connection arrive later by this time.
    DelayReply(Duration),
    /// The reply and everything after it on this connection wait for [`ArmedFault::release`].
    HoldReply,
    /// The request and everything after it on this connection wait for [`ArmedFault::release`].
    /// They then reach the server even if the client has closed the connection long before.
    HoldRequest,
    /// The request and everything after it on this connection disappear, and so do the replies. The
    /// connection stays open, as where a path drops large packets.
    SwallowRequest,
    DuplicateReply,
    /// The server gets the request twice, so the client gets a second reply.
    DuplicateRequest,
    /// The client gets these bytes instead of the reply.
    ReplaceReply(Vec<u8>),
    /// The client gets these bytes before the reply.
    PrependBytes(Vec<u8>),
    /// The reply is sent one byte at a time.
    SliceReply,
    /// Only this many bytes of the reply are sent, and the connection stays open.
    CutReply(usize),
    /// The client gets the result of this function instead of the reply.
    Rewrite(Rewrite),
}

/// A function that changes a reply on its way to the client; see [`rewrite`].
#[derive(Clone)]
pub struct Rewrite(pub(super) Arc<Change>);

type Change = dyn Fn(&[u8]) -> Vec<u8> + Send + Sync;

impl std::fmt::Debug for Rewrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rewrite")
    }
}

/// Changes every reply that is a bulk string. Other replies pass unchanged.
pub fn rewrite(how: impl Fn(&str) -> String + Send + Sync + 'static) -> Fault {
    Fault::Rewrite(Rewrite(Arc::new(move |reply| {
        let text = String::from_utf8_lossy(reply);
        match text.strip_prefix('$').and_then(|rest| rest.split_once("\r\n")) {
            Some((_, line)) => {
                let line = how(line.trim_end_matches("\r\n"));
                format!("${}\r\n{line}\r\n", line.len()).into_bytes()
            }
            None => reply.to_vec(),
        }
    })))
}

/// Replaces each reply, in MySQL each part of it, with the result of `how`.
pub fn change(how: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static) -> Fault {
    Fault::Rewrite(Rewrite(Arc::new(how)))
}

/// Replaces each reply with the result of `make`.
pub fn instead(make: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Fault {
    Fault::Rewrite(Rewrite(Arc::new(move |_| make())))
}

/// Changes the replies to `TIME`: the server's clock appears to be ahead by `seconds`, or behind if
/// `seconds` is negative.
pub fn off_by(seconds: i64) -> Fault {
    Fault::Rewrite(Rewrite(Arc::new(move |reply| {
        let text = String::from_utf8_lossy(reply);
        let mut parts: Vec<String> = text.split("\r\n").map(str::to_owned).collect();
        if let [_, length, now, ..] = parts.as_mut_slice() {
            *now = (now.parse::<i64>().expect("a number of seconds") + seconds).to_string();
            *length = format!("${}", now.len());
        }
        parts.join("\r\n").into_bytes()
    })))
}

pub(super) type Matcher = Box<dyn Fn(&[Vec<u8>]) -> bool + Send>;

/// Matches requests by the name of the command, ignoring case.
pub fn command(name: &str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    let name = name.as_bytes().to_vec();
    move |words| words.first().is_some_and(|word| word.eq_ignore_ascii_case(&name))
}

/// Matches requests in which any word contains `part`.
pub fn contains(part: &str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    let part = part.to_owned();
    move |words| words.iter().any(|word| String::from_utf8_lossy(word).contains(&part))
}

/// Matches requests of more than `limit` bytes.
pub fn larger_than(limit: usize) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    let sent = |length: usize| length.to_string().len() + "*\r\n".len();
    move |words| {
        let words_sent = words.iter().map(|word| sent(word.len()) + word.len() + "\r\n".len());
        sent(words.len()) + words_sent.sum::<usize>() > limit
    }
}

/// Matches every request.
pub fn any_request(_: &[Vec<u8>]) -> bool {
    true
}

/// The handle of a rule. Dropping the handle does not remove the rule.
#[derive(Clone)]
pub struct ArmedFault {
    shared: Arc<(Mutex<Firing>, Condvar)>,
}

struct Firing {
    /// The number of matching requests that still pass before the rule takes effect.
    spared: usize,
    limit: usize,
    matched: usize,
    fired: usize,
    released: bool,
}

impl ArmedFault {
    pub(super) fn once() -> Self {
        let firing = Firing { spared: 0, limit: 1, matched: 0, fired: 0, released: false };
        Self { shared: Arc::new((Mutex::new(firing), Condvar::new())) }
    }

    /// Applies the rule to `limit` requests in total instead of one.
    pub fn times(self, limit: usize) -> Self {
        self.shared.0.lock().limit = limit;
        self
    }

    pub fn forever(self) -> Self {
        self.times(usize::MAX)
    }

    /// Lets the first `spared` matching requests pass: with 2, the rule starts at the third.
    pub fn after(self, spared: usize) -> Self {
        self.shared.0.lock().spared = spared;
        self
    }

    /// Matches no more requests. Faults that have already begun continue.
    pub fn disarm(&self) {
        self.shared.0.lock().limit = 0;
    }

    /// The number of times the fault has happened. A fault in the reply is counted after the server
    /// has replied and before the client can notice; a hold is counted when it begins.
    pub fn fired(&self) -> usize {
        self.shared.0.lock().fired
    }

    #[track_caller]
    pub fn wait_fired(&self) {
        self.wait_fired_times(1);
    }

    #[track_caller]
    pub fn wait_fired_times(&self, times: usize) {
        let mut firing = self.shared.0.lock();
        let enough = |firing: &mut Firing| firing.fired < times;
        let late = self.shared.1.wait_while_for(&mut firing, enough, TEST_TIMEOUT).timed_out();
        assert!(!late, "the fault happened {} times and not {times}", firing.fired);
    }

    /// Ends all holds and delays of this rule, now and in the future.
    pub fn release(&self) {
        self.shared.0.lock().released = true;
        self.shared.1.notify_all();
    }

    /// Returns whether the rule can match nothing more and holds nothing.
    pub(super) fn is_over(&self) -> bool {
        let firing = self.shared.0.lock();
        firing.matched >= firing.limit && firing.released
    }

    pub(super) fn fire(&self) {
        self.shared.0.lock().fired += 1;
        self.shared.1.notify_all();
    }

    pub(super) fn take(&self) -> bool {
        let mut firing = self.shared.0.lock();
        let live = firing.matched < firing.limit;
        if live && firing.spared > 0 {
            firing.spared -= 1;
            return false;
        }
        firing.matched += usize::from(live);
        live
    }

    pub(super) fn hold(&self, time: Option<Duration>) {
        let deadline = time.map(|time| Instant::now() + time);
        let mut firing = self.shared.0.lock();
        let held = |firing: &mut Firing| !firing.released;
        match deadline {
            Some(deadline) => {
                self.shared.1.wait_while_until(&mut firing, held, deadline);
            }
            None => self.shared.1.wait_while(&mut firing, held),
        }
    }
}
