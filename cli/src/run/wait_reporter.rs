//! What the command reports while it waits for its locks.

use std::{collections::HashSet, env, sync::Arc, time::Duration};

use distlock::{ContendedEvent, HandleEvent, RetryingEvent};

use super::wait_policy::WaitPolicy;
use crate::{format, manager_config::ManagerConfig, output};

/// Adds what is to be reported to a configuration.
pub(super) fn with_reporters(
    mut config: ManagerConfig,
    policy: WaitPolicy,
    verbose: bool,
    quiet: bool,
) -> ManagerConfig {
    // Otherwise, the error comes soon and says all this.
    if policy.wait != Some(Duration::ZERO) {
        if !quiet {
            config = config.event_handler(Arc::new(OutageReporter));
        }
        config = config.event_handler(Arc::new(NestingReporter::from_environment()));
        if verbose {
            config = config.event_handler(Arc::new(WaitReporter));
        }
    }
    config
}

/// Reports which holder the command waits for.
#[derive(Debug)]
struct WaitReporter;

impl HandleEvent for WaitReporter {
    fn contended(&self, event: &ContendedEvent<'_>) {
        let (lock, holder) = (format::quote(event.lock()), event.holder().to_string());
        output::print_message(&format!("waiting for lock {lock}, held by {holder}"));
    }
}

/// Reports that the servers are unreachable, and for how long the command tries to reach them.
#[derive(Debug)]
struct OutageReporter;

impl HandleEvent for OutageReporter {
    fn retrying(&self, event: &RetryingEvent<'_>) {
        let (lock, why) = (format::quote(event.lock()), event.why());
        let left = format::duration(event.gives_up_in());
        output::print_message(&format!(
            "could not acquire lock {lock} at {} yet, and will try for another {left}: {why}",
            event.server()
        ));
    }
}

/// Reports that the command waits for a lock under which it runs itself.
#[derive(Debug)]
struct NestingReporter {
    /// Ids of the holders that this process was started by.
    outer: HashSet<String>,
}

impl NestingReporter {
    fn from_environment() -> NestingReporter {
        let ids = env::var("DISTLOCK_ID").unwrap_or_default();
        NestingReporter { outer: ids.lines().map(str::to_owned).collect() }
    }
}

impl HandleEvent for NestingReporter {
    fn contended(&self, event: &ContendedEvent<'_>) {
        if self.outer.contains(event.holder().id()) {
            output::print_message(&format!(
                "lock {} is held by the distlock that this command runs under, and is free only \
                 when that has ended; run the inner command without this lock, or under another \
                 name",
                format::quote(event.lock())
            ));
        }
    }
}
