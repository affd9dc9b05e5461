//! Threads of several managers compete for a while. Nobody is beside a writer, and there are never
//! more permits than the limit.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    thread,
};

use distlock::{Config, RedisMgr};

use super::Subject;
use crate::{helpers::SECOND, support::TEST_TIMEOUT};

const ROUNDS: u64 = 150;
/// Each needs more requests.
const ROUNDS_OVER_NODES: u64 = 50;
const LIMIT: u32 = 3;

/// What the holders of a lock see of each other.
#[derive(Default)]
struct Inside {
    /// Readers, or permits.
    shared: AtomicI64,
    writers: AtomicI64,
    /// The largest token of a writer.
    token: AtomicU64,
}

fn managers(subject: &Subject) -> Vec<RedisMgr> {
    let configure = |config: Config| config.ttl(20 * SECOND).claim_window(20 * SECOND);
    (0..3).map(|_| subject.manager_with(configure)).collect()
}

/// Promise: P12
#[test]
fn no_reader_is_beside_a_writer_under_contention() {
    for subject in Subject::with_nodes() {
        let inside = Arc::new(Inside::default());
        let is_on_nodes = matches!(subject, Subject::Nodes(_));
        let rounds = if is_on_nodes { ROUNDS_OVER_NODES } else { ROUNDS };
        let mut threads = Vec::new();
        for (at, mgr) in managers(&subject).into_iter().cycle().take(9).enumerate() {
            let (inside, lock) = (inside.clone(), mgr.rw_lock("r").unwrap());
            let mut rng = fastrand::Rng::with_seed(at as u64);
            threads.push(thread::spawn(move || {
                for _ in 0..rounds {
                    if rng.u32(..4) == 0 {
                        let guard = lock.try_write_for(TEST_TIMEOUT).unwrap();
                        assert_eq!(inside.writers.fetch_add(1, Ordering::SeqCst), 0, "writers");
                        assert_eq!(inside.shared.load(Ordering::SeqCst), 0, "readers");
                        let token = guard.fencing_token().as_u64();
                        let before = inside.token.fetch_max(token, Ordering::SeqCst);
                        assert!(before < token, "{before} was before {token}");
                        thread::yield_now();
                        inside.writers.fetch_sub(1, Ordering::SeqCst);
                        if rng.bool() {
                            let reader = guard.downgrade().unwrap();
                            inside.shared.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(inside.writers.load(Ordering::SeqCst), 0, "no gap");
                            inside.shared.fetch_sub(1, Ordering::SeqCst);
                            drop(reader);
                        }
                    } else {
                        let guard = lock.try_read_for(TEST_TIMEOUT).unwrap();
                        inside.shared.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(inside.writers.load(Ordering::SeqCst), 0, "beside a writer");
                        let token = guard.fencing_token().as_u64();
                        assert!(inside.token.load(Ordering::SeqCst) < token, "an old token");
                        thread::yield_now();
                        inside.shared.fetch_sub(1, Ordering::SeqCst);
                        drop(guard);
                    }
                }
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Promise: P12
#[test]
fn limit_of_permits_is_kept_under_contention() {
    for subject in Subject::all() {
        let inside = Arc::new(Inside::default());
        let mut threads = Vec::new();
        for (at, mgr) in managers(&subject).into_iter().cycle().take(9).enumerate() {
            let (inside, permits) = (inside.clone(), mgr.semaphore("s", LIMIT).unwrap());
            let mut rng = fastrand::Rng::with_seed(at as u64);
            threads.push(thread::spawn(move || {
                for _ in 0..ROUNDS {
                    let count = rng.u32(1..=LIMIT);
                    let options = distlock::LockOptions::new().wait(TEST_TIMEOUT);
                    let guard = permits.acquire_with(count, &options).unwrap();
                    let used = inside.shared.fetch_add(count.into(), Ordering::SeqCst);
                    assert!(used + i64::from(count) <= LIMIT.into(), "{used} + {count}");
                    thread::yield_now();
                    inside.shared.fetch_sub(count.into(), Ordering::SeqCst);
                    drop(guard);
                }
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
