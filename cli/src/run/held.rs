//! `Held`: the locks that the command runs under.

use std::time::Duration;

use crossbeam_channel::Receiver;
use distlock::{FencingToken, LockError, LockGuard, LockId, LockLost, MultiGuard, Released};

use super::expiry::Expiry;
use crate::{
    exit::{Exit, Failure},
    format, output,
};

/// The locks of one command, which are held together.
#[derive(Debug)]
pub(super) enum Held {
    /// One lock of any kind.
    One(LockGuard),
    Several(MultiGuard),
}

/// How a release ended.
#[derive(Debug)]
pub(super) enum ReleaseResult {
    Released,
    /// One of the locks had been lost before, for this reason.
    Lost(String),
    /// The locks may stay held until they expire, which has been reported.
    Failed(Exit),
}

/// One of the locks.
pub(super) struct HeldLock<'a> {
    pub(super) name: &'a str,
    pub(super) id: &'a LockId,
    pub(super) token: FencingToken,
}

impl Held {
    pub(super) fn is_held(&self) -> bool {
        match self {
            Held::One(guard) => guard.is_held(),
            Held::Several(guard) => guard.is_held(),
        }
    }

    /// Time left until the first of them expires unless it is renewed.
    pub(super) fn remaining(&self) -> Duration {
        match self {
            Held::One(guard) => guard.remaining(),
            Held::Several(guard) => guard.remaining(),
        }
    }

    fn ensure_held(&self) -> Result<(), LockError> {
        match self {
            Held::One(guard) => guard.ensure_held(),
            Held::Several(guard) => guard.ensure_held(),
        }
    }

    /// Receives the loss of the first that is lost.
    pub(super) fn lost(&self) -> &Receiver<LockLost> {
        match self {
            Held::One(guard) => guard.lost(),
            Held::Several(guard) => guard.lost(),
        }
    }

    /// Releases the locks. Reports a failure, and with `verbose` a success.
    pub(super) fn release(self, expiry: Expiry, verbose: bool) -> ReleaseResult {
        let (all, is_one) = (self.all(), matches!(self, Held::One(_)));
        let result = match self {
            Held::One(guard) => guard.release(),
            Held::Several(guard) => guard.release(),
        };
        match result {
            Ok(Released::Released) => {
                if verbose {
                    output::print_message(&expiry.describe_release(&all));
                }
                ReleaseResult::Released
            }
            Ok(other) => ReleaseResult::Lost(other.to_string()),
            Err(error) => {
                output::print_message(&expiry.describe_failure(&error, is_one));
                ReleaseResult::Failed(Failure::from(error).exit)
            }
        }
    }

    /// The locks, sorted by name.
    pub(super) fn locks(&self) -> Vec<HeldLock<'_>> {
        match self {
            Held::One(guard) => {
                let (name, id, token) = (guard.name(), guard.id(), guard.fencing_token());
                vec![HeldLock { name, id, token }]
            }
            Held::Several(guard) => guard
                .names()
                .filter_map(|name| {
                    Some(HeldLock { name, id: guard.id(name)?, token: guard.token(name)? })
                })
                .collect(),
        }
    }

    /// Reports that the locks were acquired, for `--verbose`.
    pub(super) fn report_acquired(&self, waited: Duration) {
        for HeldLock { name, token, .. } in self.locks() {
            let (name, waited) = (format::quote(name), format::duration(waited));
            output::print_message(&format!(
                "acquired lock {name} with token {token} after {waited}"
            ));
        }
    }

    /// The locks as messages name them: `lock "a"`, or `locks "a", "b"`.
    pub(super) fn all(&self) -> String {
        self.described("lock", "locks")
    }

    /// One of them that is not known.
    pub(super) fn any(&self) -> String {
        self.described("lock", "one of the locks")
    }

    /// The lock that is lost, as messages name it, and why. Of several, the first by name.
    pub(super) fn loss(&self) -> (String, LockLost) {
        match self.ensure_held() {
            Err(LockError::Lost { name, why, .. }) => {
                (format!("lock {}", format::quote(&name)), why)
            }
            _ => (self.any(), LockLost::Expired),
        }
    }

    fn described(&self, one: &str, several: &str) -> String {
        let names: Vec<String> = self.locks().iter().map(|lock| format::quote(lock.name)).collect();
        let noun = if names.len() == 1 { one } else { several };
        format!("{noun} {}", names.join(", "))
    }

    /// What the command finds in its environment: a line for each lock.
    pub(super) fn environment(&self) -> [(&'static str, String); 3] {
        let locks = self.locks();
        let lines = |line: &dyn Fn(&HeldLock<'_>) -> String| {
            locks.iter().map(line).collect::<Vec<_>>().join("\n")
        };
        [
            ("DISTLOCK_NAME", lines(&|lock| lock.name.to_owned())),
            ("DISTLOCK_ID", lines(&|lock| lock.id.to_string())),
            ("DISTLOCK_TOKEN", lines(&|lock| lock.token.to_string())),
        ]
    }
}
