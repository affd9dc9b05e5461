//! The maximum wait of a call that acquires several locks.

use std::time::Duration;

use super::ManagerInner;
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

impl ManagerInner {
    /// The limit of a call that begins now.
    pub(crate) fn wait_limit(&self, options: &LockOptions) -> WaitLimit {
        let _time = self.time.enter();
        WaitLimit { began: clock::now(), wait: options.wait_limit() }
    }
}

impl WaitLimit {
    fn waited(&self, inner: &ManagerInner) -> Duration {
        let _time = inner.time.enter();
        clock::now().duration_since(self.began)
    }

    /// The options of the next lock, which may wait for what is left of the time.
    pub(crate) fn apply(&self, inner: &ManagerInner, options: &LockOptions) -> LockOptions {
        let left = self.wait.map(|wait| wait.saturating_sub(self.waited(inner)));
        left.map_or_else(|| options.clone(), |left| options.clone().wait(left))
    }

    /// If the call has waited, says so in the error of a lock for which there was no time left.
    pub(crate) fn explain(&self, inner: &ManagerInner, error: LockError) -> LockError {
        match error {
            LockError::Held { name, holder, server } if self.wait != Some(Duration::ZERO) => {
                let (holder, waited) = (Some(holder), self.waited(inner));
                LockError::Timeout { name, holder, waited, server }
            }
            error => error,
        }
    }
}
