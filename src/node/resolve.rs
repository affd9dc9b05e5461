//! Name lookup within a deadline: the system's resolver has none, so it runs on a thread of its own that may be left
//! behind. Lookups of one name share a thread and its answer: a resolver that hangs holds one, and not one for each try.
//! One that is only slower than its callers, as where the first of two servers is dead, is good for who asks next.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::LazyLock,
    time::Duration,
};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use crate::{
    clock::{self, Moment},
    threads,
};

type Addresses = Vec<SocketAddr>;
type Answer = Result<Addresses, (io::ErrorKind, String)>;
type Question = (String, u16);

/// Who waits for which lookup.
static UNDER_WAY: LazyLock<Mutex<HashMap<Question, Vec<Sender<Answer>>>>> = LazyLock::new(Mutex::default);
/// What was answered when nobody waited any more, and when.
static TOO_LATE: LazyLock<Mutex<HashMap<Question, (Moment, Addresses)>>> = LazyLock::new(Mutex::default);
/// For how long that is believed. A name may lead elsewhere soon.
const TOO_LATE_FOR: Duration = Duration::from_secs(10);

/// The addresses of a host. A literal address takes no time; a name at most until the deadline.
pub(crate) fn resolve(host: &str, port: u16, deadline: Moment) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let question = (host.to_owned(), port);
    if let Some((at, addresses)) = TOO_LATE.lock().get(&question)
        && clock::now().after(*at) < TOO_LATE_FOR
    {
        return Ok(addresses.clone());
    }
    let (answer, answered) = bounded(1);
    let first = match UNDER_WAY.lock().entry(question.clone()) {
        Entry::Occupied(mut others) => {
            others.get_mut().push(answer);
            false
        }
        Entry::Vacant(place) => {
            place.insert(vec![answer]);
            true
        }
    };
    if first {
        let spawned = threads::spawn("distlock-resolve", {
            let question = question.clone();
            move || look_up(&question)
        });
        if let Err(error) = spawned {
            tell(&question, &Err((error.kind(), error.to_string())));
        }
    }
    match answered.recv_timeout(deadline.after(clock::now())) {
        Ok(answer) => answer.map_err(|(kind, text)| io::Error::new(kind, text)),
        Err(RecvTimeoutError::Timeout) => {
            Err(io::Error::new(io::ErrorKind::TimedOut, "the name lookup takes too long"))
        }
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the name lookup failed")),
    }
}

fn look_up(question: &Question) {
    let (host, port) = question;
    let answer = (host.as_str(), *port).to_socket_addrs().map(Vec::from_iter);
    tell(question, &answer.map_err(|error| (error.kind(), error.to_string())));
}

fn tell(question: &Question, answer: &Answer) {
    let waiting = UNDER_WAY.lock().remove(question);
    let mut heard = false;
    for waiter in waiting.into_iter().flatten() {
        // It may have stopped waiting.
        heard |= waiter.try_send(answer.clone()).is_ok();
    }
    let mut too_late = TOO_LATE.lock();
    let now = clock::now();
    too_late.retain(|_, (at, _)| now.after(*at) < TOO_LATE_FOR);
    if let (false, Ok(addresses)) = (heard, answer) {
        too_late.insert(question.clone(), (now, addresses.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    fn soon() -> Moment {
        clock::now().saturating_add(Duration::from_secs(30))
    }

    #[test]
    fn names_and_literals() {
        assert_eq!(resolve("::1", 7, soon()).unwrap(), ["[::1]:7".parse().unwrap()]);
        assert!(!resolve("localhost", 7, soon()).unwrap().is_empty());
        assert!(resolve("no such host", 7, soon()).is_err());
    }

    #[test]
    fn many_lookups_of_one_name_all_get_its_answer() {
        let askers: Vec<_> = (0..32).map(|_| thread::spawn(|| resolve("localhost", 9, soon()))).collect();
        for asker in askers {
            assert!(!asker.join().unwrap().unwrap().is_empty());
        }
        assert!(UNDER_WAY.lock().keys().all(|(_, port)| *port != 9), "something was left behind");
    }
}
