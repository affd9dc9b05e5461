//! Guards the house: which floor knows which, what stays pure, and that papers and code agree.

mod promises;

mod faults;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The rooms of `src`, from the front door down. A room knows only rooms on lower floors, and never
/// its neighbours.
const FLOORS: [&[&str]; 20] = [
    &["fuzz"],
    &["lib"],
    &["manager"],
    &["pooled", "process_wide", "reentrant"],
    &["guard"],
    &["service"],
    &["acquire", "renewer"],
    &["lease", "config"],
    &["grant"],
    &["redlock"],
    &["node"],
    &["key"],
    &["observer"],
    &["metrics"],
    &["event"],
    &["error", "lock_info", "released"],
    &["holder"],
    &["answer", "id", "text", "token"],
    &["clock", "threads", "say"],
    &["fork", "sync", "testing"],
];

/// Files that decide and touch nothing: what they need to know of the world comes in as values.
const THINKERS: [&str; 19] = [
    "renewer/schedule.rs",
    "renewer/schedule/danger.rs",
    "renewer/schedule/room.rs",
    "renewer/undo.rs",
    "renewer/doubts.rs",
    "acquire/patience.rs",
    "grant.rs",
    "lease.rs",
    "redlock/quorum.rs",
    "redlock/strongest.rs",
    "metrics/rows.rs",
    "metrics/timing.rs",
    "node/reading.rs",
    "node/calls.rs",
    "node/identity.rs",
    "node/roster.rs",
    "node/script.rs",
    "node/survey.rs",
    "node/wire.rs",
];

fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[track_caller]
fn text(path: &str) -> String {
    fs::read_to_string(home().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The code of the library.
fn library() -> Vec<String> {
    files("src", &["rs"])
}

/// All files below a folder with one of these endings, as paths from the top of the package.
fn files(folder: &str, endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![home().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.expect("a folder that can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .extension()
                .is_some_and(|ending| endings.iter().any(|wanted| ending == *wanted))
            {
                let path = path.strip_prefix(home()).expect("it is below");
                found.push(path.to_str().expect("plain letters").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// What is compiled into the library: without comments, and without the tests at the end of a file.
fn code(path: &str) -> String {
    let text = text(path);
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    let lines =
        text[..end].lines().map(|line| line.split_once("// ").map_or(line, |(code, _)| code));
    lines.filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The rooms that some code names by `crate::`.
fn known(code: &str) -> BTreeSet<String> {
    let mut rooms = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        // Of a list, only what stands at the beginning of its entries is a room.
        let (mut depth, mut fresh, mut name) = (0, true, String::new());
        for letter in rest.chars() {
            match letter {
                '{' => (depth, fresh) = (depth + 1, depth == 0),
                '}' => depth -= 1,
                ',' if depth == 1 => fresh = true,
                letter if fresh && (letter.is_alphanumeric() || letter == '_') => name.push(letter),
                letter if letter.is_whitespace() && name.is_empty() => {}
                _ => fresh = false,
            }
            if (!fresh || letter == ',' || letter == '}') && !name.is_empty() {
                rooms.insert(std::mem::take(&mut name));
            }
            if depth == 0 && !fresh {
                break;
            }
        }
        rooms.extend((!name.is_empty()).then_some(name));
    }
    rooms
}

fn floor(room: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&room))
}

#[test]
fn names_of_rooms_are_found_in_every_form() {
    let code = "use crate::{\n clock::{self, Moment},\n error::{Action, LockError},\n lease\n};\nuse crate::text::Span;\nlet x = crate::key::MAX;";
    assert_eq!(
        known(code).into_iter().collect::<Vec<_>>(),
        ["clock", "error", "key", "lease", "text"]
    );
}

#[test]
fn every_room_knows_only_the_floors_below_it() {
    let mut wrong = Vec::new();
    for path in &library() {
        let room = path["src/".len()..].split('/').next().expect("a name").trim_end_matches(".rs");
        let Some(own) = floor(room) else {
            wrong.push(format!("{path} is on no floor"));
            continue;
        };
        for other in known(&code(path)).iter().filter(|other| *other != room) {
            if floor(other).is_none_or(|floor| floor <= own) {
                wrong.push(format!("{path} knows {other}, which is not below it"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_decides_touches_no_thread_no_socket_and_no_clock() {
    let worldly = [
        "thread",
        "Condvar",
        "TcpStream",
        "UnixStream",
        "std::net",
        "std::fs",
        "clock::now(",
        "clock::park(",
        "Instant",
        "SystemTime",
        "ConnectionLike",
        "log::",
    ];
    for thinker in THINKERS {
        let code = code(&format!("src/{thinker}"));
        let found: Vec<_> = worldly.iter().filter(|word| code.contains(**word)).collect();
        assert!(found.is_empty(), "src/{thinker} uses {found:?}");
    }
}

#[test]
fn whatever_decides_is_searched_for_changes_that_no_test_notices() {
    let list = text(".cargo/mutants.toml");
    let listed: BTreeSet<_> =
        list.split('"').filter_map(|part| part.strip_prefix("src/")).collect();
    assert_eq!(listed, THINKERS.into());
}

#[test]
fn clocks_are_read_in_one_place() {
    let mut wrong = Vec::new();
    let all = [library(), files("cli/src", &["rs"])].concat();
    for path in all.iter().filter(|path| !path.ends_with("/clock.rs")) {
        let code = code(path);
        let readings = [
            "Instant::now",
            "SystemTime::now",
            "clock_gettime",
            ".elapsed()",
            "thread::sleep",
            "thread::park",
        ];
        wrong.extend(
            readings
                .iter()
                .filter(|word| code.contains(**word))
                .map(|word| format!("{path}: {word}")),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn threads_are_made_in_one_place() {
    let mut wrong = Vec::new();
    let exempt = |path: &str| path.ends_with("/threads.rs") || path.ends_with("/checks.rs");
    for path in library().iter().filter(|path| !exempt(path)) {
        let code = code(path);
        let makings = ["thread::spawn", "thread::Builder", "thread::scope"];
        wrong.extend(
            makings
                .iter()
                .filter(|word| code.contains(**word))
                .map(|word| format!("{path}: {word}")),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_unsafe_code_is_let_in() {
    for path in ["src/lib.rs", "cli/src/main.rs"] {
        assert!(code(path).contains("#![forbid(unsafe_code)]"), "{path}");
    }
}

#[test]
fn nothing_is_left_for_later() {
    // Put together here, so that this file does not find itself.
    let marks = [["TO", "DO"], ["FIX", "ME"], ["XX", "X:"], ["db", "g!("], ["todo", "!("]]
        .map(|parts| parts.concat());
    let mut wrong = Vec::new();
    for folder in ["src", "cli", "tests", "benches", "examples", "docs"] {
        for path in files(folder, &["rs", "lua", "md", "sh"]) {
            let text = text(&path);
            let lines = text
                .lines()
                .zip(1..)
                .filter(|(line, _)| marks.iter().any(|mark| line.contains(mark)));
            wrong.extend(lines.map(|(line, number)| format!("{path}:{number}: {line}")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_script_says_what_it_takes_and_what_it_answers() {
    let scripts = files("src", &["lua"]);
    assert!(!scripts.is_empty());
    for path in scripts {
        let text = text(&path);
        let says = |what: &str| {
            text.lines()
                .take_while(|line| line.starts_with("--"))
                .any(|line| line.starts_with(what))
        };
        assert!(text.starts_with("-- "), "{path} has no header");
        assert!(says("-- KEYS "), "{path} does not say what its KEYS are");
        // What other scripts begin with has neither arguments nor an answer of its own.
        if text.contains("ARGV[") {
            assert!(says("-- ARGV "), "{path} does not say what its ARGV are");
            assert!(says("-- Reply "), "{path} does not say what it replies");
        }
    }
}

#[test]
fn every_script_is_part_of_the_library() {
    let table = text("src/node/script.rs");
    for path in files("src", &["lua"]) {
        let name = path.rsplit('/').next().expect("a name");
        assert!(table.contains(&format!("\"{name}\"")), "{path} is used by nobody");
    }
}

#[test]
fn the_changelog_has_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    let has =
        text("CHANGELOG.md").lines().any(|line| line.starts_with("## ") && line.contains(version));
    assert!(has, "no heading for {version} in CHANGELOG.md");
}

#[test]
fn the_readme_names_this_version() {
    let readme = text("README.md");
    let named: Vec<_> = readme.lines().filter(|line| line.starts_with("distlock = ")).collect();
    assert!(!named.is_empty(), "README.md does not say what to write into Cargo.toml");
    for line in named {
        // "0.1" stands for all of 0.1, as Cargo reads it.
        let version = line.split('"').nth(1).expect("a version in quotes");
        let ours = env!("CARGO_PKG_VERSION");
        assert!(
            ours == version || ours.starts_with(&format!("{version}.")),
            "{line:?} is not about {ours}"
        );
    }
}
