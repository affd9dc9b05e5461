//! Ten thousand of everything: what comes and goes leaves nothing behind, and what is held is kept.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use distlock::{LockGuard, RedisMgr};

use crate::{
    bounds::{files, threads},
    helpers::{
        SECOND, SHORT_TIMEOUT, await_gone, config_long_timeouts, in_own_process, manager, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, RedisServer, eventually},
    worker::work,
};

/// Goal: however the end of a hold and its renewal fall together, nothing is renewed after its
/// release. Method: leases so short that they are renewed every ten milliseconds, held for about as
/// long; the server's own record of what it did.
#[test]
fn ten_thousand_locks_are_released_while_their_renewal_is_under_way() {
    const THREADS: u64 = 8;
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(10)).unwrap();
    let commands = server.monitor();
    let lost = AtomicUsize::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (mgr, lost) = (&mgr, &lost);
            scope.spawn(move || {
                let mut dice = fastrand::Rng::with_seed(thread);
                for _ in 0..10_000 / THREADS {
                    let guard = mgr
                        .lock_with(&format!("n{thread}"), &with_ttl(Duration::from_millis(30)))
                        .unwrap();
                    work(Duration::from_micros(dice.u64(..16_000)));
                    lost.fetch_add(usize::from(!guard.is_held()), Ordering::Relaxed);
                }
            });
        }
    });
    let lost = lost.into_inner();
    println!("{lost} were over before their end: the machine is slow");
    server.cli(&["ECHO", "all released"]);
    commands.wait_for("all released");
    let mut held: HashMap<String, bool> = HashMap::new();
    let (mut taken, mut renewed) = (0, 0);
    for line in commands.lines().iter().filter(|line| line.contains("lua] ")) {
        let words: Vec<_> = line.split("lua] ").nth(1).unwrap().split(' ').collect();
        let key = words.get(1).copied().unwrap_or_default().to_owned();
        match words[0] {
            "\"SET\"" if key.starts_with("\"lock:") => {
                taken += 1;
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
    assert!(taken >= 10_000 && renewed > 1_000, "{taken} taken, {renewed} renewed");
    let (released, after) = renewals_after_release(&commands.lines());
    println!("{after} of {released} renewals were on their way at the release");
    // On a slow machine some expire first.
    assert!(released > 1_000, "{released} were released");
    let slow = lost > released / 100;
    assert!(slow || after < released / 2, "{after} of {released} were renewed after their release");
    for thread in 0..THREADS {
        await_gone(&server, &format!("lock:n{thread}"));
    }
    // And nothing comes after.
    let other = manager(&server);
    let watched = other.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    let after = server.monitor();
    eventually("time passes", CEILING, || crate::faults::renewals(&after, "lock:y") >= 3);
    assert!(!after.lines().iter().any(|line| line.contains("lock:n")), "{:#?}", after.lines());
    drop(watched);
}

/// Of how many locks the release was asked for, and of how many a renewal was asked for after that.
/// Those that were on their way already are none of the holder's doing, and change nothing; they
/// are few where no thread stood still meanwhile.
fn renewals_after_release(lines: &[String]) -> (usize, usize) {
    let (mut released, mut after) = (HashSet::new(), HashSet::new());
    for line in lines.iter().filter(|line| line.contains("\"EVAL")) {
        let ids = line.split(' ').filter(|word| word.contains("|ts"));
        if !line.contains("distlock:queue") {
            after.extend(ids.filter(|id| released.contains(id)));
        } else if !["try", "join", "look", "leave"]
            .iter()
            .any(|mode| line.contains(&format!("\"{mode}\"")))
        {
            released.extend(ids);
        }
    }
    (released.len(), after.len())
}

#[test]
fn ten_thousand_locks_and_random_failures_leave_nothing_behind() {
    if !in_own_process(
        "faults::resources::ten_thousand_locks_and_random_failures_leave_nothing_behind",
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
        let dice = parking_lot::Mutex::new(fastrand::Rng::with_seed(seed ^ n));
        proxy.on_request(move |_| dice.lock().u16(..400) == 0, fault).forever();
    }
    let failed = AtomicUsize::new(0);
    let run = |rounds: usize| {
        thread::scope(|scope| {
            for thread in 0..4 {
                let (mgr, failed) = (&mgr, &failed);
                scope.spawn(move || {
                    for round in 0..rounds {
                        // Each has a name of its own, and all share one.
                        let name =
                            if round % 10 == 0 { "x".to_owned() } else { format!("n{thread}") };
                        let outcome = mgr.lock_with(&name, &with_ttl(SECOND).wait(SECOND));
                        let went_well =
                            outcome.is_ok_and(|guard| round % 2 == 0 || guard.release().is_ok());
                        failed.fetch_add(usize::from(!went_well), Ordering::Relaxed);
                    }
                });
            }
        });
    };
    // The proxy runs in this process too, with two files and two threads for each connection.
    let own_files = || files().saturating_sub(2 * proxy.connections());
    run(250);
    let before = own_files();
    run(2_250);
    assert!(failed.load(Ordering::Relaxed) > 0, "nothing went wrong");
    // The pool's, the renewer's and the listener's.
    let connections = POOL as usize + 2;
    server.await_clients(0..=connections);
    eventually("files are few", CEILING, || own_files() <= before + connections);
    eventually("threads are few", CEILING, || threads().len() == 2);
    for name in ["x", "n0", "n1", "n2", "n3"] {
        await_gone(&server, &format!("lock:{name}"));
        eventually("nobody is in line", CEILING, || crate::helpers::queued(&server, name) == 0);
    }
}

/// Goal: ten thousand locks are kept by one thread, and the server is never held up by it. Method:
/// each is renewed; no script call takes more keys than a batch.
#[test]
fn ten_thousand_locks_are_kept_in_small_batches() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ttl = 20 * SECOND;
    let guards: Vec<LockGuard> = thread::scope(|threads| {
        let take = |thread: usize| {
            let mgr = &mgr;
            move || {
                (0..2_500)
                    .map(|n| mgr.lock_with(&format!("n{thread}-{n}"), &with_ttl(ttl)).unwrap())
                    .collect::<Vec<_>>()
            }
        };
        let taking: Vec<_> = (0..4).map(|thread| threads.spawn(take(thread))).collect();
        taking.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    server.cli(&["CONFIG", "RESETSTAT"]);
    // A log of all commands, with their first words.
    server.config_set("slowlog-max-len", "100000");
    server.config_set("slowlog-log-slower-than", "0");
    let renewed = || server.calls("pexpire");
    eventually("all are renewed", CEILING, || renewed() >= 10_000);
    assert!(guards.iter().all(LockGuard::is_held));
    let calls = server.calls("evalsha");
    assert!((100..1_000).contains(&calls), "{calls} calls for {} renewals", renewed());
    type Entry = (u64, u64, u64, Vec<String>, String, String);
    let commands: Vec<Entry> = server.query(&["SLOWLOG", "GET", "-1"]);
    let renewals = || commands.iter().filter(|entry| entry.3[0] == "EVALSHA");
    let keys: Vec<usize> = renewals().map(|entry| entry.3[2].parse().unwrap()).collect();
    assert!(keys.len() >= 100 && keys.iter().all(|keys| *keys <= 100), "{keys:?}");
    // Of the server's own time, and of most of them: any may have been interrupted.
    let mut took: Vec<_> = renewals().map(|entry| Duration::from_micros(entry.2)).collect();
    took.sort();
    assert!(took[took.len() / 2] < SECOND / 10, "{took:?}");
}
