//! Checks with loom the orders in which threads of a process can meet over a lock that is handed
//! over; run them with `make loom`. The queues and waiters are the real ones. The lock is a
//! stand-in for the lease and its registration, which `renew/loom_tests.rs` has.

use loom::{
    model::Builder,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread::{self, JoinHandle},
};

use super::*;

/// A lock that is handed over.
struct Lock(LocalHold<Lock>);

const TERMS: Terms = Terms { ttl: Duration::from_secs(30), renew: true, is_local: true };
const WANTED: Wanted = Wanted { terms: TERMS, max_hold: None, release_in_background: false };
const HOUR: Duration = Duration::from_secs(3600);

type Queues = Arc<LocalQueues<Lock>>;

/// With three threads, all orders take hours. So this tries those in which threads are interrupted
/// at most three times, beside the points at which they wait.
fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// Queues, and a lock of this process whose window stays open.
fn held() -> (Queues, LocalHold<Lock>) {
    let queues = Arc::new(LocalQueues::new(HOUR));
    let (Turn::Represents(one), false) = queues.enter(&"x".into(), WANTED, Moment::NEVER, None)
    else {
        panic!("nobody was there before")
    };
    let hold = one.on_granted(clock::now(), clock::now().saturating_add(9 * HOUR));
    (queues, hold)
}

/// A thread that wants the lock, and releases it at once.
fn spawn_waiter(queues: &Queues, until: Moment) -> JoinHandle<&'static str> {
    let queues = queues.clone();
    thread::spawn(move || match queues.enter(&"x".into(), WANTED, until, None).0 {
        Turn::Taken(Lock(hold)) => {
            release(hold);
            "taken"
        }
        Turn::Represents(_) => "represents",
        Turn::TimedOut => "timed out",
        Turn::Cancelled => "cancelled",
        Turn::Closed => "closed",
    })
}

fn release(hold: LocalHold<Lock>) {
    if let Some(passing) = hold.pass(TERMS) {
        passing.complete(Lock);
    }
}

fn assert_empty(queues: &Queues) {
    assert!(queues.shared.lock().queues.is_empty(), "a queue stays for ever");
}

/// A release meets threads that arrive. Each of them gets the lock, or asks the server.
#[test]
fn released_lock_reaches_threads_that_arrive() {
    model(|| {
        let (queues, hold) = held();
        let waiters = [(); 2].map(|()| spawn_waiter(&queues, Moment::NEVER));
        release(hold);
        for waiter in waiters {
            assert!(["taken", "represents"].contains(&waiter.join().unwrap()));
        }
        assert_empty(&queues);
    });
}

/// The lock is handed to a thread that stops waiting. It has the lock, or the next one gets it.
#[test]
fn lock_is_not_lost_with_a_thread_that_times_out() {
    model(|| {
        let (queues, hold) = held();
        let waiters = [Moment::default(), Moment::NEVER].map(|until| spawn_waiter(&queues, until));
        release(hold);
        let [first, second] = waiters.map(|waiter| waiter.join().unwrap());
        assert!(first != "closed" && ["taken", "represents"].contains(&second), "{first} {second}");
        assert_empty(&queues);
    });
}

/// The lock is lost while it is handed over. The chosen thread asks the server, and the one behind
/// it goes on waiting for that thread.
#[test]
fn lost_lock_is_not_handed_over() {
    model(|| {
        let (queues, hold) = held();
        let waiters = [(); 2].map(|()| spawn_waiter(&queues, Moment::NEVER));
        drop(hold.pass(TERMS));
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), "represents");
        }
        assert_empty(&queues);
    });
}

/// The manager is shut down while a lock is handed over. Every thread returns.
#[test]
fn shutdown_ends_all_waits() {
    model(|| {
        let (queues, hold) = held();
        let waiter = spawn_waiter(&queues, Moment::NEVER);
        let closes = {
            let queues = queues.clone();
            thread::spawn(move || queues.close())
        };
        release(hold);
        assert!(["taken", "represents", "closed"].contains(&waiter.join().unwrap()));
        closes.join().unwrap();
        assert!(matches!(
            queues.enter(&"x".into(), WANTED, Moment::NEVER, None),
            (Turn::Closed, false)
        ));
        assert_empty(&queues);
    });
}

/// A representative leaves, or scatters the threads behind it, while one arrives. There is always
/// one that asks the server.
#[test]
fn representative_is_always_replaced() {
    model(|| {
        let queues: Queues = Arc::new(LocalQueues::new(HOUR));
        let (Turn::Represents(one), _) = queues.enter(&"x".into(), WANTED, Moment::NEVER, None)
        else {
            panic!("nobody was there before")
        };
        let asked = Arc::new(AtomicUsize::new(0));
        let waiters = [Moment::default(), Moment::NEVER].map(|until| {
            let (queues, asked) = (queues.clone(), asked.clone());
            thread::spawn(move || {
                let turn = queues.enter(&"x".into(), WANTED, until, None).0;
                asked.fetch_add(usize::from(matches!(turn, Turn::Represents(_))), SeqCst);
            })
        });
        one.scatter();
        drop(one);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        assert!(asked.load(SeqCst) > 0, "nobody asked the server");
        assert_empty(&queues);
    });
}
