//! `Outbox`: a thread that calls code of the user (loggers, metrics recorders, event handlers) on
//! behalf of threads that others depend on. Such code may block, and then delays no lock.

use std::{
    fmt, io,
    sync::Arc,
    thread::{self, ThreadId},
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use crate::sys::{
    clock::{self, Moment},
    logging::catch_panic,
    threads,
    user_code::{Call, TakeCalls},
};

/// Maximum number of calls in the queue. A longer queue would only mean that the user's code is too
/// slow.
const QUEUED_MAX: usize = 1_024;

/// The queue and its thread. Once the queue is closed, the thread makes the calls that are left and
/// ends.
pub(crate) struct Outbox {
    queue: Mutex<Option<Sender<Call>>>,
    on_drop: Box<dyn Fn() + Send + Sync>,
    thread: Option<ThreadId>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl Outbox {
    /// Starts the thread. It calls `on_tick` each `tick`, and with true when it ends. `on_drop` is
    /// called for each call that finds the queue full or closed, on the thread that made it.
    pub(crate) fn start(
        tick: Duration,
        mut on_tick: impl FnMut(bool) + Send + 'static,
        on_drop: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Arc<Outbox>> {
        let (queue, calls) = bounded::<Call>(QUEUED_MAX);
        let (running, ended) = bounded::<()>(0);
        let on_drop = Box::new(on_drop);
        // No thread waits on this queue by a clock that is not the real one, so the calls are made
        // directly.
        #[cfg(feature = "testing")]
        if clock::is_replaced() {
            return Ok(Arc::new(Outbox { queue: Mutex::new(None), on_drop, thread: None, ended }));
        }
        let thread = threads::spawn("distlock-outbox", move || {
            let _running = running;
            let mut next_tick = clock::now();
            loop {
                let now = clock::now();
                if now >= next_tick {
                    catch_panic(|| on_tick(false));
                    next_tick = clock::now().saturating_add(tick);
                }
                match calls.recv_timeout(next_tick.duration_since(clock::now())) {
                    Ok(call) => catch_panic(call),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
            catch_panic(|| on_tick(true));
        })?;
        let queue = Mutex::new(Some(queue));
        Ok(Arc::new(Outbox { queue, on_drop, thread: thread.id(), ended }))
    }

    /// Queues a call.
    pub(crate) fn send(&self, call: impl FnOnce() + Send + 'static) {
        #[cfg(feature = "testing")]
        if clock::is_replaced() {
            return catch_panic(call);
        }
        let queue = self.queue.lock().clone();
        if queue.is_none_or(|queue| queue.try_send(Box::new(call)).is_err()) {
            (self.on_drop)();
        }
    }

    /// Closes the queue.
    pub(crate) fn close(&self) {
        let queue = self.queue.lock().take();
        drop(queue);
    }

    /// Waits for the end of the thread, unless this is that thread.
    pub(crate) fn await_end(&self, until: Moment) {
        if self.thread != Some(thread::current().id()) {
            // Where the clock is replaced, there is no thread, and this returns at once.
            let _ = self.ended.recv_timeout(until.duration_since(clock::now()));
        }
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").finish_non_exhaustive()
    }
}

impl TakeCalls for Outbox {
    fn take(&self, call: Call) {
        self.send(call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::user_code;
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

    fn outbox(dropped: &Arc<AtomicUsize>) -> Arc<Outbox> {
        let dropped = dropped.clone();
        let on_drop = move || {
            dropped.fetch_add(1, Ordering::SeqCst);
        };
        Outbox::start(Duration::MAX, |_| {}, on_drop).unwrap()
    }

    #[test]
    fn calls_are_made_in_order_and_beyond_the_limit_dropped() {
        let dropped = Arc::default();
        let outbox = outbox(&dropped);
        let (open, gate) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        let (entered, at_gate) = mpsc::channel();
        outbox.send(move || {
            entered.send(()).unwrap();
            gate.recv().unwrap();
        });
        at_gate.recv().unwrap();
        for n in 0..QUEUED_MAX + 3 {
            let sender = sender.clone();
            outbox.send(move || sender.send(n).unwrap());
        }
        assert_eq!(dropped.load(Ordering::SeqCst), 3);
        open.send(()).unwrap();
        outbox.close();
        outbox.await_end(Moment::NEVER.saturating_sub(Duration::from_secs(1)));
        outbox.send(|| {});
        assert_eq!(dropped.load(Ordering::SeqCst), 4);
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), (0..QUEUED_MAX).collect::<Vec<_>>());
    }

    #[test]
    fn threads_inherit_the_outbox_and_a_panic_restores() {
        let outbox: Arc<dyn TakeCalls> = outbox(&Arc::default());
        let is_ours = |caller: Option<Arc<dyn TakeCalls>>| {
            caller.is_some_and(|caller| Arc::ptr_eq(&caller, &outbox))
        };
        let (sender, receiver) = mpsc::channel();
        user_code::leave_to(outbox.clone(), || {
            assert!(is_ours(user_code::caller()));
            threads::spawn("inherits", move || sender.send(user_code::caller()).unwrap()).unwrap();
        });
        assert!(is_ours(receiver.recv().unwrap()));
        let panic = || std::panic::resume_unwind(Box::new("on purpose"));
        catch_panic(|| user_code::leave_to(outbox.clone(), panic));
        assert!(user_code::caller().is_none());
        outbox.take(Box::new(panic));
        let (sender, receiver) = mpsc::channel();
        outbox.take(Box::new(move || sender.send(user_code::caller().is_none()).unwrap()));
        assert_eq!(receiver.recv(), Ok(true), "the thread makes its calls itself");
    }
}
