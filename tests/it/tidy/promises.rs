//! Keeps docs/promises.md, the changes that break each promise, and the tests that notice, in step.

use std::{collections::BTreeSet, fs, path::Path};

#[path = "../../mutants/change.rs"]
mod change;
#[path = "../../mutants/outcome.rs"]
mod outcome;

use change::Change;
use outcome::Outcome;

const PAGE: &str = "docs/promises.md";

fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[track_caller]
fn text(path: &str) -> String {
    fs::read_to_string(home().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[track_caller]
fn changes() -> Vec<Change> {
    Change::all(home()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_change_fits_the_code() {
    let unfit: Vec<_> =
        changes().iter().filter_map(|change| change.applied(home()).err()).collect();
    assert!(unfit.is_empty(), "{}", unfit.join("\n"));
    let is_idle = |change: &Change| {
        change.applied(home()).is_ok_and(|files| files.iter().any(|file| file.before == file.after))
    };
    let idle: Vec<_> = changes().into_iter().filter(is_idle).map(|change| change.name).collect();
    assert!(idle.is_empty(), "these change nothing: {idle:?}");
}

/// Where it can be red for more than one.
#[test]
fn what_a_test_is_to_say_is_a_part_of_a_line() {
    let wanted: Vec<_> = changes().into_iter().filter_map(|change| change.fails_with).collect();
    assert!(!wanted.is_empty() && wanted.iter().all(|part| part.len() > 5), "{wanted:?}");
}

#[test]
fn every_change_names_a_test_that_is_there() {
    let mut wrong = Vec::new();
    for change in changes() {
        let (folder, parts) = match change.test.target.as_str() {
            "lib" => ("src", change.test.path.trim_end_matches(|letter: char| letter != ':')),
            "cli-bin" => ("cli/src", change.test.path.as_str()),
            "cli" => ("cli/tests/cli", change.test.path.as_str()),
            "it" => ("tests/it", change.test.path.as_str()),
            "sim" => ("tests/sim", change.test.path.as_str()),
            _ => ("tests", change.test.path.as_str()),
        };
        let name = change.test.path.rsplit("::").next().unwrap_or_default();
        let room = parts.split("::").next().unwrap_or_default();
        let file = home().join(folder).join(format!("{room}.rs"));
        let text = fs::read_to_string(file).unwrap_or_default()
            + &sources(&home().join(folder).join(room));
        // Those of a contract are made by a macro, and take what they are about.
        if !text.contains(&format!("fn {name}(")) && !text.contains(&format!("fn {name}<")) {
            wrong.push(format!("{}: {} is nowhere", change.name, change.test));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What stands under each heading of the page: its number, and the rows of its table.
fn page() -> Vec<(String, Vec<String>)> {
    let mut parts: Vec<(String, Vec<String>)> = Vec::new();
    for line in text(PAGE).lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let number = heading.split([' ', ':']).next().unwrap_or_default();
            parts.push((number.to_owned(), Vec::new()));
        } else if line.starts_with('|') && line.contains("](../tests/mutants/") {
            parts.last_mut().expect("a table stands under a heading").1.push(line.to_owned());
        }
    }
    parts
}

#[test]
fn the_page_has_every_change_under_its_promise() {
    let page = page();
    let mut wrong = Vec::new();
    for change in changes() {
        let rows = page.iter().find(|(number, _)| *number == change.promise).map(|(_, rows)| rows);
        if !rows.is_some_and(|rows| rows.contains(&change.row())) {
            wrong.push(format!("{} wants under {}: {}", PAGE, change.promise, change.row()));
        }
    }
    let rows = page.iter().map(|(_, rows)| rows.len()).sum::<usize>();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(rows, changes().len(), "{PAGE} has rows that no change stands behind");
}

#[test]
fn every_promise_falls_to_a_change() {
    let broken: BTreeSet<_> = changes().into_iter().map(|change| change.promise).collect();
    let idle: Vec<_> = page().into_iter().filter(|(number, _)| !broken.contains(number)).collect();
    assert!(idle.is_empty(), "nothing shows that these are held: {idle:?}");
}

/// Also those that SECURITY.md names.
#[test]
fn every_limit_names_a_test_that_is_there() {
    let security = text("SECURITY.md");
    let rows =
        security.lines().filter(|line| line.starts_with("| ") && line.matches('|').count() == 4);
    let tests: Vec<_> =
        rows.filter_map(|row| row.rsplit('`').nth(1)).filter(|test| test.contains("::")).collect();
    assert!(tests.len() > 10, "{tests:?}");
    let sources: String = ["src", "tests/it", "cli/src", "cli/tests"]
        .iter()
        .map(|folder| sources(&home().join(folder)))
        .collect();
    let name = |test: &&str| format!("fn {}(", test.rsplit("::").next().unwrap_or_default());
    let missing: Vec<_> = tests.into_iter().filter(|test| !sources.contains(&name(test))).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

fn sources(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries
        .map(|path| {
            if path.is_dir() {
                sources(&path)
            } else {
                fs::read_to_string(path).unwrap_or_default()
            }
        })
        .collect()
}

/// One line, however it is broken into several.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_page_has_every_promise_of_the_readme() {
    let readme = text("README.md");
    let promises =
        readme.split("## What it promises").nth(1).and_then(|rest| rest.split("\n\n").nth(1));
    let page = flat(&text(PAGE).replace("\n> ", "\n"));
    let promises: Vec<_> =
        promises.and_then(|list| list.strip_prefix("- ")).expect("a list").split("\n- ").collect();
    let missing: Vec<_> =
        promises.into_iter().map(flat).filter(|promise| !page.contains(promise)).collect();
    assert!(missing.is_empty(), "{PAGE} says nothing about {missing:#?}");
}

/// What a test that fails has said.
const RED: &str = "
running 1 test
F
failures:

---- a::b stdout ----
thread 'a::b' panicked at tests/it/a.rs:9:5:
left: 1

failures:
    a::b

test result: FAILED. 0 passed; 1 failed
";

fn red(said: &str, fails_with: Option<&str>) -> Outcome {
    Outcome::of(Some(false), said, "a::b", fails_with)
}

#[test]
fn a_test_that_fails_by_itself_has_noticed() {
    assert_eq!(red(RED, None), Outcome::Red);
    assert!(
        Outcome::Red.has_noticed()
            && Outcome::Hangs.has_noticed()
            && !Outcome::Otherwise.has_noticed()
    );
    assert_eq!(
        red(&RED.replace("a::b\n\ntest", "a::c\n\ntest"), None),
        Outcome::Broken,
        "another test"
    );
    assert_eq!(red("", None), Outcome::Broken, "it did not compile");
    assert_eq!(red(&RED.replace("left: 1", "redis-server did not start"), None), Outcome::Broken);
    assert_eq!(red("\nrunning 1 test\n", None), Outcome::Red, "it died");
}

#[test]
fn it_has_to_say_what_it_should() {
    assert_eq!(red(RED, Some("left: 1")), Outcome::Red);
    assert_eq!(red(RED, Some("left: 2")), Outcome::Otherwise);
    assert_eq!(Outcome::of(None, RED, "a::b", Some("left: 1")), Outcome::Otherwise, "it hangs");
    assert_eq!(Outcome::of(None, RED, "a::b", None), Outcome::Hangs);
}

#[test]
fn green_is_one_test_that_passed() {
    let green = |said| Outcome::of(Some(true), said, "a::b", Some("left: 1"));
    assert_eq!(green("running 1 test\n.\ntest result: ok. 1 passed; 0 failed"), Outcome::Green);
    assert_eq!(green("running 0 tests\ntest result: ok. 0 passed; 0 failed"), Outcome::Broken);
}
