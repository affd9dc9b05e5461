//! Answers that are under way and that nobody waits for any more: they come before those to what is asked next.

use redis::Value;

use super::Connection;
use crate::{
    clock::{self, Moment},
    node::{Receipt, failure::Failure, link::Link},
};

/// With this many answers outstanding a connection is given up. A server that is well and 100 ms away is asked 10,000 times a second
/// before it owes as many. On this side they cost nothing but what the system keeps of requests and answers, which it bounds.
const MAX: u32 = 1024;
/// From so many on it is given up as well when the server leaves no room for more, so that nobody ever waits for that. Fewer
/// requests have room in the smallest of buffers.
const FEW: u32 = 64;

/// Whether another answer may be owed over this connection.
pub(super) fn may_owe_more(link: &Link) -> bool {
    link.owed < FEW || (link.owed < MAX && link.socket.has_room())
}

impl Connection {
    /// Reads what has come of the answers that nobody waits for; true if there was one that is no error.
    pub(super) fn collect_owed(&mut self, now: Moment) -> bool {
        let mut heard = false;
        while self.link.as_ref().is_some_and(|link| link.owed > 0) {
            match self.receive_any(now) {
                Ok(Some(value)) => heard |= self.settle_owed(&value, now).is_ok(),
                // A failure has closed it.
                Ok(None) | Err(_) => break,
            }
        }
        heard
    }

    /// One answer less that nobody waits for. What it refuses may say something about all that follow.
    pub(super) fn settle_owed(&mut self, value: &Value, now: Moment) -> Result<(), Failure> {
        if let Some(link) = &mut self.link {
            link.owed -= 1;
            link.owed_since = now;
            link.receipts.take(matches!(value, Value::ServerError(_)));
        }
        let settled = self.refuse_errors(value);
        if let (Err(failure), Some(link)) = (&settled, &mut self.link)
            && failure.is_unknown_script()
        {
            // Which one it was is not known any more; it has forgotten them all at once.
            link.taught = 0;
        }
        settled
    }

    /// Since when answers are owed that have not come by `now`; and whether some have come that are no errors.
    pub(crate) fn owes_since(&mut self, now: Moment) -> (Option<Moment>, bool) {
        let heard = self.collect_owed(now);
        (self.link.as_ref().filter(|link| link.owed > 0).map(|link| link.owed_since), heard)
    }

    /// How many answers are under way that nobody waits for.
    pub(crate) fn owes(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.owed as usize)
    }

    /// Does not wait for the answer that is under way; whatever goes over this connection next is carried out after
    /// it, and answered after it. `None` if there is no connection any more.
    pub(crate) fn leave_unanswered(&mut self) -> Option<Receipt> {
        let link = self.link.as_mut()?;
        if link.owed == 0 {
            link.owed_since = clock::now();
        }
        link.owed += 1;
        Some(link.receipts.write(link.owed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{connection::write_command, endpoint::Endpoint, socket::Socket};
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixListener,
        sync::Arc,
        thread,
        time::Duration,
    };

    /// A connection to a server that tells the time, and after that says `answer` to whatever is asked.
    fn connected(answer: &'static [u8]) -> (Connection, thread::JoinHandle<()>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let _ = stream.read(&mut [0; 1024]).unwrap();
            stream.write_all(b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n").unwrap();
            while stream.read(&mut [0; 1024]).is_ok_and(|read| read > 0) && stream.write_all(answer).is_ok() {}
        });
        let url = format!("unix://{}", path.display());
        let endpoint = Arc::new(Endpoint::parse(&url).unwrap());
        let mut connection = Connection::unconnected(endpoint, PATIENCE, Duration::ZERO, false);
        connection.connect(patiently()).unwrap();
        (connection, server)
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    fn patiently() -> Moment {
        clock::now().saturating_add(PATIENCE)
    }

    /// Asks, and does not wait for the answer.
    fn ask(connection: &mut Connection) -> Receipt {
        connection.send(Moment::NEVER, |out| write_command(out, &[b"PING"])).unwrap();
        connection.leave_unanswered().unwrap()
    }

    #[test]
    fn a_connection_that_owes_too_much_is_given_up() {
        let (mut connection, server) = connected(b"");
        for owed in 0..MAX {
            // The server reads all of it, but may be behind.
            connection.socket().unwrap().await_room(PATIENCE).unwrap();
            assert!(connection.is_ready(), "given up with {owed}");
            ask(&mut connection);
        }
        assert!(!connection.is_ready() && !connection.is_connected());
        server.join().unwrap();
    }

    /// Otherwise one that has stopped could make its callers wait until there is room for what they ask.
    #[test]
    fn a_connection_over_which_nothing_is_read_is_given_up_while_there_is_room() {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut link = Link::new(Socket::Unix(here));
        while may_owe_more(&link) {
            assert_eq!(link.socket.write(&[0; 512]).unwrap(), 512, "there was no room");
            link.owed += 1;
        }
        assert!((FEW..MAX).contains(&link.owed), "{}", link.owed);
        drop(there);
    }

    /// Otherwise every release over several nodes would be asked for twice.
    #[test]
    fn an_answer_settles_its_receipt_whoever_comes_upon_it() {
        let (mut connection, server) = connected(b"+OK\r\n");
        let found_before_asking = ask(&mut connection);
        assert!(!found_before_asking.is_settled());
        Socket::await_any(&[connection.socket().unwrap()], patiently(), Duration::ZERO);
        assert!(connection.is_ready() && found_before_asking.is_settled());

        let found_in_front = ask(&mut connection);
        Socket::await_any(&[connection.socket().unwrap()], patiently(), Duration::ZERO);
        connection.send(Moment::NEVER, |out| write_command(out, &[b"PING"])).unwrap();
        connection.receive(patiently()).unwrap();
        assert!(found_in_front.is_settled());

        let lost = ask(&mut connection);
        connection.poison();
        server.join().unwrap();
        assert!(!lost.is_settled(), "nobody has read it");
        assert!(connection.leave_unanswered().is_none());
    }

    const REPLICA: &[u8] = b"-READONLY You can't write against a read only replica.\r\n";

    #[test]
    fn a_replica_is_left_by_whoever_finds_its_refusal() {
        let (mut connection, server) = connected(REPLICA);
        ask(&mut connection);
        let failure = connection.receive_until(patiently()).unwrap_err();
        assert!(failure.is_about_a_replica() && failure.sent && !connection.is_connected(), "{failure:?}");
        server.join().unwrap();

        let (mut connection, server) = connected(REPLICA);
        ask(&mut connection);
        Socket::await_any(&[connection.socket().unwrap()], patiently(), Duration::ZERO);
        assert!(!connection.is_ready() && !connection.is_connected());
        server.join().unwrap();
    }

    /// Otherwise it would be asked by the hash for the life of the connection, and never be heard to refuse.
    #[test]
    fn a_server_that_has_forgotten_a_script_is_not_taken_to_know_it() {
        let (mut connection, server) = connected(b"-NOSCRIPT No matching script. Please use EVAL.\r\n");
        assert!(!connection.teach(1) && connection.teach(1));
        ask(&mut connection);
        Socket::await_any(&[connection.socket().unwrap()], patiently(), Duration::ZERO);
        assert!(connection.is_ready() && !connection.teach(1));
        drop(connection);
        server.join().unwrap();
    }

    #[test]
    fn another_refusal_that_nobody_waits_for_changes_nothing() {
        let (mut connection, server) = connected(b"-OOM it has no room\r\n");
        ask(&mut connection);
        Socket::await_any(&[connection.socket().unwrap()], patiently(), Duration::ZERO);
        assert!(connection.is_ready());
        drop(connection);
        server.join().unwrap();
    }
}
