//! The structure of the sources: layers, no circles between files, and pure files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::source::{code, files, library, text};

/// The modules of `src`, highest layer first. A module uses only modules of lower layers. A path
/// with a folder stands for that part of the folder.
const LAYERS: [&[&str]; 21] = [
    &["verify"],
    &["lib"],
    &["testing"],
    &["lock_manager"],
    &["mysql_manager"],
    &["redis_manager"],
    &["user_connection", "fallible_once", "with_lock", "rw_lock", "semaphore", "multi_guard"],
    &["reentrant"],
    &["guard"],
    &["manager"],
    &["acquire", "renew", "local"],
    &["cleanup", "wait"],
    &["config"],
    &["backend/redlock", "backend/cluster", "backend/memory"],
    &["backend/redis", "backend/mysql"],
    &["backend"],
    &["observe"],
    &["lock_info"],
    &["error"],
    &["core"],
    &["sys"],
];

/// Files that only decide: everything they need to know about the world is passed in as values.
const PURE: [&str; 42] = [
    "local/queue.rs",
    "acquire/failures.rs",
    "core/backoff.rs",
    "core/cluster_slot.rs",
    "backend/feature.rs",
    "backend/cluster/map.rs",
    "backend/cluster/redirect_reply.rs",
    "backend/redlock/acquisition/lost_rounds.rs",
    "backend/redlock/acquisition/queue_position.rs",
    "backend/redlock/acquisition/token_agreement.rs",
    "backend/redlock/footprint.rs",
    "backend/redlock/round_pauses.rs",
    "backend/redlock/renewals/tally.rs",
    "backend/redlock/round.rs",
    "renew/schedule.rs",
    "cleanup/queue.rs",
    "acquire/poll_times.rs",
    "core/validity.rs",
    "core/claim.rs",
    "core/kind.rs",
    "core/lease.rs",
    "core/quorum.rs",
    "backend/redlock/common_members.rs",
    "backend/redlock/reported_holder.rs",
    "observe/metrics/per_lock.rs",
    "observe/metrics/timing.rs",
    "core/clock_sample.rs",
    "backend/redis/requests/acquire.rs",
    "backend/redis/requests/acquire_all.rs",
    "backend/redis/requests/adopt.rs",
    "backend/redis/requests/group.rs",
    "backend/redis/requests/mutex.rs",
    "backend/redis/requests/release.rs",
    "backend/redis/requests/mod.rs",
    "backend/redis/node/server_info.rs",
    "backend/redis/node/quarantine.rs",
    "backend/redis/script.rs",
    "backend/redis/requests/list.rs",
    "backend/redis/fields.rs",
    "backend/mysql/outcome.rs",
    "backend/mysql/sql.rs",
    "backend/mysql/packet.rs",
];

/// Circles between files that still exist. This list may only get shorter.
const CIRCLES: &[&[&str]] = &[];

/// The modules of one crate by their paths, with their files.
struct Modules {
    files: BTreeMap<Vec<String>, String>,
    /// The imports of each module, as absolute paths, by the name they get.
    imports: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
}

impl Modules {
    fn read(folder: &str) -> Modules {
        let mut modules = Modules { files: BTreeMap::new(), imports: BTreeMap::new() };
        for file in files(folder, &["rs"]) {
            let path = file[folder.len() + 1..].trim_end_matches(".rs").to_owned();
            let path = path.trim_end_matches("/mod");
            let path = match path {
                "lib" | "main" => Vec::new(),
                path => path.split('/').map(str::to_owned).collect(),
            };
            modules.files.insert(path, file);
        }
        for (module, file) in modules.files.clone() {
            let imports = imports(&code(&file));
            let imports = imports
                .into_iter()
                .filter_map(|path| {
                    let name = path.last()?.clone();
                    Some((name, modules.absolute(&module, &path)?))
                })
                .collect();
            modules.imports.insert(module, imports);
        }
        modules
    }

    /// A path as seen from `module`, from the top of the crate; `None` if it leads elsewhere.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut absolute = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => module.to_vec(),
            child => {
                let inner = [module, &[child.to_owned()]].concat();
                return self.files.contains_key(&inner).then(|| [module, path].concat());
            }
        };
        let mut rest = path[1..].iter();
        if path[0] == "super" {
            absolute.pop();
        }
        for step in rest.by_ref() {
            if step == "super" {
                absolute.pop();
            } else {
                absolute.push(step.clone());
                break;
            }
        }
        absolute.extend(rest.cloned());
        Some(absolute)
    }

    /// The file in which a path is defined; follows re-exports.
    fn file(&self, path: &[String], depth: usize) -> Option<&str> {
        let known =
            (0..=path.len()).rev().find(|length| self.files.contains_key(&path[..*length]))?;
        let (module, rest) = path.split_at(known);
        if let Some(name) = rest.first()
            && depth < 8
            && let Some(target) = self.imports[module].get(name)
            && target[..] != path[..]
        {
            return self.file(target, depth + 1);
        }
        self.files.get(module).map(String::as_str)
    }

    /// The files that each file uses.
    fn uses(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut uses: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (module, file) in &self.files {
            let code = code(file);
            let paths = imports(&code).into_iter().chain(inline_paths(&code));
            let used = paths.filter_map(|path| self.file(&self.absolute(module, &path)?, 0));
            uses.insert(file, used.filter(|used| used != file).collect());
        }
        uses
    }

    /// Groups of files that use each other, directly or through others. A module and the modules
    /// inside of it may use each other: these are one thing in several files.
    fn circles(&self) -> Vec<Vec<&str>> {
        let module: BTreeMap<&str, &Vec<String>> =
            self.files.iter().map(|(module, file)| (file.as_str(), module)).collect();
        let is_inside = |one: &str, other: &str| {
            module[one].starts_with(module[other]) || module[other].starts_with(module[one])
        };
        let mut uses = self.uses();
        for (file, used) in &mut uses {
            used.retain(|used| !is_inside(file, used));
        }
        let reachable = |from: &str| {
            let mut seen: BTreeSet<&str> = BTreeSet::new();
            let mut open: Vec<&str> = uses[from].iter().copied().collect();
            while let Some(file) = open.pop() {
                if seen.insert(file) {
                    open.extend(uses[file].iter().copied());
                }
            }
            seen
        };
        let reachable: BTreeMap<&str, BTreeSet<&str>> =
            uses.keys().map(|file| (*file, reachable(file))).collect();
        let mut circles = BTreeSet::new();
        for (file, others) in &reachable {
            if others.contains(file) {
                let circle = others.iter().filter(|other| reachable[**other].contains(file));
                circles.insert(circle.copied().collect::<Vec<_>>());
            }
        }
        circles.into_iter().collect()
    }
}

/// The paths of all `use` items, with groups written out.
fn imports(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for item in code.split("use ").skip(1) {
        let Some((item, _)) = item.split_once(';') else { continue };
        if item.chars().all(|c| c.is_alphanumeric() || c.is_whitespace() || "_:{},*".contains(c)) {
            write_out(&[], item.trim(), &mut paths);
        }
    }
    paths
}

fn write_out(before: &[String], tree: &str, paths: &mut Vec<Vec<String>>) {
    let steps = |text: &str| -> Vec<String> {
        let steps = text.split("::").map(str::trim).filter(|step| !step.is_empty());
        steps.map(|step| step.split(" as ").next().unwrap_or_default().to_owned()).collect()
    };
    let Some((head, group)) = tree.split_once('{') else {
        let mut path = [before, &steps(tree)].concat();
        // `a::{self}` is `a`.
        if path.len() > 1 && path.last().is_some_and(|last| last == "self" || last == "*") {
            path.pop();
        }
        paths.push(path);
        return;
    };
    let before = [before, &steps(head)].concat();
    let group = group.trim();
    let group = group.strip_suffix('}').unwrap_or(group);
    let (mut depth, mut start) = (0, 0);
    for (at, letter) in group.char_indices().chain([(group.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let branch = group[start..at].trim();
                if !branch.is_empty() {
                    write_out(&before, branch, paths);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The paths in expressions that begin with `crate::`, `super::` or `self::`.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
            if code[..at].chars().next_back().is_some_and(|letter| is_word(letter) || letter == ':')
            {
                continue;
            }
            let end = code[at..].find(|letter| !is_word(letter) && letter != ':');
            let path = &code[at..end.map_or(code.len(), |end| at + end)];
            let path: Vec<_> =
                path.split("::").filter(|step| !step.is_empty()).map(str::to_owned).collect();
            // The beginning of a group in a `use` item is not a path yet.
            if path.len() > 1 {
                paths.push(path);
            }
        }
    }
    paths
}

fn owned(path: &[&str]) -> Vec<String> {
    path.iter().map(|step| (*step).to_owned()).collect()
}

#[test]
fn imports_are_written_out() {
    let code =
        "use crate::{\n a::{self, B},\n c::*,\n};\npub(crate) use self::d::E as F;\nuse std::fmt;";
    let expected: [&[&str]; 5] = [
        &["crate", "a"],
        &["crate", "a", "B"],
        &["crate", "c"],
        &["self", "d", "E"],
        &["std", "fmt"],
    ];
    assert_eq!(imports(code), expected.map(owned));
    let found = inline_paths("let x = crate::a::b(super::C) + supercrate::d;");
    assert_eq!(found, [owned(&["crate", "a", "b"]), owned(&["super", "C"])]);
}

#[test]
fn files_are_found_through_re_exports() {
    let modules = Modules::read("src");
    let file = |path: &[&str]| modules.file(&owned(path), 0).unwrap_or_default();
    assert_eq!(file(&["backend", "redlock", "Responses"]), "src/backend/redlock/responses.rs");
    assert_eq!(file(&["backend", "redlock", "Redlock"]), "src/backend/redlock/mod.rs");
    assert_eq!(file(&["config", "LockOptions"]), "src/config/options.rs");
}

/// The layer of a file, and the listed module that it belongs to: the one with the longest path.
fn layer(file: &str) -> Option<(usize, &'static str)> {
    let path = file["src/".len()..].trim_end_matches(".rs");
    let holds = |module: &str| {
        path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let listed = LAYERS
        .iter()
        .enumerate()
        .flat_map(|(layer, modules)| modules.iter().map(move |module| (layer, *module)));
    listed.filter(|(_, module)| holds(module)).max_by_key(|(_, module)| module.len())
}

#[test]
fn modules_use_only_lower_layers() {
    let mut wrong = Vec::new();
    for (file, used) in Modules::read("src").uses() {
        let Some((own, module)) = layer(file) else {
            wrong.push(format!("{file} is in no layer"));
            continue;
        };
        let upward =
            |used: &&&str| layer(used).is_none_or(|(layer, other)| other != module && layer <= own);
        wrong.extend(used.iter().filter(upward).map(|used| format!("{file} uses {used}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The table under "Layers" names the same modules, in the same order.
#[test]
fn architecture_document_lists_the_layers() {
    let page = fs::read_to_string("docs/architecture.md").unwrap();
    let (_, section) = page.split_once("### Layers\n").unwrap();
    let rows = section.lines().skip_while(|line| !line.starts_with("|--")).skip(1);
    let table: Vec<&str> = rows.take_while(|line| line.starts_with('|')).collect();
    let listed: Vec<&str> =
        table.iter().flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    // `verify` is for tests only.
    assert_eq!(listed, LAYERS[1..].concat());
}

/// What knows nodes, votes and replies is in the backends. The others know backends only through
/// `mod.rs`, and what that re-exports from other files in `backend/`.
#[test]
fn life_of_a_lock_knows_no_nodes() {
    let mut wrong = Vec::new();
    for (file, used) in Modules::read("src").uses() {
        let layer = layer(file).map_or("", |(_, module)| module);
        if ["acquire", "renew", "cleanup", "wait"].contains(&layer) {
            let shared = [
                "/mod.rs",
                "/acquire_all.rs",
                "/checkout_queue.rs",
                "/error.rs",
                "/error/node_error.rs",
                "/grant_stream.rs",
                "/lease_renewals.rs",
            ];
            let inside = used.iter().filter(|used| used.starts_with("src/backend/"));
            let inside = inside.filter(|used| !shared.iter().any(|file| used.ends_with(file)));
            wrong.extend(inside.map(|used| format!("{file} uses {used}")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let words = ["NodeSet", "NodeDeadlines", "node_deadlines"];
    let layers = ["src/acquire", "src/renew", "src/cleanup", "src/wait"];
    let sources = library().into_iter();
    let sources = sources.filter(|file| layers.iter().any(|layer| file.starts_with(layer)));
    expect_only_in(&["/tests.rs", "/loom_tests.rs"], sources.collect(), &words);
}

#[test]
fn files_use_each_other_in_no_circle() {
    let (library, command) = (Modules::read("src"), Modules::read("cli/src"));
    let found: Vec<_> = [library.circles(), command.circles()].concat();
    let new: Vec<_> = found.iter().filter(|circle| !CIRCLES.contains(&circle.as_slice())).collect();
    let gone: Vec<_> =
        CIRCLES.iter().filter(|known| !found.iter().any(|circle| circle == *known)).collect();
    assert!(new.is_empty(), "new circles between files: {new:#?}");
    assert!(gone.is_empty(), "gone, so remove them from CIRCLES: {gone:#?}");
}

#[test]
fn pure_files_use_no_thread_socket_or_clock() {
    let impure = [
        "thread",
        "Condvar",
        "TcpStream",
        "UnixStream",
        "std::net",
        "std::fs",
        "clock::now(",
        ".halfway()",
        "clock::park(",
        "Instant",
        "SystemTime",
        "ConnectionLike",
        "log::",
        "log_safely!",
    ];
    for file in PURE {
        let code = code(&format!("src/{file}"));
        let found: Vec<_> = impure.iter().filter(|word| code.contains(**word)).collect();
        assert!(found.is_empty(), "src/{file} uses {found:?}");
    }
}

#[test]
fn cargo_mutants_examines_the_pure_files() {
    let list = text(".cargo/mutants.toml");
    let listed: BTreeSet<_> =
        list.split('"').filter_map(|part| part.strip_prefix("src/")).collect();
    assert_eq!(listed, PURE.into());
}

/// Asserts that no file but the exempt ones contains one of these words.
#[track_caller]
fn expect_only_in(exempt: &[&str], sources: Vec<String>, words: &[&str]) {
    let mut wrong = Vec::new();
    for path in sources.iter().filter(|path| !exempt.iter().any(|end| path.ends_with(end))) {
        let code = code(path);
        let found = words.iter().filter(|word| code.contains(**word));
        wrong.extend(found.map(|word| format!("{path}: {word}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Fault: F16
#[test]
fn clocks_are_read_in_one_place() {
    let words = [
        "Instant::now",
        "SystemTime::now",
        "clock_gettime",
        ".elapsed()",
        "thread::sleep",
        "thread::park",
    ];
    let sources = [library(), files("cli/src", &["rs"])].concat();
    expect_only_in(&["/clock.rs"], sources, &words);
}

#[test]
fn threads_are_started_in_one_place() {
    let words = ["thread::spawn", "thread::Builder", "thread::scope"];
    expect_only_in(&["/threads.rs", "/loom_tests.rs", "/tests.rs"], library(), &words);
}

/// Fault: F17
#[test]
fn wall_clock_is_only_for_display() {
    expect_only_in(
        &[
            "src/backend/mysql/examine.rs",
            "src/core/holder.rs",
            "src/core/id.rs",
            "/clock.rs",
            "/sim.rs",
        ],
        library(),
        &["wall_clock("],
    );
}
