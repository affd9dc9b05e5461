//! The faults that a [`FaultProxy`](super::FaultProxy) knows, and the rules that place them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::CEILING;

/// What goes wrong with a request that a rule has matched.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The server runs the request; its reply is lost and the connection stays.
    DropReply,
    /// The server runs the request; instead of its reply the client gets a reset.
    ResetAfterRequest,
    /// The server runs the request; instead of its reply the client gets an end of stream.
    CloseAfterRequest,
    /// The client gets a reset and the server never sees the request.
    ResetBeforeRequest,
    /// The reply, and all behind it on this connection, comes later.
    DelayReply(Duration),
    /// The reply, and all behind it on this connection, waits for [`Armed::let_go`].
    HoldReply,
    /// The request, and all behind it on this connection, waits for [`Armed::let_go`] and then
    /// reaches the server even when the client has long gone away.
    HoldRequest,
    DuplicateReply,
    /// The server gets the request twice, and so the client a second reply.
    DuplicateRequest,
    /// These bytes come instead of the reply.
    ReplaceReply(Vec<u8>),
    /// These bytes come in front of the reply.
    PrependBytes(Vec<u8>),
    /// The reply comes one byte per segment.
    SliceReply,
    /// The reply ends after so many bytes, and the connection stays.
    CutReply(usize),
    /// The client gets what becomes of the reply.
    Rewrite(Rewrite),
}

/// What becomes of a reply on its way; see [`rewrite`].
#[derive(Clone)]
pub struct Rewrite(pub(super) Arc<Change>);

type Change = dyn Fn(&[u8]) -> Vec<u8> + Send + Sync;

impl std::fmt::Debug for Rewrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rewrite")
    }
}

/// A reply that is one bulk text becomes another; others stay as they are.
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

/// In place of each reply the client gets another, made anew.
pub fn instead(make: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Fault {
    Fault::Rewrite(Rewrite(Arc::new(move |_| make())))
}

/// A reply of `TIME` becomes that of a clock which is ahead by so many seconds, or behind.
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

/// Matches a command by its name, in any case.
pub fn command(name: &str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    let name = name.as_bytes().to_vec();
    move |words| words.first().is_some_and(|word| word.eq_ignore_ascii_case(&name))
}

/// Matches a request in which some word contains `part`.
pub fn contains(part: &str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    let part = part.to_owned();
    move |words| words.iter().any(|word| String::from_utf8_lossy(word).contains(&part))
}

/// Matches every request.
pub fn any_request(_: &[Vec<u8>]) -> bool {
    true
}

/// The handle of a rule; the rule stays in force without it.
#[derive(Clone)]
pub struct Armed {
    shared: Arc<(Mutex<Firing>, Condvar)>,
}

struct Firing {
    /// So many matches are let pass first.
    spared: usize,
    limit: usize,
    matched: usize,
    fired: usize,
    let_go: bool,
}

impl Armed {
    pub(super) fn once() -> Self {
        let firing = Firing { spared: 0, limit: 1, matched: 0, fired: 0, let_go: false };
        Self { shared: Arc::new((Mutex::new(firing), Condvar::new())) }
    }

    /// Lets the rule match `limit` requests in all, instead of one.
    pub fn times(self, limit: usize) -> Self {
        self.shared.0.lock().limit = limit;
        self
    }

    pub fn forever(self) -> Self {
        self.times(usize::MAX)
    }

    /// Lets `spared` requests that match pass first: with two, it is the third that counts.
    pub fn after(self, spared: usize) -> Self {
        self.shared.0.lock().spared = spared;
        self
    }

    /// Matches nothing from now on; what has already matched takes its course.
    pub fn disarm(&self) {
        self.shared.0.lock().limit = 0;
    }

    /// How often the fault has taken place. A fault of the reply counts once the server has
    /// answered and before the client can notice, and a hold when it begins.
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
        let late = self.shared.1.wait_while_for(&mut firing, enough, CEILING).timed_out();
        assert!(!late, "the fault fired {} of {times} times", firing.fired);
    }

    /// Ends all holds and delays of this rule, those to come included.
    pub fn let_go(&self) {
        self.shared.0.lock().let_go = true;
        self.shared.1.notify_all();
    }

    /// Nothing will match any more, and nothing is held.
    pub(super) fn is_over(&self) -> bool {
        let firing = self.shared.0.lock();
        firing.matched >= firing.limit && firing.let_go
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
        let held = |firing: &mut Firing| !firing.let_go;
        match deadline {
            Some(deadline) => {
                self.shared.1.wait_while_until(&mut firing, held, deadline);
            }
            None => self.shared.1.wait_while(&mut firing, held),
        }
    }
}
