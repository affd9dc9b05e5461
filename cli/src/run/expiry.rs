//! `Expiry`: how long locks stay taken without their holder, and what is said about it.

use std::time::Duration;

use distlock::LockError;

use crate::{clock, format};

#[derive(Clone, Copy, Debug)]
pub(super) struct Expiry {
    ttl: Duration,
    /// End of the period for which the lock stays taken, as a time since boot.
    kept_until: Option<Duration>,
}

impl Expiry {
    /// For locks that have just been acquired, with the period of `--at-least`.
    pub(super) fn new(ttl: Duration, period: Option<Duration>) -> Expiry {
        let kept_until = period.map(|period| clock::since_boot().saturating_add(period));
        Expiry { ttl, kept_until }
    }

    /// Time left of the period; zero if there is none.
    fn kept_for(self) -> Duration {
        self.kept_until.map_or(Duration::ZERO, |until| until.saturating_sub(clock::since_boot()))
    }

    /// Reports a release of `locks`, such as `lock "x"`.
    pub(super) fn describe_release(self, locks: &str) -> String {
        match self.kept_for() {
            Duration::ZERO => format!("released {locks}"),
            left => {
                format!(
                    "released {locks}, which stays taken for another {}",
                    format::duration(left)
                )
            }
        }
    }

    /// Reports a failed release of one lock or of several. The manager ends with this process, so
    /// what the library says about its retries does not apply.
    pub(super) fn describe_failure(self, error: &LockError, is_one: bool) -> String {
        let text = error.to_string();
        let why = text.strip_suffix(&format!("; {}", error.advice())).unwrap_or(&text);
        let longest = format::duration(self.ttl.max(self.kept_for()));
        let stay = if is_one {
            "it may stay held until it expires"
        } else {
            "the locks may stay held until they expire"
        };
        format!("{why}; {stay}, after {longest} at the latest")
    }
}
