use super::*;
use crate::backend::{address::Address, discovery::Discovery};
use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    sync::atomic::{AtomicU64, Ordering},
    thread::{self, JoinHandle},
};

/// A server for one connection. It refuses `INFO`, replies to `TIME`, and then with `reply` to
/// every request. Returns its URL, and its thread, which ends with the connection.
pub(in crate::backend::redis::node) fn server_without_info(
    reply: &'static [u8],
) -> (String, JoinHandle<()>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let _folder = folder;
        let mut stream = listener.accept().unwrap().0;
        let _ = stream.read(&mut [0; 1024]).unwrap();
        let refusals = b"-NOPERM no\r\n".repeat(2);
        stream.write_all(&refusals).unwrap();
        stream.write_all(b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n").unwrap();
        while stream.read(&mut [0; 1024]).is_ok_and(|read| read > 0)
            && stream.write_all(reply).is_ok()
        {}
    });
    (format!("unix://{}", path.display()), server)
}

fn unconnected(url: &str) -> Connection {
    let endpoint = Arc::new(Endpoint::parse(url).unwrap());
    Connection::unconnected(endpoint, Duration::from_secs(1), Duration::ZERO, false)
}

#[derive(Debug)]
struct Moving(Arc<AtomicU64>);

impl Discovery for Moving {
    fn resolve(&self, _: Moment) -> Result<Vec<Address>, NodeError> {
        Ok(Vec::new())
    }

    fn takeovers(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Fault: N149
#[test]
fn socket_opened_before_a_takeover_is_replaced() {
    let takeovers = Arc::new(AtomicU64::new(0));
    let discovery = Box::new(Moving(takeovers.clone()));
    let endpoint = Endpoint { discovery, ..Endpoint::parse("redis://h").unwrap() };
    let mut connection =
        Connection::unconnected(Arc::new(endpoint), Duration::from_secs(1), Duration::ZERO, false);
    takeovers.store(1, Ordering::Relaxed);
    assert!(!connection.is_replaced(0), "it has no socket");
    let (transport, _peer) = transport::pair().unwrap();
    connection.link = Some(FramedSocket::new(transport));
    connection.takeovers = 1;
    assert!(!connection.is_replaced(0));
    takeovers.store(2, Ordering::Relaxed);
    assert!(connection.is_replaced(0));
}

/// An attacker who can write to a connection but not read from it must not be able to guess a
/// nonce.
#[test]
fn nonces_start_at_random_and_never_repeat() {
    let nonces = || {
        let mut connection = unconnected("redis://h");
        [connection.next_nonce(), connection.next_nonce(), connection.next_nonce()]
    };
    let nonces_of_connections: Vec<_> = (0..8).map(|_| nonces()).collect();
    for [first, second, third] in &nonces_of_connections {
        assert_eq!((*second, *third), (first + 1, first + 2));
        let near = nonces_of_connections
            .iter()
            .filter(|[other, ..]| other.abs_diff(*first) < 1 << 16)
            .count();
        assert_eq!(near, 1, "{nonces_of_connections:?}");
    }
}

/// The server chooses the whole text of an error, including the word that we take as its code.
///
/// Fault: F74
#[test]
fn error_code_is_redacted_and_escaped_like_its_message() {
    let mut connection = unconnected("redis://:hunter2@h");
    for word in ["hunter2", "it-was-hunter2!", "\u{1b}[31mRED", "X\u{7}", &"M".repeat(1 << 20)] {
        let error = redis::parse_redis_value(format!("-{word} and more\r\n").as_bytes()).unwrap();
        let error = connection.check_error_reply(&error).unwrap_err();
        let text = error.kind.to_string();
        assert!(
            matches!(&error.kind, NodeErrorKind::Refused { code, .. } if code.len() < 512),
            "{text:.99}"
        );
        assert!(text.len() < 1024 && !text.contains("hunter2"), "{text:.99}");
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}
