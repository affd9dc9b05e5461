//! Locks that several clients hold together, and several locks at once, beside the mutex.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crossbeam_channel::unbounded;
use distlock::{Config, LockError, LockOptions, MultiGuard, ReadGuard, RedisMgr, Released};

use crate::{
    Result, Scale,
    blocks::BLOCK,
    measure::{Placement, Times, median, now, pause, pause_until},
    report::{Figure, micros, number, per_second},
    support::RedisServer,
};

const TTL: Duration = Duration::from_secs(30);

/// All of ten locks at once, beside one lock: the lock alone, and with the release.
pub(crate) fn several(scale: Scale) -> Result<Vec<Figure>> {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(TTL))?;
    let names: Vec<String> = (0..10).map(|n| format!("several:{n}")).collect();
    let mut figures = Vec::new();
    for (place, pinned) in [
        ("server on another core", Placement::different_cores(&[server.pid()])?),
        ("server on the same core", Placement::same_core(&[server.pid()])?),
    ] {
        let (mut one, mut all, mut ratios) = (Times::new(), Times::new(), Vec::new());
        let (mut one_released, mut all_released) = (Times::new(), Times::new());
        for _ in 0..scale.pick(200, 1) {
            let (mut ones, mut alls) = (Vec::new(), Vec::new());
            for _ in 0..BLOCK {
                let started = now();
                let guard = mgr.try_lock("one")?;
                let took = now() - started;
                drop(guard);
                one_released.add(now() - started);
                one.add(took);
                ones.push(took.as_secs_f64());
                let started = now();
                let guards: MultiGuard = mgr.try_lock_all(&names)?;
                let took = now() - started;
                drop(guards);
                all_released.add(now() - started);
                all.add(took);
                alls.push(took.as_secs_f64());
            }
            ratios.push(median(alls) / median(ones));
        }
        drop(pinned);
        figures.push(
            Figure::new(format!("try_lock_all of 10 names, {place}, p50"), micros(all.p50()))
                .compare(micros(one.p50()), "try_lock of one")
                .at_most_raw_times(1.5),
        );
        let ratio = Figure::new("  median ratio of adjacent blocks", number(median(ratios)));
        figures.push(ratio);
        let label = format!("try_lock_all and release of 10 names, {place}, p50");
        let (all, one) = (micros(all_released.p50()), micros(one_released.p50()));
        figures.push(Figure::new(label, all).compare(one, "try_lock and release of one"));
    }
    Ok(figures)
}

/// How the threads of a mixed load get their locks.
#[derive(Clone, Copy)]
enum Load {
    Mutex,
    ReadWrite,
}

/// Threads that hold a lock for a millisecond each, nine of ten times to read.
pub(crate) fn readers(scale: Scale) -> Result<Vec<Figure>> {
    let server = RedisServer::start();
    let (turns, window) = scale.pick((5, Duration::from_secs(2)), (1, Duration::from_millis(50)));
    let (mut mutex, mut read_write, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..turns {
        let slow = rate(&server, Load::Mutex, window)?;
        let fast = rate(&server, Load::ReadWrite, window)?;
        mutex.push(slow);
        read_write.push(fast);
        ratios.push(fast / slow);
    }
    let second = |rates| per_second(median(rates), Duration::from_secs(1));
    Ok(vec![
        Figure::new("locks, 12 threads, 90 % readers, held for 1 ms", second(read_write))
            .compare(second(mutex), "with a mutex"),
        Figure::new("  median ratio of adjacent windows", number(median(ratios))).at_least(3.0),
    ])
}

/// Locks per second.
fn rate(server: &RedisServer, load: Load, window: Duration) -> Result<f64> {
    const THREADS: usize = 12;
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(TTL).pool_size(12))?;
    let lock = mgr.rw_lock("mixed")?;
    let (count, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let hold = || pause(Duration::from_millis(1));
    let one = |turn: usize| -> distlock::Result<()> {
        match load {
            Load::Mutex => {
                let _held = mgr.lock("mixed")?;
                hold();
            }
            Load::ReadWrite if turn.is_multiple_of(10) => {
                let _held = lock.write()?;
                hold();
            }
            Load::ReadWrite => {
                let _held = lock.read()?;
                hold();
            }
        }
        Ok(())
    };
    let run = |first: usize| {
        let mut turn = first;
        while !stop.load(Ordering::Relaxed) {
            one(turn)?;
            turn += 1;
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok::<(), LockError>(())
    };
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..THREADS).map(|first| scope.spawn(move || run(first))).collect();
        // Until all threads are connected and subscribed.
        pause(window / 4);
        let (began, before) = (now(), count.load(Ordering::Relaxed));
        pause_until(began + window);
        let (ended, after) = (now(), count.load(Ordering::Relaxed));
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok((after - before) as f64 / (ended - began).as_secs_f64())
    })
}

/// The release of a writer that all readers wait for.
pub(crate) fn writer_release(scale: Scale) -> Result<Vec<Figure>> {
    let server = RedisServer::start();
    let mut figures = Vec::new();
    for readers in scale.pick(&[1, 10, 100][..], &[2]) {
        let took = release_before(&server, *readers, scale.pick(100, 1))?;
        let figure = Figure::new(
            format!("release of a writer, {readers} readers waiting, p50"),
            micros(took.p50()),
        );
        figures.push(if *readers == 100 { figure.at_most(1_500.0) } else { figure });
    }
    Ok(figures)
}

fn release_before(server: &RedisServer, readers: usize, turns: usize) -> Result<Times> {
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(TTL))?;
    // The readers of another process: their wake-ups are not the writer's work.
    let others = RedisMgr::new(Config::new(server.url()).ttl(TTL))?;
    let lock = mgr.rw_lock("written")?;
    let mut took = Times::new();
    thread::scope(|scope| {
        let (mut signals, mut threads) = (Vec::new(), Vec::new());
        for _ in 0..readers {
            let (lock, (signal, signalled)) = (others.rw_lock("written")?, unbounded::<()>());
            signals.push(signal);
            threads.push(scope.spawn(move || {
                // Signals to ask for the lock and to release it, in turns. After the last one, or
                // if the writer has failed, the channel is closed.
                while signalled.recv().is_ok() {
                    let _read: ReadGuard = lock.read()?;
                    let _ = signalled.recv();
                }
                Ok::<(), LockError>(())
            }));
        }
        // A reader ends early only if it fails. Then nobody waits for it.
        let has_failed = || threads.iter().any(thread::ScopedJoinHandle::is_finished);
        let signal_all = || signals.iter().all(|signal| signal.send(()).is_ok());
        for _ in 0..turns {
            let writer = lock.write()?;
            if !signal_all() {
                break;
            }
            while mgr.lock_info("written")?.map_or(0, |lock| lock.waiting()) < readers as u64
                && !has_failed()
            {
                pause(Duration::from_millis(2));
            }
            if has_failed() {
                break;
            }
            let started = now();
            let _: Released = writer.release()?;
            took.add(now() - started);
            signal_all();
        }
        drop(signals);
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(took)
    })
}

/// Many readers of one name, and many permits of one name: the requests that renew them.
pub(crate) fn members_renew(scale: Scale) -> Result<Vec<Figure>> {
    let count = scale.pick(1_000, 20);
    let ttl = Duration::from_secs(3);
    let time = scale.pick(Duration::from_secs(10), Duration::from_millis(100));
    let mut figures = Vec::new();
    for kind in ["readers", "permits"] {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(Config::new(server.url()).ttl(ttl))?;
        let lock = mgr.rw_lock("renewed")?;
        let permits = mgr.semaphore("renewed", u32::try_from(count)?)?;
        let guards = (0..count).map(|_| match kind {
            "readers" => lock.read().map(distlock::LockGuard::from),
            _ => permits.acquire_with(1, &LockOptions::new()).map(distlock::LockGuard::from),
        });
        let guards = guards.collect::<distlock::Result<Vec<_>>>()?;
        // The first renewals come as the guards were acquired, one after the other.
        pause(time / 5);
        let (before, renewed) = (server.calls("evalsha"), mgr.metrics().renewals());
        pause(time);
        let (after, renewed_after) = (server.calls("evalsha"), mgr.metrics().renewals());
        let requests = (after - before).max(1) as f64;
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        figures.push(Figure::new(
            format!("renewals in one request, {count} {kind} of one name"),
            number((renewed_after - renewed) as f64 / requests),
        ));
        figures.push(Figure::new("  lost", number(lost as f64)).at_most(0.0));
    }
    Ok(figures)
}
