//! The marks on tests: `/// Fault: F19, N33` and `/// Promise: P3`.

use super::source::{all_rust, text};

/// A test with its marks.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MarkedTest {
    /// As in the tables: `lease::tests::name` in the library, `it: hold::name` elsewhere.
    pub(super) name: String,
    pub(super) faults: Vec<String>,
    pub(super) promises: Vec<String>,
}

/// All tests that carry a mark, sorted by name.
pub(super) fn marked_tests() -> Vec<MarkedTest> {
    let mut tests = functions();
    tests.retain(|test| !(test.faults.is_empty() && test.promises.is_empty()));
    tests.sort();
    tests
}

/// All functions, the tests among them, with their marks.
pub(super) fn functions() -> Vec<MarkedTest> {
    all_rust().iter().flat_map(|path| functions_in(path, &text(path))).collect()
}

/// The name of a file's module as a test runner shows it, with its target.
fn module(path: &str) -> String {
    let (target, path) = [
        ("", "src/"),
        ("cli-bin: ", "cli/src/"),
        ("cli: ", "cli/tests/cli/"),
        ("cli: ", "cli/tests/"),
        ("it: ", "tests/it/"),
        ("sim: ", "tests/sim/"),
        ("storm: ", "tests/storm/"),
        ("", "tests/"),
    ]
    .iter()
    .find_map(|(target, folder)| path.strip_prefix(folder).map(|rest| (*target, rest)))
    .unwrap_or(("", path));
    let path = path.trim_end_matches(".rs").trim_end_matches("/mod");
    format!("{target}{}", path.replace('/', "::"))
}

fn functions_in(path: &str, text: &str) -> Vec<MarkedTest> {
    let list = |line: &str, label: &str| -> Vec<String> {
        let marks = line.trim_start().strip_prefix(label).unwrap_or_default();
        marks
            .split(',')
            .map(|mark| mark.trim().to_owned())
            .filter(|mark| !mark.is_empty())
            .collect()
    };
    let mut tests = Vec::new();
    let mut inner: Vec<(usize, String)> = Vec::new();
    let (mut faults, mut promises) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim_start().trim_start_matches("pub(super) ").trim_start_matches("pub ");
        if inner.last().is_some_and(|(outer, _)| indent == *outer && line.starts_with('}')) {
            inner.pop();
        }
        if let Some(name) = line.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(" {")) {
            inner.push((indent, name.to_owned()));
        }
        faults.extend(list(line, "/// Fault:"));
        promises.extend(list(line, "/// Promise:"));
        if let Some(rest) = line.strip_prefix("fn ") {
            let name = rest.split(['(', '<']).next().unwrap_or_default();
            let mut parts = vec![module(path)];
            parts.extend(inner.iter().map(|(_, name)| name.clone()));
            tests.push(MarkedTest {
                name: format!("{}::{name}", parts.join("::")),
                faults: std::mem::take(&mut faults),
                promises: std::mem::take(&mut promises),
            });
        }
    }
    tests
}

#[test]
fn marks_are_found_with_the_path_of_their_test() {
    let text = "/// Goal.\n///\n/// Fault: F1, N2\n/// Promise: P3\n#[test]\nfn a() {}\n\n\
                mod many {\n    /// Fault: F4\n    #[test]\n    fn b(x: u8) {}\n}\nfn c() {}\n";
    let names = |path| -> Vec<_> {
        functions_in(path, text)
            .into_iter()
            .filter(|test| !test.faults.is_empty())
            .map(|test| (test.name, test.faults.join(" "), test.promises.join(" ")))
            .collect()
    };
    let expected = |a: &str, b: &str| {
        let row = |name: &str, faults: &str, promises: &str| {
            (name.to_owned(), faults.to_owned(), promises.to_owned())
        };
        vec![row(a, "F1 N2", "P3"), row(b, "F4", "")]
    };
    assert_eq!(
        names("src/backend/redis/fields.rs"),
        expected("backend::redis::fields::a", "backend::redis::fields::many::b")
    );
    assert_eq!(
        names("src/backend/redis/mod.rs"),
        expected("backend::redis::a", "backend::redis::many::b")
    );
    assert_eq!(names("tests/it/hold.rs"), expected("it: hold::a", "it: hold::many::b"));
    assert_eq!(names("cli/tests/cli/run/lost.rs")[0].0, "cli: run::lost::a");
}
