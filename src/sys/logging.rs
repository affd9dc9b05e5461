//! Logging that cannot harm a lock. A logger is user code: it may panic, and it may block.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// `log_safely!(warn, "...")` is `log::warn!("...")`, but catches a panic of the logger. On a
/// thread that others depend on, the [outbox](crate::sys::outbox) calls the logger.
macro_rules! log_safely {
    ($level:ident, $($text:tt)+) => {
        match $crate::sys::user_code::caller() {
            None => $crate::sys::logging::catch_panic(|| log::$level!($($text)+)),
            Some(caller) if log_level!($level) <= log::max_level() => {
                let text = format!($($text)+);
                caller.take(Box::new(move || log::$level!("{text}")));
            }
            Some(_) => {}
        }
    };
}

macro_rules! log_level {
    (error) => {
        log::Level::Error
    };
    (warn) => {
        log::Level::Warn
    };
    (info) => {
        log::Level::Info
    };
    (debug) => {
        log::Level::Debug
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
