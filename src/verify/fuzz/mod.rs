//! Fuzz targets for input from outside: replies, messages, names, URLs and configurations. Each
//! target changes real inputs at random. Nothing may panic, and no invalid input may be accepted.
//! Only in tests.
//!
//! The targets are ordinary tests with a corpus in `tests/fuzz/corpus`, so they run wherever the
//! other tests do. `DISTLOCK_FUZZ_SECONDS` is the time for each target (default 1). If an input
//! fails, the test prints it with its seed; `DISTLOCK_FUZZ_SEED` repeats the run. An input with a
//! new outcome is added to the inputs of the run, which reaches further than chance alone.

mod replies;
mod requests;
mod texts;

use std::{path::Path, time::Duration};

use distlock_test_support::fuzz::{self as harness, Input};

use crate::sys::clock;

/// Reads the inputs in one folder of the corpus.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    harness::read_corpus(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(folder),
    )
}

fn fuzz<I: Input>(inputs: Vec<I>, check: impl Fn(&I) -> u64) {
    harness::fuzz(|| Duration::from_nanos(clock::now().as_nanos()), inputs, check);
}

#[test]
#[should_panic(expected = "an input failed with")]
fn failing_input_is_reported() {
    // A few changes are enough to make this input too long.
    fuzz(vec![b"aaaaaaaa".to_vec()], |input| {
        assert!(input.len() < 9);
        0
    });
}
