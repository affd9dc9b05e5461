//! The one place where time is read or waited for.
//!
//! Moments come from a clock that goes on while the machine is suspended: `CLOCK_BOOTTIME` on Linux
//! and Android. `std::time::Instant` stands still there, and a laptop that wakes up would believe
//! in a lock it lost hours ago. Sleeping threads wake by the monotonic clock all the same: after a
//! suspension they are late, by the time that they still had to sleep. Who must not be looks once a
//! second. Asking a guard is exact at once.
//!
//! Elsewhere `Instant` is used; on macOS and Windows builds a suspended machine may therefore
//! believe for too long.

use std::time::{Duration, SystemTime};

use crossbeam_channel::Receiver;

use crate::sync::{Condvar, Mutex, MutexGuard};

#[cfg(feature = "testing")]
use crate::sim;

/// A point in time, in nanoseconds on the local clock. Arithmetic saturates: far away is never
/// wrong, only far away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(u64);

impl Moment {
    /// Later than anything that happens.
    pub(crate) const NEVER: Moment = Moment(u64::MAX);

    pub(crate) const fn from_nanos(nanos: u64) -> Moment {
        Moment(nanos)
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0
    }

    pub(crate) fn saturating_add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(nanos(span)))
    }

    pub(crate) fn saturating_sub(self, span: Duration) -> Moment {
        Moment(self.0.saturating_sub(nanos(span)))
    }

    /// How long until this moment, seen from `now`; zero when it has passed.
    pub(crate) fn duration_since(self, now: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(now.0))
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads the clock.
#[cfg(all(any(target_os = "linux", target_os = "android"), not(miri)))]
pub(crate) fn now() -> Moment {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return Moment(world.now());
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Moment(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Reads the clock.
#[cfg(any(miri, not(any(target_os = "linux", target_os = "android"))))]
pub(crate) fn now() -> Moment {
    use std::{sync::OnceLock, time::Instant};
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return Moment(world.now());
    }
    static START: OnceLock<Instant> = OnceLock::new();
    #[expect(clippy::disallowed_methods, reason = "this is the place that may")]
    let start = *START.get_or_init(Instant::now);
    // Never zero: zero stands for a lease that has ended.
    Moment(nanos(start.elapsed()).saturating_add(1_000_000_000))
}

/// The wall clock: for identifiers and for people, never for a deadline.
pub(crate) fn wall_clock() -> SystemTime {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.wall_clock();
    }
    SystemTime::now()
}

/// Waits on `condvar` until it is notified or `until` has come; may also wake up early.
pub(crate) fn park<T>(condvar: &Condvar, guard: &mut MutexGuard<'_, T>, until: Moment) {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return MutexGuard::unlocked(guard, || world.park(condvar_address(condvar), until.0));
    }
    if until == Moment::NEVER {
        condvar.wait(guard);
    } else {
        let span = until.duration_since(now());
        if !span.is_zero() {
            condvar.wait_for(guard, span.min(PARK_MAX));
        }
    }
}

/// The same for whoever must not be late after a suspension, as with a renewal that has still time
/// then.
pub(crate) fn park_suspend_aware<T>(
    condvar: &Condvar,
    guard: &mut MutexGuard<'_, T>,
    until: Moment,
) {
    let soon = now().saturating_add(SUSPEND_CHECK_INTERVAL);
    // What a simulated world waits for is never late.
    #[cfg(feature = "testing")]
    let soon = if sim::world().is_some() { until } else { soon };
    park(condvar, guard, if until == Moment::NEVER { until } else { until.min(soon) });
}

/// Waits until then, for nothing else.
pub(crate) fn sleep_until(until: Moment) {
    let (nobody, never) = (Mutex::new(()), Condvar::new());
    let mut guard = nobody.lock();
    while now() < until {
        park(&never, &mut guard, until);
    }
}

/// Wakes one of those who are parked there.
pub(crate) fn wake_one(condvar: &Condvar) {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.notify(condvar_address(condvar), false);
    }
    condvar.notify_one();
}

/// Wakes all who are parked there.
pub(crate) fn wake_all(condvar: &Condvar) {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.notify(condvar_address(condvar), true);
    }
    condvar.notify_all();
}

/// Waits for what somebody is to send; `None` when it has not come by `until`, or will not come.
pub(crate) fn recv_until<T>(receiver: &Receiver<T>, until: Moment) -> Option<T> {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return poll(&*world, until, || match receiver.try_recv() {
            Ok(answer) => Some(Some(answer)),
            Err(crossbeam_channel::TryRecvError::Disconnected) => Some(None),
            Err(crossbeam_channel::TryRecvError::Empty) => None,
        })
        .flatten();
    }
    receiver.recv_timeout(until.duration_since(now())).ok()
}

/// Looks again and again: for what nobody tells a simulated world of.
#[cfg(feature = "testing")]
pub(crate) fn poll<T>(
    world: &dyn sim::SimWorld,
    until: Moment,
    mut check: impl FnMut() -> Option<T>,
) -> Option<T> {
    loop {
        let found = check();
        let now = Moment(world.now());
        if found.is_some() || now >= until {
            return found;
        }
        world.park(0, now.saturating_add(Duration::from_micros(500)).min(until).0);
    }
}

#[cfg(feature = "testing")]
fn condvar_address(condvar: &Condvar) -> usize {
    std::ptr::from_ref(condvar).addr()
}

/// So long a suspension makes somebody late, at most.
const SUSPEND_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A timed wait on a far moment is cut into pieces, so that adding it to the clock cannot overflow.
const PARK_MAX: Duration = Duration::from_secs(24 * 60 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_moments_saturate_instead_of_wrapping() {
        assert_eq!(now().saturating_add(Duration::MAX), Moment::NEVER);
        assert_eq!(Moment::from_nanos(5).saturating_sub(Duration::MAX), Moment::from_nanos(0));
        assert_eq!(Moment::from_nanos(5).duration_since(Moment::from_nanos(9)), Duration::ZERO);
    }

    /// A time namespace that is ahead, as if this machine had been suspended for a day. Where none
    /// can be made the two clocks may agree, and this shows less.
    #[cfg(target_os = "linux")]
    #[test]
    fn suspended_time_counts() {
        use std::{env, fs, process::Command};

        const MARK: &str = "DISTLOCK_TEST_AHEAD";
        // What the kernel says in here counts suspended time.
        let uptime = || {
            fs::read_to_string("/proc/uptime")
                .unwrap()
                .split('.')
                .next()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        let before = uptime();
        let now = now().as_nanos() / 1_000_000_000;
        assert!(
            now.saturating_add(1) >= before && now <= uptime() + 1,
            "{now} s, up for {before} s"
        );
        if env::var_os(MARK).is_some() {
            return;
        }
        let ahead = ["--user", "--map-root-user", "--time", "--boottime", "86400", "--fork"];
        let unshare =
            |args: &[&str]| Command::new("unshare").args(ahead).args(args).env(MARK, "1").output();
        if !unshare(&["true"]).is_ok_and(|output| output.status.success()) {
            // Not by `eprintln!`, which is kept to itself where the test passes.
            let _ = std::io::Write::write_all(
                &mut std::io::stderr(),
                b"NOT SHOWN: suspended time counts: no clock of its own\n",
            );
            return;
        }
        let program = env::current_exe().unwrap();
        let test = "clock::tests::suspended_time_counts";
        let output = unshare(&[program.to_str().unwrap(), "--exact", test]).unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    /// Whose timers stood still while the machine slept.
    #[test]
    fn suspend_aware_park_wakes_early() {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (nobody, never) = (Mutex::new(()), Condvar::new());
            park_suspend_aware(
                &never,
                &mut nobody.lock(),
                now().saturating_add(Duration::from_secs(3600)),
            );
            sender.send(())
        });
        receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn the_clock_does_not_go_back() {
        let first = now();
        assert!(now() >= first);
        assert!(first > Moment::from_nanos(0));
    }
}
