//! One connection through a proxy: its two sides, and the requests that have not been answered.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::sockopt::set_socket_linger;

use super::faults::{Armed, Fault};
use super::resp;

pub(super) struct Connection {
    pub(super) client: Mutex<Option<Arc<TcpStream>>>,
    pub(super) server: Mutex<Option<Arc<TcpStream>>>,
    pub(super) pending: Mutex<VecDeque<Pending>>,
    /// One side is not there, and the other is not told.
    half: AtomicBool,
    /// Nothing passes any more, in either direction, and neither side is told.
    forgotten: AtomicBool,
}

/// A request that the server has not answered yet, or not in full.
pub(super) struct Pending {
    command: Vec<u8>,
    missing: usize,
    reply: Vec<u8>,
    fault: Option<(Fault, Armed)>,
}

pub(super) enum Answer {
    Part,
    Whole(Vec<u8>, Option<(Fault, Armed)>),
}

impl Pending {
    pub(super) fn new(words: &[Vec<u8>], fault: Option<(Fault, Armed)>) -> Self {
        let command = words.first().map(|word| word.to_ascii_lowercase());
        let command = command.unwrap_or_default();
        // Each channel is confirmed with a frame of its own.
        let missing = match command.ends_with(b"subscribe") {
            true => (words.len() - 1).max(1),
            false => 1,
        };
        Self { command, missing, reply: Vec::new(), fault }
    }
}

impl Connection {
    pub(super) fn new(client: TcpStream, half: bool) -> Self {
        Self {
            client: Mutex::new(Some(Arc::new(client))),
            server: Mutex::new(None),
            pending: Mutex::new(VecDeque::new()),
            half: AtomicBool::new(half),
            forgotten: AtomicBool::new(false),
        }
    }

    pub(super) fn is_half(&self) -> bool {
        self.half.load(Ordering::SeqCst)
    }

    pub(super) fn is_forgotten(&self) -> bool {
        self.forgotten.load(Ordering::SeqCst)
    }

    pub(super) fn forget(&self) {
        self.forgotten.store(true, Ordering::SeqCst);
    }

    /// The server's side ends; the client goes on talking to nobody.
    pub(super) fn lose_server(&self) {
        self.half.store(true, Ordering::SeqCst);
        self.close_server();
    }

    /// The client's side is reset; the server goes on talking to nobody.
    pub(super) fn lose_client(&self) {
        self.half.store(true, Ordering::SeqCst);
        self.reset();
    }

    pub(super) fn close_server(&self) {
        if let Some(server) = &*self.server.lock() {
            let _ = server.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn client(&self) -> Option<Arc<TcpStream>> {
        self.client.lock().clone()
    }

    pub(super) fn answered(&self, frame: Vec<u8>) -> Answer {
        let mut pending = self.pending.lock();
        let Some(first) = pending.front_mut() else {
            return Answer::Whole(frame, None);
        };
        let kind = resp::push_kind(&frame).unwrap_or_default();
        let unasked = match kind.as_slice() {
            b"message" | b"pmessage" | b"smessage" => true,
            kind if kind.ends_with(b"subscribe") => kind != first.command,
            _ => frame.starts_with(b">"),
        };
        if unasked {
            return Answer::Whole(frame, None);
        }
        first.reply.extend(frame);
        // An error is one frame, however many were expected.
        first.missing = match first.reply.first() {
            Some(b'-') => 0,
            _ => first.missing - 1,
        };
        if first.missing > 0 {
            return Answer::Part;
        }
        match pending.pop_front() {
            Some(whole) => Answer::Whole(whole.reply, whole.fault),
            None => Answer::Part,
        }
    }

    /// Closes the client's side with an error instead of an end of stream.
    pub(super) fn reset(&self) {
        if let Some(client) = self.client.lock().take() {
            let _ = set_socket_linger(&client, Some(Duration::ZERO));
            // Sends nothing, but wakes up the thread that reads, which then lets its handle go.
            let _ = client.shutdown(Shutdown::Read);
        }
    }

    pub(super) fn close(&self) {
        if let Some(client) = self.client.lock().take() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}
