//! The files of the repository, as text.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// The top folder of the repository.
pub(super) fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The content of a file, named from the top folder.
#[track_caller]
pub(super) fn text(path: &str) -> String {
    fs::read_to_string(home().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The sources of the library.
pub(super) fn library() -> Vec<String> {
    files("src", &["rs"])
}

/// All Rust sources of the workspace.
pub(super) fn all_rust() -> Vec<String> {
    ["src", "cli/src", "cli/tests", "tests", "examples", "benches"]
        .iter()
        .flat_map(|folder| files(folder, &["rs"]))
        .collect()
}

/// All files below a folder with one of these extensions, sorted, as paths from the top folder.
pub(super) fn files(folder: &str, extensions: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![home().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.expect("a readable folder").path();
            let has_extension =
                || path.extension().is_some_and(|found| extensions.iter().any(|one| found == *one));
            if path.is_dir() {
                if !path.ends_with("target") {
                    folders.push(path);
                }
            } else if has_extension() {
                let path = path.strip_prefix(home()).expect("below the top folder");
                found.push(path.to_str().expect("UTF-8").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// The code of a file without comments and without the unit tests at its end.
pub(super) fn code(path: &str) -> String {
    let text = text(path);
    let heads = ["#[cfg(test)]\nmod tests {", "#[cfg(all(test, not(loom)))]\nmod tests {"];
    let end = heads.iter().filter_map(|head| text.find(head)).min().unwrap_or(text.len());
    let lines =
        text[..end].lines().map(|line| line.split_once("// ").map_or(line, |(code, _)| code));
    lines.filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Compares a generated document with the file; rewrites the file instead if `DISTLOCK_BLESS` is
/// set.
#[track_caller]
pub(super) fn expect_generated(path: &str, generated: &str) {
    let current = text(path);
    if current == generated {
        return;
    }
    if env::var_os("DISTLOCK_BLESS").is_some() {
        fs::write(home().join(path), generated).unwrap_or_else(|error| panic!("{path}: {error}"));
        return;
    }
    let differs = current.lines().zip(generated.lines()).find(|(is, wanted)| is != wanted);
    panic!(
        "{path} does not match the tests; run \
         `DISTLOCK_BLESS=1 cargo test --all-features --test it tidy`. \
         First difference: {differs:#?}"
    );
}
