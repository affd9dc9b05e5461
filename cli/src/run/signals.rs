//! Which signals are heard, and the thread that hears them.

use std::{
    io,
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use crossbeam_channel::{Receiver, unbounded};
use nix::sys::signal::{SigSet, Signal as Blocked};
use signal_hook::{
    consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGUSR1, SIGUSR2},
    flag,
    iterator::{Handle, Signals},
};

/// What ends a wait, and is passed on to a command that runs.
const PASSED_ON: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// The signals that this process is sent, by number.
#[derive(Debug)]
pub(super) struct Hearing {
    pub(super) heard: Receiver<i32>,
    handle: Handle,
    ignored: u64,
}

impl Hearing {
    /// From now on none is lost. What was ignored when this process started, as `nohup` arranges, stays ignored, here and
    /// in the command; but for SIGPIPE, which Rust's runtime has set by now, and sets to its default for what it starts.
    pub(super) fn start() -> io::Result<Hearing> {
        let ignored = std::fs::read_to_string("/proc/self/status").map_or(0, |status| ignored(&status));
        let passed_on = PASSED_ON.into_iter().filter(|signal| !contains(ignored, *signal));
        let mut signals = Signals::new(passed_on.chain([SIGCHLD, SIGCONT]))?;
        let handle = signals.handle();
        let (sender, heard) = unbounded();
        thread::Builder::new().name("signals".into()).spawn(move || {
            // Without them the end of a command is never heard of, and it is the command that may have use for a blocked signal.
            let _ = SigSet::from_iter([Blocked::SIGCHLD, Blocked::SIGCONT]).thread_unblock();
            for signal in signals.forever() {
                if sender.send(signal).is_err() {
                    break;
                }
            }
        })?;
        Ok(Hearing { heard, handle, ignored })
    }

    /// Also hears ^Z, which must not stop this process while a command runs that it has to watch.
    pub(super) fn hear_stops(&self) -> io::Result<()> {
        if contains(self.ignored, SIGTSTP) { Ok(()) } else { self.handle.add_signal(SIGTSTP) }
    }

    /// Lets a command be stopped when it reads from a terminal without having its foreground, also where that was ignored
    /// when this process started: in a process group of its own it would get an error where we would get a line.
    pub(super) fn let_reads_stop(&self) -> io::Result<()> {
        if contains(self.ignored, SIGTTIN) {
            // For what has a handler the next program begins with the default.
            flag::register(SIGTTIN, Arc::new(AtomicBool::new(false)))?;
        }
        Ok(())
    }

    /// The first signal so far that ends a wait.
    pub(super) fn end_of_wait(&self) -> Option<i32> {
        self.heard.try_iter().find(|signal| ends_wait(*signal))
    }
}

pub(super) fn ends_wait(signal: i32) -> bool {
    PASSED_ON.contains(&signal)
}

/// The set of ignored signals, as Linux tells it; empty where it does not.
pub(super) fn ignored(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

fn contains(set: u64, signal: i32) -> bool {
    u32::try_from(signal - 1).is_ok_and(|bit| set.checked_shr(bit).is_some_and(|set| set & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_of_ignored_signals_is_read() {
        let set = ignored("Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n");
        assert!(contains(set, SIGHUP) && contains(set, signal_hook::consts::SIGPIPE));
        assert!(!contains(set, SIGINT) && !contains(set, SIGTERM));
        assert_eq!((ignored(""), ignored("SigIgn:\tx")), (0, 0));
        assert!(!contains(u64::MAX, 0) && !contains(u64::MAX, 99));
    }
}
