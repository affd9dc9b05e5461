//! `distlock top` in a pseudo-terminal.

mod endings;
mod releases;

use distlock::{LockOptions, RedisMgr};

use crate::{
    helpers::{SECOND, UnwrapReleased as _, manager, set_foreign_lock, spawn_queued_waiter},
    pty::Pty,
    support::{Nodes, RedisServer},
};

/// `distlock top` in a terminal of the usual size, polling often.
fn top(server: &RedisServer) -> Pty {
    Pty::start(100, 24, &["top", "--url", &server.url(), "--interval", "100ms"])
}

fn row<'a>(screen: &'a str, name: &str) -> &'a str {
    screen
        .lines()
        .find(|line| line.starts_with(name))
        .unwrap_or_else(|| panic!("no row of {name} in\n{screen}"))
}

/// The names in the first column, from top to bottom.
fn names(screen: &str) -> Vec<&str> {
    let lines = screen.lines().skip_while(|line| !line.starts_with("NAME")).skip(1);
    lines.map_while(|line| line.split(' ').next().filter(|name| !name.is_empty())).collect()
}

/// Sets locks with these names. The queue of each is as long as its position in the list.
fn set_locks(server: &RedisServer, names: &[&str]) {
    for (position, name) in names.iter().enumerate() {
        assert!(set_foreign_lock(
            server,
            &format!("lock:{name}"),
            &format!("holder-{position}"),
            600_000
        ));
        for n in 0..position {
            let queue = crate::helpers::queue_key(name);
            server.cli(&["RPUSH", &queue, &format!("1000 distlock:client:none waiter-{n}")]);
        }
    }
}

#[test]
fn top_shows_members_and_kept_locks() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let jobs = mgr.semaphore("jobs", 5).unwrap();
    let permits = [jobs.acquire_many(2).unwrap(), jobs.acquire().unwrap()];
    let for_5_minutes = LockOptions::new().hold_at_least(300 * SECOND);
    mgr.lock_with("nightly", &for_5_minutes).unwrap().release().unwrap().unwrap_released();
    let mut top = Pty::start(140, 30, &["top", "--url", &server.url(), "--interval", "100ms"]);
    let screen = top.wait_shown("kept ");
    assert!(row(&screen, "nightly").contains("kept "), "{screen}");
    let jobs = row(&screen, "jobs");
    assert!(jobs.contains("3 permits: ") && jobs.contains(") +1 "), "{screen}");
    // The row of the group comes first, because the rows are sorted by name at last.
    top.press("\r");
    top.wait_shown("semaphore, 3 permits in use");
    // Below, and a frame arrives in parts.
    let screen = top.wait_until("the permits are listed", |screen| {
        permits.iter().all(|permit| screen.contains(permit.id().as_str()))
    });
    for (permit, count) in permits.iter().zip(["2", "1"]) {
        let row = screen.lines().find(|line| line.contains(permit.id().as_str())).unwrap();
        assert!(row.split_whitespace().any(|word| word == count), "{screen}");
    }
    drop(permits);
}

#[test]
fn top_shows_holder_and_queue_length() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let waiting: Vec<_> = (0..2).map(|_| spawn_queued_waiter(&server, &mgr, "orders:42")).collect();
    let mut top = Pty::start(140, 30, &["top", "--url", &server.url(), "--interval", "100ms"]);
    let screen = top.wait_until("both are queued", |screen| screen.contains("1 lock, 2 waiters"));
    let line = row(&screen, "orders:42");
    let token = guard.fencing_token().to_string();
    for part in [&format!("(pid {})", std::process::id()), " 2 ", &token] {
        assert!(line.contains(part), "{part}\n{line}");
    }
    assert!(screen.contains(&format!("127.0.0.1:{}", server.port())), "{screen}");
    // Top shows the hand-overs and the end.
    guard.release().unwrap().unwrap_released();
    for waiting in waiting {
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
    top.wait_shown("no locks are held");
    top.press("q");
    assert_eq!(top.exit_code(), 0);
}

#[test]
fn top_shows_hand_over_rate_and_closest_call() {
    let server = RedisServer::start();
    assert!(set_foreign_lock(&server, "lock:x", "one", 100_000));
    let top = top(&server);
    top.wait_shown("one");
    server.cli(&["SET", "lock:x", "two", "PX", "100000"]);
    top.wait_until("there is a rate", |screen| {
        screen.contains("two") && !screen.contains(" - hand-overs/s")
    });
    server.cli(&["PEXPIRE", "lock:x", "20000"]);
    let closest = |screen: &str| {
        row(screen, "x").trim_end_matches(['%', ' ']).rsplit(' ').next()?.parse::<u32>().ok()
    };
    let is_low = |screen: &str| closest(screen).is_some_and(|part| part <= 20);
    top.wait_until("little time is left", is_low);
    server.cli(&["PEXPIRE", "lock:x", "100000"]);
    let screen = top.wait_until("all time is left", |screen| row(screen, "x").contains("█████ "));
    assert!(is_low(&screen), "the closest call is kept\n{screen}");
}

#[test]
fn pattern_without_a_match_is_reported() {
    let server = RedisServer::start();
    set_locks(&server, &["mail"]);
    let top = Pty::start(100, 24, &["top", "--url", &server.url(), "orders:*"]);
    top.wait_shown("no held lock matches");
}

#[test]
fn filter_hides_other_locks_until_cleared() {
    let server = RedisServer::start();
    set_locks(&server, &["orders:1", "mail", "orders:2"]);
    let mut top = top(&server);
    top.wait_until("all are shown", |screen| names(screen).len() == 3);
    top.press("/");
    top.wait_shown("filter: _");
    top.press("RS:");
    top.wait_shown("no name matches");
    top.press("\x7f\x7f\x7frs:");
    top.wait_until("two are left", |screen| names(screen) == ["orders:2", "orders:1"]);
    top.press("\r");
    let screen = top.wait_gone("filter:");
    assert!(screen.contains("2 of 3 locks match rs:"), "{screen}");
    top.press("\x1b");
    top.wait_until("all are shown again", |screen| {
        names(screen) == ["orders:2", "mail", "orders:1"]
    });
    assert!(top.is_taken_over(), "Esc cleared the filter and did not quit");
}

#[test]
fn sort_key_cycles_columns_and_reverses() {
    let server = RedisServer::start();
    set_locks(&server, &["b", "c", "a"]);
    let mut top = top(&server);
    top.wait_until("sorted by waiters", |screen| {
        screen.contains("WAIT▼") && names(screen) == ["a", "c", "b"]
    });
    top.press("r");
    top.wait_until("reversed", |screen| {
        screen.contains("WAIT▲") && names(screen) == ["b", "c", "a"]
    });
    top.press("sss");
    top.wait_shown("NAME");
    top.press("s");
    top.wait_until("sorted by name", |screen| {
        screen.contains("NAME▲") && names(screen) == ["a", "b", "c"]
    });
    top.press("r");
    top.wait_until("reversed", |screen| {
        screen.contains("NAME▼") && names(screen) == ["c", "b", "a"]
    });
    top.press("s");
    top.wait_until("sorted by holder", |screen| {
        screen.contains("HELD BY▲") && names(screen) == ["b", "c", "a"]
    });
}

#[test]
fn selection_moves_by_keys_and_follows_lock() {
    let server = RedisServer::start();
    set_locks(&server, &["a", "b", "c"]);
    let mut top = top(&server);
    top.wait_until("all are shown", |screen| names(screen) == ["c", "b", "a"]);
    let selects = |top: &Pty, name: &str| {
        top.wait_until(&format!("{name} is selected"), |_| {
            top.selected_row().starts_with(&format!("{name} "))
        });
    };
    selects(&top, "c");
    for (key, name) in [
        ("j", "b"),
        ("\x1b[B", "a"),
        ("j", "a"),
        ("k", "b"),
        ("\x1b[H", "c"),
        ("\x1b[F", "a"),
        ("\x1b[A", "b"),
    ] {
        top.press(key);
        selects(&top, name);
    }
    server.cli(&["RPUSH", &crate::helpers::queue_key("b"), "1", "2", "3", "4"]);
    top.wait_until("b has moved up", |screen| names(screen) == ["b", "c", "a"]);
    selects(&top, "b");
    server.cli(&["DEL", "lock:b"]);
    top.wait_until("b is gone", |screen| names(screen) == ["c", "a"]);
    selects(&top, "c");
}

#[test]
fn inspected_lock_shows_queue_in_order() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let waiting: Vec<_> = (0..2).map(|_| spawn_queued_waiter(&server, &mgr, "orders:42")).collect();
    let info = mgr.lock_info("orders:42").unwrap().unwrap();
    let mut top = Pty::start(180, 40, &["top", "--url", &server.url(), "--interval", "100ms"]);
    top.wait_shown("orders:42");
    top.press("\r");
    let screen = top.wait_shown("WAITER");
    for part in [guard.id().as_str(), &guard.fencing_token().to_string(), "since", "unless renewed"]
    {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    let position = |at: usize| screen.find(info.waiters()[at].id()).unwrap();
    assert!(position(0) < position(1));
    // The details stay up to date.
    guard.release().unwrap().unwrap_released();
    let guards = waiting.into_iter().map(|waiting| waiting.join().unwrap().unwrap());
    guards.for_each(|guard| guard.release().unwrap().unwrap_released());
    top.wait_shown("not held");
    top.press("\x1b");
    top.wait_shown("no locks are held");
}

#[test]
fn top_shows_each_node_and_names_unreachable_one() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(
        crate::helpers::config_long_timeouts(nodes.urls()).quarantine(std::time::Duration::ZERO),
    )
    .unwrap();
    let _guard = mgr.lock("orders:42").unwrap();
    let mut top = Pty::start(120, 40, &["top", "--url", &nodes.urls(), "--interval", "100ms"]);
    top.wait_shown("orders:42");
    top.press("\r");
    let label = |node: usize| format!("127.0.0.1:{}  held by", nodes.server(node).port());
    top.wait_until("all nodes reply", |screen| (0..3).all(|node| screen.contains(&label(node))));
    nodes.kill(1);
    let message = format!("1 node without a reply: 127.0.0.1:{}", nodes.server(1).port());
    top.wait_shown(&message);
}

#[test]
fn top_fits_every_terminal_size() {
    let server = RedisServer::start();
    set_locks(&server, &["orders:1", "orders:2"]);
    let mut top = top(&server);
    top.wait_shown("orders:1");
    for (columns, lines) in
        [(80, 24), (10, 3), (200, 60), (1, 1), (20, 5), (2, 40), (120, 2), (40, 12)]
    {
        top.resize(columns, lines);
        let expected: String = "orders:2".chars().take(columns.into()).collect();
        let expected = if columns < 8 { "…" } else { &expected };
        top.wait_until(&format!("drawn at {columns}x{lines}"), |screen| screen.contains(expected));
        // So must every popup and question.
        for keys in ["?", "\r", "f", "/"] {
            top.press(keys);
            top.press("\x0c");
            top.press(if keys == "f" { "n" } else { "\r" });
        }
    }
    top.resize(80, 24);
    top.wait_until("the usual size is drawn", |screen| {
        screen.contains("orders:1") && screen.contains("q quit")
    });
    top.press("q");
    assert_eq!(top.exit_code(), 0);
}

#[test]
fn key_pressed_during_resize_is_not_lost() {
    let server = RedisServer::start();
    let mut top = top(&server);
    top.wait_shown("no locks are held");
    for round in 0..50 {
        top.resize(80 + round, 24);
        top.press("p");
        top.wait_shown("PAUSED");
        top.press("p");
        top.resize(81 + round, 24);
        top.wait_until("redrawn", |screen| screen.contains("every") && !screen.contains("PAUSED"));
    }
}

#[test]
fn top_reports_outage_and_recovery() {
    let server = RedisServer::start();
    set_locks(&server, &["orders:1"]);
    let top = top(&server);
    top.wait_shown("1 lock,");
    server.kill();
    let screen = top.wait_shown("NO REPLY for");
    assert!(screen.contains("OLD") && names(&screen) == ["orders:1"], "{screen}");
    top.wait_until("the time is counted", |screen| {
        screen.contains("NO REPLY for") && !screen.contains(" 0s")
    });
    server.restart_empty();
    set_locks(&server, &["orders:2"]);
    let screen = top.wait_shown("back after");
    assert!(!screen.contains("NO REPLY"), "{screen}");
    top.wait_until("the new lock is shown", |screen| names(screen) == ["orders:2"]);
}

#[test]
fn top_waits_for_server_missing_at_start() {
    let server = RedisServer::start();
    server.kill();
    let top = top(&server);
    let screen = top.wait_shown("NO REPLY for");
    assert!(screen.contains("nothing is known yet"), "{screen}");
    server.restart();
    set_locks(&server, &["orders:1"]);
    top.wait_until("the lock is shown", |screen| names(screen) == ["orders:1"]);
}

#[test]
fn top_names_options_of_the_command() {
    let server = RedisServer::builder().password("hunter2").start();
    let bare = format!("redis://{}", server.addr());
    let top = Pty::start(160, 24, &["top", "--url", &bare, "--interval", "100ms"]);
    let screen = top.wait_shown("NO REPLY for");
    assert!(screen.contains("into a file for --password-file"), "{screen}");
}

#[test]
fn keys_work_while_server_hangs() {
    let server = RedisServer::start();
    set_locks(&server, &["orders:1", "mail"]);
    let mut top = Pty::start(
        100,
        30,
        &["top", "--url", &server.url(), "--interval", "100ms", "--timeout", "60s"],
    );
    top.wait_shown("orders:1");
    server.stop();
    top.wait_gone("polled 0s ago");
    top.press("?");
    top.wait_shown("hand-overs per second, as far as polls show");
    top.press("?");
    top.press("/mail");
    top.wait_until("the filter works", |screen| names(screen) == ["mail"]);
    top.press("\r");
    top.wait_gone("filter:");
    top.press("q");
    assert_eq!(top.exit_code(), 0);
    server.cont();
}

#[test]
fn pause_stops_polling_and_resume_polls_at_once() {
    let server = RedisServer::start();
    set_locks(&server, &["orders:1"]);
    let mut top = Pty::start(100, 24, &["top", "--url", &server.url(), "--interval", "300s"]);
    top.wait_shown("orders:1");
    top.press("p");
    top.wait_shown("PAUSED");
    set_locks(&server, &["mail"]);
    top.press("p");
    top.wait_shown("mail");
    assert!(!top.screen().contains("PAUSED"));
    top.press("-");
    top.wait_shown("every 60s");
    top.press("-----");
    top.wait_shown("every 1s");
    // The shorter interval applies at once.
    set_locks(&server, &["third"]);
    top.wait_shown("third");
}

#[test]
fn top_escapes_names() {
    let server = RedisServer::start();
    set_locks(&server, &["\x1b]0;owned\x07\x1b[2J", "漢字漢字", "a\u{202e}b"]);
    server.cli(&["SET", "lock:x", "\x1b[?1049l\r\n", "PX", "600000"]);
    let mut top = Pty::start(160, 24, &["top", "--url", &server.url(), "--interval", "100ms"]);
    let screen = top.wait_shown("4 locks");
    for part in ["\\u{1b}]0;owned\\u{7}\\u{1b}", "漢字漢字", "a\\u{202e}b", "\\u{1b}[?1049l"] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    top.press("sss\x1b[F\r");
    top.wait_shown("unless renewed");
    let transcript = top.transcript();
    assert!(
        !transcript.contains("\x1b]")
            && !transcript.contains("\x1b[?1049l")
            && !transcript.contains('\u{202e}')
    );
}

#[test]
fn top_uses_sixteen_colours_or_none() {
    let server = RedisServer::start();
    set_locks(&server, &["orders:1", "mail"]);
    let colours = |env: &[(&str, &str)]| {
        let top = Pty::start_with(100, 24, &["top", "--url", &server.url()], env);
        top.wait_shown("orders:1");
        top.on_screen(|screen| {
            let cells = (0..24).flat_map(|row| (0..100).map(move |column| (row, column)));
            let cells = cells.filter_map(|(row, column)| screen.cell(row, column));
            let colours = cells.flat_map(|cell| [cell.fgcolor(), cell.bgcolor()]);
            colours.filter(|colour| *colour != vt100::Color::Default).collect::<Vec<_>>()
        })
    };
    let seen = colours(&[]);
    assert!(
        !seen.is_empty() && seen.iter().all(|colour| matches!(colour, vt100::Color::Idx(0..16))),
        "{seen:?}"
    );
    assert_eq!(colours(&[("NO_COLOR", "1")]), []);
    assert!(!colours(&[("NO_COLOR", "")]).is_empty());
}

#[test]
fn top_counts_all_of_many_locks() {
    let server = RedisServer::start();
    const MAKE: &str = "for n = 1, 20000 do redis.call('SET', string.format('lock:n%05d', n), \
                        'holder-' .. n, 'PX', 600000) end";
    server.cli(&["EVAL", MAKE, "0"]);
    let mut top = Pty::start(
        80,
        24,
        &["top", "--url", &server.url(), "--interval", "100ms", "--timeout", "60s"],
    );
    top.wait_shown("20000 locks");
    top.press("\x1b[F");
    top.wait_until("the last is selected", |screen| {
        top.selected_row().starts_with("n20000 ") && !screen.contains("n00001 ")
    });
    top.press("/12345");
    top.wait_until("one is left", |screen| names(screen) == ["n12345"]);
}
