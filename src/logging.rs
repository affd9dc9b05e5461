//! Logging behind a shield: a logger is code of the user's, and its panic must end neither a
//! renewal nor a drop.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// `log_safely!(warn, "...")` is `log::warn!("...")`, and comes back whatever the logger does but
/// block.
macro_rules! log_safely {
    ($level:ident, $($text:tt)+) => {
        $crate::logging::catch_panic(|| log::$level!($($text)+))
    };
}

/// Runs code of users'. A panic in it is swallowed; the panic hook has told of it.
pub(crate) fn catch_panic(call: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
        // What a panic brought along may panic again when it is dropped.
        std::mem::forget(panic);
    }
}
