//! Bytes from outside: real ones, changed at random without end. Nothing may panic, and nothing
//! false may be believed. Only in tests.
//!
//! Plain tests with a corpus, so that they run wherever the others do. `DISTLOCK_FUZZ_SECONDS` is
//! the time for each, and `DISTLOCK_FUZZ_SEED` repeats a run. An input whose outcome was not seen
//! before joins the corpus for the rest of the run, which is what leads further than chance alone.

mod replies;
mod requests;
mod texts;

use std::{path::Path, time::Duration};

use distlock_test_support::fuzz::{self as harness, Input};

use crate::clock;

/// The inputs in a folder of the corpus.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    harness::read_corpus(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(folder),
    )
}

fn fuzz<I: Input>(inputs: Vec<I>, check: impl Fn(&I) -> u64) {
    harness::fuzz(|| Duration::from_nanos(clock::now().as_nanos()), inputs, check);
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
