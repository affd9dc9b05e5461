//! Name lookup with a deadline. The system resolver has none, so it runs on a separate thread that
//! may outlive the caller.
//!
//! Concurrent lookups of one name share a thread and its result, so a resolver that hangs blocks
//! one thread per name and not one per attempt. A result that arrives after all its callers have
//! gone is kept for a short time. Otherwise a resolver that is slower than the deadline, for
//! example because the first of two DNS servers is dead, would never help any caller.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::LazyLock,
    time::Duration,
};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use crate::sys::{
    clock::{self, Moment},
    threads,
};

type Addresses = Vec<SocketAddr>;
type LookupResult = Result<Addresses, (io::ErrorKind, String)>;
type Query = (String, u16);

/// Lookups in progress, with their waiting callers.
static IN_FLIGHT: LazyLock<Mutex<HashMap<Query, Vec<Sender<LookupResult>>>>> =
    LazyLock::new(Mutex::default);
/// Results that arrived after all callers had gone, with their time of arrival.
static LATE_RESULTS: LazyLock<Mutex<HashMap<Query, (Moment, Addresses)>>> =
    LazyLock::new(Mutex::default);
/// Maximum age of a late result. A name may soon lead to another address.
const LATE_RESULT_AGE_MAX: Duration = Duration::from_secs(10);

/// Resolves a host to its addresses. A literal address returns at once; a name blocks until the
/// deadline at most.
pub(crate) fn resolve(host: &str, port: u16, deadline: Moment) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let query = (host.to_owned(), port);
    if let Some((at, addresses)) = LATE_RESULTS.lock().get(&query)
        && clock::now().duration_since(*at) < LATE_RESULT_AGE_MAX
    {
        return Ok(addresses.clone());
    }
    let (sender, result) = bounded(1);
    let first = match IN_FLIGHT.lock().entry(query.clone()) {
        Entry::Occupied(mut others) => {
            others.get_mut().push(sender);
            false
        }
        Entry::Vacant(place) => {
            place.insert(vec![sender]);
            true
        }
    };
    if first {
        let spawned = threads::spawn("distlock-resolve", {
            let query = query.clone();
            move || look_up(&query)
        });
        if let Err(error) = spawned {
            deliver(&query, &Err((error.kind(), error.to_string())));
        }
    }
    match result.recv_timeout(deadline.duration_since(clock::now())) {
        Ok(answer) => answer.map_err(|(kind, text)| io::Error::new(kind, text)),
        Err(RecvTimeoutError::Timeout) => {
            Err(io::Error::new(io::ErrorKind::TimedOut, "the name lookup timed out"))
        }
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the name lookup failed")),
    }
}

fn look_up(query: &Query) {
    let (host, port) = query;
    let answer = (host.as_str(), *port).to_socket_addrs().map(Vec::from_iter);
    deliver(query, &answer.map_err(|error| (error.kind(), error.to_string())));
}

fn deliver(query: &Query, answer: &LookupResult) {
    let waiting = IN_FLIGHT.lock().remove(query);
    let mut delivered = false;
    for waiter in waiting.into_iter().flatten() {
        // The caller may have stopped waiting.
        delivered |= waiter.try_send(answer.clone()).is_ok();
    }
    let mut late_results = LATE_RESULTS.lock();
    let now = clock::now();
    late_results.retain(|_, (at, _)| now.duration_since(*at) < LATE_RESULT_AGE_MAX);
    if let (false, Ok(addresses)) = (delivered, answer) {
        late_results.insert(query.clone(), (now, addresses.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    fn deadline() -> Moment {
        clock::now().saturating_add(Duration::from_secs(30))
    }

    #[test]
    fn names_and_literals_resolve() {
        assert_eq!(resolve("::1", 7, deadline()).unwrap(), ["[::1]:7".parse().unwrap()]);
        assert!(!resolve("localhost", 7, deadline()).unwrap().is_empty());
        assert!(resolve("no such host", 7, deadline()).is_err());
    }

    /// Fault: F58
    #[test]
    fn concurrent_lookups_share_one_result() {
        let askers: Vec<_> =
            (0..32).map(|_| thread::spawn(|| resolve("localhost", 9, deadline()))).collect();
        for asker in askers {
            assert!(!asker.join().unwrap().unwrap().is_empty());
        }
        assert!(IN_FLIGHT.lock().keys().all(|(_, port)| *port != 9), "a lookup was left in flight");
    }
}
