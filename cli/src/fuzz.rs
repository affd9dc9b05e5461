//! What people, other processes and the system give to the command, changed at random without end: see `src/fuzz`.

use std::{ffi::OsString, os::unix::ffi::OsStringExt as _, path::Path};

use distlock_test_support::fuzz as harness;

use crate::{
    args::{self, Args, Command, Servers},
    clock, connect, run, text,
};

/// The corpus signs in with this.
const SECRET: &str = "hunter2-9d1f";

fn fuzz(folder: &str, check: impl Fn(&[u8]) -> u64) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(folder);
    harness::fuzz(clock::since_boot, harness::read_corpus(&corpus), |input: &Vec<u8>| check(input));
}

fn plain(text: &str) {
    assert!(text.chars().all(text::is_plain), "{text:?}");
}

/// Whether the secret stands where a URL has its password: between a colon and an @, and in no user's name of a URL that
/// begins behind a comma.
fn is_password(word: &str) -> bool {
    let letters = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphabetic() || c == '+');
    word.match_indices(SECRET).any(|(at, _)| {
        let (before, behind) = (&word[..at], &word[at + SECRET.len()..]);
        let begins = |comma: usize| {
            let next = word[comma + 1..].trim_start();
            next.find("://").is_some_and(|end| letters(&next[..end]))
        };
        let first = before.rmatch_indices(',').map(|(comma, _)| comma).find(|comma| begins(*comma));
        let end = behind.match_indices(',').map(|(comma, _)| comma).find(|comma| begins(at + SECRET.len() + comma));
        let user = before[first.map_or(0, |comma| comma + 1)..].split_once("://").map(|(_, user)| user);
        user.is_some_and(|user| user.contains(':')) && behind[..end.unwrap_or(behind.len())].contains('@')
    })
}

/// A password in a URL is not repeated, however wrong the rest is. One argument stands on each line.
#[test]
fn command_lines() {
    fuzz("command-lines", |input| {
        let words = || input.split(|byte| *byte == b'\n').map(|word| OsString::from_vec(word.to_vec()));
        let secret = words().any(|word| is_password(&word.to_string_lossy()));
        let silent = |said: &str| assert!(!secret || !said.contains(SECRET), "{said}");
        match args::read([OsString::from("distlock")].into_iter().chain(words())) {
            Ok(Args { servers, command }) => {
                // Files and pipes of this machine are none of a test's business.
                let servers = Servers { password_file: None, ..servers };
                let configured = connect::config(&servers);
                if let Err(failure) = &configured {
                    silent(&failure.message);
                }
                let planned = match &command {
                    Command::Run(options) => run::is_planned(options),
                    _ => true,
                };
                2 | u64::from(configured.is_ok()) << 2 | u64::from(planned) << 3
            }
            Err(said) => {
                silent(&said.to_string());
                u64::from(said.is_help())
            }
        }
    });
}

/// What a wrapper tells its guardian.
#[test]
fn words() {
    fuzz("words", |input| {
        let line = String::from_utf8_lossy(input);
        u64::from(run::is_word(&line))
    });
}

/// What the system tells about processes, and texts of others in sentences.
#[test]
fn processes_and_sentences() {
    fuzz("processes", |input| {
        let told = String::from_utf8_lossy(input);
        plain(&text::clean(&told));
        run::is_process(&told)
    });
}
