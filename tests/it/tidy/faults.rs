//! Guards docs/faults.md: every fault of the catalogue is in it, and every test that it names
//! exists.

use super::{code, home, library, text};

/// The numbers of the catalogue.
const CATALOGUE: [u32; 80] = [
    1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29,
    30, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 43, 44, 45, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56,
    58, 59, 60, 61, 62, 63, 65, 66, 68, 70, 71, 72, 73, 74, 75, 76, 77, 79, 80, 81, 82, 83, 84, 85,
    86, 87, 89, 90, 91, 93,
];

/// The cells of each row.
fn rows() -> Vec<Vec<String>> {
    let table = text("docs/faults.md");
    let rows = table.lines().filter(|line| line.starts_with("| F") || line.starts_with("| N"));
    rows.map(|row| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect())
        .collect()
}

/// What stands between backticks and looks like the path of a test.
fn named(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| code.contains("::") && !code.contains(char::is_whitespace))
}

/// Whether there is such a test: below `tests/it`, or among the unit tests of a file in `src`.
/// Tests of the command begin with `cli`, and its unit tests with `cli-bin`. Inner modules, also
/// those that a macro makes, must be in the file.
fn exists(test: &str) -> bool {
    let parts: Vec<_> = test.split("::").collect();
    let (name, rooms) = parts.split_last().expect("a name");
    (1..=rooms.len()).rev().any(|depth| {
        let (file, inner) = rooms.split_at(depth);
        let file = file.join("/");
        let places = match file.strip_prefix("cli-bin/") {
            Some(file) => vec![format!("cli/src/{file}.rs"), format!("cli/src/{file}/mod.rs")],
            None => vec![
                format!("tests/it/{file}.rs"),
                format!("cli/tests/{file}.rs"),
                format!("src/{file}.rs"),
                format!("src/{file}/mod.rs"),
            ],
        };
        places.iter().filter(|place| home().join(place).is_file()).any(|place| {
            let code = text(place);
            let is_test = code.split("#[test]").skip(1).any(|rest| {
                let function = rest.split_once("fn ").map_or("", |(_, rest)| rest);
                function.strip_prefix(name).is_some_and(|rest| rest.starts_with('('))
            });
            is_test
                && inner.iter().all(|room| {
                    code.contains(&format!("mod {room}")) || code.contains(&format!("{room}: "))
                })
        })
    })
}

#[test]
fn a_test_is_found_where_it_is_and_nowhere_else() {
    for test in [
        "tidy::faults::a_test_is_found_where_it_is_and_nowhere_else",
        "redlock::faults::killed::two_of_five",
        "lease::belief_ends_at_the_deadline_and_does_not_come_back",
        "cli::run::lost::a_command_whose_lock_is_lost_before_it_begins_never_begins",
        "cli-bin::connect::passwords_are_seen",
    ] {
        assert!(exists(test), "{test}");
    }
    for test in [
        "tidy::faults::exists",
        "tidy::faults::a_test",
        "redlock::faults::kicked::two_of_five",
        "lease::x",
        "x",
    ] {
        assert!(!exists(test), "{test}");
    }
}

#[test]
fn every_test_in_the_table_of_faults_exists() {
    let mut missing = Vec::new();
    for row in rows() {
        let [fault, .., tests] = row.as_slice() else { panic!("{row:?}") };
        assert_eq!(row.len(), 5, "{row:?}");
        missing.extend(
            named(tests).filter(|test| !exists(test)).map(|test| format!("{fault}: {test}")),
        );
        let reason = tests.starts_with("none: ") || tests.starts_with("none that runs always: ");
        assert!(reason || named(tests).next().is_some(), "{fault} has neither a test nor a reason");
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_fault_of_the_catalogue_is_in_the_table_once() {
    let (mut faults, implied): (Vec<String>, Vec<String>) =
        rows().into_iter().map(|row| row[0].clone()).partition(|id| id.starts_with('F'));
    let mut wanted: Vec<String> =
        CATALOGUE.iter().chain(&[94]).map(|number| format!("F{number}")).collect();
    faults.sort();
    wanted.sort();
    assert_eq!(faults, wanted);
    // These are counted through.
    let wanted: Vec<String> = (1..=implied.len()).map(|number| format!("N{number}")).collect();
    assert_eq!(implied, wanted);
}

#[test]
fn the_wall_clock_is_for_texts_only() {
    let reads = |path: &&String| code(path).contains("clock::wall(");
    let readers: Vec<_> = library().iter().filter(reads).cloned().collect();
    assert_eq!(readers, ["src/holder.rs", "src/id.rs"]);
}

#[test]
fn whatever_is_logged_is_behind_the_shield() {
    for path in library().iter().filter(|path| !path.ends_with("/say.rs")) {
        let code = code(path);
        let bare =
            ["trace", "debug", "info", "warn", "error"].map(|level| format!("log::{level}!"));
        assert!(!bare.iter().any(|call| code.contains(call)), "{path} logs without `log_safely!`");
    }
}
