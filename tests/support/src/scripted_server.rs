//! Servers that do not speak the Redis protocol properly: they accept connections and then send
//! nothing, always the same bytes, or bytes without end.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;

use super::ports::ReservedPort;
use super::resp::Frames;

/// The most bytes that an endless server sends over one connection. Otherwise, a client that reads
/// everything could fill the memory.
const MAX_SENT: usize = 512 << 20;

/// A server that accepts every connection and sends prepared bytes, or nothing at all.
pub struct CannedServer {
    addr: SocketAddr,
    listener: Arc<std::net::TcpListener>,
    /// See [`said`](Self::said).
    said: Arc<AtomicUsize>,
    /// The accepted connections; `None` once the server is being dropped.
    streams: Arc<Mutex<Option<Vec<Arc<TcpStream>>>>>,
    acceptor: Option<JoinHandle<()>>,
}

/// Starts a server that accepts connections and never answers.
pub fn silent_server() -> CannedServer {
    garbage_server(Vec::new())
}

/// A server to which no connection can be made: its backlog is full, and it accepts nothing.
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
        let listener =
            rustix::net::socket_with(family, kind, flags, None).expect("cannot create a socket");
        rustix::net::sockopt::set_socket_reuseaddr(&listener, true)
            .expect("cannot set SO_REUSEADDR");
        rustix::net::bind(&listener, &port.addr()).expect("cannot bind the reserved port");
        rustix::net::listen(&listener, 0).expect("cannot listen");
        let mut waiting = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&port.addr(), Duration::from_millis(300))
        {
            waiting.push(stream);
        }
        Self { addr: port.addr(), _port: port, _listener: listener, _waiting: waiting }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }
}

/// Starts a server that answers every request with `bytes`.
pub fn garbage_server(bytes: impl Into<Vec<u8>>) -> CannedServer {
    CannedServer::start(bytes.into())
}

/// Starts a server that answers the first request of each connection with `head`, followed by
/// `body` over and over until the client closes the connection.
pub fn endless_server(head: &str, body: &str) -> CannedServer {
    let (head, body) = (head.as_bytes().to_vec(), body.repeat(16 << 10).into_bytes());
    CannedServer::serving(move |stream| talk(stream, &head, &body))
}

impl CannedServer {
    fn start(answer: Vec<u8>) -> Self {
        Self::serving(move |stream| converse(stream, &answer))
    }

    fn serving(serve: impl Fn(&TcpStream) -> usize + Send + Sync + 'static) -> Self {
        let port = ReservedPort::new();
        let listener = Arc::new(port.listen());
        let (said, streams) =
            (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Some(Vec::new()))));
        let (accepting, accepted, counting) =
            (Arc::clone(&listener), Arc::clone(&streams), Arc::clone(&said));
        let acceptor = thread::spawn(move || {
            let (serve, counting) = (&serve, &counting);
            thread::scope(|threads| {
                while let Ok((stream, _)) = accepting.accept() {
                    let stream = Arc::new(stream);
                    match accepted.lock().as_mut() {
                        Some(accepted) => accepted.push(Arc::clone(&stream)),
                        None => break,
                    }
                    threads.spawn(move || counting.fetch_max(serve(&stream), Ordering::AcqRel));
                }
            });
        });
        Self { addr: port.addr(), listener, said, streams, acceptor: Some(acceptor) }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// The number of bytes sent over a connection that has ended; the highest if there were
    /// several.
    pub fn said(&self) -> usize {
        self.said.load(Ordering::Acquire)
    }

    /// The number of connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.streams.lock().as_ref().map_or(0, Vec::len)
    }
}

impl Drop for CannedServer {
    fn drop(&mut self) {
        // Wakes up the thread that waits in `accept`.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        for stream in self.streams.lock().take().unwrap_or_default() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

/// Answers each request with `answer`, and returns the number of bytes sent.
fn converse(mut stream: &TcpStream, answer: &[u8]) -> usize {
    let (mut frames, mut said) = (Frames::default(), 0);
    while frames.fill(stream).is_ok_and(|read| read > 0) {
        while frames.take_frame().is_some() {
            said += stream.write_all(answer).map_or(0, |()| answer.len());
        }
    }
    said
}

/// Answers the first request without end, and returns the number of bytes sent.
fn talk(mut stream: &TcpStream, head: &[u8], body: &[u8]) -> usize {
    let mut frames = Frames::default();
    if !frames.fill(stream).is_ok_and(|read| read > 0) || stream.write_all(head).is_err() {
        return 0;
    }
    let mut said = head.len();
    while said < MAX_SENT && stream.write_all(body).is_ok() {
        said += body.len();
    }
    let _ = stream.shutdown(Shutdown::Both);
    said
}
