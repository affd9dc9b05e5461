//! Name lookup within a deadline: the system's resolver has none, so it runs on a thread of its own that may be left behind.

use std::{
    collections::HashSet,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    thread,
};

use crossbeam_channel::{RecvTimeoutError, bounded};
use parking_lot::Mutex;

use crate::clock::{self, Moment};

/// Names whose lookup has not come back; a resolver that hangs holds one thread for each name, and not one for each try.
static UNDER_WAY: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// The addresses of a host. A literal address takes no time; a name at most until the deadline.
pub(crate) fn resolve(host: &str, port: u16, deadline: Moment) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    if !UNDER_WAY.lock().get_or_insert_default().insert(host.to_owned()) {
        return look_up_again(host, port, deadline);
    }
    let name = host.to_owned();
    let (answer, answered) = bounded(1);
    let spawned = thread::Builder::new().name("distlock-resolve".into()).spawn(move || {
        let addresses = (name.as_str(), port).to_socket_addrs().map(Vec::from_iter);
        UNDER_WAY.lock().get_or_insert_default().remove(&name);
        // Nobody may be waiting any more.
        let _ = answer.send(addresses);
    });
    if let Err(error) = spawned {
        UNDER_WAY.lock().get_or_insert_default().remove(host);
        return Err(error);
    }
    match answered.recv_timeout(deadline.after(clock::now())) {
        Ok(addresses) => addresses,
        Err(RecvTimeoutError::Timeout) => {
            Err(io::Error::new(io::ErrorKind::TimedOut, "the name lookup takes too long"))
        }
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the name lookup failed")),
    }
}

/// Another thread is looking the same name up; wait for its turn to end rather than adding a thread.
fn look_up_again(host: &str, port: u16, deadline: Moment) -> io::Result<Vec<SocketAddr>> {
    let (_never, pause) = bounded::<()>(0);
    while UNDER_WAY.lock().as_ref().is_some_and(|names| names.contains(host)) {
        if deadline.after(clock::now()).is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the name lookup takes too long"));
        }
        let _ = pause.recv_timeout(std::time::Duration::from_millis(1));
    }
    resolve(host, port, deadline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn names_and_literals() {
        let deadline = clock::now().saturating_add(Duration::from_secs(30));
        assert_eq!(resolve("::1", 7, deadline).unwrap(), ["[::1]:7".parse().unwrap()]);
        assert!(!resolve("localhost", 7, deadline).unwrap().is_empty());
        assert!(resolve("no such host", 7, deadline).is_err());
    }
}
