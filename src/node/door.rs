//! `Door`: who is connecting to a node, so that not everybody waits outside of one that lets nobody in.

use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Moment;

#[derive(Debug)]
pub(super) struct Door(Mutex<Outside>);

#[derive(Debug)]
struct Outside {
    /// How many are connecting.
    knocking: u32,
    /// Since when some have been, and nobody has got in.
    since: Moment,
    /// When the last of them came.
    last: Moment,
}

/// Somebody who is connecting, until this is dropped.
pub(super) struct Knocking<'a>(&'a Door);

impl Default for Door {
    fn default() -> Door {
        let never = Moment::from_nanos(0);
        Door(Mutex::new(Outside { knocking: 0, since: never, last: never }))
    }
}

impl Door {
    pub(super) fn knock(&self, now: Moment) -> Knocking<'_> {
        let mut outside = self.0.lock();
        if outside.knocking == 0 {
            outside.since = now;
        }
        outside.last = now;
        outside.knocking += 1;
        Knocking(self)
    }

    /// Somebody got in.
    pub(super) fn opened(&self, now: Moment) {
        self.0.lock().since = now;
    }

    /// Whether somebody has been kept outside for `patience`, and the last one who came has not been there for `pause`.
    pub(super) fn is_closed(&self, now: Moment, patience: Duration, pause: Duration) -> bool {
        let outside = self.0.lock();
        outside.knocking > 0 && now.after(outside.since) >= patience && now.after(outside.last) < pause
    }
}

impl Drop for Knocking<'_> {
    fn drop(&mut self) {
        self.0.0.lock().knocking -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_nanos(10);
    const PAUSE: Duration = Duration::from_nanos(30);

    #[test]
    fn it_is_closed_when_somebody_has_been_kept_outside_and_nobody_has_got_in() {
        let at = Moment::from_nanos;
        let door = Door::default();
        let is_closed = |now| door.is_closed(at(now), PATIENCE, PAUSE);
        assert!(!is_closed(100), "nobody is there");
        let first = door.knock(at(100));
        assert!(!is_closed(109) && is_closed(110));
        let second = door.knock(at(107));
        drop(first);
        assert!(is_closed(110), "the second is still there");
        door.opened(at(111));
        assert!(!is_closed(120) && is_closed(121));
        drop(second);
        assert!(!is_closed(121), "all have left");
        let third = door.knock(at(200));
        assert!(!is_closed(209) && is_closed(210));
        drop(third);
    }

    #[test]
    fn it_is_knocked_at_again_after_a_pause() {
        let at = Moment::from_nanos;
        let door = Door::default();
        let is_closed = |now| door.is_closed(at(now), PATIENCE, PAUSE);
        let _first = door.knock(at(100));
        assert!(is_closed(129) && !is_closed(130));
        let _second = door.knock(at(130));
        assert!(is_closed(130), "the first has been there for long enough");
    }
}
