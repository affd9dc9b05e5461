//! Fuzz tests of the command's input from users, other processes and the system. The library's are
//! in `src/fuzz`.

use std::{ffi::OsString, os::unix::ffi::OsStringExt as _, path::Path};

use distlock_test_support::fuzz as harness;

use crate::{
    args::{self, Args, Command, Servers},
    clock, connect, format, run,
};

/// The password in the corpus.
const SECRET: &str = "hunter2-9d1f";

fn fuzz(folder: &str, check: impl Fn(&[u8]) -> u64) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(folder);
    harness::fuzz(clock::since_boot, harness::read_corpus(&corpus), |input: &Vec<u8>| check(input));
}

fn check_printable(text: &str) {
    assert!(text.chars().all(format::is_printable), "{text:?}");
}

/// Whether the secret is where a URL has its password: between a colon and an `@`. In a list of
/// URLs it may also be a user name after a comma, which is not a password.
fn is_password(word: &str) -> bool {
    let letters =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphabetic() || c == '+');
    word.match_indices(SECRET).any(|(at, _)| {
        let (before, behind) = (&word[..at], &word[at + SECRET.len()..]);
        let begins = |comma: usize| {
            let next = word[comma + 1..].trim_start();
            next.find("://").is_some_and(|end| letters(&next[..end]))
        };
        let first = before.rmatch_indices(',').map(|(comma, _)| comma).find(|comma| begins(*comma));
        let end = behind
            .match_indices(',')
            .map(|(comma, _)| comma)
            .find(|comma| begins(at + SECRET.len() + comma));
        let user =
            before[first.map_or(0, |comma| comma + 1)..].split_once("://").map(|(_, user)| user);
        user.is_some_and(|user| user.contains(':'))
            && behind[..end.unwrap_or(behind.len())].contains('@')
    })
}

/// An error never repeats a password from a URL, however malformed. Each line of an input is one
/// argument.
///
/// Fault: F74
#[test]
fn command_lines() {
    fuzz("command-lines", |input| {
        let words =
            || input.split(|byte| *byte == b'\n').map(|word| OsString::from_vec(word.to_vec()));
        let secret = words().any(|word| is_password(&word.to_string_lossy()));
        let check = |message: &str| assert!(!secret || !message.contains(SECRET), "{message}");
        match args::parse([OsString::from("distlock")].into_iter().chain(words())) {
            Ok(Args { servers, command }) => {
                // A test must not open files and pipes of this machine.
                let servers = Servers { password_file: None, ..servers };
                let configured = connect::config(&servers);
                if let Err(failure) = &configured {
                    check(&failure.message);
                }
                let planned = match &command {
                    Command::Run(options) => run::has_wait_policy(options),
                    _ => true,
                };
                2 | u64::from(configured.is_ok()) << 2 | u64::from(planned) << 3
            }
            Err(error) => {
                check(&error.to_string());
                u64::from(error.is_help())
            }
        }
    });
}

/// What a wrapper sends to its guardian.
#[test]
fn guardian_messages() {
    fuzz("guardian-messages", |input| {
        let line = String::from_utf8_lossy(input);
        u64::from(run::is_guardian_message(&line))
    });
}

/// What `/proc` says about processes, and texts of other clients in messages.
#[test]
fn process_information_and_messages() {
    fuzz("processes", |input| {
        let text = String::from_utf8_lossy(input);
        check_printable(&format::escape(&text));
        run::parse_process_info(&text)
    });
}
