//! Decides how many locks are renewed by one request. Pure.
//!
//! A path may lose all large requests, for example if its MTU has become smaller and the messages
//! about that are blocked. So a request that times out is followed by one of half its size. Larger
//! ones are tried again later. A try that fails costs a part of the leases, so the next one comes
//! much later.
//!
//! Otherwise one exchange may consist of several requests.

use std::mem;

/// Maximum number of locks in one renewal request; otherwise one request could block the server for
/// long. Still large enough that locks share the cost of a round trip.
pub(super) const RENEWAL_BATCH_MAX: usize = 100;
/// Number of confirmed requests before a larger one is tried. Small, because after an outage many
/// locks must be renewed soon.
const CONFIRMED_MIN: u32 = 4;
const CONFIRMED_MAX: u32 = 1024;

#[derive(Debug)]
pub(super) struct BatchSize {
    max: usize,
    /// No request of more than half of `max` has been confirmed since `max` was doubled.
    is_trial: bool,
    /// Requests of `max` locks that were confirmed.
    confirmed: u32,
    /// Number of these after which `max` is doubled.
    needed: u32,
}

impl BatchSize {
    pub(super) const fn new() -> BatchSize {
        let (max, needed) = (RENEWAL_BATCH_MAX, CONFIRMED_MIN);
        BatchSize { max, is_trial: false, confirmed: 0, needed }
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Maximum number of locks in one exchange of up to `requests` requests. After a timeout, an
    /// exchange has one request only, because several may share a packet that is too large.
    pub(super) fn exchange_max(&self, requests: usize) -> usize {
        let is_usual = self.max == RENEWAL_BATCH_MAX && !self.is_trial;
        if is_usual { self.max.saturating_mul(requests) } else { self.max }
    }

    pub(super) fn on_confirmed(&mut self, locks: usize) {
        if self.is_trial && locks > self.max / 2 {
            (self.is_trial, self.needed) = (false, CONFIRMED_MIN);
        }
        if locks < self.max || self.max == RENEWAL_BATCH_MAX {
            return;
        }
        self.confirmed += 1;
        if self.confirmed >= self.needed {
            self.max = (self.max * 2).min(RENEWAL_BATCH_MAX);
            (self.is_trial, self.confirmed) = (true, 0);
        }
    }

    pub(super) fn on_timed_out(&mut self, locks: usize) {
        self.needed = if mem::take(&mut self.is_trial) {
            (self.needed * 4).min(CONFIRMED_MAX)
        } else {
            CONFIRMED_MIN
        };
        (self.max, self.confirmed) = ((locks.min(self.max) / 2).max(1), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renews `locks` locks, where larger requests than `passing` time out, until all of them have
    /// been renewed. Returns the number of requests, and how many of them timed out.
    fn renew(size: &mut BatchSize, mut locks: usize, passing: usize) -> (u32, u32) {
        let (mut requests, mut timed_out) = (0, 0);
        while locks > 0 {
            let batch = locks.min(size.max());
            requests += 1;
            if batch > passing {
                size.on_timed_out(batch);
                timed_out += 1;
            } else {
                size.on_confirmed(batch);
                locks -= batch;
            }
        }
        (requests, timed_out)
    }

    /// Fault: N143
    #[test]
    fn requests_shrink_until_they_pass_and_seldom_try_more() {
        let mut size = BatchSize::new();
        assert_eq!(renew(&mut size, 1000, 100), (10, 0));
        assert_eq!(renew(&mut size, 30, 19), (3, 1));
        let later: u32 = (0..1000).map(|_| renew(&mut size, 30, 19).1).sum();
        assert!((2..=6).contains(&later), "{later} of 3,000 requests timed out");
        let mut size = BatchSize::new();
        assert_eq!(renew(&mut size, 200, 1).1, 9);
    }

    #[test]
    fn requests_share_an_exchange_unless_one_has_timed_out() {
        let mut size = BatchSize::new();
        assert_eq!(size.exchange_max(10), 1000);
        size.on_timed_out(1000);
        assert_eq!((size.max(), size.exchange_max(10)), (50, 50));
        (0..CONFIRMED_MIN).for_each(|_| size.on_confirmed(50));
        assert_eq!((size.max(), size.exchange_max(10)), (100, 100), "not tried yet");
        size.on_confirmed(100);
        assert_eq!(size.exchange_max(10), 1000);
    }

    #[test]
    fn requests_grow_soon_after_an_outage() {
        let mut size = BatchSize::new();
        for _ in 0..10 {
            size.on_timed_out(size.max());
        }
        assert_eq!(size.max(), 1);
        let (requests, _) = renew(&mut size, 1000, RENEWAL_BATCH_MAX);
        assert!(requests < 40, "{requests}");
        assert_eq!(renew(&mut size, 1000, RENEWAL_BATCH_MAX), (10, 0));
    }
}
