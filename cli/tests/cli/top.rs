//! `distlock top` in a pseudo-terminal.

mod endings;
mod releases;

use distlock::RedisMgr;

use crate::{
    kit::{UnwrapReleased as _, foreign_take, manager, waiter},
    pty::Pty,
    support::{Nodes, RedisServer},
};

/// On a screen of the usual size, looking often.
fn top(server: &RedisServer) -> Pty {
    Pty::start(100, 24, &["top", "--url", &server.url(), "--interval", "100ms"])
}

fn row<'a>(screen: &'a str, name: &str) -> &'a str {
    screen.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no row of {name} in\n{screen}"))
}

/// The names in the first column, in order.
fn names(screen: &str) -> Vec<&str> {
    let lines = screen.lines().skip_while(|line| !line.starts_with("NAME")).skip(1);
    lines.map_while(|line| line.split(' ').next().filter(|name| !name.is_empty())).collect()
}

/// Locks of these names, each with a line as long as its place.
fn take(server: &RedisServer, names: &[&str]) {
    for (place, name) in names.iter().enumerate() {
        assert!(foreign_take(server, &format!("lock:{name}"), &format!("holder-{place}"), 600_000));
        for n in 0..place {
            let queue = crate::kit::queue_key(name);
            server.cli(&["RPUSH", &queue, &format!("1000 distlock:client:none waiter-{n}")]);
        }
    }
}

#[test]
fn a_lock_is_shown_with_its_holder_and_its_line() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let waiting: Vec<_> = (0..2).map(|_| waiter(&server, &mgr, "orders:42")).collect();
    let mut top = Pty::start(140, 30, &["top", "--url", &server.url(), "--interval", "100ms"]);
    let screen = top.until("both wait", |screen| screen.contains("1 lock, 2 waiters"));
    let line = row(&screen, "orders:42");
    let token = guard.fencing_token().to_string();
    for part in [&format!("(pid {})", std::process::id()), " 2 ", &token] {
        assert!(line.contains(part), "{part}\n{line}");
    }
    assert!(screen.contains(&format!("127.0.0.1:{}", server.port())), "{screen}");
    // One hand-over after the other is seen.
    guard.release().unwrap().unwrap_released();
    for waiting in waiting {
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
    top.until_shown("no lock is held");
    top.press("q");
    assert_eq!(top.end(), 0);
}

#[test]
fn hand_overs_make_a_rate_and_a_low_moment_is_the_closest_call() {
    let server = RedisServer::start();
    assert!(foreign_take(&server, "lock:x", "one", 100_000));
    let top = top(&server);
    top.until_shown("one");
    server.cli(&["SET", "lock:x", "two", "PX", "100000"]);
    top.until("the rate is told", |screen| screen.contains("two") && !screen.contains(" - hand-overs/s"));
    server.cli(&["PEXPIRE", "lock:x", "20000"]);
    let closest = |screen: &str| row(screen, "x").trim_end_matches(['%', ' ']).rsplit(' ').next()?.parse::<u32>().ok();
    let is_low = |screen: &str| closest(screen).is_some_and(|part| part <= 20);
    top.until("it is close", is_low);
    server.cli(&["PEXPIRE", "lock:x", "100000"]);
    let screen = top.until("it is full again", |screen| row(screen, "x").contains("█████ "));
    assert!(is_low(&screen), "the closest call stays\n{screen}");
}

#[test]
fn a_filter_leaves_what_matches_until_it_is_cleared() {
    let server = RedisServer::start();
    take(&server, &["orders:1", "mail", "orders:2"]);
    let mut top = top(&server);
    top.until("all are there", |screen| names(screen).len() == 3);
    top.press("/");
    top.until_shown("filter: _");
    top.press("RS:");
    top.until_shown("no name matches");
    top.press("\x7f\x7f\x7frs:");
    top.until("two are left", |screen| names(screen) == ["orders:2", "orders:1"]);
    top.press("\r");
    let screen = top.until_gone("filter:");
    assert!(screen.contains("2 of 3 locks match rs:"), "{screen}");
    top.press("\x1b");
    top.until("all are back", |screen| names(screen) == ["orders:2", "mail", "orders:1"]);
    assert!(top.is_taken(), "escape has cleared, and not ended");
}

#[test]
fn columns_are_sorted_by_in_turn_and_turned_round() {
    let server = RedisServer::start();
    take(&server, &["b", "c", "a"]);
    let mut top = top(&server);
    top.until("by waiters", |screen| screen.contains("WAIT▼") && names(screen) == ["a", "c", "b"]);
    top.press("r");
    top.until("turned round", |screen| screen.contains("WAIT▲") && names(screen) == ["b", "c", "a"]);
    top.press("sss");
    top.until_shown("NAME");
    top.press("s");
    top.until("by name", |screen| screen.contains("NAME▲") && names(screen) == ["a", "b", "c"]);
    top.press("r");
    top.until("turned round", |screen| screen.contains("NAME▼") && names(screen) == ["c", "b", "a"]);
    top.press("s");
    top.until("by holder", |screen| screen.contains("HELD BY▲") && names(screen) == ["b", "c", "a"]);
}

#[test]
fn the_selection_moves_by_keys_and_stays_with_its_lock() {
    let server = RedisServer::start();
    take(&server, &["a", "b", "c"]);
    let mut top = top(&server);
    top.until("all are there", |screen| names(screen) == ["c", "b", "a"]);
    let selects = |top: &Pty, name: &str| {
        top.until(&format!("{name} is selected"), |_| top.selected().starts_with(&format!("{name} ")));
    };
    selects(&top, "c");
    for (key, name) in
        [("j", "b"), ("\x1b[B", "a"), ("j", "a"), ("k", "b"), ("\x1b[H", "c"), ("\x1b[F", "a"), ("\x1b[A", "b")]
    {
        top.press(key);
        selects(&top, name);
    }
    server.cli(&["RPUSH", &crate::kit::queue_key("b"), "1", "2", "3", "4"]);
    top.until("it has moved up", |screen| names(screen) == ["b", "c", "a"]);
    selects(&top, "b");
    server.cli(&["DEL", "lock:b"]);
    top.until("it is gone", |screen| names(screen) == ["c", "a"]);
    selects(&top, "c");
}

#[test]
fn one_lock_is_inspected_with_its_line_in_order() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("orders:42").unwrap();
    let waiting: Vec<_> = (0..2).map(|_| waiter(&server, &mgr, "orders:42")).collect();
    let line = mgr.lock_info("orders:42").unwrap().unwrap();
    let mut top = Pty::start(110, 40, &["top", "--url", &server.url(), "--interval", "100ms"]);
    top.until_shown("orders:42");
    top.press("\r");
    let screen = top.until_shown("2. ");
    for part in [guard.id().as_str(), &guard.fencing_token().to_string(), "since", "unless renewed"] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    let place = |at: usize| screen.find(&format!("{}. {}", at + 1, line.waiters()[at])).unwrap();
    assert!(place(0) < place(1));
    // It goes on being asked about.
    guard.release().unwrap().unwrap_released();
    let second = waiting.into_iter().map(|waiting| waiting.join().unwrap().unwrap());
    second.for_each(|guard| guard.release().unwrap().unwrap_released());
    top.until_shown("nobody holds it");
    top.press("\x1b");
    top.until_shown("no lock is held");
}

#[test]
fn of_several_nodes_each_tells_and_one_that_is_away_is_named() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(crate::kit::patient(nodes.urls()).quarantine(std::time::Duration::ZERO)).unwrap();
    let _guard = mgr.lock("orders:42").unwrap();
    let mut top = Pty::start(120, 40, &["top", "--url", &nodes.urls(), "--interval", "100ms"]);
    top.until_shown("orders:42");
    top.press("\r");
    let label = |node: usize| format!("127.0.0.1:{}: held by", nodes.server(node).port());
    top.until("all tell", |screen| (0..3).all(|node| screen.contains(&label(node))));
    nodes.kill(1);
    let away = format!("1 node without an answer: 127.0.0.1:{}", nodes.server(1).port());
    top.until_shown(&away);
}

#[test]
fn every_size_shows_what_goes_in() {
    let server = RedisServer::start();
    take(&server, &["orders:1", "orders:2"]);
    let mut top = top(&server);
    top.until_shown("orders:1");
    for (columns, lines) in [(80, 24), (10, 3), (200, 60), (1, 1), (20, 5), (2, 40), (120, 2), (40, 12)] {
        top.resize(columns, lines);
        let expected: String = "orders:2".chars().take(columns.into()).collect();
        let expected = if columns < 8 { "…" } else { &expected };
        top.until(&format!("drawn at {columns}x{lines}"), |screen| screen.contains(expected));
        // Whatever opens has to get along too.
        for keys in ["?", "\r", "f", "/"] {
            top.press(keys);
            top.press("\x0c");
            top.press(if keys == "f" { "n" } else { "\r" });
        }
    }
    top.resize(80, 24);
    top.until("all is back", |screen| screen.contains("orders:1") && screen.contains("q quit"));
    top.press("q");
    assert_eq!(top.end(), 0);
}

#[test]
fn a_key_that_comes_with_a_new_size_is_heard() {
    let server = RedisServer::start();
    let mut top = top(&server);
    top.until_shown("no lock is held");
    for round in 0..50 {
        top.resize(80 + round, 24);
        top.press("p");
        top.until_shown("PAUSED");
        top.press("p");
        top.resize(81 + round, 24);
        top.until("drawn anew", |screen| screen.contains("every") && !screen.contains("PAUSED"));
    }
}

#[test]
fn a_server_that_is_killed_is_told_and_its_return_too() {
    let server = RedisServer::start();
    take(&server, &["orders:1"]);
    let top = top(&server);
    top.until_shown("1 lock,");
    server.kill();
    let screen = top.until_shown("NO ANSWER for");
    assert!(screen.contains("OLD") && names(&screen) == ["orders:1"], "{screen}");
    top.until("time goes by", |screen| screen.contains("NO ANSWER for") && !screen.contains(" 0s"));
    server.restart_empty();
    take(&server, &["orders:2"]);
    let screen = top.until_shown("back, after");
    assert!(!screen.contains("NO ANSWER"), "{screen}");
    top.until("the new lock is there", |screen| names(screen) == ["orders:2"]);
}

#[test]
fn a_server_that_is_not_there_at_the_start_is_waited_for() {
    let server = RedisServer::start();
    server.kill();
    let top = top(&server);
    let screen = top.until_shown("NO ANSWER for");
    assert!(screen.contains("nothing is known yet"), "{screen}");
    server.restart();
    take(&server, &["orders:1"]);
    top.until("it is there", |screen| names(screen) == ["orders:1"]);
}

#[test]
fn keys_work_while_the_server_hangs() {
    let server = RedisServer::start();
    take(&server, &["orders:1", "mail"]);
    let mut top = Pty::start(100, 30, &["top", "--url", &server.url(), "--interval", "100ms", "--timeout", "60s"]);
    top.until_shown("orders:1");
    server.stop();
    top.until_gone("looked 0s ago");
    top.press("?");
    top.until_shown("hand-overs per second, as far as they are seen");
    top.press("?");
    top.press("/mail");
    top.until("the filter works", |screen| names(screen) == ["mail"]);
    top.press("\r");
    top.until_gone("filter:");
    top.press("q");
    assert_eq!(top.end(), 0);
    server.cont();
}

#[test]
fn pausing_stops_the_questions_and_resuming_asks_at_once() {
    let server = RedisServer::start();
    take(&server, &["orders:1"]);
    let mut top = Pty::start(100, 24, &["top", "--url", &server.url(), "--interval", "300s"]);
    top.until_shown("orders:1");
    top.press("p");
    top.until_shown("PAUSED");
    take(&server, &["mail"]);
    top.press("p");
    top.until_shown("mail");
    assert!(!top.screen().contains("PAUSED"));
    top.press("-");
    top.until_shown("every 60s");
    top.press("-----");
    top.until_shown("every 1.0s");
    // A shorter interval counts from now on.
    take(&server, &["third"]);
    top.until_shown("third");
}

#[test]
fn names_of_others_do_not_command_the_terminal() {
    let server = RedisServer::start();
    take(&server, &["\x1b]0;owned\x07\x1b[2J", "漢字漢字", "a\u{202e}b"]);
    server.cli(&["SET", "lock:x", "\x1b[?1049l\r\n", "PX", "600000"]);
    let mut top = Pty::start(160, 24, &["top", "--url", &server.url(), "--interval", "100ms"]);
    let screen = top.until_shown("4 locks");
    for part in ["\\u{1b}]0;owned\\u{7}\\u{1b}", "漢字漢字", "a\\u{202e}b", "\\u{1b}[?1049l"] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    top.press("sss\x1b[F\r");
    top.until_shown("identifier");
    let transcript = top.transcript();
    assert!(!transcript.contains("\x1b]") && !transcript.contains("\x1b[?1049l") && !transcript.contains('\u{202e}'));
}

#[test]
fn colours_are_of_the_sixteen_and_none_where_none_are_wanted() {
    let server = RedisServer::start();
    take(&server, &["orders:1", "mail"]);
    let colours = |env: &[(&str, &str)]| {
        let top = Pty::start_with(100, 24, &["top", "--url", &server.url()], env);
        top.until_shown("orders:1");
        top.look(|screen| {
            let cells = (0..24).flat_map(|row| (0..100).map(move |column| (row, column)));
            let cells = cells.filter_map(|(row, column)| screen.cell(row, column));
            let colours = cells.flat_map(|cell| [cell.fgcolor(), cell.bgcolor()]);
            colours.filter(|colour| *colour != vt100::Color::Default).collect::<Vec<_>>()
        })
    };
    let seen = colours(&[]);
    assert!(!seen.is_empty() && seen.iter().all(|colour| matches!(colour, vt100::Color::Idx(0..16))), "{seen:?}");
    assert_eq!(colours(&[("NO_COLOR", "1")]), []);
    assert!(!colours(&[("NO_COLOR", "")]).is_empty());
}

#[test]
fn thousands_of_locks_are_shown_in_part_and_counted_in_full() {
    let server = RedisServer::start();
    const MAKE: &str =
        "for n = 1, 20000 do redis.call('SET', string.format('lock:n%05d', n), 'holder-' .. n, 'PX', 600000) end";
    server.cli(&["EVAL", MAKE, "0"]);
    let mut top = Pty::start(80, 24, &["top", "--url", &server.url(), "--interval", "100ms", "--timeout", "60s"]);
    top.until_shown("20000 locks");
    top.press("\x1b[F");
    top.until("the last is selected", |screen| top.selected().starts_with("n20000 ") && !screen.contains("n00001 "));
    top.press("/12345");
    top.until("one is left", |screen| names(screen) == ["n12345"]);
}
