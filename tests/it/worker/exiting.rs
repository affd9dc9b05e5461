//! A process that exits while a guard is in a place that outlives `main`.

use std::{cell::RefCell, process::exit, sync::Arc, thread, time::Duration};

use distlock::{Config, LockGuard, RedisMgr};
use parking_lot::Mutex;

use super::work;
use crate::support::WorkerSide;

static KEPT: Mutex<Option<LockGuard>> = Mutex::new(None);

thread_local! {
    static OWN: RefCell<Option<LockGuard>> = const { RefCell::new(None) };
}

unsafe extern "C" {
    fn atexit(call: extern "C" fn()) -> i32;
}

extern "C" fn drop_kept_guard() {
    drop(KEPT.lock().take());
}

pub(super) fn exiting(side: &Arc<WorkerSide>) {
    let config = Config::new(side.arg("url"))
        .ttl(Duration::from_secs(60))
        .operation_timeout(Duration::from_secs(20));
    let mgr = RedisMgr::new(config).expect("no manager");
    let guard = mgr.lock("x").expect("no lock");
    match side.arg("how").as_str() {
        "thread storage" => {
            let keep = move || OWN.with(|own| own.replace(Some(guard)));
            drop(thread::spawn(keep).join().expect("the thread panicked"));
        }
        "main storage" => {
            OWN.with(|own| own.replace(Some(guard)));
            drop(mgr);
            exit(0);
        }
        "at exit" => {
            *KEPT.lock() = Some(guard);
            drop(mgr);
            // SAFETY: the handler has no arguments and no result, and does not unwind.
            assert_eq!(unsafe { atexit(drop_kept_guard) }, 0);
            exit(0);
        }
        "static" => {
            *KEPT.lock() = Some(guard);
            exit(0);
        }
        "while others wait" => {
            let waiting = mgr.clone();
            drop(thread::spawn(move || waiting.lock("x").map(drop)));
            while mgr.holder("x").expect("no reply").and_then(|holder| holder.waiters()) != Some(1)
            {
                work(Duration::from_millis(1));
            }
            // The guard is never dropped, so its lock is not released.
            std::mem::forget(guard);
            exit(0);
        }
        how => panic!("unknown way to exit: {how}"),
    }
}
