//! Which signals this process handles, and the thread that receives them.

use std::{
    io,
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use crossbeam_channel::{Receiver, unbounded};
use nix::sys::signal::{SigSet, Signal as Blocked};
use signal_hook::{
    consts::{
        SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGUSR1, SIGUSR2,
    },
    flag,
    iterator::{Handle, Signals},
};

/// Signals that end the wait for the lock, and are forwarded to a running command.
const FORWARDED: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// Receives the signals that this process is sent, as numbers.
#[derive(Debug)]
pub(super) struct SignalListener {
    pub(super) received: Receiver<i32>,
    handle: Handle,
    ignored: u64,
}

impl SignalListener {
    /// Starts receiving signals. Those that were ignored when this process started, for example by
    /// `nohup`, stay ignored in this process and in the command. SIGPIPE is an exception: Rust's
    /// runtime ignores it, and resets it to its default in processes that it starts.
    pub(super) fn start() -> io::Result<SignalListener> {
        let ignored =
            std::fs::read_to_string("/proc/self/status").map_or(0, |status| parse_ignored(&status));
        let forwarded = FORWARDED.into_iter().filter(|signal| !set_contains(ignored, *signal));
        let mut signals = Signals::new(forwarded.chain([SIGCHLD, SIGCONT]))?;
        let handle = signals.handle();
        let (sender, received) = unbounded();
        thread::Builder::new().name("signals".into()).spawn(move || {
            // The signals may have been blocked when this process started. They are unblocked in
            // this thread only, because the command must inherit the original mask.
            let _ = SigSet::from_iter([Blocked::SIGCHLD, Blocked::SIGCONT]).thread_unblock();
            for signal in signals.forever() {
                if sender.send(signal).is_err() {
                    break;
                }
            }
        })?;
        Ok(SignalListener { received, handle, ignored })
    }

    /// Also receives ^Z, which must not stop this process while it supervises a command.
    pub(super) fn catch_terminal_stop(&self) -> io::Result<()> {
        if set_contains(self.ignored, SIGTSTP) { Ok(()) } else { self.handle.add_signal(SIGTSTP) }
    }

    /// Resets SIGTTIN for the command, if it was ignored when this process started. Otherwise a
    /// command that reads from the terminal in the background would get an error, where it would be
    /// stopped and given the foreground.
    pub(super) fn reset_ttin(&self) -> io::Result<()> {
        if set_contains(self.ignored, SIGTTIN) {
            // Starting a program resets a signal that has a handler to its default.
            flag::register(SIGTTIN, Arc::new(AtomicBool::new(false)))?;
        }
        Ok(())
    }

    /// The first signal received so far that ends the wait for the lock.
    pub(super) fn pending_termination(&self) -> Option<i32> {
        self.received.try_iter().find(|signal| is_forwarded(*signal))
    }
}

pub(super) fn is_forwarded(signal: i32) -> bool {
    FORWARDED.contains(&signal)
}

/// The set of ignored signals in a `/proc/PID/status`; empty if the system does not provide it.
pub(super) fn parse_ignored(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

fn set_contains(set: u64, signal: i32) -> bool {
    u32::try_from(signal - 1).is_ok_and(|bit| set.checked_shr(bit).is_some_and(|set| set & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_parsed() {
        let set = parse_ignored("Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n");
        assert!(set_contains(set, SIGHUP) && set_contains(set, signal_hook::consts::SIGPIPE));
        assert!(!set_contains(set, SIGINT) && !set_contains(set, SIGTERM));
        assert_eq!((parse_ignored(""), parse_ignored("SigIgn:\tx")), (0, 0));
        assert!(!set_contains(u64::MAX, 0) && !set_contains(u64::MAX, 99));
    }
}
