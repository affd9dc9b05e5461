//! Plain English: words that CONTRIBUTING.md rules out, names of tests, and the width of lines.

use super::source::{all_rust, files, library, text};

/// Maximum length of a test's name.
const TEST_NAME_MAX: usize = 60;
/// Maximum number of characters in a line.
const LINE_MAX: usize = 100;

/// The phrases of the table "never write | write" in CONTRIBUTING.md, and what to write instead.
fn banned_phrases() -> Vec<(String, String)> {
    let guide = text("CONTRIBUTING.md");
    let table = guide.split("| never write | write |").nth(1).expect("the table of words");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.flat_map(|row| {
        let (never, instead) =
            row.trim_matches('|').split_once('|').expect("two cells in a row of the table");
        let never = never.split('(').next().unwrap_or_default().to_owned();
        let phrases: Vec<_> = never.split(',').map(normalized).collect();
        phrases.into_iter().map(|phrase| (phrase, instead.trim().to_owned())).collect::<Vec<_>>()
    })
    .collect()
}

/// Lower-case words separated by single blanks, with a blank at both ends.
fn normalized(text: &str) -> String {
    let words: String = text
        .to_lowercase()
        .replace('’', "'")
        .chars()
        .map(|letter| if letter.is_alphanumeric() || letter == '\'' { letter } else { ' ' })
        .collect();
    format!(" {} ", words.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Blocks of consecutive lines of prose with the number of their first line: comments, and text in
/// quotes, which users may see.
fn prose(path: &str, text: &str) -> Vec<(usize, String)> {
    let is_markdown = path.ends_with(".md");
    let mark = if path.ends_with(".lua") {
        "--"
    } else if is_markdown {
        ""
    } else {
        "//"
    };
    let mark = if path.ends_with(".sh") || path.ends_with("Makefile") { "#" } else { mark };
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut continues = false;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let comment = line.strip_prefix(mark).filter(|_| !line.is_empty());
        // The tables of words in the two guides quote what they rule out.
        let quotes_words = is_markdown && line.starts_with('|');
        let is_guide = path.ends_with("CONTRIBUTING.md") || path.ends_with("glossary.md");
        match comment {
            Some(_) if quotes_words && is_guide => continues = false,
            Some(words) => {
                if !continues {
                    blocks.push((number, String::new()));
                }
                let block = &mut blocks.last_mut().expect("a block was begun").1;
                block.push(' ');
                block.push_str(words);
                continues = true;
            }
            None => {
                continues = false;
                let quoted: Vec<_> = line.split('"').skip(1).step_by(2).collect();
                if !quoted.is_empty() && !is_markdown {
                    blocks.push((number, quoted.join(" ; ")));
                }
            }
        }
    }
    blocks
}

fn documents() -> Vec<String> {
    let top =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", ".ci/run"];
    let mut paths: Vec<_> = top.iter().map(|path| (*path).to_owned()).collect();
    for (folder, extensions) in [("docs", "md"), ("src", "lua"), ("tools", "sh"), ("cli", "md")] {
        paths.extend(files(folder, &[extensions]));
    }
    paths
}

#[test]
fn no_prose_has_a_banned_phrase() {
    let banned = banned_phrases();
    assert!(banned.len() > 20, "{banned:?}");
    let mut wrong = Vec::new();
    for path in all_rust().into_iter().chain(documents()) {
        if path.ends_with("names_and_words.rs") {
            continue;
        }
        for (number, block) in prose(&path, &text(&path)) {
            let words = normalized(&block);
            for (phrase, instead) in banned.iter().filter(|(phrase, _)| words.contains(phrase)) {
                // The proofs are about what a client may believe.
                if path == "docs/protocol.md" && phrase.starts_with(" belie") {
                    continue;
                }
                wrong.push(format!("{path}:{number}:{phrase}(write: {instead})"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} places:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn banned_phrases_are_found_across_lines_and_in_quotes() {
    let text = "// The node tries in\n// vain.\nlet x = \"Whoever waits\";\nlet whoever = 1;\n";
    let found: Vec<_> =
        prose("a.rs", text).into_iter().map(|(line, block)| (line, normalized(&block))).collect();
    let expected = [(1, " the node tries in vain ".to_owned()), (3, " whoever waits ".to_owned())];
    assert_eq!(found, expected);
    assert!(banned_phrases().iter().any(|(phrase, _)| phrase == " in vain "));
}

#[test]
fn test_names_are_short() {
    let mut long = Vec::new();
    for path in all_rust() {
        let text = text(&path);
        for test in text.split("#[test]").skip(1) {
            let name = test.split_once("fn ").map_or("", |(_, rest)| rest);
            let name = name.split('(').next().unwrap_or_default();
            if name.len() > TEST_NAME_MAX {
                long.push(format!("{path}: {name}"));
            }
        }
    }
    assert!(long.is_empty(), "{} names over {TEST_NAME_MAX} letters: {long:#?}", long.len());
}

#[test]
fn library_files_have_at_most_450_lines() {
    let long = library().into_iter().filter(|path| text(path).lines().count() > 450);
    let long: Vec<_> = long.collect();
    assert!(long.is_empty(), "too long to read in one go: {long:#?}");
}

#[test]
fn lines_are_at_most_a_hundred_characters_wide() {
    let mut wide = Vec::new();
    for path in all_rust().into_iter().chain(documents()) {
        for (number, line) in (1..).zip(text(&path).lines()) {
            // A table's row and an address cannot be broken.
            let is_exempt = line.starts_with('|') || line.contains("://");
            if line.chars().count() > LINE_MAX && !is_exempt {
                wide.push(format!("{path}:{number}"));
            }
        }
    }
    assert!(wide.is_empty(), "{} lines over {LINE_MAX} characters: {wide:#?}", wide.len());
}

#[test]
fn nothing_is_left_for_later() {
    // Put together here, so that this file does not find itself.
    let marks = [["TO", "DO"], ["FIX", "ME"], ["XX", "X:"], ["db", "g!("], ["todo", "!("]]
        .map(|parts| parts.concat());
    let mut wrong = Vec::new();
    for path in all_rust().into_iter().chain(documents()) {
        for (number, line) in (1..).zip(text(&path).lines()) {
            if marks.iter().any(|mark| line.contains(mark)) {
                wrong.push(format!("{path}:{number}: {line}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
