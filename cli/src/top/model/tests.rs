//! Tests of the model: polls, keys and query results in, selection, confirmation and effects out.

use super::*;
use crate::{clock, top::history::test_row};

const SECOND: Duration = Duration::from_secs(1);

fn model(names: &[&str]) -> Model {
    let mut model = Model::new("here".into(), "*".into(), SECOND);
    model.sorting.by = Column::Name;
    show(&mut model, names);
    model
}

fn show(model: &mut Model, names: &[&str]) -> Option<Effect> {
    let rows = names.iter().map(|name| test_row(name, &format!("id of {name}"))).collect();
    model.on_snapshot(TableData {
        rows,
        waiting: 0,
        rate: 0.0,
        at: clock::now(),
        poll_time: SECOND,
        silent_nodes: Vec::new(),
    })
}

fn selected_name(model: &Model) -> &str {
    model.row(model.selected()).map_or("", |row| &row.name)
}

fn type_text(model: &mut Model, text: &str) {
    model.on_action(Action::Filter);
    text.chars().for_each(|letter| assert_eq!(model.on_action(Action::Type(letter)), None));
}

#[test]
fn selection_follows_lock_when_rows_move() {
    let mut model = model(&["a", "c", "e"]);
    model.on_action(Action::Move(Movement::Down));
    assert_eq!(selected_name(&model), "c");
    show(&mut model, &["a", "b", "bb", "c", "e"]);
    assert_eq!((selected_name(&model), model.selected()), ("c", 3));
    model.on_action(Action::Reverse);
    assert_eq!((selected_name(&model), model.selected()), ("c", 1));
    show(&mut model, &["a", "b", "e"]);
    assert_eq!(selected_name(&model), "b", "the position is kept if the lock is gone");
    show(&mut model, &[]);
    assert_eq!((selected_name(&model), model.selected()), ("", 0));
    show(&mut model, &["x", "y"]);
    assert_eq!(selected_name(&model), "y");
}

#[test]
fn movements_stay_within_rows_and_window_follows() {
    let names: Vec<String> = (0..100).map(|n| format!("n{n:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut model = model(&names);
    assert_eq!(model.window(10), 0..10);
    for (movement, selected, window) in [
        (Movement::Up, 0, 0..10),
        (Movement::Down, 1, 0..10),
        (Movement::PageDown, 11, 2..12),
        (Movement::End, 99, 90..100),
        (Movement::Down, 99, 90..100),
        (Movement::PageUp, 89, 89..99),
        (Movement::Home, 0, 0..10),
    ] {
        model.on_action(Action::Move(movement));
        assert_eq!((model.selected(), model.window(10)), (selected, window), "{movement:?}");
    }
    model.on_action(Action::Move(Movement::End));
    for (height, window) in [(1, 99..100), (0, 99..99), (1_000, 0..100), (3, 97..100)] {
        assert_eq!(model.window(height), window);
    }
    show(&mut model, &names[..5]);
    assert_eq!(model.window(3), 2..5);
    show(&mut model, &[]);
    assert_eq!(model.window(3), 0..0);
}

#[test]
fn filter_applies_while_typed_and_is_cleared_by_escape() {
    let mut model = model(&["orders:1", "orders:2", "mail"]);
    type_text(&mut model, "rs:2");
    assert_eq!((model.len(), selected_name(&model)), (1, "orders:2"));
    model.on_action(Action::Backspace);
    assert_eq!((model.len(), selected_name(&model)), (2, "orders:2"));
    model.on_action(Action::Accept);
    assert_eq!((model.mode, model.filter.as_str()), (Mode::Browse, "rs:"));
    show(&mut model, &["mail", "orders:3"]);
    assert_eq!(model.len(), 1);
    assert_eq!(model.on_action(Action::Back), None, "Esc first clears the filter");
    assert_eq!((model.len(), model.filter.as_str()), (2, ""));
    assert_eq!(model.on_action(Action::Back), Some(Effect::Quit(Exit::Success)), "and then quits");
    type_text(&mut model, "x");
    assert_eq!(model.on_action(Action::Back), None);
    assert_eq!((model.mode, model.filter.as_str()), (Mode::Browse, ""));
}

#[test]
fn pasted_text_is_never_taken_for_keys() {
    let mut model = model(&["a", "b"]);
    model.paste("q");
    model.on_action(Action::Release);
    model.paste("y");
    assert_eq!((model.mode, model.filter.as_str()), (Mode::Confirm, ""));
    model.on_action(Action::No);
    model.on_action(Action::Filter);
    model.paste("b\u{1b}\ny");
    assert_eq!((model.filter.as_str(), model.len()), ("b", 1));
    model.paste(&"ü".repeat(5_000));
    assert!(model.filter.len() <= FILTER_BYTES_MAX);
}

#[test]
fn release_needs_confirmation_and_names_shown_holder() {
    let mut model = model(&["a", "b"]);
    model.on_action(Action::Move(Movement::Down));
    model.on_action(Action::Release);
    assert_eq!(
        model.confirmation.as_ref().map(|confirmation| confirmation.name.as_str()),
        Some("b")
    );
    assert_eq!(model.on_action(Action::No), None);
    assert_eq!((model.mode, &model.confirmation), (Mode::Browse, &None));
    assert_eq!(model.on_action(Action::Yes), None, "there is nothing to confirm");
    model.on_action(Action::Release);
    // Meanwhile another client acquires the lock, and the rows move.
    let rows = vec![test_row("a", "new"), test_row("b", "newer")];
    model.on_snapshot(TableData {
        rows,
        waiting: 0,
        rate: 0.0,
        at: clock::now(),
        poll_time: SECOND,
        silent_nodes: Vec::new(),
    });
    let release = Effect::Query(Query::Release { name: "b".into(), ids: vec!["id of b".into()] });
    assert_eq!(model.on_action(Action::Yes), Some(release));
    assert_eq!((model.mode, &model.confirmation), (Mode::Browse, &None));
}

#[test]
fn result_of_release_is_shown_and_polled() {
    let mut model = model(&["a"]);
    for (result, good, part) in [
        (Ok(ReleaseResult::Released), true, "released a\\u{1b}"),
        (Ok(ReleaseResult::Gone), false, "was not held any more"),
        (Ok(ReleaseResult::HeldByOther("web-2 (pid 9)".into())), false, "web-2 (pid 9)"),
        (Err("unreachable".into()), false, "could not release"),
    ] {
        let effect =
            model.on_result(QueryResult::Released { name: "a\u{1b}".into(), result }, clock::now());
        assert_eq!(effect, Some(Effect::PollNow));
        let status = model.status.clone().unwrap();
        assert!(status.good == good && status.text.contains(part), "{status:?}");
    }
}

fn detail(id: &str) -> LockDetail {
    LockDetail { ids: vec![id.into()], holder: id.into(), page: String::new() }
}

#[test]
fn open_lock_is_queried_at_each_poll_one_query_at_a_time() {
    let mut model = model(&["a", "b"]);
    let inspect = || Some(Effect::Query(Query::Inspect { name: "a".into() }));
    assert_eq!(model.on_action(Action::Inspect), inspect());
    assert_eq!(show(&mut model, &["a", "b"]), None, "the first query is pending");
    model.on_action(Action::Release);
    assert_eq!(model.mode, Mode::Inspect, "no holder is shown yet");
    let result = Ok(Some(detail("one").into()));
    model.on_result(QueryResult::Inspected { name: "a".into(), result }, clock::now());
    assert_eq!(show(&mut model, &["a", "b"]), inspect());
    model.on_action(Action::Release);
    model.on_result(
        QueryResult::Inspected { name: "a".into(), result: Ok(Some(detail("two").into())) },
        clock::now(),
    );
    assert_eq!(
        model.on_action(Action::Yes),
        Some(Effect::Query(Query::Release { name: "a".into(), ids: vec!["one".into()] }))
    );
    assert_eq!(model.mode, Mode::Inspect);
    model.on_action(Action::Back);
    assert_eq!((model.mode, model.inspected.is_none()), (Mode::Browse, true));
    // A late result about another lock is ignored.
    model.on_action(Action::Inspect);
    model.on_result(QueryResult::Inspected { name: "b".into(), result: Ok(None) }, clock::now());
    assert!(model.inspected.as_ref().is_some_and(|inspected| inspected.result.is_none()));
}

#[test]
fn actions_on_empty_table_do_nothing() {
    let mut model = model(&[]);
    assert_eq!((model.on_action(Action::Inspect), model.on_action(Action::Release)), (None, None));
    assert_eq!((model.mode, &model.confirmation), (Mode::Browse, &None));
}

#[test]
fn outage_starts_at_first_error_and_keeps_data() {
    let mut model = model(&["a"]);
    let start = clock::now();
    model.on_poll_error("refused".into(), start);
    model.on_poll_error("timed out".into(), start + SECOND);
    assert_eq!(model.outage, Some(Outage { since: start, why: "timed out".into() }));
    assert_eq!(selected_name(&model), "a");
    let at = start + 5 * SECOND;
    model.on_snapshot(TableData {
        rows: Vec::new(),
        waiting: 0,
        rate: 0.0,
        at,
        poll_time: SECOND,
        silent_nodes: Vec::new(),
    });
    assert_eq!((&model.outage, model.recovered), (&None, Some((at, 5 * SECOND))));
    model.on_poll_error("again".into(), at);
    assert_eq!(model.recovered, None);
}

#[test]
fn poll_interval_changes_in_steps_and_pauses() {
    let mut model = model(&[]);
    let interval = |effect| match effect {
        Some(Effect::SetRate(pace)) => pace.interval,
        other => panic!("{other:?}"),
    };
    assert_eq!(interval(model.on_action(Action::Slower)), 2 * SECOND);
    assert_eq!(interval(model.on_action(Action::Faster)), SECOND);
    for _ in 0..20 {
        model.on_action(Action::Faster);
    }
    assert_eq!(model.poll_rate.interval, INTERVALS[0]);
    model.poll_rate.interval = 3 * SECOND;
    assert_eq!(interval(model.on_action(Action::Slower)), 5 * SECOND);
    model.poll_rate.interval = 300 * SECOND;
    assert_eq!(interval(model.on_action(Action::Slower)), 300 * SECOND);
    assert_eq!(interval(model.on_action(Action::Faster)), 60 * SECOND);
    assert_eq!(
        model.on_action(Action::Pause),
        Some(Effect::SetRate(PollRate { interval: 60 * SECOND, paused: true }))
    );
    assert_eq!(
        model.on_action(Action::Pause),
        Some(Effect::SetRate(PollRate { interval: 60 * SECOND, paused: false }))
    );
}
