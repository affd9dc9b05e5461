//! The maximum wait of a call that acquires several locks.

use std::time::Duration;

use super::Manager;
use crate::{
    config::LockOptions,
    error::LockError,
    sys::clock::{self, Moment},
};

/// When the wait of a call began, and when it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitLimit {
    began: Moment,
    wait: Option<Duration>,
}

impl Manager {
    /// The limit of a call that begins now.
    pub(crate) fn wait_limit(&self, options: &LockOptions) -> WaitLimit {
        let _time = self.time.enter();
        WaitLimit { began: clock::now(), wait: options.wait_limit() }
    }
}

impl WaitLimit {
    fn waited(&self, manager: &Manager) -> Duration {
        let _time = manager.time.enter();
        clock::now().duration_since(self.began)
    }

    /// The options of the next lock, which may wait for what is left of the time.
    pub(crate) fn apply(&self, manager: &Manager, options: &LockOptions) -> LockOptions {
        let left = self.wait.map(|wait| wait.saturating_sub(self.waited(manager)));
        left.map_or_else(|| options.clone(), |left| options.clone().wait(left))
    }

    /// If the call has waited, says so in the error of a lock for which there was no time left.
    pub(crate) fn explain(&self, manager: &Manager, error: LockError) -> LockError {
        match error {
            LockError::Held { name, holder, server } if self.wait != Some(Duration::ZERO) => {
                let (holder, waited) = (Some(holder), self.waited(manager));
                LockError::Timeout { name, holder, waited, server, behind_own_threads: false }
            }
            error => error,
        }
    }
}
