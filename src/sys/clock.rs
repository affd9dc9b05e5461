//! The only module that reads the clock. Waits end by it, except those on channels and sockets.
//!
//! Times come from a clock that continues while the machine is suspended: `CLOCK_BOOTTIME` on Linux
//! and Android. `std::time::Instant` stops during a suspension, and a laptop that wakes up would
//! treat a lock as valid that it lost hours ago. Timed waits still use the monotonic clock, so a
//! wait during which the machine is suspended ends late: by at most the time that was left to wait.
//! A thread that must not be late wakes up once a second to check the time. The checks of a guard
//! are always exact.
//!
//! Other systems, such as macOS, use `Instant`. There, a lock may seem valid for too long after the
//! machine was suspended.

#[cfg(feature = "testing")]
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::sys::sync::{Condvar, Mutex, MutexGuard};

#[cfg(feature = "testing")]
use crate::sys::{manual_clock, sim};

/// A point in time, in nanoseconds on the local clock. Arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(u64);

impl Moment {
    /// Later than all other times.
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

    /// Halfway from now to this moment: until when to wait for a reply, so that there is as much
    /// time to ask again.
    pub(crate) fn halfway(self) -> Moment {
        let now = now();
        now.saturating_add(self.duration_since(now) / 2)
    }

    /// Time from `now` to this moment; zero if this moment has passed.
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
    if let Some(now) = replaced() {
        return now;
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Moment(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Reads the clock.
#[cfg(any(miri, not(any(target_os = "linux", target_os = "android"))))]
pub(crate) fn now() -> Moment {
    use std::sync::OnceLock;
    #[cfg(feature = "testing")]
    if let Some(now) = replaced() {
        return now;
    }
    static START: OnceLock<Instant> = OnceLock::new();
    #[expect(clippy::disallowed_methods, reason = "only this module reads the clock")]
    let start = *START.get_or_init(Instant::now);
    // Never zero, which marks a lease that has ended.
    Moment(nanos(start.elapsed()).saturating_add(1_000_000_000))
}

/// The clock of a manager: the real one, or one that a test controls.
#[derive(Clone, Debug)]
pub(crate) struct TimeSource {
    #[cfg(feature = "testing")]
    manual: Option<Arc<manual_clock::ManualClock>>,
}

/// While this exists, the thread uses the clock of a [`TimeSource`].
pub(crate) struct Entered {
    #[cfg(feature = "testing")]
    _manual: Option<manual_clock::Entered>,
}

impl TimeSource {
    /// The clock that the calling thread uses.
    pub(crate) fn current() -> TimeSource {
        TimeSource {
            #[cfg(feature = "testing")]
            manual: manual_clock::current(),
        }
    }

    /// Makes the calling thread use this clock. Every call from outside begins with this.
    pub(crate) fn enter(&self) -> Entered {
        Entered {
            #[cfg(feature = "testing")]
            _manual: manual_clock::enter(self.manual.as_ref()),
        }
    }

    /// Reads this clock.
    pub(crate) fn now(&self) -> Moment {
        #[cfg(feature = "testing")]
        if let Some(clock) = &self.manual {
            return Moment(clock.now());
        }
        let _real = self.enter();
        now()
    }
}

/// Reads the clock that replaces the real one on this thread, if any.
#[cfg(feature = "testing")]
fn replaced() -> Option<Moment> {
    let manual = || manual_clock::current().map(|clock| Moment(clock.now()));
    sim::world().map(|world| Moment(world.now())).or_else(manual)
}

/// Whether this thread uses a clock that replaces the real one.
#[cfg(feature = "testing")]
pub(crate) fn is_replaced() -> bool {
    replaced().is_some()
}

/// Reads the wall clock: for ids and for display, never for a deadline.
pub(crate) fn wall_clock() -> SystemTime {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.wall_clock();
    }
    SystemTime::now()
}

/// Returns the time left until an instant of the standard library, by its clock.
#[expect(clippy::disallowed_methods, reason = "a caller's deadline is on that clock")]
pub(crate) fn time_until(instant: Instant) -> Duration {
    instant.saturating_duration_since(Instant::now())
}

/// Waits on `condvar` until it is notified or `until` is reached. Can return early.
pub(crate) fn park<T>(condvar: &Condvar, guard: &mut MutexGuard<'_, T>, until: Moment) {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return MutexGuard::unlocked(guard, || world.park(condvar_address(condvar), until.0));
    }
    #[cfg(feature = "testing")]
    if let Some(clock) = manual_clock::current() {
        let unlocked = |wait: &mut dyn FnMut()| MutexGuard::unlocked(guard, wait);
        return clock.park(condvar_address(condvar), until.0, unlocked);
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

/// Like [`park`], but is at most one second late if the machine was suspended meanwhile.
pub(crate) fn park_suspend_aware<T>(
    condvar: &Condvar,
    guard: &mut MutexGuard<'_, T>,
    until: Moment,
) {
    let soon = now().saturating_add(SUSPEND_CHECK_INTERVAL);
    // Waits by a clock that replaces the real one are never late.
    #[cfg(feature = "testing")]
    let soon = if replaced().is_some() { until } else { soon };
    park(condvar, guard, if until == Moment::NEVER { until } else { until.min(soon) });
}

/// Sleeps until the given time.
pub(crate) fn sleep_until(until: Moment) {
    let (mutex, condvar) = (Mutex::new(()), Condvar::new());
    let mut guard = mutex.lock();
    while now() < until {
        park(&condvar, &mut guard, until);
    }
}

/// Wakes one thread that waits on `condvar`.
pub(crate) fn wake_one(condvar: &Condvar) {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.notify(condvar_address(condvar), false);
    }
    #[cfg(feature = "testing")]
    if let Some(clock) = manual_clock::current() {
        return clock.wake(condvar_address(condvar));
    }
    condvar.notify_one();
}

/// Wakes all threads that wait on `condvar`.
pub(crate) fn wake_all(condvar: &Condvar) {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.notify(condvar_address(condvar), true);
    }
    #[cfg(feature = "testing")]
    if let Some(clock) = manual_clock::current() {
        return clock.wake(condvar_address(condvar));
    }
    condvar.notify_all();
}

#[cfg(feature = "testing")]
fn condvar_address(condvar: &Condvar) -> usize {
    std::ptr::from_ref(condvar).addr()
}

/// Interval at which suspend-aware waits wake up, so that a suspension of the machine delays them
/// by no more than this.
const SUSPEND_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum duration of one timed wait; otherwise the addition of a distant deadline to the clock
/// could overflow.
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

    /// Runs again in a time namespace that is a day ahead, as if this machine had been suspended.
    /// If no namespace can be created, the two clocks may agree, and the test shows less.
    /// Fault: F16
    #[cfg(target_os = "linux")]
    #[test]
    fn suspended_time_counts() {
        use std::{env, fs, process::Command};

        const MARK: &str = "DISTLOCK_TEST_AHEAD";
        // The kernel's uptime includes suspended time.
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
            // Not with `eprintln!`, whose output is hidden when the test passes.
            let _ = std::io::Write::write_all(
                &mut std::io::stderr(),
                b"NOT SHOWN: suspended time counts: no time namespace\n",
            );
            return;
        }
        let program = env::current_exe().unwrap();
        let test = "sys::clock::tests::suspended_time_counts";
        let output = unshare(&[program.to_str().unwrap(), "--exact", test]).unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    /// Timers stop while the machine is suspended.
    ///
    /// Fault: N123
    #[test]
    fn suspend_aware_park_wakes_early() {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (mutex, condvar) = (Mutex::new(()), Condvar::new());
            park_suspend_aware(
                &condvar,
                &mut mutex.lock(),
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
