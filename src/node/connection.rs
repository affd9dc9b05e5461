//! A connection with a deadline on everything, poisoned on any doubt.
//!
//! The redis crate's own connection has no timeout on connecting, counts its read timeout anew for every reply, and
//! stays "open" after a reset. This one is a socket and the redis crate's parser: a deadline covers name lookup,
//! connecting, signing in, writing and all reads, interrupted calls included, and after anything but a well-formed
//! answer the socket is closed and never used again. The next use opens another.

use std::{
    fmt,
    io::{self, Read},
    net::Shutdown,
    sync::Arc,
    time::Duration,
};

use redis::{Parser, RedisResult, Value};

use super::{
    endpoint::Endpoint,
    failure::{Failure, Reason},
    reading::Reading,
    socket::Socket,
    wire::{array, bulk},
};
use crate::clock::{self, Moment};

/// No reply of a script of ours comes near this; a longer one is a fault or an attack.
const REPLY_BYTES_MAX: usize = 4 << 20;
/// A timeout on the socket that is this much too long is not worth a system call to mend.
const ARM_SLACK: Duration = Duration::from_millis(2);
/// A connection that was in use this short a time ago is not looked at before it is used again.
const FRESH: Duration = Duration::from_millis(100);

pub(crate) struct Connection {
    endpoint: Arc<Endpoint>,
    link: Option<Link>,
    out: Vec<u8>,
    nonce: u64,
    /// For users' own commands, which bring no deadline.
    timeout: Duration,
    spin_max: Duration,
    /// Users' own commands went over it.
    lent: bool,
}

struct Link {
    socket: Socket,
    parser: Parser,
    armed: Duration,
    used_at: Moment,
    /// How long the first byte of an answer usually takes.
    typical: Duration,
}

impl Connection {
    /// A place for a connection; it connects when it is first used, on the thread and within the deadline of its user.
    ///
    /// Its user keeps the core for up to `spin_max` while an answer is on its way, if answers usually come that soon.
    pub(crate) fn unconnected(endpoint: Arc<Endpoint>, timeout: Duration, spin_max: Duration) -> Connection {
        Connection {
            endpoint,
            link: None,
            out: Vec::with_capacity(1024),
            nonce: random_start(),
            timeout,
            spin_max,
            lent: false,
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Closes the socket if a user's own commands went over it: they may have left a state behind.
    pub(crate) fn retire_if_lent(&mut self) {
        if std::mem::take(&mut self.lent) {
            self.poison();
        }
    }

    /// Closes the socket; the next use opens another.
    pub(crate) fn poison(&mut self) {
        self.link = None;
    }

    /// Whether the peer has not closed it, as far as this side knows.
    pub(crate) fn is_whole(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.socket.is_closed())
    }

    /// A handle by which another thread can cut a read short.
    pub(crate) fn breaker(&self) -> io::Result<Breaker> {
        match &self.link {
            Some(link) => Ok(Breaker(link.socket.try_clone()?)),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Makes sure of a connection, and tells whether it is a new one. A connection that is there is looked at without
    /// a round trip: one that the server closed, or that has bytes nobody asked for, is replaced.
    pub(crate) fn connect(&mut self, deadline: Moment) -> Result<Option<Reading>, Failure> {
        if let Some(link) = &self.link {
            if clock::now().after(link.used_at) < FRESH || link.socket.is_quiet() {
                return Ok(None);
            }
            self.poison();
        }
        let socket = Socket::connect(&self.endpoint.address, deadline).map_err(Failure::not_sent)?;
        self.link = Some(Link {
            socket,
            parser: Parser::new(),
            armed: Duration::ZERO,
            used_at: clock::now(),
            typical: Duration::ZERO,
        });
        // Nothing of the caller's has been sent yet, whatever goes wrong in here.
        let reading = self.sign_in(deadline).map_err(|failure| {
            self.poison();
            Failure { sent: false, ..failure }
        })?;
        log::debug!("connected to {}", self.endpoint.label);
        Ok(Some(reading))
    }

    /// Signs in and reads the server's clock, in one round trip.
    fn sign_in(&mut self, deadline: Moment) -> Result<Reading, Failure> {
        let endpoint = self.endpoint.clone();
        let mut steps: Vec<Vec<&[u8]>> = Vec::new();
        if let Some(password) = &endpoint.password {
            let mut auth: Vec<&[u8]> = vec![b"AUTH"];
            auth.extend(endpoint.user.as_ref().map(String::as_bytes));
            auth.push(password.as_bytes());
            steps.push(auth);
        }
        let db = endpoint.db.to_string();
        if endpoint.db != 0 {
            steps.push(vec![b"SELECT", db.as_bytes()]);
        }
        steps.push(vec![b"TIME"]);
        self.out.clear();
        for step in &steps {
            write_command(&mut self.out, step);
        }
        let sent = clock::now();
        self.flush(deadline)?;
        let mut answer = Value::Nil;
        for step in &steps {
            answer = self.receive(deadline)?;
            self.refuse_errors(&answer).map_err(|failure| match failure.reason {
                // Servers that do not know the command repeat its arguments.
                Reason::Refused { code, .. } if step.first() == Some(&&b"AUTH"[..]) && code == "ERR" => {
                    Failure::refused(code, "it does not take this user or password (AUTH)".into())
                }
                _ => failure,
            })?;
        }
        Reading::from_time(sent, clock::now(), &answer)
            .ok_or_else(|| Failure::unclear(Reason::Garbled("its answer to TIME is not a time".into())))
    }

    /// A server's error as a failure.
    pub(crate) fn refuse_errors(&self, value: &Value) -> Result<(), Failure> {
        match value {
            Value::ServerError(error) => Err(Failure::refused(
                self.endpoint.quote(error.code()),
                self.endpoint.quote(error.details().unwrap_or("")),
            )),
            _ => Ok(()),
        }
    }

    /// A number that no earlier request on this connection carried.
    pub(crate) fn next_nonce(&mut self) -> u64 {
        self.nonce = self.nonce.wrapping_add(1);
        self.nonce
    }

    /// Writes one request, composed by `compose`, and says when: the moment before the first byte left.
    pub(crate) fn send(&mut self, deadline: Moment, compose: impl FnOnce(&mut Vec<u8>)) -> Result<Moment, Failure> {
        self.out.clear();
        compose(&mut self.out);
        let sent = clock::now();
        self.flush(deadline)?;
        Ok(sent)
    }

    fn flush(&mut self, deadline: Moment) -> Result<(), Failure> {
        let Some(link) = &mut self.link else {
            return Err(Failure::not_sent(io::ErrorKind::NotConnected.into()));
        };
        let result = link.write_all(&self.out, deadline);
        // A burst of renewals must not keep its buffer for ever.
        if self.out.capacity() > 64 << 10 {
            self.out = Vec::with_capacity(1024);
        }
        result.map_err(|error| {
            self.poison();
            Failure::unclear(error.into())
        })
    }

    /// Reads one value; an error or the end of the time poisons the connection.
    pub(crate) fn receive(&mut self, deadline: Moment) -> Result<Value, Failure> {
        match self.receive_until(deadline) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => {
                self.poison();
                Err(Failure::unclear(Reason::TimedOut))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Reads one value; `None` when it has not come by `until`, after which reading can go on.
    pub(crate) fn receive_until(&mut self, until: Moment) -> Result<Option<Value>, Failure> {
        let Some(link) = &mut self.link else {
            return Err(Failure::unclear(Reason::Io(io::ErrorKind::NotConnected.into())));
        };
        let started = clock::now();
        let spin_until = started.saturating_add(link.spin(self.spin_max));
        let Link { socket, parser, armed, .. } = link;
        let mut reader = Bounded { socket, armed, until, spin_until, first_at: None, left: REPLY_BYTES_MAX };
        let result = parser.parse_value(&mut reader);
        if let Some(first_at) = reader.first_at {
            link.used_at = first_at;
            link.learn(first_at.after(started));
        }
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_timeout() => Ok(None),
            Err(error) => {
                self.poison();
                let reason = match error.kind() {
                    redis::ErrorKind::Io => {
                        Reason::Io(error.detail().map_or_else(|| io::Error::other(error.to_string()), io::Error::other))
                    }
                    _ => Reason::Garbled(self.endpoint.quote(&error.to_string())),
                };
                Err(Failure::unclear(reason))
            }
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("server", &self.endpoint.label)
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

/// Closes a connection from outside, so that the thread that reads from it wakes up.
#[derive(Debug)]
pub(crate) struct Breaker(Socket);

impl Breaker {
    pub(crate) fn cut(&self) {
        // A socket that is closed already needs no cutting.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Link {
    fn spin(&self, longest: Duration) -> Duration {
        if self.typical > longest { Duration::ZERO } else { (self.typical * 2).max(longest / 4).min(longest) }
    }

    fn learn(&mut self, latency: Duration) {
        self.typical = (self.typical * 7 + latency) / 8;
    }

    fn write_all(&mut self, mut bytes: &[u8], deadline: Moment) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.socket.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.after(clock::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    self.socket.await_room(left)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads for the parser until a moment has come or enough bytes have.
struct Bounded<'a> {
    socket: &'a mut Socket,
    armed: &'a mut Duration,
    until: Moment,
    spin_until: Moment,
    first_at: Option<Moment>,
    left: usize,
}

impl Bounded<'_> {
    /// Looks again and again for a short while, letting others run in between: going to sleep and being woken can
    /// take longer than a server nearby takes to answer.
    fn spin(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        while clock::now() < self.spin_until {
            match self.socket.try_read(buffer) {
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                    std::thread::yield_now();
                }
                result => return result.map(Some),
            }
        }
        Ok(None)
    }

    fn took(&mut self, read: usize) -> usize {
        self.left -= read;
        self.spin_until = Moment::from_nanos(0);
        self.first_at.get_or_insert_with(clock::now);
        read
    }
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other("the reply is too long"));
        }
        let room = buffer.len().min(self.left);
        if let Some(read) = self.spin(&mut buffer[..room])? {
            return Ok(self.took(read));
        }
        loop {
            let remaining = self.until.after(clock::now());
            if remaining.is_zero() {
                // What has come in time is not late because nobody looked.
                return match self.socket.try_read(&mut buffer[..room]) {
                    Ok(read) => Ok(self.took(read)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::ErrorKind::TimedOut.into()),
                    Err(error) => Err(error),
                };
            }
            // A timeout that is too short only costs another turn of this loop.
            if *self.armed > remaining.saturating_add(ARM_SLACK) || *self.armed < remaining / 8 {
                self.socket.set_read_timeout(remaining)?;
                *self.armed = remaining;
            }
            match self.socket.read(&mut buffer[..room]) {
                Ok(read) => return Ok(self.took(read)),
                // Stopping and continuing the process interrupts a read that has a timeout.
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Appends a command in the protocol's form.
pub(crate) fn write_command(out: &mut Vec<u8>, parts: &[&[u8]]) {
    array(out, parts.len());
    for part in parts {
        bulk(out, &[part]);
    }
}

fn random_start() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().1 >> 16
}

/// For users' own commands through a pooled connection. Each exchange has the manager's operation timeout.
impl redis::ConnectionLike for Connection {
    fn req_packed_command(&mut self, command: &[u8]) -> RedisResult<Value> {
        let mut values = self.req_packed_commands(command, 0, 1)?;
        values.pop().unwrap_or(Value::Nil).extract_error()
    }

    fn req_packed_commands(&mut self, commands: &[u8], offset: usize, count: usize) -> RedisResult<Vec<Value>> {
        self.lent = true;
        let deadline = clock::now().saturating_add(self.timeout);
        self.connect(deadline).map_err(Failure::into_redis)?;
        self.send(deadline, |out| out.extend_from_slice(commands)).map_err(Failure::into_redis)?;
        let mut values = Vec::with_capacity(count.min(1024));
        for index in 0..offset.saturating_add(count) {
            let value = self.receive(deadline).map_err(Failure::into_redis)?;
            if index >= offset {
                values.push(value);
            }
        }
        Ok(values)
    }

    fn get_db(&self) -> i64 {
        self.endpoint.db
    }

    fn check_connection(&mut self) -> bool {
        redis::cmd("PING").query::<redis::Value>(self).is_ok()
    }

    fn is_open(&self) -> bool {
        // A closed one opens itself at the next use.
        true
    }
}
