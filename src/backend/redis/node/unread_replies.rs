//! `UnreadReplies`: the abandoned replies of a connection, which are in flight and which no caller
//! waits for. An abandoned reply arrives before the replies to later requests, and is read before
//! them. It goes to its `LateReader`, if it has one.

use std::{collections::VecDeque, time::Duration};

use redis::Value;

use crate::{
    backend::transport::{Transport, poll_writable},
    core::ack::{Ack, AckTracker},
    sys::clock::Moment,
};

/// Receives a reply that arrives after its caller has stopped waiting, unless it is an error.
pub(crate) type LateReader = Box<dyn FnOnce(Value) + Send>;

/// Maximum number of unread replies; a connection with more is closed. A healthy server 100 ms away
/// reaches this limit at 10,000 requests a second. On this side, unread replies use only the
/// kernel's socket buffers, which are bounded.
const UNREAD_REPLIES_MAX: u32 = 1024;
/// Minimum number of unread replies for checking that the socket is writable. If it is not, the
/// connection is closed, because the next write could block. Fewer requests fit into even the
/// smallest socket buffer.
const WRITABLE_CHECK_MIN: u32 = 64;

pub(super) struct UnreadReplies {
    count: u32,
    /// When the last of them was read, or the first one was abandoned.
    since: Moment,
    /// One entry for each of them.
    readers: VecDeque<Option<LateReader>>,
    acks: AckTracker,
}

impl UnreadReplies {
    pub(super) fn new(now: Moment) -> UnreadReplies {
        let (readers, acks) = (VecDeque::new(), AckTracker::default());
        UnreadReplies { count: 0, since: now, readers, acks }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Returns the time since which replies have been awaited, if there are any.
    pub(super) fn since(&self) -> Option<Moment> {
        (self.count > 0).then_some(self.since)
    }

    /// Whether one more reply may be left unread on this socket.
    pub(super) fn may_grow(&self, transport: &dyn Transport) -> bool {
        self.count < WRITABLE_CHECK_MIN
            || (self.count < UNREAD_REPLIES_MAX
                && poll_writable(transport, Duration::ZERO).unwrap_or(false))
    }

    /// Adds the reply in flight.
    pub(super) fn abandon(&mut self, reader: Option<LateReader>, now: Moment) -> Ack {
        if self.count == 0 {
            self.since = now;
        }
        self.count += 1;
        self.readers.push_back(reader);
        self.acks.issue(self.count)
    }

    /// Counts one reply as read, and returns its reader.
    pub(super) fn on_read(&mut self, is_error: bool, now: Moment) -> Option<LateReader> {
        self.count -= 1;
        self.since = now;
        self.acks.record(is_error);
        self.readers.pop_front().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::{
            redis::{
                Endpoint,
                fields::write_command,
                node::{
                    connection::{Connection, tests::server_without_info},
                    framed_socket::FramedSocket,
                },
            },
            transport::{pair, poll_readable},
        },
        sys::clock,
    };
    use std::{sync::Arc, thread::JoinHandle};

    /// A connection to a server that replies with `reply` to every request.
    fn connected(reply: &'static [u8]) -> (Connection, JoinHandle<()>) {
        let (url, server) = server_without_info(reply);
        let endpoint = Arc::new(Endpoint::parse(&url).unwrap());
        let mut connection = Connection::unconnected(endpoint, TEST_TIMEOUT, Duration::ZERO, false);
        connection.connect(deadline()).unwrap();
        (connection, server)
    }

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    fn deadline() -> Moment {
        clock::now().saturating_add(TEST_TIMEOUT)
    }

    /// Sends a request and abandons its reply.
    fn send_and_abandon(connection: &mut Connection) -> Ack {
        connection.send(Moment::NEVER, |out| write_command(out, &[b"PING"])).unwrap();
        connection.abandon_reply(None).unwrap()
    }

    /// Fault: N117
    #[test]
    fn connection_with_too_many_unread_replies_is_closed() {
        let (mut connection, server) = connected(b"");
        for unread in 0..UNREAD_REPLIES_MAX {
            // The server reads everything, but may lag behind.
            poll_writable(connection.transport().unwrap(), TEST_TIMEOUT).unwrap();
            assert!(connection.is_ready(), "closed with {unread} unread replies");
            send_and_abandon(&mut connection);
        }
        assert!(!connection.is_ready() && !connection.is_connected());
        server.join().unwrap();
    }

    /// Otherwise a stopped server could block its callers in a write.
    ///
    /// Fault: N117
    #[test]
    fn connection_closed_before_send_buffer_is_full() {
        let (here, there) = pair().unwrap();
        let mut link = FramedSocket::new(here);
        while link.unread.may_grow(&*link.transport) {
            assert_eq!(link.transport.write(&[0; 512]).unwrap(), 512, "the send buffer was full");
            link.unread.abandon(None, clock::now());
        }
        let unread = link.unread.count();
        assert!((WRITABLE_CHECK_MIN..UNREAD_REPLIES_MAX).contains(&unread), "{unread}");
        drop(there);
    }

    /// Otherwise every release over several nodes would be sent twice.
    #[test]
    fn abandoned_reply_is_acknowledged_on_every_read_path() {
        let (mut connection, server) = connected(b"+OK\r\n");
        let read_before_request = send_and_abandon(&mut connection);
        assert!(!read_before_request.is_acknowledged());
        poll_readable(&[connection.transport().unwrap()], deadline(), Duration::ZERO);
        assert!(connection.is_ready() && read_before_request.is_acknowledged());

        let read_before_reply = send_and_abandon(&mut connection);
        poll_readable(&[connection.transport().unwrap()], deadline(), Duration::ZERO);
        connection.send(Moment::NEVER, |out| write_command(out, &[b"PING"])).unwrap();
        connection.receive(deadline()).unwrap();
        assert!(read_before_reply.is_acknowledged());

        let lost = send_and_abandon(&mut connection);
        connection.poison();
        server.join().unwrap();
        assert!(!lost.is_acknowledged(), "the reply was never read");
        assert!(connection.abandon_reply(None).is_none());
    }

    /// Fault: N110
    #[test]
    fn late_reply_goes_to_its_reader() {
        let read_late = |reply| {
            let (mut connection, server) = connected(reply);
            let (sender, receiver) = crossbeam_channel::unbounded();
            for number in [None, Some(1), None, Some(2)] {
                connection.send(Moment::NEVER, |out| write_command(out, &[b"PING"])).unwrap();
                let reader = number.map(|number| -> LateReader {
                    let sender = sender.clone();
                    Box::new(move |value| sender.send((number, value)).unwrap())
                });
                connection.abandon_reply(reader).unwrap();
                while connection.read_unread(clock::now()).0.is_some() {
                    poll_readable(&[connection.transport().unwrap()], deadline(), Duration::ZERO);
                }
            }
            drop(connection);
            server.join().unwrap();
            receiver.try_iter().collect::<Vec<_>>()
        };
        assert_eq!(read_late(b"+OK\r\n"), [(1, Value::Okay), (2, Value::Okay)]);
        assert!(read_late(b"-OOM it has no room\r\n").is_empty());
    }

    const REPLICA: &[u8] = b"-READONLY You can't write against a read only replica.\r\n";

    #[test]
    fn abandoned_readonly_reply_closes_connection() {
        let (mut connection, server) = connected(REPLICA);
        send_and_abandon(&mut connection);
        let error = connection.receive_until(deadline()).unwrap_err();
        assert!(
            error.is_not_master() && error.outcome_unknown && !connection.is_connected(),
            "{error:?}"
        );
        server.join().unwrap();

        let (mut connection, server) = connected(REPLICA);
        send_and_abandon(&mut connection);
        poll_readable(&[connection.transport().unwrap()], deadline(), Duration::ZERO);
        assert!(!connection.is_ready() && !connection.is_connected());
        server.join().unwrap();
    }

    /// Otherwise requests would keep naming the script by its hash, and NOSCRIPT would go unnoticed
    /// while replies are abandoned.
    ///
    /// Fault: N103
    #[test]
    fn abandoned_noscript_reply_clears_loaded_scripts() {
        let (mut connection, server) =
            connected(b"-NOSCRIPT No matching script. Please use EVAL.\r\n");
        assert!(!connection.mark_script_loaded(1) && connection.mark_script_loaded(1));
        send_and_abandon(&mut connection);
        poll_readable(&[connection.transport().unwrap()], deadline(), Duration::ZERO);
        assert!(connection.is_ready() && !connection.mark_script_loaded(1));
        drop(connection);
        server.join().unwrap();
    }

    #[test]
    fn abandoned_oom_reply_keeps_connection() {
        let (mut connection, server) = connected(b"-OOM it has no room\r\n");
        send_and_abandon(&mut connection);
        poll_readable(&[connection.transport().unwrap()], deadline(), Duration::ZERO);
        assert!(connection.is_ready());
        drop(connection);
        server.join().unwrap();
    }
}
