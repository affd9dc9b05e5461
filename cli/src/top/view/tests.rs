//! Tests of the drawn screen, at many sizes.

use ratatui::{Terminal, backend::TestBackend, buffer::Buffer, style::Color};

use super::*;
use crate::{
    clock,
    top::{
        detail::LockDetail,
        history::{TableData, test_row},
        keys::{Action, Movement},
        poller::QueryResult,
        rows::Row,
    },
};

const SECOND: Duration = Duration::from_secs(1);

fn table_data(rows: Vec<Row>) -> TableData {
    let waiting = rows.iter().map(|row| row.waiting).sum();
    TableData {
        rows,
        waiting,
        rate: 2.5,
        at: clock::now(),
        poll_time: 3 * SECOND / 1000,
        silent_nodes: Vec::new(),
    }
}

fn held(name: &str, fraction: f32) -> Row {
    Row {
        host: Some("web-1".into()),
        pid: Some(4711),
        age: Some(90 * SECOND),
        left: Some(8 * SECOND),
        fraction_left: Some(fraction),
        closest_call: Some(fraction / 2.0),
        waiting: 3,
        token: Some(1_763_712_345_678_901),
        rate: 0.25,
        ..test_row(name, "web-1|pid4711|…")
    }
}

fn model(rows: Vec<Row>) -> Model {
    let mut model = Model::new("10.0.0.5:6379".into(), "*".into(), SECOND);
    model.on_snapshot(table_data(rows));
    model
}

fn buffer(model: &mut Model, width: u16, height: u16, now: Instant, colours: bool) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model, now, Palette::with(colours))).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(model: &mut Model, width: u16, height: u16, now: Instant) -> Vec<String> {
    let buffer = buffer(model, width, height, now, true);
    (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>()).collect()
}

fn screen(model: &mut Model, width: u16, height: u16) -> String {
    let now = model.data.as_ref().map_or_else(clock::now, |picture| picture.at + 2 * SECOND);
    lines(model, width, height, now).join("\n")
}

#[test]
fn row_shows_all_facts_about_lock() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    let screen = screen(&mut model, 120, 20);
    for part in [
        "10.0.0.5:6379",
        "every 1s",
        "1 lock, 3 waiters, 2.5 hand-overs/s, polled 2s ago in 3ms",
        "q quit",
    ] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    let line = screen.lines().find(|line| line.contains("orders:42")).unwrap();
    for part in ["web-1 (pid 4711)", "90s", "████", "8s", " 3 ", "0.25", "40%", "1763712345678901"]
    {
        assert!(line.contains(part), "{part}\n{line}");
    }
    assert!(screen.contains("WAIT▼"), "{screen}");
}

#[test]
fn group_and_kept_lock_are_marked() {
    let group =
        Row { group: Some("3 permits".into()), members: vec!["id".into(); 2], ..held("jobs", 0.8) };
    let kept = Row { is_kept: true, ..held("nightly", 0.8) };
    let screen = screen(&mut model(vec![group, kept]), 140, 10);
    assert!(screen.contains("3 permits: web-1 (pid 4711) +1"), "{screen}");
    let line = screen.lines().find(|line| line.starts_with("nightly")).unwrap();
    assert!(line.contains("kept 8s") && !line.contains('█'), "{line}");
}

#[test]
fn uncertain_holder_and_missing_expiry_are_marked() {
    let foreign = Row { certain: false, ..test_row("mail", "some\u{1b}[2Jbody") };
    let screen = screen(&mut model(vec![foreign]), 100, 10);
    assert!(screen.contains("? some\\u{1b}[2J") && screen.contains("no expiry"), "{screen}");
    assert!(!screen.contains('\u{1b}'));
}

#[test]
fn every_size_and_name_can_be_drawn() {
    let names = [
        "漢字漢字漢字漢字",
        "e\u{301}\u{301}\u{301}",
        "👩\u{200d}🚀 \u{202e}",
        "",
        "a\u{fe0f}\t\r\n",
        "ﷺﷺﷺ",
    ];
    let long = "n".repeat(1_000);
    let rows =
        || names.iter().chain([&long.as_str()]).map(|name| held(name, 0.1)).collect::<Vec<_>>();
    let mut inspected = model(rows());
    inspected.on_action(Action::Inspect);
    let mut with_question = model(rows());
    with_question.on_action(Action::Release);
    let mut with_outage = model(rows());
    with_outage.on_poll_error("refused ".repeat(50), clock::now());
    let mut with_filter = model(rows());
    with_filter.on_action(Action::Filter);
    with_filter.paste(&"漢".repeat(200));
    let mut with_help = model(rows());
    with_help.on_action(Action::Help);
    let empty = Model::new("here".into(), "*".into(), SECOND);
    for mut model in
        [model(rows()), inspected, with_question, with_outage, with_filter, with_help, empty]
    {
        for (width, height) in
            [(1, 1), (2, 2), (10, 3), (3, 10), (20, 6), (80, 4), (300, 1), (500, 100), (79, 24)]
        {
            screen(&mut model, width, height);
        }
        for size in 1..60 {
            screen(&mut model, size, size / 2 + 1);
        }
    }
}

#[test]
fn help_is_complete_at_usual_sizes() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.on_action(Action::Help);
    for (width, height) in
        [(80, 24), (120, 24), (120, 30), (160, 24), (160, 15), (160, 50), (64, 24), (50, 40)]
    {
        let screen = screen(&mut model, width, height);
        // Each line between the frame, so that a text that continues in the next line is found.
        let inner = screen.lines().filter_map(|line| line.split('│').nth(1));
        let text = inner.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
        for part in [
            "↑ ↓ k j move",
            "q Esc ^C quit",
            "f F force the release of a lock, after a question",
            "LEFT time until the lock expires",
            "TOKEN the fencing token of the holder",
            "? before a holder: no quorum of nodes agrees",
            "- unknown, or none",
        ] {
            let is_shown = text.contains(part) || width < 64;
            assert!(is_shown, "{part:?} is not shown at {width}x{height}:\n{screen}");
        }
        for end in ["of its ttl", "a renewal was late", "question", "Esc clears", "or none"] {
            assert!(text.contains(end), "{end:?} is not shown at {width}x{height}:\n{screen}");
        }
        assert!(!text.contains('…'), "{screen}");
    }
}

#[test]
fn smallest_screens_show_a_lock() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    for (width, height) in [(10, 3), (10, 1), (12, 2), (30, 5), (80, 24)] {
        assert!(screen(&mut model, width, height).contains("orders:42"), "{width}x{height}");
    }
}

#[test]
fn visible_rows_include_selected_one() {
    let rows = (0..100_000).map(|n| held(&format!("n{n:06}"), 0.8)).collect();
    let mut model = model(rows);
    assert!(screen(&mut model, 80, 24).contains("n000000"));
    model.on_action(Action::Move(Movement::End));
    let screen = screen(&mut model, 80, 24);
    assert!(screen.contains("n099999") && !screen.contains("n000000"), "{screen}");
    assert!(screen.contains("100000 locks"), "{screen}");
}

#[test]
fn outage_and_recovery_are_reported() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    let start = clock::now();
    model.on_poll_error("could not ask 10.0.0.5:6379: connection refused".into(), start);
    let now = start + 7 * SECOND;
    let text = lines(&mut model, 80, 24, now).join("\n");
    for part in ["NO REPLY for 7s", "connection refused", "OLD", "orders:42"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let buffer = buffer(&mut model, 80, 24, now, true);
    let line =
        lines(&mut model, 80, 24, now).iter().position(|line| line.contains("NO REPLY")).unwrap();
    assert_eq!(buffer[(3, line as u16)].fg, Color::Red);
    assert!(lines(&mut model, 10, 3, now).concat().contains("NO REPLY"));
    model.on_snapshot(TableData { at: now, ..table_data(vec![]) });
    assert!(lines(&mut model, 80, 24, now + SECOND).concat().contains("back after 7s"));
    assert!(!lines(&mut model, 80, 24, now + 60 * SECOND).concat().contains("back"));
}

#[test]
fn silent_node_is_reported() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.on_snapshot(TableData {
        silent_nodes: vec!["10.0.0.6:6379: connection refused".into()],
        ..table_data(vec![])
    });
    assert!(
        screen(&mut model, 80, 24)
            .contains("1 node without a reply: 10.0.0.6:6379: connection refused")
    );
}

#[test]
fn colours_show_time_left_and_can_be_turned_off() {
    for (part, colour) in [(0.8, Color::Green), (0.4, Color::Yellow), (0.1, Color::Red)] {
        let mut model = model(vec![held("a", part), held("b", part)]);
        for (colours, expected) in [(true, colour), (false, Color::Reset)] {
            let buffer = buffer(&mut model, 80, 10, clock::now(), colours);
            let bar = buffer.content().iter().filter(|cell| "█▏▎▍▌▋▊▉".contains(cell.symbol()));
            let seen: Vec<_> = bar.map(|cell| cell.fg).collect();
            assert!(
                !seen.is_empty() && seen.iter().all(|colour| *colour == expected),
                "{part} {seen:?}"
            );
            let plain =
                |cell: &ratatui::buffer::Cell| cell.fg == Color::Reset && cell.bg == Color::Reset;
            assert!(colours || buffer.content().iter().all(plain));
        }
    }
}

#[test]
fn question_always_shows_its_answers() {
    for (name, width, height) in
        [("orders:42".to_owned(), 80, 24), ("n".repeat(1_000), 80, 24), ("n".repeat(99), 10, 3)]
    {
        let mut model = model(vec![held(&name, 0.8)]);
        model.on_action(Action::Release);
        let screen = screen(&mut model, width, height);
        assert!(screen.contains("Release") && screen.contains("y/n"), "{width}x{height}\n{screen}");
    }
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.on_action(Action::Release);
    assert!(
        screen(&mut model, 80, 24).contains("Release orders:42, held by web-1 (pid 4711)? y/n")
    );
}

#[test]
fn details_wrap_and_scroll() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.on_action(Action::Inspect);
    assert!(screen(&mut model, 80, 24).contains("querying…"));
    let waiters: String = (1..=40).map(|n| format!("{n}. {}\n", "web ".repeat(20))).collect();
    let page = format!("holder  web-1/4711\n\n{waiters}and 10 more\n");
    let detail = LockDetail { ids: Vec::new(), holder: "web-1 (pid 4711)".into(), page };
    let set_result = |model: &mut Model, result| {
        model.on_result(QueryResult::Inspected { name: "orders:42".into(), result }, clock::now());
    };
    set_result(&mut model, Ok(Some(detail.into())));
    let all = screen(&mut model, 80, 100);
    let line_of = |text: &str| all.lines().position(|line| line.contains(text)).unwrap();
    assert_eq!(line_of("1. web"), line_of("holder  web-1/4711") + 2, "an empty line stays");
    assert_eq!(line_of("2. web"), line_of("1. web") + 2, "each takes two lines");
    assert!(line_of("2. web") < line_of("40. web") && line_of("40. web") < line_of("and 10 more"));
    // Scrolling stops at the end.
    model.on_action(Action::Move(Movement::End));
    assert!(screen(&mut model, 80, 24).contains("and 10 more"));
    model.on_action(Action::Move(Movement::Up));
    model.on_action(Action::Move(Movement::Up));
    assert!(!screen(&mut model, 80, 24).contains("and 10 more"));
    set_result(&mut model, Ok(None));
    assert!(screen(&mut model, 80, 24).contains("not held"));
    set_result(&mut model, Err("timed out".into()));
    assert!(screen(&mut model, 80, 24).contains("timed out"));
}

#[test]
fn heights_add_up_at_every_size() {
    assert_eq!(heights(24, 0, 0), Heights { head: 2, alert: 0, table: 21, foot: 1 });
    assert_eq!(heights(24, 9, 2), Heights { head: 2, alert: 3, table: 17, foot: 2 });
    assert_eq!(heights(3, 0, 0), Heights { head: 1, alert: 0, table: 2, foot: 0 });
    assert_eq!(heights(3, 2, 0), Heights { head: 0, alert: 1, table: 2, foot: 0 });
    assert_eq!(heights(1, 2, 0), Heights { head: 0, alert: 0, table: 1, foot: 0 });
    for (all, alert, footer) in
        (0..40).flat_map(|all| (0..5).flat_map(move |t| (0..5).map(move |a| (all, t, a))))
    {
        let Heights { head, alert, table, foot } = heights(all, alert, footer);
        assert_eq!(head + alert + table + foot, all);
    }
}
