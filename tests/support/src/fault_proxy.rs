//! A TCP proxy that knows where requests and replies begin and end. It can therefore break a
//! connection at an exact point between a command and its reply.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::faults::{ArmedFault, Fault, Matcher};
use super::ports::ReservedPort;
use super::protocol::Protocol;
use super::proxied::{Answer, Connection, Pending};
use super::resp::Frames;

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Healthy,
    Blackhole,
    OneWay,
    Deaf,
    Mute,
    Refusing,
    Closing,
}

/// A proxy in front of one server. Dropping it closes all its connections.
pub struct FaultProxy {
    hub: Arc<Hub>,
    acceptor: Mutex<Option<Acceptor>>,
}

struct Acceptor {
    listener: Arc<TcpListener>,
    thread: JoinHandle<()>,
}

struct Hub {
    protocol: Protocol,
    upstream: Mutex<SocketAddr>,
    port: ReservedPort,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    mode: Mode,
    rules: Vec<(Matcher, Fault, ArmedFault)>,
    connections: Vec<Arc<Connection>>,
    threads: Vec<JoinHandle<()>>,
}

impl FaultProxy {
    pub fn in_front_of(upstream: SocketAddr) -> Self {
        Self::new(Protocol::Redis, upstream)
    }

    /// A proxy in front of a MySQL or MariaDB, for connections without TLS or compression.
    ///
    /// A reply is whatever the server sends until the client's next request. Faults that change a
    /// reply change only the part that arrives first, and discard the others if they replace, cut
    /// or drop it. [`change`](super::change) applies to each part. A request must not be sent
    /// before the reply to the previous one has arrived.
    pub fn in_front_of_mysql(upstream: SocketAddr) -> Self {
        Self::new(Protocol::MySql, upstream)
    }

    /// A proxy in front of the port with TLS of a Redis server. Of the faults of single requests,
    /// only those fit that need not know the request.
    pub fn in_front_of_tls(upstream: SocketAddr) -> Self {
        Self::new(Protocol::Tls, upstream)
    }

    fn new(protocol: Protocol, upstream: SocketAddr) -> Self {
        let hub = Hub {
            protocol,
            upstream: Mutex::new(upstream),
            port: ReservedPort::new(),
            state: Mutex::new(State {
                mode: Mode::Healthy,
                rules: Vec::new(),
                connections: Vec::new(),
                threads: Vec::new(),
            }),
            changed: Condvar::new(),
        };
        let proxy = Self { hub: Arc::new(hub), acceptor: Mutex::new(None) };
        proxy.listen();
        proxy
    }

    pub fn addr(&self) -> SocketAddr {
        self.hub.port.addr()
    }

    /// The proxy's URL, without a password even if the server requires one.
    pub fn url(&self) -> String {
        self.hub.protocol.url(self.addr())
    }

    /// Applies `fault` to the next request that `matcher` accepts.
    ///
    /// If several rules match, the oldest that is not used up applies. The matcher must not call
    /// the proxy, which holds its own lock during the call.
    pub fn on_request(
        &self,
        matcher: impl Fn(&[Vec<u8>]) -> bool + Send + 'static,
        fault: Fault,
    ) -> ArmedFault {
        let armed = ArmedFault::once();
        let rule = (Box::new(matcher) as Matcher, fault, armed.clone());
        let mut state = self.hub.state.lock();
        state.rules.retain(|(_, _, armed)| !armed.is_over());
        state.rules.push(rule);
        armed
    }

    /// Discards everything in both directions and closes nothing.
    pub fn blackhole(&self) {
        self.hub.switch(Mode::Blackhole);
    }

    /// Forwards requests and discards everything that the server sends.
    pub fn one_way(&self) {
        self.hub.switch(Mode::OneWay);
    }

    /// Discards requests and forwards everything that the server sends.
    pub fn deaf(&self) {
        self.hub.switch(Mode::Deaf);
    }

    /// Accepts new connections and never answers them. Existing connections keep working.
    pub fn mute_new(&self) {
        self.hub.switch(Mode::Mute);
    }

    /// Closes the server's side of all current connections. The clients do not notice; they only
    /// receive no more replies.
    pub fn lose_server(&self) {
        self.each(Connection::lose_server);
    }

    /// Resets the clients' side of all current connections. The server does not notice and keeps
    /// its side open.
    pub fn lose_clients(&self) {
        self.each(Connection::lose_client);
    }

    /// Resets all connections and refuses new ones.
    pub fn refuse(&self) {
        self.hub.switch(Mode::Refusing);
        self.close_listener();
        self.reset_all();
    }

    /// Returns to normal operation: ends every mode above, and closes the half-open connections
    /// that [`lose_server`](Self::lose_server), [`lose_clients`](Self::lose_clients) or
    /// [`mute_new`](Self::mute_new) left behind. The rules of [`on_request`](Self::on_request)
    /// stay.
    pub fn heal(&self) {
        self.hub.switch(Mode::Healthy);
        self.listen();
        self.each(|connection| {
            if connection.is_half() {
                connection.close();
                connection.close_server();
            }
        });
    }

    /// Forwards all connections that are opened from now on to another server.
    pub fn lead_to(&self, upstream: SocketAddr) {
        *self.hub.upstream.lock() = upstream;
    }

    /// Discards everything on the current connections and closes nothing, like a NAT that has
    /// forgotten them. New connections work.
    pub fn forget(&self) {
        self.each(Connection::forget);
    }

    /// Resets all current connections.
    pub fn reset_all(&self) {
        self.each(Connection::reset);
    }

    fn each(&self, act: impl Fn(&Connection)) {
        let connections = self.hub.state.lock().connections.clone();
        connections.iter().for_each(|connection| act(connection));
    }

    /// The number of connections that neither side has closed.
    pub fn connections(&self) -> usize {
        let state = self.hub.state.lock();
        let open = |connection: &&Arc<Connection>| connection.client().is_some();
        state.connections.iter().filter(open).count()
    }

    fn listen(&self) {
        let mut acceptor = self.acceptor.lock();
        if acceptor.is_none() {
            let listener = Arc::new(self.hub.port.listen());
            let hub = Arc::clone(&self.hub);
            let accepting = Arc::clone(&listener);
            let thread = thread::spawn(move || {
                while let Ok((client, _)) = accepting.accept() {
                    hub.open(client);
                }
            });
            *acceptor = Some(Acceptor { listener, thread });
        }
    }

    fn close_listener(&self) {
        if let Some(acceptor) = self.acceptor.lock().take() {
            // Wakes up the thread that waits in `accept`.
            let _ = rustix::net::shutdown(&acceptor.listener, rustix::net::Shutdown::Both);
            let _ = acceptor.thread.join();
        }
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.hub.switch(Mode::Closing);
        self.close_listener();
        let mut state = self.hub.state.lock();
        state.rules.iter().for_each(|(_, _, armed)| armed.release());
        let connections = std::mem::take(&mut state.connections);
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        for connection in connections {
            connection.close();
            // A stopped server would never close its side on its own.
            connection.close_server();
        }
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Hub {
    fn switch(&self, mode: Mode) {
        self.state.lock().mode = mode;
        self.changed.notify_all();
    }

    fn mode(&self) -> Mode {
        self.state.lock().mode
    }

    /// Waits while the proxy is in one of the modes `silent`, which must not forward the end of a
    /// connection either.
    fn wait_while(&self, silent: &[Mode]) {
        let mut state = self.state.lock();
        let silent = |state: &mut State| silent.contains(&state.mode);
        self.changed.wait_while(&mut state, silent);
    }

    fn fault_for(&self, words: &[Vec<u8>]) -> Option<(Fault, ArmedFault)> {
        let state = self.state.lock();
        let mut rules = state.rules.iter();
        let rule = rules.find(|(matcher, _, armed)| matcher(words) && armed.take());
        rule.map(|(_, fault, armed)| (fault.clone(), armed.clone()))
    }

    fn open(self: &Arc<Self>, client: TcpStream) {
        let _ = client.set_nodelay(true);
        let mode = self.mode();
        // A connection accepted during a blackhole is connected to the server later, with its first
        // request after `heal`. In MySQL the server speaks first, so `heal` closes the connection.
        let half =
            mode == Mode::Mute || (mode == Mode::Blackhole && self.protocol == Protocol::MySql);
        let connection = Arc::new(Connection::new(client, half));
        if !matches!(mode, Mode::Blackhole | Mode::Mute) && self.connect(&connection).is_err() {
            return connection.reset();
        }
        let mut state = self.state.lock();
        state.threads.retain(|thread| !thread.is_finished());
        // Each thread of a connection has its own `Arc`, so a count of 1 means that both have
        // ended.
        state.connections.retain(|connection| Arc::strong_count(connection) > 1);
        state.connections.push(Arc::clone(&connection));
        let hub = Arc::clone(self);
        let pump = thread::spawn(move || hub.pump_requests(&connection));
        state.threads.push(pump);
    }

    fn connect(self: &Arc<Self>, connection: &Arc<Connection>) -> io::Result<Arc<TcpStream>> {
        let mut slot = connection.server.lock();
        if let Some(server) = &*slot {
            return Ok(Arc::clone(server));
        }
        let server = Arc::new(TcpStream::connect(*self.upstream.lock())?);
        server.set_nodelay(true)?;
        let mut state = self.state.lock();
        if state.mode == Mode::Closing {
            return Err(io::ErrorKind::NotConnected.into());
        }
        *slot = Some(Arc::clone(&server));
        let (hub, source) = (Arc::clone(self), Arc::clone(&server));
        let connection = Arc::clone(connection);
        let pump = thread::spawn(move || hub.pump_replies(&connection, &source));
        state.threads.push(pump);
        Ok(server)
    }

    fn pump_requests(self: &Arc<Self>, connection: &Arc<Connection>) {
        let mut frames = Frames::default();
        // No `Arc` of the client's socket is kept between two reads: the reset is sent only when
        // the last one is dropped.
        while let Some(client) = connection.client() {
            let read = frames.fill(&*client);
            drop(client);
            if !read.is_ok_and(|read| read > 0) {
                break;
            }
            while let Some(frame) = self.protocol.take_request(&mut frames) {
                if self.forward(connection, &frame).is_err() {
                    connection.reset();
                }
            }
        }
        connection.client.lock().take();
        self.wait_while(&[Mode::Blackhole, Mode::Deaf]);
        if connection.is_half() {
            return;
        }
        // Close only this direction. If both were closed, the server's replies would be answered
        // with a reset, and the server could then lose requests that it has not read yet.
        if let Some(server) = &*connection.server.lock() {
            let _ = server.shutdown(Shutdown::Write);
        }
    }

    fn forward(self: &Arc<Self>, connection: &Arc<Connection>, frame: &[u8]) -> io::Result<()> {
        // A connection that was cut forwards nothing more, not even requests already read.
        let silent = matches!(self.mode(), Mode::Blackhole | Mode::Deaf)
            || connection.is_half()
            || connection.is_forgotten();
        if silent || connection.client().is_none() {
            return Ok(());
        }
        let words = self.protocol.words(frame);
        let fault = self.fault_for(&words);
        match &fault {
            Some((Fault::ResetBeforeRequest, armed)) => {
                armed.fire();
                connection.reset();
                return Ok(());
            }
            Some((Fault::HoldRequest, armed)) => {
                armed.fire();
                armed.hold(None);
            }
            Some((Fault::SwallowRequest, armed)) => {
                connection.forget();
                armed.fire();
                return Ok(());
            }
            _ => {}
        }
        let server = self.connect(connection)?;
        let twice = matches!(fault, Some((Fault::DuplicateRequest, _)));
        if self.protocol != Protocol::Redis {
            connection.pending.lock().clear();
        }
        connection.pending.lock().push_back(Pending::new(&words, fault));
        if twice {
            connection.pending.lock().push_back(Pending::new(&words, None));
            (&*server).write_all(frame)?;
        }
        (&*server).write_all(frame)
    }

    fn pump_replies(&self, connection: &Connection, server: &TcpStream) {
        let mut frames = Frames::default();
        while frames.fill(server).is_ok_and(|read| read > 0) {
            while let Some(frame) = self.protocol.take_reply(&mut frames) {
                let answer = match self.protocol {
                    Protocol::Redis => connection.answered(frame),
                    Protocol::MySql | Protocol::Tls => connection.answered_in_part(frame),
                };
                match answer {
                    Answer::Part => {}
                    Answer::Whole(reply, None) => self.deliver(connection, &reply),
                    Answer::Whole(reply, Some((fault, armed))) => {
                        self.spoil(connection, &reply, &fault, &armed);
                    }
                }
            }
        }
        self.wait_while(&[Mode::Blackhole, Mode::OneWay]);
        if !connection.is_half() {
            connection.close();
        }
    }

    fn spoil(&self, connection: &Connection, reply: &[u8], fault: &Fault, armed: &ArmedFault) {
        // Counted before the client can notice the fault, so that a test that has seen its effect
        // can rely on the count.
        if !matches!(fault, Fault::ResetBeforeRequest | Fault::HoldRequest) {
            armed.fire();
        }
        match fault {
            Fault::DropReply => {}
            Fault::ResetAfterRequest => connection.reset(),
            Fault::CloseAfterRequest => connection.close(),
            Fault::DelayReply(time) => {
                armed.hold(Some(*time));
                self.deliver(connection, reply);
            }
            Fault::HoldReply => {
                armed.hold(None);
                self.deliver(connection, reply);
            }
            Fault::DuplicateReply => self.deliver(connection, &reply.repeat(2)),
            Fault::ReplaceReply(bytes) => self.deliver(connection, bytes),
            Fault::PrependBytes(bytes) => self.deliver(connection, &[bytes, reply].concat()),
            Fault::SliceReply => {
                reply.chunks(1).for_each(|byte| self.deliver(connection, byte));
            }
            Fault::CutReply(length) => self.deliver(connection, &reply[..reply.len().min(*length)]),
            Fault::Rewrite(how) => self.deliver(connection, &how.0(reply)),
            // These faults were applied to the request.
            Fault::ResetBeforeRequest
            | Fault::HoldRequest
            | Fault::SwallowRequest
            | Fault::DuplicateRequest => {
                self.deliver(connection, reply);
            }
        }
    }

    fn deliver(&self, connection: &Connection, bytes: &[u8]) {
        let passes = matches!(self.mode(), Mode::Healthy | Mode::Deaf | Mode::Mute)
            && !connection.is_forgotten();
        if let (true, Some(client)) = (passes, connection.client()) {
            let _ = (&*client).write_all(bytes);
        }
    }
}
