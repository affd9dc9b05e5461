//! Name lookup with a deadline. The system resolver has none, so it runs on a separate thread that
//! may outlive the caller.
//!
//! Concurrent lookups of one name share a thread and its result, so a resolver that hangs blocks a
//! few threads per name and not one per attempt. A slow lookup has perhaps lost a packet, which
//! resolvers send again only after seconds, so a later caller begins another. A result that arrives
//! after all its callers have gone is kept for a short time. Otherwise a resolver that is slower
//! than the deadline, for example because the first of two DNS servers is dead, would never help
//! any caller.

use std::{collections::HashMap, io, net::ToSocketAddrs as _, sync::LazyLock, time::Duration};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;

use super::{Address, Discovery};
use crate::{
    backend::error::NodeError,
    sys::{
        clock::{self, Moment},
        threads,
    },
};

type Addresses = Vec<Address>;
type LookupResult = Result<Addresses, (io::ErrorKind, String)>;

/// Lookups in progress.
static IN_FLIGHT: LazyLock<Mutex<HashMap<HostName, Lookups>>> = LazyLock::new(Mutex::default);
/// Results that arrived after all callers had gone, with their time of arrival.
static LATE_RESULTS: LazyLock<Mutex<HashMap<HostName, (Moment, Addresses)>>> =
    LazyLock::new(Mutex::default);
/// Age from which a lookup counts as slow.
const SLOW: Duration = Duration::from_millis(300);
/// Maximum number of lookups of one name at once.
const LOOKUPS_MAX: u32 = 3;
/// Maximum age of a late result. A name may soon lead to another address.
const LATE_RESULT_AGE_MAX: Duration = Duration::from_secs(10);

/// The lookups of one name, of which the first that ends serves all callers.
#[derive(Debug)]
struct Lookups {
    number: u32,
    /// When the last of them began.
    since: Moment,
    waiting: Vec<Sender<LookupResult>>,
}

/// A host name and a port, which the system's resolver turns into addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HostName {
    host: String,
    port: u16,
}

impl HostName {
    pub(super) fn new(host: &str, port: u16) -> HostName {
        HostName { host: host.to_owned(), port }
    }

    fn look_up(&self) {
        let result = (self.host.as_str(), self.port).to_socket_addrs();
        let result = result.map(|addresses| addresses.map(Address::Tcp).collect());
        self.deliver(&result.map_err(|error| (error.kind(), error.to_string())));
    }

    fn deliver(&self, result: &LookupResult) {
        // Another lookup may have ended first.
        let Some(Lookups { waiting, .. }) = IN_FLIGHT.lock().remove(self) else { return };
        let mut delivered = false;
        for waiter in waiting {
            // The caller may have stopped waiting.
            delivered |= waiter.try_send(result.clone()).is_ok();
        }
        let mut late_results = LATE_RESULTS.lock();
        let now = clock::now();
        late_results.retain(|_, (at, _)| now.duration_since(*at) < LATE_RESULT_AGE_MAX);
        if let (false, Ok(addresses)) = (delivered, result) {
            late_results.insert(self.clone(), (now, addresses.clone()));
        }
    }
}

impl Discovery for HostName {
    fn resolve(&self, deadline: Moment) -> Result<Vec<Address>, NodeError> {
        if let Some((at, addresses)) = LATE_RESULTS.lock().get(self)
            && clock::now().duration_since(*at) < LATE_RESULT_AGE_MAX
        {
            return Ok(addresses.clone());
        }
        let (sender, result) = bounded(1);
        let begins = {
            let (mut in_flight, now) = (IN_FLIGHT.lock(), clock::now());
            let none = || Lookups { number: 0, since: now, waiting: Vec::new() };
            let lookups = in_flight.entry(self.clone()).or_insert_with(none);
            lookups.waiting.push(sender.clone());
            let is_slow = now.duration_since(lookups.since) >= SLOW;
            let begins = lookups.number == 0 || is_slow && lookups.number < LOOKUPS_MAX;
            if begins {
                (lookups.number, lookups.since) = (lookups.number + 1, now);
            }
            begins
        };
        if begins {
            let name = self.clone();
            if let Err(error) = threads::spawn("distlock-resolve", move || name.look_up()) {
                self.deliver(&Err((error.kind(), error.to_string())));
            }
        }
        let left = deadline.duration_since(clock::now());
        let result = result.recv_timeout(left).or_else(|_| {
            // A lookup that hangs does not collect the callers that have gone.
            if let Some(lookups) = IN_FLIGHT.lock().get_mut(self) {
                lookups.waiting.retain(|waiter| !waiter.same_channel(&sender));
            }
            // The result may just have arrived.
            result.try_recv()
        });
        let failure = match result {
            Ok(Ok(addresses)) => return Ok(addresses),
            Ok(Err((kind, text))) => io::Error::new(kind, text),
            Err(_) => io::Error::new(io::ErrorKind::TimedOut, "the name lookup timed out"),
        };
        Err(NodeError::not_applied(failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::discovery::of_host;
    use std::{thread, time::Duration};

    fn deadline() -> Moment {
        clock::now().saturating_add(Duration::from_secs(30))
    }

    /// As many lookups, of which the last began long ago.
    fn lookups(number: u32) -> Lookups {
        Lookups { number, since: Moment::default(), waiting: Vec::new() }
    }

    /// Fault: N249
    #[test]
    fn slow_lookup_does_not_keep_a_caller_from_another() {
        let name = HostName::new("localhost", 11);
        IN_FLIGHT.lock().insert(name.clone(), lookups(1));
        assert!(!name.resolve(deadline()).unwrap().is_empty());
        // The first one ends later.
        name.deliver(&Ok(Vec::new()));
        assert!(!name.resolve(deadline()).unwrap().is_empty(), "its result is old");
    }

    #[test]
    fn names_and_literals_resolve() {
        let resolve = |host: &str| of_host(host, 7).resolve(deadline());
        assert_eq!(resolve("::1").unwrap(), [Address::Tcp("[::1]:7".parse().unwrap())]);
        assert!(!resolve("localhost").unwrap().is_empty());
        assert!(resolve("no such host").is_err());
    }

    /// Fault: F58
    #[test]
    fn concurrent_lookups_share_one_result() {
        let askers: Vec<_> = (0..32)
            .map(|_| thread::spawn(|| HostName::new("localhost", 9).resolve(deadline())))
            .collect();
        for asker in askers {
            assert!(!asker.join().unwrap().unwrap().is_empty());
        }
        assert!(IN_FLIGHT.lock().keys().all(|name| name.port != 9), "a lookup was left in flight");
    }

    /// Fault: F58
    #[test]
    fn hanging_lookup_does_not_collect_callers() {
        let name = HostName::new("hanging", 10);
        IN_FLIGHT.lock().insert(name.clone(), lookups(LOOKUPS_MAX));
        for _ in 0..3 {
            assert!(name.resolve(clock::now()).is_err());
        }
        assert!(IN_FLIGHT.lock().get(&name).is_some_and(|lookups| lookups.waiting.is_empty()));
        // The result of the lookup serves later callers, although nobody waits for it.
        name.deliver(&Ok(vec![Address::Tcp("127.0.0.1:10".parse().unwrap())]));
        assert_eq!(name.resolve(clock::now()).unwrap().len(), 1);
    }
}
