//! Tests of the screen: what can be read on it, at any size.

use ratatui::{Terminal, backend::TestBackend, buffer::Buffer, style::Color};

use super::*;
use crate::{
    clock,
    top::{
        detail::Detail,
        feed::Told,
        history::{Picture, sample},
        keys::{Action, Step},
        rows::Row,
    },
};

const SECOND: Duration = Duration::from_secs(1);

fn picture(rows: Vec<Row>) -> Picture {
    let waiting = rows.iter().map(|row| row.waiting).sum();
    Picture { rows, waiting, rate: 2.5, at: clock::now(), took: 3 * SECOND / 1000, silent: Vec::new() }
}

fn held(name: &str, part: f32) -> Row {
    Row {
        host: Some("web-1".into()),
        pid: Some(4711),
        age: Some(90 * SECOND),
        left: Some(8 * SECOND),
        part: Some(part),
        closest: Some(part / 2.0),
        waiting: 3,
        token: Some(1_763_712_345_678_901),
        rate: 0.25,
        ..sample(name, "web-1|pid4711|…")
    }
}

fn model(rows: Vec<Row>) -> Model {
    let mut model = Model::new("10.0.0.5:6379".into(), "*".into(), SECOND);
    model.see(picture(rows));
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
    let now = model.picture.as_ref().map_or_else(clock::now, |picture| picture.at + 2 * SECOND);
    lines(model, width, height, now).join("\n")
}

#[test]
fn everything_known_of_a_lock_stands_in_its_line() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    let screen = screen(&mut model, 120, 20);
    for part in ["10.0.0.5:6379", "every 1.0s", "1 lock, 3 waiters, 2.5 hand-overs/s, looked 2s ago in 3ms", "q quit"] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    let line = screen.lines().find(|line| line.contains("orders:42")).unwrap();
    for part in ["web-1 (pid 4711)", "90s", "████", "8.0s", " 3 ", "0.25", "40%", "1763712345678901"] {
        assert!(line.contains(part), "{part}\n{line}");
    }
    assert!(screen.contains("WAIT▼"), "{screen}");
}

#[test]
fn what_is_unknown_or_not_agreed_is_told_as_such() {
    let foreign = Row { certain: false, ..sample("mail", "some\u{1b}[2Jbody") };
    let screen = screen(&mut model(vec![foreign]), 100, 10);
    assert!(screen.contains("? some\\u{1b}[2J") && screen.contains("no expiry"), "{screen}");
    assert!(!screen.contains('\u{1b}'));
}

#[test]
fn no_size_is_too_small_and_no_name_too_odd() {
    let names = ["漢字漢字漢字漢字", "e\u{301}\u{301}\u{301}", "👩\u{200d}🚀 \u{202e}", "", "a\u{fe0f}\t\r\n", "ﷺﷺﷺ"];
    let long = "n".repeat(1_000);
    let rows = || names.iter().chain([&long.as_str()]).map(|name| held(name, 0.1)).collect::<Vec<_>>();
    let mut inspected = model(rows());
    inspected.act(Action::Inspect);
    let mut asked = model(rows());
    asked.act(Action::Release);
    let mut troubled = model(rows());
    troubled.miss("away ".repeat(50), clock::now());
    let mut filtered = model(rows());
    filtered.act(Action::Filter);
    filtered.paste(&"漢".repeat(200));
    let mut helped = model(rows());
    helped.act(Action::Help);
    let empty = Model::new("here".into(), "*".into(), SECOND);
    for mut model in [model(rows()), inspected, asked, troubled, filtered, helped, empty] {
        for (width, height) in [(1, 1), (2, 2), (10, 3), (3, 10), (20, 6), (80, 4), (300, 1), (500, 100), (79, 24)] {
            screen(&mut model, width, height);
        }
        for size in 1..60 {
            screen(&mut model, size, size / 2 + 1);
        }
    }
}

#[test]
fn the_smallest_screens_show_a_lock() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    for (width, height) in [(10, 3), (10, 1), (12, 2), (30, 5), (80, 24)] {
        assert!(screen(&mut model, width, height).contains("orders:42"), "{width}x{height}");
    }
}

#[test]
fn only_rows_in_sight_are_drawn_and_the_selected_one_always_is() {
    let rows = (0..100_000).map(|n| held(&format!("n{n:06}"), 0.8)).collect();
    let mut model = model(rows);
    assert!(screen(&mut model, 80, 24).contains("n000000"));
    model.act(Action::Move(Step::End));
    let screen = screen(&mut model, 80, 24);
    assert!(screen.contains("n099999") && !screen.contains("n000000"), "{screen}");
    assert!(screen.contains("100000 locks"), "{screen}");
}

#[test]
fn trouble_is_told_in_red_over_the_old_picture_and_its_end_too() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    let start = clock::now();
    model.miss("could not ask 10.0.0.5:6379: connection refused".into(), start);
    let now = start + 7 * SECOND;
    let text = lines(&mut model, 80, 24, now).join("\n");
    for part in ["NO ANSWER for 7s", "connection refused", "OLD", "orders:42"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let buffer = buffer(&mut model, 80, 24, now, true);
    let line = lines(&mut model, 80, 24, now).iter().position(|line| line.contains("NO ANSWER")).unwrap();
    assert_eq!(buffer[(3, line as u16)].fg, Color::Red);
    assert!(lines(&mut model, 10, 3, now).concat().contains("NO ANSWER"));
    model.see(Picture { at: now, ..picture(vec![]) });
    assert!(lines(&mut model, 80, 24, now + SECOND).concat().contains("back, after 7s"));
    assert!(!lines(&mut model, 80, 24, now + 60 * SECOND).concat().contains("back"));
}

#[test]
fn a_node_that_is_silent_is_told() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.see(Picture { silent: vec!["10.0.0.6:6379: connection refused".into()], ..picture(vec![]) });
    assert!(screen(&mut model, 80, 24).contains("1 node without an answer: 10.0.0.6:6379: connection refused"));
}

#[test]
fn colours_warn_of_what_comes_close_and_go_where_none_are_wanted() {
    for (part, colour) in [(0.8, Color::Green), (0.4, Color::Yellow), (0.1, Color::Red)] {
        let mut model = model(vec![held("a", part), held("b", part)]);
        for (colours, expected) in [(true, colour), (false, Color::Reset)] {
            let buffer = buffer(&mut model, 80, 10, clock::now(), colours);
            let bar = buffer.content().iter().filter(|cell| "█▏▎▍▌▋▊▉".contains(cell.symbol()));
            let seen: Vec<_> = bar.map(|cell| cell.fg).collect();
            assert!(!seen.is_empty() && seen.iter().all(|colour| *colour == expected), "{part} {seen:?}");
            let plain = |cell: &ratatui::buffer::Cell| cell.fg == Color::Reset && cell.bg == Color::Reset;
            assert!(colours || buffer.content().iter().all(plain));
        }
    }
}

#[test]
fn a_question_keeps_its_answers_in_sight() {
    for (name, width, height) in
        [("orders:42".to_owned(), 80, 24), ("n".repeat(1_000), 80, 24), ("n".repeat(99), 10, 3)]
    {
        let mut model = model(vec![held(&name, 0.8)]);
        model.act(Action::Release);
        let screen = screen(&mut model, width, height);
        assert!(screen.contains("Release") && screen.contains("y/n"), "{width}x{height}\n{screen}");
    }
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.act(Action::Release);
    assert!(screen(&mut model, 80, 24).contains("Release orders:42, held by web-1 (pid 4711)? y/n"));
}

#[test]
fn a_lock_in_full_has_its_line_in_order_and_its_nodes() {
    let mut model = model(vec![held("orders:42", 0.8)]);
    model.act(Action::Inspect);
    assert!(screen(&mut model, 80, 24).contains("asking…"));
    let detail = Detail {
        id: "web-1|pid4711|tid9|ts1|uuid".into(),
        who: "web-1 (pid 4711)".into(),
        thread: Some(9),
        asked: Some("2025-11-21T08:05:45Z".into()),
        since: Some("2025-11-21T08:05:46Z".into()),
        age: Some(90 * SECOND),
        left: Some(8 * SECOND),
        token: Some(77),
        certain: false,
        waiting: 50,
        waiters: (0..40).map(|n| format!("web-{n} (pid 1, thread 1)")).collect(),
        nodes: vec!["a:1: free".into(), "b:1: held".into()],
    };
    let tell = |model: &mut Model, answer| {
        model.hear(Told::Inspected { name: "orders:42".into(), answer }, clock::now());
    };
    tell(&mut model, Ok(Some(detail)));
    let whole = screen(&mut model, 100, 80);
    for part in ["web-1 (pid 4711), thread 9", "too few nodes agree", "08:05:46Z, for 90s", "8.0s unless renewed", "77"]
        .into_iter()
        .chain(["web-1|pid4711|tid9|ts1|uuid", "a:1: free", "b:1: held", "50 waiters", "and 10 more"])
    {
        assert!(whole.contains(part), "{part}\n{whole}");
    }
    let place = |text: &str| whole.find(text).unwrap();
    assert!(place("1. web-0 ") < place("2. web-1 ") && place("2. web-1 ") < place("40. web-39 "));
    // It scrolls to its end and no further.
    model.act(Action::Move(Step::End));
    assert!(screen(&mut model, 80, 24).contains("and 10 more"));
    model.act(Action::Move(Step::Up));
    model.act(Action::Move(Step::Up));
    assert!(!screen(&mut model, 80, 24).contains("and 10 more"));
    tell(&mut model, Ok(None));
    assert!(screen(&mut model, 80, 24).contains("nobody holds it"));
    tell(&mut model, Err("away".into()));
    assert!(screen(&mut model, 80, 24).contains("away"));
}

#[test]
fn lines_are_shared_out_by_need() {
    assert_eq!(heights(24, 0, 0), Heights { head: 2, trouble: 0, table: 21, foot: 1 });
    assert_eq!(heights(24, 9, 2), Heights { head: 2, trouble: 3, table: 17, foot: 2 });
    assert_eq!(heights(3, 0, 0), Heights { head: 1, trouble: 0, table: 2, foot: 0 });
    assert_eq!(heights(3, 2, 0), Heights { head: 0, trouble: 1, table: 2, foot: 0 });
    assert_eq!(heights(1, 2, 0), Heights { head: 0, trouble: 0, table: 1, foot: 0 });
    for (all, trouble, asked) in (0..40).flat_map(|all| (0..5).flat_map(move |t| (0..5).map(move |a| (all, t, a)))) {
        let Heights { head, trouble, table, foot } = heights(all, trouble, asked);
        assert_eq!(head + trouble + table + foot, all);
    }
}
