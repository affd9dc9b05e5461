//! One connection through the proxy: its two sides, and its requests in flight.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::sockopt::set_socket_linger;

use super::faults::{ArmedFault, Fault};
use super::resp;

pub(super) struct Connection {
    pub(super) client: Mutex<Option<Arc<TcpStream>>>,
    pub(super) server: Mutex<Option<Arc<TcpStream>>>,
    pub(super) pending: Mutex<VecDeque<Pending>>,
    /// One side is closed, and the other must not notice.
    half: AtomicBool,
    /// Nothing is forwarded any more in either direction, and neither side must notice.
    forgotten: AtomicBool,
}

/// A request whose reply has not arrived yet, or only in part.
pub(super) struct Pending {
    command: Vec<u8>,
    /// The number of frames of the reply that have not arrived.
    missing: usize,
    reply: Vec<u8>,
    fault: Option<(Fault, ArmedFault)>,
    /// The fault also discards what arrives after the first part of the reply.
    discards_rest: bool,
}

pub(super) enum Answer {
    /// The reply is not complete yet.
    Part,
    Whole(Vec<u8>, Option<(Fault, ArmedFault)>),
}

impl Pending {
    pub(super) fn new(words: &[Vec<u8>], fault: Option<(Fault, ArmedFault)>) -> Self {
        let command = words.first().map(|word| word.to_ascii_lowercase());
        let command = command.unwrap_or_default();
        // The server confirms each channel with a separate frame.
        let missing = match command.ends_with(b"subscribe") {
            true => (words.len() - 1).max(1),
            false => 1,
        };
        let discards_rest = matches!(
            fault,
            Some((Fault::DropReply | Fault::ReplaceReply(_) | Fault::CutReply(_), _))
        );
        Self { command, missing, reply: Vec::new(), fault, discards_rest }
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

    /// Closes the server's side; the client does not notice.
    pub(super) fn lose_server(&self) {
        self.half.store(true, Ordering::SeqCst);
        self.close_server();
    }

    /// Resets the client's side; the server does not notice.
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

    /// Handles a frame from the server: assigns it to the oldest request in flight, or passes it on
    /// if it answers no request.
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
        // An error is a single frame, even if several frames were expected.
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

    /// Handles a part of a reply where the end of a reply is not known: the fault of the request
    /// applies to the first part.
    pub(super) fn answered_in_part(&self, part: Vec<u8>) -> Answer {
        let mut pending = self.pending.lock();
        let Some(request) = pending.front_mut() else {
            return Answer::Whole(part, None);
        };
        if request.missing == 0 && request.discards_rest {
            return Answer::Part;
        }
        request.missing = 0;
        // A change applies to each part.
        let is_change = matches!(&request.fault, Some((Fault::Rewrite(_), _)));
        let fault = if is_change { request.fault.clone() } else { request.fault.take() };
        Answer::Whole(part, fault)
    }

    /// Closes the client's side with a TCP reset instead of an end of stream.
    pub(super) fn reset(&self) {
        if let Some(client) = self.client.lock().take() {
            let _ = set_socket_linger(&client, Some(Duration::ZERO));
            // Sends nothing, but wakes up the reading thread, which then drops its `Arc`.
            let _ = client.shutdown(Shutdown::Read);
        }
    }

    pub(super) fn close(&self) {
        if let Some(client) = self.client.lock().take() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}
