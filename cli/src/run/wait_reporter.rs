//! What the command reports while it waits for its locks.

use std::{
    collections::{HashMap, HashSet},
    env,
    sync::Arc,
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use distlock::{
    AcquiredEvent, ContendedEvent, FailedEvent, HandleEvent, HeldBy, LockManager, RetryingEvent,
    TimedOutEvent,
};
use parking_lot::Mutex;

use super::wait_policy::WaitPolicy;
use crate::{format, manager_config::ManagerConfig, output};

/// Time after which a wait is reported without `--verbose`. Shorter waits are common, and need no
/// explanation.
const WAIT_REPORT_DELAY: Duration = Duration::from_secs(2);

/// Adds what is to be reported to a configuration. Returns what [`acquire`](super::acquire) must
/// check.
pub(super) fn with_reporters(
    mut config: ManagerConfig,
    policy: WaitPolicy,
    verbose: bool,
    quiet: bool,
) -> (ManagerConfig, OuterHolders) {
    let outer = OuterHolders::from_environment();
    // Otherwise, the error comes soon and says all this.
    if policy.wait != Some(Duration::ZERO) {
        if !quiet {
            let delay = if verbose { Duration::ZERO } else { WAIT_REPORT_DELAY };
            config = config.event_handler(Arc::new(OutageReporter));
            config = config.event_handler(Arc::new(WaitReporter::new(delay)));
        }
        config = config.event_handler(Arc::new(outer.reporter()));
    }
    (config, outer)
}

/// Reports which holder the command waits for, unless the wait ends within the delay.
#[derive(Debug)]
struct WaitReporter {
    delay: Duration,
    waits: Mutex<Waits>,
}

/// Names of locks. Each is acquired once.
#[derive(Debug, Default)]
struct Waits {
    /// Those that are waited for. Dropping the sender cancels the report.
    running: HashMap<String, Sender<()>>,
    /// Those whose wait has ended. The event that it began may come later.
    ended: HashSet<String>,
}

impl WaitReporter {
    fn new(delay: Duration) -> WaitReporter {
        WaitReporter { delay, waits: Mutex::default() }
    }

    fn on_end(&self, lock: &str) {
        let mut waits = self.waits.lock();
        waits.running.remove(lock);
        waits.ended.insert(lock.to_owned());
    }
}

impl HandleEvent for WaitReporter {
    fn contended(&self, event: &ContendedEvent<'_>) {
        let (lock, holder) = (format::quote(event.lock()), event.holder().to_string());
        let says = format!("waiting for lock {lock}, held by {holder}");
        if self.delay.is_zero() {
            output::print_message(&says);
            return;
        }
        let (sender, ended) = bounded::<()>(0);
        let mut waits = self.waits.lock();
        if waits.ended.contains(event.lock()) {
            return;
        }
        waits.running.insert(event.lock().to_owned(), sender);
        let delay = self.delay;
        let report_later = move || {
            if ended.recv_timeout(delay) == Err(RecvTimeoutError::Timeout) {
                output::print_message(&says);
            }
        };
        // Without a thread, there is no report.
        let _ = thread::Builder::new().name("wait-report".into()).spawn(report_later);
    }

    fn acquired(&self, event: &AcquiredEvent<'_>) {
        self.on_end(event.lock());
    }

    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        self.on_end(event.lock());
    }

    fn failed(&self, event: &FailedEvent<'_>) {
        self.on_end(event.lock());
    }
}

/// Reports that the servers are unreachable, and for how long the command tries to reach them.
#[derive(Debug)]
struct OutageReporter;

impl HandleEvent for OutageReporter {
    fn retrying(&self, event: &RetryingEvent<'_>) {
        let (lock, why) = (format::quote(event.lock()), event.why());
        let tries = match event.gives_up_in() {
            Duration::ZERO => "once more".into(),
            left => format!("for another {}", format::duration(left)),
        };
        output::print_message(&format!(
            "could not acquire lock {lock} at {} yet, and will try {tries}: {why}",
            event.server()
        ));
    }
}

/// Reports that the command waits for a lock under which it runs itself.
#[derive(Debug)]
struct NestingReporter {
    outer: Arc<HashSet<String>>,
    read_locks: Sender<String>,
}

impl HandleEvent for NestingReporter {
    fn contended(&self, event: &ContendedEvent<'_>) {
        if self.outer.contains(event.holder().id()) {
            report_nesting(event.lock());
        } else if matches!(event.holder().held_by(), HeldBy::Readers { .. }) {
            let _ = self.read_locks.send(event.lock().to_owned());
        }
    }
}

fn report_nesting(lock: &str) {
    output::print_message(&format!(
        "lock {} is held by the distlock that this command runs under, and is free only when that \
         has ended; run the inner command without this lock, or under another name",
        format::quote(lock)
    ));
}

/// The holders that this process was started by.
#[derive(Debug)]
pub(super) struct OuterHolders {
    ids: Arc<HashSet<String>>,
    /// Names of locks that readers hold. The event of a held lock does not name the readers.
    pub(super) read_locks: Receiver<String>,
    /// Keeps the channel open while there is no reporter.
    sender: Sender<String>,
}

impl OuterHolders {
    fn from_environment() -> OuterHolders {
        let ids = env::var("DISTLOCK_ID").unwrap_or_default();
        let (sender, read_locks) = unbounded();
        let ids = Arc::new(ids.lines().map(str::to_owned).collect());
        OuterHolders { ids, read_locks, sender }
    }

    fn reporter(&self) -> NestingReporter {
        NestingReporter { outer: self.ids.clone(), read_locks: self.sender.clone() }
    }

    /// Asks the server who reads the lock, and reports it if an outer holder is among them.
    pub(super) fn check_readers(&self, mgr: &dyn LockManager, lock: &str) {
        if self.ids.is_empty() {
            return;
        }
        // A failure shows in the wait itself.
        let Ok(Some(info)) = mgr.lock_info(lock) else { return };
        if info.members().iter().any(|member| self.ids.contains(member.id())) {
            report_nesting(lock);
        }
    }
}
