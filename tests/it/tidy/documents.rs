//! Documents, scripts and manifests agree with the code.

use super::source::{code, files, library, text};

#[test]
fn every_script_documents_its_arguments_and_replies() {
    let scripts = files("src", &["lua"]);
    assert!(!scripts.is_empty());
    for path in scripts {
        let text = text(&path);
        let header: Vec<_> = text.lines().take_while(|line| line.starts_with("--")).collect();
        let documents = |what: &str| header.iter().any(|line| line.starts_with(what));
        assert!(!header.is_empty(), "{path} has no header");
        assert!(documents("-- KEYS "), "{path} does not document its KEYS");
        // A part that only defines functions, such as prelude.lua, may have no arguments and reply.
        if text.contains("ARGV[") {
            assert!(documents("-- ARGV "), "{path} does not document its ARGV");
            assert!(documents("-- Reply "), "{path} does not document its replies");
        }
    }
}

#[test]
fn every_script_is_part_of_the_library() {
    let sources: String = library().iter().map(|path| code(path)).collect();
    for path in files("src", &["lua"]) {
        let name = path.strip_prefix("src/backend/redis/lua/").expect("in the folder of scripts");
        assert!(sources.contains(&format!("\"{name}\"")), "{path} is not used");
    }
}

#[test]
fn changelog_has_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    let has =
        text("CHANGELOG.md").lines().any(|line| line.starts_with("## ") && line.contains(version));
    assert!(has, "CHANGELOG.md has no heading for {version}");
}

#[test]
fn readme_names_this_version() {
    let readme = text("README.md");
    let dependencies: Vec<_> =
        readme.lines().filter(|line| line.starts_with("distlock = ")).collect();
    assert!(!dependencies.is_empty(), "README.md does not say what to write into Cargo.toml");
    for line in dependencies {
        // "0.1" stands for all of 0.1, as Cargo reads it.
        let version = line.split('"').nth(1).expect("a version in quotes");
        let ours = env!("CARGO_PKG_VERSION");
        assert!(ours == version || ours.starts_with(&format!("{version}.")), "{line}");
    }
}

#[test]
fn readme_names_the_minimum_rust_version() {
    let version = env!("CARGO_PKG_RUST_VERSION");
    assert!(text("README.md").contains(&format!("minimum Rust version is {version}")), "{version}");
}

#[test]
fn unsafe_code_is_forbidden() {
    assert!(code("src/lib.rs").contains("#![forbid(unsafe_code)]"));
    assert!(code("cli/src/main.rs").contains("#![forbid(unsafe_code)]"));
}

#[test]
fn log_calls_catch_panics_of_the_logger() {
    for path in files("src", &["rs"]).iter().filter(|path| !path.ends_with("/logging.rs")) {
        let code = code(path);
        let levels = ["trace", "debug", "info", "warn", "error"];
        let is_bare = levels.iter().any(|level| code.contains(&format!("log::{level}!")));
        assert!(!is_bare, "{path} logs without `log_safely!`");
    }
}

/// The tree of the sources, and the files that its text names.
#[test]
fn architecture_document_names_files_that_exist() {
    let all: Vec<String> = ["src", "tests", "cli"]
        .iter()
        .flat_map(|folder| files(folder, &["rs", "lua"]))
        .map(|path| format!("/{path}"))
        .collect();
    let page = text("docs/architecture.md");
    let is_of_path = |letter: char| letter.is_ascii_alphanumeric() || "_./".contains(letter);
    let named: Vec<&str> = page
        .split(|letter| !is_of_path(letter))
        .map(|name| name.trim_end_matches('.'))
        .filter(|name| name.ends_with(".rs") || name.ends_with(".lua"))
        .filter(|name| !name.contains("KIND"))
        .collect();
    assert!(named.len() > 100, "{named:?}");
    let exists = |name: &str| all.iter().any(|path| path.ends_with(&format!("/{name}")));
    let missing: Vec<_> = named.into_iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
