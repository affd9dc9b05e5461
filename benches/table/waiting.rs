//! The cost of waiting at the server: many waiters of one process wait for a lock that stays held.

use std::{thread, time::Duration};

use distlock::{Config, LockError, RedisMgr};

use crate::{
    Result, Scale,
    measure::{cpu_of, now, pause},
    report::{Figure, number, per_second, share_of_core},
    support::{RedisServer, TEST_TIMEOUT, Worker, WorkerSide, eventually},
};

pub(crate) const ROLE: &str = "waiter";

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let (threads, window) =
        scale.pick((500, Duration::from_secs(10)), (10, Duration::from_millis(100)));
    let server = RedisServer::start();
    let holder = RedisMgr::new(Config::new(server.url()))?;
    let guard = holder.lock("held")?;
    let initial_commands = server.commands_processed();
    let args = [("url", server.url()), ("threads", threads.to_string())];
    let mut worker =
        Worker::spawn(ROLE, &args.each_ref().map(|(key, value)| (*key, value.as_str())));
    eventually("all threads are queued", TEST_TIMEOUT, || {
        server.query::<usize>(&["LLEN", "distlock:queue:{lock:held}"]) == threads
    });

    let (commands, cpu, started) = (server.commands_processed(), cpu_of(worker.pid())?, now());
    pause(window);
    let (elapsed, cpu) = (now() - started, cpu_of(worker.pid())? - cpu);
    let sent = server.commands_processed() - commands;

    guard.ensure_held()?;
    worker.send("stop");
    worker.expect("stopped");
    Ok(vec![
        Figure::new(
            "commands at the server, 500 threads waiting",
            per_second(sent as f64, elapsed),
        )
        .below(200.0),
        Figure::new("processor time of the waiting process", share_of_core(cpu, elapsed))
            .below(2.0),
        Figure::new(
            "  commands to join the queue, per waiter",
            number((commands - initial_commands) as f64 / threads as f64),
        ),
    ])
}

/// Waits in many threads until the manager is shut down.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let threads: usize = side.arg("threads").parse()?;
    // Otherwise only one thread of the process would wait at the server.
    let config = Config::new(side.arg("url")).local_handover(Duration::ZERO);
    let mgr = RedisMgr::new(config)?;
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..threads).map(|_| scope.spawn(|| mgr.lock("held"))).collect();
        let message = side.hear();
        mgr.shutdown();
        for waiter in waiters {
            match waiter.join().map_err(|_| "a waiter panicked")? {
                Err(LockError::Shutdown) => {}
                Err(error) => return Err(error.into()),
                Ok(guard) => {
                    return Err(
                        format!("a waiter acquired the lock that was held: {guard:?}").into()
                    );
                }
            }
        }
        message.map(|_| side.say("stopped")).ok_or_else(|| "the message to stop is missing".into())
    })
}
