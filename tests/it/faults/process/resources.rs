//! Ten thousand locks: released ones leave nothing behind, and held ones are renewed.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use distlock::{LockGuard, RedisMgr, testing::servers::Script};

use crate::{
    helpers::{
        SECOND, SHORT_TIMEOUT, await_gone, config_long_timeouts, distlock_threads, in_own_process,
        manager, open_files, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, eventually},
    worker::work,
};

/// Goal: no lock is renewed after its release, however the two coincide. Method: leases are so
/// short that they are renewed every ten milliseconds, and held for about that long. The server's
/// record of commands shows what it did.
///
/// Fault: F60
#[test]
fn ten_thousand_locks_are_released_during_their_renewal() {
    const THREADS: u64 = 8;
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(10)).unwrap();
    let commands = server.monitor();
    let lost = AtomicUsize::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (mgr, lost) = (&mgr, &lost);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(thread);
                for _ in 0..10_000 / THREADS {
                    let name = format!("n{thread}");
                    let guard = match mgr.lock_with(&name, &with_ttl(Duration::from_millis(30))) {
                        Err(error) if error.is_lost() => {
                            lost.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                        guard => guard.unwrap(),
                    };
                    work(Duration::from_micros(rng.u64(..16_000)));
                    lost.fetch_add(usize::from(!guard.is_held()), Ordering::Relaxed);
                }
            });
        }
    });
    let lost = lost.into_inner();
    println!("{lost} leases were lost, because the machine is slow");
    server.cli(&["ECHO", "all released"]);
    commands.wait_for("all released");
    let mut held: HashMap<String, bool> = HashMap::new();
    let (mut granted, mut renewed) = (0, 0);
    for line in commands.lines().iter().filter(|line| line.contains("lua] ")) {
        let words: Vec<_> = line.split("lua] ").nth(1).unwrap().split(' ').collect();
        let key = words.get(1).copied().unwrap_or_default().to_owned();
        match words[0] {
            "\"SET\"" if key.starts_with("\"lock:") => {
                granted += 1;
                held.insert(key, true);
            }
            "\"DEL\"" => drop(held.insert(key, false)),
            "\"PEXPIRE\"" if key.starts_with("\"lock:") => {
                renewed += 1;
                assert_eq!(held.get(&key), Some(&true), "renewed after its release: {line}");
            }
            _ => {}
        }
    }
    assert!(granted >= 10_000 && renewed > 1_000, "{granted} granted, {renewed} renewed");
    let (released, after) = renewals_after_release(&commands.lines());
    println!("{after} of {released} locks had a renewal request after that of the release");
    // On a slow machine some leases expire first.
    assert!(released > 1_000, "{released} were released");
    let slow = lost > released / 100;
    assert!(slow || after < released / 2, "{after} of {released} were renewed after their release");
    for thread in 0..THREADS {
        await_gone(&server, &format!("lock:n{thread}"));
    }
    // No renewal comes later either.
    let other = manager(&server);
    let watched = other.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    let after = server.monitor();
    eventually("another lock is renewed", TEST_TIMEOUT, || {
        crate::faults::renewals(&after, "lock:y") >= 3
    });
    assert!(!after.lines().iter().any(|line| line.contains("lock:n")), "{:#?}", after.lines());
    drop(watched);
}

/// Number of locks with a release request, and of those with a later renewal request. A renewal
/// that was already in flight is not the holder's fault and changes nothing. Unless a thread
/// stalled, there are few of them.
fn renewals_after_release(lines: &[String]) -> (usize, usize) {
    let (mut released, mut after) = (HashSet::new(), HashSet::new());
    let release = redis::Script::new(Script::Release.text()).get_hash().to_owned();
    for line in lines.iter().filter(|line| line.contains("\"EVAL")) {
        let ids = line.split(' ').filter(|word| word.contains("|ts"));
        if !line.contains("distlock:queue") {
            after.extend(ids.filter(|id| released.contains(id)));
        } else if line.contains(&release) {
            released.extend(ids);
        }
    }
    (released.len(), after.len())
}

/// Fault: F65
#[test]
fn ten_thousand_locks_with_random_faults_leave_nothing() {
    if !in_own_process(
        "faults::process::resources::ten_thousand_locks_with_random_faults_leave_nothing",
        &[],
    ) {
        return;
    }
    const POOL: u32 = 4;
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(
        config_long_timeouts(proxy.url()).pool_size(POOL).operation_timeout(SHORT_TIMEOUT),
    )
    .unwrap();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let faults = [
        Fault::ResetAfterRequest,
        Fault::ResetBeforeRequest,
        Fault::CloseAfterRequest,
        Fault::ReplaceReply(b"what?\r\n".to_vec()),
        Fault::ReplaceReply(b"-ERR no\r\n".to_vec()),
        Fault::DuplicateReply,
        Fault::DuplicateRequest,
    ];
    for (n, fault) in (0..).zip(faults) {
        let rng = parking_lot::Mutex::new(fastrand::Rng::with_seed(seed ^ n));
        proxy.on_request(move |_| rng.lock().u16(..400) == 0, fault).forever();
    }
    let failed = AtomicUsize::new(0);
    let run = |rounds: usize| {
        thread::scope(|scope| {
            for thread in 0..4 {
                let (mgr, failed) = (&mgr, &failed);
                scope.spawn(move || {
                    for round in 0..rounds {
                        // Each thread has its own name, and all share another one.
                        let name =
                            if round % 10 == 0 { "x".to_owned() } else { format!("n{thread}") };
                        let outcome = mgr.lock_with(&name, &with_ttl(SECOND).wait(SECOND));
                        let is_released =
                            outcome.is_ok_and(|guard| round % 2 == 0 || guard.release().is_ok());
                        failed.fetch_add(usize::from(!is_released), Ordering::Relaxed);
                    }
                });
            }
        });
    };
    // The proxy is in this process too, with two files and two threads for each connection.
    let own_files = || open_files().saturating_sub(2 * proxy.connections());
    run(250);
    let before = own_files();
    run(2_250);
    assert!(failed.load(Ordering::Relaxed) > 0, "no call failed");
    // The pool, and for renewals, grant messages, clean-up and releases without the pool.
    let connections = POOL as usize + 4;
    server.await_clients(0..=connections);
    eventually("files are few", TEST_TIMEOUT, || own_files() <= before + connections);
    eventually("threads are few", TEST_TIMEOUT, || distlock_threads().len() == 4);
    for name in ["x", "n0", "n1", "n2", "n3"] {
        await_gone(&server, &format!("lock:{name}"));
        eventually("the queue is empty", TEST_TIMEOUT, || {
            crate::helpers::queue_length(&server, name) == 0
        });
    }
}

/// Goal: one thread renews ten thousand locks, and never blocks the server for long. Method: all
/// are renewed, and no script call has more keys than a batch.
///
/// Fault: F66
#[test]
fn ten_thousand_locks_are_renewed_in_small_batches() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ttl = 20 * SECOND;
    let guards: Vec<LockGuard> = thread::scope(|threads| {
        let lock_many = |thread: usize| {
            let mgr = &mgr;
            move || {
                (0..2_500)
                    .map(|n| mgr.lock_with(&format!("n{thread}-{n}"), &with_ttl(ttl)).unwrap())
                    .collect::<Vec<_>>()
            }
        };
        let locking: Vec<_> = (0..4).map(|thread| threads.spawn(lock_many(thread))).collect();
        locking.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    server.cli(&["CONFIG", "RESETSTAT"]);
    // Records all commands with their first words.
    server.config_set("slowlog-max-len", "100000");
    server.config_set("slowlog-log-slower-than", "0");
    let renewed = || server.calls("pexpire");
    eventually("all are renewed", TEST_TIMEOUT, || renewed() >= 10_000);
    assert!(guards.iter().all(LockGuard::is_held));
    let calls = server.calls("evalsha");
    assert!((100..1_000).contains(&calls), "{calls} calls for {} renewals", renewed());
    type Entry = (u64, u64, u64, Vec<String>, String, String);
    let commands: Vec<Entry> = server.query(&["SLOWLOG", "GET", "-1"]);
    let renewals = || commands.iter().filter(|entry| entry.3[0] == "EVALSHA");
    let keys: Vec<usize> = renewals().map(|entry| entry.3[2].parse().unwrap()).collect();
    assert!(keys.len() >= 100 && keys.iter().all(|keys| *keys <= 100), "{keys:?}");
    // The server's processor may have been interrupted during any call, so most of them count.
    let mut took: Vec<_> = renewals().map(|entry| Duration::from_micros(entry.2)).collect();
    took.sort();
    assert!(took[took.len() / 2] < SECOND / 10, "{took:?}");
}
