//! Bytes from outside: real ones, changed at random without end. Nothing may panic, and nothing false may be believed.
//! Only in tests.
//!
//! Plain tests with a corpus, so that they run wherever the others do. `DISTLOCK_FUZZ_SECONDS` is the time for each, and
//! `DISTLOCK_FUZZ_SEED` repeats a run. An input whose outcome was not seen before joins the corpus for the rest of the run, which
//! is what leads further than chance alone.

mod input;
mod replies;
mod requests;
mod texts;

use std::{
    collections::HashSet,
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::Duration,
};

use fastrand::Rng;

use self::input::Input;
use crate::clock;

/// Long enough to show that it works; `.ci/run` gives more.
const SECONDS: f64 = 1.0;
/// Inputs that lead to something new, kept besides those of the corpus.
const FOUND_MAX: usize = 2_000;
/// Inputs between two looks at the clock.
const ROUND: usize = 64;

/// The files of a folder of the corpus, each an input.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(folder);
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

/// Calls `check` with the inputs and with changes of them. It panics where something is wrong, and returns what kind of
/// outcome it was.
fn fuzz<I: Input>(mut inputs: Vec<I>, check: impl Fn(&I) -> u64) {
    let setting = |name| env::var(name).ok().and_then(|text: String| text.parse::<f64>().ok());
    let seconds = setting("DISTLOCK_FUZZ_SECONDS").unwrap_or(SECONDS);
    let seed =
        env::var("DISTLOCK_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    let until = clock::now().saturating_add(Duration::from_secs_f64(seconds));
    let checked = |input: &I| {
        catch_unwind(AssertUnwindSafe(|| check(input)))
            .unwrap_or_else(|_| panic!("this input fails, with DISTLOCK_FUZZ_SEED={seed}:\n{input:?}"))
    };
    let mut seen: HashSet<u64> = inputs.iter().map(checked).collect();
    let (mut dice, real) = (Rng::with_seed(seed), inputs.len());
    let mut tried = 0_u64;
    while tried == 0 || clock::now() < until {
        for _ in 0..ROUND {
            let mut input = inputs[dice.usize(..inputs.len())].clone();
            for _ in 0..=dice.usize(..4) {
                let other = &inputs[dice.usize(..inputs.len())];
                input.change(&mut dice, other);
            }
            if seen.insert(checked(&input)) && inputs.len() < real + FOUND_MAX {
                inputs.push(input);
            }
        }
        tried += ROUND as u64;
    }
    // Only seen with --nocapture.
    print(format_args!("{tried} inputs, {} outcomes, seed {seed}", seen.len()));
}

#[expect(clippy::print_stderr, reason = "these are tests")]
fn print(what: std::fmt::Arguments<'_>) {
    eprintln!("{what}");
}

#[test]
#[should_panic(expected = "this input fails")]
fn what_fails_is_told() {
    // Within a few changes of what is given.
    fuzz(vec![b"aaaaaaaa".to_vec()], |input| {
        assert!(input.len() < 9);
        0
    });
}
