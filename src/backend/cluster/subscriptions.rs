//! `Subscriptions`: the slots whose waiters must be notified, and which of them are subscribed. The
//! waiters request slots; the thread that reads the subscription subscribes to them.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    backend::WakeFn,
    core::backoff::{RETRY_PAUSE_MAX, retry_backoff},
    sys::{
        clock::{self, Moment},
        sync::Mutex,
    },
};

/// Time after which a slot that nobody has waited for is given up. Longer than any poll interval.
pub(super) const UNUSED_MAX: Duration = Duration::from_secs(60);
/// Pause before the next try to subscribe to a slot whose node reports no subscriber.
const MISSING_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Subscriptions(Mutex<State>);

#[derive(Default)]
struct State {
    slots: BTreeMap<u16, Slot>,
    /// A slot was added, or must be subscribed again, or the map has changed.
    is_changed: bool,
    /// Wakes the thread that reads the subscription.
    wake: Option<WakeFn>,
}

#[derive(Debug)]
struct Slot {
    is_up: bool,
    /// When it was subscribed last.
    up_since: Moment,
    /// Earliest time of the next try.
    retry_at: Moment,
    used_at: Moment,
    /// Number of redirects since it was subscribed last.
    redirects: u32,
}

impl Subscriptions {
    /// Returns whether the slot is subscribed; requests it otherwise.
    pub(super) fn request(&self, slot: u16) -> bool {
        let now = clock::now();
        let mut state = self.0.lock();
        if let Some(known) = state.slots.get_mut(&slot) {
            known.used_at = now;
            return known.is_up;
        }
        let epoch = Moment::from_nanos(0);
        let new =
            Slot { is_up: false, up_since: epoch, retry_at: epoch, used_at: now, redirects: 0 };
        state.slots.insert(slot, new);
        state.change();
        false
    }

    /// The node of the slot replied to a request sent at `asked_at` that our channel has no
    /// subscriber.
    pub(super) fn on_missing(&self, slot: u16, asked_at: Moment) {
        let mut state = self.0.lock();
        let Some(known) = state.slots.get_mut(&slot) else { return };
        if known.is_up && asked_at >= known.up_since {
            known.is_up = false;
            known.retry_at = clock::now().saturating_add(MISSING_PAUSE);
            state.change();
        }
    }

    pub(super) fn set_wake(&self, wake: WakeFn) {
        let mut state = self.0.lock();
        state.wake = Some(wake);
        state.is_changed = true;
        state.slots.values_mut().for_each(|slot| slot.is_up = false);
    }

    /// The node of any slot may be another one.
    pub(super) fn on_new_map(&self) {
        self.0.lock().change();
    }

    /// Whether something has changed since the last call.
    pub(super) fn take_changed(&self) -> bool {
        std::mem::take(&mut self.0.lock().is_changed)
    }

    /// Returns the slots that are wanted, and the earliest time at which to subscribe to each;
    /// `None` if it is subscribed. Removes those that nobody uses.
    pub(super) fn wanted(&self, now: Moment) -> Vec<(u16, Option<Moment>)> {
        let mut state = self.0.lock();
        state.slots.retain(|_, slot| now.duration_since(slot.used_at) < UNUSED_MAX);
        let slots = state.slots.iter();
        slots.map(|(slot, known)| (*slot, (!known.is_up).then_some(known.retry_at))).collect()
    }

    pub(super) fn set_up(&self, slot: u16, is_up: bool, retry_at: Moment) {
        if let Some(known) = self.0.lock().slots.get_mut(&slot) {
            (known.is_up, known.retry_at) = (is_up, retry_at);
            if is_up {
                (known.up_since, known.redirects) = (clock::now(), 0);
            }
        }
    }

    /// Returns the pause before the slot is subscribed at the node that a redirect names. There is
    /// none after the first redirect. Nodes that disagree could redirect without end.
    pub(super) fn on_redirect(&self, slot: u16) -> Duration {
        let mut state = self.0.lock();
        let Some(known) = state.slots.get_mut(&slot) else { return Duration::ZERO };
        known.redirects = known.redirects.saturating_add(1);
        match known.redirects {
            1 => Duration::ZERO,
            more => retry_backoff(more, RETRY_PAUSE_MAX, clock::now().as_nanos()),
        }
    }
}

impl State {
    fn change(&mut self) {
        self.is_changed = true;
        if let Some(wake) = &self.wake {
            wake();
        }
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("slots", &self.slots).finish_non_exhaustive()
    }
}
