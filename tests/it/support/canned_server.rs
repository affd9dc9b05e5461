//! Servers that are none: one that never says a word and one that always says the same.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;

use super::ports::ReservedPort;
use super::resp::Frames;

/// Accepts every connection and answers every request with the same bytes, or with nothing.
pub struct CannedServer {
    addr: SocketAddr,
    listener: Arc<std::net::TcpListener>,
    /// `None` once the server has ended.
    streams: Arc<Mutex<Option<Vec<Arc<TcpStream>>>>>,
    acceptor: Option<JoinHandle<()>>,
}

/// A server that accepts connections and never answers.
pub fn silent_server() -> CannedServer {
    garbage_server(Vec::new())
}

/// A server that nobody gets through to: its backlog is full, and it accepts nobody.
pub struct DeafServer {
    addr: SocketAddr,
    _port: ReservedPort,
    _listener: std::os::fd::OwnedFd,
    _waiting: Vec<TcpStream>,
}

impl DeafServer {
    pub fn start() -> Self {
        let port = ReservedPort::new();
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM);
        let listener = rustix::net::socket_with(family, kind, flags, None).expect("no socket");
        rustix::net::sockopt::set_socket_reuseaddr(&listener, true).expect("SO_REUSEADDR was refused");
        rustix::net::bind(&listener, &port.addr()).expect("the reserved port was taken");
        rustix::net::listen(&listener, 0).expect("it cannot listen");
        let mut waiting = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&port.addr(), Duration::from_millis(300)) {
            waiting.push(stream);
        }
        Self { addr: port.addr(), _port: port, _listener: listener, _waiting: waiting }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }
}

/// A server that answers every request with `bytes`.
pub fn garbage_server(bytes: impl Into<Vec<u8>>) -> CannedServer {
    CannedServer::start(bytes.into())
}

/// A server that answers the first request of each connection with `head` and then `body` for ever.
pub fn endless_server(head: &str, body: &str) -> CannedServer {
    let (head, body) = (head.as_bytes().to_vec(), body.repeat(16 << 10).into_bytes());
    CannedServer::serving(move |stream| {
        let mut stream = stream;
        let mut frames = Frames::default();
        if frames.fill(stream).is_ok_and(|read| read > 0) && stream.write_all(&head).is_ok() {
            while stream.write_all(&body).is_ok() {}
        }
    })
}

impl CannedServer {
    fn start(answer: Vec<u8>) -> Self {
        Self::serving(move |stream| converse(stream, &answer))
    }

    fn serving(serve: impl Fn(&TcpStream) + Send + Sync + 'static) -> Self {
        let port = ReservedPort::new();
        let listener = Arc::new(port.listen());
        let streams = Arc::new(Mutex::new(Some(Vec::new())));
        let (accepting, accepted) = (Arc::clone(&listener), Arc::clone(&streams));
        let acceptor = thread::spawn(move || {
            let serve = &serve;
            thread::scope(|threads| {
                while let Ok((stream, _)) = accepting.accept() {
                    let stream = Arc::new(stream);
                    match accepted.lock().as_mut() {
                        Some(accepted) => accepted.push(Arc::clone(&stream)),
                        None => break,
                    }
                    threads.spawn(move || serve(&stream));
                }
            });
        });
        Self { addr: port.addr(), listener, streams, acceptor: Some(acceptor) }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// How many connections it has accepted so far.
    pub fn accepted(&self) -> usize {
        self.streams.lock().as_ref().map_or(0, Vec::len)
    }
}

impl Drop for CannedServer {
    fn drop(&mut self) {
        // This wakes up the thread that waits in accept.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        for stream in self.streams.lock().take().unwrap_or_default() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

fn converse(mut stream: &TcpStream, answer: &[u8]) {
    let mut frames = Frames::default();
    while frames.fill(stream).is_ok_and(|read| read > 0) {
        while frames.take_frame().is_some() {
            let _ = stream.write_all(answer);
        }
    }
}
