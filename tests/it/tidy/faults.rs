//! docs/faults.md has every fault of the catalogue, and its column of tests is generated from the
//! marks on the tests.

use std::collections::BTreeMap;

use super::{
    marks::marked_tests,
    source::{expect_generated, text},
};

const PAGE: &str = "docs/faults.md";

/// The numbers of the catalogue; F94 was added to it here.
const CATALOGUE: [u32; 81] = [
    1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29,
    30, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 43, 44, 45, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56,
    58, 59, 60, 61, 62, 63, 65, 66, 68, 70, 71, 72, 73, 74, 75, 76, 77, 79, 80, 81, 82, 83, 84, 85,
    86, 87, 89, 90, 91, 93, 94,
];

fn is_row(line: &str) -> bool {
    line.starts_with("| F") || line.starts_with("| N")
}

/// The cells of a row; the last one is the column of tests.
fn cells(row: &str) -> Vec<&str> {
    row.trim().trim_start_matches('|').trim_end_matches('|').split('|').map(str::trim).collect()
}

/// The tests of each fault.
fn tests_by_fault() -> BTreeMap<String, Vec<String>> {
    let mut tests: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in marked_tests() {
        for fault in test.faults {
            tests.entry(fault).or_default().push(test.name.clone());
        }
    }
    tests
}

#[test]
fn table_of_faults_names_the_marked_tests() {
    let tests = tests_by_fault();
    let mut page = String::new();
    for line in text(PAGE).lines() {
        if is_row(line) {
            let row = cells(line);
            assert_eq!(row.len(), 5, "{line}");
            let names = tests.get(row[0]).into_iter().flatten();
            let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
            let names = if names.is_empty() { "–".to_owned() } else { names.join(", ") };
            page.push_str(&format!("| {} | {names} |\n", row[..4].join(" | ")));
        } else {
            page.push_str(line);
            page.push('\n');
        }
    }
    expect_generated(PAGE, &page);
}

#[test]
fn fault_without_a_test_says_why() {
    let (tests, page) = (tests_by_fault(), text(PAGE));
    let silent: Vec<_> = page
        .lines()
        .filter(|line| is_row(line))
        .filter(|line| !tests.contains_key(cells(line)[0]) && !line.contains("No test: "))
        .collect();
    assert!(silent.is_empty(), "neither a test nor a reason: {silent:#?}");
}

#[test]
fn marks_name_faults_of_the_table() {
    let page = text(PAGE);
    let known: Vec<_> =
        page.lines().filter(|line| is_row(line)).map(|line| cells(line)[0]).collect();
    let unknown: Vec<_> =
        tests_by_fault().into_iter().filter(|(fault, _)| !known.contains(&&**fault)).collect();
    assert!(unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn every_fault_of_the_catalogue_is_listed_once() {
    let page = text(PAGE);
    let rows = page.lines().filter(|line| is_row(line)).map(|line| cells(line)[0].to_owned());
    let (mut faults, implied): (Vec<_>, Vec<_>) = rows.partition(|id| id.starts_with('F'));
    let mut wanted: Vec<_> = CATALOGUE.iter().map(|number| format!("F{number}")).collect();
    faults.sort();
    wanted.sort();
    assert_eq!(faults, wanted);
    // Our own faults are numbered without gaps.
    let wanted: Vec<_> = (1..=implied.len()).map(|number| format!("N{number}")).collect();
    assert_eq!(implied, wanted);
}
