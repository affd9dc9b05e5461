//! `History`: what successive polls show about the locks: hand-overs, ttls and close calls. Pure.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::top::rows::Row;

/// How long a lock is remembered after it was last held.
const RETENTION: Duration = Duration::from_secs(60);
/// Maximum error of a time left, or of an age, as a server reports it.
const TTL_TOLERANCE: Duration = Duration::from_millis(100);
/// Time constant for smoothing the rate of hand-overs.
const RATE_SMOOTHING_SECS: f64 = 10.0;

/// All locks as one poll shows them.
#[derive(Debug)]
pub(crate) struct TableData {
    pub(crate) rows: Vec<Row>,
    pub(crate) waiting: u64,
    /// Hand-overs per second, of all locks.
    pub(crate) rate: f64,
    pub(crate) at: Instant,
    /// How long the poll took.
    pub(crate) poll_time: Duration,
    /// Nodes that did not reply, with the reason.
    pub(crate) silent_nodes: Vec<String>,
}

/// What is kept from poll to poll.
#[derive(Debug, Default)]
pub(crate) struct History {
    locks: HashMap<Arc<str>, LockHistory>,
    last: Option<Instant>,
}

impl History {
    /// Records what a poll that ended at `now` shows, and completes its rows.
    pub(crate) fn update(&mut self, now: Instant, mut rows: Vec<Row>) -> TableData {
        let since = self.last.replace(now).map(|last| now.saturating_duration_since(last));
        let since = since.unwrap_or_default();
        let mut waiting = 0_u64;
        for row in &mut rows {
            waiting = waiting.saturating_add(row.waiting);
            let new = || LockHistory::new(row, now);
            let lock = self.locks.entry(row.name.clone()).or_insert_with(new);
            lock.record(row, now, since);
            row.fraction_left = row.left.and_then(|left| lock.ttl.fraction(left));
            row.closest_call = lock.closest_call();
            row.rate = lock.rate;
        }
        self.locks.retain(|_, lock| {
            if lock.last_seen != now {
                lock.rate = smooth_rate(lock.rate, 0, since);
            }
            now.saturating_duration_since(lock.last_seen) <= RETENTION
        });
        let rate = self.locks.values().map(|lock| lock.rate).sum();
        TableData {
            rows,
            waiting,
            rate,
            at: now,
            poll_time: Duration::ZERO,
            silent_nodes: Vec::new(),
        }
    }
}

/// What is known about one lock.
#[derive(Debug)]
struct LockHistory {
    id: Arc<str>,
    ttl: TtlEstimate,
    /// The time left at the last poll of this holder, and the minimum so far.
    left: Option<Duration>,
    min_left: Option<Duration>,
    /// The closest call of all earlier holders.
    earlier_closest_call: Option<f32>,
    rate: f64,
    last_seen: Instant,
}

impl LockHistory {
    fn new(row: &Row, now: Instant) -> LockHistory {
        LockHistory {
            id: row.id.clone(),
            ttl: TtlEstimate::default(),
            left: None,
            min_left: None,
            earlier_closest_call: None,
            rate: 0.0,
            last_seen: now,
        }
    }

    fn record(&mut self, row: &Row, now: Instant, since: Duration) {
        // Each renewal by another member of a group changes which of them is reported.
        let is_member = |id: &str| row.members.iter().any(|member| **member == *id);
        let is_handed_over = self.id != row.id && !is_member(&self.id);
        if is_handed_over {
            self.earlier_closest_call = self.closest_call();
            self.id = row.id.clone();
            self.ttl = self.ttl.for_next_holder();
            (self.left, self.min_left) = (None, None);
        }
        self.rate = smooth_rate(self.rate, u32::from(is_handed_over), since);
        self.last_seen = now;
        let Some(left) = row.left.filter(|_| !row.is_kept) else { return };
        if self.ttl.is_outgrown_by(left) {
            self.ttl = TtlEstimate { previous: self.ttl.previous, ..TtlEstimate::default() };
            (self.left, self.min_left) = (None, None);
        }
        self.ttl.record(left, row.age);
        let before = self
            .left
            .replace(left)
            .and_then(|before| self.ttl.left_before_renewal(before, left, since));
        let least = before.map_or(left, |before| before.min(left));
        self.min_left = Some(self.min_left.map_or(least, |known| known.min(least)));
    }

    fn closest_call(&self) -> Option<f32> {
        let now = self.min_left.and_then(|least| self.ttl.fraction(least));
        match (self.earlier_closest_call, now) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// An estimate of the ttl, which no server reports. It is at least the time left at any poll, and
/// at most the time left plus the lock's age.
#[derive(Clone, Copy, Debug, Default)]
struct TtlEstimate {
    /// The estimate for the previous holder, or zero.
    previous: Duration,
    low: Duration,
    high: Option<Duration>,
}

impl TtlEstimate {
    fn for_next_holder(self) -> TtlEstimate {
        TtlEstimate { previous: self.estimate(), ..TtlEstimate::default() }
    }

    fn record(&mut self, left: Duration, age: Option<Duration>) {
        self.low = self.low.max(left);
        if let Some(age) = age {
            let high = left.saturating_add(age);
            self.high = Some(self.high.map_or(high, |known| known.min(high)));
        }
    }

    /// Whether the lock was extended to a longer ttl: by its holder, or because its grant has been
    /// confirmed, which first lasts only for the claim window.
    fn is_outgrown_by(self, left: Duration) -> bool {
        self.high.is_some_and(|high| left > high.max(self.low).saturating_add(TTL_TOLERANCE))
    }

    fn estimate(self) -> Duration {
        self.previous.min(self.high.unwrap_or(Duration::MAX)).max(self.low)
    }

    fn fraction(self, left: Duration) -> Option<f32> {
        let estimate = self.estimate();
        (!estimate.is_zero()).then(|| left.as_secs_f32() / estimate.as_secs_f32())
    }

    /// The time left just before a renewal between two polls, if there was one and the polls are so
    /// close that there was only one.
    fn left_before_renewal(
        self,
        before: Duration,
        left: Duration,
        since: Duration,
    ) -> Option<Duration> {
        let without = before.saturating_sub(since);
        let renewed = left > without.saturating_add(since / 4);
        let renewed_ago = self.estimate().saturating_sub(left);
        (renewed && since <= self.estimate() / 6)
            .then(|| without.saturating_add(renewed_ago).min(before))
    }
}

/// The smoothed rate after `hand_overs` more within `since`.
fn smooth_rate(rate: f64, hand_overs: u32, since: Duration) -> f64 {
    let since = since.as_secs_f64();
    if since <= 0.0 {
        return rate;
    }
    let kept = (-since / RATE_SMOOTHING_SECS).exp();
    rate * kept + f64::from(hand_overs) / since * (1.0 - kept)
}

/// A row with neutral values, of which a test sets only those that matter.
#[cfg(test)]
pub(crate) fn test_row(name: &str, id: &str) -> Row {
    Row {
        name: name.into(),
        id: id.into(),
        group: None,
        members: Vec::new(),
        is_kept: false,
        host: None,
        pid: None,
        age: None,
        left: None,
        fraction_left: None,
        closest_call: None,
        waiting: 0,
        token: None,
        rate: 0.0,
        certain: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const SECOND: Duration = Duration::from_secs(1);

    fn polled(id: &str, age: u32, left_ms: u64) -> Row {
        let (age, left) = (Some(age * SECOND), Some(Duration::from_millis(left_ms)));
        Row { age, left, waiting: 2, ..test_row("x", id) }
    }

    /// One lock at polls a second apart, each as holder, age and milliseconds left.
    fn after(polls: &[(&str, u32, u64)]) -> Row {
        let (mut history, start) = (History::default(), clock::now());
        let mut last = None;
        for (at, (id, age, left)) in (0u32..).zip(polls) {
            let data = history.update(start + at * SECOND, vec![polled(id, *age, *left)]);
            last = data.rows.into_iter().next();
        }
        last.unwrap()
    }

    fn percent(part: Option<f32>) -> i32 {
        part.map_or(-1, |part| (part * 100.0).round() as i32)
    }

    #[test]
    fn ttl_is_estimated_from_time_left_and_age() {
        assert_eq!(percent(after(&[("a", 900, 6_700)]).fraction_left), 100, "nothing is known yet");
        assert_eq!(percent(after(&[("a", 2, 8_000)]).fraction_left), 100);
        assert_eq!(percent(after(&[("a", 900, 10_000), ("a", 901, 9_000)]).fraction_left), 90);
        // The next holder most likely has the same ttl, unless its age rules that out.
        assert_eq!(percent(after(&[("a", 900, 10_000), ("b", 900, 5_000)]).fraction_left), 50);
        assert_eq!(percent(after(&[("a", 900, 10_000), ("b", 1, 4_000)]).fraction_left), 80);
        assert_eq!(percent(after(&[("a", 0, 0)]).fraction_left), -1);
    }

    #[test]
    fn closest_call_is_minimum_left_at_a_poll() {
        let row = after(&[("a", 0, 10_000), ("a", 1, 9_000), ("a", 2, 2_000), ("a", 3, 9_900)]);
        assert_eq!(
            (percent(row.closest_call), percent(row.fraction_left)),
            (11, 99),
            "0.1 s before the last poll"
        );
        let row = after(&[("a", 0, 10_000), ("a", 9, 1_000), ("b", 0, 10_000), ("b", 1, 9_000)]);
        assert_eq!(percent(row.closest_call), 10, "an earlier holder's counts");
    }

    #[test]
    fn renewal_between_polls_shows_how_close_it_was() {
        let row = after(&[("a", 0, 10_000), ("a", 8, 2_000), ("a", 9, 9_500)]);
        assert_eq!(percent(row.closest_call), 15, "renewed 0.5 s after the second poll");
        // With a short ttl, there may have been several renewals, so nothing is estimated.
        let row = after(&[("a", 0, 3_000), ("a", 1, 2_000), ("a", 2, 2_500)]);
        assert_eq!(percent(row.closest_call), 67);
        let row = after(&[("a", 0, 10_000), ("a", 1, 9_000), ("a", 2, 8_000)]);
        assert_eq!(percent(row.closest_call), 80, "without a renewal");
    }

    /// Polls right after a hand-over see the claim window, which is short.
    #[test]
    fn confirmed_hand_over_is_no_close_call() {
        for left in [950, 400] {
            let row = after(&[("a", 5, 25_000), ("b", 0, left), ("b", 1, 29_000)]);
            assert_eq!((percent(row.closest_call), percent(row.fraction_left)), (100, 100));
        }
        let late = [("a", 5, 25_000), ("b", 0, 950), ("b", 1, 29_000), ("b", 27, 3_000)];
        assert_eq!(percent(after(&late).closest_call), 10);
    }

    #[test]
    fn rate_of_hand_overs_fades() {
        let polls: Vec<_> =
            (0..60).map(|at| (if at % 2 == 0 { "a" } else { "b" }, 0, 9_000)).collect();
        let busy = after(&polls).rate;
        assert!((0.9..=1.0).contains(&busy), "{busy}");
        let calm: Vec<_> = polls.iter().copied().chain((0..60).map(|_| ("b", 0, 9_000))).collect();
        assert!(after(&calm).rate < 0.01);
        assert_eq!(
            after(&[("a", 0, 1)]).rate,
            0.0,
            "a lock seen for the first time was not handed over"
        );
    }

    #[test]
    fn briefly_free_lock_counts_as_handed_over() {
        let (mut history, start) = (History::default(), clock::now());
        let mut poll = |at: u32, rows| history.update(start + at * SECOND, rows);
        poll(0, vec![polled("a", 0, 9_000)]);
        assert_eq!(poll(1, vec![]).rows, []);
        let data = poll(2, vec![polled("b", 0, 9_000)]);
        assert!(data.rows[0].rate > 0.0 && data.rate == data.rows[0].rate);
        assert_eq!(data.waiting, 2);
        assert!(poll(3, vec![]).rate > 0.0);
        assert_eq!(poll(100, vec![]).rate, 0.0);
        assert_eq!(history.locks.len(), 0);
    }
}
