//! A server that never stops talking: it answers the first request with a beginning, and then with the same again and
//! again, until nobody listens.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::ports::ReservedPort;

/// It gives up after so many bytes, lest a client that takes everything fill the memory.
const MOST: usize = 512 << 20;

pub struct Flood {
    addr: SocketAddr,
    listener: Arc<std::net::TcpListener>,
    /// The longest that was said over one connection.
    said: Arc<AtomicUsize>,
    /// `None` once the server has ended.
    streams: Arc<Mutex<Option<Vec<Arc<TcpStream>>>>>,
    acceptor: Option<JoinHandle<()>>,
}

impl Flood {
    pub fn start(beginning: impl Into<Vec<u8>>, again: impl Into<Vec<u8>>) -> Self {
        let (beginning, again) = (beginning.into(), again.into());
        let port = ReservedPort::new();
        let listener = Arc::new(port.listen());
        let (said, streams) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Some(Vec::new()))));
        let (accepting, accepted, counting) = (Arc::clone(&listener), Arc::clone(&streams), Arc::clone(&said));
        let acceptor = thread::spawn(move || {
            let (beginning, again, counting) = (&beginning, &again, &counting);
            thread::scope(|threads| {
                while let Ok((stream, _)) = accepting.accept() {
                    let stream = Arc::new(stream);
                    match accepted.lock().as_mut() {
                        Some(accepted) => accepted.push(Arc::clone(&stream)),
                        None => break,
                    }
                    threads.spawn(move || counting.fetch_max(talk(&stream, beginning, again), Ordering::AcqRel));
                }
            });
        });
        Self { addr: port.addr(), listener, said, streams, acceptor: Some(acceptor) }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// The longest that was said over one connection that has ended.
    pub fn said(&self) -> usize {
        self.said.load(Ordering::Acquire)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        // This wakes up the thread that waits in accept.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        for stream in self.streams.lock().take().unwrap_or_default() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

/// How many bytes went out.
fn talk(mut stream: &TcpStream, beginning: &[u8], again: &[u8]) -> usize {
    if !matches!(stream.read(&mut [0; 1024]), Ok(1..)) || stream.write_all(beginning).is_err() {
        return 0;
    }
    let mut said = beginning.len();
    while said < MOST && stream.write_all(again).is_ok() {
        said += again.len();
    }
    let _ = stream.shutdown(Shutdown::Both);
    said
}
