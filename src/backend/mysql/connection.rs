//! A connection with a deadline on every operation. Its socket is closed as soon as the state of
//! the exchange is in doubt.

use std::{fmt, io, sync::Arc};

#[cfg(feature = "tls")]
use super::sign_in::tls_request;
use super::{
    endpoint::MySqlEndpoint,
    outcome::refusal,
    packet::{
        Malformed, Packet, ReplyReader, ServerError, StatementResult, split_packet, write_packet,
    },
    sign_in::{Greeting, Login, SignIn, Step},
};
use crate::{
    backend::{
        CancelHandle,
        error::{NodeError, NodeErrorKind},
        transport::{self, Security, Transport},
    },
    sys::{
        clock::{self, Moment},
        display::quote_reply,
    },
};

const COM_QUIT: u8 = 1;
const COM_QUERY: u8 = 3;
/// Maximum number of packets of the server during sign-in. Four are usual.
const SIGN_IN_PACKETS_MAX: usize = 16;
/// Maximum number of bytes that one read takes.
const READ_BYTES_MAX: usize = 16 << 10;
/// Maximum number of reads after the deadline, for a reply that has already arrived.
const LATE_READS_MAX: usize = 8;

pub(super) struct Connection {
    label: Arc<str>,
    password: Option<Arc<str>>,
    id: u64,
    version: String,
    is_mariadb: bool,
    link: Option<Link>,
}

/// An open socket, and what has been read from it.
struct Link {
    transport: Box<dyn Transport>,
    /// Bytes from the server that have not been parsed.
    input: Vec<u8>,
    /// Number of replies that have not arrived completely.
    owed: u32,
    reply: ReplyReader,
}

impl Connection {
    /// Connects and signs in. Nothing but the sign-in is sent if that fails.
    pub(super) fn open(
        endpoint: &MySqlEndpoint,
        deadline: Moment,
    ) -> Result<Connection, NodeError> {
        let addresses = endpoint.discovery.resolve(deadline)?;
        let transport =
            transport::connect(&addresses, None, deadline).map_err(NodeError::not_applied)?;
        let connection = Connection::sign_in(endpoint, transport, deadline)?;
        log_safely!(debug, "connected to {}", endpoint.label);
        Ok(connection)
    }

    fn sign_in(
        endpoint: &MySqlEndpoint,
        transport: Box<dyn Transport>,
        deadline: Moment,
    ) -> Result<Connection, NodeError> {
        let quote = |text: &str| endpoint.quote(text);
        let mut link = Link::new(transport);
        let failed = |kind| NodeError::not_applied(kind);
        let malformed = |what: Malformed| failed(what.into());
        let (_, payload) = link.read_packet(deadline).map_err(|kind| match kind {
            NodeErrorKind::TimedOut if link.input.is_empty() => failed(NodeErrorKind::NoGreeting),
            kind => failed(kind),
        })?;
        // For example if there are too many connections.
        if payload.first() == Some(&0xff) {
            return Err(
                ServerError::parse(&payload, quote).map_or_else(malformed, |error| refusal(&error))
            );
        }
        let greeting = Greeting::parse(&payload, quote).map_err(malformed)?;
        let has_tls = endpoint.security.is_some();
        if let Some(security) = &endpoint.security {
            link = secure(link, security, greeting.has_tls, deadline).map_err(failed)?;
        }
        let login = Login {
            user: &endpoint.user,
            password: endpoint.password.as_deref().unwrap_or_default(),
            database: &endpoint.database,
            is_private: endpoint.is_unix || has_tls,
            has_tls,
        };
        let (mut sign_in, reply) = SignIn::begin(login, &greeting).map_err(malformed)?;
        link.write_packet(1 + u8::from(has_tls), &[&reply], deadline)
            .map_err(|(_, kind)| failed(kind))?;
        for _ in 0..SIGN_IN_PACKETS_MAX {
            let (number, payload) = link.read_packet(deadline).map_err(failed)?;
            match sign_in.next(&payload, quote).map_err(malformed)? {
                Step::Send(reply) => link
                    .write_packet(number.wrapping_add(1), &[&reply], deadline)
                    .map_err(|(_, kind)| failed(kind))?,
                Step::Wait => {}
                Step::Refused(error) => return Err(refusal(&error)),
                Step::SignedIn => {
                    return Ok(Connection {
                        label: endpoint.label.clone(),
                        password: endpoint.password.clone(),
                        id: greeting.connection_id,
                        version: greeting.version,
                        is_mariadb: greeting.is_mariadb,
                        link: Some(link),
                    });
                }
            }
        }
        Err(malformed(Malformed("the sign-in does not end")))
    }

    /// Id of the connection in the server's greeting.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the greeting names MariaDB. The server is MySQL otherwise.
    pub(super) fn is_mariadb(&self) -> bool {
        self.is_mariadb
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Number of replies that have not arrived completely; 0 if the socket is closed.
    pub(super) fn owed(&self) -> u32 {
        self.link.as_ref().map_or(0, |link| link.owed)
    }

    /// Sends one or more statements. Their reply is owed from then on.
    pub(super) fn send(&mut self, sql: &str, deadline: Moment) -> Result<(), NodeError> {
        let Some(link) = &mut self.link else { return Err(not_connected()) };
        match link.write_packet(0, &[&[COM_QUERY], sql.as_bytes()], deadline) {
            Ok(()) => {
                link.owed = link.owed.saturating_add(1);
                Ok(())
            }
            Err((outcome_unknown, kind)) => {
                self.link = None;
                Err(NodeError { outcome_unknown, kind })
            }
        }
    }

    /// Reads the oldest reply that is owed. After a timeout the reply is still owed, and the next
    /// call continues to read it. If no reply is owed, waits until the server closes the
    /// connection.
    pub(super) fn receive(&mut self, deadline: Moment) -> Result<Vec<StatementResult>, NodeError> {
        let Some(link) = &mut self.link else { return Err(not_connected()) };
        let outcome_unknown = link.owed > 0;
        let password = self.password.as_deref();
        link.receive(|text| quote_reply(text, password), deadline).map_err(|kind| {
            if !matches!(kind, NodeErrorKind::TimedOut) {
                self.link = None;
            }
            NodeError { outcome_unknown, kind }
        })
    }

    /// Reads the oldest reply that is owed, if it has arrived. Fails if the server has closed the
    /// connection, even if no reply is owed.
    pub(super) fn try_receive(&mut self) -> Result<Option<Vec<StatementResult>>, NodeError> {
        match self.receive(Moment::from_nanos(0)) {
            Ok(results) => Ok(Some(results)),
            Err(error) if error.is_timeout() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends statements and reads their reply. All earlier replies must have been read.
    pub(super) fn query(
        &mut self,
        sql: &str,
        deadline: Moment,
    ) -> Result<Vec<StatementResult>, NodeError> {
        self.send(sql, deadline)?;
        self.receive(deadline)
    }

    /// Whether a query can be sent now: the socket is open, no reply is owed, and there is nothing
    /// to read. Closes the socket of an idle connection on which there is something to read,
    /// because then the server has closed it too.
    pub(super) fn is_idle(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        if link.owed > 0 {
            return false;
        }
        let is_idle = link.input.is_empty() && matches!(link.transport.has_input(), Ok(false));
        if !is_idle {
            self.link = None;
        }
        is_idle
    }

    /// Returns the transport to poll for replies; `None` if it is closed.
    pub(super) fn transport(&self) -> Option<&dyn Transport> {
        self.link.as_ref().map(|link| &*link.transport)
    }

    /// Returns a handle with which another thread ends a read.
    pub(super) fn cancel_handle(&self) -> io::Result<CancelHandle> {
        match &self.link {
            Some(link) => link.transport.cancel_handle(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Closes the connection with a message, without which the server counts it as aborted.
    /// Waits for nothing.
    pub(super) fn quit(mut self) {
        if let Some(link) = &mut self.link {
            let _ = link.write_packet(0, &[&[COM_QUIT]], Moment::from_nanos(0));
        }
    }
}

impl Link {
    fn new(transport: Box<dyn Transport>) -> Link {
        Link { transport, input: Vec::new(), owed: 0, reply: ReplyReader::default() }
    }

    /// Writes one packet. An error comes with whether a part of it may have been sent.
    fn write_packet(
        &mut self,
        number: u8,
        payload: &[&[u8]],
        deadline: Moment,
    ) -> Result<(), (bool, NodeErrorKind)> {
        let mut packet = Vec::with_capacity(256);
        if !write_packet(&mut packet, number, payload) {
            return Err((false, Malformed("the request is too long").into()));
        }
        let mut left = packet.as_slice();
        transport::write_all(&mut *self.transport, &mut left, deadline)
            .map_err(|error| (left.len() < packet.len(), error.into()))
    }

    /// Reads a packet of the sign-in.
    fn read_packet(&mut self, deadline: Moment) -> Result<(u8, Vec<u8>), NodeErrorKind> {
        let mut late_reads = LATE_READS_MAX;
        loop {
            if let Some((Packet { number, payload }, rest)) = split_packet(&self.input)? {
                let (payload, rest) = (payload.to_vec(), rest.to_vec());
                self.input = rest;
                return Ok((number, payload));
            }
            self.fill(deadline, &mut late_reads)?;
        }
    }

    fn receive(
        &mut self,
        quote: impl Fn(&str) -> String,
        deadline: Moment,
    ) -> Result<Vec<StatementResult>, NodeErrorKind> {
        let mut late_reads = LATE_READS_MAX;
        loop {
            if let Some(results) = self.parse(&quote)? {
                self.owed = self.owed.saturating_sub(1);
                return Ok(results);
            }
            self.fill(deadline, &mut late_reads)?;
        }
    }

    /// Parses the packets that have arrived. Returns the results when the reply is complete.
    fn parse(
        &mut self,
        quote: impl Fn(&str) -> String,
    ) -> Result<Option<Vec<StatementResult>>, NodeErrorKind> {
        let (mut results, mut parsed) = (None, 0);
        while results.is_none()
            && let Some((packet, rest)) = split_packet(&self.input[parsed..])?
        {
            // A server sends an unexpected error only before it closes the connection.
            if packet.is_error() && (self.owed == 0 || !self.reply.is_next(&packet)) {
                let ServerError { code, message } = ServerError::parse(packet.payload, quote)?;
                let reason = format!("it closed the connection: {code} {message}");
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason).into());
            }
            if self.owed == 0 {
                return Err(Malformed("it sent a packet that nobody asked for").into());
            }
            results = self.reply.read(&packet, &quote)?;
            parsed = self.input.len() - rest.len();
        }
        self.input.drain(..parsed);
        Ok(results)
    }

    /// Reads some bytes, or fails with a timeout.
    fn fill(&mut self, deadline: Moment, late_reads: &mut usize) -> Result<(), NodeErrorKind> {
        let before = self.input.len();
        self.input.resize(before + READ_BYTES_MAX, 0);
        let read = self.read(before, deadline, late_reads);
        self.input.truncate(before + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&mut self, at: usize, deadline: Moment, late_reads: &mut usize) -> io::Result<usize> {
        loop {
            let left = deadline.duration_since(clock::now());
            if left.is_zero() {
                // A reply that arrived in time may not have been read yet.
                *late_reads = late_reads.checked_sub(1).ok_or(io::ErrorKind::TimedOut)?;
            }
            match self.transport.read(&mut self.input[at..], left) {
                // Stopping and continuing the process interrupts a read.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                    ) => {}
                result => return result,
            }
        }
    }
}

/// Begins TLS on a connection over which only the greeting has come.
#[cfg(feature = "tls")]
fn secure(
    mut link: Link,
    security: &Security,
    is_offered: bool,
    deadline: Moment,
) -> Result<Link, NodeErrorKind> {
    if !is_offered {
        let why = "it does not offer TLS; configure a certificate there, or set \
                   ssl-mode=DISABLED in the URL if nobody can listen on the way";
        return Err(NodeErrorKind::Tls(why.into()));
    }
    // Bytes that came before the handshake could be those of an attacker.
    if !link.input.is_empty() {
        return Err(Malformed("it sent more than its greeting before TLS").into());
    }
    link.write_packet(1, &[&tls_request()], deadline).map_err(|(_, kind)| kind)?;
    Ok(Link::new(transport::secure(link.transport, security, deadline)?))
}

#[cfg(not(feature = "tls"))]
fn secure(_: Link, never: &Security, _: bool, _: Moment) -> Result<Link, NodeErrorKind> {
    match *never {}
}

fn not_connected() -> NodeError {
    NodeError::not_applied(io::ErrorKind::NotConnected)
}

impl From<Malformed> for NodeErrorKind {
    fn from(Malformed(what): Malformed) -> NodeErrorKind {
        NodeErrorKind::Protocol(what.into())
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("server", &self.label)
            .field("id", &self.id)
            .field("connected", &self.link.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(super) mod tests;
