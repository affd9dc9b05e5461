//! A connection with a deadline on every operation. Its socket is closed as soon as the state of
//! the exchange is in doubt.
//!
//! The redis crate's own connection has no connect timeout, restarts its read timeout for every
//! reply, and stays "open" after a reset. This one combines a socket with the redis crate's parser.
//! One deadline covers name lookup, connecting, the handshake, writing and all reads, including
//! interrupted system calls. After anything but a well-formed reply the socket is closed, and the
//! next use opens a new one.

mod handshake;
#[cfg(test)]
pub(in crate::backend::redis::node) mod tests;
mod user_commands;

use std::{fmt, io, mem, sync::Arc, time::Duration};

use redis::Value;

pub(crate) use self::handshake::Handshake;
use self::handshake::handshake;
use super::{framed_socket::FramedSocket, unread_replies::LateReader, url::Endpoint};
use crate::{
    backend::{
        CancelHandle,
        error::{NodeError, NodeErrorKind},
        redis::fields::{is_foreign, is_tls},
        transport::{self, Transport},
    },
    core::{ack::Ack, id::random_uuid},
    sys::clock::{self, Moment},
};

/// Minimum idle time after which a connection is checked before it is used again. Checking costs a
/// system call.
const IDLE_CHECK_MIN: Duration = Duration::from_millis(100);

#[cfg(feature = "tls")]
const TLS_HINT: &str = "its reply begins like TLS; use rediss://, or a port without TLS";
#[cfg(not(feature = "tls"))]
const TLS_HINT: &str = "its reply begins like TLS, which is not built in; enable the feature \
    `tls` and use rediss://, or use a port without TLS";

pub(crate) struct Connection {
    endpoint: Arc<Endpoint>,
    link: Option<FramedSocket>,
    out: Vec<u8>,
    /// Nonce of the last request; `None` before the first one. The first nonce is random.
    nonce: Option<u64>,
    /// Operation timeout. Bounds each command of a user, and the time for which a reply may stay
    /// unread.
    timeout: Duration,
    spin_max: Duration,
    /// A user has sent commands over the current socket.
    used_by_caller: bool,
    /// Opening time of a socket that broke; kept until the break is reported.
    broken_opened_at: Option<Moment>,
    /// The handshake fails unless it can read the server's run id, uptime and role.
    requires_server_info: bool,
    /// Epoch of the server this connection reached. The epoch of a node increases when its server
    /// is replaced.
    server_epoch: u64,
    /// What [`Discovery::takeovers`] returned before this connection looked for its server.
    ///
    /// [`Discovery::takeovers`]: crate::backend::discovery::Discovery::takeovers
    takeovers: u64,
}

impl Connection {
    /// Creates a connection without a socket. It connects when it is first used, on the thread that
    /// uses it and within that thread's deadline.
    ///
    /// If replies usually arrive within `spin_max`, a thread that waits for one busy-waits for up
    /// to that time.
    pub(crate) fn unconnected(
        endpoint: Arc<Endpoint>,
        timeout: Duration,
        spin_max: Duration,
        requires_server_info: bool,
    ) -> Connection {
        Connection {
            endpoint,
            link: None,
            out: Vec::with_capacity(1024),
            nonce: None,
            timeout,
            spin_max,
            used_by_caller: false,
            broken_opened_at: None,
            requires_server_info,
            server_epoch: 0,
            takeovers: 0,
        }
    }

    /// Creates a connection without a socket, with the same settings.
    pub(crate) fn clone_unconnected(&self) -> Connection {
        Connection::unconnected(
            self.endpoint.clone(),
            self.timeout,
            self.spin_max,
            self.requires_server_info,
        )
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn db(&self) -> i64 {
        self.endpoint.db
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Returns when the current socket was opened, which distinguishes it from earlier sockets of
    /// this connection.
    pub(crate) fn opened_at(&self) -> Option<Moment> {
        self.link.as_ref().map(|link| link.opened_at)
    }

    /// Closes the socket if a user has sent commands over it, because they may have changed its
    /// state.
    pub(crate) fn close_if_used_by_caller(&mut self) {
        if mem::take(&mut self.used_by_caller) {
            self.close();
        }
    }

    /// Records that a user sends commands over the socket. Returns whether one has done so before.
    fn mark_used_by_caller(&mut self) -> bool {
        mem::replace(&mut self.used_by_caller, true)
    }

    /// Closes the socket, without counting it as broken. The next use opens a new one.
    pub(crate) fn close(&mut self) {
        (self.link, self.broken_opened_at) = (None, None);
    }

    /// Records the epoch of the server that the current socket leads to.
    pub(crate) fn set_server_epoch(&mut self, server_epoch: u64) {
        self.server_epoch = server_epoch;
    }

    /// Whether the socket leads to an earlier server of its node. That server may still run, but
    /// must not be asked any more.
    pub(crate) fn is_replaced(&self, server_epoch: u64) -> bool {
        self.link.is_some()
            && (self.server_epoch < server_epoch
                || self.takeovers < self.endpoint.discovery.takeovers())
    }

    /// Closes the socket and counts it as broken, because its state is unknown.
    pub(crate) fn poison(&mut self) {
        if let Some(link) = self.link.take() {
            self.broken_opened_at.get_or_insert(link.opened_at);
        }
    }

    /// Returns when the broken socket was opened, if one broke since the last call.
    pub(crate) fn take_broken_opened_at(&mut self) -> Option<Moment> {
        self.broken_opened_at.take()
    }

    /// Whether the socket is open, and the peer has not closed it as far as we know.
    pub(crate) fn is_peer_open(&mut self) -> bool {
        self.link.as_mut().is_some_and(|link| link.transport.has_input().is_ok())
    }

    /// Returns a handle with which another thread ends a read.
    pub(crate) fn cancel_handle(&self) -> io::Result<CancelHandle> {
        match &self.link {
            Some(link) => link.transport.cancel_handle(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Connects if necessary. Returns the handshake if the connection is new.
    ///
    /// An existing socket is checked without a round trip. It is replaced if the server closed it,
    /// or if it holds bytes that belong to no request.
    pub(crate) fn connect(&mut self, deadline: Moment) -> Result<Option<Handshake>, NodeError> {
        if self.is_ready() {
            return Ok(None);
        }
        // A takeover that is noticed meanwhile costs another connection, and is never missed.
        self.takeovers = self.endpoint.discovery.takeovers();
        let addresses = self.endpoint.discovery.resolve(deadline)?;
        let Endpoint { security, discovery, .. } = &*self.endpoint;
        let host = discovery.host();
        let of_host = security.as_ref().zip(host).map(|(security, host)| security.for_host(&host));
        let security = of_host.as_ref().or(security.as_ref());
        let transport = transport::connect(&addresses, security, deadline).map_err(|error| {
            let error = NodeError::not_applied(error);
            match discovery.found() {
                Some(server) => error_at(error, &server),
                None => error,
            }
        })?;
        self.link = Some(FramedSocket::new(transport));
        // If the handshake fails, the caller's request has not been sent.
        let required = self.requires_server_info;
        let handshake =
            handshake(self, &self.endpoint.clone(), required, deadline).map_err(|error| {
                self.poison();
                NodeError { outcome_unknown: false, ..error }
            })?;
        log_safely!(debug, "connected to {}", self.endpoint.label);
        Ok(Some(handshake))
    }

    /// Whether a request can be sent now over the existing socket. Closes a socket that is no
    /// longer usable.
    pub(crate) fn is_ready(&mut self) -> bool {
        self.is_ready_checking_idle(IDLE_CHECK_MIN)
    }

    /// As [`is_ready`](Self::is_ready), but checks a socket that was idle for `idle_min`.
    fn is_ready_checking_idle(&mut self, idle_min: Duration) -> bool {
        let now = clock::now();
        self.read_unread(now);
        let timeout = self.timeout;
        let Some(link) = &mut self.link else { return false };
        let is_usable = match link.unread.since() {
            None => {
                now.duration_since(link.used_at) < idle_min
                    || matches!(link.transport.has_input(), Ok(false))
            }
            Some(since) => {
                link.unread.may_grow(&*link.transport) && now.duration_since(since) < timeout
            }
        };
        if !is_usable {
            self.poison();
        }
        is_usable
    }

    /// The server behind the new socket is known to have these scripts.
    pub(crate) fn set_loaded_scripts(&mut self, scripts: u32) {
        if let Some(link) = &mut self.link {
            link.loaded_scripts = scripts;
        }
    }

    /// Whether the source of the script has been sent over this socket before. Records that it has
    /// been now.
    pub(crate) fn mark_script_loaded(&mut self, script: u32) -> bool {
        let Some(link) = &mut self.link else { return false };
        let loaded = link.loaded_scripts & script != 0;
        link.loaded_scripts |= script;
        loaded
    }

    /// Returns the time to busy-wait for a reply.
    pub(crate) fn spin_time(&self) -> Duration {
        self.link.as_ref().map_or(Duration::ZERO, |link| link.spin_time(self.spin_max))
    }

    /// Returns the transport to poll for replies.
    pub(crate) fn transport(&self) -> Option<&dyn Transport> {
        self.link.as_ref().map(|link| &*link.transport)
    }

    /// Converts an error reply into an error. If the server is not a master, also closes the
    /// socket, because the host name may lead to another server by now.
    pub(crate) fn check_error_reply(&mut self, value: &Value) -> Result<(), NodeError> {
        let Value::ServerError(error) = value else { return Ok(()) };
        let error = NodeError::from_server(error.code(), error.details().unwrap_or(""), |text| {
            self.endpoint.quote(text)
        });
        if error.is_not_master() {
            self.close();
        }
        Err(error)
    }

    /// Returns a number that no earlier request on this connection carried.
    pub(crate) fn next_nonce(&mut self) -> u64 {
        let nonce = self.nonce.map_or_else(random_nonce, |last| last.wrapping_add(1));
        self.nonce = Some(nonce);
        nonce
    }

    /// Writes one request, encoded by `compose`. Returns the time before the first byte was sent.
    pub(crate) fn send(
        &mut self,
        deadline: Moment,
        compose: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Moment, NodeError> {
        self.out.clear();
        compose(&mut self.out);
        let sent = clock::now();
        self.flush(deadline)?;
        Ok(sent)
    }

    fn flush(&mut self, deadline: Moment) -> Result<(), NodeError> {
        let Some(link) = &mut self.link else {
            return Err(NodeError::not_applied(io::ErrorKind::NotConnected));
        };
        let result = link.write_all(&self.out, deadline);
        // Shrink the buffer after a large batch of renewals.
        if self.out.capacity() > 64 << 10 {
            self.out = Vec::with_capacity(1024);
        }
        result.map_err(|error| {
            self.poison();
            NodeError::outcome_unknown(error.into())
        })
    }

    /// Reads one value. Closes the socket after an error or at the deadline.
    pub(crate) fn receive(&mut self, deadline: Moment) -> Result<Value, NodeError> {
        match self.receive_until(deadline) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => {
                self.poison();
                Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut))
            }
            Err(error) => Err(error),
        }
    }

    /// Reads one value, after the abandoned replies. Returns `None` if it has not arrived by
    /// `until`; reading can then be continued.
    pub(crate) fn receive_until(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        loop {
            let unread = self.unread_count();
            match self.receive_next(until)? {
                Some(value) if unread > 0 => match self.skip_reply(value, clock::now()) {
                    // An abandoned reply made us close the socket before the awaited reply. The
                    // awaited request may still be executed.
                    Err(error) if !self.is_connected() => {
                        return Err(NodeError { outcome_unknown: true, ..error });
                    }
                    _ => {}
                },
                value => return Ok(value),
            }
        }
    }

    /// Reads the abandoned replies that have arrived. Returns the time since which others have been
    /// awaited, if there are others, and whether any reply just read was not an error.
    pub(crate) fn read_unread(&mut self, now: Moment) -> (Option<Moment>, bool) {
        let mut any_ok = false;
        while self.unread_count() > 0 {
            match self.receive_next(now) {
                Ok(Some(value)) => any_ok |= self.skip_reply(value, now).is_ok(),
                // An error has closed the socket.
                Ok(None) | Err(_) => break,
            }
        }
        (self.link.as_ref().and_then(|link| link.unread.since()), any_ok)
    }

    /// Returns the number of replies in flight that no caller waits for.
    pub(crate) fn unread_count(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.unread.count() as usize)
    }

    /// Counts one unread reply as read. An error reply still matters, because it may apply to all
    /// later requests too.
    fn skip_reply(&mut self, value: Value, now: Moment) -> Result<(), NodeError> {
        let is_error = matches!(&value, Value::ServerError(_));
        let reader = self.link.as_mut().and_then(|link| link.unread.on_read(is_error, now));
        let result = self.check_error_reply(&value);
        if let (Err(error), Some(link)) = (&result, &mut self.link)
            && error.is_unknown_script()
        {
            // The reply does not name the missing script. A server loses all scripts at once.
            link.loaded_scripts = 0;
        }
        if let (Ok(()), Some(read)) = (&result, reader) {
            read(value);
        }
        result
    }

    /// Abandons the reply in flight. The server executes later requests on this connection after
    /// the abandoned one, and replies in the same order. Returns `None` if there is no connection
    /// any more.
    pub(crate) fn abandon_reply(&mut self, reader: Option<LateReader>) -> Option<Ack> {
        Some(self.link.as_mut()?.unread.abandon(reader, clock::now()))
    }

    fn receive_next(&mut self, until: Moment) -> Result<Option<Value>, NodeError> {
        let Some(link) = &mut self.link else {
            let not_connected = io::Error::from(io::ErrorKind::NotConnected);
            return Err(NodeError::outcome_unknown(not_connected.into()));
        };
        match link.read(until, self.spin_max) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_timeout() => Ok(None),
            Err(error) => {
                let (begin, failure) = (mem::take(&mut link.begin), link.failure.take());
                self.poison();
                let kind = match failure.map(NodeErrorKind::from) {
                    Some(kind @ NodeErrorKind::Tls(_)) => kind,
                    _ if is_tls(&begin) => NodeErrorKind::Tls(TLS_HINT.into()),
                    _ if is_foreign(&begin) => {
                        NodeErrorKind::NotRedis(quote_begin(&self.endpoint, &begin))
                    }
                    Some(kind) => kind,
                    None => NodeErrorKind::Protocol(self.endpoint.quote(&error.to_string())),
                };
                Err(NodeError::outcome_unknown(kind))
            }
        }
    }
}

/// Prepares the first bytes of a server of another kind for messages.
fn quote_begin(endpoint: &Endpoint, begin: &[u8]) -> String {
    const SHOWN_CHARS_MAX: usize = 32;
    let begin = String::from_utf8_lossy(begin);
    // Cut last, because a cut password would not be found.
    endpoint.quote(&begin).chars().take(SHOWN_CHARS_MAX).collect()
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("server", &self.endpoint.label)
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

fn random_nonce() -> u64 {
    random_uuid().as_u64_pair().1 >> 16
}

/// Adds the server's address. Errors of TLS name it already.
fn error_at(failure: NodeError, server: &str) -> NodeError {
    let kind = match &failure.kind {
        NodeErrorKind::TimedOut => io::ErrorKind::TimedOut,
        NodeErrorKind::Io(error) => error.kind(),
        _ => return failure,
    };
    let text = format!("{} ({server})", failure.kind);
    NodeError { kind: io::Error::new(kind, text).into(), ..failure }
}
