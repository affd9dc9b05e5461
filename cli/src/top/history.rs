//! `History`: what looks one after the other tell of the locks: hand-overs, times to live, close calls. Pure.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::top::rows::Row;

/// How long a lock is remembered that nobody holds.
const MEMORY: Duration = Duration::from_secs(60);
/// Over which time the rate of hand-overs is smoothed.
const SMOOTHING: f64 = 10.0;

/// A lock as one look shows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight<'a> {
    pub(crate) name: &'a str,
    pub(crate) id: &'a str,
    pub(crate) host: Option<&'a str>,
    pub(crate) pid: Option<u32>,
    pub(crate) age: Option<Duration>,
    pub(crate) left: Option<Duration>,
    pub(crate) waiting: u64,
    pub(crate) token: Option<u64>,
    pub(crate) certain: bool,
}

/// All locks at one moment.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) rows: Vec<Row>,
    pub(crate) waiting: u64,
    /// Hand-overs per second, of all locks.
    pub(crate) rate: f64,
    pub(crate) at: Instant,
    /// How long it took to ask.
    pub(crate) took: Duration,
    /// What is said of nodes that did not answer.
    pub(crate) silent: Vec<String>,
}

/// What is remembered from look to look.
#[derive(Debug, Default)]
pub(crate) struct History {
    locks: HashMap<Arc<str>, Past>,
    last: Option<Instant>,
}

impl History {
    /// Takes in a look that ended at `now`.
    pub(crate) fn digest<'a>(&mut self, now: Instant, sights: impl Iterator<Item = Sight<'a>>) -> Picture {
        let since = self.last.replace(now).map(|last| now.saturating_duration_since(last));
        let (mut rows, mut waiting) = (Vec::with_capacity(sights.size_hint().0), 0u64);
        for sight in sights {
            waiting = waiting.saturating_add(sight.waiting);
            let name: Arc<str> = match self.locks.get_key_value(sight.name) {
                Some((name, _)) => name.clone(),
                None => sight.name.into(),
            };
            let past = self.locks.entry(name.clone()).or_insert_with(|| Past::new(&sight, now));
            past.take_in(&sight, now, since.unwrap_or_default());
            rows.push(past.row(name, &sight));
        }
        let since = since.unwrap_or_default();
        self.locks.retain(|_, past| {
            if past.seen != now {
                past.rate = smoothed(past.rate, 0, since);
            }
            now.saturating_duration_since(past.seen) <= MEMORY
        });
        let rate = self.locks.values().map(|past| past.rate).sum();
        Picture { rows, waiting, rate, at: now, took: Duration::ZERO, silent: Vec::new() }
    }
}

/// What is known of one lock.
#[derive(Debug)]
struct Past {
    id: Arc<str>,
    ttl: Ttl,
    /// The time left at the last look at this holder, and the least so far.
    left: Option<Duration>,
    least: Option<Duration>,
    /// The closest call of all holders before.
    closest: Option<f32>,
    rate: f64,
    seen: Instant,
}

impl Past {
    fn new(sight: &Sight<'_>, now: Instant) -> Past {
        Past { id: sight.id.into(), ttl: Ttl::default(), left: None, least: None, closest: None, rate: 0.0, seen: now }
    }

    fn take_in(&mut self, sight: &Sight<'_>, now: Instant, since: Duration) {
        let handed = *self.id != *sight.id;
        if handed {
            self.closest = self.closest();
            self.id = sight.id.into();
            self.ttl = self.ttl.of_next();
            (self.left, self.least) = (None, None);
        }
        self.rate = smoothed(self.rate, u32::from(handed), since);
        self.seen = now;
        let Some(left) = sight.left else { return };
        self.ttl.take_in(left, sight.age);
        let before = self.left.replace(left).and_then(|before| self.ttl.before_renewal(before, left, since));
        let least = before.map_or(left, |before| before.min(left));
        self.least = Some(self.least.map_or(least, |known| known.min(least)));
    }

    fn closest(&self) -> Option<f32> {
        let now = self.least.and_then(|least| self.ttl.part(least));
        match (self.closest, now) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn row(&self, name: Arc<str>, sight: &Sight<'_>) -> Row {
        Row {
            name,
            id: self.id.clone(),
            host: sight.host.map(Into::into),
            pid: sight.pid,
            age: sight.age,
            left: sight.left,
            part: sight.left.and_then(|left| self.ttl.part(left)),
            closest: self.closest(),
            waiting: sight.waiting,
            token: sight.token,
            rate: self.rate,
            certain: sight.certain,
        }
    }
}

/// The whole time to live, which no server tells: not below what was left at any look, and not above what was left and
/// the age together.
#[derive(Clone, Copy, Debug, Default)]
struct Ttl {
    /// That of the holder before, if there was one.
    likely: Duration,
    low: Duration,
    high: Option<Duration>,
}

impl Ttl {
    fn of_next(self) -> Ttl {
        Ttl { likely: self.whole(), ..Ttl::default() }
    }

    fn take_in(&mut self, left: Duration, age: Option<Duration>) {
        self.low = self.low.max(left);
        if let Some(age) = age {
            let high = left.saturating_add(age);
            self.high = Some(self.high.map_or(high, |known| known.min(high)));
        }
    }

    fn whole(self) -> Duration {
        self.likely.min(self.high.unwrap_or(Duration::MAX)).max(self.low)
    }

    fn part(self, left: Duration) -> Option<f32> {
        let whole = self.whole();
        (!whole.is_zero()).then(|| left.as_secs_f32() / whole.as_secs_f32())
    }

    /// What was left just before the renewal between two looks, if there was one and looks are close enough for there
    /// to have been no more.
    fn before_renewal(self, before: Duration, left: Duration, since: Duration) -> Option<Duration> {
        let without = before.saturating_sub(since);
        let renewed = left > without.saturating_add(since / 4);
        let renewed_ago = self.whole().saturating_sub(left);
        (renewed && since <= self.whole() / 6).then(|| without.saturating_add(renewed_ago).min(before))
    }
}

/// The rate after `hand_overs` more within `since`.
fn smoothed(rate: f64, hand_overs: u32, since: Duration) -> f64 {
    let since = since.as_secs_f64();
    if since <= 0.0 {
        return rate;
    }
    let kept = (-since / SMOOTHING).exp();
    rate * kept + f64::from(hand_overs) / since * (1.0 - kept)
}

/// A row of which a test only has to say what it is about.
#[cfg(test)]
pub(crate) fn sample(name: &str, id: &str) -> Row {
    Row {
        name: name.into(),
        id: id.into(),
        host: None,
        pid: None,
        age: None,
        left: None,
        part: None,
        closest: None,
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

    fn sight<'a>(name: &'a str, id: &'a str, age: u32, left_ms: u64) -> Sight<'a> {
        Sight {
            name,
            id,
            host: None,
            pid: None,
            age: Some(age * SECOND),
            left: Some(Duration::from_millis(left_ms)),
            waiting: 2,
            token: None,
            certain: true,
        }
    }

    /// One lock at looks a second apart, each as holder, age and milliseconds left.
    fn after(looks: &[(&str, u32, u64)]) -> Row {
        let (mut history, start) = (History::default(), clock::now());
        let mut last = None;
        for (at, (id, age, left)) in (0u32..).zip(looks) {
            let picture = history.digest(start + at * SECOND, [sight("x", id, *age, *left)].into_iter());
            last = picture.rows.into_iter().next();
        }
        last.unwrap()
    }

    fn percent(part: Option<f32>) -> i32 {
        part.map_or(-1, |part| (part * 100.0).round() as i32)
    }

    #[test]
    fn the_time_to_live_is_learned_from_what_is_left() {
        assert_eq!(percent(after(&[("a", 900, 6_700)]).part), 100, "nothing is known yet");
        assert_eq!(percent(after(&[("a", 2, 8_000)]).part), 100);
        assert_eq!(percent(after(&[("a", 900, 10_000), ("a", 901, 9_000)]).part), 90);
        // The next holder most likely has the same, unless its age says otherwise.
        assert_eq!(percent(after(&[("a", 900, 10_000), ("b", 900, 5_000)]).part), 50);
        assert_eq!(percent(after(&[("a", 900, 10_000), ("b", 1, 4_000)]).part), 80);
        assert_eq!(percent(after(&[("a", 0, 0)]).part), -1);
    }

    #[test]
    fn the_closest_call_is_the_least_that_was_left_at_a_look() {
        let row = after(&[("a", 0, 10_000), ("a", 1, 9_000), ("a", 2, 2_000), ("a", 3, 9_900)]);
        assert_eq!((percent(row.closest), percent(row.part)), (11, 99), "a tenth of a second before the last look");
        let row = after(&[("a", 0, 10_000), ("a", 9, 1_000), ("b", 0, 10_000), ("b", 1, 9_000)]);
        assert_eq!(percent(row.closest), 10, "that of a holder before counts");
    }

    #[test]
    fn a_renewal_between_two_looks_shows_how_close_it_was() {
        let row = after(&[("a", 0, 10_000), ("a", 8, 2_000), ("a", 9, 9_500)]);
        assert_eq!(percent(row.closest), 15, "renewed half a second after the second look");
        // With a short time to live there can have been several, and nothing is guessed.
        let row = after(&[("a", 0, 3_000), ("a", 1, 2_000), ("a", 2, 2_500)]);
        assert_eq!(percent(row.closest), 67);
        let row = after(&[("a", 0, 10_000), ("a", 1, 9_000), ("a", 2, 8_000)]);
        assert_eq!(percent(row.closest), 80, "there was none");
    }

    #[test]
    fn hand_overs_make_a_rate_that_fades() {
        let looks: Vec<_> = (0..60).map(|at| (if at % 2 == 0 { "a" } else { "b" }, 0, 9_000)).collect();
        let busy = after(&looks).rate;
        assert!((0.9..=1.0).contains(&busy), "{busy}");
        let calm: Vec<_> = looks.iter().copied().chain((0..60).map(|_| ("b", 0, 9_000))).collect();
        assert!(after(&calm).rate < 0.01);
        assert_eq!(after(&[("a", 0, 1)]).rate, 0.0, "a lock that is new here was not handed over");
    }

    #[test]
    fn a_lock_that_was_free_for_a_moment_was_handed_over_and_one_that_is_gone_is_forgotten() {
        let (mut history, start) = (History::default(), clock::now());
        let mut look = |at: u32, sights: &[Sight<'_>]| history.digest(start + at * SECOND, sights.iter().copied());
        look(0, &[sight("x", "a", 0, 9_000)]);
        assert_eq!(look(1, &[]).rows, []);
        let picture = look(2, &[sight("x", "b", 0, 9_000)]);
        assert!(picture.rows[0].rate > 0.0 && picture.rate == picture.rows[0].rate);
        assert_eq!(picture.waiting, 2);
        assert!(look(3, &[]).rate > 0.0);
        assert_eq!(look(100, &[]).rate, 0.0);
        assert_eq!(history.locks.len(), 0);
    }
}
