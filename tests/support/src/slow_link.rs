//! `SlowLink`: a path to a server on which every byte takes a while in each direction. Knows no
//! protocol, so that it can carry replication.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// A path to a server. Ends when the process ends, or with the connections it carries.
#[derive(Debug)]
pub struct SlowLink {
    addr: SocketAddr,
}

impl SlowLink {
    /// Opens a path to `upstream` whose bytes take `delay` in each direction.
    pub fn to(upstream: SocketAddr, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("cannot listen");
        let addr = listener.local_addr().expect("a listener has an address");
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(upstream) else { continue };
                let copy = |stream: &TcpStream| stream.try_clone().expect("cannot clone a socket");
                carry(copy(&client), copy(&server), delay);
                carry(server, client, delay);
            }
        });
        Self { addr }
    }

    /// The end to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    for stream in [&from, &to] {
        stream.set_nodelay(true).expect("cannot set an option of a socket");
    }
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        loop {
            let count = match from.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => return,
                Ok(count) => count,
            };
            if sender.send((Instant::now() + delay, buffer[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (at, bytes) in receiver {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
