//! A logger that takes locks itself, while its thread opens the connection on which a manager hears
//! of grants.

use std::{
    collections::HashMap,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use distlock::{ContendedEvent, HandleEvent, LockGuard, RedisMgr};
use parking_lot::Mutex;

use crate::{
    helpers::{SECOND, UnwrapReleased, config_long_timeouts, in_own_process, manager},
    support::{CEILING, RedisServer},
};

type Act = Box<dyn FnOnce() + Send>;

/// What the thread with this name does when it logs next.
static NEXT: Mutex<Option<Act>> = Mutex::new(None);
const WAITER: &str = "waiter";

struct Acts;

impl log::Log for Acts {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, told: &log::Record<'_>) {
        if thread::current().name() == Some(WAITER)
            && told.args().to_string().starts_with("connected to ")
        {
            let act = NEXT.lock().take();
            act.into_iter().for_each(|act| act());
        }
    }

    fn flush(&self) {}
}

#[derive(Debug)]
struct Tells(Mutex<mpsc::Sender<String>>);

impl HandleEvent for Tells {
    fn contended(&self, event: &ContendedEvent<'_>) {
        self.0.lock().send(event.lock().to_owned()).unwrap();
    }
}

/// What takes locks at a server, and which are held there by somebody else.
struct Scene {
    mgr: RedisMgr,
    contended: mpsc::Receiver<String>,
    done: mpsc::Receiver<&'static str>,
    tell: mpsc::Sender<&'static str>,
    held: HashMap<&'static str, LockGuard>,
    _server: RedisServer,
}

impl Scene {
    fn new(operation_timeout: Duration) -> Scene {
        let server = RedisServer::start();
        let holder = manager(&server);
        let held = ["x", "log", "other"].map(|name| (name, holder.lock(name).unwrap())).into();
        let (contends, contended) = mpsc::channel();
        let events = Arc::new(Tells(Mutex::new(contends)));
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url())
                .operation_timeout(operation_timeout)
                .event_handler(events),
        )
        .unwrap();
        // From now on only the connection for grants is new.
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        let (tell, done) = mpsc::channel();
        Scene { mgr, contended, done, tell, held, _server: server }
    }

    /// Takes a lock, and then says so.
    fn takes(&self, name: &'static str, who: &'static str) -> impl FnOnce() + Send + 'static {
        let (mgr, tell) = (self.mgr.clone(), self.tell.clone());
        move || {
            drop(mgr.lock(name).unwrap());
            tell.send(who).unwrap();
        }
    }

    /// A thread waits for `x`, and its logger for another lock.
    #[track_caller]
    fn nest(&self, nested: &'static str) {
        *NEXT.lock() = Some(Box::new(self.takes(nested, "in the logger")));
        thread::Builder::new().name(WAITER.into()).spawn(self.takes("x", "outside")).unwrap();
        self.expect_contended("x");
        self.expect_contended(nested);
    }

    #[track_caller]
    fn expect_contended(&self, name: &str) {
        assert_eq!(self.contended.recv_timeout(CEILING).expect("it asks"), name);
    }

    #[track_caller]
    fn release(&mut self, name: &str, next: &str) {
        self.held
            .remove(name)
            .into_iter()
            .for_each(|guard| guard.release().unwrap().unwrap_released());
        assert_eq!(self.done.recv_timeout(CEILING / 2).expect("it hangs"), next);
    }
}

fn log_with_acts() {
    log::set_logger(&Acts).unwrap();
    log::set_max_level(log::LevelFilter::Debug);
}

/// Another lock than its thread waits for, or the same one.
#[test]
fn a_logger_may_wait_for_a_lock_on_a_thread_that_is_about_to_wait() {
    if !in_own_process(
        "faults::nested::a_logger_may_wait_for_a_lock_on_a_thread_that_is_about_to_wait",
        &[],
    ) {
        return;
    }
    log_with_acts();
    for nested in ["log", "x"] {
        // Nothing here is to wait for so long.
        let mut scene = Scene::new(CEILING);
        scene.nest(nested);
        scene.release(nested, "in the logger");
        scene.release("x", "outside");
    }
}

#[test]
fn a_logger_that_waits_keeps_no_other_thread_from_its_lock() {
    if !in_own_process(
        "faults::nested::a_logger_that_waits_keeps_no_other_thread_from_its_lock",
        &[],
    ) {
        return;
    }
    log_with_acts();
    let mut scene = Scene::new(2 * SECOND);
    scene.nest("log");
    thread::spawn(scene.takes("other", "meanwhile"));
    scene.expect_contended("other");
    scene.release("other", "meanwhile");
    scene.release("log", "in the logger");
    scene.release("x", "outside");
}
