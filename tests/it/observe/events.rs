//! Events: each in its place over the life of a lock, and handlers that cost no lock whatever they
//! do.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{
    AcquiredEvent, AttemptedEvent, Config, ContendedEvent, FailedEvent, HandleEvent, LockError,
    LockGuard, LockLost, LostEvent, ReconnectedEvent, RedisMgr, Released, ReleasedEvent,
    RenewalFailedEvent, RenewalOverdueEvent, RenewedEvent, ServerChangedEvent, TimedOutEvent,
};
use parking_lot::{Condvar, Mutex};

use crate::{
    helpers::{
        SECOND, SHORT_TIMEOUT, UnwrapReleased, await_gone, await_queued, capture_log,
        config_long_timeouts, config_medium_timeout, expect_loss, get, in_own_process, in_thread,
        is_renewal, label, manager, server_with_scripts, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, Nodes, RedisServer, eventually, eventually_some},
};

const TTL: Duration = Duration::from_secs(3);

/// Writes down what it is told, each event as a line, and the thread that told it.
#[derive(Debug, Default)]
struct Recorder {
    lines: Mutex<Vec<(String, Option<String>)>>,
    changed: Condvar,
}

impl Recorder {
    fn note(&self, line: String) {
        self.lines.lock().push((line, thread::current().name().map(str::to_owned)));
        self.changed.notify_all();
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().iter().map(|(line, _)| line.clone()).collect()
    }

    /// The first event that begins like this.
    #[track_caller]
    fn expect(&self, beginning: &str) -> String {
        let found = || self.lines().into_iter().find(|line| line.starts_with(beginning));
        eventually_some(&format!("{beginning} is told; so far {:?}", self.lines()), CEILING, found)
    }

    fn count(&self, beginning: &str) -> usize {
        self.lines().iter().filter(|line| line.starts_with(beginning)).count()
    }

    fn threads(&self, beginning: &str) -> Vec<Option<String>> {
        let lines = self.lines.lock();
        lines
            .iter()
            .filter(|(line, _)| line.starts_with(beginning))
            .map(|(_, thread)| thread.clone())
            .collect()
    }
}

impl HandleEvent for Recorder {
    fn attempted(&self, event: &AttemptedEvent<'_>) {
        self.note(format!("attempted {} {} {:?}", event.lock(), event.id(), event.wait()));
    }

    fn contended(&self, event: &ContendedEvent<'_>) {
        self.note(format!("contended {} {} by {}", event.lock(), event.id(), event.holder().id()));
    }

    fn acquired(&self, event: &AcquiredEvent<'_>) {
        assert!(event.waited() < CEILING);
        let contended = event.contended();
        self.note(format!(
            "acquired {} {} {} contended={contended}",
            event.lock(),
            event.id(),
            event.token()
        ));
    }

    fn renewed(&self, event: &RenewedEvent<'_>) {
        assert!(event.margin() < CEILING && event.took() < CEILING);
        self.note(format!(
            "renewed {} {} with {} ms",
            event.lock(),
            event.id(),
            event.margin().as_millis()
        ));
    }

    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        let left = event.remaining().as_millis();
        self.note(format!(
            "renewal failed {} {} with {left} ms: {}",
            event.lock(),
            event.id(),
            event.why()
        ));
    }

    fn renewal_overdue(&self, event: &RenewalOverdueEvent<'_>) {
        self.note(format!(
            "danger {} {} with {} ms",
            event.lock(),
            event.id(),
            event.remaining().as_millis()
        ));
    }

    fn lost(&self, event: &LostEvent<'_>) {
        assert!(event.held() < CEILING);
        self.note(format!(
            "lost {} {} {}: {}",
            event.lock(),
            event.id(),
            event.token(),
            event.why()
        ));
    }

    fn released(&self, event: &ReleasedEvent<'_>) {
        assert!(event.held() < CEILING);
        let confirmed = event.confirmed();
        self.note(format!(
            "released {} {} {} confirmed={confirmed}",
            event.lock(),
            event.id(),
            event.token()
        ));
    }

    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        assert!(event.waited() < CEILING);
        let holder = event.holder().map_or("nobody known", |holder| holder.id());
        self.note(format!("timed out {} {} by {holder}", event.lock(), event.id()));
    }

    fn failed(&self, event: &FailedEvent<'_>) {
        assert!(event.waited() < CEILING && !event.error().is_contended());
        self.note(format!("failed {} {}: {}", event.lock(), event.id(), event.error()));
    }

    fn reconnected(&self, event: &ReconnectedEvent<'_>) {
        assert!(event.away() < CEILING);
        self.note(format!("reconnected {}", event.server()));
    }

    fn server_changed(&self, event: &ServerChangedEvent<'_>) {
        let quarantined = event.quarantine().is_some();
        self.note(format!(
            "changed {} replaced={} quarantined={quarantined}",
            event.server(),
            event.replaced()
        ));
    }
}

fn recorded(config: Config) -> (Arc<Recorder>, RedisMgr) {
    let recorder = Arc::new(Recorder::default());
    let mgr = RedisMgr::new(config.event_handler(recorder.clone())).unwrap();
    (recorder, mgr)
}

fn milliseconds(line: &str) -> u64 {
    line.split(" with ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn the_life_of_a_lock_is_told_in_order_on_the_thread_that_lives_it() {
    let server = RedisServer::start();
    let (told, mgr) = recorded(config_long_timeouts(server.url()));
    for finish in [|guard| LockGuard::release(guard).unwrap().unwrap_released(), drop::<LockGuard>]
    {
        told.lines.lock().clear();
        let guard = mgr.try_lock_for("x", SECOND).unwrap();
        let (id, token) = (guard.id().clone(), guard.fencing_token());
        finish(guard);
        let expected = [
            format!("attempted x {id} Some(1s)"),
            format!("acquired x {id} {token} contended=false"),
            format!("released x {id} {token} confirmed=true"),
        ];
        assert_eq!(told.lines(), expected);
        assert!(told.threads("").iter().all(|name| name.as_deref() == thread::current().name()));
    }
    told.lines.lock().clear();
    let id = mgr.acquire_lock("y", TTL, Duration::ZERO).unwrap().unwrap();
    assert!(mgr.release_lock("y", &id).unwrap());
    let kinds: Vec<_> =
        told.lines().iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["attempted", "acquired", "released"]);
}

#[test]
fn contention_names_the_holder_once_and_the_end_of_the_wait() {
    let server = RedisServer::start();
    let (told, mgr) = recorded(config_long_timeouts(server.url()));
    let guard = manager(&server).lock("x").unwrap();
    let holder = guard.id().to_string();
    mgr.try_lock("x").unwrap_err();
    mgr.try_lock_for("x", Duration::from_millis(700)).unwrap_err();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    eventually("each is told", CEILING, || told.count("contended x ") == 3);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    told.expect(&format!("acquired x {} {} contended=true", next.id(), next.fencing_token()));
    assert_eq!(
        (told.count("attempted x "), told.count("contended x "), told.count("timed out x ")),
        (3, 3, 2)
    );
    for line in told
        .lines()
        .iter()
        .filter(|line| line.starts_with("contended") || line.starts_with("timed out"))
    {
        assert!(line.ends_with(&format!(" by {holder}")), "{line}");
    }
    assert!(
        told.threads("contended").iter().all(|name| name.as_deref() == Some("distlock-events"))
    );
    assert!(!told.threads("timed out").contains(&Some("distlock-events".into())));
    drop(next);
}

#[test]
fn renewals_are_told_with_what_was_left() {
    let server = RedisServer::start();
    let (told, mgr) = recorded(config_long_timeouts(server.url()));
    let guard = mgr.lock_with("x", &with_ttl(5 * TTL)).unwrap();
    let line = told.expect(&format!("renewed x {}", guard.id()));
    // Renewed after a third, so no more than two thirds were left.
    assert!((0..=10_050).contains(&milliseconds(&line)), "{line}");
    assert!(told.threads("renewed").iter().all(|name| name.as_deref() == Some("distlock-events")));
    assert_eq!((told.count("renewal failed"), told.count("danger"), told.count("lost")), (0, 0, 0));
}

#[test]
fn a_renewal_that_fails_is_told_then_the_danger_then_the_loss() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let (told, mgr) = recorded(config_long_timeouts(proxy.url()).operation_timeout(SHORT_TIMEOUT));
    let guard = mgr.lock_with("x", &with_ttl(3 * TTL)).unwrap();
    let (id, token) = (guard.id().clone(), guard.fencing_token());
    proxy.refuse();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    let ending = told.expect("lost ");
    assert_eq!(ending, format!("lost x {id} {token}: {}", LockLost::Expired));
    let failed = told.expect(&format!("renewal failed x {id} with "));
    assert!(milliseconds(&failed) <= 6_030 && !failed.ends_with(": "), "{failed}");
    let danger = told.expect(&format!("danger x {id} with "));
    assert!((1..=4_500).contains(&milliseconds(&danger)), "{danger}");
    let order: Vec<_> =
        told.lines().into_iter().filter(|line| !line.starts_with("renewal failed")).collect();
    let at = |line: &String| order.iter().position(|other| other == line).unwrap();
    assert!(at(&danger) < at(&ending));
    drop(guard);
    proxy.heal();
    await_gone(&server, "lock:x");
    assert_eq!((told.count("lost"), told.count("danger"), told.count("released")), (1, 1, 0));
}

#[test]
fn a_renewal_that_comes_late_is_danger_without_a_loss() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let (told, mgr) = recorded(config_long_timeouts(proxy.url()));
    let guard = mgr.lock_with("x", &with_ttl(4 * SECOND)).unwrap();
    let held_back = proxy.on_request(is_renewal("lock:x"), Fault::HoldReply);
    let danger = told.expect(&format!("danger x {}", guard.id()));
    assert!((1..=2_000).contains(&milliseconds(&danger)), "{danger}");
    held_back.let_go();
    told.expect(&format!("renewed x {}", guard.id()));
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    assert_eq!((told.count("danger"), told.count("lost")), (1, 0));
}

#[test]
fn every_loss_is_told_once_whoever_notices_it() {
    let server = RedisServer::start();
    let (told, mgr) = recorded(config_long_timeouts(server.url()));
    let take = |ttl| mgr.lock_with("x", &with_ttl(ttl).renew(false)).unwrap();
    // The holder notices, before and after the renewer.
    for wait_for_it in [false, true] {
        told.lines.lock().clear();
        let guard = take(Duration::from_millis(300));
        let id = guard.id().clone();
        if wait_for_it {
            told.expect(&format!("lost x {id}"));
        } else {
            while guard.is_held() {
                thread::yield_now();
            }
        }
        drop(guard);
        assert!(told.expect(&format!("lost x {id}")).ends_with(&LockLost::Expired.to_string()));
        drop(take(30 * SECOND));
        assert_eq!((told.count("lost"), told.count("released")), (1, 1));
    }
    // It shows when it is released.
    for (put, why) in
        [(None, LockLost::Gone.to_string()), (Some("a stranger"), "it is now held by".into())]
    {
        told.lines.lock().clear();
        let guard = take(30 * SECOND);
        match put {
            None => drop(server.cli(&["DEL", "lock:x"])),
            Some(stranger) => drop(server.cli(&["SET", "lock:x", stranger])),
        }
        assert_ne!(guard.release().unwrap(), Released::Released);
        assert!(told.expect("lost x ").contains(&why), "{:?}", told.lines());
        assert_eq!(told.count("released"), 0);
        server.cli(&["DEL", "lock:x"]);
    }
    told.lines.lock().clear();
    let guard =
        mgr.lock_with("x", &with_ttl(30 * SECOND).max_hold(Duration::from_millis(50))).unwrap();
    assert!(told.expect("lost x ").ends_with(&LockLost::MaxHold.to_string()));
    drop(guard);
    told.lines.lock().clear();
    let guard = take(30 * SECOND);
    mgr.shutdown();
    drop(guard);
    assert!(told.expect("lost x ").ends_with(&LockLost::Shutdown.to_string()));
    assert_eq!((told.count("lost"), told.count("released")), (1, 0));
}

#[test]
fn a_release_that_nobody_has_confirmed_is_told_as_such() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let (told, mgr) = recorded(config_long_timeouts(proxy.url()).operation_timeout(SHORT_TIMEOUT));
    let guard = mgr.lock("x").unwrap();
    let (id, token) = (guard.id().clone(), guard.fencing_token());
    proxy.refuse();
    assert!(guard.release().unwrap_err().is_unavailable());
    assert_eq!(told.expect("released "), format!("released x {id} {token} confirmed=false"));
    assert_eq!(told.count("lost"), 0);
}

#[test]
fn what_could_not_be_asked_for_has_failed() {
    let (told, mgr) = {
        let server = RedisServer::start();
        let (told, mgr) = recorded(config_medium_timeout(server.url()));
        server.cli(&["RPUSH", "lock:list", "precious"]);
        assert!(matches!(mgr.try_lock("list"), Err(LockError::WrongType { .. })));
        assert_eq!(told.count("failed list "), 1);
        (told, mgr)
    };
    assert!(mgr.try_lock("x").unwrap_err().is_unavailable());
    assert_eq!((told.count("attempted"), told.count("failed"), told.count("timed out")), (2, 2, 0));
    // A call that cannot work is no attempt.
    assert!(mgr.try_lock("").unwrap_err().is_invalid());
    assert_eq!(told.count("attempted"), 2);
}

#[test]
fn an_outage_is_told_once_however_many_connections_it_breaks() {
    let server = RedisServer::start();
    let (told, mgr) = recorded(config_long_timeouts(server.url()));
    let open_several = |name: &str| {
        let connections: Vec<_> = (0..4).map(|_| mgr.connection().unwrap()).collect();
        drop(mgr.try_lock(name).unwrap());
        drop(connections);
        let threads: Vec<_> = (0..4)
            .map(|n| {
                in_thread(&mgr, &format!("{name}{n}"), |mgr, name| drop(mgr.lock(name).unwrap()))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    };
    open_several("before");
    assert_eq!(told.count("reconnected"), 0);
    server.restart_empty();
    open_several("after");
    let line = told.expect("reconnected");
    assert_eq!(line, format!("reconnected {}", label(&server)));
    server.kill_clients(&["TYPE", "normal"]);
    drop(mgr.lock("again").unwrap());
    eventually("the second one is told", CEILING, || told.count("reconnected") >= 2);
    assert_eq!(told.count("reconnected"), 2);
}

#[test]
fn a_node_that_is_another_run_is_told_of() {
    let nodes = Nodes::start(3);
    let (told, mgr) =
        recorded(config_long_timeouts(nodes.urls()).quarantine(60 * SECOND).ttl(10 * SECOND));
    // Just started, all of them.
    eventually("they are young", CEILING, || told.count("changed") == 3);
    assert!(
        told.lines().iter().all(|line| line.ends_with("replaced=false quarantined=true")),
        "{:?}",
        told.lines()
    );
    nodes.restart_empty(1);
    eventually("it is seen", CEILING, || {
        let _ = mgr.try_lock("x");
        told.count(&format!("changed {} replaced=true quarantined=true", label(nodes.server(1))))
            == 1
    });
}

/// Does what it is told to in every event, and counts.
#[derive(Debug, Default)]
struct Wild {
    calls: AtomicUsize,
    blocks: Option<&'static str>,
    gate: (Mutex<bool>, Condvar),
}

impl Wild {
    fn act(&self, event: &str) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match self.blocks {
            None => panic!("a handler panics in {event}"),
            Some(blocks) if blocks == event => {
                let mut open = self.gate.0.lock();
                self.gate.1.wait_while(&mut open, |open| !*open);
            }
            Some(_) => {}
        }
    }

    fn let_go(&self) {
        *self.gate.0.lock() = true;
        self.gate.1.notify_all();
    }
}

impl HandleEvent for Wild {
    fn attempted(&self, _: &AttemptedEvent<'_>) {
        self.act("attempted");
    }
    fn contended(&self, _: &ContendedEvent<'_>) {
        self.act("contended");
    }
    fn acquired(&self, _: &AcquiredEvent<'_>) {
        self.act("acquired");
    }
    fn renewed(&self, _: &RenewedEvent<'_>) {
        self.act("renewed");
    }
    fn lost(&self, _: &LostEvent<'_>) {
        self.act("lost");
    }
    fn released(&self, _: &ReleasedEvent<'_>) {
        self.act("released");
    }
    fn timed_out(&self, _: &TimedOutEvent<'_>) {
        self.act("timed out");
    }
}

#[test]
fn a_handler_that_panics_costs_nothing_and_is_logged_once() {
    if !in_own_process("events::a_handler_that_panics_costs_nothing_and_is_logged_once", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let (wild, told) = (Arc::new(Wild::default()), Arc::new(Recorder::default()));
    // The one behind it hears everything all the same.
    let mgr = RedisMgr::new(
        config_long_timeouts(server.url()).event_handler(wild.clone()).event_handler(told.clone()),
    )
    .unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    mgr.try_lock("x").unwrap_err();
    eventually("it is renewed twice", CEILING, || told.count("renewed x ") >= 2);
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    server.cli(&["DEL", "lock:x"]);
    assert_eq!(expect_loss(&guard), LockLost::Gone);
    told.expect("lost x ");
    assert!(wild.calls.load(Ordering::SeqCst) >= 10);
    assert_eq!(logged.lock().iter().filter(|line| line.contains("handler panicked")).count(), 1);
}

#[test]
fn a_handler_that_blocks_for_ever_costs_no_lock() {
    let server = RedisServer::start();
    for blocks in ["renewed", "lost", "contended"] {
        let wild = Arc::new(Wild { blocks: Some(blocks), ..Wild::default() });
        let mgr =
            RedisMgr::new(config_long_timeouts(server.url()).event_handler(wild.clone())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
        let vanishing = mgr.lock_with("y", &with_ttl(TTL)).unwrap();
        server.cli(&["DEL", "lock:y"]);
        mgr.try_lock("x").unwrap_err();
        assert_eq!(expect_loss(&vanishing), LockLost::Gone);
        let commands = server.monitor();
        let renewed = || {
            commands
                .lines()
                .iter()
                .filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\""))
                .count()
        };
        eventually("it is renewed all the while", CEILING, || renewed() >= 3);
        assert!(guard.is_held(), "{blocks}");
        // Others wait for their turn, and get it.
        let waiting = spawn_queued_waiter(&server, &mgr, "x");
        let behind = spawn_queued_waiter(&server, &mgr, "x");
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());
        drop(behind.join().unwrap().unwrap());
        mgr.shutdown();
        wild.let_go();
    }
}

#[test]
fn what_does_not_fit_into_the_queue_is_dropped_and_counted() {
    let server = RedisServer::start();
    let wild = Arc::new(Wild { blocks: Some("contended"), ..Wild::default() });
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(wild.clone())).unwrap();
    let guard = mgr.lock("x").unwrap();
    for _ in 0..1_100 {
        mgr.try_lock("x").unwrap_err();
    }
    let metrics = mgr.metrics();
    assert_eq!((metrics.contended(), metrics.timed_out()), (1_100, 1_100));
    // One is with the handler, 1,024 are in the queue.
    assert_eq!(metrics.events_dropped(), 1_100 - 1_024 - 1);
    wild.let_go();
    guard.release().unwrap().unwrap_released();
}

/// Whoever is told on a thread of its own blocks only that.
#[test]
fn a_handler_that_blocks_its_caller_keeps_the_lock_alive_meanwhile() {
    let server = RedisServer::start();
    let wild = Arc::new(Wild { blocks: Some("acquired"), ..Wild::default() });
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(wild.clone())).unwrap();
    let commands = server.monitor();
    let blocked = in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(TTL)));
    let renewed = || {
        commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count()
    };
    eventually("it is renewed before its holder has it", CEILING, || renewed() >= 3);
    let other = manager(&server);
    let waiting = in_thread(&other, "x", |mgr, name| mgr.lock(name));
    await_queued(&server, "x", 1);
    wild.let_go();
    let guard = blocked.join().unwrap().unwrap();
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

#[test]
fn a_thread_for_events_is_only_there_for_a_handler_and_goes_with_its_manager() {
    if !in_own_process(
        "events::a_thread_for_events_is_only_there_for_a_handler_and_goes_with_its_manager",
        &[],
    ) {
        return;
    }
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let name = |task: std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
        };
        tasks.map(name).filter(|name| name.trim() == "distlock-events").count()
    };
    let server = RedisServer::start();
    let plain = manager(&server);
    drop(plain.lock("x").unwrap());
    assert_eq!(threads(), 0);
    let (told, mgr) = recorded(config_long_timeouts(server.url()));
    // A thread gives itself its name.
    eventually("the thread is there", CEILING, || threads() == 1);
    let guard = mgr.lock("x").unwrap();
    drop(mgr);
    assert_eq!(threads(), 1, "a guard keeps its manager");
    drop(guard);
    eventually("the thread ends", CEILING, || threads() == 0);
    eventually("nobody holds the handler", CEILING, || Arc::strong_count(&told) == 1);
    assert_eq!(get(&server, "lock:x"), None);
}
