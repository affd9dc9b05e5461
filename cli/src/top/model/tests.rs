//! Tests of the model: looks, keys and answers in, selection, questions and orders out.

use super::*;
use crate::{clock, top::history::sample};

const SECOND: Duration = Duration::from_secs(1);

fn model(names: &[&str]) -> Model {
    let mut model = Model::new("here".into(), "*".into(), SECOND);
    model.sorting.by = Column::Name;
    show(&mut model, names);
    model
}

fn show(model: &mut Model, names: &[&str]) -> Option<Order> {
    let rows = names.iter().map(|name| sample(name, &format!("id of {name}"))).collect();
    model.see(Picture { rows, waiting: 0, rate: 0.0, at: clock::now(), took: SECOND, silent: Vec::new() })
}

fn chosen(model: &Model) -> &str {
    model.row(model.selected()).map_or("", |row| &row.name)
}

fn type_text(model: &mut Model, text: &str) {
    model.act(Action::Filter);
    text.chars().for_each(|letter| assert_eq!(model.act(Action::Type(letter)), None));
}

#[test]
fn the_selection_stays_with_its_lock_when_rows_move() {
    let mut model = model(&["a", "c", "e"]);
    model.act(Action::Move(Step::Down));
    assert_eq!(chosen(&model), "c");
    show(&mut model, &["a", "b", "bb", "c", "e"]);
    assert_eq!((chosen(&model), model.selected()), ("c", 3));
    model.act(Action::Reverse);
    assert_eq!((chosen(&model), model.selected()), ("c", 1));
    show(&mut model, &["a", "b", "e"]);
    assert_eq!(chosen(&model), "b", "the place is kept when the lock is gone");
    show(&mut model, &[]);
    assert_eq!((chosen(&model), model.selected()), ("", 0));
    show(&mut model, &["x", "y"]);
    assert_eq!(chosen(&model), "y");
}

#[test]
fn steps_stay_within_the_rows_and_the_window_follows() {
    let names: Vec<String> = (0..100).map(|n| format!("n{n:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut model = model(&names);
    assert_eq!(model.window(10), 0..10);
    for (step, selected, window) in [
        (Step::Up, 0, 0..10),
        (Step::Down, 1, 0..10),
        (Step::PageDown, 11, 2..12),
        (Step::End, 99, 90..100),
        (Step::Down, 99, 90..100),
        (Step::PageUp, 89, 89..99),
        (Step::Home, 0, 0..10),
    ] {
        model.act(Action::Move(step));
        assert_eq!((model.selected(), model.window(10)), (selected, window), "{step:?}");
    }
    model.act(Action::Move(Step::End));
    for (height, window) in [(1, 99..100), (0, 99..99), (1_000, 0..100), (3, 97..100)] {
        assert_eq!(model.window(height), window);
    }
    show(&mut model, &names[..5]);
    assert_eq!(model.window(3), 2..5);
    show(&mut model, &[]);
    assert_eq!(model.window(3), 0..0);
}

#[test]
fn a_filter_is_applied_while_it_is_written_and_cleared_by_escape() {
    let mut model = model(&["orders:1", "orders:2", "mail"]);
    type_text(&mut model, "rs:2");
    assert_eq!((model.len(), chosen(&model)), (1, "orders:2"));
    model.act(Action::RubOut);
    assert_eq!((model.len(), chosen(&model)), (2, "orders:2"));
    model.act(Action::Accept);
    assert_eq!((model.mode, model.filter.as_str()), (Mode::Browse, "rs:"));
    show(&mut model, &["mail", "orders:3"]);
    assert_eq!(model.len(), 1);
    assert_eq!(model.act(Action::Back), None, "escape clears first");
    assert_eq!((model.len(), model.filter.as_str()), (2, ""));
    assert_eq!(model.act(Action::Back), Some(Order::Quit(Exit::Fine)), "and then ends");
    type_text(&mut model, "x");
    assert_eq!(model.act(Action::Back), None);
    assert_eq!((model.mode, model.filter.as_str()), (Mode::Browse, ""));
}

#[test]
fn pasted_text_is_text_and_never_keys() {
    let mut model = model(&["a", "b"]);
    model.paste("q");
    model.act(Action::Release);
    model.paste("y");
    assert_eq!((model.mode, model.filter.as_str()), (Mode::Ask, ""));
    model.act(Action::No);
    model.act(Action::Filter);
    model.paste("b\u{1b}\ny");
    assert_eq!((model.filter.as_str(), model.len()), ("b", 1));
    model.paste(&"ü".repeat(5_000));
    assert!(model.filter.len() <= FILTER_MAX);
}

#[test]
fn only_a_yes_releases_and_only_from_the_holder_that_was_shown() {
    let mut model = model(&["a", "b"]);
    model.act(Action::Move(Step::Down));
    model.act(Action::Release);
    assert_eq!(model.question.as_ref().map(|question| question.name.as_str()), Some("b"));
    assert_eq!(model.act(Action::No), None);
    assert_eq!((model.mode, &model.question), (Mode::Browse, &None));
    assert_eq!(model.act(Action::Yes), None, "there is no question");
    model.act(Action::Release);
    // Meanwhile somebody else holds it, and the rows have moved.
    let rows = vec![sample("a", "new"), sample("b", "newer")];
    model.see(Picture { rows, waiting: 0, rate: 0.0, at: clock::now(), took: SECOND, silent: Vec::new() });
    let release = Order::Ask(Ask::Release { name: "b".into(), id: "id of b".into() });
    assert_eq!(model.act(Action::Yes), Some(release));
    assert_eq!((model.mode, &model.question), (Mode::Browse, &None));
}

#[test]
fn how_a_release_went_is_told_and_looked_at() {
    let mut model = model(&["a"]);
    for (answer, good, part) in [
        (Ok(Freed::Yes), true, "released a\\u{1b}"),
        (Ok(Freed::Gone), false, "no holder"),
        (Ok(Freed::Other("web-2 (pid 9)".into())), false, "web-2 (pid 9)"),
        (Err("away".into()), false, "could not release"),
    ] {
        let order = model.hear(Told::Released { name: "a\u{1b}".into(), answer }, clock::now());
        assert_eq!(order, Some(Order::LookNow));
        let notice = model.notice.clone().unwrap();
        assert!(notice.good == good && notice.text.contains(part), "{notice:?}");
    }
}

fn detail(id: &str) -> Detail {
    Detail {
        id: id.into(),
        who: id.into(),
        thread: None,
        asked: None,
        since: None,
        age: None,
        left: None,
        token: None,
        certain: true,
        waiting: 0,
        waiters: Vec::new(),
        nodes: Vec::new(),
    }
}

#[test]
fn a_lock_is_inspected_anew_at_each_look_and_never_twice_at_a_time() {
    let mut model = model(&["a", "b"]);
    let ask = || Some(Order::Ask(Ask::Inspect { name: "a".into() }));
    assert_eq!(model.act(Action::Inspect), ask());
    assert_eq!(show(&mut model, &["a", "b"]), None, "the first answer is not there yet");
    model.act(Action::Release);
    assert_eq!(model.mode, Mode::Inspect, "nobody is shown yet whom it could be taken from");
    let answer = Ok(Some(detail("one")));
    model.hear(Told::Inspected { name: "a".into(), answer }, clock::now());
    assert_eq!(show(&mut model, &["a", "b"]), ask());
    model.act(Action::Release);
    model.hear(Told::Inspected { name: "a".into(), answer: Ok(Some(detail("two"))) }, clock::now());
    assert_eq!(model.act(Action::Yes), Some(Order::Ask(Ask::Release { name: "a".into(), id: "one".into() })));
    assert_eq!(model.mode, Mode::Inspect);
    model.act(Action::Back);
    assert_eq!((model.mode, model.inspected.is_none()), (Mode::Browse, true));
    // A late answer about another lock is nobody's.
    model.act(Action::Inspect);
    model.hear(Told::Inspected { name: "b".into(), answer: Ok(None) }, clock::now());
    assert!(model.inspected.as_ref().is_some_and(|inspected| inspected.told.is_none()));
}

#[test]
fn nothing_can_be_asked_about_no_lock() {
    let mut model = model(&[]);
    assert_eq!((model.act(Action::Inspect), model.act(Action::Release)), (None, None));
    assert_eq!((model.mode, &model.question), (Mode::Browse, &None));
}

#[test]
fn trouble_is_dated_from_its_beginning_and_keeps_the_picture() {
    let mut model = model(&["a"]);
    let start = clock::now();
    model.miss("refused".into(), start);
    model.miss("timed out".into(), start + SECOND);
    assert_eq!(model.trouble, Some(Trouble { since: start, why: "timed out".into() }));
    assert_eq!(chosen(&model), "a");
    let at = start + 5 * SECOND;
    model.see(Picture { rows: Vec::new(), waiting: 0, rate: 0.0, at, took: SECOND, silent: Vec::new() });
    assert_eq!((&model.trouble, model.back), (&None, Some((at, 5 * SECOND))));
    model.miss("again".into(), at);
    assert_eq!(model.back, None);
}

#[test]
fn the_pace_changes_in_steps_and_pauses() {
    let mut model = model(&[]);
    let interval = |order| match order {
        Some(Order::Pace(pace)) => pace.interval,
        other => panic!("{other:?}"),
    };
    assert_eq!(interval(model.act(Action::Slower)), 2 * SECOND);
    assert_eq!(interval(model.act(Action::Faster)), SECOND);
    for _ in 0..20 {
        model.act(Action::Faster);
    }
    assert_eq!(model.pace.interval, INTERVALS[0]);
    model.pace.interval = 3 * SECOND;
    assert_eq!(interval(model.act(Action::Slower)), 5 * SECOND);
    model.pace.interval = 300 * SECOND;
    assert_eq!(interval(model.act(Action::Slower)), 300 * SECOND);
    assert_eq!(interval(model.act(Action::Faster)), 60 * SECOND);
    assert_eq!(model.act(Action::Pause), Some(Order::Pace(Pace { interval: 60 * SECOND, paused: true })));
    assert_eq!(model.act(Action::Pause), Some(Order::Pace(Pace { interval: 60 * SECOND, paused: false })));
}
