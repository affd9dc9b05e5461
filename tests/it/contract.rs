//! The core promises, each as one test over several subjects: a server in memory, MariaDB, one
//! server, a cluster, three and five nodes, and three nodes of which the first, where waiters would
//! queue, is dead.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

#[cfg(feature = "testing")]
use distlock::testing::MemoryServer;
use distlock::{Config, LockError, LockGuard, LockLost, LockManager, RedisMgr, Released};
#[cfg(feature = "mysql")]
use distlock::{MySqlConfig, MySqlMgr};
use parking_lot::Mutex;

#[cfg(feature = "mysql")]
use crate::support::{MySqlServer, mysql_servers};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_queue_length, completes_within,
        config_long_timeouts, expect_loss, long_timeouts, queue_key, spawn_call,
        spawn_queued_waiter, with_ttl,
    },
    quorum::{self, await_waiting, config_medium_timeout, expect_locked, next_locked},
    support::{Cluster, Nodes, TEST_TIMEOUT, Worker, eventually, eventually_some},
};

/// Where locks are kept.
enum Subject {
    /// One server, or several that decide together.
    Nodes(Nodes),
    /// Three masters of a cluster.
    Cluster(Cluster),
    /// A server in memory.
    #[cfg(feature = "testing")]
    Memory(MemoryServer),
    /// A database.
    #[cfg(feature = "mysql")]
    MySql(MySqlServer),
}

type Manager = Arc<dyn LockManager>;

/// How to set up a subject.
#[derive(Clone, Copy, Debug)]
enum Setup {
    #[cfg(feature = "testing")]
    Memory,
    /// MariaDB, and the MySQL server that `MYSQLD` names, if it is set.
    #[cfg(feature = "mysql")]
    Databases,
    Cluster,
    /// This number of nodes, of which these are dead.
    Nodes(usize, &'static [usize]),
}

const SUBJECTS: &[Setup] = &[
    #[cfg(feature = "testing")]
    Setup::Memory,
    #[cfg(feature = "mysql")]
    Setup::Databases,
    Setup::Cluster,
    Setup::Nodes(1, &[]),
    Setup::Nodes(3, &[]),
    Setup::Nodes(3, &[0]),
];
const SUBJECTS_AND_FIVE_NODES: &[Setup] = &[
    #[cfg(feature = "testing")]
    Setup::Memory,
    #[cfg(feature = "mysql")]
    Setup::Databases,
    Setup::Cluster,
    Setup::Nodes(1, &[]),
    Setup::Nodes(3, &[]),
    Setup::Nodes(3, &[0]),
    Setup::Nodes(5, &[]),
];

impl Subject {
    fn start(setup: Setup) -> Vec<Subject> {
        match setup {
            #[cfg(feature = "testing")]
            Setup::Memory => vec![Subject::Memory(MemoryServer::with_real_time())],
            #[cfg(feature = "mysql")]
            Setup::Databases => mysql_servers()
                .into_iter()
                .map(|server| {
                    let server = server.start();
                    MySqlMgr::new(MySqlConfig::new(server.url())).unwrap().create_table().unwrap();
                    Subject::MySql(server)
                })
                .collect(),
            Setup::Cluster => vec![Subject::Cluster(Cluster::start(3))],
            Setup::Nodes(count, dead) => {
                let nodes = Nodes::start(count);
                dead.iter().for_each(|node| nodes.kill(*node));
                vec![Subject::Nodes(nodes)]
            }
        }
    }

    fn nodes(&self) -> Option<&Nodes> {
        match self {
            Subject::Nodes(nodes) => Some(nodes),
            Subject::Cluster(_) => None,
            #[cfg(feature = "testing")]
            Subject::Memory(_) => None,
            #[cfg(feature = "mysql")]
            Subject::MySql(_) => None,
        }
    }

    /// A manager with connections and threads of its own, as another process would have it.
    fn manager(&self) -> Manager {
        // A thread may be paused for longer than the usual claim window and timeout.
        let configure = |config| long_timeouts(config).quarantine(Duration::ZERO);
        match self {
            Subject::Nodes(nodes) => {
                let config = Config::new(nodes.urls()).local_handover(Duration::ZERO);
                Arc::new(RedisMgr::new(configure(config)).unwrap())
            }
            Subject::Cluster(cluster) => {
                Arc::new(RedisMgr::new(config_long_timeouts(cluster.url())).unwrap())
            }
            #[cfg(feature = "testing")]
            Subject::Memory(server) => Arc::new(server.manager_with(configure)),
            #[cfg(feature = "mysql")]
            Subject::MySql(server) => {
                let config = MySqlConfig::new(server.url()).operation_timeout(CALL_LIMIT);
                Arc::new(MySqlMgr::new(config).unwrap())
            }
        }
    }

    /// Deletes the lock's key, unknown to its holder.
    fn forget(&self, name: &str) {
        match self {
            Subject::Nodes(nodes) => {
                for node in nodes.running() {
                    nodes.server(node).cli(&["DEL", &quorum::key(name)]);
                }
            }
            Subject::Cluster(cluster) => {
                let key = quorum::key(name);
                cluster.owner(cluster.slot(&key)).cli(&["DEL", &key]);
            }
            #[cfg(feature = "testing")]
            Subject::Memory(server) => server.forget(),
            #[cfg(feature = "mysql")]
            Subject::MySql(server) => {
                let sql = format!(
                    "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; SELECT conn FROM distlock \
                     WHERE name = '{name}'"
                );
                for row in server.execute(&sql) {
                    server.execute(&format!("KILL {}", row[0]));
                }
            }
        }
    }

    #[track_caller]
    fn wait_until_free(&self, name: &str) {
        match self {
            Subject::Nodes(nodes) => quorum::wait_until_free_everywhere(nodes, name),
            _ => {
                let mgr = self.manager();
                eventually("it is free", TEST_TIMEOUT, || mgr.holder(name).unwrap().is_none());
            }
        }
    }

    /// Checks that the lock with this id is kept where it counts.
    #[track_caller]
    fn expect_kept(&self, name: &str, id: &str) {
        match self {
            Subject::Nodes(nodes) => {
                let keeping = nodes.keeping(&quorum::key(name), id).len();
                assert!(keeping >= quorum::quorum(nodes), "{keeping} nodes have {name}");
            }
            _ => {
                assert_eq!(self.manager().holder(name).unwrap().unwrap().id(), id);
            }
        }
    }

    #[track_caller]
    fn expect_no_queue(&self, name: &str) {
        match self {
            Subject::Nodes(nodes) => {
                for node in nodes.running() {
                    assert!(!nodes.server(node).query::<bool>(&["EXISTS", &queue_key(name)]));
                }
            }
            _ => {
                let guard = self.manager().try_lock(name).unwrap();
                assert_eq!(waiters(&self.manager(), guard.name()), 0);
            }
        }
    }
}

/// Checks a promise on one subject after the other.
#[track_caller]
fn on_each(subjects: &[Setup], promise: impl Fn(&Subject)) {
    for setup in subjects {
        println!("on {setup:?}");
        Subject::start(*setup).iter().for_each(&promise);
    }
}

fn waiters(mgr: &Manager, name: &str) -> u64 {
    mgr.holder(name).unwrap().and_then(|holder| holder.waiters()).unwrap_or(0)
}

/// Waits until this number of waiters is queued. No other lock has waiters.
#[track_caller]
fn await_waiters(subject: &Subject, mgr: &Manager, name: &str, count: u64) {
    eventually("they wait", TEST_TIMEOUT, || match subject {
        #[cfg(feature = "mysql")]
        Subject::MySql(server) if server.row_waits() as u64 != count => false,
        _ => waiters(mgr, name) == count,
    });
}

/// Goal: at most one lease is valid at a time. Method: threads of two managers read a counter and
/// write it back later.
///
/// Promise: P1
#[test]
fn lock_has_one_holder_at_a_time() {
    const ROUNDS: u64 = 50;
    on_each(SUBJECTS, |subject| {
        let managers = [subject.manager(), subject.manager()];
        let (counter, inside) = (Mutex::new(0_u64), Mutex::new(()));
        thread::scope(|threads| {
            for mgr in managers.iter().cycle().take(6) {
                threads.spawn(|| {
                    for _ in 0..ROUNDS {
                        let guard = mgr.lock("counter").unwrap();
                        let alone = inside.try_lock().expect("two threads are inside");
                        let seen = *counter.lock();
                        thread::yield_now();
                        *counter.lock() = seen + 1;
                        drop(alone);
                        guard.release().unwrap().unwrap_released();
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 6 * ROUNDS);
    });
}

/// Promise: P1
#[test]
fn several_names_are_locked_all_or_none() {
    on_each(SUBJECTS, |subject| {
        let (mgr, other) = (subject.manager(), subject.manager());
        let held = mgr.lock("b").unwrap();
        match other.try_lock_all(&["c", "b", "a"]).unwrap_err() {
            LockError::Held { name, .. } => assert_eq!(name, "b"),
            other => panic!("{other}"),
        }
        // Of two nodes that are left, one may have released it already, and the other not.
        let is_free = |name: &&str| mgr.is_locked(name).is_ok_and(|is_locked| !is_locked);
        eventually("nothing is left of it", TEST_TIMEOUT, || ["a", "c"].iter().all(is_free));
        held.release().unwrap().unwrap_released();
        let all = other.lock_all(&["c", "b", "a"]).unwrap();
        for name in ["a", "b", "c"] {
            assert!(mgr.try_lock(name).unwrap_err().is_contended());
        }
        assert_eq!(all.release().unwrap(), Released::Released);
        assert!(["a", "b", "c"].iter().all(|name| !mgr.is_locked(name).unwrap()));
    });
}

/// Promise: P3
#[test]
fn tokens_rise_with_every_grant() {
    on_each(SUBJECTS, |subject| {
        let (here, there) = (subject.manager(), subject.manager());
        let tokens = Mutex::new(vec![0]);
        thread::scope(|threads| {
            for mgr in [&here, &there, &here, &there] {
                threads.spawn(|| {
                    for _ in 0..50 {
                        let guard = mgr.lock("counter").unwrap();
                        tokens.lock().push(guard.fencing_token().as_u64());
                    }
                });
            }
        });
        let tokens = tokens.into_inner();
        assert_eq!(tokens.len(), 201);
        assert!(tokens.is_sorted_by(|earlier, later| earlier < later), "{tokens:?}");
    });
}

/// Promise: P4
#[test]
fn waiters_are_served_in_order_of_arrival() {
    on_each(SUBJECTS_AND_FIVE_NODES, |subject| {
        let managers = [subject.manager(), subject.manager(), subject.manager()];
        let holder = managers[0].lock("x").unwrap();
        let served = Mutex::new(Vec::new());
        thread::scope(|threads| {
            for (number, mgr) in managers.iter().cycle().take(12).enumerate() {
                let served = &served;
                threads.spawn(move || {
                    let guard = mgr.lock("x").unwrap();
                    subject.expect_kept("x", guard.id().as_str());
                    served.lock().push(number);
                    guard.release().unwrap().unwrap_released();
                });
                await_waiters(subject, &managers[0], "x", number as u64 + 1);
            }
            holder.release().unwrap().unwrap_released();
        });
        assert_eq!(*served.lock(), Vec::from_iter(0..12));
        subject.wait_until_free("x");
    });
}

#[test]
fn release_hands_over_to_the_waiter_then_frees_the_lock() {
    on_each(SUBJECTS, |subject| {
        let (here, there) = (subject.manager(), subject.manager());
        let guard = here.lock("x").unwrap();
        let waiting = spawn_call(&there, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waiters(subject, &here, "x", 1);
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap());
        assert_eq!(there.holder("x").unwrap(), None);
        drop(here.try_lock("x").unwrap());
        drop(there.try_lock("x").unwrap());
    });
}

/// Promise: P2, P7
#[test]
fn lost_lock_stays_lost() {
    on_each(SUBJECTS, |subject| {
        let (here, there) = (subject.manager(), subject.manager());
        let guard = here.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        subject.forget("x");
        let next = there.lock("x").unwrap();
        let why = expect_loss(&guard);
        let expected = match subject {
            #[cfg(feature = "mysql")]
            Subject::MySql(_) => matches!(why, LockLost::Taken { .. } | LockLost::ConnectionLost),
            _ => matches!(why, LockLost::Taken { .. } | LockLost::Gone),
        };
        assert!(expected, "{why:?}");
        assert!(next.fencing_token() > guard.fencing_token());
        let outcome = guard.release().unwrap();
        assert!(matches!(outcome, Released::OwnedByOther(_)), "{outcome:?}");
        assert_eq!(here.holder("x").unwrap().unwrap().id(), next.id().as_str());
        assert!(next.is_held());
    });
}

#[test]
fn try_lock_does_not_wait() {
    on_each(SUBJECTS, |subject| {
        let (here, there) = (subject.manager(), subject.manager());
        let guard: LockGuard = here.lock("x").unwrap();
        // Waiting would take the rest of the lease, which is much longer.
        let refused =
            completes_within(20 * SHORT_TIMEOUT, "try_lock", || there.try_lock("x").unwrap_err());
        assert!(matches!(refused, LockError::Held { .. }), "{refused:?}");
        assert!(refused.is_contended() && !refused.is_timeout());
        assert_eq!(waiters(&here, "x"), 0);
        assert!(guard.is_held());
    });
}

#[test]
fn locks_with_different_names_are_independent() {
    on_each(SUBJECTS, |subject| {
        let mgr = subject.manager();
        let guards = ["a", "b", "ab", "a:b"].map(|name| mgr.try_lock(name).unwrap());
        for guard in &guards {
            assert_eq!(mgr.holder(guard.name()).unwrap().unwrap().id(), guard.id().as_str());
        }
    });
}

/// Goal: a returned lock is on a quorum, which reaches every live node soon after: nodes that reply
/// late are not left out because the others suffice. A release deletes the lock on each of them.
#[test]
fn lock_is_on_a_quorum_at_once_and_soon_on_all_live_nodes() {
    on_each(SUBJECTS_AND_FIVE_NODES, |subject| {
        let managers = [subject.manager(), subject.manager()];
        let mut last = 0;
        for round in 0..30 {
            let guard = managers[round % 2].lock("x").unwrap();
            subject.expect_kept("x", guard.id().as_str());
            assert!(guard.fencing_token().as_u64() > last, "{last} {guard:?}");
            last = guard.fencing_token().as_u64();
            guard.release().unwrap().unwrap_released();
            subject.wait_until_free("x");
        }
        let guard = managers[0].lock("x").unwrap();
        if let Some(nodes) = subject.nodes() {
            eventually("all live nodes have it", TEST_TIMEOUT, || {
                quorum::nodes_holding(nodes, &guard) == nodes.running()
            });
        }
        drop(guard);
        subject.wait_until_free("x");
    });
}

#[test]
fn reentrant_lock_is_held_until_its_last_guard_is_dropped() {
    on_each(SUBJECTS, |subject| {
        let (mgr, other) = (subject.manager(), subject.manager());
        let outer = mgr.lock_reentrant("x").unwrap();
        let inner = mgr.lock_reentrant("x").unwrap();
        drop(outer);
        assert!(other.is_locked("x").unwrap());
        drop(inner);
        subject.wait_until_free("x");
    });
}

/// Any manager can release a lock if it knows the id.
#[test]
fn acquire_lock_returns_an_id_that_any_manager_can_release() {
    on_each(SUBJECTS, |subject| {
        let (mgr, other) = (subject.manager(), subject.manager());
        assert!(mgr.ping().unwrap() < CALL_LIMIT);
        let id = mgr.acquire_lock("x", 10 * SECOND, SECOND).unwrap().unwrap();
        subject.expect_kept("x", &id);
        assert_eq!(other.acquire_lock("x", 10 * SECOND, SECOND / 10).unwrap(), None);
        assert!(!other.release_lock("x", "somebody else").unwrap());
        assert!(other.release_lock("x", &id).unwrap());
        subject.wait_until_free("x");
        assert!(!mgr.release_lock("x", &id).unwrap());
    });
}

#[test]
fn force_release_ends_the_lock_of_another_manager() {
    on_each(SUBJECTS, |subject| {
        let (mgr, other) = (subject.manager(), subject.manager());
        let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        assert!(other.force_release("x").unwrap());
        subject.wait_until_free("x");
        expect_loss(&guard);
        assert!(!other.is_locked("x").unwrap());
        assert!(!other.force_release("x").unwrap());
    });
}

#[test]
fn shutdown_releases_all_locks_and_serves_the_waiter() {
    on_each(SUBJECTS_AND_FIVE_NODES, |subject| {
        let (mgr, other) = (subject.manager(), subject.manager());
        let guards: Vec<_> =
            (0..20).map(|number| mgr.lock(&format!("x{number}")).unwrap()).collect();
        let waiting = spawn_call(&other, "x0", |mgr, name| mgr.lock(name).unwrap());
        await_waiters(subject, &other, "x0", 1);
        completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
        assert!(guards.iter().all(|guard| !guard.is_held()));
        let next = completes_within(CALL_LIMIT, "the handover", || waiting.join().unwrap());
        (1..20).for_each(|number| subject.wait_until_free(&format!("x{number}")));
        next.release().unwrap().unwrap_released();
        subject.expect_no_queue("x0");
    });
}

/// A waiter: a thread of this process, or another process.
enum Waiter {
    Thread(JoinHandle<distlock::Result<LockGuard>>),
    Process(Worker),
}

/// How the queue node fails, and how it comes back.
type Failure = (&'static str, fn(&Nodes), fn(&Nodes));

const QUEUE_NODE_FAILURES: [Failure; 2] = [
    ("stopped", |nodes| nodes.stop(0), |nodes| nodes.cont(0)),
    ("killed", |nodes| nodes.kill(0), |nodes| nodes.restart_empty(0)),
];

/// Goal: if the queue node fails, threads and processes go on waiting in the queue of another node
/// and are served from there; once the first node is back, waiters queue on it again.
#[test]
fn waiters_follow_the_queue_to_another_node_and_back() {
    for (failure, fail, recover) in QUEUE_NODE_FAILURES {
        println!("the queue node is {failure}");
        let nodes = Nodes::start(5).in_fixed_order();
        let managers: Vec<_> =
            (0..3).map(|_| RedisMgr::new(config_medium_timeout(&nodes)).unwrap()).collect();
        let guard = managers[0].lock("x").unwrap();
        let threads = managers
            .iter()
            .cycle()
            .take(6)
            .map(|mgr| Waiter::Thread(spawn_queued_waiter(nodes.server(0), mgr, "x")));
        let mut waiting: Vec<_> = threads.collect();
        for number in 0..3 {
            let mut worker = quorum::spawn_worker(&nodes, &[("timeout_ms", "4000")]);
            worker.send("lock x");
            await_queue_length(nodes.server(0), "x", 6 + number + 1);
            waiting.push(Waiter::Process(worker));
        }
        fail(&nodes);
        await_waiting(&nodes, 1, 9, guard.id().as_str());
        quorum::expect_quorum(&nodes, &guard);
        let mut last = guard.fencing_token().as_u64();
        completes_within(20 * SHORT_TIMEOUT, "a release without the first node", || {
            guard.release().unwrap()
        })
        .unwrap_released();

        // The order on the other node is that in which the waiters noticed the failure.
        let mut processes = Vec::new();
        while !waiting.is_empty() {
            let served = eventually_some("a waiter is served", TEST_TIMEOUT, || {
                waiting.iter().position(|waiter| match waiter {
                    Waiter::Thread(thread) => thread.is_finished(),
                    Waiter::Process(worker) => ["locked x ", "failed x "]
                        .iter()
                        .any(|line| worker.transcript().contains(line)),
                })
            });
            let token = match waiting.remove(served) {
                Waiter::Thread(thread) => {
                    let guard = thread.join().unwrap().unwrap();
                    assert!(guard.is_held());
                    let token = guard.fencing_token().as_u64();
                    guard.release().unwrap().unwrap_released();
                    token
                }
                Waiter::Process(mut worker) => {
                    let (token, _) = expect_locked(&worker, "x");
                    quorum::release(&mut worker, "x");
                    processes.push(worker);
                    token
                }
            };
            assert!(token > last);
            last = token;
        }

        recover(&nodes);
        let guard = managers[0].lock("x").unwrap();
        let threads: Vec<_> = managers
            .iter()
            .map(|mgr| spawn_call(mgr, "x", |mgr, name| mgr.lock(name).map(drop)))
            .collect();
        processes.iter_mut().for_each(|worker| worker.send("lock x"));
        await_waiting(&nodes, 0, 6, guard.id().as_str());
        guard.release().unwrap().unwrap_released();
        while !processes.is_empty() {
            let (served, ..) = next_locked(processes.iter(), "x");
            quorum::release(&mut processes.remove(served), "x");
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        quorum::wait_until_free_everywhere(&nodes, "x");
    }
}
