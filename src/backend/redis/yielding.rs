//! `Yielding`: when a release leaves the lock free, for clients of other libraries, which do not
//! queue.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;

use crate::{core::holder::Holder, sys::clock::Moment};

/// What the scripts report as the holder of a lock that is left free.
const LEFT_FREE: &str = "left free for other clients";
/// Maximum number of locks remembered.
const LOCKS_MAX: usize = 1024;
/// A client is assumed to be there for this many pauses after it was seen.
const NEARBY_PAUSES: u32 = 200;
/// One release in this many leaves the lock free, if another client is there.
const RELEASES: u32 = 3;
/// Pauses from one try to find another client to the next.
const TRY_PAUSES: u32 = 50;

/// What this manager remembers of its contended locks.
#[derive(Debug)]
pub(crate) struct Yielding {
    /// How long a lock is left free.
    pause: Duration,
    locks: Mutex<HashMap<String, History>>,
}

/// What is remembered of one lock.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    other_seen_at: Option<Moment>,
    left_free_at: Option<Moment>,
    /// Releases since then.
    releases: u32,
}

impl Yielding {
    /// Returns `None` if no lock is ever left free.
    pub(crate) fn new(pause: Duration) -> Option<Yielding> {
        (!pause.is_zero()).then(|| {
            // The scripts count in milliseconds.
            let pause = pause.max(Duration::from_millis(1));
            Yielding { pause, locks: Mutex::default() }
        })
    }

    /// The server replied that this holder has the lock.
    pub(crate) fn on_holder(&self, lock: &str, holder: &Holder, now: Moment) {
        if holder.is_foreign() && holder.id() != LEFT_FREE {
            self.with(lock, now, |history| history.other_seen_at = Some(now));
        }
    }

    /// Returns how long this release shall leave the lock free.
    pub(crate) fn on_release(&self, lock: &str, now: Moment) -> Duration {
        let is_due = self.with(lock, now, |history| history.on_release(now, self.pause));
        if is_due { self.pause } else { Duration::ZERO }
    }

    fn with<T>(&self, lock: &str, now: Moment, act: impl FnOnce(&mut History) -> T) -> T {
        let mut locks = self.locks.lock();
        if let Some(history) = locks.get_mut(lock) {
            return act(history);
        }
        if locks.len() >= LOCKS_MAX {
            locks.retain(|_, history| history.is_recent(now, self.pause));
            if locks.len() >= LOCKS_MAX {
                locks.clear();
            }
        }
        act(locks.entry(lock.to_owned()).or_default())
    }
}

impl History {
    fn on_release(&mut self, now: Moment, pause: Duration) -> bool {
        self.releases = self.releases.saturating_add(1);
        let is_due = if is_within(self.other_seen_at, now, pause * NEARBY_PAUSES) {
            self.releases >= RELEASES
        } else {
            !is_within(self.left_free_at, now, pause * TRY_PAUSES)
        };
        if is_due {
            (self.left_free_at, self.releases) = (Some(now), 0);
        }
        is_due
    }

    fn is_recent(&self, now: Moment, pause: Duration) -> bool {
        is_within(self.other_seen_at, now, pause * NEARBY_PAUSES)
            || is_within(self.left_free_at, now, pause * TRY_PAUSES)
    }
}

fn is_within(past: Option<Moment>, now: Moment, span: Duration) -> bool {
    past.is_some_and(|past| now.duration_since(past) < span)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::id::generate_lock_id;

    const PAUSE: Duration = Duration::from_millis(2);
    const START: Moment = Moment::from_nanos(1_000_000_000);

    fn holder(id: &str) -> Holder {
        Holder::from_report(id.as_bytes(), 30_000, 0, 0, 0)
    }

    /// The number of releases that leave the lock free, of one each millisecond.
    fn left_free(yielding: &Yielding, from_ms: u64, to_ms: u64) -> usize {
        let at = |ms| START.saturating_add(Duration::from_millis(ms));
        (from_ms..to_ms).filter(|ms| !yielding.on_release("lock:a", at(*ms)).is_zero()).count()
    }

    #[test]
    fn every_third_release_yields_to_a_client_that_was_seen() {
        let yielding = Yielding::new(PAUSE).unwrap();
        assert_eq!(left_free(&yielding, 0, 1_000), 10, "only tries");
        for ours in [generate_lock_id().as_str(), LEFT_FREE] {
            yielding.on_holder("lock:a", &holder(ours), START);
        }
        assert_eq!(left_free(&yielding, 1_000, 2_000), 10, "nobody else was seen");
        let seen_at = START.saturating_add(2 * Duration::from_secs(1));
        yielding.on_holder("lock:b", &holder("lock_1"), seen_at);
        assert_eq!(left_free(&yielding, 2_000, 2_400), 4, "seen at another lock");
        let seen_at = START.saturating_add(Duration::from_millis(2_400));
        yielding.on_holder("lock:a", &holder("lock_1"), seen_at);
        assert_eq!(left_free(&yielding, 2_400, 2_799), 133);
        assert_eq!(left_free(&yielding, 2_800, 3_800), 10, "not seen any more");
        assert!(Yielding::new(Duration::ZERO).is_none());
    }

    #[test]
    fn few_locks_are_remembered() {
        let yielding = Yielding::new(PAUSE).unwrap();
        for lock in 0..5_000 {
            yielding.on_release(&lock.to_string(), START);
            assert!(yielding.locks.lock().len() <= LOCKS_MAX);
        }
    }
}
