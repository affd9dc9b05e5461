//! Logging behind a shield: a logger is code of the user's, and its panic must end neither a renewal nor a drop.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// `say!(warn, "...")` is `log::warn!("...")`, and comes back whatever the logger does but block.
macro_rules! say {
    ($level:ident, $($text:tt)+) => {
        $crate::say::shielded(|| log::$level!($($text)+))
    };
}

/// Runs code of users'. A panic in it is swallowed; the panic hook has told of it.
pub(crate) fn shielded(call: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
        // What a panic brought along may panic again when it is dropped.
        std::mem::forget(panic);
    }
}
