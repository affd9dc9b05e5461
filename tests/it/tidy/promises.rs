//! docs/promises.md: each promise, the tests that show it, and the patches that break it.
//!
//! The tests come from marks, the table of patches from tests/mutants/patches.

use std::collections::BTreeSet;

use super::{
    marks::{functions, marked_tests},
    source::{all_rust, expect_generated, home, text},
};

#[path = "../../mutants/change.rs"]
mod change;
#[path = "../../mutants/outcome.rs"]
mod outcome;

use change::Change;
use outcome::Outcome;

const PAGE: &str = "docs/promises.md";
const TESTS: &str = "Tests: ";
const TABLE: &str =
    "| what the changed code does | patch | test that fails | known as |\n|---|---|---|---|\n";

#[track_caller]
fn changes() -> Vec<Change> {
    Change::all(home()).unwrap_or_else(|error| panic!("{error}"))
}

/// The number of the promise in a heading such as `## P3: Tokens increase`.
fn promise(line: &str) -> Option<&str> {
    let number = line.strip_prefix("## ")?.split([' ', ':']).next()?;
    let is_promise = number.strip_prefix('P').is_some_and(|rest| rest.parse::<u32>().is_ok());
    is_promise.then_some(number)
}

#[test]
fn page_names_the_tests_and_patches_of_each_promise() {
    let (tests, changes) = (marked_tests(), changes());
    let mut page = String::new();
    let mut current: Option<String> = None;
    let finish = |page: &mut String, promise: Option<String>| {
        let Some(promise) = promise else { return };
        page.truncate(page.trim_end().len());
        let names: Vec<_> = tests
            .iter()
            .filter(|test| test.promises.contains(&promise))
            .map(|test| format!("`{}`", test.name))
            .collect();
        if !names.is_empty() {
            page.push_str("\n\n- ");
            page.push_str(TESTS);
            page.push_str(&names.join(",\n  "));
        }
        page.push_str("\n\n");
        page.push_str(TABLE);
        for change in changes.iter().filter(|change| change.promise == promise) {
            page.push_str(&change.row());
            page.push('\n');
        }
        page.push('\n');
    };
    let mut in_tests = false;
    for line in text(PAGE).lines() {
        if line.starts_with("## ") {
            finish(&mut page, current.take());
            current = promise(line).map(str::to_owned);
        }
        in_tests = line.starts_with(&format!("- {TESTS}")) || in_tests && line.starts_with("  ");
        let is_generated = current.is_some() && (line.starts_with('|') || in_tests);
        if !is_generated {
            page.push_str(line);
            page.push('\n');
        }
    }
    finish(&mut page, current);
    page.truncate(page.trim_end().len());
    page.push('\n');
    expect_generated(PAGE, &page);
}

#[test]
fn marks_and_patches_name_promises_of_the_page() {
    let page = text(PAGE);
    let known: BTreeSet<_> = page.lines().filter_map(promise).map(str::to_owned).collect();
    let marked: BTreeSet<_> = marked_tests().into_iter().flat_map(|test| test.promises).collect();
    let broken: BTreeSet<_> = changes().into_iter().map(|change| change.promise).collect();
    assert_eq!(known, broken, "each promise needs a patch that breaks it");
    assert!(marked.is_subset(&known), "{:?}", marked.difference(&known));
}

#[test]
fn every_patch_fits_the_code() {
    let unfit: Vec<_> =
        changes().iter().filter_map(|change| change.applied(home()).err()).collect();
    assert!(unfit.is_empty(), "{}", unfit.join("\n"));
    let changes_nothing = |change: &Change| {
        change.applied(home()).is_ok_and(|files| files.iter().any(|file| file.before == file.after))
    };
    let idle: Vec<_> =
        changes().into_iter().filter(changes_nothing).map(|change| change.name).collect();
    assert!(idle.is_empty(), "these change nothing: {idle:?}");
}

#[test]
fn expected_failure_texts_are_long_enough() {
    let wanted: Vec<_> = changes().into_iter().filter_map(|change| change.fails_with).collect();
    assert!(!wanted.is_empty() && wanted.iter().all(|part| part.len() > 5), "{wanted:?}");
}

#[test]
fn every_patch_names_a_test_that_exists() {
    let tests: BTreeSet<_> = functions().into_iter().map(|test| test.name).collect();
    let named = changes().into_iter().map(|change| (change.name, change.test.to_string()));
    let wrong: Vec<_> = named.filter(|(_, test)| !tests.contains(test)).collect();
    assert!(!tests.is_empty() && wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_limit_in_security_names_a_test_that_exists() {
    let security = text("SECURITY.md");
    let rows =
        security.lines().filter(|line| line.starts_with("| ") && line.matches('|').count() == 4);
    let tests: Vec<_> =
        rows.filter_map(|row| row.rsplit('`').nth(1)).filter(|test| test.contains("::")).collect();
    assert!(tests.len() > 10, "{tests:?}");
    let sources: String = all_rust().iter().map(|path| text(path)).collect();
    let name = |test: &&str| format!("fn {}(", test.rsplit("::").next().unwrap_or_default());
    let missing: Vec<_> = tests.into_iter().filter(|test| !sources.contains(&name(test))).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The text on one line.
fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn page_quotes_every_promise_of_the_readme() {
    let readme = text("README.md");
    let promises =
        readme.split("## What it promises").nth(1).and_then(|rest| rest.split("\n\n").nth(1));
    let page = on_one_line(&text(PAGE).replace("\n> ", "\n"));
    let promises: Vec<_> =
        promises.and_then(|list| list.strip_prefix("- ")).expect("a list").split("\n- ").collect();
    let missing: Vec<_> =
        promises.into_iter().map(on_one_line).filter(|promise| !page.contains(promise)).collect();
    assert!(missing.is_empty(), "{PAGE} does not quote {missing:#?}");
}

/// The output of a failed test.
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

fn red(output: &str, fails_with: Option<&str>) -> Outcome {
    Outcome::of(Some(false), output, "a::b", fails_with)
}

#[test]
fn failure_of_the_named_test_counts_as_noticed() {
    assert_eq!(red(RED, None), Outcome::Red);
    assert!(
        Outcome::Red.has_noticed()
            && Outcome::Hangs.has_noticed()
            && !Outcome::Otherwise.has_noticed()
    );
    let other_test = RED.replace("a::b\n\ntest", "a::c\n\ntest");
    assert_eq!(red(&other_test, None), Outcome::Broken, "another test failed");
    assert_eq!(red("", None), Outcome::Broken, "it did not compile");
    let no_server = RED.replace("left: 1", "redis-server did not start");
    assert_eq!(red(&no_server, None), Outcome::Broken);
    assert_eq!(red("\nrunning 1 test\n", None), Outcome::Red, "the process died");
}

#[test]
fn failure_must_contain_the_expected_text() {
    assert_eq!(red(RED, Some("left: 1")), Outcome::Red);
    assert_eq!(red(RED, Some("left: 2")), Outcome::Otherwise);
    assert_eq!(Outcome::of(None, RED, "a::b", Some("left: 1")), Outcome::Otherwise, "it hangs");
    assert_eq!(Outcome::of(None, RED, "a::b", None), Outcome::Hangs);
}

#[test]
fn green_means_one_test_passed() {
    let green = |output| Outcome::of(Some(true), output, "a::b", Some("left: 1"));
    assert_eq!(green("running 1 test\n.\ntest result: ok. 1 passed; 0 failed"), Outcome::Green);
    assert_eq!(green("running 0 tests\ntest result: ok. 0 passed; 0 failed"), Outcome::Broken);
}
