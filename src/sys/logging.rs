//! Logging that survives a panicking logger. A logger is user code, and its panic must not end a
//! renewal or a drop.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// `log_safely!(warn, "...")` is `log::warn!("...")`, but catches a panic of the logger. It still
/// blocks if the logger does.
macro_rules! log_safely {
    ($level:ident, $($text:tt)+) => {
        $crate::sys::logging::catch_panic(|| log::$level!($($text)+))
    };
}

/// Calls user code and ignores its panic, which the panic hook has reported.
pub(crate) fn catch_panic(call: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
        // Dropping the payload may panic again.
        std::mem::forget(panic);
    }
}

/// Runs `action` and catches its panic, so that a bug in the handling of one lock does not affect
/// the others. Returns `None` after a panic.
pub(crate) fn isolate_panic<T>(action: impl FnOnce() -> T) -> Option<T> {
    let mut result = None;
    catch_panic(|| result = Some(action()));
    if result.is_none() {
        log_safely!(error, "internal error in the background work on a lock; please report it");
    }
    result
}
