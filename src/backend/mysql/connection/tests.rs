use std::{thread, time::Duration};

use super::*;
use crate::backend::transport::pair;

const OK: &[u8] = &[0, 0, 0, 2, 0, 0, 0];
const IN_TRANSACTION: &[u8] = &[0, 1, 0, 1, 0, 0, 0];

fn soon() -> Moment {
    clock::now().saturating_add(Duration::from_secs(30))
}

/// The first packet of a server that prefers this way to sign in.
fn greeting(plugin: &[u8]) -> Vec<u8> {
    let begin = b"\x0a8.0.36\0\x07\0\0\x0012345678\0\xff\xff\x2d\x02\0\xff\xff\x15";
    [begin, &[0; 10][..], b"abcdefghijkl\0", plugin, b"\0"].concat()
}

/// The other side of a connection.
pub(in crate::backend::mysql) struct Server(Link);

impl Server {
    fn send(&mut self, packets: &[(u8, &[u8])]) {
        for (number, payload) in packets {
            self.0.write_packet(*number, &[payload], soon()).unwrap();
        }
    }

    fn receive(&mut self) -> Vec<u8> {
        self.0.read_packet(soon()).unwrap().1
    }
}

/// A connection that has signed in, and its server.
pub(in crate::backend::mysql) fn connected() -> (Connection, Server) {
    let (ours, theirs) = pair().unwrap();
    let endpoint = MySqlEndpoint::parse("mysql://app:secret@h/shop").unwrap();
    let mut server = Server(Link::new(theirs));
    let serving = thread::spawn(move || {
        let greeting = greeting(b"mysql_native_password");
        server.send(&[(0, &greeting)]);
        server.receive();
        server.send(&[(2, OK)]);
        server
    });
    let connection = Connection::sign_in(&endpoint, ours, soon()).unwrap();
    (connection, serving.join().unwrap())
}

fn done(affected_rows: u64, in_transaction: bool) -> StatementResult {
    StatementResult::Done { affected_rows, last_insert_id: 0, in_transaction }
}

#[test]
fn query_gets_its_reply() {
    let (mut connection, mut server) = connected();
    assert_eq!((connection.id(), connection.version()), (7, "8.0.36"));
    assert!(connection.is_idle());
    connection.send("SELECT 1", soon()).unwrap();
    assert_eq!(server.receive(), b"\x03SELECT 1");
    assert!(!connection.is_idle());
    server.send(&[(1, IN_TRANSACTION)]);
    assert_eq!(connection.receive(soon()).unwrap(), [done(1, true)]);
    assert!(connection.is_idle());
}

#[test]
fn reply_stays_owed_after_a_timeout() {
    let (mut connection, mut server) = connected();
    connection.send("SELECT 1", soon()).unwrap();
    assert!(connection.receive(clock::now()).unwrap_err().is_timeout());
    assert_eq!((connection.owed(), connection.try_receive().unwrap()), (1, None));
    let mut bytes = Vec::new();
    assert!(write_packet(&mut bytes, 1, &[OK]));
    // One half, and later the other.
    let mut half = &bytes[..6];
    transport::write_all(&mut *server.0.transport, &mut half, soon()).unwrap();
    assert_eq!(connection.try_receive().unwrap(), None);
    let mut half = &bytes[6..];
    transport::write_all(&mut *server.0.transport, &mut half, soon()).unwrap();
    assert_eq!(connection.receive(soon()).unwrap(), [done(0, false)]);
    assert_eq!(connection.owed(), 0);
}

/// Fault: N148
#[test]
fn doubtful_connection_is_closed() {
    let garbage: [&[(u8, &[u8])]; 3] =
        [&[(9, OK)], &[(1, &[0xfb])], &[(1, b"\xff\x87\x07#70100Connection was killed"), (2, OK)]];
    for packets in garbage {
        let (mut connection, mut server) = connected();
        connection.send("SELECT 1", soon()).unwrap();
        server.send(packets);
        let first = connection.receive(soon());
        assert!(first.is_err() || !connection.is_idle(), "{first:?}");
        let error = connection.query("SELECT 2", soon()).unwrap_err();
        assert!(!error.outcome_unknown, "{error:?}");
    }
}

#[test]
fn end_of_an_idle_connection_is_noticed() {
    let (mut connection, server) = connected();
    drop(server);
    assert!(!connection.is_idle());
    let (mut connection, mut server) = connected();
    server.send(&[(0, b"\xff\x51\x04#08S01Server shutdown in progress")]);
    let error = connection.try_receive().unwrap_err();
    assert!(error.kind.to_string().contains("1105 Server shutdown"), "{}", error.kind);
}

#[test]
fn endless_sign_in_is_given_up() {
    let (ours, theirs) = pair().unwrap();
    let endpoint = MySqlEndpoint::parse("mysql://app@h/shop").unwrap();
    let mut server = Link::new(theirs);
    let serving = thread::spawn(move || {
        let greeting = greeting(b"caching_sha2_password");
        server.write_packet(0, &[&greeting], soon()).unwrap();
        while server.write_packet(2, &[&[1, 3]], soon()).is_ok() {}
    });
    let error = Connection::sign_in(&endpoint, ours, soon()).unwrap_err();
    assert!(error.kind.to_string().contains("does not end"), "{}", error.kind);
    serving.join().unwrap();
}
