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
