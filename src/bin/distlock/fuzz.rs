//! What people, other processes and the system give to the command, changed at random without end: see `src/fuzz`.

#[path = "../../fuzz/harness.rs"]
mod harness;

use std::{ffi::OsString, os::unix::ffi::OsStringExt as _};

use self::harness::corpus;
use crate::{
    args::{self, Args, Command, Servers},
    clock, connect, run, text,
};

/// The corpus signs in with this.
const SECRET: &str = "hunter2-9d1f";

fn fuzz(folder: &str, check: impl Fn(&[u8]) -> u64) {
    harness::fuzz(clock::since_boot, corpus(folder), |input: &Vec<u8>| check(input));
}

fn plain(text: &str) {
    assert!(text.chars().all(text::is_plain), "{text:?}");
}

/// A password in a URL is not repeated, however wrong the rest is. One argument stands on each line.
#[test]
fn command_lines() {
    fuzz("command-lines", |input| {
        let words = || input.split(|byte| *byte == b'\n').map(|word| OsString::from_vec(word.to_vec()));
        let secret = words().any(|word| {
            let word = word.to_string_lossy().into_owned();
            let behind = word.split_once("://").and_then(|(_, rest)| rest.split_once(':'));
            behind.is_some_and(|(_, rest)| rest.rsplit_once('@').is_some_and(|(password, _)| password.contains(SECRET)))
        });
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
