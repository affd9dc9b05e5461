//! `Sentinels`: where the master is, according to Redis Sentinel.
//!
//! All sentinels are asked, because right after a failover only the one that led it knows the new
//! master. The reply with the highest configuration epoch counts, and never one with a lower epoch
//! than was seen before. While no sentinel replies, the last known master is used.

mod examine;

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::{Sender, TrySendError, bounded};
use parking_lot::Mutex;
use redis::Value;

pub(crate) use self::examine::examine;
pub use self::examine::{SentinelInfo, SentinelReplica, SentinelView};
use super::framed_socket::FramedSocket;
use crate::{
    backend::{
        address::Address,
        discovery::{Discovery, host_label, of_host},
        error::{NodeError, NodeErrorKind},
        redis::fields::{write_array, write_bulk},
        transport::{self, Security},
    },
    sys::{
        clock::{self, Moment},
        display::quote_reply,
        threads,
    },
};

/// Maximum time for one request to one sentinel, including connecting.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time that a new connection waits for further sentinels after the first has replied.
const FURTHER_REPLIES_TIMEOUT: Duration = Duration::from_millis(100);
/// Interval of the requests while nothing connects. A former master that was frozen replies again
/// until a sentinel demotes it.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// One sentinel, as the URL names it.
pub(super) struct Sentinel {
    pub(super) label: String,
    pub(super) discovery: Box<dyn Discovery>,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) security: Option<Security>,
}

/// The sentinels that watch one master.
#[derive(Clone)]
pub(crate) struct Sentinels(Arc<Shared>);

struct Shared {
    /// Name of the master in the configuration of the sentinels.
    service: String,
    sentinels: Box<[Watched]>,
    known: Mutex<Known>,
    takeovers: AtomicU64,
}

struct Watched {
    sentinel: Sentinel,
    /// A thread is asking it.
    is_asked: AtomicBool,
    /// Stays open between two requests.
    link: Mutex<Option<FramedSocket>>,
}

#[derive(Default)]
struct Known {
    master: Option<Master>,
    /// Last reply of each sentinel, and when it arrived.
    replies: Vec<Option<(Moment, Result<Master, Failure>)>>,
    /// Notified of each reply.
    waiting: Vec<Sender<()>>,
}

/// What a sentinel reports about the master.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Master {
    config_epoch: u64,
    host: String,
    /// Address as the sentinel names it.
    label: String,
    addresses: Vec<Address>,
}

const LOGIN: &str = " (its login is sentinel_user and sentinel_pass, after ? in the URL)";

/// Why a sentinel did not name a master.
#[derive(Clone, Debug)]
struct Failure {
    reason: String,
    kind: FailureKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureKind {
    Passing,
    /// Asking again does not help.
    Lasting,
    /// A secure connection is not possible. Asking again does not help here either.
    Tls,
}

impl Failure {
    fn passing(reason: impl fmt::Display) -> Failure {
        Failure { reason: reason.to_string(), kind: FailureKind::Passing }
    }

    fn lasting(reason: impl Into<String>) -> Failure {
        Failure { reason: reason.into(), kind: FailureKind::Lasting }
    }

    fn to_connect(error: io::Error) -> Failure {
        match NodeErrorKind::from(error) {
            NodeErrorKind::Tls(reason) => Failure { reason, kind: FailureKind::Tls },
            other => Failure::passing(other),
        }
    }
}

impl Sentinels {
    pub(super) fn new(service: String, sentinels: Vec<Sentinel>) -> Sentinels {
        let known = Known { replies: vec![None; sentinels.len()], ..Known::default() };
        Sentinels(Arc::new(Shared {
            service,
            sentinels: sentinels.into_iter().map(Watched::new).collect(),
            known: Mutex::new(known),
            takeovers: AtomicU64::new(0),
        }))
    }

    /// Returns the sentinels as the URL names them.
    #[cfg(feature = "tls")]
    pub(super) fn each(&self) -> impl Iterator<Item = &Sentinel> {
        self.0.sentinels.iter().map(|watched| &watched.sentinel)
    }
}

impl Discovery for Sentinels {
    fn resolve(&self, deadline: Moment) -> Result<Vec<Address>, NodeError> {
        let Sentinels(shared) = self;
        let began = clock::now();
        // The other half is left to connect to the master.
        let left = deadline.duration_since(began) / 2;
        let reply_by = began.saturating_add(left.min(REPLY_TIMEOUT));
        let (sender, replied) = bounded(1);
        shared.known.lock().waiting.push(sender);
        shared.ask_all();
        loop {
            let until = shared.known.lock().wait_until(began, reply_by);
            let left = until.duration_since(clock::now());
            if left.is_zero() {
                break;
            }
            // A timeout ends the wait too.
            let _ = replied.recv_timeout(left);
        }
        drop(replied);
        let known = shared.known.lock();
        match &known.master {
            Some(master) => Ok(master.addresses.clone()),
            None => Err(shared.no_master(&known)),
        }
    }

    fn host(&self) -> Option<String> {
        self.0.known.lock().master.as_ref().map(|master| master.host.clone())
    }

    fn found(&self) -> Option<String> {
        let known = self.0.known.lock();
        let master = known.master.as_ref()?;
        Some(format!("{}, the master that the sentinels name", master.label))
    }

    fn takeovers(&self) -> u64 {
        self.0.takeovers.load(Ordering::Acquire)
    }

    fn refresh_interval(&self) -> Option<Duration> {
        Some(REFRESH_INTERVAL)
    }

    fn refresh(&self) {
        self.0.ask_all();
    }
}

impl Known {
    /// Time until which a connection that began to wait at `began` waits for more replies.
    fn wait_until(&self, began: Moment, reply_by: Moment) -> Moment {
        let mut until = reply_by;
        let mut all_have_replied = true;
        for reply in &self.replies {
            match reply {
                Some((at, reply)) if *at >= began => {
                    if reply.is_ok() {
                        until = until.min(at.saturating_add(FURTHER_REPLIES_TIMEOUT));
                    }
                }
                _ => all_have_replied = false,
            }
        }
        if all_have_replied { began } else { until }
    }

    /// Records a reply. If the master has moved, returns from where to where.
    fn learn(&mut self, index: usize, reply: Result<Master, Failure>) -> Option<(String, String)> {
        if let Some(last) = self.replies.get_mut(index) {
            *last = Some((clock::now(), reply));
        }
        self.waiting
            .retain(|waiting| !matches!(waiting.try_send(()), Err(TrySendError::Disconnected(()))));
        let replies = self.replies.iter().flatten().filter_map(|(_, reply)| reply.as_ref().ok());
        let master = choose(replies.collect(), self.master.as_ref())?.clone();
        let former = self.master.replace(master.clone())?;
        (!former.is_same(&master)).then_some((former.label, master.label))
    }
}

impl Shared {
    /// Asks each sentinel that is not being asked already, on a thread of its own.
    fn ask_all(self: &Arc<Shared>) {
        for (index, watched) in self.sentinels.iter().enumerate() {
            if watched.is_asked.swap(true, Ordering::AcqRel) {
                continue;
            }
            let shared = self.clone();
            let ask = move || {
                let reply = shared.sentinels[index].ask(&shared.service);
                shared.sentinels[index].is_asked.store(false, Ordering::Release);
                shared.learn(index, reply);
            };
            if let Err(error) = threads::spawn("distlock-sentinel", ask) {
                watched.is_asked.store(false, Ordering::Release);
                self.learn(index, Err(Failure::passing(error)));
            }
        }
    }

    fn learn(&self, index: usize, reply: Result<Master, Failure>) {
        let moved = self.known.lock().learn(index, reply);
        if let Some((former, master)) = moved {
            self.takeovers.fetch_add(1, Ordering::AcqRel);
            log_safely!(info, "{} has moved from {former} to {master}", self.service);
        }
    }

    fn no_master(&self, known: &Known) -> NodeError {
        let failures = known.replies.iter().zip(&self.sentinels).map(|(reply, watched)| {
            let reason = match reply {
                Some((_, Err(failure))) => &failure.reason,
                _ => "no reply in time",
            };
            format!("{}: {reason}", watched.sentinel.label)
        });
        let failures = failures.collect::<Vec<_>>().join("; ");
        let text = format!("no sentinel names the master of \"{}\": {failures}", self.service);
        let all = |is_like: fn(FailureKind) -> bool| {
            let mut replies = known.replies.iter();
            replies.all(|reply| matches!(reply, Some((_, Err(failure))) if is_like(failure.kind)))
        };
        let kind = if all(|kind| kind == FailureKind::Tls) {
            NodeErrorKind::Tls(text)
        } else if all(|kind| kind != FailureKind::Passing) {
            NodeErrorKind::Ineligible(text)
        } else {
            let is_silent = known.replies.iter().any(Option::is_none);
            let kind = if is_silent { io::ErrorKind::TimedOut } else { io::ErrorKind::Other };
            NodeErrorKind::Io(Arc::new(io::Error::new(kind, text)))
        };
        NodeError::not_applied(kind)
    }
}

impl Master {
    /// Whether two replies name the same server. Of one name, the addresses may come in any order,
    /// and not always all of them.
    fn is_same(&self, other: &Master) -> bool {
        self.addresses.iter().any(|address| other.addresses.contains(address))
    }
}

/// The newest of these replies, unless the current master is newer. Among replies of one epoch,
/// most sentinels decide.
fn choose<'a>(replies: Vec<&'a Master>, current: Option<&'a Master>) -> Option<&'a Master> {
    let votes = |master: &Master| replies.iter().filter(|other| other.is_same(master)).count();
    let is_current = |master: &Master| current.is_some_and(|current| current.is_same(master));
    let newest = replies
        .iter()
        .copied()
        .max_by_key(|master| (master.config_epoch, votes(master), is_current(master)));
    match (newest, current) {
        (Some(newest), Some(current)) if newest.config_epoch < current.config_epoch => {
            Some(current)
        }
        (newest, current) => newest.or(current),
    }
}

impl Watched {
    fn new(sentinel: Sentinel) -> Watched {
        Watched { sentinel, is_asked: AtomicBool::new(false), link: Mutex::new(None) }
    }

    fn ask(&self, service: &str) -> Result<Master, Failure> {
        let deadline = clock::now().saturating_add(REPLY_TIMEOUT);
        let kept = self.link.lock().take();
        if let Some(mut link) = kept
            && matches!(link.transport.has_input(), Ok(false))
            && let Ok(master) = self.ask_over(&mut link, service, deadline)
        {
            *self.link.lock() = Some(link);
            return Ok(master);
        }
        let mut link = self.connect(deadline)?;
        let master = self.ask_over(&mut link, service, deadline)?;
        *self.link.lock() = Some(link);
        Ok(master)
    }

    fn connect(&self, deadline: Moment) -> Result<FramedSocket, Failure> {
        let Sentinel { discovery, user, password, security, .. } = &self.sentinel;
        let addresses =
            discovery.resolve(deadline).map_err(|error| Failure::passing(&error.kind))?;
        let transport = transport::connect(&addresses, security.as_ref(), deadline)
            .map_err(Failure::to_connect)?;
        let mut link = FramedSocket::new(transport);
        if let Some(password) = password {
            let mut words = vec!["AUTH"];
            words.extend(user.as_deref());
            words.push(password);
            let [reply] = self.exchange(&mut link, [&words], deadline)?;
            self.check(&reply)?;
        }
        Ok(link)
    }

    fn ask_over(
        &self,
        link: &mut FramedSocket,
        service: &str,
        deadline: Moment,
    ) -> Result<Master, Failure> {
        let state = ["SENTINEL", "MASTER", service];
        // While a failover ends, the leader names the new master here first.
        let address = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service];
        let [state, address] = self.exchange(link, [&state, &address], deadline)?;
        self.check(&state)?;
        let unexpected = || Failure::lasting("its reply has an unexpected form");
        let (config_epoch, host, port) = parse(&state, &address).ok_or_else(unexpected)?;
        let addresses = of_host(&host, port)
            .resolve(deadline)
            .map_err(|error| Failure::passing(&error.kind))?;
        Ok(Master { config_epoch, label: host_label(&host, port), host, addresses })
    }

    /// Sends commands, and reads their replies.
    fn exchange<const N: usize>(
        &self,
        link: &mut FramedSocket,
        commands: [&[&str]; N],
        deadline: Moment,
    ) -> Result<[Value; N], Failure> {
        let mut out = Vec::new();
        for command in commands {
            write_array(&mut out, command.len());
            command.iter().for_each(|word| write_bulk(&mut out, &[word.as_bytes()]));
        }
        link.write_all(&out, deadline)
            .map_err(|error| Failure::passing(NodeErrorKind::from(error)))?;
        let mut replies = [const { Value::Nil }; N];
        for reply in &mut replies {
            *reply = link.read(deadline, Duration::ZERO).map_err(|error| {
                if error.is_timeout() {
                    Failure::passing(NodeErrorKind::TimedOut)
                } else {
                    Failure::passing(self.quote(&error.to_string()))
                }
            })?;
        }
        Ok(replies)
    }

    /// Explains an error reply.
    fn check(&self, reply: &Value) -> Result<(), Failure> {
        let Value::ServerError(error) = reply else { return Ok(()) };
        let text = error.details().unwrap_or_default();
        Err(if text.contains("No such master") {
            Failure::lasting("it does not know this name")
        } else if text.contains("unknown command") || text.contains("Unknown command") {
            Failure::lasting("it is not a sentinel; use redis:// for a server itself")
        } else {
            let refused = self.quote(&format!("{} {text}", error.code()));
            Failure::lasting(match error.code() {
                "NOAUTH" | "WRONGPASS" => refused + LOGIN,
                _ => refused,
            })
        })
    }

    fn quote(&self, text: &str) -> String {
        quote_reply(text, self.sentinel.password.as_deref())
    }
}

/// Reads the configuration epoch, the host and the port.
fn parse(state: &Value, address: &Value) -> Option<(u64, String, u16)> {
    let Value::Array(fields) = state else { return None };
    let epoch = fields
        .chunks_exact(2)
        .find(|pair| text(&pair[0]).as_deref() == Some("config-epoch"))
        .and_then(|pair| text(&pair[1])?.parse().ok())?;
    let (host, port) = address_in(address)?;
    Some((epoch, host, port))
}

/// Reads the host and the port of the master.
fn address_in(reply: &Value) -> Option<(String, u16)> {
    let Value::Array(address) = reply else { return None };
    let [host, port] = &address[..] else { return None };
    Some((text(host)?, text(port)?.parse().ok()?))
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels").field("service", &self.0.service).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
