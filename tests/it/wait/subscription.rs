//! Subscriptions that lead elsewhere than the line, so that a grant would not be heard: no waiter
//! relies on one, and nobody opens them without a pause.

use distlock::RedisMgr;

use crate::{
    helpers::{
        CALL_LIMIT, UnwrapReleased, capture_log, completes_within, config_long_timeouts,
        in_own_process, in_thread, manager, server_behind_proxy, timed,
    },
    support::{
        Armed, CEILING, Fault, FaultProxy, Monitor, RedisServer, contains, eventually, rewrite,
    },
};

/// A manager with two connections to the server behind the proxy, and no others in its pool.
fn connected_twice(proxy: &FaultProxy) -> RedisMgr {
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url()).pool_size(2)).unwrap();
    let held = proxy.on_request(contains("lock:one"), Fault::HoldReply);
    let one = in_thread(&mgr, "one", RedisMgr::try_lock);
    held.wait_fired();
    drop(mgr.try_lock("two").unwrap());
    held.let_go();
    drop(one.join().unwrap().unwrap());
    mgr
}

fn asks_to_join(lock: &'static str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    move |words| {
        [lock, "join"].iter().all(|word| words.iter().any(|other| other == word.as_bytes()))
    }
}

fn looks(commands: &Monitor, lock: &str) -> usize {
    let lock = format!("{lock:?}");
    commands.lines().iter().filter(|line| line.contains("\"look\"") && line.contains(&lock)).count()
}

/// Goal: "nobody listens here" says something about the line that was there when it was asked, and
/// nothing about the next one. Method: two waiters ask while the line leads to another server. The
/// answer to one of them is held back until the other has opened the line anew.
#[test]
fn an_answer_about_a_line_that_is_gone_costs_the_next_one_nothing() {
    let (server, elsewhere) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = connected_twice(&proxy);
    let other = manager(&server);
    let guards = ["x", "y"].map(|name| other.lock(name).unwrap());
    let joins: [Armed; 2] =
        ["lock:x", "lock:y"].map(|lock| proxy.on_request(asks_to_join(lock), Fault::HoldReply));
    proxy.lead_to(elsewhere.addr());
    let waiting = ["x", "y"].map(|name| in_thread(&mgr, name, RedisMgr::lock));
    joins.iter().for_each(Armed::wait_fired);
    proxy.lead_to(server.addr());
    joins[0].let_go();
    let listens = || !server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty();
    eventually("the line leads here", CEILING, listens);
    let commands = server.monitor();
    joins[1].let_go();
    eventually("the other one relies on it", CEILING, || looks(&commands, "lock:y") >= 4);
    assert_eq!(server.calls("subscribe"), 1, "it was cut");
    for (guard, waiting) in guards.into_iter().zip(waiting) {
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());
    }
}

/// Goal: where the server never says that somebody listens, as behind a proxy that takes
/// subscriptions elsewhere, waiters look by themselves, the line is tried more and more seldom, and
/// that is told once. Method: the answers are changed on their way.
#[test]
fn where_nobody_ever_listens_the_line_is_tried_more_and_more_seldom() {
    if !in_own_process(
        "hearing::where_nobody_ever_listens_the_line_is_tried_more_and_more_seldom",
        &[],
    ) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Info);
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let unheard = |line: &str| {
        let mut words: Vec<&str> = line.split(' ').collect();
        if let [_, "queued", _, _, _, state, ..] = words.as_mut_slice() {
            *state = if matches!(*state, "1" | "3") { "3" } else { "2" };
        }
        words.join(" ")
    };
    for mode in ["join", "look"] {
        let asks = move |words: &[Vec<u8>]| words.iter().any(|word| word == mode.as_bytes());
        proxy.on_request(asks, rewrite(unheard)).forever();
    }
    let guard = manager(&server).lock("x").unwrap();
    let commands = server.monitor();
    let ((waiting, subscribed), span) = timed(|| {
        let waiting = in_thread(&mgr, "x", RedisMgr::lock);
        let tries = || commands.lines().iter().filter(|line| line.contains("\"try\"")).count();
        eventually("it looks by itself", CEILING, || tries() >= 80);
        (waiting, server.calls("subscribe"))
    });
    // 20 ms, doubled each time up to 10 s.
    let bound = 10 + span.as_secs() / 10;
    assert!((3..=bound).contains(&subscribed), "{subscribed} times in {span:?}");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    next.release().unwrap().unwrap_released();
    let told: Vec<_> = logged.lock().iter().filter(|line| line.contains("hear")).cloned().collect();
    assert!(matches!(told.as_slice(), [line] if line.contains("nobody listens")), "{told:#?}");
}
