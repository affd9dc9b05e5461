//! A TCP proxy that understands where requests and replies begin and end, and so can break a
//! connection at an exact point between a command and its answer.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::faults::{Armed, Fault, Matcher};
use super::ports::ReservedPort;
use super::proxied::{Answer, Connection, Pending};
use super::resp::{self, Frames};

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

/// The proxy; it ends, and with it all its connections, when it is dropped.
pub struct FaultProxy {
    hub: Arc<Hub>,
    acceptor: Mutex<Option<Acceptor>>,
}

struct Acceptor {
    listener: Arc<TcpListener>,
    thread: JoinHandle<()>,
}

struct Hub {
    upstream: Mutex<SocketAddr>,
    port: ReservedPort,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    mode: Mode,
    rules: Vec<(Matcher, Fault, Armed)>,
    connections: Vec<Arc<Connection>>,
    threads: Vec<JoinHandle<()>>,
}

impl FaultProxy {
    pub fn in_front_of(upstream: SocketAddr) -> Self {
        let hub = Hub {
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

    /// The URL without a password, even if the server wants one.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Applies `fault` to the next request that `matcher` accepts. Of several rules that match,
    /// the oldest that is not used up counts. The matcher must not call the proxy.
    pub fn on_request(&self, matcher: impl Fn(&[Vec<u8>]) -> bool + Send + 'static, fault: Fault) -> Armed {
        let armed = Armed::once();
        let rule = (Box::new(matcher) as Matcher, fault, armed.clone());
        let mut state = self.hub.state.lock();
        state.rules.retain(|(_, _, armed)| !armed.is_over());
        state.rules.push(rule);
        armed
    }

    /// Swallows everything in both directions for good, and closes nothing.
    pub fn blackhole(&self) {
        self.hub.switch(Mode::Blackhole);
    }

    /// Lets requests pass and swallows for good what the server sends.
    pub fn one_way(&self) {
        self.hub.switch(Mode::OneWay);
    }

    /// Swallows requests for good and lets pass what the server sends.
    pub fn deaf(&self) {
        self.hub.switch(Mode::Deaf);
    }

    /// Accepts new connections and never answers them. The others go on.
    pub fn mute_new(&self) {
        self.hub.switch(Mode::Mute);
    }

    /// Ends all current connections on the server's side. The clients are not told, and get no answer any more.
    pub fn lose_server(&self) {
        self.each(Connection::lose_server);
    }

    /// Resets all current connections on the clients' side. The server is not told, and keeps them.
    pub fn lose_clients(&self) {
        self.each(Connection::lose_client);
    }

    /// Resets all connections and refuses new ones.
    pub fn refuse(&self) {
        self.hub.switch(Mode::Refusing);
        self.close_listener();
        self.reset_all();
    }

    /// Ends all of these, with the halves of connections that they have left, and leaves the rules alone.
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

    /// Another server stands behind this address for all who connect from now on.
    pub fn lead_to(&self, upstream: SocketAddr) {
        *self.hub.upstream.lock() = upstream;
    }

    /// Swallows everything on the current connections for good, and closes nothing: a NAT that has forgotten them. New
    /// ones are well.
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
            // On a listener this wakes up the thread that waits in accept.
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
        state.rules.iter().for_each(|(_, _, armed)| armed.let_go());
        let connections = std::mem::take(&mut state.connections);
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        for connection in connections {
            connection.close();
            // A server that was stopped would never close its side by itself.
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

    /// Waits while the news that one side has gone away could not get through either.
    fn wait_while(&self, silent: &[Mode]) {
        let mut state = self.state.lock();
        let silent = |state: &mut State| silent.contains(&state.mode);
        self.changed.wait_while(&mut state, silent);
    }

    fn fault_for(&self, words: &[Vec<u8>]) -> Option<(Fault, Armed)> {
        let state = self.state.lock();
        let mut rules = state.rules.iter();
        let rule = rules.find(|(matcher, _, armed)| matcher(words) && armed.take());
        rule.map(|(_, fault, armed)| (fault.clone(), armed.clone()))
    }

    fn open(self: &Arc<Self>, client: TcpStream) {
        let _ = client.set_nodelay(true);
        let mode = self.mode();
        let connection = Arc::new(Connection::new(client, mode == Mode::Mute));
        // What a blackhole has accepted reaches the server with its first request after that.
        if !matches!(mode, Mode::Blackhole | Mode::Mute) && self.connect(&connection).is_err() {
            return connection.reset();
        }
        let mut state = self.state.lock();
        state.threads.retain(|thread| !thread.is_finished());
        // The threads of a connection have a handle of it each.
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
        // No handle of the client's socket is kept between two reads: a reset goes out only
        // when the last one is closed.
        while let Some(client) = connection.client() {
            let read = frames.fill(&*client);
            drop(client);
            if !read.is_ok_and(|read| read > 0) {
                break;
            }
            while let Some(frame) = frames.take_frame() {
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
        // Only this direction: what the server has been sent must not be lost to a reset that
        // it would get for replies that nobody reads.
        if let Some(server) = &*connection.server.lock() {
            let _ = server.shutdown(Shutdown::Write);
        }
    }

    fn forward(self: &Arc<Self>, connection: &Arc<Connection>, frame: &[u8]) -> io::Result<()> {
        // A connection that was cut here takes nothing more, not even what it has already read.
        let silent =
            matches!(self.mode(), Mode::Blackhole | Mode::Deaf) || connection.is_half() || connection.is_forgotten();
        if silent || connection.client().is_none() {
            return Ok(());
        }
        let words = resp::words(frame);
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
            _ => {}
        }
        let server = self.connect(connection)?;
        let twice = matches!(fault, Some((Fault::DuplicateRequest, _)));
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
            while let Some(frame) = frames.take_frame() {
                match connection.answered(frame) {
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

    fn spoil(&self, connection: &Connection, reply: &[u8], fault: &Fault, armed: &Armed) {
        // It counts before the client can tell, so that a client that has seen it can rely on it.
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
            // These have done their work before there was a reply.
            Fault::ResetBeforeRequest | Fault::HoldRequest | Fault::DuplicateRequest => {
                self.deliver(connection, reply);
            }
        }
    }

    fn deliver(&self, connection: &Connection, bytes: &[u8]) {
        let passes = matches!(self.mode(), Mode::Healthy | Mode::Deaf | Mode::Mute) && !connection.is_forgotten();
        if let (true, Some(client)) = (passes, connection.client()) {
            let _ = (&*client).write_all(bytes);
        }
    }
}
